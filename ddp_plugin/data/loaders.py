"""Putting something else into a DataLoader without building the user's classes again.

Lightning changes a loader by calling its class anew with recorded arguments, which fails for classes with constructors
of their own. A shallow copy with one attribute exchanged keeps the class, its state and all that the user hung on it.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from ddp_plugin import _compat
from ddp_plugin.data.sampling import ExactBatchSampler
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import ForwardsReads

__all__ = ["asks_its_sampler", "order_of", "replaced", "share_loader", "shared_part", "walk", "whole"]


def order_of(loader: DataLoader[Any]) -> tuple[str, Any]:
    """Returns the attribute that decides a loader's order, by name, and its value: batch sampler, or else sampler."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    return name, getattr(loader, name)


def asks_its_sampler(loader: object) -> bool:
    """Whether changing a loader's sampler changes what it delivers.

    Not so for iterable datasets, and for loaders with an ``__iter__`` of their own, which may never ask it.
    """
    iterates_as_torchs = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return iterates_as_torchs and not isinstance(loader.dataset, IterableDataset)  # type: ignore[attr-defined]


def replaced(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Returns a shallow copy of a loader with some attributes exchanged; the original is not touched.

    Args:
        loader: any DataLoader, also of a class of the user's own.
        attributes: new values, such as ``batch_sampler``, ``sampler``, ``dataset`` or ``worker_init_fn``.

    Returns:
        A loader of the same class, without a live iterator.

    Collectives:
        None.
    """
    clone = copy.copy(loader)
    # Written past __setattr__, which refuses sampler and dataset after construction; that refusal protects against an
    # inconsistent pair of them, and the callers exchange them consistently.
    clone.__dict__.update(attributes, _iterator=None)
    return clone


_MOST_OBJECTS = 10_000  # an end for objects that answer every name with a new one


def _attribute(item: object, name: str) -> Any:
    try:
        return getattr(item, name, None)
    except Exception:  # a property that cannot answer yet holds nothing that could be told an epoch
        return None


def walk(loader: object) -> Iterator[object]:
    """Yields every object in reach of a loader that may keep an epoch or an order: batch samplers, samplers, datasets.

    Follows ``batch_sampler``, ``sampler``, ``samplers``, ``base_sampler``, ``dataset``, ``datasets`` and ``loader`` to
    any depth, each object once, cycles included; also what an object forwards to, and what is inside Lightning's own
    ``DistributedSamplerWrapper``. Lists and dicts are looked into only where the name is a plural: elsewhere they are
    data.
    """
    seen: set[int] = set()
    stack: list[object] = [loader]
    while stack and len(seen) < _MOST_OBJECTS:
        item = stack.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        yield item
        stack.append(_compat.inner_sampler(item))
        if isinstance(item, ForwardsReads):
            stack.append(item.forwards_to)
        for name in ("dataset", "sampler", "base_sampler", "batch_sampler", "loader"):
            child = _attribute(item, name)
            if not isinstance(child, (list, tuple, dict, str, bytes, int, float)):
                stack.append(child)
        for name in ("datasets", "samplers"):
            children = _attribute(item, name)
            if isinstance(children, (list, tuple, dict)):
                stack.extend(children.values() if isinstance(children, dict) else children)


def share_loader(
    loader: DataLoader[Any],
    world_size: int,
    rank: int,
    limit: Callable[[int | None], int | None],
    agree: Callable[[list[Any]], list[Any]],
) -> DataLoader[Any]:
    """Returns a copy of an evaluation loader that delivers one rank's share of the batches, each batch on one rank.

    Args:
        loader: a loader of a map-style dataset, with any sampler, batch sampler or none (``batch_size=None``).
        world_size: number of ranks.
        rank: this rank.
        limit: see :class:`~ddp_plugin.data.sampling.ExactBatchSampler`.
        agree: see :class:`~ddp_plugin.data.sampling.ExactBatchSampler`.

    Raises:
        ValueError: a ``DistributedSampler`` sits where it cannot be replaced by the whole order.

    Collectives:
        None here; ``agree``'s while iterating.
    """
    batches: Any
    name, batches = order_of(loader)
    if isinstance(batches, DistributedSampler):
        batches = whole(batches)
    elif isinstance(getattr(batches, "sampler", None), DistributedSampler) and type(batches) is BatchSampler:
        batches = copy.copy(batches)
        batches.sampler = whole(batches.sampler)
    elif any(isinstance(item, DistributedSampler) and item.num_replicas > 1 for item in walk(batches)):
        raise ValueError(
            explain(
                "an evaluation loader over the whole dataset",
                f"a DistributedSampler inside {type(batches).__name__}",
                "Take the DistributedSampler out: the batches are shared out here",
            )
        )
    batched = name == "batch_sampler" or isinstance(batches, BatchSampler)
    part = ExactBatchSampler(batches, world_size, rank, limit, agree, batched=batched)
    changes: dict[str, Any] = {name: part}
    if hasattr(loader, "in_order"):
        changes["in_order"] = True  # a batch is known by its position: which it is, and whether it is a ghost
    return replaced(loader, **changes)


def shared_part(loader: object) -> ExactBatchSampler | None:
    """Returns the part that :func:`share_loader` put into a loader, also inside wrappers added later."""
    return next((item for item in walk(loader) if isinstance(item, ExactBatchSampler)), None)


def whole(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Returns a copy of a DistributedSampler that delivers its whole order, without padding.

    Raises:
        ValueError: it is a subclass, which may share out in a way of its own.
    """
    if type(sampler) is not DistributedSampler:
        raise ValueError(
            explain(
                "torch's DistributedSampler, or a sampler over the whole dataset",
                f"its subclass {type(sampler).__name__}, which shares out in its own way",
                "Give the evaluation loader a sampler over the whole dataset",
            )
        )
    clone = copy.copy(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]  # it has a length already
    clone.num_samples = clone.total_size = length - length % sampler.num_replicas if sampler.drop_last else length
    clone.num_replicas, clone.rank = 1, 0
    return clone
