"""Which sample is trained on when, against one process that asks the same sampler."""

import contextlib
import itertools
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchmetrics import SumMetric

from ddp_plugin import DecisionSync, GlobalMeanLoss, PerRankSeed, SamplerEpoch, default_callbacks
from ddp_plugin.data.orders import draw_lazily, draw_order
from tests.harness import ranks, trainer

LENGTH = 11
EPOCHS = 3


class Keeps(pl.LightningModule):
    """Keeps the numbers of each batch, by epoch; trains a parameter so that a Trainer accepts it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.batches: dict[int, list[list[int]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        items = batch if isinstance(batch, list) else [batch]
        self.batches.setdefault(self.current_epoch, []).append([int(n) for item in items for n in item.flatten()])
        return (self.weight * torch.cat([item.flatten() for item in items]).double()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.125)


def steps_of(loader: Any, callbacks: list[Any] | None = None, epochs: int = EPOCHS, **settings: Any) -> Any:
    """Returns ``{epoch: [[batch of rank 0, batch of rank 1, ...] of each step]}``."""
    module = Keeps()
    callbacks = [SamplerEpoch()] if callbacks is None else callbacks
    trainer(max_epochs=epochs, callbacks=callbacks, **settings).fit(module, loader)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, module.batches)
    return {
        epoch: [list(step) for step in zip(*(part[epoch] for part in everyone), strict=True)] for epoch in everyone[0]
    }


def joined(steps: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(number for batch in step for number in batch) for step in steps]


def blocks(order: list[int], size: int) -> list[list[int]]:
    return [sorted(order[start : start + size]) for start in range(0, len(order), size)]


def says(match: str) -> Any:
    """Expects a warning where it is given: on rank 0."""
    return pytest.warns(UserWarning, match=match) if os.environ["RANK"] == "0" else contextlib.nullcontext()


# ------------------------------------------------------------------------------------------------- the user's order


class Backwards:
    """A sampler of the user's own, which draws nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH - 1, -1, -1))

    def __len__(self) -> int:
        return LENGTH


@pytest.mark.parametrize("num_workers", [0, 1])
@ranks(1, 2, 3, init=False)
def test_a_fixed_order_is_kept(world_size: int, num_workers: int) -> None:
    orders = {"sequential": list(range(LENGTH)), "own": list(Backwards())}
    for kind, order in orders.items():
        loader = DataLoader(
            range(LENGTH),  # type: ignore[arg-type]
            batch_size=2,
            sampler=Backwards() if kind == "own" else None,
            num_workers=num_workers,
        )
        drops = order[: LENGTH - LENGTH % (2 * world_size)]
        for steps in steps_of(loader, [SamplerEpoch("drop")]).values():
            assert joined(steps) == blocks(drops, 2 * world_size)
        padded = order + order[: -LENGTH % world_size]
        for steps in steps_of(loader).values():
            assert joined(steps) == blocks(padded, 2 * world_size)
        if world_size == 1:
            assert steps[0] == [order[:2]]


@ranks(2, init=False)
def test_without_the_callback_a_fixed_order_is_shuffled() -> None:
    steps = steps_of(DataLoader(range(LENGTH + 1), batch_size=2), [])  # type: ignore[arg-type]
    assert all(joined(epoch) != blocks(list(range(LENGTH + 1)), 4) for epoch in steps.values())


@ranks(1, 2, 3, init=False)
def test_a_plain_shuffle_is_that_of_torchs_distributed_sampler(world_size: int) -> None:
    pl.seed_everything(5, verbose=False)
    steps = steps_of(DataLoader(range(LENGTH), batch_size=2, shuffle=True))  # type: ignore[arg-type]
    for rank in range(world_size):
        sampler: DistributedSampler[int] = DistributedSampler(range(LENGTH), world_size, rank, seed=5)  # type: ignore[arg-type]
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            assert [step[rank] for step in steps[epoch]] == list(BatchSampler(sampler, 2, drop_last=False))


