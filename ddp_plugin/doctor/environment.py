"""Variables that a launcher has set, and those that change what torch and its backends do."""

from collections.abc import Mapping

from ddp_plugin.doctor.findings import Finding
from ddp_plugin.doctor.machine import Machine
from ddp_plugin.preflight.facts import environment_settings, launcher_variables

__all__ = ["launcher_of", "look_at_environment"]

_LAUNCHERS = (
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("SLURM_JOB_ID", "SLURM"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_SIZE", "an MPI launcher"),
    ("KUBERNETES_SERVICE_HOST", "a Kubernetes pod"),
    ("LOCAL_RANK", "another launcher, or a shell that exported it"),
    ("RANK", "another launcher, or a shell that exported it"),
)


def launcher_of(variables: Mapping[str, str]) -> str:
    """Returns who has set the variables of ranks, in words."""
    return next((name for variable, name in _LAUNCHERS if variable in variables), "nobody: a shell")


def look_at_environment(
    variables: Mapping[str, str], machine: Machine
) -> tuple[dict[str, Mapping[str, str]], list[Finding]]:
    """Returns sections of a report, and what is wrong in them.

    Args:
        variables: ``os.environ``.
        machine: what there is.
    """
    launcher = launcher_variables(variables)
    settings = environment_settings(variables)
    threads = {name: variables[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in variables}
    sections: dict[str, Mapping[str, str]] = {
        "started by": {"launcher": launcher_of(variables), **launcher},
        "environment": {**threads, **settings} or {"": "no variable that changes torch, NCCL or gloo"},
    }
    return sections, [*_stray(variables, launcher), *_risky(variables, machine)]


def _stray(variables: Mapping[str, str], launcher: Mapping[str, str]) -> list[Finding]:
    """Finds ranks that no launcher stands behind: a Trainer takes them for true and waits for the other processes."""
    ranks = sorted({"RANK", "LOCAL_RANK", "WORLD_SIZE"} & set(launcher))
    if not ranks or any(name in variables for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_SIZE")):
        return []
    return [
        Finding(
            False,
            f"{', '.join(ranks)} {'is' if len(ranks) == 1 else 'are'} set, and no launcher is known to have done so",
            "Unset them in this shell, unless your own launcher sets them: a Trainer would wait for other processes",
        )
    ]


def _risky(variables: Mapping[str, str], machine: Machine) -> list[Finding]:
    found = []
    if "OMP_NUM_THREADS" not in variables and "SLURM_CPUS_PER_TASK" not in variables:
        found.append(
            Finding(
                False,
                f"OMP_NUM_THREADS is not set, so every process on this machine may start {machine.num_cores} threads",
                "Set OMP_NUM_THREADS to the cores of one process; torchrun sets it to 1",
            )
        )
    if variables.get("CUDA_LAUNCH_BLOCKING") == "1":
        found.append(
            Finding(
                False,
                "CUDA_LAUNCH_BLOCKING is 1, so nothing overlaps: every kernel is waited for",
                "Unset it when you are done looking for an error",
            )
        )
    if variables.get("NCCL_P2P_DISABLE") == "1":
        found.append(
            Finding(
                False,
                "NCCL_P2P_DISABLE is 1, so GPUs of one machine exchange through main memory",
                "Unset it, unless this machine's GPUs cannot reach each other",
            )
        )
    if variables.get("NCCL_IB_DISABLE") == "1":
        found.append(
            Finding(
                False,
                "NCCL_IB_DISABLE is 1, so nodes exchange over TCP even where there is InfiniBand",
                "Unset it, unless there is none",
            )
        )
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found.append(
            Finding(
                True,
                "TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch 2.13 ends in a crash under Lightning's DDP",
                "Set it to INFO, or unset it",
            )
        )
    return found
