"""Random streams by key: who draws, for what, in which epoch, at which batch; nothing is saved, nothing can shift them.

A stream that runs on from step to step depends on everything that ever drew from it: one more validation, one more
worker, a resume, and all that follows differs. Here the seed of each step's stream is a hash of where the run stands,
so two runs that reach the same step draw the same numbers there, whatever lay between. It is the counter-based idea of
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for the generators that people draw from.

Two kinds of key: with a rank (dropout, augmentation: ranks must differ) and without (the order of samples: ranks must
agree, or their shards overlap).
"""

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from ddp_plugin.forwarding import Forwarder
from ddp_plugin.sampling import ExactBatchSampler

__all__ = [
    "LoaderStreams",
    "RunStreams",
    "SeedWorker",
    "StreamStates",
    "StreamedSampler",
    "WorkerKey",
    "may_draw",
    "seed_streams",
    "stream_seed",
    "streamed",
]

_ALL_RANKS = -1
_UNSIGNED_64 = 2**64 - 1


def stream_seed(seed: int, rank: int | None, purpose: str, epoch: int = 0, batch: int = 0) -> int:
    """Hashes a key to the seed of its stream, with BLAKE2b (RFC 7693).

    Args:
        seed: the run's seed, 0 to 2**64 - 1; the same on all ranks.
        rank: whose stream, or ``None`` for one that all ranks share.
        purpose: what is drawn from it; any text.
        epoch: epoch, from 0.
        batch: batch in the epoch, from 0.

    Returns:
        64 bits, as a non-negative integer. Keys that differ anywhere give unrelated values.

    Collectives:
        None.
    """
    key = struct.pack("<QqQQ", seed & _UNSIGNED_64, _ALL_RANKS if rank is None else rank, epoch, batch)
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8, key=key).digest(), "little")


def seed_streams(value: int) -> None:
    """Seeds this process's global generators: python, numpy's legacy one, torch's CPU and current CUDA device's.

    About 15 microseconds. ``torch.manual_seed`` would take seven times as long, and before CUDA is in use it queues a
    call with a stack trace each time; a device that is not in use yet is left alone here.

    Args:
        value: 64 bits, from :func:`stream_seed`.

    Collectives:
        None.
    """
    random.seed(value)
    # Python and numpy share algorithm and key schedule: the same words would give both the same numbers.
    np.random.seed([value >> 32, value & 0xFFFFFFFF, 1])
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


class StreamStates(NamedTuple):
    """Where this process's global generators stand, to go back there."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> "StreamStates":
        """Reads the states of the generators that :func:`seed_streams` seeds."""
        cuda = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda)

    def restore(self) -> None:
        """Sets them again."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        if self.cuda is not None:
            torch.cuda.default_generators[torch.cuda.current_device()].set_state(self.cuda)


@dataclass
class RunStreams:
    """One process's streams in a run.

    Attributes:
        seed: the run's seed.
        rank: this process.
        epoch: tells the epoch that runs now, or that an iterator made now is for.
        live: whether ranks may differ yet. Before that, streams are shared: models are initialised alike.
    """

    seed: int
    rank: int
    epoch: Callable[[], int]
    live: bool = False

    def enter(self, purpose: str, epoch: int, batch: int = 0) -> None:
        """Moves the global generators to this rank's stream of a key."""
        seed_streams(stream_seed(self.seed, self.rank, purpose, epoch, batch))

    def enter_shared(self, purpose: str) -> None:
        """Moves the global generators to the stream of a key that all ranks share."""
        seed_streams(stream_seed(self.seed, None, purpose))


class WorkerKey(NamedTuple):
    """All but the worker's number of the key of a worker's stream."""

    seed: int
    rank: int
    purpose: str
    epoch: int


@dataclass
class LoaderStreams:
    """The streams of one loader: its order (shared), its fetches in the main process and its workers (per rank).

    Attributes:
        run: the run's.
        loader: name of the loader in the run, such as ``"train/0"``; the same on all ranks.
        repeats: whether a second complete pass in one epoch shall draw anew (a train loader that is cycled), or repeat
            the first (evaluation).
        pass_epoch: epoch of the latest pass.
        num_passes: complete passes in that epoch.
    """

    run: RunStreams
    loader: str
    repeats: bool = False
    pass_epoch: int | None = field(default=None, init=False)
    num_passes: int = field(default=0, init=False)

    def begin_pass(self) -> None:
        """Notes that an iterator is made."""
        epoch = self.run.epoch()
        if epoch != self.pass_epoch:
            self.pass_epoch, self.num_passes = epoch, 0

    def end_pass(self) -> None:
        """Notes that an iterator came to its end; one that is only made and dropped does not count."""
        self.num_passes += self.repeats

    def order_seed(self, position: int) -> int:
        """Seed for drawing the order's item at a position (0: its start, then items from 1); the same on all ranks."""
        return stream_seed(self.run.seed, None, self._purpose("order"), self.pass_epoch or 0, position)

    def fetch_seed(self, position: int) -> int:
        """Seed for fetching the batch at a position (from 1) in the main process."""
        return stream_seed(self.run.seed, self.run.rank, self._purpose("fetch"), self.pass_epoch or 0, position)

    def worker_key(self) -> WorkerKey:
        """Key of the workers that start now."""
        return WorkerKey(self.run.seed, self.run.rank, self._purpose("worker"), self.run.epoch())

    def _purpose(self, what: str) -> str:
        return f"{what}/{self.loader}/{self.num_passes}"


