"""Signals that ask a run to stop: they are noted when they come, and answered where a step ends."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

__all__ = ["StopSignals", "is_free"]


class StopSignals:
    """Notes signals from the moment it is installed; what is to be done about them is somebody else's decision.

    The handler does nothing but note the signal: it may run between any two lines of the program, where no collective
    and no save is possible. A handler of the user's own for SIGTERM is called as well. One for SIGINT is left alone,
    and so is a signal that is ignored (``nohup``, a background job of the shell). A process that is forked from this
    one treats signals as it would have without this.

    A second SIGINT is not noted, but obeyed at once: with several processes this one is killed by it, even inside a
    collective that never ends; with one, it raises ``KeyboardInterrupt``.

    Args:
        signals: which ones to note.
        is_alone: whether this is the only process.
        speaks: whether this process says on standard error what a first SIGINT does.

    Attributes:
        received: what has come and was not forgotten, in order.
    """

    def __init__(self, signals: Iterable[signal.Signals], *, is_alone: bool, speaks: bool = False) -> None:
        self.received: list[signal.Signals] = []
        self._signals = tuple(signals)
        self._is_alone = is_alone
        self._speaks = speaks
        self._pid = os.getpid()
        self._handlers_before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Begins to note signals; outside the main thread, where Python has no handlers, nothing happens.

        Collectives:
            None.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._signals:
            before = signal.getsignal(number)
            is_users = callable(before) and before is not signal.default_int_handler
            if before in (signal.SIG_IGN, None) or (is_users and number != signal.SIGTERM):
                continue
            self._handlers_before[number] = before
            signal.signal(number, self._note)

    def restore(self, forget: Iterable[signal.Signals] = ()) -> None:
        """Puts back the handlers of before, and gives them the signals that came too late for the run to answer.

        Args:
            forget: signals that have been answered, or mean nothing without a run.

        Collectives:
            None.
        """
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        late = [number for number in self.received if number not in forget and number in self._handlers_before]
        self._handlers_before.clear()
        self.received.clear()
        for number in late:
            signal.raise_signal(number)

    def _note(self, number: int, frame: Any) -> None:
        kind = signal.Signals(number)
        before = self._handlers_before.get(kind, signal.SIG_DFL)
        if os.getpid() != self._pid:  # forked from this process: not ours
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        if kind not in self.received:
            self.received.append(kind)
        if kind == signal.SIGINT:
            signal.signal(number, before if self._is_alone else signal.SIG_DFL)
            if self._speaks:  # past Python's buffers, which may be in use
                os.write(2, b"\nStopping after this step; press Ctrl+C again to stop at once.\n")
        elif callable(before):
            before(number, frame)


def is_free(number: signal.Signals, status: Callable[[], str] = Path("/proc/self/status").read_text) -> bool:
    """Whether nobody has a use for a signal: neither Python code nor, where Linux tells, native code.

    ``faulthandler.register`` is such native code: ``signal.getsignal`` does not know of it.

    Args:
        number: the signal.
        status: returns what Linux says about this process.
    """
    if signal.getsignal(number) != signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError):
        for line in status().splitlines():
            if line.startswith("SigCgt:"):
                return not int(line.split()[1], 16) >> (number - 1) & 1
    return True
