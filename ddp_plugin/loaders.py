"""Putting something else into a DataLoader without building the user's classes again.

Lightning changes a loader by calling its class anew with recorded arguments, which fails for classes with constructors
of their own. A shallow copy with one attribute exchanged keeps the class, its state and all that the user hung on it.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["replaced", "walk"]


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


def walk(loader: object) -> Iterator[object]:
    """Yields every object in reach of a loader that may keep an epoch or an order: batch samplers, samplers, datasets.

    Follows ``batch_sampler``, ``sampler``, ``samplers``, ``base_sampler``, ``dataset``, ``datasets`` and ``loader`` to
    any depth, each object once, cycles included.
    """
    seen: set[int] = set()
    stack: list[object] = [loader]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        yield item
        for name in ("dataset", "datasets", "sampler", "samplers", "base_sampler", "batch_sampler", "loader"):
            child = getattr(item, name, None)
            if isinstance(child, (list, tuple)):
                stack.extend(child)
            elif isinstance(child, dict):
                stack.extend(child.values())
            elif isinstance(child, Iterable) or hasattr(child, "__getitem__") or hasattr(child, "set_epoch"):
                stack.append(child)
