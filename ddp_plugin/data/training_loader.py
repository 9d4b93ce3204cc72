"""What becomes of a training loader on many ranks: its order is dealt out, or it is left alone and kept in step."""

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_plugin.data.loaders import asks_its_sampler, order_of, replaced, walk, whole
from ddp_plugin.data.sharded_sampler import ShardedBatchSampler
from ddp_plugin.data.sharding import Shards
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import Forwarder
from ddp_plugin.gather import gather_objects

__all__ = ["shard_training_loader", "sharded_part"]


def shard_training_loader(
    loader: object,
    shards: Shards,
    last_batch: str,
    seed: Callable[[], int],
    epoch: Callable[[], int],
    group: dist.ProcessGroup | None,
    *,
    only_torchs: bool,
) -> Any:
    """Returns a copy of a training loader that delivers one rank's part, or ``None`` where it must be left alone.

    Left alone are iterable datasets, loaders with an ``__iter__`` of their own (they may never ask their batch
    sampler), and loaders that a sampler shares out in a way of its own: subclasses of ``DistributedSampler``, and batch
    samplers that hold one. Torch's own ``DistributedSampler`` says what it does, so it is made whole first.

    Args:
        loader: any loader.
        shards: see :class:`~ddp_plugin.data.sharded_sampler.ShardedBatchSampler`, as all that follow.
        last_batch: see there.
        seed: see there.
        epoch: see there.
        group: see there.
        only_torchs: leave alone whatever torch's ``DistributedSampler`` does not share out already.

    Raises:
        ValueError: on all ranks, if the ranks' loaders hold different numbers of samples: each rank has a part already.
            Or if their batches are not equally large, or not all leave out a last one that is not full: a part of one
            order can be dealt out by one size alone, and the ranks would take unequal numbers of steps.

    Collectives:
        One object gather on the control group, on all ranks, if the loader is dealt out.
    """
    if not isinstance(loader, DataLoader) or not asks_its_sampler(loader):
        return None
    name, outer = order_of(loader)
    batches = outer
    while isinstance(batches, Forwarder):
        batches = batches.forwards_to
    num_ranks = shards.num_shards // shards.num_per_rank
    is_torchs, batches = _made_whole(batches, num_ranks)
    if batches is None or (only_torchs and not is_torchs):
        return None
    part = ShardedBatchSampler(
        batches,
        shards,
        last_batch,
        seed,
        epoch,
        group,
        batched=name == "batch_sampler" or isinstance(batches, BatchSampler),
    )
    _refuse_unequal(part, group)
    return replaced(loader, **{name: _inside(outer, part)})


def sharded_part(loader: object) -> ShardedBatchSampler | None:
    """Returns the part that :func:`shard_training_loader` put into a loader, also inside wrappers added later."""
    return next((item for item in walk(loader) if isinstance(item, ShardedBatchSampler)), None)


def _made_whole(batches: Any, num_ranks: int) -> tuple[bool, Any]:
    """Returns whether torch's DistributedSampler was there, and the sampler over all; ``None`` where nobody can."""
    sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) is DistributedSampler and sampler.num_replicas in (1, num_ranks):
        if sampler is batches:
            return True, whole(sampler)
        batches = copy.copy(batches)
        batches.sampler = whole(sampler)
        return True, batches
    if any(isinstance(item, DistributedSampler) and item.num_replicas > 1 for item in walk(batches)):
        return False, None
    return False, batches


def _inside(outer: Any, part: ShardedBatchSampler) -> Any:
    """Puts the part where the user's sampler was, inside of what forwards to that."""
    if not isinstance(outer, Forwarder):
        return part
    clone = copy.copy(outer)
    vars(clone)["forwards_to"] = _inside(outer.forwards_to, part)
    return clone


def _refuse_unequal(part: ShardedBatchSampler, group: dist.ProcessGroup | None) -> None:
    told = gather_objects((part.num_items, part.items_per_batch, part.drops_last), group)
    lengths, sizes, drops = ([each[index] for each in told] for index in range(3))
    if len(set(lengths)) > 1:
        raise ValueError(
            explain(
                "the same training data on every rank, to be shared out here",
                f"{lengths} samples or batches, by rank",
                "Give every rank the whole dataset; or, if each rank holds its own part on purpose, pass "
                "Trainer(use_distributed_sampler=False)",
            )
        )
    if len(set(sizes)) > 1 or len(set(drops)) > 1:
        name, found = ("batch_size", sizes) if len(set(sizes)) > 1 else ("drop_last", drops)
        raise ValueError(
            explain(
                f"the same {name} in the training loader of every rank, because one order is dealt out to all",
                f"{found}, by rank",
                "Give every rank the same; or, if batches are to differ, let each rank hold its own part and pass "
                "Trainer(use_distributed_sampler=False), where the ranks stop together",
            )
        )
