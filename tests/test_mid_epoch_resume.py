"""A run that is stopped in the middle of an epoch and resumed, against the run that was not."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data import WeightedRandomSampler as Weighted

from ddp_plugin import GlobalMeanLoss, SamplerEpoch, default_callbacks
from ddp_plugin.data.sharded_sampler import ShardedBatchSampler
from ddp_plugin.data.sharding import Shards
from tests.harness import ranks, run_ranks, trainer
from tests.test_training_data import KINDS, Buckets, Shuffles, says

LENGTH = 26
EPOCHS = 3


class Augmented(Dataset[torch.Tensor]):
    """Items are (index, noise): the noise is drawn where the item is fetched."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """Thirteen samples on each rank, others on each."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = 13 * (dist.get_rank() if dist.is_initialized() else 0)
        data = Augmented()
        return (data[index] for index in range(first, first + 13))


class Model(pl.LightningModule):
    """Dropout, so that streams matter; keeps the indices that it was trained on, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)).double()
        self.seen: dict[int, list[list[int]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.setdefault(self.current_epoch, []).append(batch[:, 0].long().tolist())
        return (self.net(batch / LENGTH) - batch[:, 1:]).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in self.state_dict().values()]).clone()


class SavesAt(pl.Callback):
    """Saves after some batches of the whole run."""

    def __init__(self, folder: Path, batches: tuple[int, ...]) -> None:
        self.folder, self.batches, self.num_batches = folder, batches, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.num_batches += 1
        if self.num_batches in self.batches:
            trainer.save_checkpoint(self.folder / f"{self.num_batches}.ckpt")


class Unsized(Shuffles):
    """Does not say how long it is."""

    __len__ = None  # type: ignore[assignment]


def sampler_of(kind: str) -> Any:
    return {
        "unsized": lambda: Unsized("own torch", length=LENGTH),
        "weighted": lambda: Weighted(torch.arange(1.0, LENGTH + 1).tolist(), LENGTH),
        "generator": lambda: RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(4)),
        **{kind: lambda kind=kind: Shuffles(kind, length=LENGTH) for kind in KINDS},
    }[kind]()


def loader_of(kind: str, batch_size: int = 2, length: int = LENGTH, **settings: Any) -> Any:
    if kind == "stream":
        return DataLoader(Stream(), batch_size=batch_size, **settings)
    if kind == "buckets":
        batches = BatchSampler(SequentialSampler(range(LENGTH)), 2, False)
        return DataLoader(Augmented(), batch_sampler=Buckets(batches), **settings)  # type: ignore[arg-type]
    if kind in ("shuffle", "sequence"):
        data = Subset(Augmented(), range(length))
        return DataLoader(data, batch_size=batch_size, shuffle=kind == "shuffle", **settings)
    return DataLoader(Augmented(), batch_size=batch_size, sampler=sampler_of(kind), **settings)


def fit(loader: Any, callbacks: list[Any], resume: Path | None = None, **settings: Any) -> Model:
    pl.seed_everything(11, verbose=False)
    model = Model()
    settings = {"max_epochs": EPOCHS, "callbacks": callbacks} | settings
    trainer(**settings).fit(model, loader, ckpt_path=resume)
    return model


def everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(kind: str, folder: Path, saves: tuple[int, ...], callbacks: Any = default_callbacks, **settings: Any) -> None:
    """Runs once without a stop; then resumes from each checkpoint, in a loader of its own."""
    workers = settings.pop("workers", {}) | {"length": settings.pop("length", LENGTH)}
    whole = fit(loader_of(kind, **workers), [*callbacks(), SavesAt(folder, saves)], **settings)
    per_epoch = len(whole.seen[0])
    for number in saves:
        resumed = fit(loader_of(kind, **workers), callbacks(), folder / f"{number}.ckpt", **settings)
        window = number % per_epoch % settings.get("accumulate_grad_batches", 1) if number % per_epoch else 0
        flat = [batch for epoch in sorted(whole.seen) for batch in whole.seen[epoch]]
        assert [batch for epoch in sorted(resumed.seen) for batch in resumed.seen[epoch]] == flat[number - window :]
        assert torch.equal(resumed.values, whole.values), number


WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize("workers", WORKERS)
@ranks(1, 2, init=False)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(workers: dict[str, Any], tmp_path: Path) -> None:
    check("shuffle", tmp_path, (1, 4, 7, 9), workers=workers)


@ranks(3, init=False)
def test_so_it_is_on_three_ranks(tmp_path: Path) -> None:
    check("shuffle", tmp_path, (1, 3, 5, 6))


@pytest.mark.parametrize("strategy", ["ddp_plugin_bf16", "ddp_plugin_fp16", "ddp_plugin_static"])
@ranks(2, 3, init=False)
def test_so_it_is_with_hooks_and_a_static_graph(strategy: str, tmp_path: Path) -> None:
    check("shuffle", tmp_path, (2, 4), strategy=strategy)


@pytest.mark.parametrize("kind", ["sequence", "weighted", "generator", "unsized", "buckets", *KINDS])
@ranks(2, init=False)
def test_so_it_is_with_every_kind_of_sampler(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path, (3, 7, 10))


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"num_workers": 1}])
@ranks(2, init=False)
def test_so_it_is_with_iterable_datasets(settings: dict[str, Any], tmp_path: Path) -> None:
    check("stream", tmp_path, (3, 7, 9), workers=settings)


@ranks(1, 2, init=False)
def test_a_window_that_was_not_complete_is_trained_on_again(tmp_path: Path) -> None:
    check("shuffle", tmp_path, (2, 4, 7, 8), accumulate_grad_batches=3)


@pytest.mark.parametrize("num_samples", [26, 20])
@ranks(2, 3, init=False)
def test_an_exact_last_batch_is_exact_after_a_resume(num_samples: int, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return default_callbacks(SamplerEpoch("exact"), GlobalMeanLoss())

    check("shuffle", tmp_path, (2, 3, 4), callbacks, length=num_samples)


@pytest.mark.parametrize("kind", ["shuffle", "stream"])
@ranks(2, init=False)
def test_a_resume_of_a_resume_is_the_uninterrupted_run(kind: str, tmp_path: Path) -> None:
    whole = fit(loader_of(kind), default_callbacks())
    fit(loader_of(kind), [*default_callbacks(), SavesAt(tmp_path, (7,))])  # at an epoch's last batch
    again = [*default_callbacks(), SavesAt(tmp_path, (3,))]
    second = fit(loader_of(kind), again, tmp_path / "7.ckpt")
    third = fit(loader_of(kind), default_callbacks(), tmp_path / "3.ckpt")
    assert third.seen == {1: whole.seen[1][3:], 2: whole.seen[2]}
    assert torch.equal(second.values, whole.values)
    assert torch.equal(third.values, whole.values)


@ranks(1, 2, init=False)
def test_a_batch_in_flight_is_not_done(world_size: int, tmp_path: Path) -> None:
    path, last = tmp_path / "in flight.ckpt", -(-LENGTH // (2 * world_size))

    class SavesInside(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == last - 1 and self.current_epoch == 0:
                self.trainer.save_checkpoint(path)
            return super().training_step(batch, batch_idx)

    pl.seed_everything(11, verbose=False)
    whole = SavesInside()
    trainer(max_epochs=EPOCHS, callbacks=default_callbacks()).fit(whole, loader_of("shuffle"))
    resumed = fit(loader_of("shuffle"), default_callbacks(), path)
    assert resumed.seen[0] == whole.seen[0][-1:]
    assert torch.equal(resumed.values, whole.values)


@ranks(2, init=False)
def test_a_scheduled_accumulation_goes_on(tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [*default_callbacks(), pl.callbacks.GradientAccumulationScheduler({0: 2, 1: 3})]

    whole = fit(loader_of("shuffle"), [*callbacks(), SavesAt(tmp_path, (4, 7, 10))])
    for number in (4, 7, 10):
        resumed = fit(loader_of("shuffle"), callbacks(), tmp_path / f"{number}.ckpt")
        assert torch.equal(resumed.values, whole.values), number


@ranks(2, init=False)
def test_loaders_that_are_made_anew_draw_as_in_the_uninterrupted_run(tmp_path: Path) -> None:
    class Reloads(Model):
        def train_dataloader(self) -> Any:
            return loader_of("generator")

    def run(resume: Path | None = None) -> Model:
        pl.seed_everything(11, verbose=False)
        model, settings = Reloads(), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 4}
        trainer(callbacks=[*default_callbacks(), SavesAt(tmp_path, (3,))], **settings).fit(model, ckpt_path=resume)
        return model

    whole = run()
    resumed = run(tmp_path / "3.ckpt")
    assert resumed.seen == whole.seen | {0: whole.seen[0][3:]}


@ranks(2, init=False)
def test_another_global_batch_is_said(tmp_path: Path) -> None:
    fit(loader_of("shuffle"), [SamplerEpoch(), SavesAt(tmp_path, (3,))])
    with says(r"step of the interrupted run held \[4\] samples .* one of this run holds \[8\]"):
        fit(loader_of("shuffle", batch_size=4), [SamplerEpoch()], tmp_path / "3.ckpt")


@ranks(2, init=False)
def test_validation_inside_the_epoch_changes_nothing(tmp_path: Path) -> None:
    class Validates(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch).mean())

    def run(resume: Path | None, *callbacks: Any) -> Model:
        pl.seed_everything(11, verbose=False)
        model = Validates()
        settings: dict[str, Any] = {"max_epochs": EPOCHS, "val_check_interval": 3, "enable_checkpointing": True}
        saves = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1 if resume is None else 0)
        run = trainer(callbacks=[*default_callbacks(), saves, *callbacks], **settings)
        run.fit(model, loader_of("shuffle"), DataLoader(Augmented(), batch_size=4), ckpt_path=resume)
        return model

    whole = run(None)
    for step in (3, 6, 10):
        assert torch.equal(run(tmp_path / f"step={step}.ckpt").values, whole.values), step


class SavesIn(pl.Callback):
    """Saves in a hook of one's choice, once, when a number of batches is over."""

    def __init__(self, hook: str, path: Path, num_batches: int) -> None:
        setattr(self, hook, self._save)
        self.path, self.left, self.saved = path, num_batches, False

    def _save(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.left <= 0 and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.left -= 1


@pytest.mark.parametrize(
    "hook", ["on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_epoch_end", "on_train_end"]
)
@pytest.mark.parametrize("early", [True, False])
@ranks(2, init=False)
def test_a_checkpoint_may_be_saved_in_any_hook(hook: str, early: bool, tmp_path: Path) -> None:
    path = tmp_path / "any.ckpt"
    saves = SavesIn(hook, path, num_batches=0 if hook == "on_train_start" else 8)
    callbacks = [saves, *default_callbacks()] if early else [*default_callbacks(), saves]
    whole = fit(loader_of("shuffle"), callbacks, max_epochs=2 if hook == "on_train_end" else EPOCHS)
    resumed = fit(loader_of("shuffle"), default_callbacks(), path)
    if hook == "on_train_end":
        whole = fit(loader_of("shuffle"), default_callbacks())
    assert torch.equal(resumed.values, whole.values)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end", "on_exception"])
@pytest.mark.parametrize("steps", [3, 9])
@ranks(2, init=False)
def test_a_run_that_ended_inside_an_epoch_goes_on_inside_it(hook: str, steps: int, tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if hook == "on_exception" and trainer.global_step == steps:
                raise KeyboardInterrupt

    path = tmp_path / "end.ckpt"
    whole = fit(loader_of("shuffle"), default_callbacks())
    callbacks = [*default_callbacks(), SavesIn(hook, path, steps), Fails()]
    with contextlib.suppress(SystemExit):
        fit(loader_of("shuffle"), callbacks, max_steps=-1 if hook == "on_exception" else steps)
    resumed = fit(loader_of("shuffle"), default_callbacks(), path)
    assert sum(map(len, resumed.seen.values())) == sum(map(len, whole.seen.values())) - steps
    assert torch.equal(resumed.values, whole.values)


@ranks(2, init=False)
def test_so_does_one_that_was_asked_to_stop(tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 4

    path = tmp_path / "end.ckpt"
    whole = fit(loader_of("shuffle"), default_callbacks())
    stopped = fit(loader_of("shuffle"), [*default_callbacks(), SavesIn("on_train_end", path, 1), Stops()])
    resumed = fit(loader_of("shuffle"), default_callbacks(), path)
    assert len(stopped.seen[0]) in (4, 5)
    assert resumed.seen[0] == whole.seen[0][len(stopped.seen[0]) :]
    assert torch.equal(resumed.values, whole.values)


@ranks(2, init=False)
def test_without_the_callback_a_resumed_run_repeats_samples(tmp_path: Path) -> None:
    whole = fit(loader_of("shuffle"), [SavesAt(tmp_path, (3,))], max_epochs=1)
    with says("not resumable"):
        resumed = fit(loader_of("shuffle"), [], tmp_path / "3.ckpt", max_epochs=1)
    assert resumed.seen[0] != whole.seen[0][3:]


def test_a_run_that_ends_before_its_first_batch_leaves_no_warning_filtered(tmp_path: Path) -> None:
    class StopsAtOnce(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trainer.should_stop = True

    fit(loader_of("shuffle"), [SamplerEpoch(), SavesAt(tmp_path, (3,))])
    before = list(warnings.filters)
    fit(loader_of("shuffle"), [SamplerEpoch(), StopsAtOnce()], tmp_path / "3.ckpt")
    assert warnings.filters == before


@ranks(2, init=False)
def test_another_order_is_refused(tmp_path: Path) -> None:
    def run(seed: int, resume: Path | None = None) -> None:
        loader = DataLoader(Augmented(), batch_size=2, sampler=Hidden(seed))
        fit(loader, [SamplerEpoch(), SavesAt(tmp_path, (3,))], resume)

    run(1)
    run(1, tmp_path / "3.ckpt")
    with pytest.raises(ValueError, match=r"Hidden to draw the order of epoch 0 .*hash differs.*set_epoch"):
        run(2, tmp_path / "3.ckpt")


class Hidden:
    """Draws from something that nobody can find."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed)
        return iter(torch.randperm(LENGTH, generator=generator).tolist())

    def __len__(self) -> int:
        return LENGTH


@ranks(2, init=False)
def test_the_seed_of_orders_is_in_the_checkpoint(tmp_path: Path) -> None:
    def run(seed: int, resume: Path | None = None) -> Model:
        torch.manual_seed(seed)
        model = Model()
        torch.manual_seed(seed)
        fit = trainer(max_epochs=2, callbacks=[SamplerEpoch(), SavesAt(tmp_path, (3,))])
        fit.fit(model, loader_of("shuffle"), ckpt_path=resume)
        return model

    whole, resumed, other = run(1), run(2, tmp_path / "3.ckpt"), run(2)
    assert resumed.seen == {0: whole.seen[0][3:], 1: whole.seen[1]}
    assert other.seen[1] != whole.seen[1]


@ranks(2, init=False)
def test_the_checkpoint_holds_plain_values(tmp_path: Path) -> None:
    fit(loader_of("own numpy"), [SamplerEpoch(), SavesAt(tmp_path, (3,))], max_epochs=1)
    loaded = torch.load(tmp_path / "3.ckpt", weights_only=True)
    assert loaded["callbacks"]["SamplerEpoch"]["num_batches"] == 3


# ------------------------------------------------------------------------------------------------ other world sizes


def _run(folder: str, kind: str, resume: str | None, saves: tuple[int, ...], batch_size: int, **settings: Any) -> Any:
    warnings.filterwarnings("ignore", "SamplerEpoch: an optimizer step of the interrupted run")  # it is meant to differ
    callbacks = default_callbacks(SamplerEpoch("exact"), GlobalMeanLoss())
    model = fit(
        loader_of(kind, batch_size),
        [*callbacks, SavesAt(Path(folder), saves)],
        Path(folder, resume) if resume else None,
        **settings,
    )
    return model.seen, model.trainer.global_step


def global_batches(parts: list[Any], epoch: int) -> list[list[int]]:
    """What all ranks together trained on, step by step; a repeated sample inside one step stood in for none."""
    steps = zip(*(seen.get(epoch, []) for seen, _ in parts), strict=True)
    return [sorted({number for batch in step for number in batch}) for step in steps]


@pytest.mark.parametrize("kind", ["shuffle", "own torch", "buckets"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2), (3, 2)])
def test_on_another_number_of_ranks_each_remaining_sample_is_seen_once(
    before: int, after: int, kind: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"init": False, "folder": str(tmp_path), "kind": kind, "batch_size": 2}
    whole = run_ranks(_run, before, resume=None, saves=(3,), **settings)
    resumed = run_ranks(_run, after, resume="3.ckpt", saves=(), **settings)
    flat = [sum(global_batches(parts, epoch), []) for parts in (whole, resumed) for epoch in range(EPOCHS)]
    first = sum(global_batches(whole, 0)[:3], [])
    assert sorted(first + flat[EPOCHS]) == list(range(LENGTH))  # the rest of the epoch, each once
    for epoch in range(1, EPOCHS):  # then the epochs' orders, dealt out to the new ranks
        blocks = global_batches(resumed, epoch)
        assert sorted(sum(blocks, [])) == list(range(LENGTH))
        if kind == "shuffle":
            generator = torch.Generator().manual_seed(11 + epoch)
            order = torch.randperm(LENGTH, generator=generator).tolist()
            assert blocks == [sorted(order[start : start + 2 * after]) for start in range(0, LENGTH, 2 * after)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_kept_global_batch_continues_step_for_step(accumulate: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init": False, "folder": str(tmp_path), "kind": "shuffle"}
    whole = run_ranks(_run, 2, resume=None, saves=(4,), batch_size=2, accumulate_grad_batches=accumulate, **settings)
    alone = run_ranks(
        _run, 1, resume="4.ckpt", saves=(), batch_size=2, accumulate_grad_batches=2 * accumulate, **settings
    )
    assert alone[0][1] == whole[0][1]  # optimizer steps
    assert sorted(sum(global_batches(alone, 0), [])) == sorted(sum(global_batches(whole, 0)[4:], []))


class NoLength:
    """Does not say how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def _run_unsized(folder: str, resume: bool, batch_size: int = 2) -> list[list[int]]:
    warnings.filterwarnings("ignore", "SamplerEpoch: an optimizer step of the interrupted run")
    loader = DataLoader(Augmented(), batch_size=batch_size, sampler=NoLength())  # type: ignore[arg-type]
    callbacks = [SamplerEpoch("exact"), GlobalMeanLoss(), *([] if resume else [SavesAt(Path(folder), (3,))])]
    return fit(loader, callbacks, Path(folder, "3.ckpt") if resume else None, max_epochs=1).seen[0]


def test_without_a_length_the_global_batch_has_to_stay(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init": False, "folder": str(tmp_path)}
    run_ranks(_run_unsized, 2, resume=False, **settings)
    with pytest.raises(AssertionError, match=r"global batches of 4 samples.*NoLength has no length.*Got 6"):
        run_ranks(_run_unsized, 3, resume=True, **settings)
    alone = run_ranks(_run_unsized, 1, resume=True, batch_size=4, **settings)[0]
    assert sum(alone, []) == list(range(12, LENGTH))


def test_a_stream_is_refused_on_another_number_of_ranks(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"init": False, "folder": str(tmp_path), "kind": "stream", "batch_size": 2}
    run_ranks(_run, 2, resume=None, saves=(3,), **settings)
    with pytest.raises(AssertionError, match=r"2 ranks to go on in the middle of an epoch.*on rank 0 of 1|1 ranks"):
        run_ranks(_run, 1, resume="3.ckpt", saves=(), **settings)


# ------------------------------------------------------------------------------------------------------ the sampler


def sampler() -> ShardedBatchSampler:
    batches = BatchSampler(RandomSampler(range(7)), 1, False)
    return ShardedBatchSampler(batches, Shards(1, 0), "pad", lambda: 3, lambda: 5, None)


def test_one_that_is_not_begun_again_stays_at_its_end() -> None:
    begun, resumed = sampler(), sampler()
    list(begun)
    resumed.resume(begun.position(9, cycles=False))
    assert list(resumed) == []


def test_asked_again_before_its_end_it_gives_the_same_order() -> None:
    generator = torch.Generator().manual_seed(1)
    batches = BatchSampler(RandomSampler(range(7), generator=generator), 1, False)
    sampler = ShardedBatchSampler(batches, Shards(1, 0), "pad", lambda: 3, lambda: 5, None)
    iter(sampler)
    first = [next(iterator) for iterator in [iter(sampler)] for _ in range(4)]
    whole = list(sampler)
    assert whole[:4] == first
    assert list(sampler) != whole  # the next pass


def test_a_position_in_a_later_pass_is_found_again() -> None:

    whole = sampler()
    delivered = [batch for _ in range(3) for batch in whole]  # a loader that is cycled: three passes in one epoch
    for done in range(1, 21):
        begun = sampler()
        for _ in range(-(-done // 7)):
            list(begun)
        resumed = sampler()
        position = begun.position(done)
        assert position is not None
        resumed.resume(position)
        rest = [batch for _ in range(3) for batch in resumed]
        assert rest[: 21 - done] == delivered[done:]
