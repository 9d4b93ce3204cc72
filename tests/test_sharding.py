"""How global batches are dealt out, against plain slicing and against torch's DistributedSampler."""

import itertools

import pytest
from torch.utils.data import BatchSampler, DistributedSampler

from ddp_plugin.data.sharding import ShardedEpoch, Shards

CASES = list(itertools.product(range(14), range(1, 5), range(1, 4)))  # items, shards, batch size


def blocks(num_items: int, size: int) -> list[list[int]]:
    """What one process with a batch of ``size`` reads."""
    return [list(range(start, min(start + size, num_items))) for start in range(0, num_items, size)]


def dealt(plan: ShardedEpoch) -> list[list[list[int]]]:
    return [[plan.positions(step, shard) for shard in range(plan.num_shards)] for step in range(plan.num_steps)]


@pytest.mark.parametrize("last_batch", ["exact", "drop"])
def test_each_step_holds_what_one_process_would_hold(last_batch: str) -> None:
    for num_items, num_shards, batch_size in CASES:
        plan = ShardedEpoch(num_items, num_shards, batch_size, last_batch)
        expected = blocks(num_items, num_shards * batch_size)
        if last_batch == "drop":
            expected = [block for block in expected if len(block) == num_shards * batch_size]
        assert [sorted(itertools.chain(*step)) for step in dealt(plan)] == expected
        assert plan.num_dropped == num_items - sum(map(len, expected))
        assert plan.num_repeated == 0
        for step in dealt(plan):
            sizes = [len(part) for part in step]
            assert max(sizes) - min(sizes) <= 1


def test_padding_is_that_of_torch() -> None:
    for num_items, num_shards, batch_size in CASES:
        if num_items == 0:
            continue
        plan = ShardedEpoch(num_items, num_shards, batch_size, "pad")
        for shard in range(num_shards):
            sampler: DistributedSampler[int] = DistributedSampler(range(num_items), num_shards, shard, shuffle=False)  # type: ignore[arg-type]
            expected = list(BatchSampler(sampler, batch_size, drop_last=False))
            # Torch repeats the first samples in rank order; which of them a shard repeats is all that may differ.
            mine = [plan.positions(step, shard) for step in range(plan.num_steps)]
            assert mine == expected
        assert plan.num_repeated == -num_items % num_shards


@pytest.mark.parametrize("last_batch", ["pad", "drop", "exact"])
def test_what_is_left_after_some_steps_is_the_rest(last_batch: str) -> None:
    for num_items, num_shards, batch_size in CASES:
        plan = ShardedEpoch(num_items, num_shards, batch_size, last_batch)
        for done in range(plan.num_steps + 1):
            assert dealt(plan.after(done)) == dealt(plan)[done:]


def test_the_rest_is_dealt_out_to_any_number_of_shards() -> None:
    for num_items, num_shards, batch_size in CASES:
        before = ShardedEpoch(num_items, num_shards, batch_size, "exact")
        for done, other in itertools.product(range(before.num_steps + 1), (1, 2, 3)):
            first = before.after(done).first_item
            after = ShardedEpoch(num_items, other, batch_size, "exact", first)
            seen = itertools.chain(*itertools.chain(*dealt(before)[:done]), *itertools.chain(*dealt(after)))
            assert sorted(seen) == list(range(num_items))


def test_a_shard_without_an_item_gets_one_of_its_step_to_stand_in() -> None:
    plan = ShardedEpoch(num_items=9, num_shards=4, batch_size=2, last_batch="exact")
    assert dealt(plan)[1] == [[8], [], [], []]
    assert [plan.stand_in(1, shard) for shard in range(4)] == [8, 8, 8, 8]


def test_a_rank_computes_its_shards_one_after_another() -> None:
    shards = [Shards(4, rank, num_per_rank=2) for rank in range(2)]
    assert [shards[0].place(number) for number in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [shards[1].place(number) for number in range(4)] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert [Shards(3, 2).place(number) for number in range(2)] == [(0, 2), (1, 2)]


def test_an_unknown_way_to_end_is_refused() -> None:
    with pytest.raises(ValueError, match="last_batch"):
        ShardedEpoch(4, 2, 1, "repeat")
