"""Ending this process from a thread beside the main one: by an exception where that reaches it, else at once."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading

__all__ = ["be_interruptible", "end_process", "interrupt_main_thread", "say"]

_SIGNAL = getattr(signal, "SIGURG", None)  # ignored by default, and hardly used by anybody
_pending: BaseException | None = None
_can_interrupt = False
_FLUSH_WITHIN_S = 1.0
_CHILDREN_WITHIN_S = 0.5


def be_interruptible() -> None:
    """Lets :func:`interrupt_main_thread` reach this thread, and drops an exception that has not.

    It does nothing outside the main thread, or where somebody else handles the signal that is used (``SIGURG``).

    Collectives:
        None.
    """
    global _pending, _can_interrupt
    _pending, _can_interrupt = None, False
    if threading.current_thread() is not threading.main_thread() or _SIGNAL is None:
        return
    if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        signal.signal(_SIGNAL, _raise_pending)
    _can_interrupt = signal.getsignal(_SIGNAL) is _raise_pending


def interrupt_main_thread(error: BaseException) -> None:
    """Raises an exception in the main thread: at its next line of Python, or in the sleep or wait for a lock it is in.

    One that waits inside C++, as for a collective, meets it when that returns.

    Args:
        error: raised once.

    Collectives:
        None.
    """
    global _pending
    if _can_interrupt and _SIGNAL is not None and signal.getsignal(_SIGNAL) is _raise_pending:
        _pending = error
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)


def _raise_pending(signum: int, frame: object) -> None:
    global _pending
    error, _pending = _pending, None
    if error is not None:
        raise error


def say(words: str) -> None:
    """Writes a line to standard error, after all that was written before; gives up where nobody reads there.

    Collectives:
        None.
    """

    def write() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        print(words, file=sys.stderr, flush=True)

    writer = threading.Thread(target=write, name="ddp_plugin-last-words", daemon=True)
    writer.start()
    writer.join(_FLUSH_WITHIN_S)


def end_process(words: str | None = None) -> None:
    """Ends this process with status 1, whatever its threads are doing, and the processes that it started before it.

    Args:
        words: written to standard error, last of all, unless they were said before.

    Collectives:
        None.
    """
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(_CHILDREN_WITHIN_S)
        if child.is_alive():
            child.kill()
            child.join(_CHILDREN_WITHIN_S)
    if words is not None:
        say(words)
    os._exit(1)
