"""Records a window of training steps for ``ddp-plugin trace``; the strategy adds it where the variable asks for it."""

import contextlib
import os
import platform
import statistics
import sys
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.profilers import PyTorchProfiler

from ddp_plugin import _compat
from ddp_plugin.callbacks._recording import StepRecording
from ddp_plugin.callbacks._shell import logical_shards
from ddp_plugin.supervision.failure import PeerFailedError, one_line
from ddp_plugin.timeline.recorder import HostClock, clock_for
from ddp_plugin.timeline.steps import StepTimeline
from ddp_plugin.tracing.issuers import count
from ddp_plugin.tracing.records import (
    FAILED,
    OVER,
    SET_UP,
    TRAINING,
    WHOLE,
    BucketContents,
    Memory,
    RankRecord,
    operators_path,
    record_path,
    replacing,
    write_record,
)
from ddp_plugin.tracing.request import TraceRequest
from ddp_plugin.tracing.watching import CollectiveWatch, library_roots

__all__ = ["TraceRecording"]

_NEVER = sys.maxsize
_LOOKS_EVERY_N_STEPS = 50  # while nothing is recorded yet, so that the marks of old steps can be let go


class _Process:
    """What this process has done for the trace already."""

    is_done = False  # a window is whole; later runs of this process are left alone


