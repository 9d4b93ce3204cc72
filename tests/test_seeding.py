"""Streams by key: different where a key differs, the same again for the same key, cheap, and without side effects."""

import itertools
import os
import pickle
import random
import subprocess
import sys
import timeit
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from ddp_plugin.data.sampling import ExactBatchSampler
from ddp_plugin.seeding import (
    LoaderStreams,
    RunStreams,
    SeedWorker,
    WorkerKey,
    may_draw,
    streamed,
)
from ddp_plugin.streams import StreamStates, seed_streams, stream_seed


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()


# --------------------------------------------------------------------------------------------------------------- keys


def test_keys_that_differ_anywhere_give_different_seeds() -> None:
    keys = list(itertools.product((0, 1, 2**63), (None, 0, 1, 255), ("step", "fetch"), (0, 1, 7), (0, 1, 7)))
    seeds = [stream_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63  # all 64 bits are used
    assert min(seed & 0xFFFFFFFF for seed in seeds) != max(seed & 0xFFFFFFFF for seed in seeds)


def test_epoch_and_rank_and_seed_do_not_alias() -> None:  # as seed + rank, seed + epoch would
    assert (
        len({stream_seed(1, 0, "x"), stream_seed(0, 1, "x"), stream_seed(0, 0, "x", 1), stream_seed(0, 0, "x", 0, 1)})
        == 4
    )


def test_a_key_gives_the_same_seed_in_every_process() -> None:
    code = "from ddp_plugin.seeding import stream_seed; print(stream_seed(5, 3, 'step', 2, 1))"
    environment = dict(os.environ, PYTHONHASHSEED="77", PYTHONPATH=os.getcwd())
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(printed.stdout) == stream_seed(5, 3, "step", 2, 1)


# ------------------------------------------------------------------------------------------------------------- streams


def test_seeding_moves_every_global_generator_and_repeats() -> None:
    draws = []
    for value in (stream_seed(0, 0, "a"), stream_seed(0, 0, "b"), stream_seed(0, 0, "a")):
        seed_streams(value)
        draws.append(_draw())
    assert draws[0] == draws[2]
    assert all(first != second for first, second in zip(draws[0], draws[1], strict=True))


def test_python_and_numpy_do_not_draw_the_same_numbers() -> None:
    value = stream_seed(3, 1, "step", 4)
    random.seed(value)
    np.random.seed([value & 0xFFFFFFFF, value >> 32])  # the obvious way: one algorithm, one key, one stream
    assert random.random() == np.random.rand()
    seed_streams(value)
    drawn = [random.random() for _ in range(100)]
    assert not set(drawn) & set(np.random.rand(100).tolist())


def test_seeding_costs_far_less_than_a_step() -> None:
    values = iter(range(10**9))
    best_s = min(timeit.repeat(lambda: seed_streams(stream_seed(0, 0, "step", 0, next(values))), number=200, repeat=10))
    assert best_s / 200 < 100e-6


def test_captured_states_come_back_exactly() -> None:
    seed_streams(9)
    np.random.randn()  # leaves the second of a pair of normal numbers in the generator
    random.gauss(0.0, 1.0)
    states = StreamStates.capture()
    first = (_draw(), np.random.randn(), random.gauss(0.0, 1.0))
    seed_streams(10)
    states.restore()
    assert (_draw(), np.random.randn(), random.gauss(0.0, 1.0)) == first


# ------------------------------------------------------------------------------------------------------------ samplers


class Numpys:
    """Draws with numpy when it is iterated, has no length, and is told the epoch."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(16).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(epoch)


class Endless:
    """Draws one index at a time with python's random, for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(2**60)


def _streams(rank: int = 0, epoch: int = 0, repeats: bool = True, live: bool = True) -> LoaderStreams:
    return LoaderStreams(RunStreams(1, rank, lambda: epoch, live), "train/0", repeats)


def test_which_samplers_may_draw() -> None:
    data: Any = range(8)
    sequential, distributed = SequentialSampler(data), DistributedSampler(data, 2, 0)
    for quiet in (sequential, distributed, BatchSampler(distributed, 2, False), ExactBatchSampler([[0]], 2, 0)):
        assert not may_draw(quiet)

    class Own(DistributedSampler[Any]):
        pass

    for other in (RandomSampler(data), BatchSampler(RandomSampler(data), 2, False), Own(data, 2, 0), Numpys(), [1, 2]):
        assert may_draw(other)


@pytest.mark.parametrize("fetches_here", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(16)),
        lambda: RandomSampler(range(16), replacement=True, num_samples=70),
        lambda: WeightedRandomSampler(torch.arange(1.0, 17.0).tolist(), 16),
        lambda: BatchSampler(RandomSampler(range(16)), 3, False),
        Numpys,
        Endless,
    ],
)
def test_order_is_shared_although_generators_differ(make: Any, fetches_here: bool) -> None:
    orders = []
    for rank, epoch in ((0, 0), (1, 0), (0, 1)):
        seed_streams(rank)
        sampler = streamed(make(), _streams(rank, epoch), draws=True, fetches_here=fetches_here)
        order = []
        for item in itertools.islice(sampler, 100):
            order.append(item)
            torch.rand(rank + 1)  # the rank draws on between two batches, each rank its own amount
            random.random()
        orders.append(order)
    assert orders[0] == orders[1] != orders[2]
    seed_streams(0)
    unshared = [list(itertools.islice(make(), 100)), list(itertools.islice(make(), 100))]
    assert unshared[0] != unshared[1]  # what it is needed for


