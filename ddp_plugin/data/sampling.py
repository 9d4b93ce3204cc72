"""Who sees which sample when: pure index arithmetic, then the samplers that carry it.

Evaluation is shared out by *whole batches of the user's own order*, in contiguous blocks. Every batch is then exactly
one that a single process would have seen, so whatever a step computes per batch (a mean, a maximum, a count) is
computed from the same samples; and joining the ranks' blocks in rank order gives back the one order. Sharing out
samples instead would change the batches, and with them every number that is not a plain mean.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from ddp_plugin.forwarding import ForwardsReads

__all__ = ["BatchShare", "ExactBatchSampler", "batch_fingerprint", "length_of", "num_eval_steps", "share_batches"]


def length_of(items: object) -> int | None:
    """Returns how many items there are, or ``None`` where the object does not say."""
    try:
        return len(items)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def num_eval_steps(num_batches: int, world_size: int, limit: int | None = None) -> int:
    """Steps that every rank takes to evaluate ``num_batches`` batches; at most ``limit``.

    It equals what padding samples evenly would take: ``ceil(ceil(N / B) / W) == ceil(ceil(N / W) / B)``.
    """
    steps = -(-num_batches // world_size)
    return steps if limit is None else min(steps, limit)


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of an evaluation.

    Attributes:
        start: position of its first batch in the one-process order.
        stop: position after its last one; ``start == stop`` means it has none.
        num_steps: steps it takes, the same on all ranks.
        num_batches: batches that all ranks together evaluate.
    """

    start: int
    stop: int
    num_steps: int
    num_batches: int

    @property
    def num_ghost_steps(self) -> int:
        """Steps without a batch of its own, taken so that collectives inside a step match."""
        return self.num_steps - (self.stop - self.start)


def share_batches(num_batches: int, world_size: int, rank: int, limit: int | None = None) -> BatchShare:
    """Gives a rank its contiguous block of the one-process order, as even as possible, larger blocks first.

    Args:
        num_batches: batches that one process would evaluate.
        world_size: number of ranks.
        rank: this rank.
        limit: most steps per rank; the first ``limit * world_size`` batches are then shared out.

    Returns:
        Blocks that are disjoint, cover those batches, and join to their order. Rank 0 never takes a ghost step.
    """
    steps = num_eval_steps(num_batches, world_size, limit)
    shared = min(num_batches, steps * world_size)
    size, remainder = divmod(shared, world_size)
    start = rank * size + min(rank, remainder)
    return BatchShare(start, start + size + (rank < remainder), steps, shared)


def batch_fingerprint(position: int, indices: Sequence[Any]) -> int:
    """Hashes a batch with its position to 64 bits; sums of them (mod 2**64) do not depend on who evaluated what."""
    text = f"{position}:{list(indices)!r}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _no_limit(num_steps: int | None) -> int | None:
    return None


def _as_drawn(batches: list[Any]) -> list[Any]:
    return batches


class ExactBatchSampler(ForwardsReads):
    """Yields this rank's block of the user's own batches, then repeats a batch for its ghost steps.

    The user's batch sampler (or sampler, for loaders without batching) is kept and asked as one process would ask it.
    An order that may be random is drawn on every rank, so that all random streams advance alike, and rank 0's is taken.

    Args:
        batches: the user's batch sampler; any iterable of batches of indices.
        world_size: number of ranks.
        rank: this rank.
        limit: ``(num_steps) -> most``: given the steps a rank would take without a limit (``None`` if not known),
            returns the most it may take in the coming evaluation, or ``None``.
        agree: ``(batches) -> batches``: makes every rank's list rank 0's. It runs once per iteration, on all ranks, and
            only for orders that are not known to be the same everywhere.
        batched: whether an item is a batch of indices; ``False``: it is the index of a sample that is its own batch.

    Attributes:
        share: this rank's part in the latest iteration.
        num_samples_planned: samples that all ranks together evaluate in the latest iteration.
        num_batches_left_out: batches that a limit leaves out, or ``None`` if their number is not known.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        world_size: int,
        rank: int,
        limit: Callable[[int | None], int | None] = _no_limit,
        agree: Callable[[list[Any]], list[Any]] = _as_drawn,
        *,
        batched: bool = True,
    ) -> None:
        self.forwards_to = batches
        self.batched = batched
        self.world_size = world_size
        self.rank = rank
        self._limit = limit
        self._agree = agree
        self.share = BatchShare(0, 0, 0, 0)
        self._known: Any = []
        self.num_samples_planned = 0
        self.num_batches_left_out: int | None = 0

    @property
    def num_batches(self) -> int | None:
        """Batches that one process would see without a limit; ``None`` if the user's sampler does not say."""
        return len(self.forwards_to) if isinstance(self.forwards_to, Sized) else None

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(f"{type(self.forwards_to).__name__} has no length")
        return num_eval_steps(self.num_batches, self.world_size)

    def __iter__(self) -> Iterator[Any]:
        total = self.num_batches
        limit = self._limit(None if total is None else num_eval_steps(total, self.world_size))
        known = _sequential_batches(self.forwards_to)
        if known is None:
            bounds = [
                bound for bound in (total, None if limit is None else limit * self.world_size) if bound is not None
            ]
            drawn = [
                list(batch) if self.batched else batch
                for batch in islice(iter(self.forwards_to), min(bounds, default=None))
            ]
            known = self._agree(drawn)
            self.num_batches_left_out = None if total is None else total - len(known)
        self.share = share = share_batches(len(known), self.world_size, self.rank, limit)
        if isinstance(known, _SequentialBatches):
            self.num_batches_left_out = len(known) - share.num_batches
            self.num_samples_planned = known.num_samples_in(share.num_batches)
        else:
            planned = known[: share.num_batches]
            self.num_samples_planned = sum(len(batch) for batch in planned) if self.batched else len(planned)
        self._known = known
        for position in range(share.start, share.stop):
            yield known[position]
        for _ in range(share.num_ghost_steps):
            yield known[share.stop - 1] if share.start < share.stop else known[0]

    def is_ghost(self, step: int) -> bool:
        """Whether a step of the latest iteration has no batch of this rank's own."""
        return step >= self.share.stop - self.share.start

    def indices(self, step: int) -> list[Any]:
        """The indices of the batch at a step that is not a ghost."""
        batch = self._known[self.share.start + step]
        return batch if self.batched else [batch]

    def fingerprint(self, step: int) -> int:
        """Fingerprint of the batch at a step that is not a ghost; see :func:`batch_fingerprint`."""
        return batch_fingerprint(self.share.start + step, self.indices(step))


@dataclass(frozen=True)
class _SequentialBatches:
    """The batches of ``BatchSampler(SequentialSampler)`` by arithmetic: no list of a million integers is built."""

    num_samples: int
    batch_size: int
    drop_last: bool

    def __len__(self) -> int:
        return self.num_samples // self.batch_size if self.drop_last else math.ceil(self.num_samples / self.batch_size)

    def __getitem__(self, position: int) -> list[int]:
        first = position * self.batch_size
        return list(range(first, min(first + self.batch_size, self.num_samples)))

    def num_samples_in(self, num_batches: int) -> int:
        return min(num_batches * self.batch_size, self.num_samples)


def _sequential_batches(batches: Iterable[Any]) -> Any:
    if type(batches) is BatchSampler and type(batches.sampler) is SequentialSampler:
        return _SequentialBatches(len(batches.sampler), batches.batch_size, batches.drop_last)
    return None
