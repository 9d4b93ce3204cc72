"""Combining what ranks logged; a step that leaves no trace; loaders kept in step."""

import math
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from ddp_plugin.data.lockstep import LockstepLoader
from ddp_plugin.evaluation import EvaluationRecord, combine_logged, merge_states
from ddp_plugin.gather import gather_objects
from ddp_plugin.ghost import ModuleSnapshot, metrics_of
from tests.harness import ranks


def test_combining_equals_the_whole() -> None:
    values = [3.0, -1.0, 4.0, 1.5, 9.25]
    halves = [values[:2], values[2:]]
    assert combine_logged("mean", [(sum(half), len(half)) for half in halves]) == sum(values) / len(values)
    assert combine_logged("sum", [(sum(half), 0.0) for half in halves]) == sum(values)
    assert combine_logged("max", [(max(half), 0.0) for half in halves]) == max(values)
    assert combine_logged("min", [(min(half), 0.0) for half in halves]) == min(values)


@pytest.mark.parametrize("order", [[math.nan, 1.0], [1.0, math.nan]])
@pytest.mark.parametrize("reduction", ["mean", "sum", "max", "min"])
def test_a_nan_stays_visible_wherever_it_stands(reduction: str, order: list[float]) -> None:
    assert math.isnan(combine_logged(reduction, [(value, 1.0) for value in order]))


def test_states_are_merged_as_one_process_holds_them() -> None:
    def summed(stacked: torch.Tensor) -> torch.Tensor:
        return stacked.sum(0)

    one, two = torch.tensor([1.0, 2.0]), torch.tensor([4.0])
    reductions = {"total": summed, "kept": None, "seen": None, "joined": lambda tensors: torch.cat(tensors)}
    states = [
        (2, {"total": torch.tensor(3.0), "kept": torch.tensor(5.0), "seen": [one], "joined": [one]}),
        (0, {"total": torch.tensor(9.0), "kept": torch.tensor(9.0), "seen": [], "joined": []}),
        (1, {"total": torch.tensor(4.0), "kept": torch.tensor(6.0), "seen": [two], "joined": [two]}),
    ]
    merged = merge_states(states, reductions)
    assert merged["total"].item() == 7.0
    assert merged["kept"].tolist() == [5.0, 6.0]
    assert [tensor.tolist() for tensor in merged["seen"]] == [[1.0, 2.0], [4.0]]
    assert merged["joined"].tolist() == [1.0, 2.0, 4.0]
    assert merge_states(states[:2], reductions)["kept"].item() == 5.0  # one contributor: nothing is stacked
    assert merge_states(states[1:2], reductions) == {}


def test_a_mean_of_nothing_is_nan_and_an_unknown_reduction_raises() -> None:
    assert math.isnan(combine_logged("mean", [(0.0, 0.0)]))
    with pytest.raises(ValueError, match="unknown reduction 'median'"):
        combine_logged("median", [(1.0, 1.0)])


def test_a_record_says_what_was_left_out() -> None:
    record = EvaluationRecord("test", 0, 9, 3, 2, 1, 4, 2, 0)
    assert record.describe(2) == (
        "test: dataloader 0: 9 samples in 3 batches, each evaluated once, on 2 ranks; "
        "drop_last left out 2 samples; the limit on batches left out 4 batches"
    )
    assert "does not say how many" in EvaluationRecord("test", 0, 9, 3, 2, 1, None, 0, 0).describe(1)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.cat = MeanMetric(), CatMetric()
        self.numbers: list[int] = [1]
        self.table: dict[str, list[int]] = {"a": [1]}
        self.recent = deque([torch.ones(1)], maxlen=3)
        self.names = {"x"}
        self.count, self.total, self.note = 3, torch.ones(2), None
        self.register_buffer("running", torch.ones(2))


def _state(holder: Holder) -> dict[str, Any]:
    plain = {name: value for name, value in vars(holder).items() if not name.startswith("_")}
    return {
        **{name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in plain.items()},
        "running": holder.running.tolist(),
        "mean": (holder.mean.mean_value.item(), holder.mean.weight.item(), holder.mean._update_count),
        "cat": [value.tolist() for value in holder.cat.value],
    }


def test_a_snapshot_puts_everything_back() -> None:
    holder = Holder()
    holder.mean.update(torch.tensor(2.0))
    holder.cat.update(torch.tensor([2.0]))
    before = repr(_state(holder))
    numbers = holder.numbers
    snapshot = ModuleSnapshot(holder, [], ignore=frozenset(vars(nn.Module())))
    holder.mean.update(torch.tensor(9.0))
    holder.cat.update(torch.tensor([9.0, 8.0]))
    holder.numbers.append(2)
    holder.table["b"] = []
    holder.table["a"].append(7)
    holder.recent.append(torch.zeros(1))
    holder.recent[0] += 1
    holder.names.add("y")
    holder.count += 1
    holder.total += 1
    holder.note = "changed"  # type: ignore[assignment]
    holder.added = True  # type: ignore[assignment]
    holder.running += 5
    assert repr(_state(holder)) != before
    snapshot.restore()
    assert repr(_state(holder)) == before
    assert holder.numbers is numbers  # changed in place: others may hold the same list
    assert not hasattr(holder, "added")
    assert len(metrics_of(holder)) == 2


def test_a_snapshot_taken_in_inference_mode_is_put_back_outside_of_it() -> None:
    holder = Holder()
    with torch.inference_mode():
        holder.total = torch.ones(2)
        snapshot = ModuleSnapshot(holder, [], ignore=frozenset(vars(nn.Module())))
        holder.total += 5
    snapshot.restore()  # as after an exception, when the loop's inference mode has ended
    assert holder.total.tolist() == [1.0, 1.0]


@ranks(2, 3)
def test_loaders_are_kept_in_step(world_size: int) -> None:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    for lengths in ([3, 1, 2], [0, 2, 0], [0, 0, 0], [2, 2, 2]):
        own = [torch.tensor([10 * rank + step]) for step in range(lengths[rank])]
        loader = LockstepLoader(own, group)
        longest = max(lengths[:world_size])
        assert len(loader) == longest
        for _ in range(2):  # again: nothing is left over from the first pass
            got = [int(batch) for batch in loader]
            assert len(got) == longest
            assert got[: lengths[rank]] == [int(batch) for batch in own]
            assert [step for step in range(longest) if not loader.is_ghost(step)] == list(range(lengths[rank]))
            if lengths[rank]:
                assert all(value == got[lengths[rank] - 1] for value in got[lengths[rank] :])
            assert not loader.delivers_the_same or longest == 0


@ranks(2)
def test_a_step_may_change_what_it_is_given() -> None:
    group = dist.group.WORLD
    assert group is not None
    own = [{"x": [rank]} for rank in range(3 if dist.get_rank() == 0 else 1)]
    taken = [batch.pop("x") for batch in LockstepLoader(own, group)]
    assert taken == ([[0], [1], [2]] if dist.get_rank() == 0 else [[0], [0], [0]])


@ranks(2)
def test_lockstep_notices_equal_first_batches_and_forwards_attributes() -> None:
    class Named(list[Any]):
        dataset = "mine"

    group = dist.group.WORLD
    assert group is not None
    loader = LockstepLoader(Named([{"x": torch.ones(2), "name": ["a"]}]), group)
    list(loader)
    assert loader.delivers_the_same
    assert loader.dataset == "mine"
    stream = LockstepLoader(iter([1, 2]), group)
    with pytest.raises(TypeError, match="no length"):
        len(stream)
    assert gather_objects(list(stream), group) == [[1, 2], [1, 2]]