@ranks(2, init=False)
def test_replacement_and_number_of_samples_are_kept() -> None:
    sampler = RandomSampler(range(LENGTH), replacement=True, num_samples=40)
    steps = steps_of(DataLoader(range(LENGTH), batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    for epoch in steps.values():
        seen = sum(joined(epoch), [])
        assert len(seen) == 40
        assert len(set(seen)) <= LENGTH
    without = steps_of(DataLoader(range(LENGTH), batch_size=2, sampler=sampler), [])  # type: ignore[arg-type]
    assert len(sum(joined(without[0]), [])) != 40


@ranks(2, init=False)
def test_weights_are_kept() -> None:
    weights = [0.0] * 5 + [1.0] * 6
    sampler = WeightedRandomSampler(weights, 40)
    for steps in steps_of(DataLoader(range(LENGTH), batch_size=2, sampler=sampler)).values():  # type: ignore[arg-type]
        seen = sum(joined(steps), [])
        assert len(seen) == 40
        assert set(seen) <= set(range(5, 11))


class Shuffles:
    """A sampler with a source of randomness of the user's choice."""

    def __init__(self, kind: str, seed: int = 0, length: int = LENGTH) -> None:
        self.kind, self.length = kind, length
        self.torch = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.python = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        if self.kind == "global numpy":
            return iter(np.random.permutation(self.length).tolist())
        if self.kind == "global python":
            return iter(random.sample(range(self.length), self.length))
        if self.kind == "own numpy":
            return iter(self.numpy.permutation(self.length).tolist())
        if self.kind == "own python":
            return iter(self.python.sample(range(self.length), self.length))
        return iter(torch.randperm(self.length, generator=self.torch).tolist())

    def __len__(self) -> int:
        return self.length


KINDS = ("global numpy", "global python", "own numpy", "own python", "own torch")


def samplers(kind: str, seed: int = 0) -> Any:
    if kind == "subset":
        return SubsetRandomSampler(range(LENGTH))
    if kind == "shuffle with a generator":
        return RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(seed))
    return Shuffles(kind, seed)


@pytest.mark.parametrize("kind", [*KINDS, "subset", "shuffle with a generator"])
@ranks(2, init=False)
def test_ranks_whose_generators_differ_agree_on_an_order(kind: str) -> None:
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    # Also with generators of their own that were seeded by rank, which anybody may do by mistake.
    loader = DataLoader(range(LENGTH), batch_size=2, sampler=samplers(kind, seed=rank))  # type: ignore[arg-type]
    steps = steps_of(loader, [SamplerEpoch("drop")])
    for epoch in steps.values():
        assert len(set(sum(joined(epoch), []))) == 8
    assert len({tuple(map(tuple, joined(epoch))) for epoch in steps.values()}) == EPOCHS


def test_drawing_an_order_moves_no_global_generator() -> None:
    def drawn(kinds: tuple[str, ...]) -> tuple[float, ...]:
        torch.manual_seed(3)
        np.random.seed(3)
        random.seed(3)
        for kind in kinds:
            draw_order(samplers(kind), seed=1, epoch=0)
        return torch.rand(()).item(), np.random.rand(), random.random()

    assert drawn((*KINDS, "subset")) == drawn(())


class Counts(Backwards):
    """Another order each time it is asked, by a count of its own."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([(number + self.asked) % LENGTH for number in range(LENGTH)])


@ranks(1, 2, init=False)
def test_a_sampler_is_asked_once_per_epoch(world_size: int) -> None:
    sampler = Counts()
    steps = steps_of(DataLoader(range(LENGTH), batch_size=1, sampler=sampler), [SamplerEpoch("drop")])  # type: ignore[arg-type]
    assert sampler.asked == EPOCHS
    for epoch in range(EPOCHS):
        expected = [(number + epoch + 1) % LENGTH for number in range(LENGTH - LENGTH % world_size)]
        assert joined(steps[epoch]) == blocks(expected, world_size)


# ------------------------------------------------------------------------------------------------- the user's batches


class Buckets:
    """A batch sampler of the user's own: batches of unequal size, that must not be torn apart."""

    def __init__(self, batches: Any = ([0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10])) -> None:
        self.own = list(batches)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


class FromBase(BatchSampler):
    """A subclass with a constructor of its own, which nobody else could call."""

    def __init__(self, secret: str) -> None:
        super().__init__(SequentialSampler(range(LENGTH)), 2, False)
        self.secret = secret


@ranks(2, init=False)
def test_batches_of_a_batch_sampler_stay_whole() -> None:
    loader = DataLoader(range(LENGTH), batch_sampler=Buckets())  # type: ignore[arg-type]
    assert steps_of(loader, [SamplerEpoch("drop")])[0] == [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8, 9]]]
    assert steps_of(loader)[1] == [[[0, 1, 2], [3]], [[4, 5], [6, 7, 8, 9]], [[10], [0, 1, 2]]]
    loader = DataLoader(range(LENGTH), batch_sampler=FromBase("x"))  # type: ignore[arg-type]
    assert steps_of(loader)[0][:2] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    with pytest.raises(TypeError):
        steps_of(loader, [])


