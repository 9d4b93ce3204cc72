"""Contradictions between what a launcher has set and what was asked for, before any process waits for another.

Each of them makes a run wait for ever, or makes every process train a model of its own without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LIGHTNING", "OTHER", "SLURM", "TORCHRUN", "Request", "contradictions"]

TORCHRUN = "torchrun"
SLURM = "SLURM"
LIGHTNING = "Lightning"
OTHER = "another launcher"

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
_READ = {
    TORCHRUN: _RANKS,
    SLURM: ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES", "SLURM_LOCALID"),
    LIGHTNING: (*_RANKS, "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", *_MPI_SIZES),
}


@dataclass(frozen=True)
class Request:
    """What was asked for, and who starts the processes.

    Attributes:
        num_devices: processes for each node, the Trainer's ``devices``.
        num_nodes: the Trainer's.
        launcher: from where ranks and addresses are taken: one of this module's constants.
        starts_processes: whether Lightning starts the other processes of the node itself.
    """

    num_devices: int
    num_nodes: int
    launcher: str
    starts_processes: bool

    @property
    def world_size(self) -> int:
        """How many processes there will be."""
        return self.num_devices * self.num_nodes

    def __str__(self) -> str:
        return f"devices={self.num_devices} and num_nodes={self.num_nodes}"


def contradictions(variables: Mapping[str, str], request: Request) -> list[str]:
    """Returns what cannot be right, most important first: one sentence each, with what to change, without a full stop.

    Args:
        variables: the environment, ``os.environ``.
        request: what was asked for.

    Reference:
        Lightning issues 20391, 17252 and 19883.
    """
    numbers, complaints = _whole_numbers(variables, request.launcher)
    if complaints:
        return complaints
    if request.launcher == TORCHRUN:
        return _under_torchrun(numbers, request)
    if request.launcher == SLURM:
        return _under_slurm(numbers, request)
    if request.launcher == LIGHTNING:
        return _copies(variables, numbers, request) or _under_lightning(variables, numbers, request)
    return []


def _whole_numbers(variables: Mapping[str, str], launcher: str) -> tuple[dict[str, int], list[str]]:
    """Returns the variables that count for a launcher, as numbers; empty ones are unset."""
    numbers, complaints = {}, []
    for name in _READ.get(launcher, ()):
        if not (value := variables.get(name)):
            continue
        try:
            numbers[name] = int(value)
        except ValueError:
            complaints.append(f"{name} is {value!r}, which is no whole number: correct it, or unset it")
    if not 0 < numbers.get("MASTER_PORT", 1) < 2**16:
        complaints.append(
            f"MASTER_PORT is {numbers['MASTER_PORT']}, and ports go from 1 to 65535: choose one, or start with "
            "torchrun --standalone"
        )
    return numbers, complaints


def _under_torchrun(numbers: Mapping[str, int], request: Request) -> list[str]:
    found = []
    world_size = numbers.get("WORLD_SIZE", request.world_size)
    if world_size != request.world_size:
        found.append(
            f"torchrun has started {world_size} processes, and the Trainer has {request}, which makes "
            f"{request.world_size}: make nproc-per-node equal to devices and nnodes equal to num_nodes"
        )
    return found + _local_rank_too_large("LOCAL_RANK", numbers, request)


def _under_slurm(numbers: Mapping[str, int], request: Request) -> list[str]:
    found = []
    if "SLURM_NTASKS" not in numbers:
        found.append("SLURM_NTASKS is not set, so srun has not started this process: start it with srun")
    elif (num_tasks := numbers["SLURM_NTASKS"]) != request.world_size:
        found.append(
            f"SLURM has started {num_tasks} tasks, and the Trainer has {request}, which makes {request.world_size}: "
            "make ntasks-per-node equal to devices and nodes equal to num_nodes"
        )
    wanted = (
        ("SLURM_NTASKS_PER_NODE", request.num_devices, "devices"),
        ("SLURM_NNODES", request.num_nodes, "num_nodes"),
    )
    for name, number, setting in wanted:
        if numbers.get(name, number) != number:
            found.append(f"{name} is {numbers[name]}, and the Trainer has {setting}={number}: make them equal")
    return found + _local_rank_too_large("SLURM_LOCALID", numbers, request)


def _local_rank_too_large(name: str, numbers: Mapping[str, int], request: Request) -> list[str]:
    local_rank = numbers.get(name, 0)
    if local_rank < request.num_devices:
        return []
    return [
        f"{name} is {local_rank}, and the Trainer has devices={request.num_devices}, so this process has none: give "
        "the Trainer as many devices as there are processes on a node"
    ]


def _copies(variables: Mapping[str, str], numbers: Mapping[str, int], request: Request) -> list[str]:
    """Whether somebody has started many processes, each of which would begin a training of its own."""
    if not request.starts_processes or "SLURM_PTY_PORT" in variables:  # a shell: one process, whatever srun has set
        return []
    num_tasks = numbers.get("SLURM_STEP_NUM_TASKS", 1)  # of srun; a batch script has SLURM_NTASKS, and is one process
    if "SLURM_PROCID" in numbers and num_tasks > 1:
        return [
            f"srun has started {num_tasks} tasks, and Lightning takes this job for an interactive one "
            f"(SLURM_JOB_NAME={variables.get('SLURM_JOB_NAME')}), so each task would train alone: give the job another "
            "name, or start one task"
        ]
    for name in _MPI_SIZES:
        if numbers.get(name, 1) > 1:
            return [
                f"{name} is {numbers[name]}, and Lightning does not know of MPI here, so each process would train "
                "alone: install mpi4py, or start one process for each node"
            ]
    world_size, rank = numbers.get("WORLD_SIZE", 1), numbers.get("RANK")
    if rank is not None and world_size > 1 and world_size != request.num_nodes:
        return [
            f"RANK is {rank} and WORLD_SIZE is {world_size}, but LOCAL_RANK is not set, so Lightning would start "
            f"{request.num_devices - 1} more processes from each that you start: set LOCAL_RANK too, start with "
            "torchrun, or unset RANK and WORLD_SIZE"
        ]
    return []


def _under_lightning(variables: Mapping[str, str], numbers: Mapping[str, int], request: Request) -> list[str]:
    node_rank = numbers.get("NODE_RANK", numbers.get("GROUP_RANK", 0))
    found = []
    if node_rank >= request.num_nodes:
        found.append(
            f"NODE_RANK is {node_rank}, and the Trainer has num_nodes={request.num_nodes}: number the nodes from 0, or "
            "unset NODE_RANK and GROUP_RANK"
        )
    if request.num_nodes > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not variables.get(name)]
        if missing:
            found.append(
                f"num_nodes is {request.num_nodes}, and {' and '.join(missing)} not set, so every node would wait for "
                "the others at itself: set MASTER_ADDR to node 0's address and MASTER_PORT to a port that is free there"
            )
    if request.starts_processes:
        return found
    found += _local_rank_too_large("LOCAL_RANK", numbers, request)
    if numbers.get("WORLD_SIZE", request.world_size) != request.world_size:
        found.append(
            f"WORLD_SIZE is {numbers['WORLD_SIZE']}, and the Trainer has {request}, which makes {request.world_size}: "
            "make them equal, or unset WORLD_SIZE and LOCAL_RANK if nobody else starts the processes"
        )
    rank = node_rank * request.num_devices + numbers.get("LOCAL_RANK", 0)
    if numbers.get("RANK", rank) not in (rank, node_rank):  # some launchers count nodes by RANK
        found.append(
            f"RANK is {numbers['RANK']}, and Lightning counts NODE_RANK {node_rank} x devices {request.num_devices} + "
            f"LOCAL_RANK {numbers.get('LOCAL_RANK', 0)} = {rank}: set NODE_RANK, or start with torchrun"
        )
    return found
