"""How much a batch counts, and how sums of weighted gradients become the gradient of one mean.

A step's gradient shall be that of ``sum(weight * loss) / sum(weight)`` over all its micro-batches on all ranks, where
each ``loss`` is a mean over ``weight`` units. The total is known only when the last backward is done, so each gradient
enters the sum times its weight, and one multiplication at the end divides by the total. Nothing here knows processes.
"""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ddp_plugin import _compat
from ddp_plugin.errors import explain

__all__ = [
    "GradientWindow",
    "Weight",
    "batch_size_of",
    "checked_weight",
    "factor_of",
    "nominal_weight",
    "scale_gradients",
    "without_weightless",
]

Weight = float | Tensor
"""A weight that the host knows, or a tensor without dimensions on an accelerator, which nobody reads."""


def batch_size_of(batch: Any) -> int:
    """Returns the first dimension that all tensors of a batch share.

    Args:
        batch: tensors in any nesting of lists, tuples and mappings; tensors without dimensions and anything else are
            passed over.

    Raises:
        ValueError: there is no such tensor, or the first dimensions differ.
    """
    sizes = sorted(set(_first_dimensions(batch)))
    if len(sizes) != 1:
        got = f"first dimensions {sizes}" if sizes else f"{type(batch).__name__} without a tensor that has one"
        change = "Pass GlobalMeanLoss(weight=...), a function of the batch, or call log_weight in training_step"
        raise ValueError(explain("a batch whose tensors all have the samples first", got, change))
    return sizes[0]


def _first_dimensions(item: Any) -> Iterable[int]:
    if isinstance(item, Tensor):
        if item.dim() > 0:
            yield item.shape[0]
    elif isinstance(item, (list, tuple, Mapping)):
        for part in item.values() if isinstance(item, Mapping) else item:
            yield from _first_dimensions(part)