@ranks(1, 2, init=False)
def test_torchs_batch_sampler_keeps_its_batches(world_size: int) -> None:
    loader = DataLoader(range(12), batch_sampler=BatchSampler(SequentialSampler(range(12)), 3, False))  # type: ignore[arg-type]
    assert joined(steps_of(loader)[0]) == blocks(list(range(12)), 3 * world_size)


@ranks(2, init=False)
def test_a_loader_without_batching_delivers_samples() -> None:
    loader = DataLoader(torch.arange(6), batch_size=None)  # type: ignore[arg-type]
    assert steps_of(loader)[0] == [[[0], [1]], [[2], [3]], [[4], [5]]]


@ranks(2, init=False)
def test_a_batch_sampler_as_sampler_delivers_whole_batches() -> None:
    class Rows:
        def __len__(self) -> int:
            return LENGTH

        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    batches = BatchSampler(SequentialSampler(range(LENGTH)), 2, True)
    loader = DataLoader(Rows(), sampler=batches, batch_size=None)  # type: ignore[arg-type]
    assert joined(steps_of(loader)[0])[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


class Endless:
    """A sampler that neither ends nor says how long it is, and draws each item from the global generator."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, ()))


@ranks(1, 2, init=False)
def test_an_endless_sampler_is_dealt_out_as_it_goes(world_size: int) -> None:
    pl.seed_everything(5, verbose=False)
    torch.manual_seed(int(os.environ["RANK"]))
    loader = DataLoader(range(100), batch_size=2, sampler=Endless())  # type: ignore[arg-type]
    steps = steps_of(loader, limit_train_batches=4)
    expected = itertools.islice(draw_lazily(Endless(), 5, 0, 0, 2 * world_size), 4)
    assert joined(steps[0]) == [sorted(block) for block in expected]
    assert joined(steps[1]) != joined(steps[0])


class Claims(Backwards):
    """Says that it is shorter than it is."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(LENGTH))


@ranks(2, init=False)
def test_a_sampler_that_never_ends_is_asked_for_its_length_only() -> None:
    steps = steps_of(DataLoader(range(LENGTH), batch_size=2, sampler=Claims()))  # type: ignore[arg-type]
    assert joined(steps[0])[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# ------------------------------------------------------------------------------------- shared out by the user already


@ranks(2, init=False)
def test_torchs_distributed_sampler_gives_what_it_gave(world_size: int) -> None:
    rank = int(os.environ["RANK"])
    for drop_last in (False, True):
        for use in (True, False):
            sampler: DistributedSampler[int] = DistributedSampler(
                range(LENGTH),
                world_size,
                rank,
                seed=3,
                drop_last=drop_last,  # type: ignore[arg-type]
            )
            loader = DataLoader(range(LENGTH), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
            steps = steps_of(loader, use_distributed_sampler=use)
            for epoch in range(EPOCHS):
                sampler.set_epoch(epoch)
                mine = list(BatchSampler(sampler, 2, drop_last=False))
                assert [step[rank] for step in steps[epoch]] == mine


class ByHalves(DistributedSampler[int]):
    """Shares out in a way of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * 4, self.rank * 4 + 4))

    def __len__(self) -> int:
        return 4


@ranks(2, init=False)
def test_a_subclass_of_the_distributed_sampler_is_left_alone(world_size: int) -> None:
    sampler = ByHalves(range(8), world_size, int(os.environ["RANK"]))  # type: ignore[arg-type]
    loader = DataLoader(range(8), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    assert steps_of(loader)[0] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


class Stride(Backwards):
    """Shares itself out and tells nobody."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(int(os.environ["RANK"]), 10, 2))

    def __len__(self) -> int:
        return 5


@ranks(2, init=False)
def test_a_sampler_that_is_shared_out_already_is_noticed() -> None:
    loader = DataLoader(range(LENGTH), batch_size=2, sampler=Stride())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"training.*Stride, which delivers different samples.*rank"):
        steps_of(loader)
    steps = steps_of(loader, use_distributed_sampler=False)
    assert sorted(sum(joined(steps[0]), [])) == list(range(10))


@ranks(2, init=False)
def test_datasets_of_unequal_length_are_noticed() -> None:
    loader = DataLoader(range(LENGTH + int(os.environ["RANK"])), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[11, 12\] samples or batches, by rank.*use_distributed_sampler=False"):
        steps_of(loader)


@ranks(2, init=False)
def test_batches_of_unequal_size_are_refused_before_the_first_step() -> None:
    """One order is dealt out to all, so ranks would take unequal numbers of steps, and wait for each other."""
    rank = int(os.environ["RANK"])
    warnings.filterwarnings("ignore", "The ranks are not set up alike: batch size")
    with pytest.raises(ValueError, match=r"same batch_size in the.* Got \[2, 3\], by rank"):
        steps_of(DataLoader(range(LENGTH), batch_size=2 + rank))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"same drop_last in the.* Got \[False, True\], by rank"):
        steps_of(DataLoader(range(LENGTH), batch_size=2, drop_last=rank == 1))  # type: ignore[arg-type]


@ranks(2, init=False)
def test_parts_with_batches_of_unequal_size_stop_together() -> None:
    loader = DataLoader(range(12), batch_size=2 * (1 + int(os.environ["RANK"])))  # type: ignore[arg-type]
    with says(r"\[6, 3\] batches, by rank; every rank trains on 3"):
        steps = steps_of(loader, use_distributed_sampler=False, epochs=1)
    assert len(steps[0]) == 3


@ranks(2, init=False)
def test_loaders_that_give_all_ranks_the_same_data_are_noticed() -> None:
    loader = DataLoader(range(LENGTH), batch_size=2)  # type: ignore[arg-type]
    with says("began with the same batch"):
        steps_of(loader, use_distributed_sampler=False, epochs=1)


# --------------------------------------------------------------------------------------------------------- in step


class Parts(IterableDataset[torch.Tensor]):
    """Five samples on rank 0, three on the others; says so or not."""

    def __init__(self, lengths: tuple[int, ...] = (5, 3, 4)) -> None:
        self.rank = int(os.environ["RANK"])
        self.length = lengths[self.rank]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(100 * self.rank, 100 * self.rank + self.length))


class SizedParts(Parts):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [Parts, SizedParts])
@ranks(2, 3, init=False)
def test_ranks_with_unequal_numbers_of_batches_stop_together(world_size: int, dataset: Any, num_workers: int) -> None:
    loader = DataLoader(dataset(), num_workers=num_workers)
    said = r"\[5, 3.* batches, by rank" if dataset is SizedParts else r"ended after 3 .* ranks \[1\] had no more.*\[0"
    with says(said):
        steps = steps_of(loader)
    for epoch in range(EPOCHS):
        assert steps[epoch] == [[[100 * rank + n] for rank in range(world_size)] for n in range(3)]


