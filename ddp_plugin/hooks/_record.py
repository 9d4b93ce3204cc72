"""What a communication hook declares about itself.

This folder does not use postponed annotations: DDP compares a hook's annotations as objects, and it finds the bucket by
the parameter's name, which must be ``bucket``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin._compat import GradBucket
from ddp_plugin.errors import explain

__all__ = ["CommHook", "HookFunction", "HookState", "ring_bytes"]

HookFunction = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""DDP's own signature: ``hook(state, bucket) -> Future`` of the reduced flat gradient."""


@dataclass
class HookState:
    """What every hook needs to know about the ranks it reduces over.

    Attributes:
        process_group: the group that carries the gradient; its size is the divisor of the mean.
    """

    process_group: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self.process_group.size()


@dataclass(frozen=True)
class CommHook:
    """One way to turn the ranks' gradients into their mean, with what it costs and how far it may be off.

    Attributes:
        name: key in :data:`ddp_plugin.hooks.HOOKS`, or any label for a hook of your own.
        function: called by DDP for each bucket; must return at once, with a future of the mean gradient.
        wire_bytes: ``(num_elements, element_size_bytes, world_size) -> bytes`` that one rank sends per bucket.
        error_bound: ``(largest, world_size) -> bound`` on ``|result - mean|`` in one element, from rounding on the wire
            alone, where ``largest`` is the largest magnitude of that element over the ranks. Overflow is not rounding.
        make_state: builds the first argument of ``function`` from the gradient's process group.
    """

    name: str
    function: HookFunction
    wire_bytes: Callable[[int, int, int], int]
    error_bound: Callable[[float, int], float]
    make_state: Callable[[dist.ProcessGroup], Any] = HookState


def ring_bytes(num_elements: int, element_size_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends in a ring all-reduce: ``2 (n - 1) / n`` times the message.

    Args:
        num_elements: elements in the message.
        element_size_bytes: bytes of one element on the wire.
        world_size: number of ranks ``n``.

    Returns:
        Bytes sent by one rank, rounded up; 0 for one rank.

    Reference:
        P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    total = 2 * (world_size - 1) * num_elements * element_size_bytes
    return -(-total // world_size)


def require_dense(bucket: GradBucket, hook_name: str) -> torch.Tensor:
    """Returns the bucket's flat gradient, or raises if it cannot be cast; complex ones reach a hook as real views.

    Raises:
        TypeError: the gradient is sparse.
    """
    gradient = bucket.buffer()
    if gradient.is_sparse:
        raise TypeError(
            explain(
                f"dense gradients for comm_hook={hook_name!r}",
                "a sparse gradient",
                "Use comm_hook='allreduce' or comm_hook=None for this model",
            )
        )
    return gradient
