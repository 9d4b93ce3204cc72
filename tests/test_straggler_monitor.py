"""StragglerMonitor: ranks that are made slow by a known amount in a known place, and ranks that are not."""

import os
import random
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, StragglerMonitor
from ddp_plugin.callbacks.straggler_monitor import StragglerReport
from ddp_plugin.hooks import HOOKS
from ddp_plugin.timeline.recorder import StepRecorder
from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline
from ddp_plugin.timeline.straggling import Arrivals, Milestone, arrivals, compare, milestones_of, persistent
from tests.delays import BUCKET_CAP_MB, Delayed, loader
from tests.harness import ranks, run_ranks, trainer

DELAY_S = 0.03
SLACK_S = 0.01  # what other programs on the machine may add or hide, in the median over the windows


class Numbers(Logger):
    """Keeps what it is given."""

    name, version = "numbers", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))


def monitor(**settings: Any) -> StragglerMonitor:
    return StragglerMonitor(
        **({"every_n_steps": 10, "threshold_ratio": 0.25, "num_windows": 3, "num_late_windows": 2} | settings)
    )


def fit(
    module: pl.LightningModule, data: Any, *callbacks: pl.Callback, **settings: Any
) -> tuple[pl.Trainer, list[str]]:
    """Trains, and returns what was warned of by the monitor."""
    settings = {"strategy": CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB)} | settings
    run = trainer(callbacks=list(callbacks), use_distributed_sampler=False, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, data)
    return run, [str(w.message) for w in caught if "StragglerMonitor" in str(w.message)]


def usual(watch: StragglerMonitor) -> tuple[str, float, float]:
    """The part most often found, and the medians over the windows of the ranks' lateness."""
    part = statistics.mode(report.part for report in watch.reports)
    first, second = (statistics.median(report.late_s[rank] for report in watch.reports) for rank in range(2))
    return part, first, second


def same_on_all_ranks(value: Any) -> bool:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return all(part == parts[0] for part in parts)


# ------------------------------------------------------------------------------------------------- slow, and named


@ranks(2, init=False)
@pytest.mark.parametrize("where", ["data", "forward", "optimizer", 0, 2])
def test_the_slow_rank_is_named_with_the_part_in_which_it_is_late(where: str | int) -> None:
    watch = monitor()
    slow_data = {"delay_s": DELAY_S} if where == "data" else {}
    _, warned = fit(Delayed(None if where == "data" else where, DELAY_S), loader(31, **slow_data), watch)
    assert same_on_all_ranks(watch.reports)
    assert watch.reports[0].slow_rank is None  # two windows have to agree
    assert [report.step for report in watch.reports] == [10, 20, 30]  # and one step more says nothing
    report = next(report for report in reversed(watch.reports) if report.suspect == 1)
    assert report.slow_rank == 1
    part, first_s, second_s = usual(watch)
    assert part == report.part == ("backward" if isinstance(where, int) else where)
    assert second_s == pytest.approx(DELAY_S, abs=SLACK_S)
    assert DELAY_S - 0.005 < report.lost_s[1][part] < report.late_s[1] + 1e-9
    assert first_s < 0.005
    assert set(report.parameters) == (
        {f"layers.{where}.weight", f"layers.{where}.bias"} if part == "backward" else set()
    )
    assert len(warned) == (1 if os.environ["RANK"] == "0" else 0)  # once, on rank 0
    for text in warned:
        assert "Rank 1 of 2 keeps the others waiting" in text
        assert (f"layers.{where}." in text) == (part == "backward")


@ranks(3, init=False)
def test_of_three_ranks_the_second() -> None:
    watch = monitor()
    fit(Delayed("forward", DELAY_S), loader(31), watch)
    assert watch.last_report is not None
    assert watch.last_report.slow_rank == 1
    assert len(watch.last_report.late_s) == 3


@ranks(2, init=False)
def test_where_ranks_meet_in_the_forward_the_late_one_is_still_seen() -> None:
    """Buffers are broadcast at the start of the forward: rank 0 waits there, so at its end both are equally far."""
    watch = monitor()
    fit(Delayed(batchnorm=True), loader(31, delay_s=DELAY_S), watch)
    part, first_s, _ = usual(watch)
    assert watch.last_report is not None
    assert (watch.last_report.slow_rank, part) == (1, "data")
    assert first_s < 0.005


