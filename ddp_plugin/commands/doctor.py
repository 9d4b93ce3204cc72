"""``ddp-plugin doctor``: what there is, whether it works, and what to change."""

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

from ddp_plugin.doctor.examination import examine
from ddp_plugin.errors import check_count, explain
from ddp_plugin.planning.links import write_link

__all__ = ["HELP", "add_arguments", "run"]

HELP = "look at this machine, let two processes talk, and say what to change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes on this machine, at least 1 (default: one a GPU, or 2)"
    )
    parser.add_argument("--no-self-test", action="store_true", help="do not start two processes")
    parser.add_argument("--save-link", type=Path, metavar="FILE", help="write what was measured, for `ddp-plugin plan`")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(chosen: argparse.Namespace) -> int:
    """Prints the report.

    Returns:
        0; 1 where something was found that training cannot work with.

    Raises:
        ValueError: a number of ranks below 1, or a link to save that was not measured.
    """
    if chosen.ranks is not None:
        check_count("--ranks", chosen.ranks, 1)
    if chosen.save_link is not None and chosen.no_self_test:
        raise ValueError(explain("a self-test, for --save-link", "--no-self-test", "Leave one of them out"))
    if chosen.save_link is not None and (chosen.save_link.is_dir() or not chosen.save_link.parent.is_dir()):
        raise ValueError(
            explain("--save-link to be a file in a folder that exists", str(chosen.save_link), "Correct it")
        )
    report, tests = examine(os.environ, chosen.ranks, () if chosen.no_self_test else None)
    links = {backend: test.link for backend, test in tests.items() if test.link is not None}
    if chosen.json:
        measured = {backend: asdict(link) for backend, link in links.items()}
        print(json.dumps(report.to_json() | {"links": measured}, indent=2))
    else:
        print(report, end="")
    if chosen.save_link is not None and not links:
        print("ddp-plugin doctor: no link is saved, because none could be measured", file=sys.stderr)
    elif chosen.save_link is not None:
        backend = list(links)[-1]
        note = f"two processes on {platform.node()} by {backend}, {date.today().isoformat()}, ddp-plugin doctor"
        write_link(chosen.save_link, links[backend], note)
        print(f"ddp-plugin doctor: the link: {chosen.save_link}", file=sys.stderr)
    return int(report.has_errors)
