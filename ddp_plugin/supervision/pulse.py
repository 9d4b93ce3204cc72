"""A thread that says once a beat what its process is doing, and lets others look at what the rest say."""

import threading
import time
import traceback
from typing import Protocol

from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board, BoardLostError

__all__ = ["ACTIVITY", "Pulse", "Watcher"]

ACTIVITY = "activity"
"""The board's topic for :meth:`Activity.snapshot`, with ``beat``, a number that grows while the process lives."""


class Watcher(Protocol):
    """Looks at the board from time to time, in the thread of the pulse."""

    def look(self, board: Board) -> None:
        """Reads what it is interested in; must not wait for anything but the board."""

    def lose(self, error: BoardLostError) -> None:
        """Learns that the board is gone, once; no beat follows."""


class Pulse:
    """Posts an activity once a beat, for as long as the process lives, whatever its main thread is stuck in.

    Only what holds Python's interpreter lock or stops the whole process stops the pulse too; the others see the beat
    stand still then.

    Args:
        board: where it is posted, and what the watchers look at.
        activity: of this process.
        interval_s: seconds between two beats.
    """

    def __init__(self, board: Board, activity: Activity, interval_s: float = 1.0) -> None:
        self.board = board
        self.activity = activity
        self.interval_s = interval_s
        self._watchers: list[_Periodic] = []
        self._is_over = threading.Event()
        self._waits_until: float | None = None  # None while it works
        self._late_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ddp_plugin-pulse", daemon=True)

    def add(self, watcher: Watcher, every_s: float | None = None) -> None:
        """Lets a watcher look from now on.

        Args:
            watcher: one that raises is told of on standard error, and looks no more.
            every_s: seconds between two looks; once a beat when ``None``.

        Collectives:
            None.
        """
        self._watchers.append(_Periodic(watcher, every_s or self.interval_s))

    def start(self) -> None:
        """Posts the first beat, and starts the thread.

        Raises:
            BoardLostError: the board does not answer.

        Collectives:
            None.
        """
        self._beat(0)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for it, but not when called inside it.

        Collectives:
            None.
        """
        self._is_over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def slept_s(self) -> float:
        """For how many seconds this process has not run, where it has only just woken; else next to nothing.

        A process is stopped by a signal or a debugger, and as good as stopped by code that holds Python's interpreter
        lock. Waiting for the board does not count.

        Collectives:
            None.
        """
        until = self._waits_until
        return self._late_s if until is None else max(0.0, time.monotonic() - until)

    def _run(self) -> None:
        beat, next_beat = 0, time.monotonic() + self.interval_s
        try:
            while True:
                due = max(time.monotonic(), min([next_beat, *(w.due for w in self._watchers)]))
                self._waits_until = due
                if self._is_over.wait(due - time.monotonic()):
                    self._waits_until = None
                    return
                now = time.monotonic()
                self._late_s, self._waits_until = now - due, None
                if now >= next_beat:
                    beat, next_beat = beat + 1, now + self.interval_s
                    self._beat(beat)
                for periodic in tuple(self._watchers):
                    if now >= periodic.due:
                        periodic.due = now + periodic.every_s
                        self._let_look(periodic)
        except BoardLostError as error:
            for periodic in tuple(self._watchers):
                periodic.watcher.lose(error)

    def _let_look(self, periodic: "_Periodic") -> None:
        try:
            periodic.watcher.look(self.board)
        except BoardLostError:
            raise
        except Exception:
            self._watchers.remove(periodic)
            traceback.print_exc()

    def _beat(self, beat: int) -> None:
        self.board.post(ACTIVITY, {**self.activity.snapshot(), "beat": beat})


class _Periodic:
    def __init__(self, watcher: Watcher, every_s: float) -> None:
        self.watcher = watcher
        self.every_s = every_s
        self.due = time.monotonic() + every_s
