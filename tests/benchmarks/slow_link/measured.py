"""The file that comes with the package: what a planner is told of a run, and the steps it has to predict."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.slow_link.summary import RateResult
from tests.benchmarks.slow_link.variants import BASELINE, Variant, kind_of
from tests.benchmarks.slow_link.workload import Workload

__all__ = ["write_measured"]


def write_measured(
    path: Path,
    facts: Mapping[str, Any],
    results: Sequence[RateResult],
    variants: Mapping[str, Variant],
    workload: Workload,
) -> None:
    """Writes what :mod:`ddp_plugin.planning.checking` reads: steps of our own strategy alone.

    Raises:
        ValueError: at some rate the link or the backward was not measured.
    """
    shapes = {f"network.{name}": list(p.shape) for name, p in workload.network(0).named_parameters()}
    for result in results:
        if not result.fitted or not result.trace:
            raise ValueError(f"at {result.rate_mbit:g} Mbit/s the link or the backward was not measured")
    runs = [
        {
            "rate_mbit": result.rate_mbit,
            "link": dict(result.fitted),
            "trace": dict(result.trace),
            "alone_s": next(row.step_s for row in result.rows if row.variant == BASELINE),
            "steps": [
                {
                    "comm_hook": variants[row.variant].comm_hook,
                    "bucket_cap_mb": variants[row.variant].ddp.get("bucket_cap_mb"),
                    "is_exact": kind_of(variants[row.variant]) == "exact",
                    "step_s": row.step_s,
                }
                for row in result.rows
                if variants[row.variant].loop == "custom" and row.variant != BASELINE
            ],
        }
        for result in results
    ]
    path.write_text(json.dumps({"made_with": dict(facts), "shapes": shapes, "runs": runs}, indent=1) + "\n")
