"""Ranks draw differently, alike where they must, the same again, and nothing between two steps shifts a stream."""

import inspect
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_plugin import ExactEvaluation, PerRankSeed, SamplerEpoch
from tests.harness import ranks, run_ranks, trainer

LENGTH = 8


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()


class Augmented(Dataset[torch.Tensor]):
    """Items are (index, three numbers drawn by whoever fetches them)."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *_draw()], dtype=torch.float64)


class AugmentedStream(IterableDataset[torch.Tensor]):
    """Four samples, others on each rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = 4 * int(os.environ["RANK"])
        return (torch.tensor([index, *_draw()], dtype=torch.float64) for index in range(first, first + 4))


class Noisy(pl.LightningModule):
    """A float64 model with dropout and device-side noise, which keeps all that it drew and saw, by epoch."""

    def __init__(self, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.asks_for_steps = asks_for_steps
        self.order: dict[int, list[int]] = {}
        self.augmentation: list[tuple[float, ...]] = []
        self.steps: list[tuple[float, ...]] = []
        self.transfers: list[float] = []
        self.evaluated: list[tuple[float, ...]] = []

    def configure_model(self) -> None:
        if not hasattr(self, "layer"):
            self.layer = torch.nn.Linear(4, 4, dtype=torch.float64)
            self.initial = self.layer.weight.detach().clone()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if isinstance(batch, torch.Tensor):
            batch[..., 0] += torch.rand((), dtype=torch.float64)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        items = batch if isinstance(batch, torch.Tensor) else torch.cat([leaf for leaf in batch if leaf is not None])
        self.steps.append(_draw())
        self.transfers.append(items[0, 0].item() % 1)
        self.augmentation.extend(tuple(item[1:].tolist()) for item in items)
        # The transfer added a number in [0, 1) to the index.
        self.order.setdefault(self.current_epoch, []).extend(items[:, 0].floor().long().tolist())
        return torch.nn.functional.dropout(self.layer(items / LENGTH), 0.5).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.evaluated.append((*_draw(), *batch.flatten().tolist()))

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return batch[:, 0].floor()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0  # makes Lightning build the loaders here and now
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(num_workers: int = 0, **settings: Any) -> Any:
    return DataLoader(Augmented(), **({"batch_size": 2, "num_workers": num_workers, "shuffle": True} | settings))


def _fit(
    loader: Any,
    val: Any = None,
    callback: Callback | None = None,
    others: tuple[Callback, ...] = (),
    ckpt_path: str | None = None,
    asks_for_steps: bool = False,
    tells_epoch: bool = True,
    **settings: Any,
) -> Noisy:
    module = Noisy(asks_for_steps)
    callbacks = [*others, *([SamplerEpoch()] if tells_epoch else []), *([callback] if callback is not None else [])]
    trainer(**({"max_epochs": 2, "callbacks": callbacks} | settings)).fit(module, loader, val, ckpt_path=ckpt_path)
    return module


def _folds(raises: bool) -> list[list[int]]:
    pl.seed_everything(3, verbose=False)
    folds = []
    for _ in range(2):
        folds.append(torch.randperm(20).tolist())
        if raises:
            with pytest.raises(ZeroDivisionError):
                _fit(_loader(), callback=PerRankSeed(), others=(_Raises(),))
        else:
            _fit(_loader(), callback=PerRankSeed())
    return [*folds, torch.randperm(20).tolist()]


class _Raises(Callback):
    def on_train_batch_end(self, *arguments: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("raises", [False, True])
def test_after_a_run_the_ranks_agree_again_and_go_on_drawing(raises: bool) -> None:
    first, second = run_ranks(_folds, 2, init=False, raises=raises)
    assert first == second
    assert len({tuple(fold) for fold in first}) == 3


# ---------------------------------------------------------------------------- differ by rank and epoch, and repeat


def _draws(num_workers: int, callback: bool, persistent: bool = False) -> dict[str, Any]:
    pl.seed_everything(7, verbose=False)
    loader = _loader(num_workers, persistent_workers=persistent)
    module = _fit(loader, callback=PerRankSeed() if callback else None)
    return {
        "initial": module.initial.tolist(),
        "steps": module.steps,
        "augmentation": module.augmentation,
        "order": module.order,
        "final": module.layer.weight.tolist(),
    }


def _distinct(draws: list[tuple[float, ...]]) -> bool:
    """Whether no generator gave a number twice."""
    return all(len(set(numbers)) == len(draws) for numbers in zip(*draws, strict=True))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_streams_differ_by_rank_and_epoch_and_repeat(num_workers: int) -> None:
    first, again = (run_ranks(_draws, 2, init=False, num_workers=num_workers, callback=True) for _ in range(2))
    assert first == again
    assert first[0]["initial"] == first[1]["initial"]
    assert first[0]["final"] == first[1]["final"]
    for kind, number in (("steps", 4), ("augmentation", LENGTH)):
        assert len(first[0][kind]) == number
        assert _distinct(first[0][kind] + first[1][kind])
    for epoch in range(2):
        assert sorted(first[0]["order"][epoch] + first[1]["order"][epoch]) == list(range(LENGTH))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_the_callback_ranks_draw_the_same(num_workers: int) -> None:
    ranks_draws = run_ranks(_draws, 2, init=False, num_workers=num_workers, callback=False)
    assert ranks_draws[0]["steps"] == ranks_draws[1]["steps"]
    assert ranks_draws[0]["augmentation"] == ranks_draws[1]["augmentation"]


def test_workers_change_no_number_of_a_sample() -> None:
    alone = run_ranks(_draws, 2, init=False, num_workers=0, callback=True)
    for num_workers, persistent in ((1, False), (1, True), (2, True)):
        settings = {"num_workers": num_workers, "persistent": persistent}
        with_workers = run_ranks(_draws, 2, init=False, callback=True, **settings)
        for rank in range(2):
            for kind in ("order", "augmentation", "steps"):
                assert alone[rank][kind] == with_workers[rank][kind], (kind, settings)
    assert _distinct(alone[0]["augmentation"] + alone[1]["augmentation"])


# -------------------------------------------------------------------------------------------------------- the seed


def _unseeded(seed: int | None, callback: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(int(os.environ["RANK"]))  # ranks that differ from the start, and no PL_GLOBAL_SEED
    module = _fit(_loader(), callback=PerRankSeed(seed) if callback else None)
    return module.initial.tolist(), module.steps, module.order


def test_a_seed_that_rank_0_draws_holds_for_all_ranks() -> None:
    first, second = (run_ranks(_unseeded, 2, init=False, seed=None, callback=True) for _ in range(2))
    assert first[0][0] == first[1][0]  # initialised alike
    assert _distinct(first[0][1] + first[1][1] + second[0][1] + second[1][1])  # and another seed in the next run
    without = run_ranks(_unseeded, 2, init=False, seed=None, callback=False)
    assert without[0][0] != without[1][0]


def test_a_seed_that_is_given_repeats() -> None:
    first, second = (run_ranks(_unseeded, 2, init=False, seed=3, callback=True) for _ in range(2))
    assert first == second


@ranks(1, 2, init=False)
def test_the_environment_is_left_alone() -> None:
    pl.seed_everything(11, workers=True, verbose=False)
    before = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
    _fit(_loader(1), _loader(shuffle=False), callback=PerRankSeed(5))
    assert {name: os.environ.get(name) for name in before} == before


@ranks(2, 3, init=False)
def test_a_seed_that_depends_on_the_rank_is_refused_on_every_rank() -> None:
    rank = int(os.environ["RANK"])
    with pytest.raises(ValueError, match=r"PerRankSeed\(seed=.*by rank \[4, 5"):
        _fit(_loader(), callback=PerRankSeed(4 + rank))
    pl.seed_everything(rank, verbose=False)
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED.*DistributedSampler.*by rank \['0', '1'"):
        _fit(_loader(), callback=PerRankSeed(4))


def _seen(by_rank: bool) -> list[int]:
    warnings.filterwarnings("ignore", message="The ranks are not set up alike: PL_GLOBAL_SEED")
    pl.seed_everything(int(os.environ["RANK"]) if by_rank else 0, verbose=False)
    return _fit(DataLoader(Augmented(), batch_size=1, shuffle=True), max_epochs=1, tells_epoch=False).order[0]


def test_why_it_is_refused() -> None:
    def missed(by_rank: bool) -> set[int]:
        return set(range(LENGTH)).difference(*run_ranks(_seen, 2, init=False, by_rank=by_rank))

    assert not missed(by_rank=False)
    assert missed(by_rank=True)


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**63, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_a_seed_is_checked_at_construction(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="seed"):
        PerRankSeed(seed)


def test_the_constructor_can_be_read_from_its_annotations() -> None:
    assert inspect.signature(PerRankSeed).parameters["seed"].annotation == (int | None)
    assert inspect.signature(SamplerEpoch).parameters["last_batch"].annotation is str


@ranks(2, init=False)
def test_another_strategy_on_several_processes_is_refused() -> None:
    with pytest.raises(TypeError, match="CustomDDPStrategy"):
        _fit(_loader(), others=(PerRankSeed(1),), strategy="ddp")


# ---------------------------------------------------------------------------------------------- the order of samples


class Shuffles:
    """A sampler of the user's own, with numpy's or python's global generator."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        if self.kind == "numpy":
            return iter(np.random.permutation(LENGTH).tolist())
        return iter(random.sample(range(LENGTH), LENGTH))

    def __len__(self) -> int:
        return LENGTH


class ShuffledBatches:
    """A batch sampler of the user's own."""

    batch_size = 2
    drop_last = False

    def __iter__(self) -> Iterator[list[int]]:
        for row in np.random.permutation(LENGTH).reshape(-1, 2):
            yield row.tolist()

    def __len__(self) -> int:
        return LENGTH // 2


SAMPLERS: dict[str, Any] = {
    "subset": lambda: SubsetRandomSampler(range(LENGTH)),
    "weighted": lambda: WeightedRandomSampler([1.0] * LENGTH, LENGTH, replacement=False),
    "numpy": lambda: Shuffles("numpy"),
    "random": lambda: Shuffles("random"),
}


class RanksDiffer(Callback):
    """What any seeding by rank does to samplers that draw from a global generator."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        value = 100 * trainer.current_epoch + trainer.global_rank
        random.seed(value)
        np.random.seed(value)
        torch.manual_seed(value)

    on_train_start = on_train_epoch_start


def _sampled(kind: str, num_workers: int, callback: bool, tells_epoch: bool = False) -> dict[int, list[int]]:
    loader = _loader(num_workers, shuffle=None, sampler=SAMPLERS[kind]())
    seed = PerRankSeed(1) if callback else None
    return _fit(loader, callback=seed, others=(RanksDiffer(),), tells_epoch=tells_epoch).order


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", list(SAMPLERS))
@pytest.mark.parametrize(("callback", "tells_epoch"), [(True, False), (False, True), (True, True)])
def test_shards_of_a_random_order_cover_it(kind: str, num_workers: int, callback: bool, tells_epoch: bool) -> None:
    settings = {"num_workers": num_workers, "callback": callback, "tells_epoch": tells_epoch}
    orders = run_ranks(_sampled, 2, init=False, kind=kind, **settings)
    for epoch in range(2):
        assert sorted(orders[0][epoch] + orders[1][epoch]) == list(range(LENGTH))
    assert orders[0][0] != orders[0][1]


def test_without_the_callback_ranks_that_differ_miss_samples() -> None:
    orders = run_ranks(_sampled, 2, init=False, kind="numpy", num_workers=0, callback=False)
    assert any(len(set(orders[0][epoch] + orders[1][epoch])) < LENGTH for epoch in range(2))


@ranks(2, init=False)
def test_batch_samplers_and_replacement_draw_alike_on_all_ranks() -> None:
    import torch.distributed as dist

    for loader in (
        DataLoader(Augmented(), batch_sampler=ShuffledBatches()),  # type: ignore[arg-type]
        _loader(shuffle=None, sampler=RandomSampler(range(LENGTH), replacement=True, num_samples=40)),
        _loader(shuffle=None, batch_size=2, sampler=WeightedRandomSampler([1.0, 3.0] * 4, 40)),
    ):
        order = _fit(loader, callback=PerRankSeed(1), tells_epoch=False, use_distributed_sampler=False).order
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, order)
        assert orders[0] == orders[1]
        assert order[0] != order[1]


@pytest.mark.parametrize("tells_epoch", [False, True])
@ranks(1, init=False)
def test_leaves_and_cycles_of_a_combined_loader_draw_on_their_own(tells_epoch: bool) -> None:
    long = DataLoader(Augmented(), batch_size=1, sampler=RandomSampler(range(LENGTH), num_samples=2 * LENGTH))
    loader = CombinedLoader([_loader(1, batch_size=1), _loader(0, batch_size=1), long], "max_size_cycle")
    settings: dict[str, Any] = {"tells_epoch": tells_epoch, "use_distributed_sampler": tells_epoch}
    order = _fit(loader, callback=PerRankSeed(1), max_epochs=1, **settings).order[0]
    first, second = order[0::3], order[1::3]
    for leaf in (first, second):
        assert sorted(leaf[:LENGTH]) == sorted(leaf[LENGTH:]) == list(range(LENGTH))
        assert leaf[:LENGTH] != leaf[LENGTH:]
    assert first != second


def _evaluated(callback: bool) -> list[list[int]]:
    """Indices that this rank saw in a test and in predictions from two loaders, after a fit in the same process."""
    module = Noisy()
    callbacks: list[Callback] = [RanksDiffer(), *([PerRankSeed(1)] if callback else [])]
    run = trainer(callbacks=callbacks, use_distributed_sampler=True)
    run.fit(module, _loader())
    run.test(module, _loader(shuffle=None, sampler=Shuffles("numpy")), verbose=False)
    tested = [int(number) for step in module.evaluated for number in step[3::4]]
    predicted = run.predict(module, [_loader(shuffle=None, sampler=SAMPLERS[kind]()) for kind in ("random", "subset")])
    return [tested, *(torch.cat(batches).int().tolist() for batches in predicted)]


def test_shards_of_an_evaluation_in_random_order_cover_it() -> None:
    first, second = run_ranks(_evaluated, 2, init=False, callback=True)
    for shards in zip(first, second, strict=True):
        assert sorted(shards[0] + shards[1]) == list(range(LENGTH))
    first, second = run_ranks(_evaluated, 2, init=False, callback=False)
    assert any(len({*shards[0], *shards[1]}) < LENGTH for shards in zip(first, second, strict=True))


# -------------------------------------------------------------------------------------- nothing else shifts a stream


class Intrudes(Callback):
    """Draws wherever it can before a step, and makes an iterator of its own, which takes a seed for its workers."""

    def _intrude(self, *_: Any) -> None:
        _draw()
        iter(_loader())

    on_train_batch_start = on_train_batch_end = on_train_epoch_start = on_train_epoch_end = _intrude
    on_train_start = on_fit_start = on_sanity_check_start = _intrude


def _weights(num_workers: int, callback: bool, data: str, variants: list[dict[str, Any]]) -> list[Any]:
    weights = []
    for variant in variants:
        pl.seed_everything(7, verbose=False)
        variant = dict(variant)
        val = _loader(num_workers, shuffle=False) if variant.pop("val", False) else None
        others = (Intrudes(),) if variant.pop("intrudes", False) else ()
        loader = _loader(num_workers) if data == "map" else DataLoader(AugmentedStream(), num_workers=num_workers)
        module = _fit(loader, val, PerRankSeed() if callback else None, others, num_sanity_val_steps=0, **variant)
        weights.append(module.layer.weight.tolist())
    return weights


VARIANTS: list[dict[str, Any]] = [
    {"val": False},
    {"val": True},
    {"val": True, "val_check_interval": 1},
    {"val": True, "limit_val_batches": 1},
    {"intrudes": True},
]


def _weights_with_sanity_check(num_workers: int, data: str) -> Any:
    pl.seed_everything(7, verbose=False)
    loader = _loader(num_workers) if data == "map" else DataLoader(AugmentedStream(), num_workers=num_workers)
    module = _fit(loader, _loader(num_workers, shuffle=False), PerRankSeed(), num_sanity_val_steps=-1)
    assert len(module.evaluated) == 6
    return module.layer.weight.tolist()


@pytest.mark.parametrize("data", ["map", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_validation_changes_nothing_in_training(num_workers: int, data: str) -> None:
    settings = {"num_workers": num_workers, "data": data}
    for weights in run_ranks(_weights, 2, init=False, callback=True, variants=VARIANTS, **settings):
        assert all(other == weights[0] for other in weights[1:])
        first = weights[0]
    assert run_ranks(_weights_with_sanity_check, 2, init=False, **settings) == [first, first]


@ranks(2, init=False)
def test_a_sanity_check_does_not_change_what_validation_draws() -> None:
    runs = []
    for num_sanity_val_steps in (0, 2):
        val = _loader(1, shuffle=None, sampler=SubsetRandomSampler(range(LENGTH)))
        module = _fit(_loader(), val, PerRankSeed(1), num_sanity_val_steps=num_sanity_val_steps)
        runs.append(module.evaluated)
    assert len(runs[0]) == 4
    assert runs[0] == runs[1][2:]
    assert runs[0][0] != runs[0][2]  # the next epoch's


def test_without_the_callback_validation_changes_training() -> None:
    for weights in run_ranks(_weights, 2, init=False, num_workers=0, callback=False, data="map", variants=VARIANTS):
        assert all(other != weights[0] for other in weights[1:])


def _beside_exact_evaluation(seed_first: bool) -> tuple[Any, list[int]]:
    callbacks = [ExactEvaluation(), PerRankSeed(1)]
    module = Noisy()
    run = trainer(callbacks=callbacks[::-1] if seed_first else callbacks, num_sanity_val_steps=0)
    run.fit(module, _loader(), _loader(shuffle=None, sampler=SubsetRandomSampler(range(LENGTH - 1))))
    return module.layer.weight.tolist(), [int(number) for step in module.evaluated for number in step[3::4]]


def test_it_goes_with_exact_evaluation_in_either_order() -> None:
    (first, second), swapped = (run_ranks(_beside_exact_evaluation, 2, init=False, seed_first=x) for x in (False, True))
    for shards in ((first[1], second[1]), (swapped[0][1], swapped[1][1])):
        assert sorted(shards[0] + shards[1]) == list(range(LENGTH - 1))
    assert first[0] == second[0] == swapped[0][0] == swapped[1][0]


def _stepwise(batch_hook: bool) -> list[tuple[float, ...]]:
    class Iterates(Noisy):
        def training_step(self, dataloader_iter: Any) -> torch.Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            return super().training_step(batch, 0)

    pl.seed_everything(7, verbose=False)
    module = Iterates() if batch_hook else Noisy()
    trainer(max_epochs=2, callbacks=[PerRankSeed()]).fit(module, _loader())
    return module.steps


def test_steps_that_fetch_for_themselves_differ_too() -> None:
    for steps in run_ranks(_stepwise, 2, init=False, batch_hook=True):
        assert _distinct(steps)


# -------------------------------------------------------------------------------------------------------------- resume


def _resume(
    folder: str,
    data: str,
    num_workers: int,
    callback: bool,
    seeded: bool = True,
    asks_for_steps: bool = False,
    tells_epoch: bool = True,
) -> tuple[Any, Any, Any]:
    def run(ckpt_path: str | None) -> Noisy:
        if seeded:
            pl.seed_everything(7, verbose=False)
        elif ckpt_path is not None:
            torch.manual_seed(123)
        if data == "map":
            loader = _loader(num_workers)
        elif data == "numpy sampler":
            loader = _loader(num_workers, shuffle=None, sampler=Shuffles("numpy"))
        else:
            loader = DataLoader(AugmentedStream(), num_workers=num_workers)
        checkpoint = ModelCheckpoint(folder, save_top_k=-1 if ckpt_path is None else 0, filename="{epoch}")
        return _fit(
            loader,
            callback=PerRankSeed() if callback else None,
            others=(checkpoint,),
            ckpt_path=ckpt_path,
            asks_for_steps=asks_for_steps,
            tells_epoch=tells_epoch,
            use_distributed_sampler=tells_epoch,
            enable_checkpointing=True,
            max_epochs=3,
        )

    whole = run(None)
    resumed = run(str(Path(folder, "epoch=0.ckpt")))
    parts = len(whole.steps) // 3
    assert whole.steps[parts:] == resumed.steps or not callback
    return whole.layer.weight.tolist(), resumed.layer.weight.tolist(), whole.order[1] == resumed.order[1]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("data", ["map", "numpy sampler", "iterable"])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path: Path, data: str, num_workers: int) -> None:
    settings = {"folder": str(tmp_path), "data": data, "num_workers": num_workers, "callback": True}
    for whole, resumed, _ in run_ranks(_resume, 2, init=False, **settings):
        assert whole == resumed


@pytest.mark.parametrize("num_workers", [0, 1])
def test_so_it_does_when_lightning_built_the_loaders_early(tmp_path: Path, num_workers: int) -> None:
    settings = {"folder": str(tmp_path), "num_workers": num_workers, "callback": True, "asks_for_steps": True}
    for whole, resumed, _ in run_ranks(_resume, 2, init=False, data="map", **settings):
        assert whole == resumed


def test_so_it_does_then_without_another_callbacks_help(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "num_workers": 1, "callback": True, "asks_for_steps": True}
    for whole, resumed, _ in run_ranks(_resume, 2, init=False, data="numpy sampler", tells_epoch=False, **settings):
        assert whole == resumed


def test_and_with_a_seed_that_was_drawn(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "data": "map", "num_workers": 0, "callback": True, "seeded": False}
    for whole, resumed, _ in run_ranks(_resume, 2, init=False, **settings):
        assert whole == resumed


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_the_callback_it_does_not(tmp_path: Path, num_workers: int) -> None:
    settings = {"folder": str(tmp_path), "data": "map", "num_workers": num_workers, "callback": False}
    for whole, resumed, same_order in run_ranks(_resume, 2, init=False, **settings):
        assert same_order  # which is SamplerEpoch's
        assert whole != resumed


def _resume_inside_an_epoch(folder: str) -> None:
    runs = []
    for ckpt_path in (None, str(Path(folder, "step=1.ckpt"))):
        checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        loader = DataLoader(SameEverywhere(), num_workers=1)
        run = _fit(
            loader, callback=PerRankSeed(7), others=(checkpoint,), ckpt_path=ckpt_path, enable_checkpointing=True
        )
        runs.append((run.steps, run.transfers))
    (steps, transfers), resumed = runs
    assert len(steps) == 8
    assert (steps[1:], transfers[1:]) == resumed


class SameEverywhere(Augmented):
    """Which sample comes is not this callback's: all are zero, so that only what is drawn shows."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(4, dtype=torch.float64)


def test_a_run_that_is_resumed_inside_an_epoch_draws_what_is_left(tmp_path: Path) -> None:
    run_ranks(_resume_inside_an_epoch, 2, init=False, folder=str(tmp_path))


@ranks(1, init=False)
def test_another_seed_than_the_checkpoints_is_said(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    _fit(_loader(), callback=PerRankSeed(1), others=(checkpoint,), enable_checkpointing=True, max_epochs=1)
    with pytest.warns(UserWarning, match=r"seed 1, this one from 2.*PerRankSeed\(seed=1\)"):
        _fit(_loader(), others=(PerRankSeed(2),), ckpt_path=str(tmp_path / "last.ckpt"), max_epochs=2)


# -------------------------------------------------------------------------------------------------------- on the side


def _init_by_user(worker_id: int) -> None:
    np.random.seed(worker_id)


@ranks(1, init=False)
def test_the_users_worker_init_function_is_called_after_the_worker_is_seeded() -> None:
    pl.seed_everything(7, workers=True, verbose=False)  # Lightning adds its own where there is none
    loader = DataLoader(AugmentedStream(), num_workers=1, worker_init_fn=_init_by_user)
    module = _fit(loader, callback=PerRankSeed(), max_epochs=1)
    assert module.augmentation[0][1] == np.random.RandomState(0).rand()


@ranks(2, init=False)
def test_a_test_draws_the_same_after_a_fit_and_by_itself() -> None:
    results = []
    for fits in (True, False):
        run = trainer(callbacks=[PerRankSeed(1)])
        module = Noisy()
        if fits:
            run.fit(module, _loader())
        run.test(module, _loader(1, shuffle=False), verbose=False)
        results.append(module.evaluated)
    assert results[0] == results[1]
    assert _distinct(results[0])


def test_one_process_needs_no_particular_strategy() -> None:
    runs = []
    for limit_val_batches in (0, 1.0):
        settings: dict[str, Any] = {"strategy": "auto", "devices": 1, "limit_val_batches": limit_val_batches}
        module = _fit(_loader(1), _loader(shuffle=False), PerRankSeed(3), **settings)
        assert sorted(module.order[0]) == list(range(LENGTH))
        runs.append((module.steps, module.augmentation, module.order, module.layer.weight.tolist()))
    assert runs[0] == runs[1]
    assert _distinct(runs[0][0])
    assert _distinct(runs[0][1])
