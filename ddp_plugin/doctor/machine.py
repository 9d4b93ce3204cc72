"""The machine: cores, memory and devices, as far as this process may use them."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Machine", "available_cores", "interfaces", "look_at_machine", "topology"]

_CGROUP_CPU, _CGROUP_MEMORY = Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Machine:
    """What a process may use.

    Attributes:
        num_cores: CPU cores: of the machine, of this process's affinity, and of the container's quota the least.
        memory_bytes: main memory, or the container's limit; ``None`` where nobody tells.
        free_memory_bytes: of that, what is not in use; ``None`` where nobody tells.
        shared_memory_bytes: free space in ``/dev/shm``, through which data workers hand over their batches; ``None``
            where there is none.
        num_gpus: CUDA devices that torch sees.
    """

    num_cores: int
    memory_bytes: int | None
    free_memory_bytes: int | None
    shared_memory_bytes: int | None
    num_gpus: int


def look_at_machine() -> Machine:
    """Looks at this machine."""
    total, free = _memory()
    shm = Path("/dev/shm")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else None
    return Machine(available_cores(), total, free, shared, torch.cuda.device_count())


def available_cores(quota_file: Path = _CGROUP_CPU) -> int:
    """Returns how many cores this process may use.

    Args:
        quota_file: the container's limit, as Linux's control groups write it: ``quota period``, in microseconds.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = quota_file.read_text().split()
        return max(1, min(affinity, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return affinity


def _memory() -> tuple[int | None, int | None]:
    try:
        words = {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
        }
        total, free = words["MemTotal"], words["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None, None
    try:
        limit = int(_CGROUP_MEMORY.read_text())
        used = int(_CGROUP_MEMORY.with_name("memory.current").read_text())
        return min(total, limit), min(free, limit - used)
    except (OSError, ValueError):
        return total, free


def interfaces() -> dict[str, str]:
    """Returns the network interfaces with their speed where the driver tells it, Linux only."""
    found = {}
    for folder in sorted(Path("/sys/class/net").glob("*")):
        try:
            state = (folder / "operstate").read_text().strip()
            speed = int((folder / "speed").read_text())
        except (OSError, ValueError):
            speed = -1
            state = state if "state" in locals() else "unknown"
        found[folder.name] = state + (f", {speed} Mbit/s" if speed > 0 else "")
    return found


def topology() -> str | None:
    """Returns how the GPUs of this machine are joined, in NVIDIA's own table; ``None`` where its tool is missing."""
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else None
