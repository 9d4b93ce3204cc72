"""Who trains on which sample when: each global batch of the one order, dealt out to shards. Pure index arithmetic.

One process with a batch of ``num_shards * batch_size`` reads the order in blocks of that size. Here each block is dealt
out like cards, position ``p`` to shard ``p % num_shards``: step for step the shards hold together what the one process
would hold. A rank computes one shard of each block, or several one after another.
"""

from dataclasses import dataclass, replace

from ddp_plugin.errors import explain

__all__ = ["LAST_BATCHES", "ShardedEpoch", "Shards"]

LAST_BATCHES = ("pad", "drop", "exact")
"""What becomes of a last global batch that is not full: see :class:`ShardedEpoch`."""


@dataclass(frozen=True)
class Shards:
    """The shards of a global batch and those that this rank computes.

    Attributes:
        num_shards: shards of each global batch, over all ranks.
        rank: this rank.
        num_per_rank: shards that each rank computes, one after another; 1 for plain data parallelism.
    """

    num_shards: int
    rank: int
    num_per_rank: int = 1

    def place(self, num_before: int) -> tuple[int, int]:
        """Returns ``(step, shard)`` of the batch that this rank computes after ``num_before`` others."""
        step, turn = divmod(num_before, self.num_per_rank)
        return step, self.rank * self.num_per_rank + turn


@dataclass(frozen=True)
class ShardedEpoch:
    """How the items of an epoch are dealt out, from any position on.

    The last global batch may hold fewer than ``num_shards * batch_size`` items:

    - ``"pad"`` fills it up with the epoch's first items until all shards hold equally many, as torch's
      ``DistributedSampler`` does;
    - ``"drop"`` leaves it out;
    - ``"exact"`` deals it out as it is: shards differ by one item, and some may hold none.

    Attributes:
        num_items: samples of the epoch, or batches where whole batches are dealt out.
        num_shards: shards of each global batch.
        batch_size: items of one shard in one full step.
        last_batch: one of :data:`LAST_BATCHES`.
        first_item: items of the epoch that were trained on before, 0 to ``num_items``.
    """

    num_items: int
    num_shards: int
    batch_size: int
    last_batch: str = "pad"
    first_item: int = 0

    def __post_init__(self) -> None:
        if self.last_batch not in LAST_BATCHES:
            raise ValueError(explain(f"last_batch to be one of {LAST_BATCHES}", repr(self.last_batch), "Choose one"))

    @property
    def items_per_step(self) -> int:
        """Items in a full global batch."""
        return self.num_shards * self.batch_size

    @property
    def num_steps(self) -> int:
        """Steps from ``first_item`` on, the same for all shards."""
        full, rest = divmod(self.num_items - self.first_item, self.items_per_step)
        return full + (rest > 0 and self.last_batch != "drop")

    @property
    def num_repeated(self) -> int:
        """Items that the last step repeats to be even."""
        rest = (self.num_items - self.first_item) % self.items_per_step
        return -rest % self.num_shards if self.last_batch == "pad" else 0

    @property
    def num_dropped(self) -> int:
        """Items that no step holds."""
        return (self.num_items - self.first_item) % self.items_per_step if self.last_batch == "drop" else 0

    @property
    def num_ghosts(self) -> int:
        """Shards that hold no item of the last step."""
        rest = (self.num_items - self.first_item) % self.items_per_step
        return max(self.num_shards - rest, 0) if rest and self.last_batch == "exact" else 0

    def positions(self, step: int, shard: int) -> list[int]:
        """Returns the positions, in the epoch's order, of a shard's items in a step; ``"exact"`` may give none.

        Args:
            step: step, from 0 at ``first_item``.
            shard: shard, from 0.
        """
        first, left = self._block(step)
        dealt = range(first + shard, first + self._size(left) * self.num_shards, self.num_shards)
        if self.last_batch == "exact":
            return [position for position in dealt if position < self.num_items]
        return [position % self.num_items for position in dealt]

    def stand_in(self, step: int, shard: int) -> int:
        """Returns a position of the same step, for a shard that has none and must take part all the same."""
        first, left = self._block(step)
        return first + shard % left

    def after(self, num_steps: int) -> "ShardedEpoch":
        """Returns what is left after some steps."""
        return replace(self, first_item=min(self.first_item + num_steps * self.items_per_step, self.num_items))

    def _block(self, step: int) -> tuple[int, int]:
        first = self.first_item + step * self.items_per_step
        return first, min(self.items_per_step, self.num_items - first)

    def _size(self, left: int) -> int:
        return -(-left // self.num_shards)
