"""A run that stands still says why."""

import contextlib
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.supervision.activity import Activity, place_of
from ddp_plugin.supervision.board import Board, BoardLostError
from ddp_plugin.supervision.diagnosis import Diagnosis
from ddp_plugin.supervision.ending import be_interruptible, end_process, interrupt_main_thread, say
from ddp_plugin.supervision.failure import one_line
from ddp_plugin.supervision.hang import HangWatcher, answer_now
from ddp_plugin.supervision.pulse import Pulse

__all__ = ["HangWatchdog"]

_ON_HANG = ("report", "raise")
_MAX_STEPS_WITHOUT_SIZES = 50  # after which DDP will not tell the sizes of its buckets any more
_LEAVE_WITHIN_S = 10.0


class HangWatchdog(pl.Callback):
    """Explains a run that stands still: which rank does what, since which step, and the likely cause.

    When some rank has made no progress for ``limit_s``, one report is written, with the ranks joined in its first
    sentence: "rank 2 waits in the all-reduce of bucket 3 since step 120; rank 0 is in ``validation_step``, batch 7:
    unequal numbers of validation batches?" Below it: what to change, what each rank is doing, its latest collectives,
    and the stack of its main thread. It goes to standard error of the lowest rank that still lives, and to
    ``report_file``. When the run goes on, that is said too, and the next stall is reported anew.

    Each rank tells what it does through the store of the process group, from a thread of its own, so that it answers
    while its main thread is stuck. Only a process that is stopped, or in code that holds Python's interpreter lock, is
    silent, and that is said. No collective is used, and nothing is added to a step but notes of about a microsecond.

    The latest collectives come from torch's flight recorder, of NCCL and of gloo, which is on by default
    (``TORCH_FR_BUFFER_SIZE=0``, before torch starts, switches it off). Which gradient bucket is meant is known from the
    third step or so, and only while the main thread is in the backward: under NCCL it may be further on already.

    What is slow looks like a hang: take ``limit_s`` above the longest thing that any rank does alone or between two
    notes, such as a first step that compiles, a batch of validation, a save, or a ``prepare_data`` inside the run. A
    rank that is held by a debugger is never reported, and time in which this process itself was stopped does not count.

    Args:
        limit_s: seconds without progress of any one rank.
        on_hang: ``"report"`` only tells; ``"raise"`` also ends the run on all ranks with :class:`DDPPluginError`, and
            where a main thread cannot be reached, its process with status 1. It replaces waiting for the timeout of the
            process group.
        report_file: name of a file in the Trainer's ``default_root_dir`` to which reports are added; ``None`` writes
            none.

    Attributes:
        diagnoses: a :class:`~ddp_plugin.supervision.diagnosis.Diagnosis` for each stall of this run, on the rank that
            reported it.

    Raises:
        ValueError: ``limit_s`` not above zero, or another ``on_hang``.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.

    Collectives:
        None.
    """

    def __init__(
        self, limit_s: float = 300.0, on_hang: str = "report", report_file: str | None = "hang_report.txt"
    ) -> None:
        if not limit_s > 0:
            raise ValueError(explain("limit_s above zero", repr(limit_s), "Give seconds without progress"))
        if on_hang not in _ON_HANG:
            raise ValueError(explain(f"on_hang to be one of {_ON_HANG}", repr(on_hang), "Choose one"))
        self.limit_s = limit_s
        self.on_hang = on_hang
        self.report_file = report_file
        self.diagnoses: list[Diagnosis] = []
        self._pulse: Pulse | None = None
        self._is_own_pulse = False
        self._watcher: HangWatcher | None = None
        self._failures: Any = None
        self._path: Path | None = None
        self._has_left: threading.Event | None = None
        self._wrap: object = None
        self._bucket_bytes: tuple[int, ...] | None = None
        self._num_steps_of_wrap = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begins to watch; also where no strategy of this package tells what goes on, as far as the Trainer knows."""
        group = control_group_of(self, trainer)
        timeout = None if group is None else _compat.default_group_timeout()
        if timeout is not None and timeout.total_seconds() <= self.limit_s:
            rank_zero_warn(
                f"HangWatchdog: collectives time out after {timeout.total_seconds():g} s, before "
                f"limit_s={self.limit_s:g}, so that most hangs end without a report. Lower limit_s, or raise the "
                "strategy's timeout."
            )
        strategy: Any = trainer.strategy
        self.diagnoses = []
        self._path = None if self.report_file is None else Path(trainer.default_root_dir, self.report_file)
        self._has_left = threading.Event()
        self._failures = getattr(strategy, "failures", None)
        self._pulse = getattr(strategy, "pulse", None)
        self._is_own_pulse = self._pulse is None
        if self._pulse is None:
            self._pulse = Pulse(Board.alone(), Activity(lambda: place_of(trainer)), min(1.0, self.limit_s / 4))
            self._pulse.start()
        if self.on_hang == "raise" and self._failures is None:
            be_interruptible()
        answer = functools.partial(self._answer, self._pulse.activity, trainer)
        self._watcher = HangWatcher(self._pulse.activity, self.limit_s, self._pulse.interval_s, self, answer)
        self._pulse.add(self._watcher)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Asks DDP for the sizes of its buckets until it tells them; inside a backward it could not be asked."""
        model = trainer.strategy.model
        if model is not self._wrap:
            self._wrap, self._bucket_bytes, self._num_steps_of_wrap = model, None, 0
        if self._bucket_bytes is None and self._num_steps_of_wrap < _MAX_STEPS_WITHOUT_SIZES:
            self._num_steps_of_wrap += 1
            if isinstance(model, DistributedDataParallel):
                self._bucket_bytes = _compat.bucket_bytes(model)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Tells the others that this rank leaves, and why."""
        self._leave(one_line(exception))

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Tells the others that this rank has come to its end."""
        self._leave("")

    def _leave(self, how: str) -> None:
        pulse, watcher = self._pulse, self._watcher
        if self._has_left is not None:
            self._has_left.set()
        self._pulse = self._watcher = self._failures = self._wrap = None
        if pulse is None or watcher is None:
            return
        with contextlib.suppress(BoardLostError):
            watcher.leave(pulse.board, how)
        if self._is_own_pulse:
            pulse.stop()
            pulse.board.close()

    # ------------------------------------------------------------------------------------------ in the pulse's thread

    def _answer(self, activity: Activity, trainer: pl.Trainer) -> Mapping[str, Any]:
        answer = answer_now(activity, self._bucket_bytes)
        if trainer.state.fn == TrainerFn.FITTING:
            progress = trainer.fit_loop.epoch_loop.batch_progress
            answer["place"]["train_batch"] = progress.current.ready - 1
            answer["place"]["is_last_batch"] = bool(progress.is_last_batch)
        return answer

    def report(self, diagnosis: Diagnosis) -> None:
        """Writes a report, and ends the run if asked; in the thread of the pulse, on one rank.

        Collectives:
            None.
        """
        self.diagnoses.append(diagnosis)
        say(f"HangWatchdog: {diagnosis.report}\n{self._write(diagnosis.report)}")
        if self.on_hang == "raise":
            sentence = f"HangWatchdog ends the run after {self.limit_s:g} s without progress: {diagnosis.headline}"
            if self._failures is not None:
                self._failures.tell(sentence)
            else:
                self._end_alone(sentence)

    def resume(self, sentence: str) -> None:
        """Writes that a stall is over.

        Collectives:
            None.
        """
        say(f"HangWatchdog: {sentence}")

    def _write(self, text: str) -> str:
        """Adds a text to the file; returns a line about that."""
        if self._path is None:
            return ""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n\n")
        except OSError as error:
            return f"(not in a file: {error})"
        return f"(also in {self._path})"

    def _end_alone(self, sentence: str) -> None:
        """Ends a run of one process: by an exception, or at once where none reaches it."""
        interrupt_main_thread(DDPPluginError(sentence))
        if self._has_left is not None and not self._has_left.wait(_LEAVE_WITHIN_S):
            end_process(sentence)