def checked_weight(weight: object) -> Weight:
    """Returns a weight as a float where the host can see it, and as it is where that would wait for a device.

    Args:
        weight: a number, or a tensor of one element.

    Raises:
        TypeError: something else.
        ValueError: a weight that is negative, NaN or infinite, if the host can see it.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if weight.device.type != "cpu":
            return weight.detach().reshape(())
        weight = weight.item()
    change = "Give the number of units that the loss is a mean over"
    if not isinstance(weight, Real):
        got = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise TypeError(explain("a weight that is one number", got, change))
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(explain("a weight that is finite and not negative", repr(number), change))
    return number


def nominal_weight(largest: float) -> float:
    """Returns the smallest power of two above a weight: the unit in which weights multiply gradients.

    Weights may be thousands of tokens; in units of their own size they push no half-precision gradient into overflow.
    A power of two, because dividing by it and multiplying with it again changes no bit.

    Args:
        largest: a finite weight, not negative; zero gives 1.
    """
    return math.ldexp(1.0, min(math.frexp(largest)[1], 1023)) if largest > 0 else 1.0


def factor_of(weight: Weight, nominal: float, loss: Tensor) -> Weight:
    """Returns a weight in units of ``nominal``, rounded to the loss's dtype: what its gradient is multiplied by.

    The sum that divides at the end is over these, so rounding (in 16 bits it is visible) leaves a true weighted mean.
    """
    if isinstance(weight, Tensor):
        return (weight.to(loss.device, _sum_dtype(loss.device), non_blocking=True) / nominal).to(loss.dtype)
    return float(torch.tensor(weight / nominal, dtype=loss.dtype))


def without_weightless(gradient: Tensor, weight: Weight) -> Tensor:
    """Returns a gradient, or zeros where its weight is zero, also in place of NaN; a device weight is not read.

    Args:
        gradient: dense or sparse, any shape.
        weight: of the batch it comes from.
    """
    if not isinstance(weight, Tensor):
        return torch.zeros_like(gradient) if weight == 0 else gradient
    is_weightless = weight.to(gradient.device, non_blocking=True) == 0
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        values = gradient.values().masked_fill(is_weightless, 0)
        return torch.sparse_coo_tensor(
            gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
        )
    return gradient.masked_fill(is_weightless, 0)


@torch.no_grad()
def scale_gradients(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiplies gradients in place, a few kernels for all of them.

    Args:
        gradients: dense or sparse, of any dtypes, on any devices.
        factor: a tensor without dimensions; not read by the host.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        precise = gradient.dtype in (torch.float64, torch.complex128)
        factor_dtype = torch.float64 if precise else torch.float32
        if gradient.is_sparse:
            gradient.mul_(factor.to(gradient.device, factor_dtype, non_blocking=True))
        else:
            groups.setdefault((gradient.device, factor_dtype), []).append(gradient)
    for (device, dtype), members in groups.items():
        _compat.multiply_all_(members, factor.to(device, dtype, non_blocking=True))


class GradientWindow:
    """What one optimizer's gradients are a sum of, since they were last zero.

    Attributes:
        num_backwards: backward passes in the sum.
        is_normalized: whether the gradients are those of the mean already.
        is_mixed: whether gradients of the mean and later ones were added, which no factor can put right.
        ever_used: whether any backward reached this optimizer.
    """

    def __init__(self) -> None:
        self.ever_used = False
        self._marks: list[tuple[int, int]] = []
        self.restart()

    def restart(self) -> None:
        """The gradients are zero or gone."""
        self._known: float = 0.0
        self._unread: Tensor | None = None
        self.num_backwards = 0
        self.is_normalized = self.is_mixed = False

    def look_for_zeroing(self, gradients: list[Tensor]) -> None:
        """Notices, before a backward or the step, that somebody dropped the gradients or set them to zero.

        Gradients are compared with zero only where they were changed since :meth:`remember`. On a device that happens
        without waiting for it.

        Args:
            gradients: those of the optimizer that exist.
        """
        if not gradients:
            self.restart()
        elif self._marks and _marks(gradients) != self._marks:
            values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
            device = values[0].device
            is_nonzero = torch.stack([value.any().to(device, non_blocking=True) for value in values]).any()
            if device.type != "cpu":
                self._unread, self._known = self._weights(device) * is_nonzero, 0.0
                self.is_normalized = False  # changed by whom, only the device knows; most likely set to zero
            elif not is_nonzero:
                self.restart()

    def remember(self, gradients: list[Tensor]) -> None:
        """Notes how the gradients look after a backward or after the multiplication."""
        self._marks = _marks(gradients)

    def add(self, weight: Weight) -> None:
        """A backward added its gradient times ``weight``."""
        if isinstance(weight, Tensor):
            self._unread = weight.to(_sum_dtype(weight.device)) + (0 if self._unread is None else self._unread)
        else:
            self._known += weight
        self.num_backwards += 1
        self.ever_used = True
        self.is_mixed |= self.is_normalized
        self.is_normalized = False

    def total(self, device: torch.device) -> Tensor:
        """Returns the sum of the weights and the number of backwards, float64, shape ``(2,)``; reads no device."""
        num_backwards = torch.full((), self.num_backwards, dtype=_sum_dtype(device), device=device)
        return torch.stack([self._weights(device), num_backwards])

    def _weights(self, device: torch.device) -> Tensor:
        known = torch.full((), self._known, dtype=_sum_dtype(device), device=device)  # a fill, no copy to wait for
        return known if self._unread is None else known + self._unread.to(device, non_blocking=True)

    def close(self, gradients: list[Tensor], total: Tensor, num_terms: int) -> None:
        """Makes the gradients those of the mean.

        Args:
            gradients: sums of ``weight * gradient / num_terms`` over all ranks and backwards; changed in place.
            total: sum of the weights over all ranks, shape ``()``; zero gives zero gradients.
            num_terms: what the losses and the reduction divided by: accumulated batches times ranks.
        """
        scale_gradients(gradients, torch.where(total == 0, 0.0, num_terms / total))
        self.restart()
        self.is_normalized = True


def _marks(gradients: list[Tensor]) -> list[tuple[int, int]]:
    return [(id(gradient), _compat.version_of(gradient)) for gradient in gradients]


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # which Apple's GPUs do not have
