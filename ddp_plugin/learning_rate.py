"""Learning rates for large batches: the effective batch, how the rate grows with it, and the curve over the steps.

First plain functions on ints and floats, then those that carry a ratio into torch's objects. A *ratio* multiplies a
learning rate; a *step* is an optimizer step, counted from 0: the ratio at step ``s`` is the one that the optimizer's
step number ``s + 1`` uses.
"""

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ddp_plugin.errors import explain

__all__ = [
    "RULES",
    "SCHEDULES",
    "EffectiveBatch",
    "RateSchedule",
    "check_scheduler",
    "num_accumulated_for",
    "scale_adam",
    "scale_optimizer",
    "scale_ratio",
    "scale_scheduler",
]

RULES = ("none", "linear", "sqrt")
"""How a learning rate may grow with the batch, by name."""

SCHEDULES = ("constant", "cosine")
"""What may follow the warm-up, by name."""


@dataclass(frozen=True)
class EffectiveBatch:
    """How many samples one optimizer step sees: per process x processes x accumulated micro-batches.

    Attributes:
        batch_size: samples in the micro-batch of one process.
        num_processes: world size, over all nodes.
        num_accumulated: micro-batches between two optimizer steps.

    Raises:
        ValueError: a factor below 1.
        TypeError: a factor that is no integer.
    """

    batch_size: int
    num_processes: int = 1
    num_accumulated: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "num_processes", "num_accumulated"):
            require_count(name, getattr(self, name))

    @property
    def total(self) -> int:
        """The effective batch size, in samples."""
        return self.batch_size * self.num_processes * self.num_accumulated

    def __str__(self) -> str:
        return (
            f"{self.batch_size} per process x {self.num_processes} processes x {self.num_accumulated} accumulation "
            f"= {self.total}"
        )


def num_accumulated_for(total: int, batch_size: int, num_processes: int) -> int:
    """Returns how many micro-batches to accumulate for an effective batch of ``total`` samples.

    Raises:
        ValueError: ``total`` is not a multiple of ``batch_size * num_processes``, or a factor is below 1.

    Collectives:
        None.
    """
    require_count("total", total)
    at_once = EffectiveBatch(batch_size, num_processes).total
    if total % at_once:
        raise ValueError(
            explain(
                f"an effective batch that is a multiple of {batch_size} per process x {num_processes} processes",
                str(total),
                f"Choose {' or '.join(str(n * at_once) for n in (total // at_once, total // at_once + 1) if n)}",
            )
        )
    return total // at_once


def scale_ratio(rule: str, batch_ratio: float) -> float:
    """Returns by how much the learning rate grows when the batch grows by ``batch_ratio``.

    ``"linear"`` is for SGD (Goyal et al., "Accurate, Large Minibatch SGD", 2017, arXiv 1706.02677): k small steps go as
    far as one step with k times the rate. ``"sqrt"`` is for Adam and its kin, whose steps are normalised (Malladi et
    al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms", 2022, arXiv 2205.10287).

    Args:
        rule: one of :data:`RULES`.
        batch_ratio: effective batch over base batch, above 0.

    Raises:
        ValueError: another rule, or a ratio that is not above 0.

    Collectives:
        None.
    """
    if not batch_ratio > 0:
        raise ValueError(explain("a batch ratio above 0", repr(batch_ratio), "Give both batches in samples"))
    if rule == "none":
        return 1.0
    if rule == "linear":
        return float(batch_ratio)
    if rule == "sqrt":
        return math.sqrt(batch_ratio)
    raise ValueError(explain(f"rule to be one of {RULES}", repr(rule), "Choose one of these"))


