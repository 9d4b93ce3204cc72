"""One thread that communicates: what is submitted runs one after another, in order, and nobody waits for it.

An exchange of several stages cannot start its second collective from the callback of the first: on gloo the callback
occupies a worker thread of the group, and the order of callbacks differs between ranks, so the ranks' messages would
pair up wrongly. In a lane every rank runs the same exchanges in the same order, each written as straight-line code that
blocks.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ddp_plugin.errors import explain

__all__ = ["Lane", "in_lanes", "shared_lane"]

T = TypeVar("T")


class Lane:
    """Runs functions in the order of their submission, beside the thread that submits them.

    Between CPUs that is a daemon thread, which computes with one thread and records no gradient; it starts with the
    first submission. On an accelerator there is no thread: a function is called at once, and what it launches runs on a
    side stream, which waits for what the submitting stream had launched before.

    After a function has raised, the ranks no longer agree on what comes next: every function that has not run by then
    is dropped, and its future, like those of all later submissions, fails with that first error.

    Args:
        device: where the tensors are that the functions work on.

    Collectives:
        None by itself; those of what is submitted. Use a process group of the lane's own, and submit in the same order
        on all ranks.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._queue: queue.Queue[_Task | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._held: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._lock = threading.RLock()
        self._what = ""
        _lanes.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._is_closed

    @property
    def what(self) -> str:
        """What the thread runs now, as it was called at its submission; empty while it waits for work."""
        return self._what

    @property
    def has_failed(self) -> bool:
        """Whether a function has raised, so that the ranks' messages may not pair up any more."""
        return self._error is not None

    def submit(self, function: Callable[[], T], what: str = "a function") -> torch.futures.Future[T]:
        """Hands over a function; returns at once.

        Args:
            function: without arguments. It and all that it refers to stay alive until it is done, on the device too.
            what: it, in the words of a report, such as ``"the exchange of bucket 3"``.

        Returns:
            A future of what the function returns, that DDP accepts from a communication hook. Its callbacks run in the
            lane, so they must not wait for anything. On an accelerator, waiting for it makes the current stream wait,
            not the host.

        Raises:
            RuntimeError: the lane is closed.

        Collectives:
            Those of ``function``, in the lane.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError(explain("a lane that is open", "one that was closed", "Make a new Lane"))
            if self._error is not None:
                return _failed(self._error)
            if self.device.type != "cpu":
                return self._run_on_side_stream(function)
            if self._thread is None:
                self._thread = _start_thread(self._work)
            task = _Task(function, what)
            self._queue.put(task)
            return task.future

    def drain(self) -> None:
        """Waits until everything that was submitted is done; on an accelerator the current stream waits, not the host.

        Raises:
            Exception: the first error of a function, if there was one.
            RuntimeError: called from inside the lane, which would wait for itself.

        Collectives:
            None.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError(explain("drain() outside the lane", "a call from a function in it", "Remove that call"))
        self._queue.join()
        if self._stream is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_stream(self._stream)
        if self._error is not None:
            raise self._error

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread when everything submitted so far is done; calling it again changes nothing.

        Args:
            timeout_s: how long to wait for that, in seconds; ``None`` waits as long as it takes.

        Collectives:
            None.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            if self._thread is not None and not was_closed:
                self._queue.put(None)
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self._stream is not None and not was_closed:
            self._stream.synchronize()
            self._held.clear()

    def _work(self) -> None:
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                self._what = task.what
                if self._error is None:
                    self._error = task.run()
                else:
                    task.fail(self._error)
                self._what = ""
                del task  # or what it refers to, and its result, would live until the next one comes
                self._queue.task_done()
        self._queue.task_done()

    def _run_on_side_stream(self, function: Callable[[], T]) -> torch.futures.Future[T]:
        streams = torch.get_device_module(self.device)
        if self._stream is None:
            self.device = torch.empty(0, device=self.device).device  # futures want devices with an index
            self._stream = streams.Stream(self.device)
        # Memory of the submitting stream may be used again as soon as the host lets go of it, so the host does not,
        # until the side stream is done with it.
        while self._held and self._held[0][0].query():
            self._held.popleft()
        self._stream.wait_stream(streams.current_stream(self.device))
        future: torch.futures.Future[T] = torch.futures.Future(devices=[self.device])
        with streams.stream(self._stream), torch.no_grad():
            try:
                value = function()
            except Exception as error:
                self._error = error
                return _failed(error)
            finally:
                self._held.append((self._stream.record_event(), function))
            future.set_result(value)  # while the side stream is current: the future's events are recorded there
        return future


class _Task:
    """A function and its future.

    The future comes from a trigger: an exception reaches DDP in words only when a callback raises it, whereas
    ``Future.set_exception`` gives a value that DDP tries to use as a tensor.
    """

    def __init__(self, function: Callable[[], Any], what: str = "") -> None:
        self.what = what
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._trigger: torch.futures.Future[None] = torch.futures.Future()
        self.future: torch.futures.Future[Any] = self._trigger.then(self._deliver)

    def run(self) -> BaseException | None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._trigger.set_result(None)
        return self._error

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._trigger.set_result(None)

    def _deliver(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _failed(error: BaseException) -> torch.futures.Future[Any]:
    task = _Task(lambda: None)
    task.fail(error)
    return task.future


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    """Starts a thread whose operators use one thread each, while those of all other threads keep theirs."""
    num_threads = torch.get_num_threads()
    is_set = threading.Event()

    def run() -> None:
        torch.get_num_threads()  # initialises this thread's own count, so that it is not overwritten later
        torch.set_num_threads(1)
        is_set.set()
        work()

    thread = threading.Thread(target=run, name="ddp_plugin-lane", daemon=True)
    thread.start()
    is_set.wait()
    torch.set_num_threads(num_threads)  # the count is also the default of threads to come: put it back
    return thread


_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()


def in_lanes() -> list[str]:
    """Returns what the lanes of this process are running now; it may be called from any thread.

    Collectives:
        None.
    """
    return [lane.what for lane in tuple(_lanes) if lane.what]


_shared: dict[torch.device, Lane] = {}
_shared_lock = threading.Lock()


def shared_lane(device: torch.device | str = "cpu") -> Lane:
    """Returns the one lane of this process for a device; it is made at the first call, and anew once it was closed.

    Collectives:
        None.
    """
    key = torch.device(device)
    with _shared_lock:
        lane = _shared.get(key)
        if lane is None or lane.is_closed:
            lane = _shared[key] = Lane(key)
        return lane
