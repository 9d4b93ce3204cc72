"""Telling the epoch to everything that asks for it, workers that live for several epochs included."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_plugin.data.loaders import replaced, walk
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import Forwarder

__all__ = ["share_epoch", "tell_epoch"]


def tell_epoch(loader: object, epoch: int) -> None:
    """Calls every ``set_epoch`` in reach of a loader, once for each object.

    Args:
        loader: a loader, or any of the objects that :func:`~ddp_plugin.data.loaders.walk` follows.
        epoch: epoch, from 0.

    Raises:
        RuntimeError: a ``set_epoch`` raised; the message names the object.

    Collectives:
        None.
    """
    told: set[int] = set()
    # Inner ones first: where one passes the epoch on to another, the one that raises is named.
    for item in reversed(list(walk(loader))):
        if isinstance(item, _SharesEpoch):
            item.share(epoch)
        set_epoch = getattr(item, "set_epoch", None)
        owner = id(getattr(set_epoch, "__self__", item))  # an object that forwards attributes is not another owner
        if not callable(set_epoch) or owner in told:
            continue
        told.add(owner)
        name = f"{item.__class__.__module__}.{item.__class__.__qualname__}"
        try:
            set_epoch(epoch)
        except Exception as error:
            raise RuntimeError(
                explain(
                    f"set_epoch({epoch}) of {name}, in reach of a {type(loader).__name__}, to return",
                    repr(error),
                    f"Repair {name}.set_epoch; it is called with the epoch alone",
                )
            ) from error


def share_epoch(loader: Any) -> Any:
    """Lets a dataset's ``set_epoch`` reach persistent workers, which keep the copy of the dataset they started with.

    Args:
        loader: any loader.

    Returns:
        The loader itself, or, where persistent workers meet a dataset with ``set_epoch`` (at any depth), a copy whose
        dataset asks a number in shared memory before it fetches.

    Collectives:
        None.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers or not loader.persistent_workers:
        return loader
    if isinstance(loader.dataset, _SharesEpoch):  # a loader that was here before
        return loader
    if not any(callable(getattr(item, "set_epoch", None)) for item in walk(loader.dataset)):
        return loader
    cls = _IterableSharesEpoch if isinstance(loader.dataset, IterableDataset) else _MapSharesEpoch
    return replaced(loader, dataset=cls(loader.dataset))


class _SharesEpoch(Forwarder):
    """Stands for a dataset and tells it the epoch in whichever process it is asked for samples."""

    shared: torch.Tensor  # int64, shape (), the same memory in all workers
    known: int

    def __init__(self, dataset: Any) -> None:
        shared = torch.tensor(-1, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        super().__init__(dataset, shared=shared, known=-1)

    def __len__(self) -> int:
        return len(self.forwards_to)

    def share(self, epoch: int) -> None:
        """Makes the epoch known to all processes; this one's dataset is told by the caller."""
        self.shared.fill_(epoch)
        self.known = epoch

    def catch_up(self) -> Any:
        """Returns the dataset, which knows the epoch now."""
        epoch = int(self.shared)
        if epoch != self.known:
            tell_epoch(self.forwards_to, epoch)
            self.known = epoch
        return self.forwards_to


class _MapSharesEpoch(_SharesEpoch, Dataset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return self.catch_up()[index]

    @property
    def __getitems__(self) -> Any:
        # Asked for once per batch; without one in the dataset the AttributeError makes torch fetch item by item.
        return self.catch_up().__getitems__


class _IterableSharesEpoch(_SharesEpoch, IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(self.catch_up())
