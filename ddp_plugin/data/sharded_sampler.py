"""A training loader's batch sampler on one rank: its part of the user's own order, from any position in the epoch.

The user's sampler or batch sampler is kept and asked as one process would ask it. Samples are dealt out where torch's
own ``BatchSampler`` groups them; a batch sampler of the user's own knows why it groups as it does, so its batches are
dealt out whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler

from ddp_plugin.data.orders import (
    agree_on_order,
    draw_lazily,
    draw_order,
    generator_states,
    is_function_of_epoch,
    order_hash,
    restore_generators,
)
from ddp_plugin.data.sampling import length_of
from ddp_plugin.data.sharding import ShardedEpoch, Shards
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import ForwardsReads

__all__ = ["Position", "ShardedBatchSampler"]


@dataclass(frozen=True)
class Position:
    """Where a loader stands in an epoch, whatever the number of ranks.

    Attributes:
        epoch: epoch, from 0.
        num_passes: complete passes over the loader in this epoch before (loaders that are cycled make several).
        num_items: samples, or batches where whole batches are dealt out, that were trained on in this pass.
        order_hash: hash of this pass's order, ``None`` where it was not drawn as a whole.
        generators: states of the sampler's own generators before this pass's order was drawn.
        next_generators: their states after it.
        block_size: items of a global batch, where the sampler has no length: it is drawn block by block then.
    """

    epoch: int
    num_passes: int
    num_items: int
    order_hash: int | None
    generators: list[Any]
    next_generators: list[Any]
    block_size: int | None = None


class ShardedBatchSampler(ForwardsReads):
    """Yields, batch by batch, what one rank trains on; all attributes but its own are those of ``batches``.

    Args:
        batches: the user's batch sampler; or sampler, for loaders without batching.
        shards: the shards of a global batch and which of them are this rank's.
        last_batch: see :class:`~ddp_plugin.data.sharding.ShardedEpoch`; ``drop_last=True`` of torch's batch sampler
            wins.
        seed: gives the seed of orders, the same on all ranks.
        epoch: gives the epoch that an iterator made now is for.
        group: the control group; ``None`` for one process.
        batched: whether an item of ``batches`` is a batch of indices; ``False``: the index of one sample.

    Attributes:
        first_batch: batches of this rank that the current pass skipped, because they were trained on before a resume.

    Collectives:
        While iterating, on the control group, once per pass: those of
        :func:`~ddp_plugin.data.orders.agree_on_order`, unless the order depends on seed and epoch alone. For samplers
        without a length they run once per step.
    """

    def __init__(
        self,
        batches: Any,
        shards: Shards,
        last_batch: str,
        seed: Callable[[], int],
        epoch: Callable[[], int],
        group: dist.ProcessGroup | None,
        *,
        batched: bool = True,
    ) -> None:
        self.forwards_to = batches
        self.shards = shards
        self.deals_samples = batched and type(batches) is BatchSampler
        self._batched = batched
        self._source: Any = batches.sampler if self.deals_samples else batches
        self._batch_size = batches.batch_size if self.deals_samples else 1
        self._last_batch = "drop" if self.deals_samples and batches.drop_last else last_batch
        self._seed, self._epoch, self._group = seed, epoch, group
        self._resumes_at: Position | None = None
        self._current: Position | None = None  # of the latest pass, at its start in this run
        self._num_passes = 0  # complete ones in this run and epoch
        self._drawn: tuple[Position, Sequence[Any]] | None = None
        self.first_batch = 0
        self._ghosts: set[int] = set()  # of the epoch's first pass, by index in the epoch

    # ------------------------------------------------------------------------------------------------------- lengths

    @property
    def num_items(self) -> int | None:
        """Items in an epoch, ``None`` if the sampler does not say."""
        return length_of(self._source)

    @property
    def items_per_batch(self) -> int:
        """Items of a full batch: samples, or 1 where whole batches are dealt out."""
        return int(self._batch_size)

    @property
    def drops_last(self) -> bool:
        """Whether a last global batch that is not full is left out."""
        return self._last_batch == "drop"

    @property
    def plan(self) -> ShardedEpoch | None:
        """How an epoch from its beginning is dealt out; ``None`` if the sampler does not say how long it is."""
        return None if self.num_items is None else self._plan(self.num_items)

    def _plan(self, num_items: int, first_item: int = 0) -> ShardedEpoch:
        return ShardedEpoch(num_items, self.shards.num_shards, self._batch_size, self._last_batch, first_item)

    def __len__(self) -> int:
        if self.plan is None:
            raise TypeError(f"{type(self._source).__name__} has no length")
        return self.plan.num_steps * self.shards.num_per_rank

    # ------------------------------------------------------------------------------------------------------ position

    def resume(self, position: Position | None) -> None:
        """Lets the passes of the position's epoch begin there; other epochs begin at their beginning.

        Args:
            position: from :meth:`position` of another run, on any number of ranks; ``None`` forgets it.
        """
        self._resumes_at = position
        self._num_passes = 0
        self._drawn = None
        if position is not None:
            restore_generators(self._source, position.next_generators)

    def start(self, epoch: int) -> Position | None:
        """Returns where the epoch's first pass begins, if it is the one that is resumed."""
        return self._resumes_at if self._resumes_at is not None and self._resumes_at.epoch == epoch else None

    @property
    def num_passes_before(self) -> int:
        """Complete passes over the loader, in the epoch that an iterator made now is for, before a resume."""
        start = self.start(self._epoch())
        return start.num_passes if start else 0

    def num_batches_left(self, epoch: int) -> int | None:
        """Returns this rank's batches from the resumed position on, or of the whole epoch; ``None`` if not known."""
        if self.num_items is None:
            return None
        start = self.start(epoch)
        plan = self._plan(self.num_items, min(start.num_items, self.num_items) if start else 0)
        return plan.num_steps * self.shards.num_per_rank

    def position(self, num_batches: int, *, cycles: bool = True) -> Position | None:
        """Returns the position after this rank has trained on some batches since the epoch, or the resume, began.

        Args:
            num_batches: batches, over all passes.
            cycles: whether the loader is begun again when it ends, while others go on.

        Returns:
            The position; ``None`` if no pass has begun.
        """
        current = self._current
        if current is None:
            return None
        start = self.start(current.epoch)
        first_pass, first_item = (start.num_passes, start.num_items) if start else (0, 0)
        steps = num_batches // self.shards.num_per_rank
        if self.num_items is None:
            num_passes, items = first_pass, first_item + steps * self._plan(0).items_per_step
        else:
            plan = self._plan(self.num_items, min(first_item, self.num_items))
            num_passes = first_pass
            while cycles and steps > plan.num_steps and self._plan(self.num_items).num_steps:
                steps -= plan.num_steps
                num_passes, plan = num_passes + 1, self._plan(self.num_items)
            items = plan.after(steps).first_item
        # The latest pass is the one that the position is in, unless workers have already asked for the next.
        is_latest = num_passes == current.num_passes
        return Position(
            epoch=current.epoch,
            num_passes=num_passes,
            num_items=items,
            order_hash=current.order_hash if is_latest else None,
            generators=current.generators,
            next_generators=generator_states(self._source),
            block_size=current.block_size,
        )

    # ----------------------------------------------------------------------------------------------------- iterating

    def draw_early(self) -> None:
        """Draws the coming pass's order now, so that one that cannot be used is refused before anything starts.

        Raises:
            ValueError: see :func:`~ddp_plugin.data.orders.agree_on_order`; or the order is not the interrupted run's.

        Collectives:
            Those of the pass.
        """
        if self.num_items is not None:
            self._drawn = self._draw(self._epoch())
        else:
            self._begin(self._epoch())

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch()
        if self._current is None or self._current.epoch != epoch:
            self._num_passes = 0
        if self._num_passes == 0:
            self._ghosts = set()
        if self.num_items is None:
            self._current = self._begin(epoch)[0]
            first_step = self._current.num_items // self._plan(0).items_per_step
            self.first_batch = first_step * self.shards.num_per_rank
            return self._share_lazily(self._current)
        # Asked again before a pass is over, as Lightning does now and then, it gives the same order again.
        is_drawn = self._drawn is not None and (self._drawn[0].epoch, self._drawn[0].num_passes) == (
            epoch,
            self._pass_number(epoch),
        )
        if not is_drawn:
            self._drawn = self._draw(epoch)
        assert self._drawn is not None
        self._current, order = self._drawn
        plan = self._plan(len(order), min(self._current.num_items, len(order)))
        self.first_batch = (self._plan(len(order)).num_steps - plan.num_steps) * self.shards.num_per_rank
        return self._share(order, plan)

    def _pass_number(self, epoch: int) -> int:
        start = self.start(epoch)
        return self._num_passes + (start.num_passes if start else 0)

    def _begin(self, epoch: int) -> tuple[Position, Position | None]:
        """Returns where a pass begins, and the position that it resumes; the sampler's generators are as they were."""
        start = self.start(epoch)
        resumed = start if self._num_passes == 0 else None
        block_size = self._plan(0).items_per_step if self.num_items is None else None
        if resumed is not None and resumed.num_items and resumed.block_size != block_size:
            raise ValueError(
                explain(
                    f"global batches of {resumed.block_size} samples or batches, as in the interrupted run, because "
                    f"{type(self._source).__name__} has no length and is drawn block by block",
                    f"{block_size}",
                    "Keep ranks x batch size, resume from a checkpoint at an epoch's end, or give the sampler a length",
                )
            )
        if resumed is not None:
            restore_generators(self._source, resumed.generators)
        num_items = resumed.num_items if resumed is not None else 0
        generators = generator_states(self._source)
        return Position(epoch, self._pass_number(epoch), num_items, None, generators, [], block_size), resumed

    def _draw(self, epoch: int) -> tuple[Position, Sequence[Any]]:
        """Draws the order of a pass; returns where it begins, and the order."""
        begun, resumed = self._begin(epoch)
        order = draw_order(self._source, self._seed(), epoch, begun.num_passes)
        if not is_function_of_epoch(self._source):
            order = agree_on_order(order, self.forwards_to, self._group, "training")
        drawn = order_hash(order)
        if resumed is not None and resumed.order_hash not in (None, drawn):
            raise ValueError(
                explain(
                    f"{type(self._source).__name__} to draw the order of epoch {epoch} that the interrupted run drew",
                    "another order (its hash differs)",
                    "Use the same dataset and seed; let the sampler draw from the epoch that set_epoch tells it, from "
                    "the global generators, or from a generator that it keeps as an attribute",
                )
            )
        return replace(begun, order_hash=drawn), order

    def _share(self, order: Sequence[Any], plan: ShardedEpoch) -> Iterator[Any]:
        yield from self._deal(order, plan, self.first_batch)
        self._num_passes += 1

    def _share_lazily(self, begun: Position) -> Iterator[Any]:
        size = self._plan(0).items_per_step
        position, num_before = 0, self.first_batch
        for drawn in draw_lazily(self._source, self._seed(), begun.epoch, begun.num_passes, size):
            block = drawn
            if self._group is not None and self.shards.num_shards > 1:
                block = agree_on_order(drawn, self.forwards_to, self._group, "training", is_whole=False)
            position += len(block)
            if position > begun.num_items:
                yield from self._deal(block, self._plan(len(block)), num_before)
                num_before += self.shards.num_per_rank
        self._num_passes += 1

    def _deal(self, order: Sequence[Any], plan: ShardedEpoch, num_before: int) -> Iterator[Any]:
        for number in range(plan.num_steps * self.shards.num_per_rank):
            step, shard = self.shards.place(number)
            positions = plan.positions(step, shard)
            if not positions:
                self._ghosts.add(num_before + number)
                positions = [plan.stand_in(step, shard)]
            yield self._batch([order[position] for position in positions])

    def _batch(self, items: list[Any]) -> Any:
        if self.deals_samples:
            return items
        return list(items[0]) if self._batched and isinstance(items[0], Iterable) else items[0]

    def is_ghost_train_batch(self, batch_idx: int) -> bool:
        """Whether the batch at an index of the epoch stands in for none: no sample of the last step is this rank's.

        Only ``last_batch="exact"`` has such batches; their weight is zero.
        """
        return batch_idx in self._ghosts
