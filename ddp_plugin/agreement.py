"""Wishes that any rank may have at any time, and that all ranks learn of at the same step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_plugin.gather import gather_objects

__all__ = ["Agreement"]


class Agreement:
    """Carries named wishes of single ranks to all ranks, so that none acts on its own wish alone.

    A wish is local until an exchange has carried it. :meth:`post` is meant for every step: it sends the wishes of now
    and reads what was sent at the step before, so nobody waits for a message; a wish is agreed upon one post after the
    one that sent it, on all ranks at the same post. :meth:`settle` exchanges them at once. An agreed wish stays agreed
    until it is dropped.

    Args:
        group: a gloo group, such as the control group; ``None`` for one process, whose wishes are agreed on at the next
            exchange.
        names: the wishes there are; the same on all ranks.

    Collectives:
        One all-reduce of two integers per name on every rank of the group for each :meth:`post`, not waited for, and an
        object gather for each :meth:`settle`. All ranks must call them in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, names: Sequence[str] = ("stop",)) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._wishes = dict.fromkeys(names, False)
        self._agreed: dict[str, tuple[int, int] | None] = dict.fromkeys(names)  # how many wished it, sum of their ranks
        self._in_flight: tuple[dist.Work, torch.Tensor] | None = None

    def wish(self, name: str) -> None:
        """Remembers a wish of this rank for the next exchange.

        Collectives:
            None.
        """
        self._wishes[name] = True

    def wishes(self, name: str) -> bool:
        """Whether this rank has the wish, agreed upon or not.

        Collectives:
            None.
        """
        return self._wishes[name]

    def is_agreed(self, name: str) -> bool:
        """Whether all ranks know of the wish; the same on all ranks between two exchanges.

        Collectives:
            None.
        """
        return self._agreed[name] is not None

    def wished_by(self, name: str) -> str:
        """Says in words which ranks had the wish when it was agreed upon; the same on all ranks.

        Collectives:
            None.
        """
        agreed = self._agreed[name]
        if agreed is None:
            return "no rank"
        num_ranks, sum_of_ranks = agreed
        return f"rank {sum_of_ranks}" if num_ranks == 1 else f"{num_ranks} ranks"

    def drop(self, name: str) -> None:
        """Takes back a wish that is agreed upon; all ranks must do so between the same two exchanges.

        A wish that is under way cannot be taken back.

        Collectives:
            None.
        """
        if self._agreed[name] is not None:
            self._agreed[name] = None
            self._wishes[name] = False

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
        wishes = [wished and self._agreed[name] is None for name, wished in self._wishes.items()]
        return torch.tensor([[wished, wished * self._rank] for wished in wishes], dtype=torch.int64)

    def _receive(self) -> None:
        if self._in_flight is not None:
            work, message = self._in_flight
            self._in_flight = None
            work.wait()
            self._read(message)

    def _read(self, message: torch.Tensor) -> None:
        for name, (num_ranks, sum_of_ranks) in zip(self._agreed, message.tolist(), strict=True):
            if num_ranks and self._agreed[name] is None:
                self._agreed[name] = (num_ranks, sum_of_ranks)
