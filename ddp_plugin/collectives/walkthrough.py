"""An all-reduce on paper: what every rank holds after each round, as tables.

Ranks contribute ``a``, ``b``, ``c``, …, one letter each, and chunks are numbered: ``b2`` is what rank 1 brings to chunk
2. A sum that is complete is written ``Σ2``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddp_plugin.collectives.schedules import Schedule, Transfer, make_schedule
from ddp_plugin.collectives.simulation import owners, snapshots
from ddp_plugin.errors import counted

__all__ = ["Round", "Walk", "render_walk", "walk"]


@dataclass(frozen=True)
class Round:
    """One round of a walk.

    Attributes:
        number: counted from 1 over both phases; 0 is the start.
        phase: ``"start"``; ``"reduce"`` while ranks add; ``"distribute"`` while complete sums are copied.
        transfers: the messages of the round.
        table: what each rank holds afterwards, ``table[rank][chunk]``.
    """

    number: int
    phase: Literal["start", "reduce", "distribute"]
    transfers: tuple[Transfer, ...]
    table: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Walk:
    """All rounds of an all-reduce.

    Attributes:
        schedule: the algorithm that was walked through.
        rounds: the start, then each round.
        owners: for each chunk, the ranks that hold its complete sum between the two phases.
    """

    schedule: Schedule
    rounds: tuple[Round, ...]
    owners: tuple[tuple[int, ...], ...]


def walk(world_size: int = 4, algorithm: str = "ring", **options: Any) -> Walk:
    """Walks through an all-reduce round by round.

    Args:
        world_size: number of ranks.
        algorithm: key in :data:`~ddp_plugin.collectives.ALGORITHMS`.
        options: those of the algorithm, such as ``num_servers``.

    Raises:
        ValueError: see :func:`~ddp_plugin.collectives.make_schedule`.
    """
    schedule = make_schedule(algorithm, world_size, **options)
    rounds = []
    for number, snapshot in enumerate(snapshots(schedule)):
        phase: Literal["start", "reduce", "distribute"] = (
            "start" if number == 0 else "reduce" if number <= schedule.num_reducing_rounds else "distribute"
        )
        table = tuple(tuple(_cell(counts, chunk) for chunk, counts in enumerate(pieces)) for pieces in snapshot)
        rounds.append(Round(number, phase, schedule.rounds[number - 1] if number else (), table))
    return Walk(schedule, tuple(rounds), owners(schedule))


def render_walk(walked: Walk) -> str:
    """Prints a walk: the start, each round's messages with the table after it, and who owns what in between."""
    schedule = walked.schedule
    divided = "whole" if schedule.num_pieces == 1 else f"in {schedule.num_pieces} chunks of V/{schedule.num_pieces}"
    num_reducing = schedule.num_reducing_rounds
    lines = [
        f"{schedule.algorithm} all-reduce, {counted(schedule.world_size, 'rank')}, message V {divided}, "
        f"{num_reducing} + {len(schedule.rounds) - num_reducing} rounds"
    ]
    for step in walked.rounds:
        lines.append("")
        if step.phase == "start":
            lines.append("start")
        else:
            lines.append(f"round {step.number} of {len(schedule.rounds)}, {step.phase}")
            lines += [_message(transfer) for transfer in step.transfers]
        lines += _grid(step.table)
        if step.number == num_reducing and schedule.rounds:
            where = (f"Σ{chunk} at {_ranks(ranks)}" for chunk, ranks in enumerate(walked.owners))
            lines += ["", "complete after the reduction: " + ", ".join(where)]
    return "\n".join(lines) + "\n"


def _cell(counts: Sequence[int], chunk: int) -> str:
    if len(counts) > 1 and all(count == 1 for count in counts):
        return f"Σ{chunk}"
    return "+".join(f"{_name(rank, len(counts))}{chunk}" for rank, count in enumerate(counts) for _ in range(count))


def _name(rank: int, world_size: int) -> str:
    return chr(ord("a") + rank) if world_size <= 26 else f"r{rank}."


def _message(transfer: Transfer) -> str:
    chunks = ", ".join(map(str, transfer.pieces))
    noun = "chunk" if len(transfer.pieces) == 1 else "chunks"
    verb = "which adds it" if transfer.action == "add" else "which copies it"
    verb = verb if noun == "chunk" else verb.replace(" it", " them")
    return f"  rank {transfer.source} sends {noun} {chunks} to rank {transfer.target}, {verb}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _grid(table: Sequence[Sequence[str]]) -> list[str]:
    header = ["", *(f"chunk {chunk}" for chunk in range(len(table[0])))]
    rows = [header, *([f"rank {rank}", *cells] for rank, cells in enumerate(table))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ("  " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
