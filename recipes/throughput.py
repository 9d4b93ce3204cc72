"""How fast it goes: units per second, model FLOP utilisation and peak memory, without slowing the step down."""

import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from plan import compute_dtype
from torch import Tensor

from ddp_plugin.errors import explain

__all__ = ["Throughput", "ThroughputReport", "measured_peak_flops_per_s", "peak_memory_bytes"]


@dataclass(frozen=True)
class ThroughputReport:
    """Means over the measured part of a run; validation and the first steps are not in it, writing checkpoints is.

    Attributes:
        unit: what is counted, in the plural.
        units_per_s: units per second over all processes.
        model_flops_per_s: floating-point operations per second over all processes, of the model's own arithmetic.
        utilisation_ratio: the same as a part of the peak of all processes.
        peak_flops_per_s: that peak, of one process.
        is_peak_measured: whether it was measured here instead of taken from a data sheet.
        peak_memory_bytes: of this process, read while it trains: the allocator's peak on CUDA, else the resident set's.
        step_s: seconds per micro-batch.
    """

    unit: str
    units_per_s: float
    model_flops_per_s: float
    utilisation_ratio: float
    peak_flops_per_s: float
    is_peak_measured: bool
    peak_memory_bytes: int
    step_s: float

    def __str__(self) -> str:
        source = "measured by a matrix product" if self.is_peak_measured else "as stated"
        return (
            f"{self.units_per_s:,.0f} {self.unit}/s, {self.model_flops_per_s / 1e9:,.1f} model GFLOP/s, "
            f"{self.utilisation_ratio:.1%} of the peak ({self.peak_flops_per_s / 1e9:,.1f} GFLOP/s per process, "
            f"{source}), "
            f"{self.step_s * 1e3:,.1f} ms per micro-batch, peak memory {self.peak_memory_bytes / 2**20:,.0f} MiB"
        )


