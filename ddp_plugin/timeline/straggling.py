"""Which rank the others wait for, although the all-reduce makes every rank's step take equally long.

A rank that is late makes the others wait inside the reduction, so the wall time of a backward is the same everywhere.
What differs is when a rank's own gradients were ready. Times of different hosts cannot be compared, but all ranks see
the end of a reduction at nearly the same moment; so every time here is counted from the end of the reduction before it,
which for the first of a step is the last of the step before. Ranks see that end apart by about one message of the ring
and a thread's wake-up, and by no more than that is a lateness off.

Lateness is looked at wherever a part of the step ends, in order, and a rank is charged with the parts in which its
lateness grows. Ranks also meet inside a step, for the broadcast of buffers or before the next micro-batch: there the
lateness shrinks again, because the others waited, and what was lost before is still charged. A rank that is slow in one
part and catches up by itself in another looks the same. Plain arithmetic: no processes, no Lightning.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_plugin.errors import explain
from ddp_plugin.timeline.steps import StepTimeline, steady

__all__ = ["MIN_STEPS", "Arrivals", "Lateness", "Milestone", "arrivals", "compare", "milestones_of", "persistent"]

MIN_STEPS = 5
"""Fewest steps of a window from which ranks are compared."""


@dataclass(frozen=True)
class Milestone:
    """Where a rank can be late.

    Attributes:
        part: the part of the step that ends there, one of :data:`~ddp_plugin.timeline.steps.PARTS`; those before the
            first ``"data"`` came after the common moment in the step before: what its backward did once all was
            reduced, and ``"optimizer"``.
        bucket: in a backward that reduces, the index of the gradient bucket that is ready there; else ``None``.
        reduction: the reduction of the step that it leads to, from 0 on; only manual optimization has more than one.
    """

    part: str
    bucket: int | None = None
    reduction: int = 0


@dataclass(frozen=True)
class Arrivals:
    """When one rank reached each milestone, on average over the steps of a window.

    Attributes:
        num_steps: steps that could be compared.
        step_s: seconds from one common moment to the next.
        milestones: in order; the same on all ranks.
        seconds: for each milestone, after the last moment before it that the ranks had in common.
    """

    num_steps: int
    step_s: float
    milestones: tuple[Milestone, ...]
    seconds: tuple[float, ...]


def milestones_of(step: StepTimeline) -> tuple[tuple[Milestone, float], ...]:
    """Returns the milestones up to the last reduction of a step, each with its seconds after the common moment.

    The common moment is the end of the reduction before, in manual optimization also of one in the same step.

    Args:
        step: any; nothing is returned where it has no reduction or no common moment before it.
    """
    since_s = step.common_s
    if since_s is None or not step.buckets:
        return ()
    found: list[tuple[Milestone, float]] = []
    for number, reduction in enumerate(step.reductions):
        backward = step.backward_of(reduction[0])
        if number == 0:
            found += [(Milestone(phase.part), max(0.0, phase.end_s - since_s)) for phase in step.before]
        for phase in step.phases:
            if phase == backward:
                break
            if phase.end_s > since_s:
                found.append((Milestone(phase.part, None, number), phase.end_s - since_s))
        found += [(Milestone("backward", bucket.index, number), bucket.ready_s - since_s) for bucket in reduction]
        since_s = max(since_s, *(bucket.reduced_s for bucket in reduction))
    return tuple(found)


def arrivals(steps: Sequence[StepTimeline]) -> Arrivals | None:
    """Returns the arrivals of one rank in a window; ``None`` where no step can be compared.

    Args:
        steps: all steps of the window, in order. Where they differ in their milestones, as the last step of an epoch
            does that has fewer micro-batches, the most frequent kind counts.
    """
    rows = [(step, row) for step in (steady(steps) if steps else []) if (row := milestones_of(step))]
    if not rows:
        return None
    usual = statistics.mode(tuple(milestone for milestone, _ in row) for _, row in rows)
    rows = [(step, row) for step, row in rows if tuple(milestone for milestone, _ in row) == usual]
    columns = zip(*([seconds for _, seconds in row] for _, row in rows), strict=True)
    return Arrivals(
        num_steps=len(rows),
        step_s=statistics.fmean(max(b.reduced_s for b in step.buckets) - (step.common_s or 0.0) for step, _ in rows),
        milestones=usual,
        seconds=tuple(statistics.fmean(column) for column in columns),
    )


@dataclass(frozen=True)
class Lateness:
    """How late each rank was in one window, against the earliest rank.

    Attributes:
        num_steps: fewest steps of a rank that were compared.
        step_s: mean seconds of a step.
        milestones: in order.
        by_rank_s: for each rank and milestone: seconds after the rank that was there first.
    """

    num_steps: int
    step_s: float
    milestones: tuple[Milestone, ...]
    by_rank_s: tuple[tuple[float, ...], ...]

    def growth_s(self, rank: int) -> tuple[float, ...]:
        """Returns by how much a rank's lateness grew from each milestone to the next; negative where it shrank.

        It begins with 0 after each reduction, where the ranks have met.
        """
        growth, before_s, reduction = [], 0.0, 0
        for milestone, late_s in zip(self.milestones, self.by_rank_s[rank], strict=True):
            if milestone.reduction != reduction:
                before_s, reduction = 0.0, milestone.reduction
            growth.append(late_s - before_s)
            before_s = late_s
        return tuple(growth)

    def lost_s(self, rank: int) -> dict[str, float]:
        """Returns by how many seconds a rank fell behind in each part of the step; 0 where it rather gained."""
        total_s = {milestone.part: 0.0 for milestone in self.milestones}
        for milestone, seconds in zip(self.milestones, self.growth_s(rank), strict=True):
            total_s[milestone.part] += seconds
        return {part: max(0.0, seconds) for part, seconds in total_s.items()}

    @property
    def late_s(self) -> tuple[float, ...]:
        """For each rank, the seconds by which it fell behind in a step, in all parts together."""
        return tuple(sum(self.lost_s(rank).values()) for rank in range(len(self.by_rank_s)))

    @property
    def latest_rank(self) -> int:
        """The rank that was latest of all."""
        return self.late_s.index(max(self.late_s))

    def worst_milestone(self, rank: int) -> Milestone:
        """Returns where a rank fell behind most, in the part in which it did so most."""
        lost_s = self.lost_s(rank)
        part = max(lost_s, key=lost_s.__getitem__)
        growth = [
            (seconds, milestone)
            for seconds, milestone in zip(self.growth_s(rank), self.milestones, strict=True)
            if milestone.part == part
        ]
        return max(growth, key=lambda pair: pair[0])[1]

    def suspect(self, threshold_ratio: float) -> int | None:
        """Returns the latest rank, if it is late by more than a threshold, else ``None``.

        Args:
            threshold_ratio: seconds late per second of a step.
        """
        rank = self.latest_rank
        return rank if self.late_s[rank] > threshold_ratio * self.step_s else None


def compare(by_rank: Sequence[Arrivals]) -> Lateness:
    """Compares the arrivals of all ranks.

    Args:
        by_rank: of each rank; all with the same milestones.

    Raises:
        ValueError: the milestones differ.
    """
    milestones = by_rank[0].milestones
    for rank, arrived in enumerate(by_rank):
        if arrived.milestones != milestones:
            got = f"{len(arrived.milestones)} on rank {rank} and {len(milestones)} on rank 0, or in another order"
            raise ValueError(explain("the same milestones on all ranks", got, "Compare ranks with the same buckets"))
    earliest = [min(column) for column in zip(*(arrived.seconds for arrived in by_rank), strict=True)]
    return Lateness(
        num_steps=min(arrived.num_steps for arrived in by_rank),
        step_s=statistics.fmean(arrived.step_s for arrived in by_rank),
        milestones=milestones,
        by_rank_s=tuple(
            tuple(own - first for own, first in zip(arrived.seconds, earliest, strict=True)) for arrived in by_rank
        ),
    )


def persistent(suspects: Sequence[int | None], num_needed: int) -> int | None:
    """Returns the rank that at least ``num_needed`` of the windows suspect; the newest of them if there are two.

    Args:
        suspects: of each window that counts, oldest first; ``None`` for a window without one.
        num_needed: at least 1.
    """
    for rank in reversed(suspects):
        if rank is not None and suspects.count(rank) >= num_needed:
            return rank
    return None
