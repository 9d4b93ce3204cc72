"""Index arithmetic, over all small cases: no process group, no Lightning."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from ddp_plugin.data.sampling import ExactBatchSampler, batch_fingerprint, num_eval_steps, share_batches

CASES = [(n, w, limit) for n in range(14) for w in (1, 2, 3, 4, 7) for limit in (None, 0, 1, 2, 5)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_steps_equal_those_of_padding_by_samples(world_size: int) -> None:
    for num_samples in range(60):
        for batch_size in range(1, 9):
            padded_share = -(-num_samples // world_size)  # what a DistributedSampler gives each rank
            steps = num_eval_steps(-(-num_samples // batch_size), world_size)
            assert steps == -(-padded_share // batch_size)


@pytest.mark.parametrize(("num_batches", "world_size", "limit"), CASES)
def test_blocks_are_disjoint_contiguous_even_and_cover(num_batches: int, world_size: int, limit: int | None) -> None:
    shares = [share_batches(num_batches, world_size, rank, limit) for rank in range(world_size)]
    joined = [position for share in shares for position in range(share.start, share.stop)]
    evaluated = num_batches if limit is None else min(num_batches, limit * world_size)
    assert joined == list(range(evaluated))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert len({share.num_steps for share in shares}) == 1
    assert shares[0].num_ghost_steps == 0
    assert all(share.num_ghost_steps >= 0 for share in shares)
    assert {share.num_batches for share in shares} == {evaluated}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_arithmetic_of_sequential_batches_equals_torchs_own(drop_last: bool, world_size: int) -> None:
    for num_samples in range(12):
        for batch_size in (1, 2, 3, 5):
            batches = BatchSampler(SequentialSampler(range(num_samples)), batch_size, drop_last)
            parts = [ExactBatchSampler(batches, world_size, rank) for rank in range(world_size)]
            delivered = [list(part) for part in parts]
            real = [
                batch
                for part, got in zip(parts, delivered, strict=True)
                for step, batch in enumerate(got)
                if not part.is_ghost(step)
            ]
            assert real == list(batches)
            assert {len(got) for got in delivered} == {num_eval_steps(len(batches), world_size)} == {len(parts[0])}
            assert {part.num_samples_planned for part in parts} == {sum(map(len, batches))}


def test_an_order_that_may_be_random_is_agreed_on_and_drawn_once() -> None:
    calls: list[list[Any]] = []

    def agree(drawn: list[Any]) -> list[Any]:
        calls.append(drawn)
        return [[3, 1], [0, 2]]

    part = ExactBatchSampler(BatchSampler(RandomSampler(range(4)), 2, False), 2, 1, agree=agree)
    assert list(part) == [[0, 2]]
    assert part.indices(0) == [0, 2]
    assert len(calls) == 1
    assert sorted(index for batch in calls[0] for index in batch) == [0, 1, 2, 3]


class Endless:
    sampler = "mine"

    def __iter__(self) -> Iterator[list[int]]:
        position = 0
        while True:
            yield [position]
            position += 1


def test_an_endless_order_is_read_up_to_the_limit() -> None:
    part = ExactBatchSampler(Endless(), 3, 2, limit=lambda num_steps: 2 if num_steps is None else num_steps)
    assert list(part) == [[4], [5]]
    assert part.num_batches_left_out is None
    with pytest.raises(TypeError, match="Endless has no length"):
        len(part)


def test_the_users_attributes_stay_in_reach_also_in_copies() -> None:
    part = ExactBatchSampler(BatchSampler(SequentialSampler(range(5)), 2, True), 2, 0)
    for other in (part, copy.copy(part), pickle.loads(pickle.dumps(part))):
        assert (other.batch_size, other.drop_last) == (2, True)
        assert isinstance(other.sampler, SequentialSampler)
        with pytest.raises(AttributeError):
            _ = other.nothing


def test_fingerprints_tell_positions_and_orders_apart() -> None:
    prints = {batch_fingerprint(0, [1, 2]), batch_fingerprint(1, [1, 2]), batch_fingerprint(0, [2, 1])}
    assert len(prints) == 3
    assert all(0 <= value < 2**64 for value in prints)
    assert batch_fingerprint(0, [1, 2]) == batch_fingerprint(0, [1, 2])