class SeedWorker:
    """A ``worker_init_fn`` that gives each worker a stream of its own, then calls the user's.

    The key is read when workers start: in the forked worker itself, or while this object is pickled for a spawned one.
    Workers that persist are started once, and their streams run on over epochs.

    Args:
        key: the loader's key, or a function that gives it when asked.
        then: the user's ``worker_init_fn``.

    Collectives:
        None.
    """

    def __init__(self, key: WorkerKey | Callable[[], WorkerKey], then: Callable[[int], None] | None = None) -> None:
        self.key = key
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Seeds python, numpy and torch in this worker."""
        key = self.key() if callable(self.key) else self.key
        seed_streams(stream_seed(*key, batch=worker_id))
        if self.then is not None:
            self.then(worker_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return SeedWorker, (self.key() if callable(self.key) else self.key, self.then)


def may_draw(sampler: object) -> bool:
    """Whether iterating a sampler or batch sampler may draw from a global generator; ``True`` where nobody knows."""
    if type(sampler) is BatchSampler:
        return may_draw(sampler.sampler)
    # DistributedSampler shuffles with a generator of its own; ExactBatchSampler makes ranks agree by itself.
    return type(sampler) not in (SequentialSampler, DistributedSampler, ExactBatchSampler)


class StreamedSampler(Forwarder):
    """Stands for a sampler or batch sampler and sets the stage around each item that it yields.

    The inner sampler draws from a stream that all ranks share, one item at a time, so endless samplers work. Then this
    rank's generators are as they were, or, without workers, at the key of the batch that is fetched next.

    Args:
        inner: the sampler; all attributes are forwarded to it, ``set_epoch`` included.
        streams: the loader's streams.
        draws: whether the sampler may draw from a global generator.
        fetches_here: whether the batch is fetched in this process, right after its indices are drawn (no workers).

    Collectives:
        None of its own.
    """

    streams: LoaderStreams
    draws: bool
    fetches_here: bool

    def __init__(self, inner: Any, streams: LoaderStreams, *, draws: bool, fetches_here: bool) -> None:
        super().__init__(inner, streams=streams, draws=draws, fetches_here=fetches_here)

    def __iter__(self) -> Iterator[Any]:
        return _StreamedIterator(self)


class _SizedStreamedSampler(StreamedSampler):
    def __len__(self) -> int:
        return len(self.forwards_to)


def streamed(inner: Any, streams: LoaderStreams, *, draws: bool, fetches_here: bool) -> StreamedSampler:
    """Makes the :class:`StreamedSampler` for a sampler; it has a length if and only if the sampler has one."""
    cls = _SizedStreamedSampler if hasattr(type(inner), "__len__") else StreamedSampler
    return cls(inner, streams, draws=draws, fetches_here=fetches_here)


class _StreamedIterator(Iterator[Any]):
    def __init__(self, sampler: StreamedSampler) -> None:
        self._streams = sampler.streams
        self._draws = sampler.draws
        self._fetches_here = sampler.fetches_here
        self._position = 0
        self._has_ended = False
        self._streams.begin_pass()
        # Position 0: some samplers draw all at once here, and an iterable loader's dataset is iterated right after.
        self._items: Iterator[Any] = self._staged(lambda: iter(sampler.forwards_to))

    def __next__(self) -> Any:
        self._position += 1
        try:
            return self._staged(lambda: next(self._items))
        except StopIteration:
            if not self._has_ended:  # a loader with workers asks again
                self._has_ended = True
                self._streams.end_pass()
            raise

    def _staged(self, draw: Callable[[], Any]) -> Any:
        moves_on = self._fetches_here and self._streams.run.live
        before = StreamStates.capture() if self._draws and not moves_on else None
        if self._draws:
            seed_streams(self._streams.order_seed(self._position))
        try:
            return draw()
        finally:
            if before is not None:
                before.restore()
            elif moves_on:
                seed_streams(self._streams.fetch_seed(self._position))
