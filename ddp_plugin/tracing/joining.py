"""What all ranks have recorded, side by side, and as one trace."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_plugin.timeline.chrome_trace import aligned, chrome_trace
from ddp_plugin.timeline.steps import StepSummary, StepTimeline, steady, summarize
from ddp_plugin.timeline.straggling import MIN_STEPS, Lateness, arrivals, compare
from ddp_plugin.tracing.issuers import CollectiveRow
from ddp_plugin.tracing.records import RankRecord, operators_path, read_records

__all__ = ["Joined", "TotalRow", "join", "trace_of_operators", "write_trace"]

_FIRST_OPERATOR_THREAD = 10_000  # above the threads of the buckets
_FLOW_IDS_OF_A_RANK = 10**9


@dataclass(frozen=True)
class TotalRow:
    """Collectives that are alike, on all ranks.

    Attributes:
        issuer: see :class:`~ddp_plugin.tracing.issuers.CollectiveRow`.
        operation: the same.
        place: the same.
        called_from: the same.
        per_step: calls of a step, mean over the ranks that recorded.
        bytes_per_step: bytes of a step and rank, the same mean.
        num_blocking_per_step: calls of a step that made the host wait, the same mean.
        waited_s: seconds of a step for which the host waited in them, the same mean.
    """

    issuer: str
    operation: str
    place: str
    called_from: str
    per_step: float
    bytes_per_step: float
    num_blocking_per_step: float
    waited_s: float


@dataclass(frozen=True)
class Joined:
    """The records of a folder.

    Attributes:
        records: by rank.
        complaints: a sentence for each file that could not be read.
    """

    records: Mapping[int, RankRecord]
    complaints: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks, as they say themselves; 0 where none has written."""
        return max((record.world_size for record in self.records.values()), default=0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have recorded no step."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.timelines)

    @property
    def timelines(self) -> dict[int, list[StepTimeline]]:
        """The steps of each rank that has recorded any."""
        return {rank: record.steps for rank, record in self.records.items() if record.steps}

    @property
    def summaries(self) -> dict[int, StepSummary]:
        """The mean step of each rank that has recorded any."""
        return {rank: summarize(steady(steps)) for rank, steps in self.timelines.items()}

    def lateness(self) -> tuple[tuple[int, ...], Lateness] | None:
        """Returns who waits for whom: the ranks that could be compared, and how late each was.

        Returns:
            ``None`` where fewer than two ranks have at least as many comparable steps as a comparison takes.
        """
        arrived = {rank: found for rank, steps in self.timelines.items() if (found := arrivals(steps)) is not None}
        enough = {rank: found for rank, found in arrived.items() if found.num_steps >= MIN_STEPS}
        if len(enough) < 2 or len({found.milestones for found in enough.values()}) > 1:
            return None
        return tuple(enough), compare(list(enough.values()))

    def collectives(self) -> tuple[TotalRow, ...]:
        """Returns the collectives of all ranks, added up by who issued them, most frequent first."""
        counted = [record for record in self.records.values() if record.num_counted]
        by_kind: dict[tuple[str, str, str, str], list[tuple[CollectiveRow, int]]] = {}
        for record in counted:
            for row in record.collectives:
                kind = (row.issuer, row.operation, row.place, row.called_from)
                by_kind.setdefault(kind, []).append((row, record.num_counted))
        rows = [
            TotalRow(
                *kind,
                per_step=sum(row.num_calls / steps for row, steps in rows) / len(counted),
                bytes_per_step=sum(row.num_bytes / steps for row, steps in rows) / len(counted),
                num_blocking_per_step=sum(row.num_blocking / steps for row, steps in rows) / len(counted),
                waited_s=sum(row.waited_s / steps for row, steps in rows) / len(counted),
            )
            for kind, rows in by_kind.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.per_step, row.issuer, row.operation, row.place)))


def join(folder: Path) -> Joined:
    """Returns the records of a folder.

    Args:
        folder: need not exist.
    """
    records, complaints = read_records(folder)
    return Joined(records, tuple(complaints))


def write_trace(path: Path, joined: Joined, folder: Path) -> None:
    """Writes one Chrome trace of all ranks: the parts of their steps, the buckets, and what operators there are.

    The process is the rank, and time begins with the first step on any rank. Operators are many, so those of one rank
    are in memory at a time.

    Args:
        path: the file.
        joined: with at least one rank that has recorded a step.
        folder: where the operators lie.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the operators of a rank are no JSON.
    """
    by_rank = joined.timelines
    names = {index: bucket.names for record in joined.records.values() for index, bucket in record.buckets.items()}
    trace = chrome_trace(by_rank, names)
    shifts = aligned(by_rank)
    zero_s = min(step.began_s + shifts[rank] for rank, steps in by_rank.items() for step in steps)
    events = trace.pop("traceEvents")
    with path.open("w") as file:
        file.write(f'{json.dumps(trace)[:-1]}, "traceEvents": [{json.dumps(events)[1:-1]}')
        for rank in by_rank:
            operators = operators_path(folder, rank)
            if operators.exists():
                to_zero_s = shifts[rank] - zero_s - joined.records[rank].zero_unix_s
                events = trace_of_operators(json.loads(operators.read_text()), rank, to_zero_s)
                file.writelines(f",\n{json.dumps(event)}" for event in events)
        file.write("]}")


def trace_of_operators(trace: Mapping[str, Any], rank: int, shift_s: float) -> list[dict[str, Any]]:
    """Returns the events of ``torch.profiler``'s Chrome trace as those of one process, the rank.

    Args:
        trace: as ``export_chrome_trace`` writes it.
        rank: becomes the process.
        shift_s: what to add to the clock of the machine.
    """
    shift_us = 1e6 * shift_s + float(trace.get("baseTimeNanoseconds", 0)) / 1e3
    threads: dict[tuple[Any, Any], int] = {}
    events = []
    for event in trace.get("traceEvents", ()):
        if event.get("ph") not in ("X", "s", "f") or "ts" not in event:
            continue
        thread = threads.setdefault((event.get("pid"), event.get("tid")), _FIRST_OPERATOR_THREAD + len(threads))
        moved = {**event, "pid": rank, "tid": thread, "ts": float(event["ts"]) + shift_us}
        if event["ph"] != "X":  # an arrow, whose number has to be one in the whole file
            moved["id"] = rank * _FLOW_IDS_OF_A_RANK + int(event.get("id", 0))
        events.append(moved)
    named = _thread_names(trace.get("traceEvents", ()))
    events += [
        {
            "ph": "M",
            "pid": rank,
            "tid": thread,
            "name": "thread_name",
            "args": {"name": f"torch: {named.get(key, key[1])}"},
        }
        for key, thread in threads.items()
    ]
    return events


def _thread_names(events: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], str]:
    return {
        (event.get("pid"), event.get("tid")): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }
