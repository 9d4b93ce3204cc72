"""What every hook has inside: an exchange, straight-line code that makes each rank's values their mean over the ranks.

An exchange waits for its collectives, one after the other. What makes it asynchronous is the lane in which it runs, and
what makes up for its losses is the error feedback around it; neither is its own business. That is why exchanges
compose: one between nodes inside of another, or one for what an outer optimizer sends.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ddp_plugin.hooks._contents import Contents
from ddp_plugin.process_group import HeldGroup

__all__ = ["DirectExchange", "Exchange", "done"]


class Exchange(ABC):
    """Makes every rank's values (nearly) their mean over the ranks of a group, the same bits on all of them.

    Args:
        group: the ranks; nothing else may use this group at the same time.

    Attributes:
        leaves_error: whether it leaves something out that can be sent later.
        takes_sparse: whether it takes sparse values.
    """

    leaves_error: bool = False
    takes_sparse: ClassVar[bool] = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = HeldGroup(group)
        self.world_size = group.size()
        self.rank = group.rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks."""
        return self._group()

    @abstractmethod
    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """Replaces ``values`` by their mean over the ranks, as nearly as the exchange can tell it.

        Where a rank's values are not finite, the result is not finite on any rank: in those elements at least, in what
        shares a block, a matrix or a bucket with them at most.

        Args:
            values: this rank's, flat, shape ``(num_elements,)``; overwritten.
            contents: what they are.
            error: receives what this rank has left out, same shape and dtype, such that ``result + mean over ranks of
                error = mean over ranks of values`` up to rounding in that dtype, wherever the result is finite; given
                if and only if the exchange :attr:`leaves_error`.

        Collectives:
            The exchange's own, on every rank of the group in the same order; they have ended when it returns.
        """

    def state(self) -> dict[str, Any]:
        """Returns what it remembers from exchange to exchange: tensors and numbers, equal on all ranks."""
        return {}

    def load(self, state: dict[str, Any]) -> None:  # noqa: B027  # most have nothing to take back
        """Takes back what :meth:`state` returned, in this group or in one of another size."""


class DirectExchange(Exchange):
    """An exchange of a single collective, which needs no lane: DDP can wait for its future as it is."""

    @abstractmethod
    def start(self, values: torch.Tensor, contents: Contents) -> torch.futures.Future[torch.Tensor]:
        """Starts to replace ``values`` by their mean; the future's value is ``values``.

        Collectives:
            One, asynchronous, on every rank of the group.
        """

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`."""
        self.start(values, contents).wait()


def done(values: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Returns a future that is done already, as DDP wants it on the device of the values."""
    device = values.device
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=None if device.type == "cpu" else [device]
    )
    future.set_result(values)
    return future
