"""What every process tells the others while it works."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from ddp_plugin import _compat
from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board, BoardLostError
from ddp_plugin.supervision.pulse import ACTIVITY, Pulse
from tests.harness import ranks, trainer


class Notes:
    """Keeps what a watcher sees."""

    def __init__(self) -> None:
        self.seen: list[dict[int, Any]] = []
        self.lost: list[BoardLostError] = []

    def look(self, board: Board) -> None:
        self.seen.append(board.read_all(ACTIVITY))

    def lose(self, error: BoardLostError) -> None:
        self.lost.append(error)


def test_the_innermost_activity_counts_and_a_failure_stays() -> None:
    activity = Activity(lambda: {"step": 3})
    with activity.doing("training_step"), activity.doing("a barrier"):
        snapshot = activity.snapshot()
    assert snapshot["doing"] == ["training_step", "a barrier"]
    assert snapshot["place"] == {"step": 3}
    assert snapshot["num_changes"] == 2
    assert activity.snapshot()["doing"] == []
    with pytest.raises(KeyError), activity.doing("outer"), activity.doing("inner"):
        raise KeyError
    assert activity.failed_in == "inner"


def test_a_board_for_one_process() -> None:
    board = Board.alone()
    assert board.read("topic", 0) is None
    assert board.claimed("topic") is None
    board.post("topic", {"a": 1})
    assert board.read_all("topic") == {0: {"a": 1}}
    assert board.claim("topic", {"rank": 0}) == {"rank": 0}
    assert board.claim("topic", {"rank": 1}) == {"rank": 0} == board.claimed("topic")


def test_a_store_that_never_answers_is_lost_and_costs_the_patience_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def check(self, keys: list[str]) -> bool:
            threading.Event().wait()
            return True

    monkeypatch.setattr("ddp_plugin.supervision.board._ANSWER_WITHIN", timedelta(seconds=0.2))
    board = Board(Silent(), 0, 2)
    for patience_s in (2.0, 0.1):
        began_s = time.monotonic()
        with pytest.raises(BoardLostError, match="does not answer rank 0"):
            board.claimed("topic")
        assert time.monotonic() - began_s < patience_s


def test_what_a_signal_raises_is_no_fault_of_the_store() -> None:
    """torch raises so where a data worker was killed, in whatever the main thread does."""

    def worker_was_killed(number: int, frame: Any) -> None:
        raise RuntimeError("DataLoader worker is killed")

    asked = threading.Event()

    class Slow:
        def check(self, keys: list[str]) -> bool:
            return not asked.wait(20.0)

    board = Board(Slow(), 0, 2)
    before = signal.signal(signal.SIGALRM, worker_was_killed)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(RuntimeError, match="is killed"):
            board.claimed("topic")
    finally:
        asked.set()
        signal.signal(signal.SIGALRM, before)
    assert board.claimed("topic") is None, "it still answers"
    board.close()


def test_a_closed_board_has_no_thread() -> None:
    before = threading.enumerate()
    board = Board.alone()
    board.post("topic", {})
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.name for thread in threads] == ["ddp_plugin-board"]
    board.close()
    assert not any(thread.is_alive() for thread in threads), "it is waited for"


@ranks(2, 3)
def test_ranks_read_what_others_wrote(world_size: int) -> None:
    board, rank = Board.beside(_compat.default_group()), dist.get_rank()
    board.post("topic", {"rank": rank})
    won = board.claim("first", {"rank": rank})
    dist.barrier()
    assert board.read_all("topic") == {other: {"rank": other} for other in range(world_size)}
    assert board.claimed("first") == won
    assert Board.beside(_compat.default_group()).read_all("topic") == {}, "another board is empty"
    dist.barrier()


@ranks(2)
def test_a_pulse_beats_while_its_main_thread_is_stuck_in_a_collective(world_size: int) -> None:
    activity, notes = Activity(), Notes()
    pulse = Pulse(Board.beside(_compat.default_group()), activity, interval_s=0.05)
    pulse.add(notes)
    pulse.start()
    if dist.get_rank() == 0:
        time.sleep(1.0)
    with activity.doing("the all-reduce"):
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    pulse.stop()
    dist.barrier()
    if dist.get_rank() == 0:
        stuck = [seen[1] for seen in notes.seen if 1 in seen and seen[1]["doing"] == ["the all-reduce"]]
        assert len(stuck) > 3
        assert stuck[-1]["beat"] > stuck[0]["beat"]
        assert stuck[-1]["for_s"] > stuck[0]["for_s"]


@ranks(2, init=False)
def test_a_run_tells_where_it_is_and_ends_with_its_pulse(world_size: int) -> None:
    module = BoringModel()
    run = trainer(max_steps=4)
    told = []

    def tell(*_: Any) -> None:
        told.append(run.strategy.activity.snapshot())  # type: ignore[attr-defined]
        assert run.strategy.pulse is not None  # type: ignore[attr-defined]

    module.on_before_zero_grad = tell  # type: ignore[method-assign]
    run.fit(module)
    assert told[2]["doing"][0] == "optimizer_step"
    assert told[2]["place"] == {"stage": "train", "epoch": 0, "step": 2, "batch": 2}
    assert run.strategy.pulse is None  # type: ignore[attr-defined]


def test_a_pulse_tells_that_its_process_has_not_run() -> None:
    script = """
        import time
        from ddp_plugin.supervision.activity import Activity
        from ddp_plugin.supervision.board import Board
        from ddp_plugin.supervision.pulse import Pulse

        class Look:
            def look(self, board):
                print(round(pulse.slept_s, 1), flush=True)

        pulse = Pulse(Board.alone(), Activity(), interval_s=0.1)
        pulse.add(Look())
        pulse.start()
        time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert float(process.stdout.readline()) < 1.5
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        told = (float(process.stdout.readline()) for _ in range(200))  # what it had said before may still be on its way
        assert any(slept_s > 1.5 for slept_s in told)
        assert any(slept_s < 1.5 for slept_s in told), "of the latest time alone"
    finally:
        process.kill()
        process.communicate()
