"""What one rank has recorded, and its file: whole or not at all."""

import contextlib
import dataclasses
import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline
from ddp_plugin.tracing.issuers import CollectiveRow
from ddp_plugin.tracing.request import Window

__all__ = [
    "FAILED",
    "OVER",
    "SET_UP",
    "TRAINING",
    "WHOLE",
    "BucketContents",
    "Memory",
    "RankRecord",
    "operators_path",
    "read_records",
    "record_path",
    "replacing",
    "write_record",
]

SET_UP, TRAINING, WHOLE, OVER, FAILED = "set up", "training", "whole", "over", "failed"
"""How far a rank has come: a Trainer was set up without training; it trains, or was killed while it did; the window is
whole; the training was over before; it failed before."""


@dataclass(frozen=True)
class Memory:
    """The most memory that a process has held since it started, in bytes.

    Attributes:
        resident_bytes: of the host's memory; ``None`` where the system does not tell.
        allocated_bytes: by tensors on the device; ``None`` on a CPU.
        reserved_bytes: by torch's allocator on the device.
        device_bytes: what the device has.
    """

    resident_bytes: int | None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True)
class BucketContents:
    """What a gradient bucket holds, in the newest layout.

    Attributes:
        names: of its parameters.
        num_bytes: of its gradient.
    """

    names: tuple[str, ...]
    num_bytes: int


@dataclass
class RankRecord:
    """What one rank has recorded.

    Attributes:
        rank: its number.
        world_size: number of ranks.
        host: name of its machine.
        device: such as ``"cpu"`` or ``"cuda:0"``.
        state: one of :data:`SET_UP`, :data:`TRAINING`, :data:`WHOLE`, :data:`OVER` and :data:`FAILED`.
        asked: the window that was asked for.
        window: the window that fits the run.
        zero_unix_s: the zero of the steps' clock, by the clock of the machine.
        steps: what was recorded, in order.
        step_before_s: mean length of the steps before, in which no profiler ran; ``None`` where there is none.
        buckets: by index.
        collectives: of ``num_counted`` steps.
        num_counted: steps in which collectives were counted.
        memory: at the end of the window.
        notes: sentences.
    """

    rank: int
    world_size: int
    host: str
    device: str
    state: str
    asked: Window
    window: Window
    zero_unix_s: float = 0.0
    steps: list[StepTimeline] = field(default_factory=list)
    step_before_s: float | None = None
    buckets: dict[int, BucketContents] = field(default_factory=dict)
    collectives: tuple[CollectiveRow, ...] = ()
    num_counted: int = 0
    memory: Memory = Memory(0)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns what :meth:`of_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> "RankRecord":
        """Returns the record that :meth:`to_json` was called on.

        Raises:
            KeyError: a field is missing.
            TypeError: there is one too many, or of another kind.
        """
        given = dict(value)
        given["asked"], given["window"] = Window(**given["asked"]), Window(**given["window"])
        given["steps"] = [_step(step) for step in given["steps"]]
        given["buckets"] = {
            int(index): BucketContents(tuple(of["names"]), of["num_bytes"]) for index, of in given["buckets"].items()
        }
        given["collectives"] = tuple(CollectiveRow(**row) for row in given["collectives"])
        given["memory"] = Memory(**given["memory"])
        return cls(**given)


def _step(value: Mapping[str, Any]) -> StepTimeline:
    phases, before = (tuple(Phase(**phase) for phase in value[name]) for name in ("phases", "before"))
    buckets = tuple(BucketSpan(**bucket) for bucket in value["buckets"])
    return StepTimeline(**{**value, "phases": phases, "buckets": buckets, "before": before})


def record_path(folder: Path, rank: int) -> Path:
    """Returns the file of a rank's record."""
    return folder / f"rank{rank}.json"


def operators_path(folder: Path, rank: int) -> Path:
    """Returns the file of what ``torch.profiler`` saw on a rank, a Chrome trace."""
    return folder / f"rank{rank}.operators.json"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Lends a file beside another, which takes its place at the end; after an exception the old one stays.

    Whoever reads it finds the old content or the new one. Makes the folder.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # tracers of several nodes share a folder
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_record(folder: Path, record: RankRecord) -> None:
    """Writes a rank's record, over an older one.

    Raises:
        OSError: it cannot be written.
    """
    with replacing(record_path(folder, record.rank)) as unfinished:
        unfinished.write_text(json.dumps(record.to_json()))


def read_records(folder: Path) -> tuple[dict[int, RankRecord], list[str]]:
    """Returns the records of a folder by rank, and a sentence for each file that is none.

    Args:
        folder: need not exist.
    """
    records, complaints = {}, []
    for path in sorted(folder.glob("rank*.json")):
        if path.name.endswith(".operators.json"):
            continue
        try:
            record = RankRecord.of_json(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            complaints.append(f"{path.name} cannot be read: {type(error).__name__}: {error}.")
            continue
        records[record.rank] = record
    return dict(sorted(records.items())), complaints
