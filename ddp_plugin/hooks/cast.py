"""Sixteen bits on the wire, the gradient's own precision at home: half the bytes of fp32."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import DirectExchange
from ddp_plugin.hooks._record import CommHook, largest_magnitude, ring_bytes

__all__ = ["CastAllReduce", "bf16", "fp16"]


class CastAllReduce(DirectExchange):
    """One all-reduce in another dtype.

    Args:
        group: the ranks.
        dtype: dtype on the wire.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(group)
        self.dtype = dtype

    def start(self, values: torch.Tensor, contents: Contents) -> torch.futures.Future[torch.Tensor]:
        """See :meth:`DirectExchange.start`.

        Collectives:
            One asynchronous all-reduce.
        """
        # Scaled before the cast: casting first overflows at fp16's 65504 whatever the world size.
        compressed = values.mul(1.0 / self.world_size).to(self.dtype)
        work = dist.all_reduce(compressed, group=self.group, async_op=True)
        # copy_ casts back; an inf or NaN stays one, so a gradient scaler still sees an overflow.
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(
            lambda future: values.copy_(future.value()[0])
        )
        return reduced


def _wire_bytes(contents: Contents, world_size: int, rank: int) -> int:
    return ring_bytes(contents.num_elements, 2, world_size)


def _rounding(gradients: torch.Tensor, contents: Contents, dtype: torch.dtype) -> torch.Tensor:
    # Every summand is rounded once by the cast, and every partial sum once more; no partial sum of the scaled gradients
    # exceeds the largest gradient. Below the smallest normal number a rounding has a fixed size instead.
    info = torch.finfo(dtype)
    return gradients.shape[0] * info.eps * largest_magnitude(gradients).clamp(min=info.smallest_normal)


def _record(name: str, dtype: torch.dtype) -> CommHook:
    make, error_bound = partial(CastAllReduce, dtype=dtype), partial(_rounding, dtype=dtype)
    return CommHook(name, make, _wire_bytes, error_bound, is_direct=True)


def fp16() -> CommHook:
    """Half-precision all-reduce: 10 mantissa bits, overflow to inf where a mean gradient exceeds 65504.

    Collectives:
        One asynchronous fp16 all-reduce per bucket on the gradient's group, all ranks in the same order.
    """
    return _record("fp16", torch.float16)


def bf16() -> CommHook:
    """Brain-float all-reduce: 7 mantissa bits with fp32's range, so it cannot overflow where fp32 does not.

    Collectives:
        One asynchronous bf16 all-reduce per bucket on the gradient's group, all ranks in the same order.
    """
    return _record("bf16", torch.bfloat16)
