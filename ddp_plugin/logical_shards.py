"""Training whose bytes do not depend on the number of processes: fixed shards of each step, summed in one fixed tree.

Floating-point addition is not associative, so a mean over two ranks and the same mean over four differ in their last
bits, and training runs drift apart from there. Here every optimizer step is divided into the same ``S`` shards whatever
the number of processes. A process runs its shards one after another, and the gradients are added as a balanced binary
tree over the shards::

    shard   0   1   2   3   4   5   6   7
            +---+   +---+   +---+   +---+      inside a rank, as far as its shards reach,
              +-------+       +-------+        and from there on between ranks
                  +---------------+

With ``W`` processes, both powers of two, rank ``r`` has the shards ``[r S/W, (r+1) S/W)``: a subtree of its own. So the
tree is the same for every ``W``, and only the place where an addition happens differs. This file is the part without
processes; :mod:`ddp_plugin.tree_exchange` is the part between ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ddp_plugin.errors import explain

__all__ = [
    "TreeSum",
    "check_num_shards",
    "num_micro_batches",
    "refuse_layers",
    "refuse_other_reductions",
]


def check_num_shards(num_shards: object) -> None:
    """Refuses a number of shards that a balanced binary tree cannot have.

    Raises:
        TypeError: no integer.
        ValueError: no power of two.
    """
    if not isinstance(num_shards, int) or isinstance(num_shards, bool):
        raise TypeError(explain("logical_shards to be an integer", repr(num_shards), "Give a power of two, such as 4"))
    if not _is_power_of_two(num_shards):
        raise ValueError(
            explain(
                "logical_shards to be a power of two, so that every number of processes adds in one tree",
                repr(num_shards),
                "Give the largest number of processes that the run may ever use, such as 4 or 8",
            )
        )


def num_micro_batches(num_shards: int, world_size: int) -> int:
    """Returns how many shards each rank runs in an optimizer step.

    Args:
        num_shards: shards of an optimizer step, a power of two.
        world_size: number of processes.

    Raises:
        ValueError: ``world_size`` is no power of two, or larger than ``num_shards``.
    """
    if not _is_power_of_two(world_size) or world_size > num_shards:
        raise ValueError(
            explain(
                f"a power of two of at most logical_shards={num_shards} processes, each with a subtree of its own",
                f"{world_size} processes",
                "Change the number of processes, or raise logical_shards (which is another run: its steps are divided "
                "in another way)",
            )
        )
    return num_shards // world_size


def _is_power_of_two(number: int) -> bool:
    return number >= 1 and number & (number - 1) == 0


def refuse_other_reductions(given: Mapping[str, Any]) -> None:
    """Refuses settings of the reduction that the fixed tree replaces, and which would be ignored.

    Args:
        given: settings by name, without those left at ``None``.

    Raises:
        ValueError: there is one.
    """
    if given:
        raise ValueError(
            explain(
                "logical_shards alone, because it replaces DistributedDataParallel and its hooks",
                f"logical_shards beside {', '.join(given)}",
                "Remove the others, or logical_shards",
            )
        )


def refuse_layers(model: nn.Module) -> None:
    """Refuses layers whose result would follow the number of processes, or whose gradient cannot be added in place.

    Args:
        model: the model, in the modes in which it is trained.

    Raises:
        ValueError: a BatchNorm that uses or updates statistics of the batch, or a layer with sparse gradients.
    """
    by_batch = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
        and (module.training or module.running_mean is None)
    ]
    if by_batch:
        raise ValueError(
            explain(
                "no BatchNorm in training mode beside logical_shards, since its statistics follow the micro-batches",
                f"the layers {by_batch}",
                "Use LayerNorm or GroupNorm, or call .eval() on these layers",
            )
        )
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    if sparse:
        raise ValueError(
            explain("dense gradients beside logical_shards", f"sparse=True in {sparse}", "Use sparse=False there")
        )


class TreeSum:
    """Adds lists of tensors in a balanced binary tree, as they come: a binary counter whose digits are partial sums.

    Of ``n`` lists that were added, one partial sum is kept for each digit of ``n`` in binary, so at most
    ``log2(n) + 1`` at a time. After ``2**k`` of them the sum is that of the tree with ``2**k`` leaves.

    The tensors become the sum's own: they are changed in place, which saves every copy.
    """

    def __init__(self) -> None:
        self.num_added = 0
        self._partial_sums: list[list[Tensor] | None] = []  # the k-th one is over 2**k leaves

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds the next leaf.

        Args:
            tensors: of the same number, shapes and dtypes each time; not to be used again.
        """
        carried, level = list(tensors), 0
        self.num_added += 1
        while level < len(self._partial_sums) and (earlier := self._partial_sums[level]) is not None:
            self._partial_sums[level] = None
            for total, later in zip(earlier, carried, strict=True):
                total.add_(later)
            carried, level = earlier, level + 1
        if level == len(self._partial_sums):
            self._partial_sums.append(None)
        self._partial_sums[level] = carried

    def take(self) -> Sequence[Tensor]:
        """Returns the sum of all leaves, a power of two of them, and begins anew."""
        assert _is_power_of_two(self.num_added), self.num_added
        total = self._partial_sums[-1]
        assert total is not None
        self.clear()
        return total

    def clear(self) -> None:
        """Forgets what was added."""
        self.num_added, self._partial_sums = 0, []
