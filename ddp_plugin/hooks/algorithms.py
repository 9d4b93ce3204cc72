"""The exact mean by an algorithm of one's choice, over send and receive: to see one at work, or to use its shape.

A backend's own all-reduce is what to use otherwise: gloo's is a ring too, and NCCL picks by size and topology.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin.collectives import loads, make_schedule, run
from ddp_plugin.errors import check_count
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange
from ddp_plugin.hooks._record import CommHook
from ddp_plugin.hooks.exact import summation_error

__all__ = ["Algorithm", "butterfly", "parameter_server", "ring", "tree"]


class Algorithm(Exchange):
    """One all-reduce of :data:`ddp_plugin.collectives.ALGORITHMS`.

    Args:
        group: the ranks.
        algorithm: its name.
        options: its options.
    """

    def __init__(self, group: dist.ProcessGroup, algorithm: str, **options: Any) -> None:
        super().__init__(group)
        self._schedule = make_schedule(algorithm, self.world_size, **options)

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`.

        Collectives:
            Sends and receives between all ranks of the group.
        """
        run(self._schedule, values.mul_(1.0 / self.world_size), self.group)


def _wire_bytes(contents: Contents, world_size: int, rank: int, algorithm: str, **options: Any) -> int:
    schedule = make_schedule(algorithm, world_size, **options)
    return loads(schedule, contents.num_elements, contents.element_size_bytes)[rank].sent_bytes


def _record(algorithm: str, **options: Any) -> CommHook:
    return CommHook(
        algorithm,
        partial(Algorithm, algorithm=algorithm, **options),
        partial(_wire_bytes, algorithm=algorithm, **options),
        summation_error,
        is_exact=True,
        options=options,
    )


def ring() -> CommHook:
    """All-reduce around a ring; see :func:`ddp_plugin.collectives.schedules.ring`.

    Collectives:
        Sends and receives per bucket on a group of their own, in the lane, on all ranks.
    """
    return _record("ring")


def tree() -> CommHook:
    """All-reduce along a binomial tree; see :func:`ddp_plugin.collectives.schedules.tree`.

    Collectives:
        As :func:`ring`.
    """
    return _record("tree")


def butterfly() -> CommHook:
    """All-reduce by recursive halving and doubling; see :func:`ddp_plugin.collectives.schedules.butterfly`.

    Collectives:
        As :func:`ring`.
    """
    return _record("butterfly")


def parameter_server(num_servers: int = 1) -> CommHook:
    """All-reduce at servers; see :func:`ddp_plugin.collectives.schedules.parameter_server`.

    Args:
        num_servers: how many ranks serve, the first ones; at least 1, and at most the number of ranks, which is checked
            when these are known.

    Raises:
        ValueError: a number below 1.

    Collectives:
        As :func:`ring`.
    """
    check_count("num_servers", num_servers, 1)
    return _record("parameter_server", num_servers=num_servers)
