"""Sixteen bits on the wire, the gradient's own precision at home: half the bytes of fp32."""

from functools import partial

import torch
import torch.distributed as dist

from ddp_plugin._compat import GradBucket
from ddp_plugin.hooks._record import CommHook, HookFunction, HookState, require_dense, ring_bytes

__all__ = ["bf16", "fp16"]


def _cast_then_allreduce(
    state: HookState, bucket: GradBucket, dtype: torch.dtype, hook_name: str
) -> torch.futures.Future[torch.Tensor]:
    gradient = require_dense(bucket, hook_name)
    # Scaled before the cast: casting first overflows at fp16's 65504 whatever the world size.
    compressed = gradient.mul(1.0 / state.world_size).to(dtype)
    work = dist.all_reduce(compressed, group=state.process_group, async_op=True)
    # copy_ casts back; an inf or NaN stays one, so a gradient scaler still sees an overflow.
    reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(
        lambda future: gradient.copy_(future.value()[0])
    )
    return reduced


def _fp16(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _cast_then_allreduce(state, bucket, torch.float16, "fp16")


def _bf16(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _cast_then_allreduce(state, bucket, torch.bfloat16, "bf16")


def _wire_bytes(num_elements: int, element_size_bytes: int, world_size: int) -> int:
    return ring_bytes(num_elements, 2, world_size)


def _rounding(largest: float, world_size: int, dtype: torch.dtype) -> float:
    # Every summand is rounded once by the cast, and every partial sum once more; no partial sum of the scaled gradients
    # exceeds the largest gradient. Below the smallest normal number a rounding has a fixed size instead.
    info = torch.finfo(dtype)
    return world_size * info.eps * max(largest, info.smallest_normal)


def _record(name: str, function: HookFunction, dtype: torch.dtype) -> CommHook:
    return CommHook(name, function, _wire_bytes, error_bound=partial(_rounding, dtype=dtype))


def fp16() -> CommHook:
    """Half-precision all-reduce: 10 mantissa bits, overflow to inf where a mean gradient exceeds 65504.

    Collectives:
        One asynchronous fp16 all-reduce per bucket on the gradient's group, all ranks in the same order.
    """
    return _record("fp16", _fp16, torch.float16)


def bf16() -> CommHook:
    """Brain-float all-reduce: 7 mantissa bits with fp32's range, so it cannot overflow where fp32 does not.

    Collectives:
        One asynchronous bf16 all-reduce per bucket on the gradient's group, all ranks in the same order.
    """
    return _record("bf16", _bf16, torch.bfloat16)
