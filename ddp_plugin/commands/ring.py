"""``ddp-plugin ring``: an all-reduce round by round, in tables or as a picture."""

import argparse
import sys
from pathlib import Path

from ddp_plugin.collectives import ALGORITHMS, render_walk, walk
from ddp_plugin.collectives.drawing import draw_walk
from ddp_plugin.errors import check_count

__all__ = ["HELP", "add_arguments", "run"]

_MOST_RANKS = 32  # nobody reads more
HELP = "walk through an all-reduce, round by round"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help=f"number of ranks, 1 to {_MOST_RANKS} (default 4)"
    )
    parser.add_argument("--algorithm", choices=sorted(ALGORITHMS), default="ring", help="default ring")
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw it too, or anew: .png, .svg or .pdf with all rounds, .gif with one after another",
    )


def run(chosen: argparse.Namespace) -> int:
    """Prints the walk.

    Raises:
        ValueError: a number of ranks below 1, or a picture in an unknown format.
    """
    check_count("--ranks", chosen.ranks, 1, _MOST_RANKS)
    walked = walk(chosen.ranks, chosen.algorithm)
    if chosen.picture is not None:
        draw_walk(chosen.picture, walked)
    print(render_walk(walked), end="")
    if chosen.picture is not None:
        print(f"ddp-plugin ring: the picture: {chosen.picture}", file=sys.stderr)
    return 0
