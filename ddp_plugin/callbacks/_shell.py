"""What the callbacks share: the seams of the strategy that they use, and how they find them."""

from collections.abc import Callable
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin.errors import explain

__all__ = ["DataParallelStrategy", "require_strategy"]


class DataParallelStrategy(Protocol):
    """The public methods of :class:`~ddp_plugin.CustomDDPStrategy` that callbacks build on."""

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The gloo group for small control messages."""

    def add_dataloader_transform(self, transform: Callable[[object, RunningStage], object]) -> None:
        """Lets a function replace each loader of each stage before its iterator exists."""


def require_strategy(callback: pl.Callback, trainer: pl.Trainer) -> DataParallelStrategy | None:
    """Returns the Trainer's strategy if it has our seams, or ``None`` where one process makes them unnecessary.

    Raises:
        TypeError: the Trainer comes from ``pytorch_lightning``, or several processes run under another strategy.
    """
    if not isinstance(trainer, pl.Trainer):
        raise TypeError(
            explain("a Trainer of lightning.pytorch", f"one of {type(trainer).__module__}", "Import lightning.pytorch")
        )
    strategy: Any = trainer.strategy
    if hasattr(strategy, "add_dataloader_transform"):
        return cast(DataParallelStrategy, strategy)
    if trainer.world_size > 1:
        raise TypeError(
            explain(
                f"Trainer(strategy=CustomDDPStrategy()), because {type(callback).__name__} runs on several processes",
                f"strategy {type(strategy).__name__}",
                f"Pass strategy=CustomDDPStrategy() to the Trainer, or leave {type(callback).__name__} out",
            )
        )
    return None
