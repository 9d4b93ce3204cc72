"""Notes every collective that Python issues, with the stack that led to it, while it is asked to."""

import importlib.util
import sysconfig
import threading
import time
from collections.abc import Callable

from ddp_plugin import _compat
from ddp_plugin.tracing.issuers import LIGHTNING, PLUGIN, TORCHMETRICS, Call

__all__ = ["CollectiveWatch", "library_roots"]


def library_roots() -> dict[str, str]:
    """Returns where the libraries lie, as :func:`~ddp_plugin.tracing.issuers.issuer_of` takes them."""
    paths = sysconfig.get_paths()
    packages = {"torch": "torch", LIGHTNING: "lightning", TORCHMETRICS: "torchmetrics", PLUGIN: "ddp_plugin"}
    return {"python": paths["stdlib"], "site-packages": paths["purelib"]} | {
        name: _folder(package) for name, package in packages.items()
    }


def _folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    locations = found.submodule_search_locations if found is not None else None
    return str(next(iter(locations or ["/nowhere"])))


class CollectiveWatch:
    """Notes collectives from :meth:`start` to :meth:`stop`; outside of it nothing is in anybody's way.

    What C++ issues by itself is not seen: DDP's own reducer, which no observer of buckets leaves in place.

    Attributes:
        calls: what was noted.
        step: number of the step that runs; whoever watches sets it.

    Collectives:
        None of its own.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.step = 0
        self._undo: Callable[[], None] | None = None
        self._of_work: dict[int, Call] = {}
        self._thread = threading.get_ident()

    def start(self) -> None:
        """Begins."""
        if self._undo is None:
            self._thread = threading.get_ident()
            self._undo = _compat.watch_collectives(self)

    def stop(self) -> None:
        """Ends; what was noted stays."""
        if self._undo is not None:
            self._undo()
            self._undo = None
            self._of_work.clear()

    def issued(self, operation: str, num_bytes: int, stack: list[tuple[str, int, str]], *, is_on_host: bool) -> Call:
        """Notes a collective that begins."""
        call = Call(self.step, operation, num_bytes, stack, is_on_host)
        self.calls.append(call)
        return call

    def under_way(self, call: Call, work: object, begun_s: float) -> None:
        """Notes what stands for a collective from now on; without anything, it was waited for where it was issued."""
        if work is not None:
            self._of_work[id(work)] = call
        else:
            self._note(call, begun_s)

    def waited(self, work: object, begun_s: float) -> None:
        """Notes that somebody waited for a collective."""
        call = self._of_work.pop(id(work), None)
        if call is not None:
            self._note(call, begun_s)

    def _note(self, call: Call, begun_s: float) -> None:
        if threading.get_ident() == self._thread:
            call.waited = True
            call.waited_s += time.perf_counter() - begun_s
