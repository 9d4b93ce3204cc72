"""The gradient noise scale of a run, from the norms of each bucket before and after its reduction."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.errors import explain
from ddp_plugin.noise_scale import (
    MIN_STEPS,
    NoiseScale,
    describe,
    estimate_noise_scale,
    squared_norm,
    unbiased_estimates,
)

__all__ = ["GradientNoiseScale"]


class GradientNoiseScale(pl.Callback):
    """Estimates how large a batch pays: the gradient noise scale ``tr(Sigma) / |G|^2``, in samples.

    The ranks' own gradients and their mean are gradients of two batch sizes, and every step has both; their norms are
    all that is measured. Estimates of single steps are averaged over a window, and the ratio of the averages is
    reported with its standard error. Logged as ``ddp/gradient_noise_scale`` and
    ``ddp/gradient_noise_scale_standard_error`` while it is resolved; at the end of ``fit`` one sentence says what it
    means for the batch that was used, and ``estimate`` holds the numbers. A checkpoint holds the window.

    What is measured is the gradient of the mean loss of a rank's samples, as it reaches the reduction: the accumulated
    one where gradients accumulate, before clipping, and without the factor of a gradient scaler. Some steps say nothing
    and are left out, and their number is said: where micro-batches differ in size, within a rank or between ranks;
    where a gradient is not finite; where something was reduced before the last micro-batch of the window (the first
    window of a static graph).

    Where it does not apply: one process has one batch size and nothing to compare, which it says once. A loss that is
    no mean over samples (a sum, a contrastive loss, a model with BatchNorm) has no per-sample gradient that this could
    be about. A lossy ``comm_hook`` adds its rounding to what counts as noise, and the sentence names it.

    Watching the buckets replaces DDP's reducer by the bit-identical ``allreduce`` hook, and costs one pass over the
    gradient before and one after the reduction.

    Args:
        every_n_steps: optimizer steps between exchanges of norms, of which each synchronises the device once.
        window_steps: most recent optimizer steps that are averaged, at least 20.
        batch_size: samples in the micro-batch of one process, where the batch does not tell.

    Attributes:
        estimate: the newest :class:`~ddp_plugin.noise_scale.NoiseScale`, the same on all ranks; ``None`` before the
            first exchange and on one process.
        num_skipped_steps: optimizer steps of this ``fit`` that were left out.

    Raises:
        ValueError: a number out of range; at setup, manual optimization; in the first step, a batch that does not tell
            its size.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.

    Collectives:
        One asynchronous all-reduce of six numbers per step on the control group, every ``every_n_steps`` optimizer
        steps and at the end of training, on all ranks; none on the gradient's path.
    """

    def __init__(self, every_n_steps: int = 50, window_steps: int = 1000, batch_size: int | None = None) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("window_steps", window_steps, MIN_STEPS),
            ("batch_size", 1 if batch_size is None else batch_size, 1),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(explain(f"{name} to be an integer of at least {least}", repr(value), "Raise it"))
        self.every_n_steps = every_n_steps
        self.window_steps = window_steps
        self.batch_size = batch_size
        self.estimate: NoiseScale | None = None
        self.num_skipped_steps = 0
        self._norms = _BucketNorms()
        self._window = _Window()
        self._group: dist.ProcessGroup | None = None
        self._steps: deque[tuple[float, float]] = deque(maxlen=window_steps)  # (tr(Sigma), |G|^2) of one step each
        self._rows: list[tuple[Tensor, list[float]]] = []  # on the device; on the host: see _Window.summary
        self._in_flight: tuple[dist.Work, Tensor] | None = None
        self._logged: dict[str, Tensor] = {}
        self._step_batch_size: int | None = None

    # -------------------------------------------------------------------------------------------------------- stages

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the buckets."""
        if stage != "fit":
            return
        self._forget()
        self.estimate, self.num_skipped_steps, self._step_batch_size = None, 0, None
        self._steps.clear()
        if trainer.world_size == 1:
            rank_zero_info(
                "GradientNoiseScale has nothing to estimate on one process: it compares the gradients of several."
            )
            return
        group = control_group_of(self, trainer)
        if not pl_module.automatic_optimization:
            raise ValueError(
                explain(
                    "automatic optimization beside GradientNoiseScale, which has to know what one step's batch is",
                    f"{type(pl_module).__name__} with manual optimization",
                    "Leave GradientNoiseScale out, or use the functions of ddp_plugin.noise_scale in the step",
                )
            )
        strategy: Any = trainer.strategy
        if _compat.averages_models(strategy):
            raise ValueError(
                explain(
                    "gradients that are reduced in every step, whose norms GradientNoiseScale compares",
                    f"{type(strategy).__name__} with a communication hook that averages weights in place of gradients",
                    "Leave one of the two out",
                )
            )
        strategy.add_bucket_observer(self._norms)
        self._norms.is_listening = True
        self._group = group

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Stops watching; what was not exchanged by then is dropped."""
        self._forget()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchanges what is left, and says on rank 0 what the estimate means."""
        if self._group is None:
            return
        self._exchange(trainer)
        self._collect(trainer)
        if self.estimate is None:
            return
        if self._step_batch_size is None:
            sentence = "The gradient noise scale is not resolved: no step could be used."
        else:
            sentence = describe(self.estimate, self._step_batch_size)
        if self.num_skipped_steps:
            sentence += f" {self.num_skipped_steps} steps were left out: unequal micro-batches or gradients that are"
            sentence += " not finite or were reduced in parts."
        hook = getattr(trainer.strategy, "comm_hook", None)
        if hook is not None and not hook.is_exact:
            sentence += f" The rounding of comm_hook={hook.name!r} counts as noise."
        rank_zero_info(sentence)

    def state_dict(self) -> dict[str, Any]:
        """Returns the estimates of the window's steps, a float64 tensor of shape ``(num_steps, 2)``."""
        return {"steps": torch.tensor(list(self._steps), dtype=torch.float64).reshape(-1, 2)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on with the window of the checkpoint."""
        self._steps.extend((trace, signal) for trace, signal in state_dict["steps"].tolist())

    # --------------------------------------------------------------------------------------------------------- steps

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Counts the samples of a micro-batch."""
        if self._group is None:
            return
        if self._window.is_done:
            self._window = _Window()
        elif self._norms.local:
            self._window.is_whole = False  # reduced before its end: what comes last is no rank's own gradient
        self._norms.clear()
        self._window.sizes.append(self._size_of(batch))

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Notes the factor of a gradient scaler as a scalar on the device, without reading it."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if self._group is not None and scaler is not None:
            self._window.loss_scale = scaler.scale(torch.ones((), device=loss.device))

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Takes the step's norms; the reduction is complete."""
        if self._group is None:
            return
        window = self._window
        squared_norms = self._norms.totals(pl_module.device)
        if window.loss_scale is not None:
            squared_norms = squared_norms / window.loss_scale.double().square()
        self._rows.append((squared_norms, window.summary(has_norms=bool(self._norms.mean))))
        window.is_done = True
        self._norms.clear()
        if len(self._rows) >= self.every_n_steps:
            self._exchange(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the newest estimate; the values lie on the device already."""
        for name, value in self._logged.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1)

    # ------------------------------------------------------------------------------------------------------ exchange

    def _exchange(self, trainer: pl.Trainer) -> None:
        """Takes in the exchange before this one, and starts the next; all ranks have equally many rows."""
        self._collect(trainer)
        if not self._rows:
            return
        on_device, on_host = zip(*self._rows, strict=True)
        rows = torch.cat([torch.stack(on_device).cpu(), torch.tensor(on_host, dtype=torch.float64)], dim=1)
        self._rows = []
        work = dist.all_reduce(rows, group=self._group, async_op=True)
        assert work is not None
        self._in_flight = (work, rows)

    def _collect(self, trainer: pl.Trainer) -> None:
        if self._in_flight is None:
            return
        work, rows = self._in_flight
        self._in_flight = None
        work.wait()
        world_size = trainer.world_size
        local, mean, size_sum, size_square_sum, num_sizes, num_usable = rows.unbind(1)
        # Sizes are integers, so this holds exactly if and only if they are all the same.
        is_equal = size_square_sum * num_sizes == size_sum.square()
        usable = (num_usable == world_size) & is_equal & local.isfinite() & mean.isfinite()
        self.num_skipped_steps += int((~usable).sum())
        if usable.any():
            rank_sizes = size_sum[usable] / world_size
            pairs = unbiased_estimates(local[usable] / world_size, mean[usable] / world_size, rank_sizes, world_size)
            self._steps.extend(zip(*(values.tolist() for values in pairs), strict=True))
            self._step_batch_size = round(float(size_sum[usable][-1]))
        traces, signals = torch.tensor(list(self._steps), dtype=torch.float64).reshape(-1, 2).unbind(1)
        self.estimate = estimate_noise_scale(traces, signals)
        values = {"": self.estimate.noise_scale, "_standard_error": self.estimate.standard_error}
        self._logged = {
            f"ddp/gradient_noise_scale{ending}": torch.tensor(value, device=trainer.strategy.root_device)
            for ending, value in values.items()
            if value is not None
        }

    def _size_of(self, batch: Any) -> int:
        if self.batch_size is not None:
            return self.batch_size
        try:
            return extract_batch_size(batch)
        except (MisconfigurationException, RecursionError) as error:
            raise ValueError(
                explain(
                    "a batch with a tensor that tells its size",
                    type(batch).__name__,
                    "Give GradientNoiseScale(batch_size=...) the number of samples in one process's micro-batch",
                )
            ) from error

    def _forget(self) -> None:
        self._norms.is_listening = False
        self._norms.clear()
        self._window, self._group, self._rows, self._in_flight, self._logged = _Window(), None, [], None, {}


@dataclass
class _Window:
    """The micro-batches of one optimizer step, on this rank."""

    sizes: list[int] = field(default_factory=list)
    is_whole: bool = True
    is_done: bool = False
    loss_scale: Tensor | None = None

    def summary(self, has_norms: bool) -> list[float]:
        """Returns what sums over ranks tell of the sizes: sum, sum of squares, number; and 1 for a usable step."""
        squares = sum(size * size for size in self.sizes)
        return [float(sum(self.sizes)), float(squares), float(len(self.sizes)), float(self.is_whole and has_norms)]


class _BucketNorms:
    """Watches the buckets of one backward: a scalar for each, on the device, before and after the reduction.

    Buckets are kept apart until the backward is over: on an accelerator they complete on streams of their own, which
    only the end of the backward joins.
    """

    def __init__(self) -> None:
        self.is_listening = False
        self.local: dict[int, Tensor] = {}
        self.mean: dict[int, Tensor] = {}

    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        if self.is_listening:
            self.local[bucket_index] = squared_norm(gradient)

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        if self.is_listening:
            self.mean[bucket_index] = squared_norm(gradient)

    def totals(self, device: torch.device) -> Tensor:
        """Returns the squared norms of the local and of the mean gradient, shape ``(2,)``, float64."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([sum(norms.values(), start=zero) for norms in (self.local, self.mean)])

    def clear(self) -> None:
        self.local, self.mean = {}, {}
