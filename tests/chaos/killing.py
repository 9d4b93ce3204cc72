"""Kills a run under torchrun as a plan says, and starts it again, until it ends by itself."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.history import Start, read_starts
from tests.harness import ROOT

__all__ = ["KINDS", "Kill", "Outcome", "descendants", "draw_kills", "environment", "run_with_kills"]

KINDS = ("worker", "tree", "save", "start-up")
PATIENCE_S = 300.0  # a start or the way to a step on a busy machine
_LOOK_S = 0.002


@dataclass(frozen=True)
class Kill:
    """One SIGKILL.

    Attributes:
        kind: ``"worker"``: one rank, and torchrun starts all again; ``"tree"``: torchrun and all below it; ``"save"``:
            the same while a checkpoint is being written; ``"start-up"``: the same before the first step.
        after_steps: steps that the current start makes before; for ``"save"``, before the save that is hit.
        delay_s: from then to the kill.
        rank_ratio: which rank, of a ``"worker"`` kill, as a part of the world size.
        next_world_size: processes of the start by hand that follows; ignored after a ``"worker"`` kill.
    """

    kind: str
    after_steps: int
    delay_s: float
    rank_ratio: float
    next_world_size: int


def draw_kills(seed: int, number: int, world_sizes: Sequence[int], steps: tuple[int, int]) -> list[Kill]:
    """Draws random kills, of each kind about equally many.

    Args:
        seed: of all that is drawn.
        number: of kills.
        world_sizes: processes of the starts by hand; where there are several, no two such starts have as many.
        steps: fewest and most steps that a start makes before it is killed; more than from one checkpoint to the next,
            so that something of each start survives.
    """
    draw = random.Random(seed)
    kinds = [KINDS[index % len(KINDS)] for index in range(number)]
    draw.shuffle(kinds)
    kills: list[Kill] = []
    world_size = world_sizes[0]
    for kind in kinds:
        if kind != "worker" and len(world_sizes) > 1:
            world_size = draw.choice([other for other in world_sizes if other != world_size])
        delay_s = draw.uniform(0.0, {"start-up": 6.0, "save": 0.08}.get(kind, 0.1))  # a save lasts for 0.1 s
        kills.append(Kill(kind, draw.randint(*steps), delay_s, draw.random(), world_size))
    return kills


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        output: all that it printed.
        in_save: how many kills left a half-written checkpoint behind.
        hit: kills by kind that found their moment before the run was over.
    """

    output: str
    in_save: int
    hit: list[str]


def environment() -> dict[str, str]:
    """Returns this process's environment without what a launcher may have left there."""
    launcher = ("PL_", "WORLD", "RANK", "LOCAL_", "GROUP_", "MASTER", "TORCHELASTIC", "NODE_RANK")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(launcher)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}"}


def descendants(pid: int) -> list[int]:
    """Returns a process and all below it, children last, as ``/proc`` has them now."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [int(child) for child in children.read_text().split()]
    return found


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class _Run:
    """torchrun, started anew whenever a kill has ended it."""

    def __init__(self, folder: Path, arguments: Sequence[str], step_s: float, save_s: float, max_restarts: int) -> None:
        self.folder = folder
        self._arguments = arguments
        self._slowness = (step_s, save_s)
        self._max_restarts = max_restarts
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, world_size: int) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--standalone"]
        command += [f"--max-restarts={self._max_restarts}", "--monitor-interval=0.1"]
        program = [str(ROOT / "tests" / "chaos" / "program.py"), str(self.folder), *map(str, self._slowness)]
        with open(self.folder / "output", "ab") as output:
            self.process = subprocess.Popen(
                [*command, *program, *self._arguments],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment(),
                cwd=self.folder,
                start_new_session=True,
            )

    @property
    def is_over(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def wait_until(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
        """Returns whether it came true before the run was over."""
        deadline = time.monotonic() + patience_s
        while not condition():
            if self.is_over:
                return condition()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {patience_s:.0f} s:\n{self.output()[-6000:]}")
            time.sleep(_LOOK_S)
        return True

    def kill_tree(self) -> None:
        if self.process is not None:
            _kill(descendants(self.process.pid))
            self.process.wait()

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


def run_with_kills(
    folder: Path,
    arguments: Sequence[str],
    world_size: int,
    kills: Sequence[Kill],
    *,
    step_s: float = 0.0,
    save_s: float = 0.0,
) -> Outcome:
    """Runs the recipe to its end, whatever is killed in between.

    Args:
        folder: of this run alone: notes, output and checkpoints.
        arguments: settings of the recipe; ``output_dir`` is ``folder``.
        world_size: processes of the first start.
        kills: in this order.
        step_s: see :mod:`tests.chaos.program`.
        save_s: see :mod:`tests.chaos.program`.

    Raises:
        TimeoutError: the run stood still.
        AssertionError: it ended with an error that no kill explains.
    """
    num_by_torchrun = sum(kill.kind == "worker" for kill in kills)
    run = _Run(folder, [*arguments, f"output_dir={folder}"], step_s, save_s, max_restarts=num_by_torchrun)
    outcome = Outcome("", 0, [])
    known = len(read_starts(folder))
    try:
        run.start(world_size)
        for kill in kills:
            if not _reach(run, kill, known):
                break
            outcome.hit.append(kill.kind)
            known = len(read_starts(folder))
            if kill.kind == "worker":
                pids = read_starts(folder)[-1].pids
                _kill([pids[int(kill.rank_ratio * len(pids))]])
            else:
                run.kill_tree()
                outcome.in_save += bool(list(folder.glob("checkpoints/.*.part")))
                known = len(read_starts(folder))
                run.start(kill.next_world_size)
        run.wait_until(lambda: run.is_over)
        outcome.output = run.output()
        assert run.process is not None
        assert run.process.returncode == 0, outcome.output[-6000:]
        return outcome
    finally:
        run.kill_tree()


def _reach(run: _Run, kill: Kill, known: int) -> bool:
    """Waits for the moment of a kill; returns whether it came before the run was over."""

    def current() -> Start | None:
        starts = read_starts(run.folder)[known:]
        return starts[-1] if starts else None

    def has_trained() -> bool:
        start = current()
        if start is None or len(start.pids) < start.world_size:
            return False
        return max(start.steps, default=start.begins_at) - start.begins_at >= kill.after_steps

    if kill.kind != "start-up":
        if not run.wait_until(has_trained):
            return False
        if kill.kind == "save" and not run.wait_until(lambda: bool(list(run.folder.glob("checkpoints/.*.part")))):
            return False
    deadline = time.monotonic() + kill.delay_s
    run.wait_until(lambda: time.monotonic() >= deadline)
    return not run.is_over