@ranks(2, init=False)
def test_accumulated_delays_add_up() -> None:
    watch = monitor()
    fit(Delayed("forward", 0.015), loader(3 * 31), watch, accumulate_grad_batches=3)
    part, first_s, second_s = usual(watch)
    assert watch.last_report is not None
    assert (watch.last_report.slow_rank, part, watch.last_report.num_steps) == (1, "forward", 9)
    assert second_s == pytest.approx(0.045, abs=SLACK_S)
    assert first_s < 0.01


# --------------------------------------------------------------------------------------------- controls that bite


@ranks(2, init=False)
def test_nobody_is_named_where_nobody_is_slow() -> None:
    watch = monitor()
    _, warned = fit(Delayed(base_s=0.004, forward_s=0.01), loader(121), watch)
    assert len(watch.reports) == 12
    assert [report.slow_rank for report in watch.reports] == [None] * 12
    assert warned == []


@ranks(2, init=False)
def test_wall_times_do_not_tell_and_readiness_does() -> None:
    watch, times = monitor(), CommunicationMonitor(every_n_steps=10)
    fit(Delayed(2, DELAY_S), loader(31), watch, times)
    _, first_s, second_s = usual(watch)
    walls = [[rank.backward_s + rank.exposed_s for rank in report.ranks] for report in times.reports[:3]]
    assert abs(statistics.median(second - first for first, second in walls)) < 0.1 * DELAY_S
    assert second_s - first_s > DELAY_S - 0.005
    # Half of the ranks wait for the other half.
    assert statistics.median(report.wait_s for report in times.reports[:3]) == pytest.approx(DELAY_S / 2, abs=0.005)


class WithoutReadiness(StepRecorder):
    """What a monitor would see that takes the end of a reduction for its beginning."""

    def take(self, *, wait: bool = False) -> list[StepTimeline]:
        return [
            replace(taken, buckets=tuple(replace(bucket, ready_s=bucket.reduced_s) for bucket in taken.buckets))
            for taken in super().take(wait=wait)
        ]


@ranks(2, init=False)
def test_without_readiness_the_same_delay_is_hidden() -> None:
    watch = monitor()
    watch._recorder = WithoutReadiness()
    fit(Delayed(2, DELAY_S), loader(31), watch)
    _, first_s, second_s = usual(watch)
    assert len(watch.reports) == 3
    assert watch.last_report is not None
    assert watch.last_report.slow_rank is None
    assert max(first_s, second_s) < 0.2 * DELAY_S


@ranks(2, init=False)
def test_a_change_is_said_once_and_the_end_too() -> None:
    watch, numbers = monitor(), Numbers()
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.callbacks.straggler_monitor.rank_zero_info", said.append)
        _, warned = fit(Delayed("forward", DELAY_S, until=40), loader(81), watch, logger=numbers)
    found = [report.slow_rank for report in watch.reports]
    assert (found[0], found[3], found[-1]) == (None, 1, None)
    if os.environ["RANK"] != "0":
        assert warned == numbers.rows == []
        return
    assert len(warned) == 1
    assert len(said) == 1
    assert "No rank keeps the others waiting" in said[0]
    assert [step for step, _ in numbers.rows] == list(range(9, 80, 10))  # Lightning counts batches from 0
    assert [row["ddp/slow_rank"] for _, row in numbers.rows] == [-1 if rank is None else rank for rank in found]
    for report, (_, row) in zip(watch.reports, numbers.rows, strict=True):
        assert row["ddp/late_s"] == max(report.late_s)
        assert row["ddp/latest_rank"] == report.latest_rank
        for part in ("optimizer", "data", "forward", "backward"):
            assert row[f"ddp/late_{part}_s"] == report.lost_s[report.latest_rank][part]


# ------------------------------------------------------------------------------------------------------------ corners