def test_the_ranks_own_generators_stay_where_they_are() -> None:
    sampler = streamed(Numpys(), _streams(), draws=True, fetches_here=False)
    seed_streams(4)
    expected = _draw()
    seed_streams(4)
    assert len(list(sampler)) == 16
    assert _draw() == expected


def test_without_workers_each_batch_is_fetched_from_its_own_key() -> None:
    def fetches(rank: int, noise: int, live: bool = True) -> list[tuple[float, float, float]]:
        drawn = []
        sampler = streamed(SequentialSampler(range(4)), _streams(rank, live=live), draws=False, fetches_here=True)
        for _ in sampler:
            drawn.append(_draw())
            torch.rand(noise)  # whatever happens between two fetches
        return drawn

    assert fetches(0, 1) == fetches(0, 5)
    assert len({*fetches(0, 1), *fetches(1, 1)}) == 8
    seed_streams(8)
    before_training = fetches(0, 1, live=False)
    seed_streams(8)
    assert before_training == fetches(1, 1, live=False)  # ranks are alike until the run is live


def test_a_pass_counts_when_it_is_complete() -> None:
    def order(sampler: Any) -> list[Any]:
        return list(sampler)

    cycled = streamed(Numpys(), _streams(repeats=True), draws=True, fetches_here=False)
    evaluated = streamed(Numpys(), _streams(repeats=False), draws=True, fetches_here=False)
    started = next(iter(cycled))
    first = order(cycled)
    assert first[0] == started  # an iterator that was made and dropped did not use up the pass
    assert order(cycled) != first
    assert order(evaluated) == order(evaluated)


def test_it_stands_for_the_sampler() -> None:
    inner = BatchSampler(RandomSampler(range(9)), 2, True)
    sampler = streamed(inner, _streams(), draws=True, fetches_here=False)
    assert isinstance(sampler, BatchSampler)
    assert (len(sampler), sampler.batch_size, sampler.drop_last, sampler.sampler) == (4, 2, True, inner.sampler)
    sampler.batch_size = 3
    assert inner.batch_size == 3
    told = streamed(Numpys(), _streams(), draws=True, fetches_here=False)
    told.set_epoch(6)
    assert told.forwards_to.heard == [6]
    assert not hasattr(told, "__len__")
    assert not hasattr(streamed(Endless(), _streams(), draws=True, fetches_here=False), "set_epoch")


# ------------------------------------------------------------------------------------------------------------- workers


class Draws(Dataset[Any]):
    """Items are what the process that fetches them draws."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(_draw(), dtype=torch.float64)


def _mark(worker_id: int) -> None:
    random.seed(worker_id)  # a user's own: it comes last, so it has the last word


def _items(worker_init_fn: Any, num_workers: int, start_method: str = "fork") -> list[tuple[float, ...]]:
    loader = DataLoader(
        Draws(),
        batch_size=None,
        num_workers=num_workers,
        worker_init_fn=worker_init_fn,
        multiprocessing_context=start_method,
    )
    return [tuple(item.tolist()) for item in loader]


def test_workers_differ_and_repeat() -> None:
    epoch = 0
    streams = LoaderStreams(RunStreams(1, 0, lambda: epoch), "train/0")
    first, again = _items(SeedWorker(streams.worker_key), 2), _items(SeedWorker(streams.worker_key), 2)
    epoch = 1  # read when the workers start
    later = _items(SeedWorker(streams.worker_key), 2)
    assert first == again
    assert len({*first, *later}) == 8
    assert _items(SeedWorker(streams.worker_key, _mark), 1)[0][0] == random.Random(0).random()


def test_a_spawned_worker_gets_the_key_that_holds_when_it_starts() -> None:
    epoch = 0
    streams = LoaderStreams(RunStreams(1, 0, lambda: epoch), "train/0")
    init = SeedWorker(streams.worker_key, _mark)
    epoch = 3
    copied = pickle.loads(pickle.dumps(init))  # the way to a spawned worker
    assert copied.key == WorkerKey(1, 0, streams.worker_key().purpose, 3)
    assert copied.then is _mark
    copied(5)
    expected_torch = torch.Generator().manual_seed(stream_seed(1, 0, streams.worker_key().purpose, 3, 5))
    assert random.random() == random.Random(5).random()
    assert torch.rand(()) == torch.rand((), generator=expected_torch)
