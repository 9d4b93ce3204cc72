"""The gradient of the mean over all samples or tokens of an optimizer step, however they are spread."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.data.loaders import walk
from ddp_plugin.errors import explain
from ddp_plugin.weighting import (
    GradientWindow,
    Weight,
    batch_size_of,
    checked_weight,
    factor_of,
    nominal_weight,
    without_weightless,
)

__all__ = ["GlobalMeanLoss", "log_weight", "normalize_gradients"]


class GlobalMeanLoss(Callback):
    """Makes each optimizer step use the gradient of the mean over all weighted units of that step.

    All means: all ranks, all accumulated micro-batches, a short last accumulation window, a last batch of another size.
    ``training_step`` returns the mean loss over its own batch, as it always did; the weight says over how many units
    that mean is. DDP and Lightning take the plain mean of these means, in which a token counts more in a short batch
    than in a long one, and a short last window counts less than it should.

    The weight of a batch is what the step says by :func:`log_weight`, if it says so; else ``weight(batch)``; else the
    number of samples, the first dimension of the batch's tensors. (A list with one tensor per sample has another first
    dimension: pass ``weight`` there.) A number or a CPU tensor is best; a tensor on a device is not read, and costs one
    small kernel per parameter and backward, to keep the NaN of an empty batch out.

    A micro-batch of weight zero contributes exactly nothing, whatever its loss, NaN included. If a whole step's weight
    is zero, its gradients are zeros, and one warning says so. A NaN loss with a weight stays NaN.

    The gradients are multiplied once per step, after mixed precision took its scale out and before clipping. Until then
    they are sums in units of about the first batch's weight: that is what hooks on parameters see, and callbacks that
    look at gradients before the step and stand earlier in the Trainer's list.

    In manual optimization every backward goes through ``manual_backward``, and each optimizer's gradients are divided
    by the weight of the backwards that reached them since they were zero. Whoever clips by hand calls
    :func:`normalize_gradients` first.

    Terms of the loss that are not means over the batch: what depends on parameters alone (a regulariser) comes out as
    it is, because the weighted mean of equal numbers is that number. What depends on the batch (an auxiliary loss of
    experts) becomes the weighted mean over batches. A plain mean over batches beside a weighted one is not possible in
    one backward: it would need the total weight before it is known. ``weight=lambda batch: 1`` gives the plain mean for
    the whole loss, with short windows right.

    Args:
        weight: function of the batch, as ``training_step`` gets it, that returns over how many units the loss is a
            mean: a number or a tensor of one element; called once per batch.

    Raises:
        TypeError: at setup, several processes under another strategy, or a strategy that accumulates by itself.
        ValueError: at setup, a strategy that averages weights in place of gradients; later, a weight that is negative,
            NaN or infinite, a batch whose size nobody can tell, ``log_weight`` in some steps only, a backward past
            ``manual_backward``, or a backward onto gradients that were used already.

    Collectives:
        Per optimizer step one all-reduce of two float64 numbers on the gradients' group. At the first backward one
        all-reduce of a number on the control group, which repeats in the next step while all weights are zero. On all
        ranks.
    """

    def __init__(self, weight: Callable[[Any], Any] | None = None) -> None:
        if weight is not None and not callable(weight):
            raise TypeError(explain("weight to be a function of the batch", repr(weight), "Pass a function or nothing"))
        self.weight = weight
        self._forget()

    def _forget(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._trainer: pl.Trainer | None = None
        self._windows: dict[Optimizer, GradientWindow] = {}
        self._nominal: float | None = None
        self._is_agreed = False
        self._ghosts: list[Callable[[int], object]] = []
        self._batch_weight: Weight | ValueError = 0.0
        self._is_ghost = False
        self._logged: Weight | None = None
        self._is_logged_used = False
        self._logs: bool | None = None  # whether this run's steps call log_weight
        self._factor: Weight | None = None  # of the backward that runs
        self._handles: list[RemovableHandle] = []  # for the backward that runs
        self._watched: dict[tuple[Optimizer, Tensor], RemovableHandle] = {}
        self._reached: set[Optimizer] = set()
        self._unread: list[tuple[Any, Tensor]] = []  # totals on their way to the host
        self._has_warned = False

    # --------------------------------------------------------------------------------------------------- one fit

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses strategies under which a gradient is not the mean over ranks of what backward gave."""
        if stage != "fit":
            return
        self._release()
        strategy: Any = trainer.strategy
        name = type(strategy).__name__
        group = control_group_of(self, trainer)
        if strategy.handles_gradient_accumulation:
            got = f"{name}, which accumulates by itself"
            raise TypeError(explain("a strategy whose gradients Lightning accumulates", got, "Use CustomDDPStrategy"))
        if _compat.averages_models(strategy):
            got = f"{name} with a communication hook that averages weights in place of gradients"
            raise ValueError(explain("gradients that are means over all ranks", got, "Leave one of the two out"))
        self._group, self._trainer = group, trainer

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Does so for a run that is resumed inside an epoch, whose start Lightning does not announce."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Finds the loaders that may say that a batch must not count."""
        found = [item for leaf in _compat.loaders_of(trainer.fit_loop)[0] for item in walk(leaf)]
        tells = [getattr(item, "is_ghost_train_batch", None) for item in found]
        self._ghosts = [tell for tell in tells if callable(tell)]

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Weighs the batch before the step can change it."""
        index = trainer.fit_loop.epoch_loop.batch_idx
        self._is_ghost = any(tells(index) is True for tells in self._ghosts)
        self._logged = None
        if self._is_ghost or self._logs:
            return  # the weight is known, or the step will tell
        if _compat.takes_iterator(trainer.fit_loop):
            change = "Call log_weight in training_step"
            self._batch_weight = ValueError(explain("a step that takes its batch", "one with dataloader_iter", change))
        elif self.weight is not None:
            self._batch_weight = checked_weight(self.weight(batch))
        else:
            try:
                self._batch_weight = float(batch_size_of(batch))
            except ValueError as error:
                self._batch_weight = error  # unless the step says a weight itself

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Looks at the totals that were not looked at yet."""
        self._look_at_totals(wait=True)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes all hooks out."""
        self._release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Takes all hooks out, in the middle of a step as well."""
        self._release()

    def _release(self) -> None:
        for handle in [*self._handles, *self._watched.values()]:
            handle.remove()
        self._forget()

    # ---------------------------------------------------------------------------------------------- one backward

    def log_weight(self, num_units: float | Tensor) -> None:
        """See :func:`log_weight`.

        Args:
            num_units: over how many units the loss of the next backward is a mean.

        Collectives:
            None.
        """
        weight = checked_weight(num_units)
        if self._logged is None or self._is_logged_used:
            self._logged, self._is_logged_used = weight, False
        else:
            self._logged = self._logged + weight

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Lets the gradient enter times its weight."""
        if self._trainer is None or not trainer.training:
            return
        weight = self._take_weight()
        factor = self._factor = factor_of(weight, self._agree_on_nominal(weight), loss)
        for optimizer in trainer.optimizers:
            window = self._windows.setdefault(optimizer, GradientWindow())
            if not pl_module.automatic_optimization:  # else on_before_zero_grad tells
                window.look_for_zeroing(_gradients_of(optimizer))
        self._watch(trainer.optimizers)
        if loss.requires_grad:
            self._handles.append(_on_gradient(loss, lambda gradient: gradient * factor))
        if isinstance(factor, Tensor) or factor == 0:
            # Zero times the gradient of an empty mean is NaN, so zeros have to be put in where the gradients arrive.
            for parameter in _parameters_of(trainer.optimizers):
                self._handles.append(_on_gradient(parameter, lambda gradient: without_weightless(gradient, factor)))

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts the weight for the optimizers that the backward reached."""
        if self._factor is None:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for optimizer in trainer.optimizers if len(trainer.optimizers) == 1 else self._reached:
            self._windows[optimizer].add(self._factor)
        self._reached.clear()
        self._factor = None
        if not pl_module.automatic_optimization:
            for optimizer, window in self._windows.items():
                window.remember(_gradients_of(optimizer))

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        """Starts a new sum; in manual optimization Lightning does not tell."""
        if optimizer in self._windows:
            self._windows[optimizer].restart()

    def _take_weight(self) -> Weight:
        if self._is_ghost:
            return 0.0
        logs = self._logged is not None
        if self._logs is None:
            self._logs = logs
        elif self._logs != logs:
            now, before = ("with", "without") if logs else ("without", "with")
            got = f"a backward {now} it, after one {before} it"
            change = "Call log_weight in every training_step, also with zero, before the first backward"
            raise ValueError(explain("log_weight for every batch or for none", got, change))
        if self._logged is not None:
            self._is_logged_used = True
            return self._logged
        if isinstance(self._batch_weight, ValueError):
            raise self._batch_weight
        return self._batch_weight

    def _agree_on_nominal(self, weight: Weight) -> float:
        if self._nominal is None:
            value = float(weight)  # the run's one wait for the device
            largest = torch.tensor(value if 0 <= value < float("inf") else float("inf"), dtype=torch.float64)
            if self._group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            checked_weight(largest)
            self._nominal = nominal_weight(largest.item())
            self._is_agreed = largest.item() > 0
        return self._nominal

    def _watch(self, optimizers: list[Optimizer]) -> None:
        """With several optimizers, notes which of them a backward reaches."""
        if len(optimizers) == 1:
            return
        for optimizer in optimizers:
            for parameter in _parameters_of([optimizer]):
                if (optimizer, parameter) not in self._watched:
                    self._watched[optimizer, parameter] = self._note_when_reached(optimizer, parameter)

    def _note_when_reached(self, optimizer: Optimizer, parameter: Tensor) -> RemovableHandle:
        reached = self._reached
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: reached.add(optimizer)
        )
        return handle

    # ------------------------------------------------------------------------------------------------- one step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Makes the gradients those of the mean, unless they are already."""
        self.normalize(optimizer)

    def normalize(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """See :func:`normalize_gradients`.

        Args:
            optimizer: one of the Trainer's, as ``self.optimizers()`` gives it or the bare one.

        Raises:
            ValueError: see the class.

        Collectives:
            One all-reduce of two float64 numbers on the gradients' group, on all ranks, unless the gradients are
            normalised already.
        """
        bare: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._trainer is None or bare not in self._trainer.optimizers:
            got = f"a {type(bare).__name__} that is none, or no fit"
            raise ValueError(explain("an optimizer of the Trainer that fits now", got, "Pass one of self.optimizers()"))
        window, gradients = self._windows.setdefault(bare, GradientWindow()), _gradients_of(bare)
        if window.is_normalized:
            return
        self._refuse_what_is_no_sum(window, gradients)
        strategy: Any = self._trainer.strategy
        total, num_ranks = window.total(strategy.root_device), 1
        if self._group is not None:
            gradients_group = getattr(strategy.model, "process_group", None)
            num_ranks = dist.get_world_size(gradients_group)
            dist.all_reduce(total, group=gradients_group)
        window.close(gradients, total[0], num_ranks * self._trainer.accumulate_grad_batches)
        if not self._trainer.lightning_module.automatic_optimization:
            window.remember(gradients)
        if not self._is_agreed:
            self._nominal = None
        self._keep_for_later(total)
        self._look_at_totals(wait=False)

    def _refuse_what_is_no_sum(self, window: GradientWindow, gradients: list[Tensor]) -> None:
        if window.is_mixed:
            raise ValueError(
                explain(
                    "gradients to be zero before the first backward after a step",
                    "a backward that added to gradients which were normalised and used already",
                    "Call zero_grad() between the steps; LBFGS works without accumulate_grad_batches only",
                )
            )
        if gradients and not window.ever_used:
            raise ValueError(
                explain(
                    "each backward to go through self.manual_backward(loss)",
                    "gradients that came another way, and have no weight",
                    "Replace loss.backward() by self.manual_backward(loss)",
                )
            )

    def _keep_for_later(self, total: Tensor) -> None:
        """A device's total is looked at in a later step, when it has long arrived: nothing waits for it."""
        if total.device.type == "cuda":
            copy, arrived = total.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            self._unread.append((arrived, copy))
        else:
            self._unread.append((None, total.cpu()))

    def _look_at_totals(self, *, wait: bool) -> None:
        while self._unread:
            arrived, copy = self._unread[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            del self._unread[0]
            weights, num_backwards = copy.tolist()
            checked_weight(weights)
            if weights == 0 and num_backwards > 0 and not self._has_warned:
                self._has_warned = True
                rank_zero_warn(
                    "GlobalMeanLoss: all batches of an optimizer step had weight zero on all ranks, so its gradients "
                    "are zero. This is said once."
                )


def log_weight(module: pl.LightningModule, num_units: float | Tensor) -> None:
    """Tells :class:`GlobalMeanLoss` over how many units the next loss is a mean; without that callback, does nothing.

    Called several times before one backward, the numbers add up. Several backwards of one ``training_step`` without
    another call use the same number. Outside of training it does nothing, so training and validation may share a step.

    Args:
        module: the LightningModule, ``self``.
        num_units: samples, tokens, …: a number, or a tensor of one element on any device, which is not read there.

    Raises:
        TypeError: not one number.
        ValueError: negative, NaN or infinite, if the host can see it.

    Collectives:
        None.
    """
    trainer = _trainer_of(module)
    for callback in _callbacks_of(trainer):
        if trainer.training:
            callback.log_weight(num_units)


def normalize_gradients(module: pl.LightningModule, optimizer: Optimizer | LightningOptimizer) -> None:
    """Makes an optimizer's gradients those of the mean now, for manual optimization that clips or looks at them.

    ``optimizer.step()`` then leaves them as they are, and so does calling this again. Without :class:`GlobalMeanLoss`
    it does nothing. Under a gradient scaler the gradients still carry its scale, as always before the step.

    Args:
        module: the LightningModule, ``self``.
        optimizer: one of ``self.optimizers()``.

    Raises:
        ValueError: see :class:`GlobalMeanLoss`.

    Collectives:
        One all-reduce of two float64 numbers on the gradients' group, on all ranks.
    """
    for callback in _callbacks_of(_trainer_of(module)):
        callback.normalize(optimizer)


def _trainer_of(module: pl.LightningModule) -> Any:
    try:
        return module.trainer
    except (AttributeError, RuntimeError):  # no Trainer is attached; or a plain module
        return None


def _callbacks_of(trainer: Any) -> list[GlobalMeanLoss]:
    return [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, GlobalMeanLoss)]


def _on_gradient(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> RemovableHandle:
    handle: RemovableHandle = tensor.register_hook(change)  # type: ignore[no-untyped-call]
    return handle


def _parameters_of(optimizers: list[Optimizer]) -> list[Tensor]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys(item for group in groups for item in group["params"] if item.requires_grad))


def _gradients_of(optimizer: Optimizer) -> list[Tensor]:
    return [item.grad for group in optimizer.param_groups for item in group["params"] if item.grad is not None]
