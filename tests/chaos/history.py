"""What really was trained on: the notes of all starts of a run, put together to the line of history that survived."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Start", "Step", "coverage_problems", "read_starts", "surviving_steps"]


@dataclass
class Step:
    """One optimizer step, over all ranks.

    Attributes:
        epoch: that it belongs to.
        samples: indices of the training samples, of all micro-batches of all ranks.
        losses: of all micro-batches of all ranks, which are equally large.
    """

    epoch: int
    samples: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean over the step's samples."""
        return sum(self.losses) / len(self.losses)


@dataclass
class Start:
    """One time that all processes were started.

    Attributes:
        begins_at: the optimizer step of the checkpoint it went on from; 0 for a new run.
        world_size: number of processes.
        num_samples: training samples of an epoch.
        place: where its processes met, which tells it from others.
        time_s: when it began to train.
        pids: of the processes, by rank.
        steps: steps that a rank noted, by their number from 1.
    """

    begins_at: int
    world_size: int
    num_samples: int
    place: str
    time_s: float
    pids: dict[int, int] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)


def _notes(path: Path) -> list[dict[str, Any]]:
    notes = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            notes.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # empty, or cut off by a kill
    return notes


def read_starts(folder: Path) -> list[Start]:
    """Returns all starts in order; one that a rank never noted, because it was killed before, lacks that rank."""
    starts: list[Start] = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        current = None
        for note in _notes(path):
            if "begins_at" in note:
                current = _start_of(starts, rank, note)
            elif current is not None:
                step = current.steps.setdefault(note["step"], Step(note["epoch"]))
                step.samples += note["samples"]
                step.losses.append(note["loss"])
    return sorted(starts, key=lambda start: start.time_s)


def _start_of(starts: list[Start], rank: int, note: dict[str, Any]) -> Start:
    """Finds the start that a rank's note belongs to; a place may be taken twice, but not by the same rank at once."""
    for start in starts:
        if (start.place, start.begins_at) == (note["start"], note["begins_at"]) and rank not in start.pids:
            start.pids[rank] = note["pid"]
            return start
    facts = (note["begins_at"], note["world_size"], note["num_samples"], note["start"], note["time_s"])
    starts.append(Start(*facts, pids={rank: note["pid"]}))
    return starts[-1]


def surviving_steps(starts: list[Start]) -> dict[int, Step]:
    """Returns the steps that the last weights stand on: each start undoes what came after the step it begins at."""
    steps: dict[int, Step] = {}
    for start in starts:
        steps = {number: step for number, step in steps.items() if number <= start.begins_at}
        steps |= start.steps
    return dict(sorted(steps.items()))


def coverage_problems(steps: dict[int, Step], num_samples: int, num_steps: int) -> list[str]:
    """Says where samples of an epoch were left out or trained on twice; nothing where each came once.

    Args:
        steps: the surviving ones.
        num_samples: samples of an epoch, a multiple of a step's.
        num_steps: of the whole run; a last epoch that it does not complete has each sample at most once.
    """
    problems = []
    if list(steps) != list(range(1, num_steps + 1)):
        problems.append(f"the steps are {list(steps)}, not 1 to {num_steps}")
    epochs: dict[int, Counter[int]] = {}
    for step in steps.values():
        epochs.setdefault(step.epoch, Counter()).update(step.samples)
    for epoch, counts in epochs.items():
        twice = sorted(sample for sample, count in counts.items() if count > 1)
        never = sorted(set(range(num_samples)) - set(counts))
        is_last = epoch == max(epochs)
        if twice or (never and not is_last):
            problems.append(f"epoch {epoch}: {twice} more than once, {never} never")
    per_step = {len(step.samples) for step in steps.values()}
    if len(per_step) > 1:
        problems.append(f"steps of {sorted(per_step)} samples")
    return problems
