"""One step of all ranks as a picture: the parts of the step, and every bucket's way over the backward."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_plugin.timeline.chrome_trace import aligned
from ddp_plugin.timeline.steps import StepTimeline, steady

__all__ = ["draw_timeline", "picture_formats", "typical_step"]

# Okabe and Ito's palette, told apart with any kind of colour vision: Color Universal Design, 2008.
_COLOURS = {"data": "#BBBBBB", "forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
_HIDDEN_STYLE: dict[str, Any] = {"facecolor": "#F0E442", "edgecolor": "#444444", "linewidth": 0.4}
_EXPOSED_STYLE: dict[str, Any] = {"facecolor": "#D55E00", "edgecolor": "#444444", "linewidth": 0.4, "hatch": "////"}
_MAX_RANKS = 8
_BUCKETS_HEIGHT = 1.2  # of all buckets of a rank, where the step's bar is 0.5 high


def typical_step(by_rank: Mapping[int, Sequence[StepTimeline]]) -> int:
    """Returns the number of the step, of those that all ranks have, that is of median length on the first rank."""
    shared = set.intersection(*({step.step for step in steady(steps)} for steps in by_rank.values()))
    first = by_rank[min(by_rank)]
    candidates = [step for step in first if step.step in shared] or list(first)
    length_s = statistics.median_low(step.duration_s for step in candidates)
    return next(step.step for step in candidates if step.duration_s == length_s)


def picture_formats() -> frozenset[str]:
    """Returns the endings, without the dot, of the files that :func:`draw_timeline` can write.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    return frozenset(FigureCanvasBase.get_supported_filetypes())


def draw_timeline(path: Path, by_rank: Mapping[int, Sequence[StepTimeline]]) -> None:
    """Draws a typical step of all ranks, makes the file's folder, and replaces a file that is there.

    Of more than eight ranks, those whose backward ends first and last are drawn, four of each.

    Args:
        path: the file; its ending tells the format.
        by_rank: the timelines of each rank, at least one each.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shifts, number = aligned(by_rank), typical_step(by_rank)
    steps = {rank: step for rank, own in by_rank.items() for step in own if step.step == number}
    num_ranks = len(steps)
    if num_ranks > _MAX_RANKS:
        order = sorted(steps, key=lambda rank: _ready_s(steps[rank]) + shifts[rank])
        kept = {*order[: _MAX_RANKS // 2], *order[-_MAX_RANKS // 2 :]}
        steps = {rank: step for rank, step in steps.items() if rank in kept}
    zero_s = min(step.began_s + shifts[rank] for rank, step in steps.items())

    has_buckets = any(step.buckets for step in steps.values())
    row_height = 1.0 + (_BUCKETS_HEIGHT if has_buckets else 0.0)
    figure = Figure(figsize=(10, 1.5 + 0.62 * row_height * len(steps)), layout="constrained")
    axes = figure.add_subplot()
    for row, rank in enumerate(sorted(steps)):
        _draw_rank(axes, steps[rank], 1e3 * (shifts[rank] - zero_s), row * row_height)
    axes.set_yticks([row * row_height + 0.25 for row in range(len(steps))], [f"rank {rank}" for rank in sorted(steps)])
    axes.set_ylim(row_height * len(steps) - 0.25, -0.2)
    axes.set_xlabel("milliseconds since the end of the step before")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(_title(number, steps, num_ranks), loc="left", fontsize=11)
    legend: list[Any] = [Patch(color=colour, label=part) for part, colour in _COLOURS.items()]
    if has_buckets:
        legend.append(Patch(**_HIDDEN_STYLE, label="reduction of a bucket, hidden by the backward"))
        legend.append(Patch(**_EXPOSED_STYLE, label="reduction, exposed"))
    if has_buckets and num_ranks > 1:
        last_ms = 1e3 * (max(_ready_s(step) + shifts[rank] for rank, step in steps.items()) - zero_s)
        legend.append(axes.axvline(last_ms, color="black", linewidth=1, linestyle="--", label="the last rank is ready"))
    figure.legend(handles=legend, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_rank(axes: Any, step: StepTimeline, shift_ms: float, top: float) -> None:
    """Draws the bar of the step, and below it a thin one for each bucket."""
    indices = sorted({bucket.index for bucket in step.buckets})
    height = _BUCKETS_HEIGHT / max(4, len(indices))

    def bar(begin_s: float, end_s: float, low: float, height: float, **style: Any) -> None:
        if end_s > begin_s:
            left_ms, width_ms = 1e3 * begin_s + shift_ms, 1e3 * (end_s - begin_s)
            axes.barh(low, width_ms, height, left_ms, align="edge", **style)

    for phase in step.phases:
        bar(phase.begin_s, phase.end_s, top, 0.5, color=_COLOURS[phase.part], linewidth=0)
    for reduction in step.reductions:
        last_ready_s = max(bucket.ready_s for bucket in reduction)
        bar(last_ready_s, max(bucket.reduced_s for bucket in reduction), top, 0.5, **_EXPOSED_STYLE)
        for bucket in reduction:
            low = top + 0.56 + height * indices.index(bucket.index)
            bar(bucket.ready_s, min(bucket.reduced_s, last_ready_s), low, 0.8 * height, **_HIDDEN_STYLE)
            bar(max(bucket.ready_s, last_ready_s), bucket.reduced_s, low, 0.8 * height, **_EXPOSED_STYLE)


def _ready_s(step: StepTimeline) -> float:
    return max((bucket.ready_s for bucket in step.buckets), default=step.ended_s)


def _title(number: int, steps: Mapping[int, StepTimeline], num_ranks: int) -> str:
    length_ms = 1e3 * statistics.fmean(step.duration_s for step in steps.values())
    title = f"Step {number}: {length_ms:.1f} ms"
    if any(step.buckets for step in steps.values()):
        communication_ms = 1e3 * statistics.fmean(step.communication_s for step in steps.values())
        exposed_ms = 1e3 * statistics.fmean(step.exposed_s for step in steps.values())
        title += f"; gradients on their way for {communication_ms:.1f} ms, {exposed_ms:.1f} ms of it exposed"
    if len(steps) < num_ranks:
        title += f" (means of the {len(steps)} of {num_ranks} ranks that are ready first and last)"
    elif num_ranks > 1:
        title += f" (means of {num_ranks} ranks)"
    return title
