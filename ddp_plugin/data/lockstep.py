"""Loaders that must not be shared out here, kept in step all the same.

An evaluation goes on while any rank has a batch: the others repeat theirs, and it does not count. Training stops
together: what one rank has left when another has nothing is dropped, and said.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddp_plugin.data.sampling import length_of
from ddp_plugin.forwarding import ForwardsReads
from ddp_plugin.gather import broadcast_object, gather_objects

__all__ = ["LockstepLoader", "StopTogetherLoader"]

_END = object()
_DIGESTED_ELEMENTS = 1024  # of each tensor: enough to tell samples apart, whatever the size of an image


class LockstepLoader(ForwardsReads):
    """Delivers a rank's own batches, then repeats its last one until every rank has delivered all of theirs.

    It is for loaders that this package must not share out: iterable datasets, iterables that are no DataLoader, and
    loaders that the user has shared out already. The repeated batches are ghosts; see :mod:`ddp_plugin.ghost`.

    Args:
        loader: any iterable of batches; its attributes are forwarded.
        group: the control group.

    Attributes:
        num_own_batches: batches of this rank's own in the latest iteration, so far.
        delivers_the_same: whether another rank's first batch was the same as this one's, in the latest iteration.

    Collectives:
        At construction one object gather (lengths). While iterating one all-reduce of an integer per batch, with two
        more messages at the first one. All on the control group, on all ranks alike.
    """

    def __init__(self, loader: Iterable[Any], group: dist.ProcessGroup) -> None:
        self.forwards_to = loader
        self._group = group
        self.num_own_batches = 0
        self.delivers_the_same = False
        lengths = gather_objects(length_of(loader), group)
        self._length = None if None in lengths else max(lengths)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.forwards_to).__name__} has no length on at least one rank")
        length: int = self._length
        return length

    def __iter__(self) -> Iterator[Any]:
        self.num_own_batches = 0
        batches = iter(self.forwards_to)
        batch = next(batches, _END)
        repeated = self._first(batch)
        if repeated is _END:
            return
        while True:
            is_own = batch is not _END
            current = batch if is_own else copy.deepcopy(repeated)
            if is_own:
                self.num_own_batches += 1
                batch = next(batches, _END)
                if batch is _END:
                    repeated = copy.deepcopy(current)  # a step may change what it is given
            yield current
            if not self._any_rank_has(batch is not _END):
                return

    def _first(self, batch: Any) -> Any:
        """Agrees on the first step; a rank without any batch is sent another's, to have something for its ghosts."""
        has_batch = batch is not _END
        digests = gather_objects(_digest(batch) if has_batch else None, self._group)
        holders = [rank for rank, digest in enumerate(digests) if digest is not None]
        self.delivers_the_same = has_batch and digests.count(digests[dist.get_rank(self._group)]) > 1
        if not holders:
            return _END
        if len(holders) < len(digests):
            sent = broadcast_object(batch if has_batch else None, self._group, source=holders[0])
            return batch if has_batch else sent
        return batch

    def _any_rank_has(self, has_batch: bool) -> bool:
        flag = torch.tensor([int(has_batch)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def is_ghost(self, step: int) -> bool:
        """Whether a step of the latest iteration repeats a batch."""
        return step >= self.num_own_batches


class StopTogetherLoader(ForwardsReads):
    """Delivers a rank's own batches for as long as every rank has one.

    The next batch is fetched, and its existence agreed on, while the current one is in use.

    Args:
        loader: any iterable of batches; its attributes are forwarded.
        group: the control group, ``None`` for one process.
        num_skipped: gives the batches that an iterator made now fetches and drops, because they were trained on before.
        report: called at the end of an iteration that left batches behind, with the number of batches delivered and,
            by rank, whether it had more.
        cycles: whether the loader is begun again when it ends, so that batches to drop may reach beyond its end.

    Attributes:
        lengths: what each rank's loader says its length is, ``None`` where it does not.
        delivers_the_same: whether another rank's first batch was the same as this one's, in the first iteration.

    Collectives:
        At construction one object gather (lengths). While iterating one asynchronous all-reduce of an integer per
        batch, one object gather at the first batch of the first iteration, and one at the end. All on the control
        group, on all ranks alike.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        group: dist.ProcessGroup | None,
        num_skipped: Callable[[], int],
        report: Callable[[int, list[bool]], None],
        cycles: Callable[[], bool] = lambda: False,
    ) -> None:
        self.forwards_to = loader
        self._cycles = cycles
        self._group = group
        self._num_skipped = num_skipped
        self._report = report
        self._has_looked = False
        self.delivers_the_same = False
        self.lengths = gather_objects(length_of(loader), group)
        self._length = None if None in self.lengths else min(self.lengths)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.forwards_to).__name__} has no length on at least one rank")
        length: int = self._length
        return length

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.forwards_to)
        for _ in range(self._num_skipped()):
            if next(batches, _END) is _END and self._cycles():
                batches = iter(self.forwards_to)
                next(batches, _END)
        batch = next(batches, _END)
        if not self._has_looked:
            self._has_looked = True
            digests = gather_objects(None if batch is _END else _digest(batch), self._group)
            own = digests[0 if self._group is None else dist.get_rank(self._group)]
            self.delivers_the_same = own is not None and digests.count(own) > 1
        num_delivered = 0
        wait = self._ask(batch is not _END)
        while wait():
            following = next(batches, _END)
            wait = self._ask(following is not _END)
            yield batch
            num_delivered += 1
            batch = following
        has_more = gather_objects(batch is not _END, self._group)
        if any(has_more):
            self._report(num_delivered, has_more)

    def _ask(self, has_batch: bool) -> Callable[[], bool]:
        """Starts asking whether all ranks have a batch; the function that is returned waits for the answer."""
        if self._group is None:
            return lambda: has_batch
        flag = torch.tensor([int(has_batch)], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group, async_op=True)

        def wait() -> bool:
            assert work is not None
            work.wait()
            return bool(flag.item())

        return wait


def _digest(batch: Any) -> str:
    """Hashes the beginning of what a batch holds; equal contents give equal digests in different processes."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
        digest.update(type(value).__name__.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            beginning = value.detach().reshape(-1)[:_DIGESTED_ELEMENTS].cpu().contiguous()
            digest.update(beginning.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype} {value.shape}".encode())
            digest.update(value.reshape(-1)[:_DIGESTED_ELEMENTS].tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                add(key)
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            digest.update(repr(value).encode())

    add(batch)
    return digest.hexdigest()
