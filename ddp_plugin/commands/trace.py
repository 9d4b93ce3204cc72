"""``ddp-plugin trace``: one command around a user's own, and a page about where the time of its steps goes."""

import argparse
import contextlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddp_plugin.errors import check_count, explain
from ddp_plugin.timeline.picture import draw_timeline
from ddp_plugin.tracing.findings import conclusions, headline, remarks
from ddp_plugin.tracing.joining import Joined, join, write_trace
from ddp_plugin.tracing.keeping import alone_in, set_aside
from ddp_plugin.tracing.page import render_page
from ddp_plugin.tracing.records import replacing
from ddp_plugin.tracing.request import VARIABLE, TraceRequest, Window

__all__ = ["HELP", "add_arguments", "run", "write_page"]

HELP = "run a training script, and show where the time of its steps goes"
_NOT_FOUND, _NOT_RUN = 127, 126  # what a shell returns
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    usual = Window()
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("trace"),
        metavar="DIR",
        help="for the page (default: trace); an older trace goes to DIR/trace.previous",
    )
    steps = parser.add_argument_group("which steps")
    steps.add_argument(
        "--wait", type=int, default=usual.num_wait, metavar="N", help="left alone, 0 or more (default 5)"
    )
    steps.add_argument(
        "--warmup", type=int, default=usual.num_warmup, metavar="N", help="then thrown away, 1 or more (default 2)"
    )
    steps.add_argument(
        "--active", type=int, default=usual.num_active, metavar="N", help="then recorded, 1 or more (default 10)"
    )
    parser.add_argument("--no-operators", action="store_true", help="without torch.profiler, which makes steps longer")
    parser.add_argument("--join", type=Path, metavar="DIR", help="make the page of a folder anew, and run nothing")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as `-- python train.py`")
    parser.epilog = (
        "Every process whose Trainer has CustomDDPStrategy records, under any launcher. On several nodes put it around "
        "the launcher of each, with one --folder that all nodes share. The exit status is the command's own."
    )


def run(chosen: argparse.Namespace) -> int:
    """Runs the command, then writes ``trace.html``, ``trace.json`` and ``trace.png``.

    Returns:
        The command's own status; 128 + n where signal n ended it, as a shell says.

    Raises:
        ValueError: a number out of range, no command, or a folder that cannot be written.
    """
    command = chosen.script[1:] if chosen.script[:1] == ["--"] else chosen.script
    if (chosen.join is None) == (not command):
        got = "neither" if chosen.join is None else "both"
        raise ValueError(
            explain("a command after --, or --join DIR", got, "Write `ddp-plugin trace -- python train.py`")
        )
    for name, least in (("wait", 0), ("warmup", 1), ("active", 1)):
        check_count(f"--{name}", getattr(chosen, name), least)
    window = Window(chosen.wait, chosen.warmup, chosen.active)
    if chosen.join is not None:
        if not chosen.join.is_dir():
            raise ValueError(explain("a folder that ranks wrote to, for --join", str(chosen.join), "Correct it"))
        write_page(chosen.join, "")
        return 0
    folder = chosen.folder.resolve()
    request = TraceRequest(str(folder), window, profiles=not chosen.no_operators)
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            # To the end of the run: a node that comes late leaves its records alone.
            before = set_aside(folder) if held.enter_context(alone_in(folder)) else None
        except OSError as error:
            got = str(error)
            raise ValueError(explain("a folder that can be written, for --folder", got, "Name another")) from error
        if before is not None:
            print(f"ddp-plugin trace: the trace of before is in {before}", file=sys.stderr)
        status = _run(command, os.environ | {VARIABLE: request.to_variable()})
    try:
        write_page(folder, shlex.join(command))
    except Exception as error:  # whatever becomes of the page, the command ended as it did
        print(f"ddp-plugin trace: the page is not written: {type(error).__name__}: {error}", file=sys.stderr)
    return status


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Runs a command to its end, whatever signals arrive meanwhile, which are its own affair."""
    try:
        process = subprocess.Popen(command, env=environment)
    except FileNotFoundError as error:
        print(f"ddp-plugin trace: {error}", file=sys.stderr)
        return _NOT_FOUND
    except OSError as error:
        print(f"ddp-plugin trace: {error}", file=sys.stderr)
        return _NOT_RUN
    with _signals_passed_on(process):
        status = process.wait()
    return 128 - status if status < 0 else status


@contextlib.contextmanager
def _signals_passed_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Hands signals on; SIGINT is let alone, because a terminal sends it to both."""
    handlers: dict[signal.Signals, Any] = {signal.SIGINT: signal.signal(signal.SIGINT, lambda number, frame: None)}
    for each in _PASSED_ON:
        handlers[each] = signal.signal(each, lambda number, frame: process.send_signal(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def write_page(folder: Path, command: str) -> Joined:
    """Joins what the ranks wrote to ``trace.html``, ``trace.json`` and ``trace.png``, and says the essence of it.

    The picture needs matplotlib; without one that works, there is none.

    Args:
        folder: where the ranks wrote.
        command: what was run, for the page.

    Returns:
        What the ranks wrote.

    Raises:
        OSError: a file cannot be written.
    """
    joined = join(folder)
    page = render_page(joined, command, has_picture=_draw(folder, joined))
    with replacing(folder / "trace.html") as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    told = [
        headline(joined),
        *(f"{finding.what} {finding.remedy}" for finding in conclusions(joined)),
        *remarks(joined),
    ]
    for line in [*told, f"The page: {folder / 'trace.html'}"]:
        print(f"ddp-plugin trace: {line}", file=sys.stderr)
    if joined.timelines:
        with replacing(folder / "trace.json") as unfinished:
            write_trace(unfinished, joined, folder)
    return joined


def _draw(folder: Path, joined: Joined) -> bool:
    """Draws ``trace.png``; ``False`` where there is nothing to draw, or nothing to draw it with."""
    if not joined.timelines or importlib.util.find_spec("matplotlib") is None:
        return False
    try:
        with replacing(folder / "trace.png") as unfinished:
            draw_timeline(unfinished, joined.timelines)
    except Exception as error:
        print(f"ddp-plugin trace: no picture: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
