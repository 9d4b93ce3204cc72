"""The latest collectives of a rank, as torch's flight recorder tells them, and what those of all ranks say together."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Operation", "Parting", "bucket_of", "named", "operations", "parting", "unfinished"]

_ITEM_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "ComplexFloat": 8, "Long": 8, "Int": 4, "Byte": 1}
_SAME_SIZES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather_into_tensor")


class Operation(NamedTuple):
    """One collective that a rank has begun.

    Attributes:
        group: the name of its process group, the same on all ranks.
        number: its place in the order of the group's collectives, from 1.
        name: such as ``"all_reduce"``.
        num_elements: of its input.
        num_bytes: of its input; 0 where the dtype is not known.
        is_done: whether it has ended on this rank.
        begun_ns: when, by this rank's wall clock.
        is_on_device: whether it runs beside the host, which may be further on.
    """

    group: str
    number: int
    name: str
    num_elements: int
    num_bytes: int
    is_done: bool
    begun_ns: int
    is_on_device: bool = False


class Parting(NamedTuple):
    """Where the ranks' collectives part.

    Attributes:
        group: the name of the process group.
        number: the first collective there that they do not share.
        by_rank: what each rank did in its place; ``None`` for one that has not come to it.
    """

    group: str
    number: int
    by_rank: dict[int, Operation | None]


def operations(records: Sequence[Mapping[str, Any]], num_latest: int = 40) -> list[Operation]:
    """Returns the latest collectives of a rank in the order in which they began.

    Args:
        records: parsed dumps of torch's flight recorders, of version 2 (torch 2.4 and later).
        num_latest: how many to return.

    Collectives:
        None.
    """
    found = [
        Operation(
            group=str((entry.get("process_group") or ["?"])[0]),
            number=int(entry.get("collective_seq_id", 0)),
            name=str(entry.get("profiling_name", "?")).rpartition(":")[2],
            num_elements=(num_elements := sum(math.prod(size) for size in entry.get("input_sizes", ()))),
            num_bytes=num_elements * _ITEM_BYTES.get(next(iter(entry.get("input_dtypes", ())), ""), 0),
            is_done=bool(entry.get("retired")) or entry.get("state") == "completed",
            begun_ns=int(entry.get("time_created_ns", 0)),
            is_on_device=not str(entry.get("profiling_name", "")).startswith("gloo:"),
        )
        for record in records
        for entry in record.get("entries", ())
        if not entry.get("is_p2p")
    ]
    return sorted(found, key=lambda operation: operation.begun_ns)[-num_latest:]


def unfinished(latest: Sequence[Operation]) -> list[Operation]:
    """Returns the collectives that have not ended, in the order in which they began."""
    return [operation for operation in latest if not operation.is_done]


def named(operation: Operation) -> str:
    """Returns a collective in words."""
    elements = f" of {operation.num_elements} elements" if operation.num_elements else ""
    return f"`{operation.name}`{elements}"


def bucket_of(
    latest: Sequence[Operation], awaited: Operation, bucket_bytes: Sequence[int] | None, begun_ns: int
) -> int | None:
    """Returns which gradient bucket a collective reduces, from 0.

    Args:
        latest: the rank's latest collectives.
        awaited: one of them.
        bucket_bytes: sizes of the buckets in the order of reduction, where they are known.
        begun_ns: when the backward began, by the same clock.

    Returns:
        ``None`` where it is none.
    """
    reductions = [
        operation
        for operation in latest
        if operation.group == awaited.group and operation.name == "all_reduce" and operation.begun_ns >= begun_ns
    ]
    if awaited not in reductions:
        return None
    before = reductions[: reductions.index(awaited) + 1]
    if bucket_bytes is None:
        return len(before) - 1
    bucket = -1  # others, of layers that communicate in their backward, may stand in between
    for reduction in before:
        if bucket + 1 < len(bucket_bytes) and reduction.num_bytes == bucket_bytes[bucket + 1]:
            bucket += 1
        elif reduction is awaited:
            return None
    return bucket


def parting(by_rank: Mapping[int, Sequence[Operation]]) -> Parting | None:
    """Returns the first collective that not all ranks share: another one on some rank, or not begun there.

    Groups in which nobody waits are left out, and so are groups in which some rank takes no part.

    Args:
        by_rank: the latest collectives of each rank.

    Collectives:
        None.
    """
    waiting = [begun[-1].group for latest in by_rank.values() if (begun := unfinished(latest))]
    for group in dict.fromkeys(waiting):
        numbered = {
            rank: {operation.number: operation for operation in latest if operation.group == group}
            for rank, latest in by_rank.items()
        }
        if not all(numbered.values()):
            continue
        first = max(min(of_rank) for of_rank in numbered.values())
        for number in range(first, max(max(of_rank) for of_rank in numbered.values()) + 1):
            here = {rank: of_rank.get(number) for rank, of_rank in numbered.items()}
            if len({None if operation is None else _kind(operation) for operation in here.values()}) > 1:
                return Parting(group, number, here)
    return None


def _kind(operation: Operation) -> tuple[str, int]:
    return operation.name, operation.num_elements if operation.name in _SAME_SIZES else 0
