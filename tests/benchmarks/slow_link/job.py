"""What the processes are told, and what they report: two files, so that a process that dies leaves its results."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.slow_link.workload import Workload

__all__ = ["Job", "Task", "read_records", "write_record"]


@dataclass(frozen=True)
class Task:
    """One thing to measure; each gives one record.

    Attributes:
        kind: ``"link"``, ``"trace"``, ``"time"``, ``"loss"`` or ``"costs"``.
        variant: what is trained, where something is.
        number: which time, or which seed.
    """

    kind: str
    variant: str = ""
    number: int = 0


@dataclass(frozen=True)
class Job:
    """All that one pair of processes has to do.

    Attributes:
        tasks: in this order.
        workload: what is trained.
        rate_mbit: limit of the link; ``None`` leaves it open.
        budget_s: seconds of timed steps for each variant.
        max_steps: timed steps of each variant at most.
        num_loss_steps: steps of each training that is judged by its loss.
        records: where the records go, a line each.
    """

    tasks: tuple[Task, ...]
    workload: Workload
    rate_mbit: float | None
    budget_s: float
    max_steps: int
    num_loss_steps: int
    records: str

    def write(self, path: Path) -> None:
        """Writes it for the processes."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Reads what :meth:`write` wrote."""
        loaded = json.loads(path.read_text())
        loaded["tasks"] = tuple(Task(**task) for task in loaded["tasks"])
        loaded["workload"] = Workload(**loaded["workload"])
        return cls(**loaded)


def write_record(path: str | Path, task: Task, **facts: Any) -> None:
    """Adds a line: what was found for a task."""
    with open(path, "a") as file:
        file.write(json.dumps({"task": dataclasses.asdict(task), **facts}) + "\n")


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Returns all records; their ``"task"`` is a :class:`Task`. A line that was cut off by a death is left out."""
    records = []
    for line in Path(path).read_text().splitlines() if Path(path).exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records.append(record | {"task": Task(**record["task"])})
    return records
