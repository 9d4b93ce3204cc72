"""What the callbacks share: the seams of the strategy that they use, and how they find them."""

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.errors import explain

__all__ = ["DataParallelStrategy", "framework_attributes", "transform_loaders"]


class DataParallelStrategy(Protocol):
    """The public methods of :class:`~ddp_plugin.CustomDDPStrategy` that callbacks build on."""

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The gloo group for small control messages."""

    def add_dataloader_transform(self, transform: Callable[[object, RunningStage], object]) -> None:
        """Lets a function replace each loader of each stage before its iterator exists."""


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
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            explain("a Trainer of lightning.pytorch", f"one of {type(trainer).__module__}", "Import lightning.pytorch")
        )
    strategy: Any = trainer.strategy
    if hasattr(strategy, "add_dataloader_transform"):
        ours = cast(DataParallelStrategy, strategy)
        ours.add_dataloader_transform(transform)
        return ours.control_group if trainer.world_size > 1 else None
    if trainer.world_size > 1:
        raise TypeError(
            explain(
                f"Trainer(strategy=CustomDDPStrategy()), because {type(callback).__name__} runs on several processes",
                f"strategy {type(strategy).__name__}",
                f"Pass strategy=CustomDDPStrategy() to the Trainer, or leave {type(callback).__name__} out",
            )
        )
    _compat.append_dataloader_transform(trainer, transform)
    return None


@functools.cache
def framework_attributes() -> frozenset[str]:
    """Names of the attributes that every LightningModule has; they are not the user's state."""
    return frozenset(vars(pl.LightningModule()))
