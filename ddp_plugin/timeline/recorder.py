"""Writing down when things happen in a step, so cheaply that a step does not notice: a clock and an append.

Under gloo a bucket is reduced when its future is done, and the host's clock tells when. On CUDA the host runs ahead of
the device and its clock tells nothing; there an event is put into the stream, and read when it has long passed. Neither
waits for the device.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddp_plugin.hooks import Contents
from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline

__all__ = ["DeviceClock", "HostClock", "StepRecorder", "clock_for"]


class HostClock:
    """The host's monotonic clock."""

    now = staticmethod(time.perf_counter)

    def is_past(self, mark: float) -> bool:
        """Whether a mark can be read; always."""
        return True

    def wait_for(self, mark: float) -> None:
        """Waits until a mark can be read; never."""

    def seconds(self, mark: float) -> float:
        """Returns the seconds of a mark."""
        return mark

    def rebase(self, mark: float) -> None:
        """Does nothing: these seconds do not lose precision with time."""


class DeviceClock:
    """The clock of a CUDA device: events in the current stream, in seconds after the first of them.

    An event's distance from another is a float32 in milliseconds, so the base moves along with the run.
    """

    def __init__(self) -> None:
        self._base: Any = None
        self._base_s = 0.0

    def now(self) -> Any:
        """Puts a mark into the current stream."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        if self._base is None:
            self._base = event
        return event

    def is_past(self, mark: Any) -> bool:
        """Whether the device has passed a mark; does not wait."""
        return bool(mark.query())

    def wait_for(self, mark: Any) -> None:
        """Waits until the device has passed a mark."""
        mark.synchronize()

    def seconds(self, mark: Any) -> float:
        """Returns the seconds of a mark that is past."""
        return self._base_s + float(self._base.elapsed_time(mark)) / 1e3

    def rebase(self, mark: Any) -> None:
        """Counts from a mark that is past from now on."""
        self._base, self._base_s = mark, self.seconds(mark)


def clock_for(device: torch.device) -> HostClock | DeviceClock:
    """Returns the clock that tells when a device does something."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass
class _Step:
    """The marks of one step, as they come."""

    marks: list[tuple[str | None, Any]] = field(default_factory=list)  # what ended then, None for a gap
    ready: list[tuple[int, Any]] = field(default_factory=list)
    reduced: list[tuple[int, Any]] = field(default_factory=list)
    layout: int = 0


class StepRecorder:
    """Records the parts of each step by marks, and its buckets as a bucket observer.

    Nothing is recorded before :meth:`start` and after :meth:`stop`.

    Attributes:
        contents: what each bucket holds, by index, in the newest layout.
    """

    def __init__(self) -> None:
        self.contents: dict[int, Contents] = {}
        self._clock: Any = HostClock()
        self._now: Callable[[], Any] = self._clock.now
        self._name_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple
        self._is_on = False
        self._step, self._done = _Step(), list[_Step]()
        self._num_taken = 0
        self._last_mark: Any = None  # of the step before
        self._timeline_before: StepTimeline | None = None
        self._identities: dict[int, tuple[int, int, int]] = {}
        self._layout = 0

    def start(
        self,
        clock: HostClock | DeviceClock,
        name_parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        first_step: int = 0,
    ) -> None:
        """Begins a recording.

        Args:
            clock: the clock of the device that computes.
            name_parameters: returns the parameters with their names, such as ``module.named_parameters``.
            first_step: number of the first step.
        """
        self.__init__()  # type: ignore[misc]
        self._clock, self._now, self._name_parameters = clock, clock.now, name_parameters
        self._num_taken, self._is_on = first_step, True

    def stop(self) -> None:
        """Ends the recording; what was not taken is dropped."""
        self.__init__()  # type: ignore[misc]

    # -------------------------------------------------------------------------------------------------------- in a step

    def mark(self, part: str) -> None:
        """Notes that a part of the step ends now, which began where the one before ended."""
        if self._is_on:
            self._step.marks.append((part, self._now()))

    def interrupt(self) -> None:
        """Notes that what went before, since the last mark, is no part of a step, and that ranks met in it."""
        if self._is_on:
            self._step.marks.append((None, self._now()))

    def before_reduction(self, bucket_index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Notes that a bucket is ready; see :class:`~ddp_plugin.wrapping.arguments.BucketObserver`."""
        if not self._is_on:
            return
        self._step.ready.append((bucket_index, self._now()))
        identity = (len(parameters), id(parameters[0]), id(parameters[-1]))
        if self._identities.get(bucket_index) != identity:
            if bucket_index == 0:
                self._identities.clear()
                self.contents.clear()
            self._identities[bucket_index] = identity
            self._layout += 1
            names = {id(parameter): name for name, parameter in self._name_parameters()}
            names |= {id(parameter): "unnamed" for parameter in parameters if id(parameter) not in names}
            self.contents[bucket_index] = Contents.of(parameters, names, gradient.dtype)

    def after_reduction(self, bucket_index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Notes that a bucket is reduced."""
        if self._is_on:
            self._step.reduced.append((bucket_index, self._now()))

    def end_step(self) -> None:
        """Closes the step at the last mark."""
        if self._is_on:
            self._step.layout = self._layout
            self._done.append(self._step)
            self._step = _Step()

    # -------------------------------------------------------------------------------------------------------- afterward

    def take(self, *, wait: bool = False) -> list[StepTimeline]:
        """Returns the steps that are over, each once.

        Args:
            wait: wait for steps that the device has not finished; otherwise they come with the next call.
        """
        taken = []
        while self._done:
            step = self._done[0]
            last_mark = step.marks[-1][1]
            if wait:
                self._clock.wait_for(last_mark)
            elif not self._clock.is_past(last_mark):
                break
            self._done.pop(0)
            timeline = self._timeline(step)
            self._num_taken += 1
            if timeline is not None:
                taken.append(timeline)
            self._last_mark = last_mark
        if taken:
            self._clock.rebase(self._last_mark)
        return taken

    def _timeline(self, step: _Step) -> StepTimeline | None:
        seconds = self._clock.seconds
        begin_s = seconds(self._last_mark) if self._last_mark is not None else None
        phases = []
        for part, mark in step.marks:
            end_s = seconds(mark)
            if part is not None and begin_s is not None:
                phases.append(Phase(part, begin_s, end_s))
            begin_s = end_s
        reduced: dict[int, list[float]] = {}
        for index, mark in step.reduced:
            reduced.setdefault(index, []).append(seconds(mark))
        buckets = tuple(
            BucketSpan(index, seconds(mark), reduced[index].pop(0)) for index, mark in step.ready if reduced.get(index)
        )
        is_steady = self._last_mark is not None and all(part is not None for part, _ in step.marks)
        before, self._timeline_before = self._timeline_before, None
        if not phases:
            return None
        timeline = StepTimeline(self._num_taken, tuple(phases), buckets, is_steady, layout=step.layout)
        if before is not None and is_steady:
            timeline = replace(timeline, common_s=before.last_reduced_s, before=before.not_before_last_reduction)
        self._timeline_before = timeline
        return timeline
