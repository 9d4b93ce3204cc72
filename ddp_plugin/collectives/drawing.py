"""An all-reduce as a picture: one small table for each round, darker the more of the sum a rank holds."""

import math
from pathlib import Path
from typing import Any

from ddp_plugin.collectives.simulation import Snapshot, snapshots
from ddp_plugin.collectives.walkthrough import Round, Walk
from ddp_plugin.errors import explain

__all__ = ["draw_walk"]

_TINT, _FULL = (0.90, 0.95, 0.98), (0.0, 0.447, 0.698)  # to the blue of Okabe and Ito's palette, 2008
_ARROW = "#D55E00"
_ROUNDS_PER_S = 1
_MOVING = "gif"


def draw_walk(path: Path, walked: Walk) -> None:
    """Draws every round side by side; into a ``.gif``, one after another. Replaces a file that is there.

    Args:
        path: the file; its ending tells the format.
        walked: of up to 16 ranks; more do not fit a picture.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: too many ranks, or a format that cannot be written.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.figure import Figure

    world_size, num_rounds = walked.schedule.world_size, len(walked.rounds)
    if world_size > 16:
        raise ValueError(explain("at most 16 ranks in a picture", str(world_size), "Print the tables instead"))
    known = {*Figure().canvas.get_supported_filetypes(), _MOVING}
    if path.suffix.lstrip(".").lower() not in known:
        raise ValueError(explain(f"a picture that ends in one of {sorted(known)}", path.name, "Name it so"))
    held = snapshots(walked.schedule)
    side = max(2.4, 0.55 * max(world_size, walked.schedule.num_pieces))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == f".{_MOVING}":
        figure = Figure(figsize=(2 * side, 2 * side), layout="constrained")
        axes = figure.add_subplot()

        def draw(number: int) -> list[Any]:
            axes.clear()
            _draw_round(axes, walked, walked.rounds[number], held[number])
            return []

        moving = FuncAnimation(figure, draw, frames=num_rounds, init_func=list)
        moving.save(path, writer=PillowWriter(fps=_ROUNDS_PER_S))
        return
    num_columns = min(4, num_rounds)
    num_rows = math.ceil(num_rounds / num_columns)
    figure = Figure(figsize=(side * num_columns, (side + 0.3) * num_rows + 0.4), layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes in grid[num_rounds:]:
        axes.set_axis_off()
    for axes, step, snapshot in zip(grid, walked.rounds, held, strict=False):
        _draw_round(axes, walked, step, snapshot)
    title = f"{walked.schedule.algorithm.replace('_', ' ')} all-reduce of {world_size} ranks"
    figure.suptitle(f"{title}: rows are ranks, columns are chunks", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _draw_round(axes: Any, walked: Walk, step: Round, held: Snapshot) -> None:
    from matplotlib.patches import FancyArrowPatch, Rectangle

    schedule = walked.schedule
    for rank, row in enumerate(held):
        for piece, counts in enumerate(row):
            part = sum(count > 0 for count in counts) / schedule.world_size
            colour = [low + part * (high - low) for low, high in zip(_TINT, _FULL, strict=True)]
            axes.add_patch(Rectangle((piece - 0.5, rank - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            text = "Σ" if part == 1 else step.table[rank][piece] if schedule.world_size <= 4 else f"{sum(counts)}"
            axes.text(piece, rank, text, ha="center", va="center", color="white" if part > 0.6 else "black", fontsize=7)
    for transfer in step.transfers:
        bend = 0.25 if transfer.target > transfer.source else -0.25
        for piece in transfer.pieces:
            axes.add_patch(
                FancyArrowPatch(
                    (piece + 0.3, transfer.source),
                    (piece + 0.3, transfer.target),
                    connectionstyle=f"arc3,rad={bend}",
                    arrowstyle="-|>",
                    mutation_scale=8,
                    color=_ARROW,
                    linewidth=1,
                )
            )
    axes.set_xlim(-0.5, schedule.num_pieces - 0.5)
    axes.set_ylim(schedule.world_size - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks(range(schedule.world_size), [str(rank) for rank in range(schedule.world_size)], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("start" if step.phase == "start" else f"round {step.number}, {step.phase}", loc="left", fontsize=8)
