"""Paired rounds: what is compared is timed in turn, so that a machine that slows down slows all of it down.

A ratio is taken within a round and the median over the rounds, with the smallest and the largest beside it, and the
ratio of the fastest rounds. The order inside a round is turned around from round to round.
"""

import gc
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

__all__ = ["Row", "Times", "interleaved", "ratio_row", "slowest"]

Times = dict[str, list[float]]
"""Seconds of each round, by the name of what was timed."""


@dataclass(frozen=True)
class Row:
    """One line of the report.

    Attributes:
        section: what kind of cost it is.
        name: what was compared.
        unit: ``"ratio"``, ``"us"`` or ``"bytes"``.
        value: the median.
        lowest: the smallest over the rounds.
        highest: the largest over the rounds.
        of_fastest: ratio of the fastest rounds, which interference from other programs changes least; ``None`` where
            nothing was timed.
        subject_s: median seconds of what is judged; ``None`` where nothing was timed.
        baseline_s: median seconds of what it is compared with; ``None`` where there is none.
    """

    section: str
    name: str
    unit: str
    value: float
    lowest: float
    highest: float
    of_fastest: float | None = None
    subject_s: float | None = None
    baseline_s: float | None = None


def interleaved(variants: Mapping[str, Callable[[], float]], num_rounds: int, num_warmup_rounds: int = 1) -> Times:
    """Runs every variant once a round and returns the seconds that each reported, without the warm-up rounds.

    Args:
        variants: functions that return the seconds they took, by name; the same on all ranks.
        num_rounds: rounds that count.
        num_warmup_rounds: rounds before those.

    Collectives:
        One barrier before each run, on all ranks.
    """
    times: Times = {name: [] for name in variants}
    for number in range(num_warmup_rounds + num_rounds):
        for name in list(variants) if number % 2 else reversed(list(variants)):
            gc.collect()  # the last run's Trainer, at nobody's cost
            dist.barrier()
            elapsed_s = variants[name]()
            if number >= num_warmup_rounds:
                times[name].append(elapsed_s)
    return times


def slowest(by_rank: list[Times]) -> Times:
    """Returns for each round the time of its slowest rank: the one that a person waits for."""
    return {
        name: [max(round_) for round_ in zip(*(times[name] for times in by_rank), strict=True)] for name in by_rank[0]
    }


def ratio_row(section: str, name: str, times: Times, subject: str, baseline: str) -> Row:
    """Compares two variants of :func:`interleaved` round by round."""
    ratios = [ours / theirs for ours, theirs in zip(times[subject], times[baseline], strict=True)]
    return Row(
        section,
        name,
        "ratio",
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        min(times[subject]) / min(times[baseline]),
        statistics.median(times[subject]),
        statistics.median(times[baseline]),
    )
