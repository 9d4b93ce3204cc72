"""Collectives that do not match: keys, orders and shapes that differ are said on all ranks, and nothing mixes."""

import itertools
import math
import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ddp_plugin import CustomDDPStrategy, ExactEvaluation, ReplicaConsistency, _compat, default_callbacks
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.gather import gather_objects
from ddp_plugin.matching import (
    Rule,
    collective_device,
    described_by_rank,
    fingerprint,
    match,
    match_all,
    reduce_matched,
)
from tests.harness import RankFailureError, ranks, run_ranks, trainer

RULE = Rule("one text", "Agree")
NUM_BATCHES = 3


def rank() -> int:
    return int(os.environ["RANK"])


class Logs(pl.LightningModule):
    """Calls a function to log, in training or in validation; trains something small."""

    def __init__(self, in_training: Any = None, in_validation: Any = None, at_epoch_end: Any = None) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.in_training, self.in_validation, self.at_epoch_end = in_training, in_validation, at_epoch_end

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.in_training is not None:
            self.in_training(self, batch_idx)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.in_validation is not None:
            self.in_validation(self, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.at_epoch_end is not None:
            self.at_epoch_end(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    world_size = int(os.environ["WORLD_SIZE"])
    return DataLoader(TensorDataset(torch.ones(2 * NUM_BATCHES * world_size, 2, dtype=torch.float64)), batch_size=2)


def fit(module: Logs, **settings: Any) -> Any:
    run = trainer(num_sanity_val_steps=0, **settings)
    run.fit(module, loader(), loader())
    return run


# ------------------------------------------------------------------------------------------------------- right values


def value(of_rank: int, batch_idx: int) -> float:
    return 0.1 + of_rank * 1.7 - batch_idx * 0.3


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("reduction", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("stage", ["training", "validation"])
def test_logged_values_are_those_of_all_ranks(world_size: int, reduction: str, stage: str) -> None:
    def log(module: Logs, batch_idx: int) -> None:
        number = torch.tensor(value(rank(), batch_idx), dtype=torch.float64)
        weights = {"batch_size": rank() + 1 + batch_idx, "sync_dist": True, "reduce_fx": reduction}
        module.log("both", number, on_step=True, on_epoch=True, **weights)
        module.log("step", number, on_step=True, on_epoch=False, **weights)
        module.log("epoch", number, on_step=False, on_epoch=True, **weights)

    metrics = fit(Logs(**{f"in_{stage}": log})).callback_metrics
    of_all = [(r, b) for r, b in itertools.product(range(world_size), range(NUM_BATCHES))]
    values, sizes = [value(r, b) for r, b in of_all], [r + 1 + b for r, b in of_all]
    last = [value(r, NUM_BATCHES - 1) for r in range(world_size)]
    by_hand = {
        "mean": (sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes), sum(last) / world_size),
        "sum": (sum(values), sum(last)),
        "min": (min(values), min(last)),
        "max": (max(values), max(last)),
    }[reduction]
    assert metrics["both_epoch"].item() == pytest.approx(by_hand[0], abs=1e-14)
    assert metrics["epoch"].item() == pytest.approx(by_hand[0], abs=1e-14)
    if stage == "training":
        assert metrics["both_step"].item() == pytest.approx(by_hand[1], abs=1e-14)
        assert metrics["step"].item() == pytest.approx(by_hand[1], abs=1e-14)


@ranks(2, init=False)
def test_what_is_not_of_all_ranks_is_left_alone() -> None:
    groups: list[Any] = []

    def log(module: Logs, batch_idx: int) -> None:
        if not groups:
            groups.append(dist.new_group([0, 1]))
        if rank() == 0:
            module.log("rank_zero", 5.0, rank_zero_only=True)
            module.log("own", 7.0, on_step=True, on_epoch=True)  # never reduced
        module.log("group", float(rank()), sync_dist=True, sync_dist_group=groups[0], on_step=True, on_epoch=True)
        module.log("mean", float(rank()), sync_dist=True, on_epoch=True)
        module.metric(float(rank() + batch_idx))
        module.log("object", module.metric, on_step=False, on_epoch=True)

    module = Logs(log)
    module.metric = MeanMetric()
    metrics = fit(module).callback_metrics
    assert metrics["group_step"].item() == metrics["group_epoch"].item() == metrics["mean"].item() == 0.5
    assert metrics["object"].item() == 1.5
    assert ("rank_zero" in metrics, "own_epoch" in metrics) == (rank() == 0, rank() == 0)


@ranks(2, init=False)
def test_a_logged_nan_stays_visible() -> None:
    def log(module: Logs, batch_idx: int) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            number = math.nan if rank() == 1 and batch_idx == NUM_BATCHES - 1 else 1.0
            module.log(reduction, number, reduce_fx=reduction, sync_dist=True, on_step=True, on_epoch=True)

    metrics = fit(Logs(log)).callback_metrics
    names = [f"{reduction}_{level}" for reduction in ("mean", "sum", "min", "max") for level in ("step", "epoch")]
    assert [name for name in names if not math.isnan(metrics[name])] == []


@ranks(2, init=False)
def test_callbacks_that_read_early_on_one_rank_change_nothing() -> None:
    """As a progress bar does: it reads on rank 0 alone what others reduce a moment later."""

    class Reads(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.log("early", float(rank()), sync_dist=True)
            if rank() == 0:
                assert trainer.callback_metrics["early"].item() == 0.5

    run = fit(Logs(at_epoch_end=lambda module: module.log("late", float(rank()), sync_dist=True)), callbacks=[Reads()])
    assert (run.callback_metrics["early"].item(), run.callback_metrics["late"].item()) == (0.5, 0.5)


# ----------------------------------------------------------------------------------------------- keys that do not match


def one_rank_only(module: Logs, batch_idx: int, **levels: bool) -> None:
    module.log("common", 1.0, sync_dist=True, **levels)
    if rank() == 1:
        module.log("extra", 2.0, sync_dist=True, **levels)
    module.log("last", 3.0, sync_dist=True, **levels)


def other_order(module: Logs, batch_idx: int, **levels: bool) -> None:
    for name, number in (("a", 1.0), ("b", 100.0))[:: 1 - 2 * (rank() % 2)]:
        module.log(name, number, sync_dist=True, **levels)


STEP, EPOCH = {"on_step": True, "on_epoch": False}, {"on_step": False, "on_epoch": True}


@ranks(2, 3, init=False)
@pytest.mark.parametrize(
    ("log", "levels", "stage", "message"),
    [
        (one_rank_only, STEP, "training", r"step\.last \(mean\) on rank.*step\.extra \(mean\) on rank 1"),
        (one_rank_only, EPOCH, "training", r"training_step\.common, training_step\.extra, .* on rank 1"),
        (one_rank_only, EPOCH, "validation", r"validation_step\.common, validation_step\.extra, .* on rank 1"),
        (other_order, STEP, "training", r"training_step\.a \(mean\) on rank.*training_step\.b \(mean\) on rank 1"),
        (other_order, EPOCH, "training", r"\[training_step\.a, .*\[training_step\.b, .* on rank 1"),
        (other_order, EPOCH, "validation", r"\[validation_step\.b, validation_step\.a\] on rank 1"),
        (other_order, STEP, "validation", r"validation_step\.b \(mean\) on rank 1"),
    ],
)  # fmt: skip
def test_ranks_that_log_otherwise_all_raise_and_say_how(
    world_size: int, log: Any, levels: dict[str, bool], stage: str, message: str
) -> None:
    with pytest.raises(DDPPluginError, match=message) as error:
        fit(Logs(**{f"in_{stage}": lambda module, batch_idx: log(module, batch_idx, **levels)}))
    assert f"on rank {rank()} of {world_size}" in str(error.value)


@ranks(2, init=False)
def test_a_key_that_only_one_rank_logs_in_training_and_nothing_else_is_logged() -> None:
    def log(module: Logs, batch_idx: int) -> None:
        if rank() == 1:
            module.log("extra", 2.0, sync_dist=True, on_step=False, on_epoch=True)

    with pytest.raises(DDPPluginError, match=r"\[\] on rank 0; \[training_step\.extra\] on rank 1"):
        fit(Logs(log))


@ranks(2, init=False)
def test_a_key_that_only_one_rank_logs_when_an_epoch_ends() -> None:
    def log(module: Logs) -> None:
        if rank() == 1:
            module.log("extra", 2.0, sync_dist=True)

    with pytest.raises(DDPPluginError, match=r"nothing more in this epoch on rank 0; on_train_epoch_end\.extra"):
        fit(Logs(at_epoch_end=log))


@ranks(2, init=False)
def test_exact_evaluation_still_allows_a_key_on_some_ranks_only() -> None:
    module = Logs(in_validation=lambda module, i: one_rank_only(module, i, **EPOCH))
    metrics = fit(module, callbacks=[ExactEvaluation()]).callback_metrics
    assert metrics["extra"].item() == 2.0


@ranks(2, init=False)
def test_lightnings_strategy_mixes_the_values_of_two_keys() -> None:
    run = fit(Logs(lambda module, i: other_order(module, i, **EPOCH)), strategy=DDPStrategy())
    assert (run.callback_metrics["a"].item(), run.callback_metrics["b"].item()) == (50.5, 50.5)


@ranks(2, init=False)
def test_a_run_leaves_nothing_between_the_log_and_its_reduction() -> None:
    run = fit(Logs())
    loop = run.fit_loop.epoch_loop
    assert "log" not in vars(loop._results)
    assert not {"epoch_end_reached", "on_epoch_end"} & set(vars(run._logger_connector))


def _logs_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.matching.PATIENCE", timedelta(seconds=0.2))

        def log(module: Logs, batch_idx: int) -> None:
            if rank() == 1:
                module.log("extra", 2.0, sync_dist=True, on_step=True, on_epoch=False)

        fit(Logs(log), strategy=CustomDDPStrategy(timeout=timedelta(seconds=3)))


def test_a_step_value_that_one_rank_logs_alone_is_said_before_it_waits() -> None:
    with pytest.raises(RankFailureError, match=r"Rank 1 waits for .* do the same: training_step\.extra \(mean\)"):
        run_ranks(_logs_alone, 2, init=False, timeout_s=60)


# ---------------------------------------------------------------------------------------------------------- all_gather


@ranks(1, 2, 3, init=False)
def test_all_gather_of_one_shape_is_lightnings_with_gradients(world_size: int) -> None:
    strategies = CustomDDPStrategy(), DDPStrategy()
    results = []
    for strategy in strategies:
        fit(Logs(), strategy=strategy)
        x = (torch.arange(3.0, dtype=torch.float64) + rank()).requires_grad_()
        gathered = strategy.all_gather(x, sync_grads=True)
        (gathered.sum(0) ** 2).sum().backward()
        results.append((gathered.detach(), x.grad, strategy.all_gather(x).requires_grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0][:2], results[1][:2], strict=True))
    assert results[0][2] is results[1][2] is (world_size == 1 and results[1][2])


@ranks(2, 3, init=False)
@pytest.mark.parametrize("kind", ["shape", "dtype", "dimensions"])
def test_all_gather_of_unequal_tensors_raises_on_all_ranks(world_size: int, kind: str) -> None:
    run = fit(Logs())
    mine = {
        "shape": torch.ones(2 + rank() % 2, 3),
        "dtype": torch.ones(2, dtype=torch.float64 if rank() == 1 else torch.float32),
        "dimensions": torch.ones([2] * (1 + rank() % 2)),
    }[kind]
    expected = {"shape": r"\(3, 3\)", "dtype": r"\(2,\), torch\.float64", "dimensions": r"\(2, 2\)"}[kind]
    with pytest.raises(DDPPluginError, match=rf"shape {expected}.* on rank 1.*all_gather_unequal"):
        run.strategy.all_gather(mine)
    module = run.lightning_module
    with pytest.raises(DDPPluginError, match="one shape and dtype"):
        module.all_gather({"key": mine})


@ranks(1, 2, 3, init=False)
def test_all_gather_unequal(world_size: int) -> None:
    strategy = CustomDDPStrategy()
    fit(Logs(), strategy=strategy)
    for make in (lambda r: torch.full((r, 2), float(r)), lambda r: torch.arange(r + 1), lambda r: torch.tensor(r > 0)):
        found = strategy.all_gather_unequal(make(rank()))
        assert [(part.dtype, part.tolist()) for part in found] == [
            (make(r).dtype, make(r).tolist()) for r in range(world_size)
        ]


@ranks(3, init=False)
def test_all_gather_in_a_group_of_the_users_own() -> None:
    strategy = CustomDDPStrategy()
    fit(Logs(), strategy=strategy)
    group = dist.new_group([0, 2])
    if rank() != 1:
        assert strategy.all_gather(torch.tensor(rank()), group=group).tolist() == [0, 2]
        with pytest.raises(DDPPluginError, match="one shape and dtype"):
            strategy.all_gather(torch.ones(1 + rank()), group=group)


# ------------------------------------------------------------------------------------------------------------- devices


def test_a_tensor_moves_only_where_its_group_does_not_serve_it() -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 3)
    assert collective_device(cpu, frozenset({"cuda"}), cuda) == cuda
    assert collective_device(cpu, frozenset({"cpu", "cuda"}), cuda) == cpu
    assert collective_device(other, frozenset({"cuda"}), cuda) == other
    assert collective_device(cpu, frozenset(), cuda) == cpu


@ranks(2, init=False)
def test_reductions_travel_by_the_root_device_where_they_have_to() -> None:
    strategy = CustomDDPStrategy()
    fit(Logs(), strategy=strategy)
    moved: list[str] = []

    class Far(torch.Tensor):
        """A tensor that notes where it is sent."""

        def to(self, *arguments: Any, **settings: Any) -> Any:
            moved.append(str(arguments[0]))
            return super().to(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat, "served_device_types", lambda group: frozenset({"cuda"}))
        patch.setattr(CustomDDPStrategy, "root_device", torch.device("meta"))
        with pytest.raises(Exception, match="meta"):
            strategy.reduce(torch.ones(()).as_subclass(Far))
    assert moved == ["meta"]


@ranks(2)
def test_the_devices_that_a_group_serves() -> None:
    assert "cpu" in _compat.served_device_types(_compat.default_group())
    group = dist.new_group(backend="cpu:gloo")
    assert _compat.served_device_types(group) == {"cpu"}
    dist.barrier(group)  # nobody may leave while others still connect


# ----------------------------------------------------------------------------------------------------------- the parts


def test_fingerprints_are_exact_in_float64_and_differ() -> None:
    marks = [fingerprint(f"training_step.{number}") for number in range(20_000)]
    assert len(set(marks)) == len(marks)
    assert all(1 <= mark <= 2**52 and int(torch.tensor(float(mark), dtype=torch.float64)) == mark for mark in marks)
    assert fingerprint("a") == fingerprint("a")


def test_ranks_that_say_the_same_are_grouped() -> None:
    assert described_by_rank(["a", "b", "a"]) == "a on ranks 0, 2; b on rank 1"


@ranks(1, 2, 3)
def test_numbers_arrive_in_rank_order_and_mismatches_are_seen_by_all(world_size: int) -> None:
    me, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    assert match("x", group, RULE, value=me + 0.25) == [r + 0.25 for r in range(world_size)]
    assert match_all(["a", "b"], [me, -me], group, RULE) == [[r, -r] for r in range(world_size)]
    assert match_all([], [], group, RULE) == [[] for _ in range(world_size)]
    if world_size > 1:
        with pytest.raises(DDPPluginError, match="one text.*odd on rank 1"):
            match("odd" if me == 1 else "even", group, RULE)
        with pytest.raises(DDPPluginError, match=r"\[a, c\] on rank 1"):
            match_all(["a", "c" if me == 1 else "b"], [0.0] * (1 + me), group, RULE)


@ranks(1, 2, 3)
def test_reduce_matched_is_exact_and_keeps_shapes_and_dtypes(world_size: int) -> None:
    me, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    for dtype, shape in ((torch.float32, ()), (torch.float64, (1,)), (torch.int64, ()), (torch.bfloat16, (1, 1))):
        numbers = [torch.full(shape, 3 * r + 1).to(dtype) for r in range(world_size)]
        exact = torch.stack([number.double() for number in numbers])
        means, ends = {"mean": exact.mean(0), "avg": exact.mean(0)}, {"min": exact.amin(0), "max": exact.amax(0)}
        for operation, expected in (means | ends | {"sum": exact.sum(0)}).items():
            found = reduce_matched("x", numbers[me], group, operation, RULE)
            integers_mean = dtype == torch.int64 and operation in ("mean", "avg")
            assert found.dtype == (torch.float64 if integers_mean else dtype)
            assert torch.equal(found, expected.to(found.dtype)), (dtype, operation)
            assert found.shape == shape


# ----------------------------------------------------------------------------------- beside the callbacks' own messages


@ranks(2, 3)
def test_a_gather_and_a_logged_key_that_meet_say_so_on_all_ranks() -> None:
    group = dist.new_group(backend="gloo")
    meet = match if rank() == 0 else lambda *_: gather_objects({"anything": [1, 2, 3]}, group)
    with pytest.raises(DDPPluginError, match=r"key training_step\.loss.*on rank 0"):
        meet("key training_step.loss", group, RULE)


class LogsAlone(Logs):
    """Rank 0 logs a key of its own in one hook."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self._log_alone)
        self.on_step = hook == "on_before_optimizer_step"

    def _log_alone(self, *_: Any) -> None:
        if rank() == 0:
            self.log("best", 1.0, sync_dist=True, on_step=self.on_step, on_epoch=not self.on_step)


@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_before_optimizer_step"])
@ranks(2, init=False)
def test_a_key_of_rank_0_alone_is_named_beside_all_callbacks(hook: str) -> None:
    callbacks = default_callbacks(ReplicaConsistency(every_n_steps=1))
    with pytest.raises(DDPPluginError, match="best"):
        trainer(callbacks=callbacks, num_sanity_val_steps=0).fit(LogsAlone(hook), loader(), loader())
