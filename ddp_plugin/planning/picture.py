"""A plan as a picture: what a step takes with each way to communicate, and how far it scales."""

from pathlib import Path
from typing import Any

from ddp_plugin.planning.predicting import Prediction
from ddp_plugin.planning.run_plan import RunPlan

__all__ = ["draw_plan"]

# Okabe and Ito's palette, told apart with any kind of colour vision: Color Universal Design, 2008.
_PARTS = {"forward": "#56B4E9", "backward": "#0072B2", "exposed communication": "#D55E00"}
_CURVE = "#009E73"
_MOST_STEPS = 3  # steps without communication; a longer bar is cut off and says how long it is


def draw_plan(path: Path, plan: RunPlan) -> None:
    """Draws a plan, makes the file's folder, and replaces a file that is there.

    Args:
        path: the file; its ending tells the format.
        plan: of a run whose forward and backward are known.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [*plan.algorithms, *plan.hooks]
    figure = Figure(figsize=(11, 1.5 + 0.26 * len(rows)), layout="constrained")
    steps, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_steps(steps, plan, rows)
    _draw_scaling(curve, plan)
    figure.suptitle(f"{plan.model}, {plan.cluster.world_size} processes", x=0.01, ha="left", fontsize=11)
    parts = [Patch(color=colour, label=part) for part, colour in _PARTS.items()]
    figure.legend(handles=parts, loc="outside lower left", ncols=len(parts), frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_steps(axes: Any, plan: RunPlan, rows: list[Prediction]) -> None:
    forward_ms, backward_ms = 1e3 * plan.trace.forward_s, 1e3 * plan.trace.backward_s
    alone_ms = forward_ms + backward_ms
    places = [row + (0.6 if row >= len(plan.algorithms) else 0.0) for row in range(len(rows))]
    end_ms = min(_MOST_STEPS * alone_ms, max(1e3 * one.step_s for one in rows))
    for place, one in zip(places, rows, strict=True):
        exposed_ms = 1e3 * one.overlap.exposed_s
        axes.barh(place, forward_ms, color=_PARTS["forward"])
        axes.barh(place, backward_ms, left=forward_ms, color=_PARTS["backward"])
        axes.barh(place, min(exposed_ms, end_ms - alone_ms), left=alone_ms, color=_PARTS["exposed communication"])
        if alone_ms + exposed_ms > end_ms:
            text = f"{one.step_s / (alone_ms / 1e3):.0f} x  "
            axes.text(end_ms, place, text, ha="right", va="center", color="white", fontsize=7)
    axes.set_xlim(0, 1.02 * end_ms)
    axes.set_yticks(places, [one.name for one in rows], fontsize=8)
    axes.set_ylim(places[-1] + 0.7, -0.7)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("milliseconds of a step, without the optimizer")
    axes.set_title("all-reduce algorithms above, hooks below", loc="left", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_scaling(axes: Any, plan: RunPlan) -> None:
    processes, ratios = list(plan.efficiency_ratios), [100 * ratio for ratio in plan.efficiency_ratios.values()]
    axes.plot(processes, ratios, color=_CURVE, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(processes[::2], [str(number) for number in processes[::2]])
    axes.set_ylim(0, 105)
    axes.set_xlabel("processes")
    axes.set_title("% of ideal throughput, no hook, same batch on each", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.6)
