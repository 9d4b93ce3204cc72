"""How an evaluation or prediction loader is shared out among the ranks of a Trainer."""

import math

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from ddp_plugin import _compat
from ddp_plugin.data.loaders import asks_its_sampler, order_of, share_loader, shared_part, walk
from ddp_plugin.data.lockstep import LockstepLoader
from ddp_plugin.data.orders import agree_on_order

__all__ = ["share_or_keep_in_step", "steps_limit"]


def share_or_keep_in_step(loader: object, trainer: pl.Trainer, group: dist.ProcessGroup | None) -> object:
    """Shares a loader out by whole batches where that is safe, and otherwise keeps it in step as it is.

    Args:
        loader: a loader of an evaluation or prediction stage.
        trainer: its Trainer.
        group: the control group, ``None`` for one process.

    Collectives:
        One object gather where the loader is only kept in step; those of
        :func:`~ddp_plugin.data.orders.agree_on_order` while iterating.
    """
    if shared_part(loader) is not None or isinstance(loader, LockstepLoader):
        return loader
    if isinstance(loader, DataLoader) and asks_its_sampler(loader):
        # Torch's own sampler says what it does, so it can be undone; a subclass of it is the user's business.
        is_torchs = any(type(item) is DistributedSampler for item in walk(loader))
        if is_torchs or _compat.uses_distributed_sampler(trainer):
            _, batches = order_of(loader)
            return share_loader(
                loader,
                trainer.world_size,
                trainer.global_rank,
                limit=lambda num_steps: steps_limit(trainer, num_steps),
                agree=lambda drawn: agree_on_order(drawn, batches, group, "evaluation"),
            )
    return loader if group is None else LockstepLoader(loader, group)  # type: ignore[arg-type]


def steps_limit(trainer: pl.Trainer, num_steps: int | None) -> int | None:
    """Returns how many of ``num_steps`` steps the Trainer's limits allow in the stage that runs now."""
    limit: int | float
    if trainer.testing:
        limit = trainer.limit_test_batches
    elif trainer.predicting:
        limit = trainer.limit_predict_batches
    else:
        limit = trainer.limit_val_batches
    if isinstance(limit, float):
        limit = math.inf if num_steps is None else int(num_steps * limit)
    if trainer.sanity_checking:
        limit = min(limit, trainer.num_sanity_val_steps)
    return None if math.isinf(limit) else int(limit)
