"""Ctrl+C while trial runs follow one another: the first press ends them all."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ddp_plugin.tuning.trials import SCRATCH

__all__ = ["INTERRUPTED_STATUS", "held_back", "interruptible", "let_through"]

INTERRUPTED_STATUS = 128 + signal.SIGINT
"""What a shell says of a process that SIGINT has ended."""

_UNWINDING_MAY_TAKE_S = 10.0
_CHILDREN_MAY_TAKE_S = 3.0
_AGAIN_S = 0.05


@contextmanager
def interruptible(launcher: Any = None) -> Iterator[None]:
    """Lets SIGINT raise ``KeyboardInterrupt`` out of here, once every process that was started has ended.

    By itself each trial would end in its own way, because a strategy takes a first SIGINT for a wish to stop after the
    step, and the next trial would begin; and a Trainer makes an exit with status 1 of it. A process that cannot raise,
    because it waits in a collective for one that has gone, ends with :data:`INTERRUPTED_STATUS` after 10 seconds.
    Whoever has a handler of their own for SIGINT keeps it, and outside the main thread nothing is changed.

    Args:
        launcher: Lightning's, where it starts the other ranks from here.

    Collectives:
        None.
    """
    before = signal.getsignal(signal.SIGINT)
    is_forked = isinstance(before, _Interruption) and before.pid != os.getpid()
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not (before is signal.default_int_handler or is_forked):
        yield
        return
    interruption = _Interruption(launcher)
    signal.signal(signal.SIGINT, interruption)
    try:
        yield
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from None
    finally:
        interruption.end()
        signal.signal(signal.SIGINT, before)


@contextmanager
def held_back() -> Iterator[None]:
    """Keeps SIGINT waiting, also in scripts that are started meanwhile: they import first, and could only fail."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        let_through()


def let_through() -> None:
    """Ends what :func:`held_back` began, there or in a script that was started meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class _Interruption:
    """A handler of SIGINT, which knows what has to end."""

    def __init__(self, launcher: Any) -> None:
        self.pid = os.getpid()
        self._launcher = launcher
        self._children: list[Any] = []
        self._last_resort: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_finalizing(frame):  # where an exception is printed and forgotten
            threading.Timer(_AGAIN_S, os.kill, (self.pid, signal.SIGINT)).start()
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._last_resort = threading.Timer(_UNWINDING_MAY_TAKE_S, self._leave)
        self._last_resort.daemon = True
        self._last_resort.start()
        started: list[Any] = getattr(self._launcher, "procs", [])
        self._children = list(started)
        started.clear()  # an observer looks through it, and would kill this process as soon as one of them has ended
        for child in self._children:  # a terminal interrupts them as well; they ignore it the second time
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)
        raise KeyboardInterrupt

    def end(self) -> None:
        """Waits for the children, and kills who goes on."""
        deadline = time.monotonic() + _CHILDREN_MAY_TAKE_S
        while any(_is_alive(child) for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill_children()
        if self._last_resort is not None:
            self._last_resort.cancel()

    def _leave(self) -> None:
        self._kill_children()
        os._exit(INTERRUPTED_STATUS)

    def _kill_children(self) -> None:
        for child in filter(_is_alive, self._children):
            child.kill()
            if isinstance(child, subprocess.Popen):
                child.wait()
            else:
                child.join()
            for folder in Path(tempfile.gettempdir()).glob(f"{SCRATCH}{child.pid}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def _is_finalizing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _is_alive(child: Any) -> bool:
    return child.poll() is None if isinstance(child, subprocess.Popen) else child.is_alive()
