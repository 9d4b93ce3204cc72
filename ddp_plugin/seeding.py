"""The streams of a run and of its loaders: what each process and each worker draws from, for which batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, Dataset, DistributedSampler, SequentialSampler

from ddp_plugin.data.sampling import ExactBatchSampler
from ddp_plugin.data.sharded_sampler import ShardedBatchSampler
from ddp_plugin.data.sharding import Shards
from ddp_plugin.forwarding import Forwarder
from ddp_plugin.streams import StreamStates, seed_streams, stream_seed

__all__ = [
    "KeyedDataset",
    "KeyedFetch",
    "LoaderStreams",
    "RunStreams",
    "SeedWorker",
    "StreamedSampler",
    "WorkerKey",
    "may_draw",
    "streamed",
]


@dataclass
class RunStreams:
    """One process's streams in a run.

    Attributes:
        seed: the run's seed.
        rank: this process.
        epoch: tells the epoch that runs now, or that an iterator made now is for.
        live: whether ranks may differ yet. Before that, streams are shared: models are initialised alike.
        shards: where a rank computes several shards of a step one after another: which ones. Streams of training follow
            the shard then, not the rank.
    """

    seed: int
    rank: int
    epoch: Callable[[], int]
    live: bool = False
    shards: Shards | None = None

    def training_seed(self, purpose: str, epoch: int, num_before: int) -> int:
        """Seed for the training batch that this rank computes after ``num_before`` others of the epoch."""
        step, shard = (num_before, self.rank) if self.shards is None else self.shards.place(num_before)
        return stream_seed(self.seed, shard, purpose, epoch, step)

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

    def begin_pass(self, first_pass: int = 0) -> None:
        """Notes that an iterator is made; ``first_pass``: the epoch's passes before the run was resumed."""
        epoch = self.run.epoch()
        if epoch != self.pass_epoch:
            self.pass_epoch, self.num_passes = epoch, first_pass

    def end_pass(self) -> None:
        """Notes that an iterator came to its end; one that is only made and dropped does not count."""
        self.num_passes += self.repeats

    def order_seed(self, position: int) -> int:
        """Seed for drawing the order's item at a position (0: its start, then items from 1); the same on all ranks."""
        return stream_seed(self.run.seed, None, self._purpose("order"), self.pass_epoch or 0, position)

    def fetch_seed(self, num_before: int) -> int:
        """Seed for fetching this rank's batch after ``num_before`` others of the pass, in whichever process."""
        return self.run.training_seed(self._purpose("fetch"), self.pass_epoch or 0, num_before)

    def start_seed(self) -> int:
        """Seed for what is drawn in the main process when an iterator has been made."""
        return stream_seed(self.run.seed, self.run.rank, self._purpose("start"), self.pass_epoch or 0)

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


class KeyedFetch(NamedTuple):
    """What a worker is asked to fetch, an index or a batch of them, with the seed of the stream to fetch it at."""

    indices: Any
    seed: int


class KeyedDataset(Forwarder, Dataset[Any]):
    """Stands for a map-style dataset and fetches each batch at its own stream, in whichever worker it is fetched.

    So the numbers of a batch depend neither on how many workers there are nor on what these fetched before, and a run
    that is resumed in the middle of an epoch draws them again.
    """

    def __len__(self) -> int:
        return len(self.forwards_to)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, KeyedFetch):
            return self.forwards_to[index]
        seed_streams(index.seed)
        return self.forwards_to[index.indices]

    def __getitems__(self, batch: Any) -> Any:
        if isinstance(batch, KeyedFetch):
            seed_streams(batch.seed)
            batch = batch.indices
        fetch = getattr(self.forwards_to, "__getitems__", None)
        return fetch(batch) if fetch is not None else [self.forwards_to[index] for index in batch]


def may_draw(sampler: object) -> bool:
    """Whether iterating a sampler or batch sampler may draw from a global generator; ``True`` where nobody knows."""
    if type(sampler) is BatchSampler:
        return may_draw(sampler.sampler)
    # DistributedSampler shuffles with a generator of its own; our own samplers make ranks agree by themselves.
    return type(sampler) not in (SequentialSampler, DistributedSampler, ExactBatchSampler, ShardedBatchSampler)


class StreamedSampler(Forwarder):
    """Stands for a sampler or batch sampler and sets the stage around each item that it yields.

    The inner sampler draws from a stream that all ranks share, one item at a time, so endless samplers work. Then this
    rank's generators are as they were, or, without workers, at the key of the batch that is fetched next.

    Args:
        inner: the sampler; all attributes are forwarded to it, ``set_epoch`` included.
        streams: the loader's streams.
        draws: whether the sampler may draw from a global generator.
        fetches_here: whether the batch is fetched in this process, right after its indices are drawn (no workers).
        keyed: whether items go to workers of a :class:`KeyedDataset`, with their streams' seeds.

    Collectives:
        None of its own.
    """

    streams: LoaderStreams
    draws: bool
    fetches_here: bool
    keyed: bool

    def __init__(
        self, inner: Any, streams: LoaderStreams, *, draws: bool, fetches_here: bool, keyed: bool = False
    ) -> None:
        super().__init__(inner, streams=streams, draws=draws, fetches_here=fetches_here, keyed=keyed)

    def __iter__(self) -> Iterator[Any]:
        return _StreamedIterator(self)


class _SizedStreamedSampler(StreamedSampler):
    def __len__(self) -> int:
        return len(self.forwards_to)


def streamed(
    inner: Any, streams: LoaderStreams, *, draws: bool, fetches_here: bool, keyed: bool = False
) -> StreamedSampler:
    """Makes the :class:`StreamedSampler` for a sampler; it has a length if and only if the sampler has one."""
    cls = _SizedStreamedSampler if hasattr(type(inner), "__len__") else StreamedSampler
    return cls(inner, streams, draws=draws, fetches_here=fetches_here, keyed=keyed)


class _StreamedIterator(Iterator[Any]):
    def __init__(self, sampler: StreamedSampler) -> None:
        self._streams = sampler.streams
        self._draws = sampler.draws
        self._fetches_here = sampler.fetches_here
        self._keyed = sampler.keyed
        self._position = 0
        self._has_ended = False
        sharded = sampler.forwards_to if isinstance(sampler.forwards_to, ShardedBatchSampler) else None
        self._streams.begin_pass(0 if sharded is None else sharded.num_passes_before)
        # Position 0: some samplers draw all at once here, and an iterable loader's dataset is iterated right after.
        self._items: Iterator[Any] = self._staged(lambda: iter(sampler.forwards_to))
        self._num_before = 0 if sharded is None else sharded.first_batch  # known once it has been asked to iterate

    def __next__(self) -> Any:
        self._position += 1
        try:
            item = self._staged(lambda: next(self._items))
        except StopIteration:
            if not self._has_ended:  # a loader with workers asks again
                self._has_ended = True
                self._streams.end_pass()
            raise
        return KeyedFetch(item, self._fetch_seed()) if self._keyed else item

    def _fetch_seed(self) -> int:
        return self._streams.fetch_seed(self._num_before + self._position - 1)

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
                seed_streams(self._fetch_seed() if self._position else self._streams.start_seed())
