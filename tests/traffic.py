"""Counts what a piece of code hands to ``torch.distributed``, and what that puts on the wire by the usual algorithms.

It sees calls by the names of ``torch.distributed``, so not DDP's own reducer, which calls from C++.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from threading import Lock
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["Calls", "counted_calls"]


@dataclass
class Calls:
    """What was called inside the block, in all threads of this process.

    Attributes:
        sent_bytes: bytes that this rank sends; where an algorithm is asymmetric, the mean over the ranks.
        num_calls: how often each function was called.
    """

    sent_bytes: float = 0.0
    num_calls: Counter[str] = field(default_factory=Counter)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _all_reduce(n: int, rank: int, tensor: torch.Tensor, *_: Any, **__: Any) -> float:
    return 2 * (n - 1) / n * _bytes(tensor)  # ring


def _all_gather(n: int, rank: int, output: Any, tensor: torch.Tensor, *_: Any, **__: Any) -> float:
    return (n - 1) * _bytes(tensor)  # ring, or everyone to everyone


def _reduce_scatter(n: int, rank: int, output: torch.Tensor, inputs: Any, *_: Any, **__: Any) -> float:
    tensors = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    return (n - 1) / n * _bytes(*tensors)  # ring; gloo really sends twice this


def _all_to_all_single(
    n: int,
    rank: int,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    *_: Any,
    **__: Any,
) -> float:
    if not input_split_sizes:
        return (n - 1) / n * _bytes(tensor)
    rows = sum(input_split_sizes)
    return _bytes(tensor) * (rows - input_split_sizes[rank]) / max(1, rows)


def _all_to_all(n: int, rank: int, outputs: Any, inputs: Sequence[torch.Tensor], *_: Any, **__: Any) -> float:
    return _bytes(*inputs) - _bytes(inputs[rank])


def _one_to_all(n: int, rank: int, tensor: torch.Tensor, *_: Any, **__: Any) -> float:
    return (n - 1) / n * _bytes(tensor)  # every rank but one receives it once, or sends it once


def _point_to_point(n: int, rank: int, tensor: torch.Tensor, *_: Any, **__: Any) -> float:
    return _bytes(tensor)


_VOLUMES: dict[str, Callable[..., float]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
    **({"all_gather_single": _all_gather} if hasattr(dist, "all_gather_single") else {}),  # its name since torch 2.13
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "broadcast": _one_to_all,
    "reduce": _one_to_all,
    "send": _point_to_point,
    "isend": _point_to_point,
}


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Counts the calls of collectives and sends inside the block, and the bytes that this rank sends with them."""
    calls, lock = Calls(), Lock()

    def counting(name: str) -> Callable[..., Any]:
        function, volume = getattr(dist, name), _VOLUMES[name]

        @wraps(function)
        def call(*arguments: Any, **settings: Any) -> Any:
            group = settings.get("group")
            group = (
                group if group is not None else next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
            )
            rank = dist.get_rank(group)
            num_bytes = volume(dist.get_world_size(group), rank, *arguments, **settings) if rank >= 0 else 0.0
            with lock:
                calls.sent_bytes += num_bytes
                calls.num_calls[name] += 1
            return function(*arguments, **settings)

        return call

    with ExitStack() as stack:
        for name in _VOLUMES:
            replacement = counting(name)
            stack.enter_context(patch.object(dist, name, replacement))
            if name == "isend":  # batch_isend_irecv calls, and recognises, the function of its own module
                stack.enter_context(patch.object(distributed_c10d, name, replacement))
        yield calls
