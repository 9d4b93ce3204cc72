"""One optimizer step of one rank as a timeline: what its time went to, and when each gradient bucket was on its way.

All times are seconds on one clock of this rank, whose zero means nothing; only differences are used. Plain arithmetic:
no processes, no Lightning.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddp_plugin.errors import explain

__all__ = ["PARTS", "BucketSpan", "Phase", "StepSummary", "StepTimeline", "steady", "summarize", "union_s"]

PARTS = ("data", "forward", "backward", "optimizer")
"""What a step consists of, in order. ``data`` is all between the end of one step and the start of the next: the loader,
the transfer to the device, and what the Trainer does in between. ``optimizer`` is all from the end of the backward on:
clipping, the optimizer, and callbacks."""


@dataclass(frozen=True)
class Phase:
    """One stretch of a step.

    Attributes:
        part: one of :data:`PARTS`.
        begin_s: when it began.
        end_s: when it ended.
    """

    part: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class BucketSpan:
    """One gradient bucket on its way.

    Attributes:
        index: position in the order of reduction, the same on all ranks.
        ready_s: when the last local gradient of it, and of all buckets before it, was there.
        reduced_s: when it held the mean over ranks.
    """

    index: int
    ready_s: float
    reduced_s: float


@dataclass(frozen=True)
class StepTimeline:
    """One optimizer step of one rank, with all its micro-batches.

    Attributes:
        step: number of the step.
        phases: in order; there are gaps where something else ran in between, such as a validation.
        buckets: in the order in which they became ready; empty where nothing was reduced.
        is_steady: whether it followed the step before at once: no first step, no validation or exchange in between.
        common_s: the last moment before a steady step that all ranks had in common: the end of the last reduction of
            the step before; ``None`` where there is none.
        layout: a number that changes when parameters move to other buckets.
        before: the phases of the step before from the backward of that reduction on, where there is that moment.
    """

    step: int
    phases: tuple[Phase, ...]
    buckets: tuple[BucketSpan, ...] = ()
    is_steady: bool = True
    common_s: float | None = None
    layout: int = 0
    before: tuple[Phase, ...] = ()

    @property
    def began_s(self) -> float:
        """When the step before had ended."""
        return self.phases[0].begin_s

    @property
    def ended_s(self) -> float:
        """When the last callback hook of the step began."""
        return self.phases[-1].end_s

    @property
    def duration_s(self) -> float:
        """Seconds from the end of the step before to the end of this one, gaps included."""
        return self.ended_s - self.began_s

    @property
    def reductions(self) -> tuple[tuple[BucketSpan, ...], ...]:
        """The buckets of each backward that reduced: one where gradients accumulate, more in manual optimization."""
        found: list[list[BucketSpan]] = []
        for bucket in self.buckets:
            if not found or bucket.index <= found[-1][-1].index:
                found.append([])
            found[-1].append(bucket)
        return tuple(tuple(reduction) for reduction in found)

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one bucket was on its way; where other ranks are late, waiting for them too."""
        return union_s((bucket.ready_s, bucket.reduced_s) for bucket in self.buckets)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that no backward hid: from the last bucket's readiness to the last bucket's mean.

        When the last bucket is ready, this rank's backward has no gradient left to compute. Until the last bucket is
        reduced, at least one is on its way, so all of this time is communication.
        """
        return sum(max(b.reduced_s for b in buckets) - max(b.ready_s for b in buckets) for buckets in self.reductions)

    def seconds_of(self, part: str) -> float:
        """Returns the seconds of one part; of the backward, those that are not exposed communication."""
        seconds = sum(phase.end_s - phase.begin_s for phase in self.phases if phase.part == part)
        return seconds - self.exposed_s if part == "backward" else seconds

    @property
    def last_reduced_s(self) -> float | None:
        """When the last reduction ended; ``None`` where nothing was reduced."""
        return max((bucket.reduced_s for bucket in self.buckets), default=None)

    @property
    def not_before_last_reduction(self) -> tuple[Phase, ...]:
        """The phases from the backward on whose reduction was the last."""
        backward = self.backward_of(self.reductions[-1][0]) if self.buckets else None
        return () if backward is None else self.phases[self.phases.index(backward) :]

    def backward_of(self, bucket: BucketSpan) -> Phase | None:
        """Returns the backward in which a bucket became ready."""
        for phase in self.phases:
            if phase.part == "backward" and phase.begin_s <= bucket.ready_s <= phase.end_s:
                return phase
        return None


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds that at least one of the intervals ``(begin, end)`` covers."""
    total, covered_until = 0.0, -float("inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
    return total


def steady(steps: Sequence[StepTimeline]) -> list[StepTimeline]:
    """Returns the steps that tell how the run goes on: of the newest bucket layout, and with nothing before them.

    Left out are the first step, those after a validation or an exchange, and those before DDP rebuilt its buckets;
    where nothing else is left, the newest layout's steps are returned as they are.
    """
    newest = [step for step in steps if step.layout == steps[-1].layout]
    return [step for step in newest if step.is_steady] or newest


@dataclass(frozen=True)
class StepSummary:
    """The means over some steps of one rank, in seconds; ``step_s`` is the sum of the five that follow it.

    Attributes:
        num_steps: how many steps.
        step_s: the whole step, without what ran in gaps.
        data_s: see :data:`PARTS`.
        forward_s: all forwards of the step, and whatever else comes before the backward.
        backward_s: all backwards, without the exposed communication.
        exposed_s: see :attr:`StepTimeline.exposed_s`.
        optimizer_s: see :data:`PARTS`.
        communication_s: see :attr:`StepTimeline.communication_s`.
        ready_ratios: for each bucket, by index: the part of the backward that had passed when it was ready; the
            backward ends, at 1, with the readiness of its last bucket.
        in_flight_s: for each bucket, by index: from its readiness to its mean.
    """

    num_steps: int
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    communication_s: float
    ready_ratios: tuple[float, ...]
    in_flight_s: tuple[float, ...]


def summarize(steps: Sequence[StepTimeline]) -> StepSummary:
    """Returns the means over steps of one layout.

    Args:
        steps: at least one, as :func:`steady` returns them.

    Raises:
        ValueError: no step.
    """
    if not steps:
        raise ValueError(explain("at least one step", "none", "Summarize after a step"))
    ratios: dict[int, list[float]] = {}
    in_flight: dict[int, list[float]] = {}
    for step in steps:
        for reduction in step.reductions:
            last_ready_s = max(bucket.ready_s for bucket in reduction)
            for bucket in reduction:
                in_flight.setdefault(bucket.index, []).append(bucket.reduced_s - bucket.ready_s)
                backward = step.backward_of(bucket)
                length_s = last_ready_s - backward.begin_s if backward is not None else 0.0
                if backward is not None and length_s > 0:
                    ratios.setdefault(bucket.index, []).append((bucket.ready_s - backward.begin_s) / length_s)

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values)

    part_s = {part: mean(step.seconds_of(part) for step in steps) for part in PARTS}
    exposed_s = mean(step.exposed_s for step in steps)
    return StepSummary(
        num_steps=len(steps),
        step_s=sum(part_s.values()) + exposed_s,
        data_s=part_s["data"],
        forward_s=part_s["forward"],
        backward_s=part_s["backward"],
        exposed_s=exposed_s,
        optimizer_s=part_s["optimizer"],
        communication_s=mean(step.communication_s for step in steps),
        ready_ratios=tuple(mean(ratios[index]) for index in sorted(ratios)),
        in_flight_s=tuple(mean(in_flight[index]) for index in sorted(in_flight)),
    )
