"""How many data workers each rank can have."""

from ddp_plugin.doctor.findings import Finding
from ddp_plugin.doctor.machine import Machine
from ddp_plugin.errors import counted

__all__ = ["advise_workers", "workers_per_rank"]

_WORKER_BYTES = 500 * 10**6  # a Python process with torch in it, before it holds any data
_SHARED_BYTES_PER_WORKER = 64 * 10**6  # two batches of some ten megabytes under way, with some room


def workers_per_rank(machine: Machine, num_ranks: int) -> int:
    """Returns how many data workers each rank may have: the cores that the ranks leave free, as memory allows.

    Args:
        machine: what there is.
        num_ranks: processes on this machine; each keeps a core for itself.
    """
    by_cores = max(0, machine.num_cores - num_ranks) // num_ranks
    if machine.free_memory_bytes is None:
        return by_cores
    by_memory = max(0, int(machine.free_memory_bytes / 2) // _WORKER_BYTES) // num_ranks
    return min(by_cores, by_memory)


def advise_workers(machine: Machine, num_ranks: int) -> tuple[dict[str, str], list[Finding]]:
    """Returns the advice as rows, and what stands against it.

    Args:
        machine: what there is.
        num_ranks: processes on this machine.
    """
    workers = workers_per_rank(machine, num_ranks)
    rows = {
        "cores": f"{machine.num_cores} for {counted(num_ranks, 'rank')}",
        "num_workers": f"{workers} for each rank" + ("" if workers else ": load in the rank's own process"),
    }
    found = []
    if machine.num_cores < num_ranks:
        found.append(
            Finding(
                False,
                f"{counted(num_ranks, 'rank')} share {counted(machine.num_cores, 'core')}",
                "Start fewer processes on this machine, or give the container more cores",
            )
        )
    needed = num_ranks * max(1, workers) * _SHARED_BYTES_PER_WORKER
    if machine.shared_memory_bytes is not None and machine.shared_memory_bytes < needed:
        found.append(
            Finding(
                False,
                f"/dev/shm has {machine.shared_memory_bytes / 1e6:.0f} MB free, and data workers of all ranks may need "
                f"{needed / 1e6:.0f} MB",
                "Start the container with a larger --shm-size (in Kubernetes an emptyDir with medium: Memory)",
            )
        )
    return rows, found
