"""Whether another process on this machine still lives."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "identify"]


def identify() -> dict[str, Any]:
    """Returns what others need to find this process, as JSON can hold it.

    Returns:
        ``host``, its name; ``pid``; ``started``, in clock ticks after the machine's own start, or ``None`` where the
        system does not tell; ``pid_space``, equal for processes that know each other by the same numbers: containers on
        one host may not.

    Collectives:
        None.
    """
    host, pid = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        pid_space = f"{host} {os.name}"
    status = _status(pid)
    return {"host": host, "pid": pid, "started": status and status[1], "pid_space": pid_space}


def has_ended(other: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether a process has ended, as far as this one can see; one that is stopped or stuck has not.

    Args:
        other: what :func:`identify` returned there.
        own: what it returned here.

    Returns:
        ``False`` as well where the other one is out of sight: on another host, or in another container.

    Collectives:
        None.
    """
    if other["pid_space"] != own["pid_space"] or os.name != "posix":
        return False
    pid = int(other["pid"])
    if other["started"] is None:
        return not _takes_signals(pid)
    status = _status(pid)
    return status is None or status[0] in "ZX" or status[1] != other["started"]


def _status(pid: int) -> tuple[str, int] | None:
    """Returns a process's state and when it started, by proc(5): fields 3 and 22 of ``/proc/pid/stat``."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name, in brackets, may hold anything
    return fields[0], int(fields[19])


def _takes_signals(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
