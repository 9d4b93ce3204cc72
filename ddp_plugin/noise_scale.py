"""How large a batch may grow before it stops paying: the gradient noise scale, from norms that a step has anyway.

For a gradient with mean ``G`` over the data and per-sample covariance ``Sigma``, the simple noise scale is
``tr(Sigma) / |G|^2`` samples. A batch far below it is mostly noise and a larger one saves steps in proportion; a batch
far above it buys little. Source: McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, arXiv
1812.06162, section 2 and appendix A. Plain arithmetic: no processes, no Lightning.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_plugin.errors import explain

__all__ = [
    "MIN_STEPS",
    "NoiseScale",
    "describe",
    "estimate_noise_scale",
    "squared_norm",
    "steps_ratio",
    "unbiased_estimates",
]

MIN_STEPS = 20
"""Fewest steps from which an estimate and its error are made."""

_NUM_BLOCKS = 20  # of steps: enough to estimate a variance, and each long enough to hide that neighbours are related
_RESOLVED_ERRORS = 4.0  # |G|^2 counts as seen when it is this many of its own standard errors above zero
_ROW_ELEMENTS = 4096


def squared_norm(gradient: Tensor) -> Tensor:
    """Returns the squared Euclidean norm of a flat gradient without a copy of it and without a synchronisation.

    Rows of 4096 elements are summed in float32 (float64 for float64), and the rows in float64: one float32 sum over a
    bucket of millions is off by some 1e-4, which is more than the difference between two ranks may be.

    Args:
        gradient: shape ``(num_elements,)``, any real floating dtype.

    Returns:
        A scalar, float64, on the gradient's device.
    """
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    end = gradient.numel() // _ROW_ELEMENTS * _ROW_ELEMENTS
    rows = torch.linalg.vector_norm(gradient[:end].view(-1, _ROW_ELEMENTS), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(gradient[end:], dtype=dtype)
    total: Tensor = rows.double().square().sum() + rest.double().square()
    return total


def unbiased_estimates(
    local_squared_norm: Tensor, mean_squared_norm: Tensor, rank_batch_size: Tensor, world_size: int
) -> tuple[Tensor, Tensor]:
    """Estimates ``tr(Sigma)`` and ``|G|^2`` from one step's norms; each without bias, neither without noise.

    The squared norm of a mean over ``n`` samples is ``|G|^2 + tr(Sigma) / n`` on average; two values of ``n`` give two
    equations (appendix A.1 of the paper).

    Args:
        local_squared_norm: mean over the ranks of the squared norm of the rank's own gradient, shape ``(num_steps,)``.
        mean_squared_norm: squared norm of the mean gradient, same shape.
        rank_batch_size: samples in one rank's gradient, same shape; equal on all ranks.
        world_size: number of ranks, at least 2.

    Returns:
        ``tr(Sigma)`` and ``|G|^2``, same shape. The second one may be negative: the noise of a step is often larger
        than its signal.

    Raises:
        ValueError: fewer than two ranks, which give one equation for two unknowns.
    """
    if world_size < 2:
        raise ValueError(
            explain("at least 2 ranks, whose gradients are compared", f"world_size={world_size}", "Add a process")
        )
    batch_size = rank_batch_size * world_size
    trace = (local_squared_norm - mean_squared_norm) / (1 / rank_batch_size - 1 / batch_size)
    signal = (batch_size * mean_squared_norm - rank_batch_size * local_squared_norm) / (batch_size - rank_batch_size)
    return trace, signal


@dataclass(frozen=True)
class NoiseScale:
    """What a window of steps says about the noise scale, and how surely.

    Attributes:
        trace: mean estimate of ``tr(Sigma)``.
        signal: mean estimate of ``|G|^2``.
        signal_error: standard error of ``signal``.
        noise_scale: ``trace / signal`` in samples; ``None`` where it is not resolved, that is where there are fewer
            than :data:`MIN_STEPS` steps or ``signal`` is not 4 of its standard errors above zero.
        standard_error: standard error of ``noise_scale`` in samples; ``None`` with it.
        num_steps: steps in the window.
    """

    trace: float
    signal: float
    signal_error: float
    noise_scale: float | None
    standard_error: float | None
    num_steps: int


def estimate_noise_scale(traces: Tensor, signals: Tensor) -> NoiseScale:
    """Turns the estimates of many steps into one noise scale with its standard error.

    It is the ratio of the averages: single steps are too noisy for a ratio of their own, and an average of ratios does
    not converge to the ratio. The standard error is the delta method's for a ratio, over 20 blocks of consecutive
    steps, so that it holds when neighbouring steps are related. A gradient that changes within the window makes the
    error larger, never smaller.

    Args:
        traces: each step's ``tr(Sigma)``, shape ``(num_steps,)``, in order.
        signals: each step's ``|G|^2``, same shape.
    """
    num_steps = traces.numel()
    if num_steps < MIN_STEPS:
        nan = math.nan
        mean = (traces.mean().item(), signals.mean().item()) if num_steps else (nan, nan)
        return NoiseScale(*mean, nan, None, None, num_steps)
    length = num_steps // _NUM_BLOCKS
    # The oldest steps that fill no block are left out, so that all blocks weigh the same.
    blocks = torch.stack([traces, signals])[:, num_steps - _NUM_BLOCKS * length :].double()
    blocks = blocks.reshape(2, _NUM_BLOCKS, length).mean(2)
    trace, signal = blocks.mean(1).tolist()
    signal_error = _standard_error(blocks[1])
    if not signal > _RESOLVED_ERRORS * signal_error:
        return NoiseScale(trace, signal, signal_error, None, None, num_steps)
    ratio = trace / signal
    error = _standard_error(blocks[0] - ratio * blocks[1]) / signal
    return NoiseScale(trace, signal, signal_error, ratio, error, num_steps)


def _standard_error(blocks: Tensor) -> float:
    return float(blocks.std()) / math.sqrt(blocks.numel())


def steps_ratio(noise_scale: float, batch_size: float, factor: float) -> float:
    """Returns how many steps a batch ``factor`` times as large needs, relative to the batch as it is.

    By the paper's model (section 2.2) the steps to a given loss are proportional to ``1 + noise_scale /
    batch_size``, with the learning rate tuned for each batch.

    Args:
        noise_scale: in samples.
        batch_size: samples in an optimizer step, over all ranks.
        factor: by how much the batch grows.
    """
    return (1 + noise_scale / (batch_size * factor)) / (1 + noise_scale / batch_size)


def describe(estimate: NoiseScale, batch_size: int) -> str:
    """Says in words what an estimate means for the batch that was used.

    Args:
        estimate: of :func:`estimate_noise_scale`.
        batch_size: samples in an optimizer step, over all ranks.
    """
    steps = f"{estimate.num_steps} steps of {batch_size} samples"
    if estimate.num_steps < MIN_STEPS:
        return f"The gradient noise scale is not resolved: {steps}, and it takes {MIN_STEPS}."
    if estimate.noise_scale is None or estimate.standard_error is None:
        above = estimate.signal + 2 * estimate.signal_error
        bound = (
            f" It is probably above {estimate.trace / above:.3g} samples." if above > 0 and estimate.trace > 0 else ""
        )
        return (
            f"The gradient noise scale is not resolved: in {steps} the squared norm of the true gradient cannot be "
            f"told from zero ({estimate.signal:.3g} with a standard error of {estimate.signal_error:.3g}).{bound}"
        )
    scale = max(estimate.noise_scale, 0.0)
    saved = 1 - steps_ratio(scale, batch_size, 2.0)
    if batch_size < scale / 4:
        meaning = "far below it, where a larger batch with a larger learning rate saves steps almost in proportion"
    elif batch_size <= 4 * scale:
        meaning = "near it, where a larger batch still saves steps, and costs samples"
    else:
        meaning = "far above it, where a larger batch hardly saves steps and a smaller one would need fewer samples"
    ratio = f"{batch_size / scale:.3g} of the noise scale, " if scale > 0 else ""
    return (
        f"The gradient noise scale is {estimate.noise_scale:.4g} +- {estimate.standard_error:.2g} samples ({steps}). "
        f"The batch is {ratio}{meaning}: twice the batch would need {saved:.0%} fewer steps."
    )