@ranks(2, init=False)
def test_weights_are_the_same_bits_with_and_without() -> None:
    weights = []
    for callbacks in ([], [monitor(every_n_steps=10), CommunicationMonitor(every_n_steps=3)]):
        module = Delayed(base_s=0.0, forward_s=0.0)
        fit(module, loader(25), *callbacks)
        weights.append([parameter.detach().clone() for parameter in module.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


@ranks(2, init=False)
@pytest.mark.parametrize("setting", ["static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_settings_of_the_wrap(setting: str) -> None:
    watch = monitor()
    strategy = CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB, **{setting: True})
    fit(Delayed(1, DELAY_S), loader(31), watch, strategy=strategy)
    assert watch.last_report is not None
    assert (watch.last_report.slow_rank, watch.last_report.part) == (1, "backward")
    assert any("layers.1." in name for name in watch.last_report.parameters)  # of the bucket that holds the layer


class Validated(Delayed):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        time.sleep(0.05 if int(os.environ["RANK"]) == 0 else 0.0)  # rank 0 is slow there, which is no step's business


@ranks(2, init=False)
def test_validations_epochs_and_a_second_fit() -> None:
    watch = monitor()
    module = Validated("forward", DELAY_S)
    run = trainer(
        callbacks=[watch],
        use_distributed_sampler=False,
        max_epochs=3,
        val_check_interval=7,
        num_sanity_val_steps=1,
        limit_val_batches=1,
        strategy=CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.fit(module, loader(21), loader(2))
        assert [report.step for report in watch.reports] == [10, 20, 30, 40, 50, 60]
        assert watch.last_report is not None
        assert (watch.last_report.slow_rank, watch.last_report.part) == (1, "forward")
        assert watch.last_report.num_steps in (7, 8)  # without those after an exchange and a validation
        run.fit_loop.max_epochs = 5
        run.fit(module, loader(21), loader(2))
    assert [report.step for report in watch.reports] == [73, 83, 93, 103]
    assert watch.last_report.slow_rank == 1


class Alternating(Delayed):
    """Manual optimization, two backwards with a reduction each in a step, of which one is slow."""

    def __init__(self, where: str | int, slow_pass: int) -> None:
        super().__init__(where, DELAY_S)
        self.automatic_optimization, self.slow_pass = False, slow_pass

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        where = self.where
        for number in range(2):
            self.where = where if number == self.slow_pass else None
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()  # type: ignore[union-attr]
        self.where = where


@ranks(2, init=False)
@pytest.mark.parametrize("slow_pass", [0, 1])
@pytest.mark.parametrize("where", ["forward", 2])
def test_manual_optimization_with_two_reductions_in_a_step(where: str | int, slow_pass: int) -> None:
    watch = monitor()
    fit(Alternating(where, slow_pass), loader(31), watch)
    part, first_s, second_s = usual(watch)
    report = watch.last_report
    assert report is not None
    assert (report.slow_rank, part) == (1, "backward" if where == 2 else where)
    if where == 2:
        assert any("layers.2.weight" in report.parameters for report in watch.reports[-2:])
    assert second_s == pytest.approx(DELAY_S, abs=SLACK_S)
    assert first_s < 0.005


class Packing(Delayed):
    """Manual optimization with another number of micro-batches on each rank, and one reduction a step."""

    def __init__(self) -> None:
        super().__init__(base_s=0.0, forward_s=0.0)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        strategy: Any = self.trainer.strategy
        optimizer.zero_grad()
        for _ in range(2 + self.global_rank):
            with strategy.block_backward_sync():
                self.manual_backward(super().training_step(batch, batch_idx))
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@ranks(2, init=False)
def test_ranks_with_other_numbers_of_micro_batches_train_on_and_are_not_compared() -> None:
    watch = monitor()
    run, warned = fit(Packing(), loader(31), watch)
    assert (run.global_step, watch.reports) == (31, [])
    if os.environ["RANK"] == "0":
        at_the_window, at_the_end = warned  # and not for each of the three windows
        assert "step 10: this window is not compared: steps consist of other parts on rank 1" in at_the_window
        assert "no report, not of a single window: steps consist of other parts on rank 1" in at_the_end
    else:
        assert warned == []


@ranks(2, init=False)
def test_epochs_of_one_batch_are_said_not_to_be_compared() -> None:
    watch = monitor()
    run, warned = fit(Delayed("forward", 0.001, base_s=0.0, forward_s=0.0), loader(1), watch, max_epochs=21)
    assert (run.global_step, watch.reports) == (21, [])
    assert len(warned) == (2 if os.environ["RANK"] == "0" else 0)
    for text in warned:
        assert "0 of its 10 steps can be compared, and it takes 5" in text


@ranks(2, init=False)
def test_a_fit_shorter_than_a_window_is_said_to_have_no_report() -> None:
    watch, said = monitor(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.callbacks.straggler_monitor.rank_zero_info", said.append)
        _, warned = fit(Delayed(base_s=0.0, forward_s=0.0), loader(3), watch)
    assert watch.reports == warned == []
    assert said == ["StragglerMonitor has no report: this fit had too few steps, and a window has 10."]


@ranks(2, init=False)
def test_the_newest_reports_are_kept() -> None:
    watch, times = monitor(), CommunicationMonitor(every_n_steps=4)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("straggler_monitor", "communication_monitor"):
            patch.setattr(f"ddp_plugin.callbacks.{module}.MAX_REPORTS", 2)
        fit(Delayed(base_s=0.0, forward_s=0.0), loader(40), watch, times)
    assert [report.step for report in watch.reports] == [30, 40]
    assert [report.step for report in times.reports] == [36, 40]


class Unfreezing(Delayed):
    def on_train_epoch_start(self) -> None:
        self.layers[0].requires_grad_(self.current_epoch > 0)


@ranks(2, init=False)
def test_buckets_that_change_in_a_new_wrap() -> None:
    watch = monitor()
    fit(Unfreezing(0, DELAY_S), loader(31), watch, max_epochs=2)
    before, after = (
        [name for report in half for name in report.parameters] for half in (watch.reports[:3], watch.reports[3:])
    )
    assert "layers.0.weight" in after
    assert not any("layers.0." in name for name in before)


def exchanging_parameters() -> CustomDDPStrategy:
    return CustomDDPStrategy(comm_hook={"name": "local_sgd", "period": 8, "start_step": 0})


@ranks(2, init=False)
def test_it_says_where_it_has_nothing_to_compare() -> None:
    said: list[str] = []
    watch = monitor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.callbacks._recording.rank_zero_info", said.append)
        fit(Delayed("forward", DELAY_S), loader(11), watch, strategy=exchanging_parameters())
    assert watch.reports == []
    assert len(said) == 1
    assert said[0].startswith("StragglerMonitor has nothing to compare with comm_hook='local_sgd'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin._compat.averages_models", lambda strategy: True)
        patch.setattr("ddp_plugin.callbacks._recording.rank_zero_info", said.append)
        fit(Delayed("forward", DELAY_S), loader(11), watch)
    assert watch.reports == []
    assert said[1].startswith("StragglerMonitor has nothing to compare with model averaging")


def test_one_process_has_nothing_to_compare_under_any_strategy() -> None:
    for strategy in ("auto", CustomDDPStrategy()):
        watch = monitor()
        fit(Delayed(base_s=0.0, forward_s=0.0), loader(11), watch, strategy=strategy, devices=1)
        assert watch.reports == []
        assert watch.last_report is None


@ranks(2, init=False)
def test_other_strategies_and_logical_shards_are_refused() -> None:
    with pytest.raises(TypeError, match="StragglerMonitor runs on several processes"):
        fit(Delayed(), loader(2), monitor(), strategy=DDPStrategy())
    with pytest.raises(ValueError, match="logical_shards"):
        fit(Delayed(), loader(2), monitor(), strategy=CustomDDPStrategy(logical_shards=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_steps": 9},
        {"every_n_steps": 20.5},
        {"threshold_ratio": 0.0},
        {"num_late_windows": 0},
        {"num_windows": 2, "num_late_windows": 3},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        StragglerMonitor(**settings)


def test_hooks_that_compress_are_watched_too() -> None:
    found = run_ranks(fit_with_hook, 2, init=False)
    assert found == [(1, "backward")] * 2


def fit_with_hook() -> tuple[int | None, str]:
    watch = monitor()
    strategy = CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB, comm_hook="bf16" if "bf16" in HOOKS else None)
    fit(Delayed(3, DELAY_S), loader(31), watch, strategy=strategy)
    assert watch.last_report is not None
    return watch.last_report.slow_rank, watch.last_report.part


# --------------------------------------------------------------------------------------------------------- the kernel


def step(
    common_s: float = 0.0, rest: float = 0.0, tail: float = 1.0, data: float = 2.0, forward: float = 3.0
) -> StepTimeline:
    """The buckets are ready 1 and 2 seconds into the backward and reduced 4 seconds into it.

    The backward before went on for ``rest`` seconds after the common moment, and the optimizer took ``tail``.
    """
    over_s = common_s + rest
    before = (Phase("backward", common_s - 5.0, over_s), Phase("optimizer", over_s, over_s + tail))
    ends = [over_s + tail]
    for length in (data, forward, 5.0, 0.5):
        ends.append(ends[-1] + length)
    parts = ("data", "forward", "backward", "optimizer")
    phases = tuple(Phase(part, ends[i], ends[i + 1]) for i, part in enumerate(parts))
    buckets = tuple(BucketSpan(index, ends[2] + 1.0 + index, ends[2] + 4.0) for index in range(2))
    return StepTimeline(0, phases, buckets, common_s=common_s, before=before)


def test_milestones_are_counted_from_the_common_moment() -> None:
    names = [
        Milestone("backward"),
        Milestone("optimizer"),
        Milestone("data"),
        Milestone("forward"),
        *(Milestone("backward", i) for i in (0, 1)),
    ]
    assert milestones_of(step(common_s=100.0)) == tuple(zip(names, (0.0, 1.0, 3.0, 6.0, 7.0, 8.0), strict=True))
    assert milestones_of(StepTimeline(0, step().phases, step().buckets)) == ()
    assert milestones_of(StepTimeline(0, step().phases, common_s=0.0)) == ()


def test_what_a_backward_does_after_its_last_reduction_is_charged_to_the_backward() -> None:
    """Its end is noted by another thread than the reduction's, and may come first."""
    steps = [step(rest=rest) for rest in (-0.001, 4.0)]
    arrived = [arrivals([one] * 6) for one in steps]
    lateness = compare([one for one in arrived if one is not None])
    lost_s = {"optimizer": 0.0, "data": 0.0, "forward": 0.0, "backward": 4.0}
    assert lateness.lost_s(1) == pytest.approx(lost_s, abs=0.01)
    assert lateness.worst_milestone(1) == Milestone("backward")


def test_lateness_is_against_the_earliest_rank_at_each_milestone() -> None:
    by_rank = [arrivals([step(common_s=50.0 * rank, data=2.0 + 4.0 * (rank == 2))] * 6) for rank in range(3)]
    lateness = compare([arrived for arrived in by_rank if arrived is not None])
    assert lateness.late_s == (0.0, 0.0, 4.0)
    assert lateness.lost_s(2) == {"optimizer": 0.0, "data": 4.0, "forward": 0.0, "backward": 0.0}
    assert lateness.worst_milestone(2) == Milestone("data")
    assert lateness.suspect(0.1) == 2
    assert lateness.suspect(0.9) is None
    assert lateness.step_s == pytest.approx(statistics.fmean((10.0, 10.0, 14.0)))


def noisy(generator: random.Random, late_s: float = 0.0) -> Arrivals:
    """Each part of each step varies by a seventh of the step and more."""

    def about(length: float) -> float:
        return length + generator.expovariate(1 / 1.5)

    found = arrivals([step(data=about(2.0) + late_s, forward=about(3.0), tail=about(1.0)) for _ in range(50)])
    assert found is not None
    return found


def test_noise_accuses_nobody_and_lateness_is_seen_through_it() -> None:
    generator = random.Random(0)
    suspects = [compare([noisy(generator) for _ in range(4)]).suspect(0.1) for _ in range(200)]
    assert any(rank is not None for rank in suspects)  # a window alone may accuse
    assert all(persistent(suspects[i : i + 4], 3) is None for i in range(197))
    late = [compare([noisy(generator, 2.5 * (rank == 2)) for rank in range(4)]).suspect(0.1) for _ in range(200)]
    assert all(persistent(late[i : i + 4], 3) == 2 for i in range(197))


def test_lateness_grows_again_after_the_ranks_have_met() -> None:
    """Two micro-batches; rank 1 takes 4 s longer in each forward, and rank 0 waits for it before the second one."""
    by_rank = []
    for forwards, waits in (((3.0, 3.0), 5.0), ((7.0, 7.0), 1.0)):
        ends = [1.0]
        for length in (2.0, forwards[0], 5.0, 0.5, waits, forwards[1], 5.0):
            ends.append(ends[-1] + length)
        parts = ("data", "forward", "backward", "optimizer", "data", "forward", "backward")
        phases = tuple(Phase(part, ends[i], ends[i + 1]) for i, part in enumerate(parts))
        bucket = BucketSpan(0, ends[-2] + 2.0, ends[-1])
        one = StepTimeline(0, phases, (bucket,), common_s=0.0, before=(Phase("optimizer", 0.0, 1.0),))
        arrived = arrivals([one])
        assert arrived is not None
        by_rank.append(arrived)
    lateness = compare(by_rank)
    assert lateness.lost_s(1) == {"optimizer": 0.0, "data": 0.0, "forward": 8.0, "backward": 0.0}
    assert lateness.late_s == (0.0, 8.0)
    assert lateness.worst_milestone(1).part == "forward"


def test_the_ranks_meet_at_each_reduction_of_a_step() -> None:
    """Two reductions; rank 1 takes 4 s longer in the first forward, and 1 s in the second."""
    by_rank = []
    for first, second, waits in ((3.0, 2.0, (5.0, 2.0)), (7.0, 3.0, (1.0, 1.0))):
        ends = [1.0]
        for length in (2.0, first, 1.0 + waits[0], second, 1.0 + waits[1]):
            ends.append(ends[-1] + length)
        parts = ("data", "forward", "backward", "forward", "backward")
        phases = tuple(Phase(part, ends[i], ends[i + 1]) for i, part in enumerate(parts))
        buckets = tuple(BucketSpan(0, ends[i] + 1.0, ends[i + 1]) for i in (2, 4))
        before = (Phase("optimizer", 0.0, 1.0),)
        arrived = arrivals([StepTimeline(0, phases, buckets, common_s=0.0, before=before)])
        assert arrived is not None
        by_rank.append(arrived)
    meeting = [(milestone.part, milestone.reduction) for milestone in by_rank[0].milestones]
    assert meeting == [(part, 0) for part in ("optimizer", *parts[:3])] + [(part, 1) for part in parts[3:]]
    assert by_rank[1].seconds == (1.0, 3.0, 10.0, 11.0, 3.0, 4.0)
    lateness = compare(by_rank)
    assert lateness.lost_s(1) == {"optimizer": 0.0, "data": 0.0, "forward": 5.0, "backward": 0.0}
    assert lateness.late_s == (0.0, 5.0)
    assert lateness.worst_milestone(1) == Milestone("forward", None, 0)


def test_the_usual_kind_of_step_counts() -> None:
    short = StepTimeline(0, step().phases, step().buckets[:1], common_s=0.0, before=step().before)
    arrived = arrivals([step(), step(), short])
    assert arrived is not None
    assert (arrived.num_steps, len(arrived.milestones)) == (2, 6)
    assert arrivals([]) is None


def test_persistence() -> None:
    assert persistent([1, None, 1, 1], 3) == 1
    assert persistent([1, None, None, 1], 3) is None
    assert persistent([0, 1, 0, 1], 2) == 1
    assert persistent([], 1) is None


def test_ranks_with_other_milestones_cannot_be_compared() -> None:
    first = Arrivals(6, 1.0, (Milestone("data"),), (1.0,))
    second = Arrivals(6, 1.0, (Milestone("forward"),), (1.0,))
    with pytest.raises(ValueError, match="the same milestones"):
        compare([first, second])


def test_a_report_in_words() -> None:
    lost = {"optimizer": 0.0, "data": 0.001, "forward": 0.0, "backward": 0.03}
    report = StragglerReport(
        40, 9, 0.05, (0.0, 0.031), (dict.fromkeys(lost, 0.0), lost), 1, 1, "backward", ("a.w", "b.w")
    )
    assert report.describe() == (
        "Rank 1 of 2 keeps the others waiting: it is late by 31 ms of a 50 ms step (62%), 30 ms of that in the "
        "backward of a.w … b.w."
    )
