"""Everything that is timed, in one pair of processes, and the rows of the report."""

import logging
import warnings
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.benchmarks import checkpoints, evaluation, monitors, replicas, seeding, training
from tests.benchmarks.timing import Row, slowest

__all__ = ["collect", "measure"]


def measure(quick: bool) -> dict[str, Any]:
    """Runs on each rank: everything that is timed, one after another in this one process.

    Collectives:
        Creation of the group, and those of what is timed, on all ranks.
    """
    warnings.simplefilter("ignore")  # Lightning's advice on loaders and loggers, which the benchmark does not want
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))  # the strategies' own default
    num_rounds, num_steps = (1, 2) if quick else (9, 40)
    batch_size = 1 if quick else None  # of the language model; its own
    step_workloads = ("MLP",) if quick else ("MLP", "transformer")
    return {
        "evaluation": {
            name: evaluation.time_evaluation(workload, num_samples, num_rounds)
            for name, workload, num_samples in evaluation.cases(quick)
        },
        "steps": {name: training.time_steps(name, num_steps, num_rounds) for name in step_workloads},
        "hooks": training.time_hooks("MLP", num_steps, num_rounds),
        "batchnorm": training.time_batchnorm("convnet", num_steps, num_rounds),
        "checks": replicas.time_checks(num_steps, num_rounds),
        "decisions": replicas.time_decisions(num_steps, num_rounds),
        "posts": replicas.time_posts(num_steps, num_rounds),
        "monitored": {name: monitors.time_monitored_steps(name, 3 * num_steps, num_rounds) for name in step_workloads}
        | {monitors.LANGUAGE_MODEL: monitors.time_monitored_language_model(1 if quick else 10, num_rounds, batch_size)},
        "own": {
            monitors.LANGUAGE_MODEL: monitors.time_own(None, 12 if quick else 30, (num_rounds + 1) // 2, batch_size),
            **{f"MLP of {n} layers": monitors.time_own(n, 55 if quick else 120, num_rounds) for n in (2, 8, 32)},
        },
        "seeding": seeding.time_seeding(200 if quick else 2000, num_rounds),
        "files": checkpoints.time_files(1 if quick else 64, num_rounds),
    }


def collect(by_rank: list[dict[str, Any]]) -> list[Row]:
    """Turns what the ranks measured into the rows of the report."""
    first = by_rank[0]
    rows = evaluation.rows({name: [rank["evaluation"][name] for rank in by_rank] for name in first["evaluation"]})
    steps = [
        row
        for name in first["steps"]
        for row in training.step_rows(name, slowest([rank["steps"][name] for rank in by_rank]))
    ]
    rows += sorted(steps, key=lambda row: row.section)
    rows += training.hook_rows("MLP", slowest([rank["hooks"][0] for rank in by_rank]), first["hooks"][1])
    rows += training.batchnorm_rows("convnet", slowest([rank["batchnorm"] for rank in by_rank]))
    rows += replicas.rows(
        slowest([rank["checks"] for rank in by_rank]),
        slowest([rank["decisions"] for rank in by_rank]),
        [rank["posts"] for rank in by_rank],
    )
    monitored = {name: slowest([rank["monitored"][name] for rank in by_rank]) for name in first["monitored"]}
    rows += monitors.rows(monitored, {name: [rank["own"][name] for rank in by_rank] for name in first["own"]})
    rows += seeding.rows([rank["seeding"] for rank in by_rank])
    return rows + checkpoints.rows(slowest([rank["files"] for rank in by_rank]))
