"""Timelines of all ranks as a Chrome trace, the JSON that Perfetto and ``chrome://tracing`` open.

Format: Trace Event Format, complete events (``"ph": "X"``) in microseconds; a process for each rank, a thread for the
parts of the steps, one for exposed communication and one for each bucket.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_plugin.timeline.steps import StepTimeline

__all__ = ["aligned", "chrome_trace", "write_chrome_trace"]

_STEP_THREAD, _EXPOSED_THREAD, _FIRST_BUCKET_THREAD = 0, 1, 2


def aligned(by_rank: Mapping[int, Sequence[StepTimeline]]) -> dict[int, float]:
    """Returns for each rank the seconds to add to its clock, so that reductions end at the same moment on all ranks.

    The shift is the median over the steps that a rank shares with the first one; without a reduction it is 0, which is
    right for ranks of one host.

    Args:
        by_rank: the timelines of each rank.
    """
    ends = {
        rank: {step.step: max(bucket.reduced_s for bucket in step.buckets) for step in steps if step.buckets}
        for rank, steps in by_rank.items()
    }
    reference = ends[min(ends)]
    shifts = {}
    for rank, own in ends.items():
        shared = [reference[step] - end_s for step, end_s in own.items() if step in reference]
        shifts[rank] = statistics.median(shared) if shared else 0.0
    return shifts


def chrome_trace(
    by_rank: Mapping[int, Sequence[StepTimeline]], parameters: Mapping[int, Sequence[str]]
) -> dict[str, Any]:
    """Returns the trace as an object of the Trace Event Format.

    Args:
        by_rank: the timelines of each rank.
        parameters: names of the parameters of each bucket in the newest layout.
    """
    shifts = aligned(by_rank)
    zero_s = min(step.began_s + shifts[rank] for rank, steps in by_rank.items() for step in steps)
    events: list[dict[str, Any]] = []

    def add(rank: int, thread: int, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        begin_us = 1e6 * (begin_s + shifts[rank] - zero_s)
        duration_us = 1e6 * (end_s - begin_s)
        events.append(
            {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": begin_us, "dur": duration_us, "args": arguments}
        )

    for rank, steps in by_rank.items():
        newest = steps[-1].layout if steps else 0
        threads = {_STEP_THREAD: "step", _EXPOSED_THREAD: "exposed communication"}
        for step in steps:
            for phase in step.phases:
                add(rank, _STEP_THREAD, phase.part, phase.begin_s, phase.end_s, step=step.step)
            for reduction in step.reductions:
                last_ready_s = max(bucket.ready_s for bucket in reduction)
                end_s = max(bucket.reduced_s for bucket in reduction)
                add(rank, _EXPOSED_THREAD, "exposed", last_ready_s, end_s, step=step.step)
            for bucket in step.buckets:
                thread = _FIRST_BUCKET_THREAD + bucket.index
                threads[thread] = f"bucket {bucket.index}"
                names = list(parameters.get(bucket.index, ())) if step.layout == newest else []
                add(rank, thread, "reduction", bucket.ready_s, bucket.reduced_s, step=step.step, parameters=names)
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        events += [_metadata("thread_name", rank, thread, name) for thread, name in threads.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": {"name": name}}


def write_chrome_trace(
    path: Path, by_rank: Mapping[int, Sequence[StepTimeline]], parameters: Mapping[int, Sequence[str]]
) -> None:
    """Writes :func:`chrome_trace` to a file, makes its folder, and replaces a file that is there.

    Args:
        path: the file.
        by_rank: the timelines of each rank.
        parameters: names of the parameters of each bucket in the newest layout.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(by_rank, parameters)))