class TraceRecording(StepRecording):
    """Records a window of steps of this rank and writes them to a file of its own.

    Before the window it writes down when the parts of a step end, as the monitors do, and nothing else; after it
    nothing at all. In the window ``torch.profiler`` looks too, and collectives are noted with their stacks. Whatever
    fails here is a warning: the training is worth more than its trace.

    Args:
        request: what is asked for.

    Collectives:
        None.
    """

    _without_buckets = "times steps, but no communication,"

    def __init__(self, request: TraceRequest) -> None:
        super().__init__(_NEVER)
        self._request = request
        self._record: RankRecord | None = None
        self._watch = CollectiveWatch()
        self._has_counted = False
        self._profile: Any = None
        self._before: deque[StepTimeline] = deque(maxlen=request.window.num_active + request.window.num_warmup)
        self._first_step = self._num_done = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the buckets, and leaves word that this rank is there."""
        if _Process.is_done:
            return
        window = self._request.window
        self._record = RankRecord(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            host=platform.node(),
            device=str(trainer.strategy.root_device),
            state=TRAINING if stage == "fit" else SET_UP,
            asked=window,
            window=window,
        )
        if stage == "fit" and logical_shards(trainer) is not None:
            self._record.notes.append("No buckets: logical_shards reduce without them.")
            self._is_on = True
        else:
            super().setup(trainer, pl_module, stage)
        if stage == "fit" or not record_path(Path(self._request.folder), trainer.global_rank).exists():
            self._write()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to look, with the window that fits the run."""
        if not self._is_on or self._record is None:
            return
        super().on_train_start(trainer, pl_module)
        is_host_clock = isinstance(clock_for(torch.device(trainer.strategy.root_device)), HostClock)
        self._record.zero_unix_s = time.time() - (time.perf_counter() if is_host_clock else 0.0)
        self._record.window = self._request.window.fitted(_num_steps(trainer))
        self._first_step, self._num_done = trainer.global_step, 0
        self._before.clear()
        self._reach(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step, where the optimizer stepped."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if not self._is_on or self._num_steps == self._num_done:
            return
        self._num_done = self._num_steps
        if self._profile is not None:
            self._guarded(self._profile.step)
        self._reach(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes what there is, where the training is over before the window."""
        if self._is_on:
            self._finish(trainer, OVER)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes what there is."""
        if self._is_on and self._record is not None:
            self._record.notes.append(_ended(exception))
            self._record.state = FAILED
            self._write()  # whatever comes now may fail, or last until this process is ended
            self._finish(trainer, FAILED)
        self._leave(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leaves the Trainer."""
        super().teardown(trainer, pl_module, stage)
        self._leave(trainer)

    # --------------------------------------------------------------------------------------------------- the window

    def _reach(self, trainer: pl.Trainer) -> None:
        """Begins and ends what begins and ends after so many steps."""
        assert self._record is not None
        window, done = self._record.window, self._num_done
        begins = window.num_wait + window.num_warmup
        self._watch.step = self._first_step + done
        if done == window.num_wait and self._request.profiles:
            self._start_profile(trainer)
        if done == begins:
            self._start_watch()
        if done <= begins and (done == begins or done % _LOOKS_EVERY_N_STEPS == 0):
            self._before.extend(self._recorder.take())
        if done == begins + window.num_active:
            self._finish(trainer, WHOLE)
            _Process.is_done = True

    def _finish(self, trainer: pl.Trainer, state: str) -> None:
        self._is_on = False
        try:
            self._take(trainer, state)
        except Exception as error:
            rank_zero_warn(f"This rank's trace is not written: {type(error).__name__}: {error}")
        strategy: Any = trainer.strategy
        strategy.remove_bucket_observer(self._recorder)
        self._recorder.stop()

    def _take(self, trainer: pl.Trainer, state: str) -> None:
        assert self._record is not None
        record, window = self._record, self._record.window
        self._watch.stop()
        if state != FAILED:
            self._stop_profile()
        begins = window.num_wait + window.num_warmup
        first_active = self._first_step + begins
        steps = [*self._before, *self._recorder.take(wait=state != FAILED)]
        before = [step for step in steps if step.step < first_active]
        unseen = [step.duration_s for step in before if step.is_steady and step.step < first_active - window.num_warmup]
        record.state = state
        record.steps = [step for step in steps if step.step >= first_active]
        record.num_counted = max(0, self._num_done - begins) if self._has_counted else 0
        calls = [call for call in self._watch.calls if call.step < self._first_step + self._num_done]
        record.collectives = count(calls, library_roots(), os.getcwd())
        if record.steps:
            record.step_before_s = statistics.fmean(unseen) if unseen else None
        elif before:
            record.steps = before[-window.num_active :]
            record.notes.append(
                "The window was not reached: these are the last steps before the end, without operators."
            )
        record.buckets = {
            index: BucketContents(held.names, held.num_elements * held.element_size_bytes)
            for index, held in self._recorder.contents.items()
        }
        record.memory = _memory(trainer)
        self._watch.calls.clear()
        write_record(Path(self._request.folder), record)
        # Stopping waits for the device, and a collective there may wait for a rank that has failed for ever.
        if state == FAILED and (trainer.world_size == 1 or trainer.strategy.root_device.type != "cuda"):
            self._stop_profile()

    def _start_watch(self) -> None:
        try:
            self._watch.start()
            self._has_counted = True
        except Exception as error:
            assert self._record is not None
            self._record.notes.append(f"Collectives are not counted: {type(error).__name__}: {error}")

    def _write(self) -> None:
        assert self._record is not None
        try:
            write_record(Path(self._request.folder), self._record)
        except OSError as error:
            rank_zero_warn(f"The trace of rank {self._record.rank} is not written: {error}")

    def _leave(self, trainer: Any) -> None:
        self._watch.stop()
        trainer.callbacks = [callback for callback in trainer.callbacks if callback is not self]

    # ------------------------------------------------------------------------------------------------- the operators

    def _start_profile(self, trainer: pl.Trainer) -> None:
        assert self._record is not None
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        if isinstance(profiler, PyTorchProfiler) or _compat.profiler_is_on():
            self._record.notes.append(
                "No operators: the program has a torch profiler of its own, and there can be one."
            )
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.device(trainer.strategy.root_device).type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        window = self._record.window
        schedule = torch.profiler.schedule(wait=0, warmup=window.num_warmup, active=window.num_active, repeat=1)
        self._profile = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=self._write_operators
        )
        self._guarded(self._profile.start)

    def _write_operators(self, profile: Any) -> None:
        assert self._record is not None
        with replacing(operators_path(Path(self._request.folder), self._record.rank)) as unfinished:
            profile.export_chrome_trace(str(unfinished))

    def _stop_profile(self) -> None:
        if self._profile is not None:
            self._guarded(self._profile.stop)
            self._profile = None

    def _guarded(self, function: Any) -> None:
        """Calls something of the profiler; if it fails, there is none from then on."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function()
        except Exception as error:
            assert self._record is not None
            self._record.notes.append(f"No operators: {type(error).__name__}: {error}")
            profile, self._profile = self._profile, None
            with contextlib.suppress(Exception):
                profile.stop()


def _num_steps(trainer: Any) -> int | None:
    """Returns how many steps this run will take at most, ``None`` where nobody can tell."""
    try:
        steps = trainer.estimated_stepping_batches
    except Exception:  # another number of micro-batches in each epoch
        return None
    left = steps - trainer.global_step
    return int(left) if 0 < left < float("inf") else None


def _ended(exception: BaseException) -> str:
    if isinstance(exception, PeerFailedError):  # whose last line says who failed, and why
        return f"Ended because {str(exception).splitlines()[-1]}"
    return f"Ended by {one_line(exception)}"


def _resident_bytes() -> int | None:
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    # The peak is in kB, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _memory(trainer: pl.Trainer) -> Memory:
    resident_bytes = _resident_bytes()
    device = torch.device(trainer.strategy.root_device)
    if device.type != "cuda":
        return Memory(resident_bytes)
    return Memory(
        resident_bytes,
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        torch.cuda.get_device_properties(device).total_memory,
    )
