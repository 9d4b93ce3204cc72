"""Asking SLURM to run this job again."""

import re
import subprocess
from collections.abc import Mapping

from ddp_plugin.errors import explain

__all__ = ["job_id", "requeue"]


def job_id(environment: Mapping[str, str]) -> str:
    """Returns the job's name for ``scontrol``, that of the one task in an array of jobs.

    Args:
        environment: environment variables, as SLURM sets them.

    Raises:
        ValueError: they hold no such name.
    """
    if (array := environment.get("SLURM_ARRAY_JOB_ID")) is not None:
        name = f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    else:
        name = environment.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise ValueError(
            explain(
                "a job number in SLURM_JOB_ID, or in SLURM_ARRAY_JOB_ID and …_TASK_ID", repr(name), "Start with srun"
            )
        )
    return name


def requeue(environment: Mapping[str, str]) -> str | None:
    """Puts the job back into SLURM's queue.

    Args:
        environment: environment variables, as SLURM sets them.

    Returns:
        ``None``, or why it did not work.

    Collectives:
        None; one rank calls it.
    """
    try:
        command = ["scontrol", "requeue", job_id(environment)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except (OSError, ValueError) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip()
    return f"{' '.join(command)} ended with status {done.returncode}: {said}" if done.returncode else None
