"""Keeping the trace of before: it goes into a folder of its own, and what other programs wrote stays where it is."""

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ddp_plugin.errors import explain
from ddp_plugin.tracing.page import HEADING

__all__ = ["ASIDE", "LOCK", "alone_in", "set_aside"]

ASIDE = "trace.previous"
"""Name of the folder of the older trace, in that of the new one."""

LOCK = ".trace.lock"
"""Name of the empty file that a tracer locks while it is at work."""

_RECORD = re.compile(r"rank\d+\.json")
_NAMES = re.compile(r"(\.[0-9a-f]{8}\.)?(trace\.(html|png|json)|rank\d+(\.operators)?\.json)")
_FIELDS = {"rank", "world_size", "asked", "window"}  # of every record, whichever version wrote it


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Says whether no other tracer is at work in a folder, as those of other nodes are; the first one is alone.

    A lock of the system tells, which ends with the process that holds it. Where the file system has none, everyone is.

    Raises:
        OSError: the folder cannot be written.
    """
    is_alone = True
    with open(folder / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError:  # no locks on this file system
            pass
        yield is_alone


def set_aside(folder: Path) -> Path | None:
    """Moves an older trace into the folder :data:`ASIDE`, in place of the one before it, and touches nothing else.

    A trace is what holds the record of a rank. A page alone, about a run that recorded nothing, stays.

    Returns:
        Where the older trace is now, or ``None`` where there was none.

    Raises:
        OSError: a file cannot be moved or removed.
        ValueError: without an older trace there are files that the new one would replace.
    """
    files = _named(folder)
    records = [path for path in files if _RECORD.fullmatch(path.name)]
    if not any(map(_is_record, records)):
        others = [path.name for path in files if not path.name.startswith(".") and not _is_page(path)]
        if others:
            got = f"{', '.join(sorted(others))} of another program in {folder}"
            raise ValueError(
                explain("a folder that holds a trace, or nothing of its names", got, "Name another folder")
            )
        return None
    aside = folder / ASIDE
    aside.mkdir(exist_ok=True)
    for older in _named(aside):
        older.unlink(missing_ok=True)
    for path in sorted(files, key=records.__contains__):  # records last: they say whose the others are
        with contextlib.suppress(FileNotFoundError):  # another tracer was first
            path.replace(aside / path.name)
    return aside


def _named(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _NAMES.fullmatch(path.name)]


def _is_record(path: Path) -> bool:
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(held, dict) and held.keys() >= _FIELDS


def _is_page(path: Path) -> bool:
    return path.name == "trace.html" and HEADING in path.read_text(errors="replace")
