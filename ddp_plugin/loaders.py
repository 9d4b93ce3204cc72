"""Putting something else into a DataLoader without building the user's classes again.

Lightning changes a loader by calling its class anew with recorded arguments, which fails for classes with constructors
of their own. A shallow copy with one attribute exchanged keeps the class, its state and all that the user hung on it.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddp_plugin import _compat
from ddp_plugin.errors import explain
from ddp_plugin.sampling import ExactBatchSampler

__all__ = ["Forwarder", "replaced", "share_loader", "shared_part", "walk"]


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


class Forwarder:
    """Stands for another object and changes one thing; all other attributes are that object's, read and written.

    It also answers ``isinstance`` as that object does, so code that asks for a ``DistributedSampler`` or for the user's
    own dataset class still finds one.

    Args:
        inner: the object; it stays reachable as ``forwards_to``.
    """

    _own = frozenset({"forwards_to"})  # names of the attributes that are not the other object's

    def __init__(self, inner: Any) -> None:
        self.forwards_to = inner

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self.forwards_to)

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._own or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet (copying, unpickling), or a protocol that it does not have
        return getattr(self.forwards_to, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.forwards_to, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.__dict__.copy())


def _revive(cls: type[Forwarder], attributes: dict[str, Any]) -> Forwarder:
    forwarder = cls.__new__(cls)
    forwarder.__dict__.update(attributes)
    return forwarder


def walk(loader: object) -> Iterator[object]:
    """Yields every object in reach of a loader that may keep an epoch or an order: batch samplers, samplers, datasets.

    Follows ``batch_sampler``, ``batches``, ``sampler``, ``samplers``, ``base_sampler``, ``dataset``, ``datasets`` and
    ``loader`` to any depth, each object once, cycles included; also what a :class:`Forwarder` or Lightning's own
    ``DistributedSamplerWrapper`` stands for.
    """
    seen: set[int] = set()
    stack: list[object] = [loader]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        yield item
        stack.append(_compat.inner_sampler(item))
        if isinstance(item, Forwarder):
            stack.append(item.forwards_to)
        for name in (
            "dataset",
            "datasets",
            "sampler",
            "samplers",
            "base_sampler",
            "batches",
            "batch_sampler",
            "loader",
        ):
            child = getattr(item, name, None)
            if isinstance(child, (list, tuple)):
                stack.extend(child)
            elif isinstance(child, dict):
                stack.extend(child.values())
            elif isinstance(child, Iterable) or hasattr(child, "__getitem__") or hasattr(child, "set_epoch"):
                stack.append(child)


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
        limit: see :class:`~ddp_plugin.sampling.ExactBatchSampler`.
        agree: see :class:`~ddp_plugin.sampling.ExactBatchSampler`.

    Raises:
        ValueError: a ``DistributedSampler`` sits where it cannot be replaced by the whole order.

    Collectives:
        None here; ``agree``'s while iterating.
    """
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if isinstance(batches, DistributedSampler):
        batches = _whole(batches)
    elif isinstance(getattr(batches, "sampler", None), DistributedSampler) and type(batches) is BatchSampler:
        batches = copy.copy(batches)
        batches.sampler = _whole(batches.sampler)
    elif any(isinstance(item, DistributedSampler) and item.num_replicas > 1 for item in walk(batches)):
        raise ValueError(
            explain(
                "an evaluation loader over the whole dataset",
                f"a DistributedSampler inside {type(batches).__name__}",
                "Take the DistributedSampler out: the batches are shared out here",
            )
        )
    part = ExactBatchSampler(batches, world_size, rank, limit, agree)
    return replaced(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": part})


def shared_part(loader: object) -> ExactBatchSampler | None:
    """Returns the part that :func:`share_loader` put into a loader, also inside wrappers added later."""
    return next((item for item in walk(loader) if isinstance(item, ExactBatchSampler)), None)


def _whole(sampler: DistributedSampler[Any]) -> DistributedSampler[Any]:
    """Returns a copy of a DistributedSampler that delivers its whole order, without padding."""
    if type(sampler) is not DistributedSampler:
        raise ValueError(
            explain(
                "torch's DistributedSampler, or a sampler over the whole dataset",
                f"its subclass {type(sampler).__name__}, which shares out in its own way",
                "Give the evaluation loader a sampler over the whole dataset",
            )
        )
    whole = copy.copy(sampler)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = len(sampler.dataset)  # type: ignore[arg-type]  # it has a length already
    return whole
