"""A wish that any rank may have at any time, and that all ranks learn of at the same step."""

import torch
import torch.distributed as dist

from ddp_plugin.gather import gather_objects

__all__ = ["Agreement"]


class Agreement:
    """Carries a wish of single ranks to all ranks, so that none acts on its own wish alone.

    A wish is local until an exchange has carried it. :meth:`post` is meant for every step: it sends the wish of now and
    reads what was sent at the step before, so nobody waits for a message; a wish is agreed upon one post after the one
    that sent it, on all ranks at the same post. :meth:`settle` exchanges it at once. An agreed wish stays agreed until
    it is dropped.

    Args:
        group: a gloo group, such as the control group; ``None`` for one process, whose wish is agreed on at the next
            exchange.

    Attributes:
        wishers: how many ranks had the wish when it was agreed upon, and the sum of their ranks; ``None`` while it is
            not. The same on all ranks between two exchanges.

    Collectives:
        One all-reduce of two integers on every rank of the group for each :meth:`post`, not waited for, and an object
        gather for each :meth:`settle`. All ranks must call them in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._is_wished = False
        self.wishers: tuple[int, int] | None = None
        self._in_flight: tuple[dist.Work, torch.Tensor] | None = None

    @property
    def is_agreed(self) -> bool:
        """Whether all ranks know of the wish."""
        return self.wishers is not None

    def wish(self) -> None:
        """Remembers a wish of this rank for the next exchange.

        Collectives:
            None.
        """
        self._is_wished = True

    def drop(self) -> None:
        """Takes back a wish that is agreed upon; all ranks must do so between the same two exchanges.

        A wish that is under way cannot be taken back.

        Collectives:
            None.
        """
        if self.is_agreed:
            self.wishers, self._is_wished = None, False

    def post(self) -> None:
        """Reads the wishes of the last post, and sends those of now.

        Collectives:
            One all-reduce, not waited for until the next call.
        """
        if self._group is None:
            self._read(self._message())
            return
        self._receive()
        message = self._message()
        work = dist.all_reduce(message, dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._in_flight = (work, message)

    def settle(self) -> None:
        """Exchanges all wishes at once.

        Collectives:
            One object gather.
        """
        self._receive()
        self._read(torch.stack(gather_objects(self._message(), self._group)).sum(0))

    def _message(self) -> torch.Tensor:
        is_news = self._is_wished and not self.is_agreed
        return torch.tensor([is_news, is_news * self._rank], dtype=torch.int64)

    def _receive(self) -> None:
        if self._in_flight is not None:
            work, message = self._in_flight
            self._in_flight = None
            work.wait()
            self._read(message)

    def _read(self, message: torch.Tensor) -> None:
        num_ranks, sum_of_ranks = message.tolist()
        if num_ranks and not self.is_agreed:
            self.wishers = num_ranks, sum_of_ranks
