"""What the two monitors share: a recording of every step, handed over on all ranks at the same step."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from torch import Tensor

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.errors import explain
from ddp_plugin.timeline.recorder import StepRecorder, clock_for
from ddp_plugin.timeline.steps import StepTimeline

__all__ = ["MAX_REPORTS", "StepRecording"]

MAX_REPORTS = 1000
"""How many reports a monitor keeps, the newest; the loggers have had the others."""


class StepRecording(pl.Callback):
    """Records the steps of this rank; a subclass says in :meth:`_exchange` what becomes of them.

    Steps are counted by batches, so all ranks come to an exchange at the same one.

    Args:
        every_n_steps: optimizer steps from one exchange to the next.

    Raises:
        ValueError: not a whole number of at least 1.

    Collectives:
        Those of :meth:`_exchange`.
    """

    _without_buckets = "times steps, but no communication,"  # what it does where there is nothing to watch
    _needs_buckets = False

    def __init__(self, every_n_steps: int) -> None:
        if isinstance(every_n_steps, bool) or not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise ValueError(
                explain("every_n_steps, a whole number of at least 1", repr(every_n_steps), "Count optimizer steps")
            )
        self.every_n_steps = every_n_steps
        self._recorder = StepRecorder()
        self._group: dist.ProcessGroup | None = None
        self._is_on = False
        self._watches_buckets = False
        self._num_steps = 0  # since the last exchange

    def _exchange(self, trainer: pl.Trainer, steps: list[StepTimeline], num_steps: int) -> None:
        """Sees the steps of a window, on all ranks; the last step may come later, where the device is not done."""
        raise NotImplementedError

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the buckets."""
        if stage != "fit":
            return
        self._recorder.stop()
        self._group = control_group_of(self, trainer)
        self._num_steps = 0
        hook = getattr(trainer.strategy, "comm_hook", None)
        if self._group is None:
            reason = "on one process"
        elif hook is not None and hook.synchronises == "nothing":
            reason = f"with comm_hook={hook.name!r}: ranks never meet"
        elif hook is not None and hook.synchronises != "gradients":
            reason = (
                f"with comm_hook={hook.name!r}: it exchanges parameters every {hook.period} steps, and no gradients"
            )
        elif _compat.averages_models(trainer.strategy):
            reason = "with model averaging: ranks do not meet in every step"
        else:
            strategy: Any = trainer.strategy
            strategy.add_bucket_observer(self._recorder)
            self._is_on = self._watches_buckets = True
            return
        self._is_on, self._watches_buckets = not self._needs_buckets, False
        rank_zero_info(f"{type(self).__name__} {self._without_buckets} {reason}.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins the recording."""
        if self._is_on:
            clock = clock_for(torch.device(trainer.strategy.root_device))
            self._recorder.start(clock, pl_module.named_parameters, first_step=trainer.global_step)
            self._recorder.interrupt()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves out what came between two epochs."""
        self._recorder.interrupt()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves out the validation."""
        self._recorder.interrupt()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Notes that the batch is there."""
        self._recorder.mark("data")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Notes that the forward is over."""
        self._recorder.mark("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that the gradients are there, reduced."""
        self._recorder.mark("backward")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends the step, where the optimizer stepped, and exchanges every ``every_n_steps`` of them."""
        if not self._is_on:
            return
        self._recorder.mark("optimizer")
        if (batch_idx + 1) % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            return
        self._recorder.end_step()
        self._num_steps += 1
        if self._num_steps == self.every_n_steps:
            self._hand_over(trainer)
            self._recorder.interrupt()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchanges what is left."""
        if self._is_on and self._num_steps:
            self._hand_over(trainer, wait=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stops recording."""
        self._recorder.stop()
        self._group, self._is_on, self._num_steps = None, False, 0

    def _hand_over(self, trainer: pl.Trainer, *, wait: bool = False) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        self._exchange(trainer, self._recorder.take(wait=wait), num_steps)

    def _log(self, trainer: pl.Trainer, metrics: dict[str, float]) -> None:
        """Gives numbers to every logger, on rank 0, beside what is logged at this step."""
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=_compat.logging_step(trainer))
