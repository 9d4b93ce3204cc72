"""``trainer.validate`` with ``ExactEvaluation`` beside Lightning's own, on the same data and network."""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from ddp_plugin import CustomDDPStrategy, ExactEvaluation
from tests.benchmarks.models import WORKLOADS, Classifier
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row, slowest
from tests.harness import trainer

__all__ = ["cases", "rows", "time_evaluation"]

SECTION = "evaluation: trainer.validate, ExactEvaluation / Lightning's DDPStrategy"
WORK_SECTION = "evaluation: samples that the busiest rank computes, ExactEvaluation / Lightning's DDPStrategy"
OURS, THEIRS = "ExactEvaluation", "Lightning"


def cases(quick: bool) -> list[tuple[str, str, int]]:
    """Returns ``(name, workload, samples)``; batches are shared out whole, so what matters is how many there are."""
    found = []
    for workload in ("tiny MLP", "large MLP"):
        batch = WORKLOADS[workload].batch_size
        numbers = {"divides": 32 * batch, "short last batch": 32 * batch - 7, "odd number of batches": 31 * batch}
        if quick:
            numbers = {"odd number of batches": 3 * batch}
        else:
            numbers["few batches"] = 5 * batch
            numbers["many batches"] = (512 if workload == "tiny MLP" else 64) * batch - batch // 2
        found += [(f"{workload}, {count} samples ({kind})", workload, count) for kind, count in numbers.items()]
    return found


def time_evaluation(workload: str, num_samples: int, num_rounds: int) -> tuple[Times, dict[str, int]]:
    """Times both on this rank.

    Returns:
        The times, and how many samples this rank computed in one evaluation.

    Collectives:
        Those of the evaluations, and a barrier before each, on all ranks.
    """
    data = WORKLOADS[workload].samples(num_samples)
    seen: dict[str, Any] = {}
    num_computed: dict[str, int] = {}

    def timed(name: str, make: Callable[[], dict[str, Any]]) -> Callable[[], float]:
        def run() -> float:
            evaluate, module = trainer(**make()), Classifier(WORKLOADS[workload])
            loader = DataLoader(data, WORKLOADS[workload].batch_size)
            dist.barrier()
            begin = time.perf_counter()
            seen[name] = evaluate.validate(module, loader, verbose=False)[0]
            elapsed_s = time.perf_counter() - begin
            num_computed[name] = module.num_evaluated
            return elapsed_s

        return run

    times = interleaved(
        {
            OURS: timed(OURS, lambda: {"strategy": CustomDDPStrategy(), "callbacks": [ExactEvaluation()]}),
            THEIRS: timed(THEIRS, lambda: {"strategy": DDPStrategy()}),
        },
        num_rounds,
    )
    if seen[OURS].keys() != seen[THEIRS].keys():
        raise RuntimeError(f"the two evaluations logged different keys: {sorted(seen[OURS])}, {sorted(seen[THEIRS])}")
    return times, num_computed


def rows(by_case: dict[str, list[tuple[Times, dict[str, int]]]]) -> list[Row]:
    """Returns the report: times first, then how much of them the sharing-out explains.

    Whole batches are shared out, so the busiest rank computes up to one batch more than with Lightning's sampler, which
    splits batches. That ratio is exact, and it is 1 for many batches.
    """
    found = [
        ratio_row(SECTION, name, slowest([times for times, _ in by_rank]), OURS, THEIRS)
        for name, by_rank in by_case.items()
    ]
    for name, by_rank in by_case.items():
        ours, theirs = (max(num_computed[which] for _, num_computed in by_rank) for which in (OURS, THEIRS))
        ratio = ours / theirs
        found.append(Row(WORK_SECTION, name, "ratio", ratio, ratio, ratio))
    return found
