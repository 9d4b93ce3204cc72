"""Data workers live as long as their rank wants them, whatever signal the launcher sends to all processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["ShieldWorker"]


class ShieldWorker:
    """A ``worker_init_fn`` that keeps signals for the whole job away from a data worker, then calls the user's.

    torchrun, SLURM and Ctrl+C send their signal to every process, workers included. A worker that dies of it takes the
    batch with it that its rank needs to get to the end of the step. So a worker obeys SIGTERM from its rank alone, or
    when its rank is gone; torch ends it as ever when the rank ends.

    Programs that a worker starts inherit that: end them with SIGKILL. Does nothing where the system cannot tell who
    sent a signal (macOS).

    Args:
        signals: by number.
        then: the user's ``worker_init_fn``.

    Collectives:
        None.
    """

    def __init__(self, signals: Iterable[int], then: Callable[[int], None] | None = None) -> None:
        self.signals = frozenset(int(number) for number in signals)
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Shields this worker."""
        if hasattr(signal, "sigwaitinfo"):
            signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
            arguments = (self.signals, os.getppid())
            threading.Thread(target=_obey_parent_alone, args=arguments, name="ddp_plugin-shield", daemon=True).start()
        if self.then is not None:
            self.then(worker_id)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ShieldWorker) and (self.signals, self.then) == (other.signals, other.then)

    def __hash__(self) -> int:
        return hash(self.signals)


def _obey_parent_alone(signals: frozenset[int], parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(signals)
        is_parents = received.si_pid == parent and received.si_signo == signal.SIGTERM
        if is_parents or os.getppid() != parent:
            os._exit(0)
