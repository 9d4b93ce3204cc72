"""A schedule run on symbols: what each rank would hold, send and receive, without a single message.

A piece on a rank is written as the number of times that each rank's contribution is in it. An all-reduce is right when
all of these numbers are one in the end: nothing is missing, and nothing was added twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ddp_plugin.collectives.schedules import Schedule, piece_bounds, span

__all__ = ["CriticalPath", "RankLoad", "Snapshot", "critical_path", "loads", "owners", "snapshots"]

Snapshot = tuple[tuple[tuple[int, ...], ...], ...]
"""``snapshot[rank][piece][contributor]``: how often a rank's contribution is in a piece, on a rank."""


@dataclass(frozen=True)
class RankLoad:
    """What one rank does in an all-reduce.

    Attributes:
        sent_bytes: bytes that it sends.
        received_bytes: bytes that it receives.
        added_bytes: bytes of its message that it adds something to, counted once for each addition.
        num_messages_sent: messages that it sends; empty ones are not sent, and cutting into segments does not count.
        num_messages_received: messages that it receives.
        num_rounds: rounds in which it has one to send or to receive.
    """

    sent_bytes: int
    received_bytes: int
    added_bytes: int
    num_messages_sent: int
    num_messages_received: int
    num_rounds: int


@dataclass(frozen=True)
class CriticalPath:
    """What an all-reduce waits for: the largest load of any rank in each round, summed over the rounds.

    Attributes:
        num_rounds: rounds with a message in them.
        num_messages: messages one after another, where a rank sends one and receives one at a time.
        full_duplex_bytes: bytes, where a rank sends and receives at the same time.
        half_duplex_bytes: bytes, where a rank either sends or receives.
        shared_bytes: bytes of all ranks together, where one medium carries them all.
        added_bytes: bytes added.
    """

    num_rounds: int
    num_messages: int
    full_duplex_bytes: int
    half_duplex_bytes: int
    shared_bytes: int
    added_bytes: int


def snapshots(schedule: Schedule) -> list[Snapshot]:
    """Returns what every rank holds before the first round, and after each one."""
    ranks = range(schedule.world_size)
    start = tuple(tuple(tuple(int(i == r) for i in ranks) for _ in range(schedule.num_pieces)) for r in ranks)
    history: list[Snapshot] = [start]
    for transfers in schedule.rounds:
        before = history[-1]
        after = [list(pieces) for pieces in before]
        for source, target, pieces, action in transfers:
            for piece in pieces:
                sent, held = before[source][piece], after[target][piece]
                after[target][piece] = sent if action == "copy" else tuple(map(sum, zip(held, sent, strict=True)))
        history.append(tuple(map(tuple, after)))
    return history


def owners(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Returns for each piece the ranks that hold its complete sum when the last addition is done.

    For the ring that is rank ``n - 1`` for piece 0, rank 0 for piece 1, and so on: rotated by one.
    """
    reduced = snapshots(schedule)[schedule.num_reducing_rounds]
    complete = (1,) * schedule.world_size
    return tuple(
        tuple(rank for rank in range(schedule.world_size) if reduced[rank][piece] == complete)
        for piece in range(schedule.num_pieces)
    )


@lru_cache(maxsize=256)
def loads(schedule: Schedule, num_elements: int, element_size_bytes: int) -> tuple[RankLoad, ...]:
    """Returns what each rank sends, receives and adds for a message of a given size, exactly.

    Args:
        schedule: the all-reduce.
        num_elements: elements in the message.
        element_size_bytes: bytes of one element.
    """
    totals = [[0] * 6 for _ in range(schedule.world_size)]
    for row in _round_loads(schedule, num_elements, element_size_bytes):
        for rank, (sent, received, added, num_sent, num_received) in row.items():
            for i, value in enumerate((sent, received, added, num_sent, num_received, 1)):
                totals[rank][i] += value
    return tuple(RankLoad(*total) for total in totals)


def critical_path(schedule: Schedule, num_elements: int, element_size_bytes: int) -> CriticalPath:
    """Returns what the all-reduce waits for, exactly, if all ranks start a round together.

    Args:
        schedule: the all-reduce.
        num_elements: elements in the message.
        element_size_bytes: bytes of one element.
    """
    rows = [list(row.values()) for row in _round_loads(schedule, num_elements, element_size_bytes) if row]
    return CriticalPath(
        num_rounds=len(rows),
        num_messages=sum(max(max(load[3], load[4]) for load in row) for row in rows),
        full_duplex_bytes=sum(max(max(load[0], load[1]) for load in row) for row in rows),
        half_duplex_bytes=sum(max(load[0] + load[1] for load in row) for row in rows),
        shared_bytes=sum(sum(load[0] for load in row) for row in rows),
        added_bytes=sum(max(load[2] for load in row) for row in rows),
    )


def _round_loads(schedule: Schedule, num_elements: int, element_size_bytes: int) -> Sequence[dict[int, list[int]]]:
    """For each round and each rank with a message: bytes sent, received, added; messages sent, received."""
    bounds = piece_bounds(num_elements, schedule.num_pieces)
    rows = []
    for transfers in schedule.rounds:
        row: dict[int, list[int]] = {}
        for source, target, pieces, action in transfers:
            first, end = span(pieces, bounds)
            num_bytes = (end - first) * element_size_bytes
            if num_bytes:
                sender, receiver = row.setdefault(source, [0] * 5), row.setdefault(target, [0] * 5)
                sender[0] += num_bytes
                sender[3] += 1
                receiver[1] += num_bytes
                receiver[4] += 1
                receiver[2] += num_bytes if action == "add" else 0
        rows.append(row)
    return rows