def scale_adam(betas: tuple[float, float], eps: float, batch_ratio: float) -> tuple[tuple[float, float], float]:
    """Returns Adam's betas and eps for a batch that is ``batch_ratio`` times larger, beside the square-root rule.

    ``beta -> 1 - k * (1 - beta)`` keeps the averages' memory the same in samples; ``eps -> eps / sqrt(k)`` follows the
    gradient's noise. Source: Malladi et al. 2022, arXiv 2205.10287, definition 5.2.

    Raises:
        ValueError: a beta would fall to 0 or below, or the ratio is not above 0.

    Collectives:
        None.
    """
    root = scale_ratio("sqrt", batch_ratio)
    scaled = (1 - batch_ratio * (1 - betas[0]), 1 - batch_ratio * (1 - betas[1]))
    if min(scaled) <= 0:
        raise ValueError(
            explain(
                "Adam's betas to stay above 0 after scaling",
                f"{scaled} from {betas} for a batch that is {batch_ratio:g} times the base batch",
                f"Keep the ratio below {1 / (1 - min(betas)):g}, raise the betas, or scale the rate alone",
            )
        )
    return scaled, eps / root


@dataclass
class RateSchedule:
    """The curve: a linear warm-up to 1, then a constant rate or half a cosine down to ``final_ratio``.

    Called with a step it returns the ratio of the peak rate. With ``w = warmup_steps``, ``T = total_steps``:

    =========  ==================================================================
    step 0     ``start_ratio`` (1 without a warm-up)
    ``w / 2``  halfway between ``start_ratio`` and 1
    ``w``      1
    ``T``      ``final_ratio`` with ``"cosine"``, 1 with ``"constant"``; also after
    =========  ==================================================================

    An object of numbers and strings, so that a ``LambdaLR`` keeps it in its ``state_dict``. Source of the cosine:
    Loshchilov and Hutter, "SGDR", 2017, arXiv 1608.03983, without restarts.

    Attributes:
        schedule: one of :data:`SCHEDULES`.
        warmup_steps: optimizer steps of the warm-up.
        total_steps: optimizer steps at whose end the cosine is down; not used by ``"constant"``.
        start_ratio: where the warm-up starts.
        final_ratio: where the cosine ends.
    """

    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    start_ratio: float = 0.0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(explain(f"schedule to be one of {SCHEDULES}", repr(self.schedule), "Choose one of these"))
        if self.warmup_steps < 0:
            raise ValueError(explain("warmup_steps of at least 0", repr(self.warmup_steps), "Leave it out for none"))
        for name in ("start_ratio", "final_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    explain(f"{name} between 0 and 1", repr(getattr(self, name)), "Give a part of the peak rate")
                )
        if self.schedule == "cosine" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                explain(
                    "a cosine schedule with more steps than its warm-up",
                    f"total_steps={self.total_steps} and warmup_steps={self.warmup_steps}",
                    "Give more total_steps or fewer warmup_steps",
                )
            )

    def __call__(self, step: int) -> float:
        """Returns the ratio at an optimizer step, counted from 0.

        Collectives:
            None.
        """
        if step < self.warmup_steps:
            return self.start_ratio + (1 - self.start_ratio) * step / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        assert self.total_steps is not None
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.final_ratio + (1 - self.final_ratio) * (1 + math.cos(math.pi * progress)) / 2