@ranks(2, init=False)
def test_map_style_parts_of_unequal_length_stop_together() -> None:
    data = torch.arange(10) if os.environ["RANK"] == "0" else torch.arange(100, 106)
    loader = DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    with says(r"\[5, 3\] batches, by rank; every rank trains on 3"):
        steps = steps_of(loader, use_distributed_sampler=False)
    assert steps[0] == [[[0, 1], [100, 101]], [[2, 3], [102, 103]], [[4, 5], [104, 105]]]


@ranks(2, init=False, timeout_s=20)
def test_a_rank_without_any_batch_ends_the_epoch_of_all() -> None:
    module = Keeps()
    with says(r"ended after 0 batches"):
        trainer(callbacks=[SamplerEpoch()]).fit(module, DataLoader(Parts((2, 0))))
    assert module.batches == {}


@ranks(2, init=False)
def test_a_limit_comes_before_the_end() -> None:
    loader = DataLoader(Parts())
    assert steps_of(loader, limit_train_batches=2)[2] == [[[0], [100]], [[1], [101]]]


@ranks(2, init=False)
def test_leaves_of_a_combined_loader_stop_together() -> None:
    loader = CombinedLoader({"a": DataLoader(Parts()), "b": DataLoader(range(100))}, "min_size")  # type: ignore[arg-type]

    class Pairs(Keeps):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step([batch["a"], batch["b"]], batch_idx)

    module = Pairs()
    with says(r"loader 0 ended after 3 batches"):
        trainer(callbacks=[SamplerEpoch()]).fit(module, loader)
    rank = int(os.environ["RANK"])
    assert module.batches[0] == [[100 * rank + n, 2 * n + rank] for n in range(3)]


