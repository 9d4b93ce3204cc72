"""How far a run is: one bar in a terminal, a few lines where the output goes to a file."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

__all__ = ["StepBar", "write_above"]

_BAR = "{desc} {percentage:3.0f}% |{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"


class StepBar(ProgressBar):
    """Shows optimizer steps of the whole run and what the model logs with ``prog_bar=True``, on rank 0.

    Where the standard output is no terminal, a bar would be a mess of characters: there it prints a line after each
    validation, and some ``num_lines`` lines over the run.

    Args:
        num_steps: optimizer steps of the run.
        refresh_every: steps between two updates.
        num_lines: lines over the run, without a terminal.

    Collectives:
        None.
    """

    def __init__(self, num_steps: int = 1, refresh_every: int = 1, num_lines: int = 20) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.refresh_every = refresh_every
        self.num_lines = num_lines
        self._is_enabled = True
        self._bar: Any = None
        self._shown = 0

    def disable(self) -> None:
        """Shows nothing from now on; Lightning calls it on all ranks but 0."""
        self._is_enabled = False

    def enable(self) -> None:
        """Shows again."""
        self._is_enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the bar at the step where a resumed run goes on."""
        self._shown = trainer.global_step
        self._open("training", self.num_steps, self._shown)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Shows every few steps; the last ones are shown with their validation."""
        step, every = trainer.global_step, self.refresh_every
        if self._bar is None:
            every *= math.ceil(self.num_steps / self.num_lines / every)
        if step != self._shown and step % every == 0:
            self._show(trainer)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says why the steps stand still."""
        if self._bar is not None:
            self._bar.set_description_str("validating")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shows what was measured."""
        if trainer.state.fn == "fit":
            self._show(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the bar as it is."""
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves the bar, so that the traceback starts on a line of its own."""
        self._close()

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens a bar over this process's batches."""
        self._open("testing ", int(sum(trainer.num_test_batches)), 0)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        """Counts a batch."""
        if self._bar is not None:
            self._bar.update()

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves the bar as it is."""
        self._close()

    def _open(self, name: str, total: int, initial: int) -> None:
        if self._is_enabled and sys.stdout.isatty():
            self._bar = tqdm(
                desc=name, total=total, initial=initial, file=sys.stdout, dynamic_ncols=True, bar_format=_BAR
            )

    def _show(self, trainer: pl.Trainer) -> None:
        self._shown = step = trainer.global_step
        if self._bar is not None:
            self._bar.n = step
            self._bar.set_description_str("training", refresh=False)
            metrics = trainer.progress_bar_metrics
            # What was measured last comes last, and would be the first to fall off a narrow terminal.
            names = sorted(metrics, key=lambda name: not name.startswith("val"))
            self._bar.set_postfix_str(_as_text({name: metrics[name] for name in names}))
        elif self._is_enabled:
            print(f"step {step:,}/{self.num_steps:,}: {_as_text(trainer.progress_bar_metrics)}", flush=True)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def write_above(text: str) -> None:
    """Writes a line to the standard error, above an open bar if there is one."""
    tqdm.write(text, file=sys.stderr)


def _as_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(
        f"{name} {value:,.0f}" if abs(value) >= 100 else f"{name} {value:.4g}" for name, value in metrics.items()
    )
