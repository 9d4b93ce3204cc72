"""The mean by one all-reduce: what DDP does by itself, and the yardstick for every other hook."""

import torch
import torch.distributed as dist

from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import DirectExchange
from ddp_plugin.hooks._record import CommHook, largest_magnitude, ring_bytes

__all__ = ["AllReduce", "all_reduce_bytes", "allreduce", "summation_error"]


class AllReduce(DirectExchange):
    """One all-reduce; sparse values too."""

    takes_sparse = True

    def start(self, values: torch.Tensor, contents: Contents) -> torch.futures.Future[torch.Tensor]:
        """See :meth:`DirectExchange.start`.

        Collectives:
            One asynchronous all-reduce.
        """
        # Multiplied by the reciprocal, not divided: that is how the built-in reducer scales, and dividing differs from
        # it in the last bit for three ranks.
        work = dist.all_reduce(values.mul_(1.0 / self.world_size), group=self.group, async_op=True)
        reduced: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return reduced


def all_reduce_bytes(contents: Contents, world_size: int, rank: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of the gradient as it is."""
    return ring_bytes(contents.num_elements, contents.element_size_bytes, world_size)


def summation_error(gradients: torch.Tensor, contents: Contents) -> torch.Tensor:
    """Bound on what adding up in another order, and scaling first, may change: some roundings of the largest value."""
    info = torch.finfo(contents.dtype)
    return (gradients.shape[0] + 1) * info.eps * largest_magnitude(gradients).clamp(min=info.smallest_normal)


def allreduce() -> CommHook:
    """The exact hook: bit-identical to DDP's built-in reducer, at the same cost on the wire.

    Collectives:
        One asynchronous all-reduce per bucket on the gradient's group, all ranks in the same order.
    """
    return CommHook("allreduce", AllReduce, all_reduce_bytes, summation_error, is_exact=True, is_direct=True)
