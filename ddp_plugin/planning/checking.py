"""How wrong a plan is: the same predictions for a run that was measured, beside what the clock said.

``measured.json`` beside this file is one run of the slow-link benchmark, which wrote it: two hosts joined by a limited
link, a transformer of 8 million parameters, and every communication hook. It holds what a planner is told (shapes, the
times of one process's forward and backward, the link) and what it may not know: how long the steps took.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ddp_plugin.collectives.cost import Link
from ddp_plugin.hooks import resolve_hook
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.overlap import Gradient
from ddp_plugin.planning.predicting import predict_hooks
from ddp_plugin.planning.traced import Trace

__all__ = ["Checked", "check", "read_measured", "render_checked", "summary"]


@dataclass(frozen=True)
class Checked:
    """A predicted step beside the measured one.

    Attributes:
        rate_mbit: of the link, in Mbit/s.
        name: of the hook; ``"allreduce"`` without one.
        bucket_cap_mb: size of a bucket in mebibytes; ``None`` is torch's default.
        is_exact: whether the hook's own arithmetic is the sum alone.
        measured_s: seconds of a step, by the clock.
        predicted_s: seconds of a step, by the plan: that of a step without communication, and what is exposed.
    """

    rate_mbit: float
    name: str
    bucket_cap_mb: float | None
    is_exact: bool
    measured_s: float
    predicted_s: float

    @property
    def error_ratio(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def read_measured() -> dict[str, Any]:
    """Returns the measured run that comes with the package.

    Collectives:
        None.
    """
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("measured.json").read_text())
    return found


def check(measured: Mapping[str, Any]) -> list[Checked]:
    """Predicts every step that was measured.

    Args:
        measured: what :func:`read_measured` returns.

    Returns:
        The slowest link first, and the fastest step first on each.

    Collectives:
        None.
    """
    return [
        one
        for run in sorted(measured["runs"], key=lambda run: run["rate_mbit"])
        for one in sorted(_check_run(run, measured["shapes"]), key=lambda one: one.measured_s)
    ]


def _check_run(run: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[Checked]:
    link = Link(**run["link"])
    cluster = Cluster(2, 1, link, link)
    gradients = [
        Gradient(name, elements := math.prod(shapes[name]), 4 * elements, ready_s)
        for name, ready_s in sorted(run["trace"]["ready_s"].items(), key=lambda item: item[1])
    ]
    trace = Trace(run["trace"]["forward_s"], run["trace"]["backward_s"], tuple(gradients), is_measured=True)
    found = []
    for step in run["steps"]:
        spec, cap_mb = step["comm_hook"] or "allreduce", step["bucket_cap_mb"]
        (prediction,) = predict_hooks(trace, cluster, cap_mb, shapes, [spec])
        predicted_s = run["alone_s"] + prediction.overlap.exposed_s
        name = resolve_hook(spec).name
        found.append(Checked(run["rate_mbit"], name, cap_mb, step["is_exact"], step["step_s"], predicted_s))
    return found


def summary(checked: Sequence[Checked], made_with: Mapping[str, Any]) -> str:
    """Returns one sentence with the smallest and the largest error of the exact all-reduces and of the other hooks."""
    exact, others = ([one.error_ratio for one in checked if one.is_exact is which] for which in (True, False))
    rates = " and ".join(f"{rate:g}" for rate in dict.fromkeys(one.rate_mbit for one in checked))
    return (
        f"Predicted the same way, the steps measured on {made_with['date']} over links of {rates} Mbit/s come out "
        f"{_span(exact)} off with exact all-reduces and {_span(others)} with the other hooks, whose arithmetic no plan "
        "counts (ddp-plugin plan --check)."
    )


def _span(errors: Sequence[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}"


def render_checked(checked: Sequence[Checked], made_with: Mapping[str, Any]) -> str:
    """Prints every prediction beside what was measured."""
    lines = [", ".join(f"{name} {value}" for name, value in made_with.items())]
    for rate in dict.fromkeys(one.rate_mbit for one in checked):
        lines += [
            "",
            f"a link of {rate:g} Mbit/s",
            f"  {'comm_hook':<18}{'bucket':>9}{'measured':>12}{'predicted':>12}{'error':>9}",
        ]
        for one in (one for one in checked if one.rate_mbit == rate):
            cap = "default" if one.bucket_cap_mb is None else f"{one.bucket_cap_mb:g} MiB"
            lines.append(
                f"  {one.name:<18}{cap:>9}{one.measured_s * 1e3:>9.0f} ms{one.predicted_s * 1e3:>9.0f} ms"
                f"{one.error_ratio:>+9.1%}"
            )
    return "\n".join([*lines, "", summary(checked, made_with)]) + "\n"
