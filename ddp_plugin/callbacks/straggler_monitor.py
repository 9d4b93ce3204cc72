"""Names the slow rank although the all-reduce hides it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from ddp_plugin.callbacks._recording import MAX_REPORTS, StepRecording
from ddp_plugin.errors import counted, explain
from ddp_plugin.gather import gather_objects
from ddp_plugin.timeline.steps import StepTimeline
from ddp_plugin.timeline.straggling import MIN_STEPS, Arrivals, Lateness, Milestone, arrivals, compare, persistent

__all__ = ["StragglerMonitor", "StragglerReport"]

_PLACES = {
    "optimizer": "between the reduction and the end of the step (optimizer, clipping, callbacks)",
    "data": "in waiting for data (the loader, the transfer, and what runs between two steps)",
    "forward": "in the forward",
    "backward": "in the backward",
}


@dataclass(frozen=True)
class StragglerReport:
    """What one window of steps tells; the same on all ranks.

    Attributes:
        step: optimizer steps of the run at the end of the window.
        num_steps: steps of the window that were compared.
        step_s: mean seconds of a step.
        late_s: for each rank, the seconds by which it fell behind the earliest rank in a step; the sum of ``lost_s``.
        lost_s: for each rank, the seconds by which it fell behind in each part of the step: ``"optimizer"``,
            ``"data"``, ``"forward"``, ``"backward"``.
        suspect: the latest rank of this window, if it is late by more than the threshold.
        slow_rank: the rank that enough of the last windows suspect; ``None`` where there is no straggler.
        part: the part in which the slow rank, or else the latest, fell behind most.
        parameters: where that is the backward: the parameters of the gradient bucket before whose readiness it did so
            most; the layers to look at.
    """

    step: int
    num_steps: int
    step_s: float
    late_s: tuple[float, ...]
    lost_s: tuple[dict[str, float], ...]
    suspect: int | None
    slow_rank: int | None
    part: str
    parameters: tuple[str, ...]

    @property
    def latest_rank(self) -> int:
        """The rank that was latest in this window, by however little."""
        return self.late_s.index(max(self.late_s))

    def describe(self) -> str:
        """Returns the report in a sentence or two."""
        rank = self.latest_rank if self.slow_rank is None else self.slow_rank
        late_s, step_ms = self.late_s[rank], 1e3 * self.step_s
        size = f"{1e3 * late_s:.3g} ms of a {step_ms:.3g} ms step ({late_s / self.step_s:.0%})"
        if self.slow_rank is None:
            verdict = "No rank keeps the others waiting" if self.suspect is None else "Not yet often enough to be sure"
            return f"{verdict}: the latest, rank {rank}, is late by {size}."
        where = _PLACES[self.part]
        if self.parameters:
            first, last = self.parameters[0], self.parameters[-1]
            where += f" of {first}" if first == last else f" of {first} … {last}"
        lost_ms = 1e3 * self.lost_s[rank][self.part]
        return (
            f"Rank {rank} of {len(self.late_s)} keeps the others waiting: it is late by {size}, {lost_ms:.3g} ms of "
            f"that {where}."
        )


class StragglerMonitor(StepRecording):
    """Finds the rank that the others wait for, how late it is, and in which part of the step.

    A slow rank makes all others wait inside the all-reduce, so every rank's step takes equally long, and no timing of
    steps or of backwards shows who it was. Each rank's own gradients are ready at different times, though. They are
    counted from a moment that all ranks share, the end of the reduction before, and never compared by the clocks of
    different hosts (:mod:`ddp_plugin.timeline.straggling`, with the error of this). Lateness is split
    into what came after that reduction, waiting for data, the forward, and the backward, there down to the gradient
    bucket whose layers took the time.

    A rank is named when the same one is late by more than ``threshold_ratio`` of a step in ``num_late_windows`` of the
    last ``num_windows`` windows. Names change with one warning each, and one line says when nobody is late any more.

    What it does not see: a delay on all ranks alike; what a rank loses in a forward before the ranks meet there, in a
    collective of your own; time that it loses after this callback's ``on_train_batch_end`` and before the next fetch of
    data, where Lightning lets the ranks meet. The first step after a validation, the start of an epoch or an exchange
    is left out. A window in which fewer than five steps are left, or in which the ranks' steps consist of different
    parts, such as another number of micro-batches on each rank, is not compared; the first such window is warned of,
    and at the end of ``fit`` it is said if there was no report.

    Watching the buckets replaces DDP's reducer by the bit-identical ``allreduce`` hook.

    Args:
        every_n_steps: optimizer steps of a window, at least 10; the ranks compare them at its end.
        threshold_ratio: seconds late per second of a step, above which a rank is suspected.
        num_windows: how many of the last windows count.
        num_late_windows: how many of these must suspect a rank before it is named.

    Attributes:
        reports: a :class:`StragglerReport` for each window of this ``fit``, the newest 1000, the same on all ranks;
            empty on one process.

    Raises:
        ValueError: a number out of range; at setup, ``logical_shards``, which reduce without buckets.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.

    Collectives:
        One object gather of some numbers for each milestone on the control group, every ``every_n_steps`` optimizer
        steps and at the end of training, on all ranks. None on one process.
    """

    _without_buckets = "has nothing to compare"
    _needs_buckets = True

    def __init__(
        self,
        every_n_steps: int = 50,
        threshold_ratio: float = 0.1,
        num_windows: int = 4,
        num_late_windows: int = 3,
    ) -> None:
        if every_n_steps < 2 * MIN_STEPS:
            raise ValueError(
                explain(f"every_n_steps of at least {2 * MIN_STEPS}", repr(every_n_steps), "Compare more steps at once")
            )
        if not 0 < threshold_ratio < 1:
            raise ValueError(explain("threshold_ratio between 0 and 1", repr(threshold_ratio), "Give a part of a step"))
        if not 1 <= num_late_windows <= num_windows:
            raise ValueError(
                explain(
                    "num_late_windows from 1 to num_windows",
                    f"num_late_windows={num_late_windows} and num_windows={num_windows}",
                    "Ask for fewer late windows",
                )
            )
        super().__init__(every_n_steps)
        self.threshold_ratio = threshold_ratio
        self.num_windows = num_windows
        self.num_late_windows = num_late_windows
        self.reports: list[StragglerReport] = []
        self._suspects: deque[int | None] = deque(maxlen=num_windows)
        self._obstacle: str | None = None  # to the comparison of the first window that was not compared

    @property
    def last_report(self) -> StragglerReport | None:
        """The newest report; ``None`` before the first."""
        return self.reports[-1] if self.reports else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the buckets, where there are several processes."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.reports = []
            self._suspects.clear()
            self._obstacle = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares what is left, and says so if nothing was ever compared.

        Collectives:
            Those of the last exchange, on all ranks.
        """
        super().on_train_end(trainer, pl_module)
        if not self._is_on or self.reports:
            return
        if self._obstacle is None:
            rank_zero_info(
                f"StragglerMonitor has no report: this fit had too few steps, and a window has {self.every_n_steps}."
            )
        else:
            rank_zero_warn(f"StragglerMonitor has no report, not of a single window: {self._obstacle}")

    def _exchange(self, trainer: pl.Trainer, steps: list[StepTimeline], num_steps: int) -> None:
        """Compares the ranks.

        Collectives:
            One object gather, on all ranks.
        """
        by_rank = [rank for rank in gather_objects(arrivals(steps), self._group) if rank is not None]
        obstacle = _obstacle(by_rank, trainer.world_size, num_steps)
        if obstacle is not None:
            if self._obstacle is None and num_steps == self.every_n_steps:  # the rest at the end may well be too short
                self._obstacle = obstacle
                rank_zero_warn(
                    f"StragglerMonitor, step {trainer.global_step}: this window is not compared: {obstacle} Other such "
                    "windows are passed over in silence."
                )
            return
        lateness = compare(by_rank)
        before = self.last_report
        self._suspects.append(lateness.suspect(self.threshold_ratio))
        report = self._report(trainer, lateness)
        self.reports.append(report)
        del self.reports[:-MAX_REPORTS]
        latest = report.latest_rank
        self._log(
            trainer,
            {
                "ddp/late_s": report.late_s[latest],
                "ddp/late_ratio": report.late_s[latest] / report.step_s,
                "ddp/latest_rank": float(latest),
                "ddp/slow_rank": float(-1 if report.slow_rank is None else report.slow_rank),
                **{f"ddp/late_{part}_s": seconds for part, seconds in report.lost_s[latest].items()},
            },
        )
        if report.slow_rank == (before.slow_rank if before is not None else None):
            return
        if report.slow_rank is None:
            rank_zero_info(f"StragglerMonitor, step {report.step}: {report.describe()}")
        else:
            rank_zero_warn(
                f"StragglerMonitor, step {report.step}: {report.describe()} So in "
                f"{counted(self._suspects.count(report.slow_rank), 'window')} of the last {len(self._suspects)}."
            )

    def _report(self, trainer: pl.Trainer, lateness: Lateness) -> StragglerReport:
        slow_rank = persistent(list(self._suspects), self.num_late_windows)
        milestone = lateness.worst_milestone(lateness.latest_rank if slow_rank is None else slow_rank)
        return StragglerReport(
            step=trainer.global_step,
            num_steps=lateness.num_steps,
            step_s=lateness.step_s,
            late_s=lateness.late_s,
            lost_s=tuple(lateness.lost_s(rank) for rank in range(len(lateness.late_s))),
            suspect=self._suspects[-1],
            slow_rank=slow_rank,
            part=milestone.part,
            parameters=self._parameters(milestone),
        )

    def _parameters(self, milestone: Milestone) -> tuple[str, ...]:
        contents = self._recorder.contents.get(milestone.bucket) if milestone.bucket is not None else None
        return contents.names if contents is not None else ()


def _obstacle(by_rank: Sequence[Arrivals], world_size: int, num_steps: int) -> str | None:
    """Returns why a window cannot be compared, in a sentence or two; ``None`` where it can."""
    fewest = min(rank.num_steps for rank in by_rank) if len(by_rank) == world_size else 0
    if fewest < MIN_STEPS:
        return (
            f"{fewest} of its {counted(num_steps, 'step')} can be compared, and it takes {MIN_STEPS}. A step counts "
            "unless it reduces nothing, has other micro-batches than most, or is the first after a validation, an "
            "epoch's start or an exchange. Validate less often, or take a larger every_n_steps."
        )
    for rank, arrived in enumerate(by_rank):
        if arrived.milestones != by_rank[0].milestones:
            return (
                f"steps consist of other parts on rank {rank} ({len(arrived.milestones)}) than on rank 0 "
                f"({len(by_rank[0].milestones)}), as with another number of micro-batches on each rank."
            )
    return None
