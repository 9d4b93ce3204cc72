"""What the callbacks share: the seams of the strategy that they use, and how they find them."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.data.sharding import Shards
from ddp_plugin.errors import explain

__all__ = [
    "DataParallelStrategy",
    "control_group_of",
    "framework_attributes",
    "logical_shards",
    "shards_of",
    "transform_loaders",
]


class DataParallelStrategy(Protocol):
    """The public methods of :class:`~ddp_plugin.CustomDDPStrategy` that callbacks build on."""

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The gloo group for small control messages."""

    def add_dataloader_transform(self, transform: Callable[[object, RunningStage], object]) -> None:
        """Lets a function replace each loader of each stage before its iterator exists."""


def control_group_of(callback: pl.Callback, trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """Returns the strategy's control group, or ``None`` for one process, which may run under any strategy.

    Args:
        callback: the callback, named in errors.
        trainer: its Trainer; the process group exists.

    Raises:
        TypeError: the Trainer comes from ``pytorch_lightning``, or several processes run under another strategy.
        ValueError: the Trainer has two callbacks of this kind.

    Collectives:
        None.
    """
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            explain("a Trainer of lightning.pytorch", f"one of {type(trainer).__module__}", "Import lightning.pytorch")
        )
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    alike = [other for other in callbacks if type(other) is type(callback)]
    if len(alike) > 1:
        name = type(callback).__name__
        raise ValueError(
            explain(
                f"one {name}", f"{len(alike)} of them", f"Pass yours to default_callbacks({name}(...)), or leave it out"
            )
        )
    if trainer.world_size == 1:
        return None
    if not hasattr(trainer.strategy, "control_group"):
        raise TypeError(
            explain(
                f"Trainer(strategy=CustomDDPStrategy()), because {type(callback).__name__} runs on several processes",
                f"strategy {type(trainer.strategy).__name__}",
                f"Pass strategy=CustomDDPStrategy() to the Trainer, or leave {type(callback).__name__} out",
            )
        )
    return cast(DataParallelStrategy, trainer.strategy).control_group


def transform_loaders(
    callback: pl.Callback, trainer: pl.Trainer, transform: Callable[[Any, RunningStage], object]
) -> dist.ProcessGroup | None:
    """Lets a callback replace each loader of each stage, and gives it the group to agree over.

    Args:
        callback: the callback, named in errors.
        trainer: its Trainer; the process group exists.
        transform: ``(loader, stage) -> loader``; adding an equal one again changes nothing.

    Returns:
        The control group, or ``None`` for one process, which may run under any strategy.

    Raises:
        TypeError: the Trainer comes from ``pytorch_lightning``, or several processes run under another strategy.

    Collectives:
        None.
    """
    group = control_group_of(callback, trainer)
    strategy: Any = trainer.strategy
    if hasattr(strategy, "add_dataloader_transform"):
        cast(DataParallelStrategy, strategy).add_dataloader_transform(transform)
    else:
        _compat.append_dataloader_transform(trainer, transform)
    return group


@functools.cache
def framework_attributes() -> frozenset[str]:
    """Names of the attributes that every LightningModule has; they are not the user's state."""
    return frozenset(vars(pl.LightningModule()))


def logical_shards(trainer: pl.Trainer) -> int | None:
    """Returns the strategy's number of logical shards per step, ``None`` where the ranks are the shards."""
    shards: int | None = getattr(trainer.strategy, "logical_shards", None)
    return shards


def shards_of(trainer: pl.Trainer) -> Shards:
    """Returns the shards of a Trainer's global batches and which of them its rank computes."""
    num_shards = logical_shards(trainer) or trainer.world_size
    return Shards(num_shards, trainer.global_rank, num_shards // trainer.world_size)
