"""Layers that normalise with the statistics of all ranks: one gather forward, one all-reduce backward."""

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_plugin.batchnorm.kernels import (
    batch_norm_input_gradient,
    combine_moments,
    local_moments,
    over_channels,
    reduced_dims,
)
from ddp_plugin.errors import explain

__all__ = [
    "FusedBatchNorm1d",
    "FusedBatchNorm2d",
    "FusedBatchNorm3d",
    "SharesGroup",
    "SyncedBatchNorm",
    "SyncedBatchNorm1d",
    "SyncedBatchNorm2d",
    "SyncedBatchNorm3d",
]


class _BatchNormOverRanks(torch.autograd.Function):
    """Normalises the local batch with the statistics of all ranks: one all-gather forward, one all-reduce backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        moments = local_moments(x)
        rows = [torch.empty_like(moments) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, moments, group=group)
        mean, variance, count = combine_moments(torch.stack(rows))
        if count == 1:
            # Every rank has gathered the same counts, so every rank raises.
            raise ValueError(
                explain(
                    "more than 1 value per channel over all ranks when training",
                    f"{int(count)} (input of shape {tuple(x.shape)} here)",
                    "Use a larger batch, drop the last incomplete batch, or call eval() on this layer",
                )
            )
        inverse_std = (variance + eps).rsqrt()
        centred = x.to(mean.dtype) - over_channels(mean, x.dim())
        scale = inverse_std if weight is None else inverse_std * weight.to(mean.dtype)
        output = centred.mul_(over_channels(scale, x.dim()))
        if bias is not None:
            output.add_(over_channels(bias.to(mean.dtype), x.dim()))
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = grad_output.to(mean.dtype)
        centred = x.to(mean.dtype) - over_channels(mean, x.dim())
        sums = torch.stack([dy.sum(reduced_dims(x)), (dy * centred).sum(reduced_dims(x))])
        # The gradients of weight and bias stay local: whoever reduces gradients over ranks reduces these too.
        grad_weight = (sums[1] * inverse_std).to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(weight.dtype if weight is not None else x.dtype) if needs_bias else None
        grad_input = None
        if needs_input:
            sums = sums.clone()  # grad_bias is a view of the local ones
            dist.all_reduce(sums, group=ctx.group)
            grad_input = batch_norm_input_gradient(dy, centred, inverse_std, weight, sums, count).to(x.dtype)
        return grad_input, grad_weight, grad_bias, None, None


# A compiled graph breaks here: a collective inside an autograd function is not traced.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def batch_norm_over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _BatchNormOverRanks.apply(x, weight, bias, eps, group)  # type: ignore[no-any-return,no-untyped-call]


class SharesGroup(nn.Module):
    """Copies of a layer share its process group: a group is a handle, and cannot be copied."""

    original_class: ClassVar[type[nn.Module]]
    process_group: dist.ProcessGroup | None = None  # an attribute of the instance only where a group was asked for

    def __deepcopy__(self, memo: dict[int, Any]) -> "SharesGroup":
        if self.process_group is not None:
            memo[id(self.process_group)] = self.process_group
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        return clone


class _Synced(SharesGroup):
    """The forward of a converted layer; its attributes are those of the layer it was."""

    num_dims: ClassVar[tuple[int, ...]]  # empty: any number from 2 on

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    momentum: float | None
    eps: float
    track_running_stats: bool

    def forward(self, input: Tensor) -> Tensor:
        """Normalises ``input`` of shape ``(N, C, *)``; same shape, dtype and memory format.

        Raises:
            ValueError: a wrong number of dimensions, or only one value per channel on all ranks together.

        Collectives:
            In training mode, on all ranks of the group: one all-gather of ``2 * C + 1`` numbers, and one all-reduce of
            ``2 * C`` in the backward where the input needs a gradient. None in eval mode.
        """
        if input.dim() not in self.num_dims and (self.num_dims or input.dim() < 2):
            wanted = " or ".join(map(str, self.num_dims)) or "at least 2"
            raise ValueError(
                explain(f"an input of {wanted} dimensions", f"shape {tuple(input.shape)}", "Reshape the input")
            )
        over_ranks = (
            self.training
            and dist.is_available()
            and dist.is_initialized()
            and dist.get_world_size(self.process_group) > 1
        )
        if not over_ranks:
            return self._over_this_rank(input)
        output: Tensor
        output, mean, variance, count = batch_norm_over_ranks(
            input, self.weight, self.bias, self.eps, self.process_group
        )
        factor = self._next_average_factor()
        if self.track_running_stats and count > 0:
            with torch.no_grad():
                if self.running_mean is not None:
                    _average(self.running_mean, mean, factor)
                if self.running_var is not None:
                    _average(self.running_var, variance * (count / (count - 1)), factor)
        return output

    def _over_this_rank(self, input: Tensor) -> Tensor:
        factor = self._next_average_factor()
        use_running = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if use_running else None,
            self.running_var if use_running else None,
            self.weight,
            self.bias,
            self.training or (self.running_mean is None and self.running_var is None),
            factor,
            self.eps,
        )

    def _next_average_factor(self) -> float:
        """Counts a training batch; returns the weight of its statistics in the running ones."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the plain mean over all batches
                momentum = 1.0 / float(self.num_batches_tracked)
        return momentum


def _average(running: Tensor, value: Tensor, factor: float) -> None:
    running.copy_(running.to(value.dtype) * (1 - factor) + value * factor)


class SyncedBatchNorm1d(_Synced, nn.BatchNorm1d):
    """A :class:`torch.nn.BatchNorm1d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm1d
    num_dims = (2, 3)


class SyncedBatchNorm2d(_Synced, nn.BatchNorm2d):
    """A :class:`torch.nn.BatchNorm2d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm2d
    num_dims = (4,)


class SyncedBatchNorm3d(_Synced, nn.BatchNorm3d):
    """A :class:`torch.nn.BatchNorm3d` with the statistics of all ranks, in plain torch operations: any device."""

    original_class = nn.BatchNorm3d
    num_dims = (5,)


class SyncedBatchNorm(_Synced, nn.BatchNorm1d):
    """What a :class:`torch.nn.SyncBatchNorm` becomes on a device where torch's own raises, such as the CPU.

    It is no subclass of ``SyncBatchNorm``, because ``DistributedDataParallel`` refuses those on the CPU by their class.
    """

    original_class = nn.SyncBatchNorm
    num_dims = ()


class FusedBatchNorm1d(SharesGroup, nn.BatchNorm1d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm1d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm1d


class FusedBatchNorm2d(SharesGroup, nn.BatchNorm2d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm2d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm2d


class FusedBatchNorm3d(SharesGroup, nn.BatchNorm3d, nn.SyncBatchNorm):
    """A :class:`torch.nn.BatchNorm3d` whose forward is that of :class:`torch.nn.SyncBatchNorm`: CUDA."""

    original_class = nn.BatchNorm3d
