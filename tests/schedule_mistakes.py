"""What is wrong with a schedule, in words: also what no executor could run."""

from collections.abc import Sequence

from ddp_plugin.collectives.schedules import Schedule, Transfer
from ddp_plugin.collectives.simulation import snapshots

__all__ = ["mistakes"]


def mistakes(schedule: Schedule) -> list[str]:
    """Returns what is wrong with a schedule, in words; an empty list means that it is an all-reduce.

    Besides the result this looks for what no executor could run: a rank that sends to itself or to nobody, and a rank
    that would overwrite what it still has to send. What is sent may be added to only as a whole, in equal segments.
    """
    found = [
        f"round {number}: {mistake}"
        for number, transfers in enumerate(schedule.rounds)
        for mistake in _mistakes_of_a_round(schedule, transfers)
    ]
    actions = [transfer.action for transfers in schedule.rounds for transfer in transfers]
    if actions != sorted(actions):  # "add" before "copy"
        found.append("a rank adds after another one has begun to copy")
    if found:
        return found
    return [
        f"rank {rank} has rank {contributor}'s part of piece {piece} {count} times"
        for rank, pieces in enumerate(snapshots(schedule)[-1])
        for piece, counts in enumerate(pieces)
        for contributor, count in enumerate(counts)
        if count != 1
    ]


def _mistakes_of_a_round(schedule: Schedule, transfers: Sequence[Transfer]) -> list[str]:
    found = [
        f"{transfer} is outside {schedule.world_size} ranks, or goes nowhere"
        for transfer in transfers
        if not _is_possible(transfer, schedule)
    ]
    for rank in range(schedule.world_size):
        sent = [transfer.pieces for transfer in transfers if transfer.source == rank]
        written = [transfer for transfer in transfers if transfer.target == rank]
        for i, transfer in enumerate(written):
            if any(_overlap(transfer.pieces, pieces) and not _may_add(transfer, pieces) for pieces in sent):
                found.append(f"rank {rank} overwrites pieces {transfer.pieces} while it sends them")
            for other in written[:i]:
                if _overlap(transfer.pieces, other.pieces) and not _may_add(transfer, other.pieces, other.action):
                    found.append(f"rank {rank} receives pieces {transfer.pieces} in two ways")
    return found


def _is_possible(transfer: Transfer, schedule: Schedule) -> bool:
    ranks, pieces = range(schedule.world_size), range(schedule.num_pieces)
    return (
        transfer.source in ranks
        and transfer.target in ranks
        and transfer.source != transfer.target
        and len(transfer.pieces) > 0
        and transfer.pieces.step == 1
        and transfer.pieces[0] in pieces
        and transfer.pieces[-1] in pieces
    )


def _overlap(first: range, second: range) -> bool:
    return max(first.start, second.start) < min(first.stop, second.stop)


def _may_add(transfer: Transfer, pieces: range, action: str = "add") -> bool:
    return transfer.action == action == "add" and transfer.pieces == pieces