# ------------------------------------------------------------------------------------------------ the last batch


def one_process(size: int) -> list[float]:
    """The weight after each epoch of one process with batches of ``size``, in plain torch."""
    weight, weights = torch.zeros((), dtype=torch.float64, requires_grad=True), []
    optimizer = torch.optim.SGD([weight], lr=0.125)
    for _ in range(EPOCHS):
        for batch in DataLoader(torch.arange(LENGTH), batch_size=size):  # type: ignore[arg-type]
            optimizer.zero_grad()
            (weight * batch.double()).mean().backward()
            optimizer.step()
        weights.append(weight.item())
    return weights


@ranks(1, 2, 3, 4, init=False)
def test_an_exact_last_batch_trains_as_one_process_does(world_size: int) -> None:
    class Remembers(Keeps):
        def on_train_epoch_end(self) -> None:
            self.weights = [*getattr(self, "weights", []), self.weight.item()]

    class Unsized:
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

    def weights(*callbacks: Any, sampler: Any = None) -> list[float]:
        module = Remembers()
        loader = DataLoader(torch.arange(LENGTH), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        trainer(max_epochs=EPOCHS, callbacks=list(callbacks)).fit(module, loader)
        assert module.trainer.global_step == EPOCHS * -(-LENGTH // (2 * world_size))
        return module.weights  # type: ignore[no-any-return]

    expected = one_process(2 * world_size)
    for sampler in (None, Unsized()):
        found = weights(SamplerEpoch("exact"), GlobalMeanLoss(), sampler=sampler)
        assert found == pytest.approx(expected, rel=1e-14)
    if world_size > 1:
        assert weights(SamplerEpoch("pad"), GlobalMeanLoss()) != pytest.approx(expected, rel=1e-9)


class Measures(pl.LightningModule):
    """Logs and measures its data; trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.total = SumMetric()
        self.ghosts: list[bool] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.total.update(batch.sum())
        options = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("mean", batch.double().mean(), batch_size=len(batch), **options)
        self.log("samples", float(len(batch)), reduce_fx="sum", **options)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.ghosts.append(any(getattr(c, "is_ghost_step", False) for c in self.trainer.callbacks))
        return self.weight * 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=0.0)


@ranks(1, 2, 3, 4, init=False)
def test_what_a_rank_without_a_sample_logs_does_not_count(world_size: int) -> None:
    for length in (4 * world_size + 1, 1):  # in the last step, or the only one, one rank has a sample
        _check_what_counts(length)


def _check_what_counts(length: int) -> None:
    module = Measures()
    callbacks = [SamplerEpoch("exact"), GlobalMeanLoss(), DecisionSync("raise")]
    stops = pl.callbacks.EarlyStopping("mean", patience=9, check_on_train_epoch_end=True)
    fit = trainer(max_epochs=2, callbacks=[*callbacks, stops])
    fit.fit(module, DataLoader(torch.arange(length), batch_size=2))  # type: ignore[arg-type]
    assert float(fit.callback_metrics["mean"]) == pytest.approx((length - 1) / 2, rel=1e-12)
    assert float(fit.callback_metrics["samples"]) == length
    assert float(fit.callback_metrics["total"]) == sum(range(length))
    is_ghost = int(os.environ["RANK"]) > 0
    assert module.ghosts == ([False, False, is_ghost] if length > 1 else [is_ghost]) * 2


@ranks(2, init=False)
def test_a_ghost_step_that_is_skipped_leaves_nothing_for_the_next_epoch() -> None:
    class Skips(Measures):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 2 else None

    module = Skips()
    fit = trainer(max_epochs=2, callbacks=[SamplerEpoch("exact"), GlobalMeanLoss()])
    fit.fit(module, DataLoader(torch.arange(9), batch_size=2))  # type: ignore[arg-type]
    assert float(fit.callback_metrics["total"]) == sum(range(8))
    assert float(fit.callback_metrics["samples"]) == 8


@ranks(2, init=False)
def test_an_exact_last_batch_is_for_one_loader() -> None:
    data = DataLoader(torch.arange(8), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one training loader beside last_batch='exact'"):
        trainer(callbacks=[SamplerEpoch("exact"), GlobalMeanLoss()]).fit(Keeps(), CombinedLoader([data, data]))


@ranks(2, init=False)
def test_a_combined_loader_serves_one_run_after_another() -> None:
    loader = CombinedLoader([DataLoader(range(LENGTH), batch_size=2, shuffle=True)])  # type: ignore[arg-type]
    first, second = steps_of(loader, [SamplerEpoch("drop")]), steps_of(loader)
    assert len({str(epoch) for epoch in second.values()}) == EPOCHS
    assert [len(steps[0]) for steps in (first, second)] == [2, 3]


@pytest.mark.parametrize("num_workers", [0, 1])
@ranks(2, init=False)
def test_a_rate_finder_changes_no_order(num_workers: int) -> None:
    class Rated(Keeps):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.1

    class Finds(pl.callbacks.LearningRateFinder):
        def lr_find(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            super().lr_find(trainer, pl_module)
            pl_module.batches.clear()

    orders = []
    for callbacks in ([], [Finds(num_training_steps=2, update_attr=False)]):
        pl.seed_everything(5, verbose=False)
        module = Rated()
        loader = DataLoader(range(LENGTH), batch_size=2, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]
        callbacks = [SamplerEpoch(), PerRankSeed(), *callbacks]
        trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=True).fit(module, loader)
        orders.append(module.batches)
    assert orders[0] == orders[1]


def test_a_second_callback_of_a_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one GlobalMeanLoss. Got 2 of them.*default_callbacks"):
        trainer(callbacks=[GlobalMeanLoss(), GlobalMeanLoss()], strategy="auto", devices=1).fit(
            Keeps(),
            DataLoader(range(4)),  # type: ignore[arg-type]
        )
    for wrong in ([SamplerEpoch()], SamplerEpoch):
        with pytest.raises(TypeError, match="callbacks, one by one"):
            default_callbacks(wrong)  # type: ignore[arg-type]


@ranks(2, init=False)
def test_an_exact_last_batch_asks_for_weights() -> None:
    with pytest.raises(ValueError, match="GlobalMeanLoss"):
        steps_of(DataLoader(range(LENGTH)), [SamplerEpoch("exact")])  # type: ignore[arg-type]


@ranks(2, init=False)
def test_drop_last_drops_what_one_process_drops() -> None:
    loader = DataLoader(range(LENGTH), batch_size=2, drop_last=True)  # type: ignore[arg-type]
    for last_batch in ("pad", "drop"):
        assert joined(steps_of(loader, [SamplerEpoch(last_batch)])[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("first", [True, False])
@ranks(2, init=False)
def test_the_order_of_callbacks_does_not_matter(first: bool) -> None:
    loader = DataLoader(range(LENGTH), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    callbacks = [SamplerEpoch("drop"), PerRankSeed(1)]
    steps = steps_of(loader, callbacks if first else callbacks[::-1])
    assert joined(steps[0]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_unknown_last_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="last_batch"):
        SamplerEpoch("repeat")
