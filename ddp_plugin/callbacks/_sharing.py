"""How an evaluation or prediction loader is shared out among the ranks of a Trainer."""

import math
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_plugin import _compat
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import Forwarder
from ddp_plugin.gather import broadcast_object, gather_objects
from ddp_plugin.loaders import share_loader, shared_part, walk
from ddp_plugin.lockstep import LockstepLoader

__all__ = ["agree_on_batches", "share_or_keep_in_step", "steps_limit"]


def share_or_keep_in_step(loader: object, trainer: pl.Trainer, group: dist.ProcessGroup | None) -> object:
    """Shares a loader out by whole batches where that is safe, and otherwise keeps it in step as it is.

    Args:
        loader: a loader of an evaluation or prediction stage.
        trainer: its Trainer.
        group: the control group, ``None`` for one process.

    Collectives:
        One object gather where the loader is only kept in step; those of :func:`agree_on_batches` while iterating.
    """
    if shared_part(loader) is not None or isinstance(loader, LockstepLoader):
        return loader
    # A loader that iterates in its own way may never ask its batch sampler, so changing that would change nothing.
    iterates_as_torchs = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if iterates_as_torchs and isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
        # Torch's own sampler says what it does, so it can be undone; a subclass of it is the user's business.
        is_torchs = any(type(item) is DistributedSampler for item in walk(loader))
        if is_torchs or _compat.uses_distributed_sampler(trainer):
            batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            return share_loader(
                loader,
                trainer.world_size,
                trainer.global_rank,
                limit=lambda num_steps: steps_limit(trainer, num_steps),
                agree=lambda drawn: agree_on_batches(drawn, batches, group),
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


_SHARED_OUT_BY_NOBODY = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def agree_on_batches(drawn: list[Any], batches: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns rank 0's batches on every rank, unless the ranks' lists show that the loader is shared out already.

    Args:
        drawn: this rank's list of batches of indices.
        batches: the sampler it came from.
        group: the control group.

    Raises:
        ValueError: on all ranks, if a sampler of the user's own delivers mostly different samples on different ranks.

    Collectives:
        One broadcast and one object gather, on all ranks.
    """
    if group is None:
        return drawn
    agreed: list[Any] = broadcast_object(drawn, group)
    while isinstance(batches, Forwarder):
        batches = batches.forwards_to
    source = getattr(batches, "sampler", batches) if type(batches) is BatchSampler else batches
    differs = False
    if not isinstance(source, _SHARED_OUT_BY_NOBODY):
        own, first = ({repr(i) for batch in part for i in _members(batch)} for part in (drawn, agreed))
        differs = 2 * len(own & first) < min(len(own), len(first))
    if any(gather_objects(differs, group)):
        raise ValueError(
            explain(
                "an evaluation loader that delivers the whole dataset on every rank",
                f"{type(source).__name__}, which delivers different samples on different ranks",
                "Let the sampler deliver the whole order; or, if it is shared out by rank on purpose, pass "
                "Trainer(use_distributed_sampler=False)",
            )
        )
    return agreed


def _members(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]
