"""Wishes that any rank may have at any time, and that all ranks learn of at the same step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_plugin.gather import gather_objects

__all__ = ["Agreement"]


class Agreement:
    """Carries wishes of single ranks to all ranks, so that none acts on its own wish alone.

    A wish is local until an exchange has carried it. :meth:`post` is meant for every step: it sends the wishes of now
    and reads what was sent at the step before, so nobody waits for a message; a wish is agreed upon one post after the
    one that sent it, on all ranks at the same post. :meth:`settle` exchanges them at once. An agreed wish stays agreed
    until it is dropped.

    Args:
        group: a gloo group, such as the control group; ``None`` for one process, whose wishes are agreed on at the next
            exchange.
        kinds: what can be wished for, equal on all ranks; all kinds travel in one message.

    Collectives:
        One all-reduce of two integers for each kind on every rank of the group for each :meth:`post`, not waited for,
        and an object gather for each :meth:`settle`. All ranks must call them in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None, kinds: Sequence[str] = ("stop",)) -> None:
        self._group = group
        self._rank = dist.get_rank(group) if group is not None else 0
        self._kinds = tuple(kinds)
        self._wished: set[str] = set()
        self._agreed: dict[str, tuple[int, int]] = {}
        self._in_flight: tuple[dist.Work, torch.Tensor] | None = None

    def is_agreed(self, kind: str = "stop") -> bool:
        """Whether all ranks know of the wish; the same on all ranks between two exchanges."""
        return kind in self._agreed

    def wishers(self, kind: str = "stop") -> tuple[int, int] | None:
        """Returns how many ranks had the wish when it was agreed upon, and the sum of their ranks.

        ``None`` while it is not agreed upon. The same on all ranks between two exchanges.
        """
        return self._agreed.get(kind)

    def wish(self, kind: str = "stop") -> None:
        """Remembers a wish of this rank for the next exchange.

        Collectives:
            None.
        """
        self._wished.add(kind)

    def drop(self, kind: str = "stop") -> None:
        """Takes back a wish that is agreed upon; all ranks must do so between the same two exchanges.

        A wish that is under way cannot be taken back.

        Collectives:
            None.
        """
        if kind in self._agreed:
            del self._agreed[kind]
            self._wished.discard(kind)

    def post(self) -> None:
        """Reads the wishes of the last post, and sends those of now.

        Collectives:
            One all-reduce, not waited for until the next call.
        """
        if self._group is None:
            self._read(self._message())
            return
        self.receive()
        message = self._message()
        work = dist.all_reduce(message, dist.ReduceOp.SUM, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group
        self._in_flight = (work, message)

    def settle(self) -> None:
        """Exchanges all wishes at once.

        Collectives:
            One object gather.
        """
        self.receive()
        self._read(torch.stack(gather_objects(self._message(), self._group)).sum(0))

    def receive(self) -> None:
        """Reads the wishes of the last post, if nobody has yet; nothing is under way then.

        Collectives:
            None; it waits for that of the last post.
        """
        if self._in_flight is not None:
            work, message = self._in_flight
            self._in_flight = None
            work.wait()
            self._read(message)

    def end(self) -> None:
        """Lets go of the group, which must not outlive its destruction; what is agreed upon stays readable.

        Collectives:
            None.
        """
        self._group = self._in_flight = None

    def _message(self) -> torch.Tensor:
        message = torch.zeros(2 * len(self._kinds), dtype=torch.int64)
        for kind in self._wished.difference(self._agreed):
            position = 2 * self._kinds.index(kind)
            message[position], message[position + 1] = 1, self._rank
        return message

    def _read(self, message: torch.Tensor) -> None:
        numbers = message.tolist()
        if any(numbers):
            for kind, num_ranks, sum_of_ranks in zip(self._kinds, numbers[::2], numbers[1::2], strict=True):
                if num_ranks and kind not in self._agreed:
                    self._agreed[kind] = num_ranks, sum_of_ranks
