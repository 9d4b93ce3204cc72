"""A failure in one sentence: which rank, where, why."""

import re
from collections.abc import Mapping
from typing import Any

from ddp_plugin.errors import DDPPluginError

__all__ = ["PeerFailedError", "describe", "describe_at_length", "gist", "is_consequence", "one_line"]

_MAX_LENGTH = 300
_FRAME = re.compile(r"^  File .*\n(    .*\n)*", re.MULTILINE)  # of a traceback, with its source line and carets
_MAX_GIST_LENGTH = 4000
_ON_RANK = re.compile(r", on rank \d+ of \d+")  # which explain() adds where an error is raised
_BROKEN = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Socket (closed|Timeout)|pair closure|Connection refused"
    r"|remote process (has )?exited|NCCL communicator (was|has been) aborted|ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)


class PeerFailedError(DDPPluginError):
    """Another rank failed first; the message ends with which one, where, and why."""


def is_consequence(error: BaseException | None) -> bool:
    """Whether an error says that a connection to another process broke, which has a cause elsewhere.

    Collectives:
        None.
    """
    return isinstance(error, RuntimeError | OSError) and _BROKEN.search(_message(error)) is not None


def describe(note: Mapping[str, Any], is_for_all: bool = False, is_the_same: bool = False) -> str:
    """Returns the one sentence about what ended a run.

    Args:
        note: see :attr:`FailureWatch.first`.
        is_for_all: whether all ranks raised, each by itself.
        is_the_same: whether what they raised is the same error in the same place; who told of it first means nothing
            then.

    Collectives:
        None.
    """
    where = _where(note.get("place") or {}, note.get("doing"))
    rank = f"rank {note['rank']}"
    kind = note["kind"]
    if kind == "raised" and is_for_all and is_the_same:
        return f"all ranks failed{where}: {note['error']}"
    if kind == "raised":
        others = " (and so did all other ranks)" if is_for_all else ""
        return f"{rank} failed{where}{others}: {note['error']}"
    process = f" (process {note['pid']} on {note['host']})" if note.get("pid") else ""
    if kind == "silent":
        return f"{rank}{process} has not been heard of for {note['for_s']:.0f} s{where}: is its machine gone?"
    if kind == "died":
        return f"{rank}{process} ended without a word{where}: killed by a signal, or out of memory?"
    if kind == "left":
        return f"{rank} left the run{where}, the other ranks did not: {note['error']}"
    if kind == "slept":
        return (
            f"{rank} did not run for {note['for_s']:.0f} s{where} (stopped, or in code that holds Python's interpreter "
            "lock), and the run ended meanwhile: rank 0's last line says why"
        )
    if kind == "over":
        return f"{rank} came to its regular end{where} while other ranks went on: unequal numbers of steps?"
    if kind == "lost":
        return f"{rank} ended because it lost the store of the process group: {note['error']}"
    return str(note["error"])


def _where(place: Mapping[str, Any], doing: str | None) -> str:
    words = f" at step {place['step']}" if place.get("step") is not None else ""
    stage, batch = place.get("stage"), place.get("batch")
    if stage not in (None, "train") and batch is not None:
        words += f", {stage} batch {batch}"
    return words + (f" in {doing}" if doing else "")


def describe_at_length(note: Mapping[str, Any]) -> str:
    """Returns the first failure's traceback, where there is one, and the sentence as the last line."""
    sentence = describe(note)
    first = note.get("traceback")
    how = f"rank {note['rank']} failed first:\n{first.rstrip()}" if first else "this run has ended:"
    return f"{how}\n{sentence}"


def one_line(error: BaseException) -> str:
    """Returns an exception's type and message on one line of bounded length."""
    said = _message(error)
    if "Traceback (most recent call last):" in said and (frames := list(_FRAME.finditer(said))):
        said = f"{said.splitlines()[0]} {said[frames[-1].end() :]}"  # of a worker's error: where, and what it was
    words = " ".join(f"{type(error).__name__}: {said}".split()).removesuffix(":")
    half = _MAX_LENGTH // 2
    return words if len(words) <= _MAX_LENGTH else f"{words[:half]} … {words[-half:]}"


def gist(error: BaseException) -> str:
    """Returns an exception's type and message without the rank that raised it, to be compared between ranks."""
    return _ON_RANK.sub("", f"{type(error).__name__}: {_message(error)}")[:_MAX_GIST_LENGTH]


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # anybody's class
        return "<its str() failed>"
