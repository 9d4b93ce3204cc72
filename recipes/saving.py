"""When a run is saved, under which name, and what becomes of older checkpoints."""

import math
import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities import rank_zero_info

from ddp_plugin.agreement import Agreement
from ddp_plugin.errors import explain

__all__ = ["SaveCheckpoints", "saved_steps"]

_TIME = "time for a checkpoint"
_NAME = re.compile(r"step=(\d+)\.ckpt")


def saved_steps(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints of a run, whole or not, by their optimizer step, in order."""
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step=*.ckpt"))
    return dict(sorted((int(match[1]), path) for match, path in found if match is not None))


class SaveCheckpoints(Checkpoint):
    """Saves ``step=N.ckpt`` after every so many steps or minutes, and at the end; the newest few are kept.

    Nothing of what is kept is remembered, all of it is read from the names in the folder: so a run that was killed at
    any moment leaves nothing behind that the next one would not clean up. Checkpoints of a later step than a run begins
    with belong to another line of history (or are torn): they are moved to ``<folder>-1``, ``-2``, …

    Args:
        folder: where; the same for all starts of a run, and for one run alone.
        every_steps: optimizer steps between two; ``None`` for not by steps.
        every_minutes: minutes between two, by rank 0's clock; ``None`` for not by the clock.
        at_epoch_end: whether each epoch's end is saved.
        keep: how many of the newest stay.

    Raises:
        ValueError: a number below its limit.

    Collectives:
        Those of ``trainer.save_checkpoint`` at a save. With ``every_minutes``, one message of two integers per batch
        over the control group, which nobody waits for.
    """

    def __init__(
        self,
        folder: str | Path,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        at_epoch_end: bool = False,
        keep: int = 2,
    ) -> None:
        for name, value, least in (
            ("every_steps", every_steps, 1),
            ("every_minutes", every_minutes, 0),
            ("keep", keep, 1),
        ):
            if value is not None and not (value >= least and value > 0 and math.isfinite(value)):
                raise ValueError(explain(f"{name} to be at least 1, or null", repr(value), "Correct the number"))
        self.folder = Path(folder)
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.at_epoch_end = at_epoch_end
        self.keep = keep
        self._clock: Agreement | None = None
        self._seen = 0  # optimizer steps at the last look
        self._saved: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes the folder for this line of history."""
        self._seen, self._saved = trainer.global_step, None
        self._restart_clock()
        if self.every_minutes is not None:
            strategy: Any = trainer.strategy
            self._clock = Agreement(strategy.control_group if trainer.world_size > 1 else None, kinds=(_TIME,))
        if trainer.is_global_zero:
            self._set_aside(trainer.global_step)

    def _set_aside(self, step: int) -> None:
        later = [path for saved, path in saved_steps(self.folder).items() if saved > step]
        if not later:
            return
        number = 1
        while (aside := self.folder.with_name(f"{self.folder.name}-{number}")).exists():
            number += 1
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        rank_zero_info(
            f"{len(later)} checkpoints of later steps than {step}, where this run begins, are not of its line of "
            f"history: moved to {aside}."
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Saves where a step is complete and its turn, or the time, has come."""
        is_time = self._is_time(trainer)
        step = trainer.global_step
        if step == self._seen:  # inside an accumulation window
            return
        self._seen = step
        if is_time or (self.every_steps is not None and step % self.every_steps == 0):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves if asked."""
        if self.at_epoch_end:
            self._save(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves the end, so that a run that is started again knows that there is nothing to do."""
        if self._clock is not None:
            self._clock.receive()
        self._save(trainer)

    def _is_time(self, trainer: pl.Trainer) -> bool:
        if self._clock is None or self.every_minutes is None:
            return False
        if trainer.is_global_zero and time.monotonic() - self._since_s >= self.every_minutes * 60:
            self._clock.wish(_TIME)
        self._clock.post()
        return self._clock.is_agreed(_TIME)

    def _restart_clock(self) -> None:
        self._since_s = time.monotonic()
        if self._clock is not None:
            self._clock.drop(_TIME)

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step == self._saved:
            return
        self._saved = step
        trainer.save_checkpoint(self.folder / f"step={step}.ckpt", weights_only=False)
        self._restart_clock()
        if trainer.is_global_zero:
            for path in list(saved_steps(self.folder).values())[: -self.keep]:
                trainer.strategy.remove_checkpoint(path)
