"""Who issued a collective: told from the stack that led to it.

The innermost code that is no plumbing is the issuer: DDP and the hooks that reduce its buckets, this package,
Lightning, torchmetrics, the user's own code, or another library. Beside it stands the nearest line of the user that
Lightning had called, because a ``self.log(..., sync_dist=True)`` is asked for there and issued elsewhere. Plain
functions of names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

__all__ = [
    "DDP",
    "LIGHTNING",
    "PLUGIN",
    "TORCHMETRICS",
    "YOURS",
    "Call",
    "CollectiveRow",
    "Frame",
    "Issuer",
    "count",
    "issuer_of",
]

DDP, PLUGIN, LIGHTNING, TORCHMETRICS = "DDP", "ddp_plugin", "Lightning", "torchmetrics"
YOURS = "your code"

_LIBRARY = "site-packages"
_PLUMBING = ("tracing/", "collectives/", "gather.py", "matching.py", "forwarding.py", "_compat.py")  # of this package
_REDUCES = ("hooks/", "wrapping/arguments.py", "tree_exchange.py", "logical_shards.py")
_DDP_IN_TORCH = ("nn/parallel/distributed.py", "distributed/algorithms/")


class Frame(NamedTuple):
    """One function on a stack.

    Attributes:
        file: path of its source.
        line: number of the line that runs.
        function: its name.
    """

    file: str
    line: int
    function: str


class Issuer(NamedTuple):
    """Who issued a collective.

    Attributes:
        name: one of :data:`DDP`, :data:`PLUGIN`, :data:`LIGHTNING`, :data:`TORCHMETRICS`, :data:`YOURS`, or the name of
            another library.
        place: ``file:line function``.
        called_from: the nearest place in the user's code that Lightning had called; empty where there is none.
    """

    name: str
    place: str
    called_from: str


@dataclass
class Call:
    """One collective as it was issued.

    Attributes:
        step: number of the optimizer step in which it was.
        operation: such as ``"all_reduce"``.
        num_bytes: what this rank brought to it.
        stack: of each function its file, line and name, innermost first.
        is_on_host: whether the host has to wait where it is waited for: a CPU tensor, or a barrier.
        waited: whether the thread that trains waited for it.
        waited_s: seconds for which it did.
    """

    step: int
    operation: str
    num_bytes: int
    stack: Sequence[tuple[str, int, str]]
    is_on_host: bool
    waited: bool = False
    waited_s: float = 0.0


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one rank that are alike.

    Attributes:
        issuer: see :class:`Issuer`.
        operation: such as ``"all_reduce"``.
        place: see :class:`Issuer`.
        called_from: see :class:`Issuer`.
        num_calls: in all steps that were counted.
        num_bytes: of all of them together.
        num_blocking: how many made the thread that trains wait on the host.
        waited_s: seconds of it, of all together.
    """

    issuer: str
    operation: str
    place: str
    called_from: str
    num_calls: int
    num_bytes: int
    num_blocking: int
    waited_s: float


def issuer_of(stack: Sequence[Frame], roots: Mapping[str, str], here: str = "") -> Issuer:
    """Returns who issued a collective.

    Args:
        stack: innermost first.
        roots: a folder for each of ``"torch"``, :data:`LIGHTNING`, :data:`TORCHMETRICS`, :data:`PLUGIN`, ``"python"``
            (the standard library) and ``"site-packages"``; of several that hold a file, the innermost counts.
        here: a folder from which the user's files are named.
    """
    roles = [_role(frame, roots) for frame in stack]
    at = next((index for index, role in enumerate(roles) if role is not None), None)
    if at is None:  # nothing but plumbing, as in a thread that communicates
        at = next((i for i, frame in enumerate(stack) if _owner(frame.file, roots)[0] == PLUGIN), None)
        place = _place(stack[at], roots, here) if at is not None else ""
        return Issuer(DDP if at is None else PLUGIN, place, "")
    name = roles[at] or ""
    called_from = ""
    if name not in (DDP, YOURS):
        for index in range(at, len(stack)):
            if roles[index] == YOURS and LIGHTNING in roles[index:]:
                called_from = _place(stack[index], roots, here)
                break
    return Issuer(name, _place(stack[at], roots, here), called_from)


def _owner(file: str, roots: Mapping[str, str]) -> tuple[str, str]:
    """Returns whose a file is, and its path from there."""
    best, length = "", -1
    for name, folder in roots.items():
        prefix = folder.rstrip("/") + "/"
        if file.startswith(prefix) and len(prefix) > length:
            best, length = name, len(prefix)
    return (best, file[length:]) if best else ("", file)


def _role(frame: Frame, roots: Mapping[str, str]) -> str | None:
    """Returns who a frame speaks for; ``None`` for plumbing."""
    owner, path = _owner(frame.file, roots)
    if frame.file.startswith("<") or owner == "python":
        return None
    if owner == "torch":
        return DDP if path.startswith(_DDP_IN_TORCH) else None
    if owner == PLUGIN:
        if path.startswith(_REDUCES):
            return DDP
        return None if path.startswith(_PLUMBING) else PLUGIN
    if owner == _LIBRARY:
        return PurePath(path).parts[0].removesuffix(".py")
    return owner or YOURS


def _place(frame: Frame, roots: Mapping[str, str], here: str) -> str:
    owner, path = _owner(frame.file, roots)
    if owner and owner != _LIBRARY:
        path = f"{PurePath(roots[owner]).name}/{path}"
    elif not owner and here and frame.file.startswith(here.rstrip("/") + "/"):
        path = frame.file[len(here.rstrip("/")) + 1 :]
    return f"{path}:{frame.line} {frame.function}"


def count(calls: Iterable[Call], roots: Mapping[str, str], here: str = "") -> tuple[CollectiveRow, ...]:
    """Returns the calls added up by who issued them, most frequent first.

    Args:
        calls: of one rank.
        roots: see :func:`issuer_of`.
        here: see :func:`issuer_of`.
    """
    kept: dict[tuple[tuple[str, int, str], ...], Issuer] = {}  # stacks repeat themselves from step to step
    alike: dict[tuple[Issuer, str], list[Call]] = {}
    for call in calls:
        stack = tuple(call.stack)
        if stack not in kept:
            kept[stack] = issuer_of([Frame(*frame) for frame in stack], roots, here)
        alike.setdefault((kept[stack], call.operation), []).append(call)
    rows = [
        CollectiveRow(
            issuer=issuer.name,
            operation=operation,
            place=issuer.place,
            called_from=issuer.called_from,
            num_calls=len(group),
            num_bytes=sum(call.num_bytes for call in group),
            num_blocking=sum(call.waited and call.is_on_host for call in group),
            waited_s=sum(call.waited_s for call in group if call.is_on_host),
        )
        for (issuer, operation), group in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.num_calls, row.issuer, row.operation, row.place)))