class Throughput(Callback):
    """Measures training throughput and logs it.

    Logged every ``trainer.log_every_n_steps`` steps, over the steps since the last time: ``<unit>_per_s`` (in the
    progress bar), ``model_flop_utilisation`` and ``peak_memory_mb`` of rank 0. The time spent in validation is taken
    out. The device is only waited for at the end of those steps, so nothing is added to the others.

    Model FLOP utilisation counts the arithmetic of the model's definition, forward and twice that for the backward,
    never recomputation (Chowdhery et al. 2022, "PaLM", appendix B).

    Args:
        units_per_sample: tokens or images in one sample of the batch's first dimension.
        unit: what is counted, in the plural.
        flops_per_unit: floating-point operations for one unit, forward and backward.
        peak_flops_per_s: peak of one device; ``None`` measures it at the start of the fit by
            :func:`measured_peak_flops_per_s`, in all processes at the same time.
        num_skipped: first micro-batches left out of :meth:`report`: compilation, warm caches, DDP's own first step.

    Raises:
        ValueError: a count that is not positive.

    Collectives:
        None: all processes are taken to see as many samples as this one.
    """

    def __init__(
        self,
        units_per_sample: int = 1,
        unit: str = "samples",
        flops_per_unit: float = 0.0,
        peak_flops_per_s: float | None = None,
        num_skipped: int = 3,
    ) -> None:
        super().__init__()
        if units_per_sample < 1 or num_skipped < 0 or (peak_flops_per_s is not None and peak_flops_per_s <= 0):
            raise ValueError(
                explain(
                    "units_per_sample >= 1, num_skipped >= 0 and peak_flops_per_s > 0",
                    f"{units_per_sample}, {num_skipped} and {peak_flops_per_s}",
                    "Correct the number",
                )
            )
        self.units_per_sample = units_per_sample
        self.unit = unit
        self.flops_per_unit = flops_per_unit
        self.peak_flops_per_s = peak_flops_per_s
        self.num_skipped = num_skipped
        self._num_seen = 0
        self._clock = _Clock()
        self._last: tuple[int, int, float] = (0, 0, 0.0)
        self._world_size = 1
        self._step = 0
        self._device = torch.device("cpu")
        self._peak_flops_per_s = 0.0
        self._peak_memory_bytes = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Starts anew for this fit."""
        self._num_seen, self._clock, self._last = 0, _Clock(), (0, 0, 0.0)
        self._world_size, self._step = trainer.world_size, trainer.global_step
        self._device = pl_module.device
        self._peak_flops_per_s = self.peak_flops_per_s or measured_peak_flops_per_s(
            self._device, compute_dtype(str(trainer.precision))
        )
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch; waits for the device and logs after the steps where the Trainer logs."""
        self._num_seen += 1
        is_step_done, self._step = trainer.global_step != self._step, trainer.global_step
        if self._num_seen <= self.num_skipped:
            return
        if self._num_seen == self.num_skipped + 1:  # this batch ends the skipped part and starts the measured one
            _wait_for(self._device)
            self._clock.start()
            return
        self._clock.count(num_samples(batch))
        is_last = trainer.global_step >= trainer.max_steps > 0
        log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if not is_step_done or (trainer.global_step % log_every_n_steps and not is_last):
            return
        _wait_for(self._device)
        self._clock.read()
        self._peak_memory_bytes = peak_memory_bytes(self._device)
        now = self._clock.num_samples, self._clock.num_batches, self._clock.elapsed_s
        before, self._last = self._last, now
        if now[2] > before[2]:
            window = self._report(now[0] - before[0], now[1] - before[1], now[2] - before[2])
            pl_module.log(f"{self.unit}_per_s", window.units_per_s, prog_bar=True, rank_zero_only=True)
            pl_module.log("peak_memory_mb", window.peak_memory_bytes / 2**20, rank_zero_only=True)
            pl_module.log("model_flop_utilisation", window.utilisation_ratio, rank_zero_only=True)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock."""
        if self._clock.is_running:
            _wait_for(self._device)
            self._clock.pause()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets the clock run again."""
        if self._clock.is_paused:
            _wait_for(self._device)
            self._clock.start()

    def report(self) -> ThroughputReport | None:
        """Returns the means over all measured steps, or ``None`` where there were too few to measure."""
        return self._report(*self._last) if self._last[2] > 0 else None

    def _report(self, num_local: int, num_batches: int, elapsed_s: float) -> ThroughputReport:
        units_per_s = num_local * self.units_per_sample * self._world_size / elapsed_s
        flops_per_s = units_per_s * self.flops_per_unit
        return ThroughputReport(
            unit=self.unit,
            units_per_s=units_per_s,
            model_flops_per_s=flops_per_s,
            utilisation_ratio=flops_per_s / (self._peak_flops_per_s * self._world_size),
            peak_flops_per_s=self._peak_flops_per_s,
            is_peak_measured=self.peak_flops_per_s is None,
            peak_memory_bytes=self._peak_memory_bytes,
            step_s=elapsed_s / num_batches,
        )


class _Clock:
    """Sums up the time between start and pause, and what was done in it."""

    def __init__(self) -> None:
        self.num_samples = self.num_batches = 0
        self.elapsed_s = 0.0
        self.is_paused = False
        self._since: float | None = None

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def start(self) -> None:
        self._since, self.is_paused = time.perf_counter(), False

    def count(self, num_samples: int) -> None:
        self.num_samples += num_samples
        self.num_batches += 1

    def read(self) -> None:
        if self._since is not None:
            now = time.perf_counter()
            self.elapsed_s, self._since = self.elapsed_s + now - self._since, now

    def pause(self) -> None:
        self.read()
        self._since, self.is_paused = None, True


def num_samples(batch: Any) -> int:
    """Returns the first dimension of the first tensor in a batch of any structure, or 0 without one."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    children: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        children = batch.values()
    elif isinstance(batch, (list, tuple)):
        children = batch
    return next((count for child in children if (count := num_samples(child))), 0)


def peak_memory_bytes(device: torch.device) -> int:
    """Returns the peak of this process: what torch allocated on a CUDA device, else the resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measured_peak_flops_per_s(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, num_repeats: int = 10
) -> float:
    """Measures what this process reaches in a large matrix product: the peak where no data sheet tells one.

    Args:
        device: where to multiply.
        dtype: of the matrices.
        num_repeats: products; the fastest counts.

    Returns:
        Floating-point operations per second.

    Collectives:
        None.
    """
    device = torch.device(device)
    size = 4096 if device.type == "cuda" else 512
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones_like(left)
    fastest_s = float("inf")
    for _ in range(num_repeats):
        _wait_for(device)
        begin = time.perf_counter()
        left @ right
        _wait_for(device)
        fastest_s = min(fastest_s, time.perf_counter() - begin)
    return 2.0 * size**3 / fastest_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
