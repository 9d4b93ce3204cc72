"""What ``PerRankSeed`` adds to a step, measured alone: it is too little to be seen in the time of a step."""

import statistics
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler

from ddp_plugin.seeding import LoaderStreams, RunStreams, streamed
from tests.benchmarks.timing import Row

__all__ = ["rows", "time_seeding"]


def time_seeding(num_steps: int, num_rounds: int) -> list[float]:
    """Returns the seconds per step of its random streams on this rank, one number a round.

    A step moves the generators to the step's key, to the key of what follows, and around the drawing of the next batch
    of a shuffling sampler, which is the most that the callback does without workers.

    Collectives:
        None.
    """
    run = RunStreams(seed=1, rank=dist.get_rank(), epoch=lambda: 0, live=True)
    sampler = BatchSampler(RandomSampler(torch.empty(num_steps)), batch_size=1, drop_last=False)
    seeded = streamed(sampler, LoaderStreams(run, "train/0"), draws=True, fetches_here=True)
    found = []
    for _ in range(num_rounds):
        without = _elapsed_s(sampler, None)
        found.append((_elapsed_s(seeded, run) - without) / num_steps)
    return found


def _elapsed_s(batches: Iterable[list[int]], run: RunStreams | None) -> float:
    begin = time.perf_counter()
    for step, _ in enumerate(batches):
        if run is not None:
            run.enter("step", 0, step)
            run.enter("fetch", 0, step + 1)
    return time.perf_counter() - begin


def rows(by_rank: list[list[float]]) -> list[Row]:
    """Returns the report, from the slower rank of each round."""
    each_us = [1e6 * max(round_) for round_ in zip(*by_rank, strict=True)]
    section = "random streams of PerRankSeed per step, microseconds"
    return [Row(section, "shuffled, no workers", "us", statistics.median(each_us), min(each_us), max(each_us))]
