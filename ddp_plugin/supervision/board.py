"""A board on which every process writes, and which every other reads while the writer is stuck."""

import json
import queue
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_plugin import _compat
from ddp_plugin.errors import DDPPluginError

__all__ = ["Board", "BoardLostError"]

_ANSWER_WITHIN = timedelta(seconds=30)  # a host that is very busy may take ten
_END_WITHIN_S = 1.0
_num_boards: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


_Question = tuple["Future[Any]", str, tuple[Any, ...]]


class BoardLostError(DDPPluginError):
    """The process that holds the board does not answer any more: it ended, or the way to it is cut."""


class Board:
    """Notes under topics, in the store through which the process group found itself.

    The store is a small server in one process (rank 0's, or torchrun's agent), reached over a connection of its own:
    nothing here waits for a collective, a device, or the main thread of any process. A note costs one message to that
    server, a tenth of a millisecond on one host.

    Args:
        store: a :class:`torch.distributed.Store`; type checkers do not see those names.
        rank: of this process.
        world_size: how many processes write here.

    Raises:
        BoardLostError: from every method, when the store has not answered for 30 seconds, or its process is gone.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._answerer: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_lost = False

    @classmethod
    def beside(cls, group: dist.ProcessGroup) -> "Board":
        """Returns an empty board in the store of the default process group.

        All ranks must open their boards in the same order: the n-th of each rank is the same one.

        Collectives:
            None.
        """
        number = _num_boards.get(group, 0)
        _num_boards[group] = number + 1
        store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"ddp_plugin/board/{number}", _compat.default_store().clone()
        )
        store.set_timeout(_ANSWER_WITHIN)
        return cls(store, dist.get_rank(), dist.get_world_size())

    @classmethod
    def alone(cls) -> "Board":
        """Returns a board for one process without a process group.

        Collectives:
            None.
        """
        return cls(dist.HashStore(), 0, 1)  # type: ignore[attr-defined]

    def post(self, topic: str, note: Mapping[str, Any]) -> None:
        """Writes this rank's note under a topic, in place of the one before.

        Args:
            topic: a name without a slash.
            note: what JSON can hold.

        Collectives:
            None.
        """
        self._ask("set", f"{topic}/{self.rank}", json.dumps(dict(note)))

    def read(self, topic: str, rank: int) -> dict[str, Any] | None:
        """Returns what a rank wrote last under a topic, or ``None``.

        Collectives:
            None.
        """
        return self._read(f"{topic}/{rank}")

    def read_all(self, topic: str) -> dict[int, dict[str, Any]]:
        """Returns the notes of all ranks that wrote one under a topic.

        Collectives:
            None.
        """
        notes = {rank: self.read(topic, rank) for rank in range(self.world_size)}
        return {rank: note for rank, note in notes.items() if note is not None}

    def claim(self, topic: str, note: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the one note that a topic can hold, unless some rank has written it; returns the one that stands.

        Collectives:
            None.
        """
        standing: bytes = self._ask("compare_set", f"{topic}/first", "", json.dumps(dict(note)))
        held: dict[str, Any] = json.loads(standing)
        return held

    def claimed(self, topic: str) -> dict[str, Any] | None:
        """Returns the one note that a topic holds, or ``None`` while no rank has claimed it.

        Collectives:
            None.
        """
        return self._read(f"{topic}/first")

    def count(self, topic: str, add: int = 0) -> int:
        """Adds to a number that all ranks share under a topic; returns what it is then.

        Collectives:
            None.
        """
        return int(self._ask("add", f"{topic}/count", add))

    def _read(self, key: str) -> dict[str, Any] | None:
        if not self._ask("check", [key]):
            return None
        held: dict[str, Any] = json.loads(self._ask("get", key))
        return held

    def close(self) -> None:
        """Ends the thread that asks the store, within a second; the next question would start another.

        Collectives:
            None.
        """
        with self._lock:
            answerer, self._answerer = self._answerer, None
            if answerer is not None:
                self._questions.put(None)
        if answerer is not None and not self._is_lost:
            answerer.join(_END_WITHIN_S)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        """Asks in a thread of its own: some of torch's calls wait for ever where the network swallows the answer."""
        if self._is_lost:
            raise BoardLostError(f"The store of the process group does not answer rank {self.rank} any more.")
        answer: Future[Any] = Future()
        with self._lock:
            if self._answerer is None:
                self._answerer = threading.Thread(target=self._answer, name="ddp_plugin-board", daemon=True)
                self._answerer.start()
            self._questions.put((answer, operation, arguments))
        try:
            return answer.result(_ANSWER_WITHIN.total_seconds())
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # torch's DistStoreError and DistNetworkError are kinds of the first
            if isinstance(error, RuntimeError) and not (answer.done() and answer.exception() is error):
                raise  # a signal's handler raised it here; the store has nothing to do with it
            self._is_lost = True
            why = str(error) or f"no answer in {_ANSWER_WITHIN.total_seconds():g} s"
            raise BoardLostError(f"The store of the process group does not answer rank {self.rank}: {why}") from error

    def _answer(self) -> None:
        while (question := self._questions.get()) is not None:
            answer, operation, arguments = question
            try:
                answer.set_result(getattr(self._store, operation)(*arguments))
            except Exception as error:  # raised where it was asked
                answer.set_exception(error)
