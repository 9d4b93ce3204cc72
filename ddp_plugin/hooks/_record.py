"""What a communication hook declares about itself: what it exchanges, what that costs, and how far it may be off."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange

__all__ = ["CommHook", "OuterStep", "all_gather_bytes", "largest_magnitude", "ring_bytes"]


@dataclass(frozen=True)
class OuterStep:
    """How parameters that every rank has trained alone for some steps become one model again.

    With ``learning_rate=1`` and ``momentum=0`` it is the mean of the ranks' parameters.

    Attributes:
        period: optimizer steps from one exchange to the next.
        learning_rate: of the outer SGD; its gradient is the last exchanged parameters minus the mean of the ranks' own.
        momentum: of the outer SGD.
        nesterov: whether its momentum is Nesterov's.
        num_exact_steps: optimizer steps, from the beginning of the run, until which ``between`` exchanges exactly.
    """

    period: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    num_exact_steps: int = 0


@dataclass(frozen=True)
class CommHook:
    """One way to keep the ranks' models the same, with what it costs and how far it may be off.

    Attributes:
        name: key in :data:`ddp_plugin.hooks.HOOKS`, or any label for a hook of your own.
        make_exchange: builds the exchange over the ranks of a group; called once for each model, on every rank.
        wire_bytes: ``(contents, world_size, rank) -> bytes`` that one rank sends in one exchange of what ``contents``
            describes, after ``start_step``. For ``outer``, ``contents`` are all parameters.
        error_bound: ``(gradients, contents) -> bounds``, both of shape ``(world_size or 1, num_elements)``, the first
            row the first rank's gradient: the bound on ``|result - mean|`` in each element, in one exchange that begins
            without residuals, for finite gradients whose sum does not overflow the wire's dtype; float64.
        is_exact: whether its result is the mean up to the order of additions.
        is_direct: whether a model's gradient takes one collective that DDP can wait for as it is; everything else runs
            in a lane, on a group of its own.
        outer: for a hook that exchanges parameters every few steps, and no gradients: how; else ``None``.
        between: for a hook that leaves the way between nodes to another one: that one.
        start_step: number of first exchanges of each parameter that are exact; for ``outer``, of first optimizer steps
            whose gradients become their exact mean.
        needs_matrices: whether it looks at whole parameters; another hook may divide a bucket only between them then.
        exchanges_nothing: whether the ranks never meet, so that nothing about them is the same.
        refusal: why this hook must not train, in words; ``None`` where it may.
        options: the options that it was made with, for messages and checkpoints.
    """

    name: str
    make_exchange: Callable[[dist.ProcessGroup], Exchange]
    wire_bytes: Callable[[Contents, int, int], int]
    error_bound: Callable[[torch.Tensor, Contents], torch.Tensor]
    is_exact: bool = False
    is_direct: bool = False
    outer: OuterStep | None = None
    between: "CommHook | None" = None
    start_step: int = 0
    needs_matrices: bool = False
    exchanges_nothing: bool = False
    refusal: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def synchronises(self) -> str:
        """What it makes the same on all ranks: ``"gradients"``, once a period ``"parameters"``, or ``"nothing"``."""
        if self.exchanges_nothing:
            return "nothing"
        return "gradients" if self.outer is None else "parameters"

    @property
    def period(self) -> int:
        """Optimizer steps from one exchange to the next."""
        return 1 if self.outer is None else self.outer.period

    def __str__(self) -> str:
        options = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.name}({options})"


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


def all_gather_bytes(num_bytes: int, world_size: int) -> int:
    """Bytes that one rank sends in a ring all-gather: its own part and those of all others but one, passed on.

    Args:
        num_bytes: bytes that one rank contributes.
        world_size: number of ranks.
    """
    return (world_size - 1) * num_bytes


def largest_magnitude(gradients: torch.Tensor) -> torch.Tensor:
    """Returns each element's largest magnitude over the ranks: ``(world_size, n)`` to ``(1, n)``, in float64."""
    return gradients.to(torch.float64).abs().amax(dim=0, keepdim=True)
