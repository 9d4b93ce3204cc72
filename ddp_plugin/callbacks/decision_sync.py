"""All ranks decide alike, from the same monitored values."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from torch import Tensor

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import gather_objects

__all__ = ["DecisionSync"]

_ON_DIFFERENCE = ("mean", "warn", "raise")
_LATE = (EarlyStopping, Checkpoint)  # at the end of a training epoch they are called after the module's own hook


class DecisionSync(pl.Callback):
    """Early stopping, checkpoints and plateau schedulers decide alike on all ranks.

    Before a monitored value is read in ``fit``, the ranks compare theirs: every key that is the
    ``monitor`` of a callback or of a ``ReduceLROnPlateau``, after each validation, at the end of each training epoch,
    and after the batches at which a plateau scheduler with ``interval="step"`` or a ``ModelCheckpoint`` with
    ``every_n_train_steps`` may read it. One NaN equals another. Where values differ (logged without
    ``sync_dist=True``), Lightning alone lets a scheduler on each rank follow its own and the weights part in silence.
    A value that the training reads by itself (``self.trainer.callback_metrics[...]`` in manual optimization) is not
    seen unless some callback monitors its key.

    That all ranks stop after the same step is the strategy's: see :class:`~ddp_plugin.strategy.stopping.Stopping`.

    Args:
        on_difference: ``"mean"`` puts the mean over the ranks, computed in float64, into ``trainer.callback_metrics``
            of all ranks and warns once for each key; loggers and the progress bar keep what they were given.
            ``"warn"`` warns and leaves the values. ``"raise"`` raises on all ranks.

    Raises:
        ValueError: another ``on_difference``.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        DDPPluginError: on all ranks: a monitored key that only some ranks logged; or values that differ, with
            ``"raise"``.

    Collectives:
        On the control group, on all ranks: one object gather for each comparison. None on one process.
    """

    def __init__(self, on_difference: str = "mean") -> None:
        if on_difference not in _ON_DIFFERENCE:
            raise ValueError(explain(f"on_difference to be one of {_ON_DIFFERENCE}", repr(on_difference), "Choose one"))
        self.on_difference = on_difference
        self._decisions: _Decisions | None = None
        self._undo: list[Callable[[], None]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Moves this callback to the front, and takes hold of what others will read."""
        self._release()
        group = control_group_of(self, trainer)
        if stage != "fit" or group is None:
            return
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        trainer.callbacks = [self, *(other for other in callbacks if other is not self)]  # type: ignore[attr-defined]
        self._decisions = decisions = _Decisions(trainer, group, self.on_difference)
        self._undo.append(_compat.intercept_monitors(trainer, decisions))
        for callback in callbacks:
            if isinstance(callback, _LATE):
                self._undo.append(_before(callback, "on_train_epoch_end", decisions.compare_all))
                break

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Compares what a checkpoint may read after this batch, and lets Lightning's own values be seen again."""
        if self._decisions is not None:
            self._decisions.compare_for_checkpoints()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares all monitored values."""
        if self._decisions is not None and not trainer.sanity_checking:
            self._decisions.compare_all()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compares what callbacks monitor that are called before the module's hook."""
        if self._decisions is not None:
            self._decisions.compare_early()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the Trainer back as it was."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the Trainer back as it was."""
        self._release()

    def _release(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._decisions = None


def _before(callback: pl.Callback, hook: str, function: Callable[[], None]) -> Callable[[], None]:
    """Calls ``function`` before one hook of one callback; what is returned undoes it."""
    own = getattr(callback, hook)

    def function_then_hook(*arguments: Any) -> None:
        function()
        own(*arguments)

    setattr(callback, hook, function_then_hook)
    return lambda: delattr(callback, hook)


class _Decisions:
    """What is compared in one fit, at the moments that :func:`ddp_plugin._compat.intercept_monitors` names too."""

    def __init__(self, trainer: pl.Trainer, group: dist.ProcessGroup, on_difference: str) -> None:
        self.overlay: dict[str, Any] = {}
        self._trainer = trainer
        self._group = group
        self._on_difference = on_difference
        self._warned: set[str] = set()

    def compare_all(self) -> None:
        """Compares every monitored key."""
        schedulers = [config.monitor for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        self._compare([*self._readers(), *(key for key in schedulers if key is not None)])

    def compare_early(self) -> None:
        """Compares what callbacks other than Lightning's two kinds of monitors read."""
        self._compare(
            [
                key
                for key, callbacks in self._readers().items()
                if not all(isinstance(callback, _LATE) for callback in callbacks)
            ]
        )

    def compare_for_checkpoints(self) -> None:
        """Compares what a ``ModelCheckpoint`` may read after this batch."""
        step = self._trainer.global_step
        self._compare(
            [
                key
                for key, callbacks in self._readers().items()
                if any(_compat.may_save_now(callback, step) for callback in callbacks)
            ]
        )

    def before_plateau_schedulers(self, interval: str) -> None:
        self._compare(_compat.plateau_monitors(self._trainer, interval))

    def _readers(self) -> dict[str, list[pl.Callback]]:
        """Returns the callbacks that monitor each key."""
        readers: dict[str, list[pl.Callback]] = {}
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(key := getattr(callback, "monitor", None), str):
                readers.setdefault(key, []).append(callback)
        return readers

    def _compare(self, keys: list[str]) -> None:
        """Compares these keys; what an earlier comparison put before Lightning's values holds no longer."""
        self.overlay.clear()
        if not keys:
            return
        metrics = self._trainer.callback_metrics
        parts = gather_objects({key: float(metrics[key]) for key in dict.fromkeys(keys) if key in metrics}, self._group)
        for key in dict.fromkeys(key for part in parts for key in part):
            values = [part.get(key) for part in parts]
            _refuse_gaps(key, values)
            if not _are_equal(values):
                self._resolve(key, values)
        metrics.update(self.overlay)

    def _resolve(self, key: str, values: list[float]) -> None:
        by_rank = ", ".join(f"{value:g} on rank {rank}" for rank, value in enumerate(values))
        if self._on_difference == "raise":
            raise DDPPluginError(
                explain(
                    f"the monitored value {key!r} to be equal on all ranks",
                    by_rank,
                    f"Log {key!r} with sync_dist=True",
                )
            )
        mean = sum(value / len(values) for value in values)
        if self._on_difference == "mean":
            own = self._trainer.callback_metrics[key]
            is_real = isinstance(own, Tensor) and own.is_floating_point()
            self.overlay[key] = torch.tensor(
                mean, dtype=own.dtype if is_real else torch.float64, device=getattr(own, "device", None)
            )
        if key not in self._warned:
            self._warned.add(key)
            consequence = (
                f"all ranks decide by the mean, {mean:g}"
                if self._on_difference == "mean"
                else "each rank decides by its own, and the weights may part"
            )
            rank_zero_warn(
                f"DecisionSync: the monitored value {key!r} differs between the ranks: {by_rank}; {consequence}. "
                f"Log {key!r} with sync_dist=True."
            )


def _refuse_gaps(key: str, values: list[Any]) -> None:
    missing = [rank for rank, value in enumerate(values) if value is None]
    if missing:
        raise DDPPluginError(
            explain(
                f"the monitored value {key!r} to be logged on all ranks",
                f"none on rank {', '.join(map(str, missing))} of {len(values)}",
                "Log it unconditionally, without rank_zero_only",
            )
        )


def _are_equal(values: list[float]) -> bool:
    return all(value == values[0] or (math.isnan(value) and math.isnan(values[0])) for value in values)
