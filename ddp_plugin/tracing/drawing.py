"""The pictures of the page, as SVG: a typical step of every rank, and all steps as columns.

The colours are those of :mod:`ddp_plugin.timeline.picture`, as classes that the page's style sheet fills in.
"""

import html
import math
from collections.abc import Mapping, Sequence

from ddp_plugin.timeline.chrome_trace import aligned
from ddp_plugin.timeline.picture import typical_step
from ddp_plugin.timeline.steps import PARTS, StepTimeline

__all__ = ["MAX_RANKS", "draw_columns", "draw_step", "ticks"]

MAX_RANKS = 16
"""How many ranks are drawn: of more, those that are ready first and last."""

_WIDTH, _LEFT, _RIGHT = 1080.0, 64.0, 16.0
_BAR, _BUCKET, _GAP = 24.0, 7.0, 16.0


def ticks(length: float, num_wanted: int = 8) -> list[float]:
    """Returns round numbers from 0 to a length, about as many as wanted.

    Args:
        length: above 0.
        num_wanted: at least 1.
    """
    rough = length / num_wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [number * step for number in range(int(length / step + 1e-9) + 1)]


def draw_step(by_rank: Mapping[int, Sequence[StepTimeline]], names: Mapping[int, Sequence[str]]) -> tuple[str, int]:
    """Draws a typical step: the parts of it on every rank, and under them each bucket from readiness to mean.

    Args:
        by_rank: the timelines of each rank, at least one each.
        names: parameters of each bucket.

    Returns:
        The SVG, and the number of the step.
    """
    number, shifts = typical_step(by_rank), aligned(by_rank)
    steps = {rank: step for rank, own in by_rank.items() for step in own if step.step == number}
    if len(steps) > MAX_RANKS:
        order = sorted(steps, key=lambda rank: _ready_s(steps[rank]) + shifts[rank])
        kept = {*order[: MAX_RANKS // 2], *order[-MAX_RANKS // 2 :]}
        steps = {rank: step for rank, step in steps.items() if rank in kept}
    zero_s = min(step.began_s + shifts[rank] for rank, step in steps.items())
    last_s = max([step.ended_s + shifts[rank] for rank, step in steps.items()])
    length_ms = max(1e3 * (last_s - zero_s), 1e-6)
    scale = (_WIDTH - _LEFT - _RIGHT) / length_ms
    parts, top = [], 8.0
    for rank in sorted(steps):
        drawn, height = _rank(rank, steps[rank], names, 1e3 * (shifts[rank] - zero_s), scale, top)
        parts.append(drawn)
        top += height + _GAP
    bottom = top - _GAP + 6
    axis = []
    for tick_ms in ticks(length_ms):
        x = _LEFT + tick_ms * scale
        axis.append(f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom:.1f}"/>')
        axis.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{tick_ms:g}</text>')
    axis.append(
        f'<text class="tick" x="{_LEFT:.1f}" y="{bottom + 34:.1f}">milliseconds since the step before ended</text>'
    )
    last = ""
    if len(steps) > 1 and any(step.buckets for step in steps.values()):
        x = _LEFT + scale * 1e3 * (max(_ready_s(step) + shifts[rank] for rank, step in steps.items()) - zero_s)
        last = (
            f'<line class="last" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom:.1f}">'
            "<title>the last rank's gradients are ready</title></line>"
        )
    return _svg(bottom + 40, "".join([*axis, *parts, last]), f"Step {number} of each rank"), number


def _rank(
    rank: int, step: StepTimeline, names: Mapping[int, Sequence[str]], shift_ms: float, scale: float, top: float
) -> tuple[str, float]:
    def bar(kind: str, begin_s: float, end_s: float, y: float, height: float, title: str) -> str:
        if end_s <= begin_s:
            return ""
        x, width = _LEFT + scale * (1e3 * begin_s + shift_ms), max(scale * 1e3 * (end_s - begin_s), 0.5)
        told = html.escape(f"{title}: {1e3 * (end_s - begin_s):.2f} ms")
        return (
            f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}">'
            f"<title>{told}</title></rect>"
        )

    drawn = [f'<text class="rank" x="{_LEFT - 8:.0f}" y="{top + 17:.1f}" text-anchor="end">rank {rank}</text>']
    drawn += [bar(phase.part, phase.begin_s, phase.end_s, top, _BAR, phase.part) for phase in step.phases]
    indices = sorted({bucket.index for bucket in step.buckets})
    thickness = min(_BUCKET, 84.0 / max(1, len(indices)))
    for reduction in step.reductions:
        last_ready_s = max(bucket.ready_s for bucket in reduction)
        end_s = max(bucket.reduced_s for bucket in reduction)
        drawn.append(bar("exposed", last_ready_s, end_s, top, _BAR, "communication that no backward hides"))
        for bucket in reduction:
            y = top + _BAR + 3 + thickness * indices.index(bucket.index)
            held = ", ".join(names.get(bucket.index, ())[:4]) + (" …" if len(names.get(bucket.index, ())) > 4 else "")
            title = f"bucket {bucket.index}" + (f" ({held})" if held else "")
            height = 0.8 * thickness
            drawn.append(bar("hidden", bucket.ready_s, min(bucket.reduced_s, last_ready_s), y, height, title))
            drawn.append(bar("exposed", max(bucket.ready_s, last_ready_s), bucket.reduced_s, y, height, title))
    return "".join(drawn), _BAR + (3 + thickness * len(indices) if indices else 0)


def draw_columns(by_rank: Mapping[int, Sequence[StepTimeline]]) -> str:
    """Draws every step as a column of its parts, the ranks side by side.

    Args:
        by_rank: the timelines of each rank, at least one each.
    """
    numbers = sorted({step.step for steps in by_rank.values() for step in steps})
    shown = sorted(by_rank)[:MAX_RANKS]
    longest_ms = max(max(1e3 * sum(_seconds(step).values()) for step in by_rank[rank]) for rank in shown)
    height, room = 180.0, (_WIDTH - _LEFT - _RIGHT) / len(numbers)
    width = min(0.8 * room, 40.0 * len(shown)) / len(shown)
    drawn = []
    for tick_ms in ticks(max(longest_ms, 1e-6), 4):
        y = height + 8 - height * tick_ms / max(longest_ms, 1e-6)
        drawn.append(f'<line class="grid" x1="{_LEFT:.0f}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT:.0f}" y2="{y:.1f}"/>')
        drawn.append(f'<text class="tick" x="{_LEFT - 8:.0f}" y="{y + 4:.1f}" text-anchor="end">{tick_ms:g} ms</text>')
    for place, number in enumerate(numbers):
        middle = _LEFT + room * (place + 0.5)
        every = max(1, math.ceil(len(numbers) / 30))
        if place % every == 0:
            drawn.append(
                f'<text class="tick" x="{middle:.1f}" y="{height + 26:.1f}" text-anchor="middle">{number}</text>'
            )
        for column, rank in enumerate(shown):
            x, y = middle + width * (column - len(shown) / 2), height + 8
            for step in by_rank[rank]:
                if step.step != number:
                    continue
                for part, seconds in _seconds(step).items():
                    tall = height * 1e3 * seconds / max(longest_ms, 1e-6)
                    y -= tall
                    drawn.append(
                        f'<rect class="{part}" x="{x:.2f}" y="{y:.2f}" width="{max(width - 1, 0.5):.2f}" '
                        f'height="{max(tall, 0):.2f}"><title>rank {rank}, step {number}, {part}: '
                        f"{1e3 * seconds:.2f} ms</title></rect>"
                    )
    drawn.append(f'<text class="tick" x="{_LEFT:.0f}" y="{height + 44:.0f}">step; its ranks side by side</text>')
    return _svg(height + 52, "".join(drawn), "Every step of each rank")


def _seconds(step: StepTimeline) -> dict[str, float]:
    seconds = {part: max(0.0, step.seconds_of(part)) for part in PARTS}
    return {**{part: seconds[part] for part in PARTS[:3]}, "exposed": step.exposed_s, "optimizer": seconds["optimizer"]}


def _ready_s(step: StepTimeline) -> float:
    return max((bucket.ready_s for bucket in step.buckets), default=step.ended_s)


def _svg(height: float, content: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {height:.0f}" role="img" aria-label="{html.escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{content}</svg>'
    )