def require_count(name: str, value: object) -> None:
    """Refuses whatever is not an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(explain(f"{name} to be an integer", repr(value), "Give a whole number"))
    if value < 1:
        raise ValueError(explain(f"{name} to be at least 1", repr(value), "Give a positive number"))


# ----------------------------------------------------------------------------------------------------- torch's objects

_RATES_OF_A_GROUP = ("lr", "initial_lr", "max_lr", "min_lr")
_RATES_OF_A_SCHEDULER: dict[type[LRScheduler], tuple[str, ...]] = {
    lr_scheduler.LambdaLR: (),
    lr_scheduler.MultiplicativeLR: (),
    lr_scheduler.StepLR: (),
    lr_scheduler.MultiStepLR: (),
    lr_scheduler.ConstantLR: (),
    lr_scheduler.LinearLR: (),
    lr_scheduler.ExponentialLR: (),
    lr_scheduler.PolynomialLR: (),
    lr_scheduler.OneCycleLR: (),  # keeps its rates in the optimizer's groups
    lr_scheduler.CosineAnnealingLR: ("eta_min",),
    lr_scheduler.CosineAnnealingWarmRestarts: ("eta_min",),
    lr_scheduler.CyclicLR: ("max_lrs",),
    lr_scheduler.ReduceLROnPlateau: ("min_lrs", "default_min_lr", "eps"),
    lr_scheduler.SequentialLR: (),
    lr_scheduler.ChainedScheduler: (),
}
"""Attributes that are learning rates, beside ``base_lrs``, for each scheduler of torch."""


def scale_optimizer(optimizer: Optimizer, ratio: float) -> None:
    """Multiplies the learning rates of every parameter group, and what schedulers keep of them in the groups.

    Args:
        optimizer: changed in place; groups keep the proportions of their rates. A rate that is a tensor stays that
            tensor.
        ratio: above 0.

    Raises:
        ValueError: a group has no ``"lr"``.

    Collectives:
        None.
    """
    if any("lr" not in group for group in optimizer.param_groups):
        raise ValueError(
            explain(
                "a learning rate in every parameter group",
                f"{type(optimizer).__name__} with a group without 'lr'",
                "Use an optimizer that has one, or rule='none'",
            )
        )
    done: set[int] = set()  # groups may share one tensor
    for group in optimizer.param_groups:
        for name in _RATES_OF_A_GROUP:
            rate = group.get(name)
            if isinstance(rate, Tensor):
                if id(rate) not in done:
                    done.add(id(rate))
                    rate.mul_(ratio)
            elif rate is not None:
                group[name] = rate * ratio


def check_scheduler(scheduler: object) -> None:
    """Refuses a scheduler whose rates cannot be found, because its curve would not be the scaled one.

    Raises:
        ValueError: the scheduler, or one inside it, is of a class that torch does not have.

    Collectives:
        None.
    """
    if type(scheduler) not in _RATES_OF_A_SCHEDULER:
        raise ValueError(
            explain(
                "a scheduler of torch.optim.lr_scheduler, whose learning rates are known by name",
                type(scheduler).__qualname__,
                "Use a LambdaLR, or scale the rate in configure_optimizers with ddp_plugin.learning_rate.scale_ratio",
            )
        )
    for inner in _inner_schedulers(scheduler):
        check_scheduler(inner)


def scale_scheduler(scheduler: LRScheduler, ratio: float) -> None:
    """Makes a scheduler's curve the curve it had, times ``ratio``; call it after :func:`scale_optimizer`.

    Args:
        scheduler: changed in place, with all schedulers inside it.
        ratio: above 0.

    Raises:
        ValueError: see :func:`check_scheduler`; nothing is changed then.

    Collectives:
        None.
    """
    check_scheduler(scheduler)
    for name in ("base_lrs", *_RATES_OF_A_SCHEDULER[type(scheduler)]):
        rate = getattr(scheduler, name, None)
        if isinstance(rate, (list, tuple)):
            setattr(scheduler, name, [value * ratio for value in rate])
        elif rate is not None:
            setattr(scheduler, name, rate * ratio)
    for inner in _inner_schedulers(scheduler):
        scale_scheduler(inner, ratio)
    refresh_last_rates(scheduler)


def refresh_last_rates(scheduler: LRScheduler) -> None:
    """Lets ``get_last_lr`` tell the rates that are in the optimizer."""
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    scheduler.get_last_lr()[:] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]


def _inner_schedulers(scheduler: Any) -> list[LRScheduler]:
    lists = [value for value in vars(scheduler).values() if isinstance(value, (list, tuple))]
    return [item for items in lists for item in items if isinstance(item, LRScheduler)]
