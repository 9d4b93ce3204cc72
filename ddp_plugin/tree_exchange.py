"""The part of the fixed tree that lies between ranks: pairs exchange their sums, by recursive doubling.

In round ``k`` a rank exchanges its sum with rank ``XOR 2**k`` and both add; ``a + b`` and ``b + a`` are the same bits,
so after ``log2(world size)`` rounds all ranks hold the same bytes, and they are those of the balanced binary tree over
the ranks. Source of the algorithm: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of Collective Communication
Operations in MPICH, 2005, section 4.4.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_plugin import _compat
from ddp_plugin.averaging import chunks, flatten, take_from_first_rank, unflatten
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.logical_shards import TreeSum

__all__ = ["ShardedGradient", "broadcast_module", "sum_in_tree_order"]


@torch.no_grad()
def sum_in_tree_order(tensors: Sequence[Tensor]) -> None:
    """Replaces each tensor by its sum over the ranks, in place, in one order for every number of them.

    Args:
        tensors: dense, with the same shapes and dtypes on all ranks; a power of two of ranks.

    Collectives:
        ``log2(world size)`` rounds of one send and one receive on the default group for each 32 MiB, on all ranks; a
        rank sends the tensors once per round. None on one rank.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size == 1:
        return
    for positions in chunks(tensors):  # elements are added alone, so chunks change no bit
        chunk = [tensors[position] for position in positions]
        flat = flatten(chunk)
        received = torch.empty_like(flat)
        distance = 1
        while distance < world_size:
            peer = dist.get_rank() ^ distance
            pair = [dist.P2POp(dist.isend, flat, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            flat.add_(received)
            distance *= 2
        unflatten(flat, chunk)


@torch.no_grad()
def broadcast_module(module: nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0.

    Collectives:
        Those of :func:`~ddp_plugin.averaging.take_from_first_rank`, on all ranks.
    """
    if dist.is_initialized():
        take_from_first_rank([*module.parameters(), *module.buffers()], _compat.default_group())


class ShardedGradient:
    """The gradient of one optimizer step, gathered shard by shard and summed in one tree over all ranks.

    Args:
        module: whose parameters have gradients; looked at anew in each step.
        num_micro_batches: shards of this rank in a step.
        control_group: a gloo group of all ranks, ``None`` for one process.

    Collectives:
        Those of :meth:`finish_step`, once per optimizer step on all ranks.
    """

    def __init__(self, module: nn.Module, num_micro_batches: int, control_group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._num_micro_batches = num_micro_batches
        self._control_group = control_group
        self._sum = TreeSum()
        self._is_trained: list[bool] = []
        self._is_used: list[bool] = []
        self._buffers: dict[str, tuple[int, int]] = {}

    @property
    def num_done(self) -> int:
        """Shards of the current step whose backward is over."""
        return self._sum.num_added

    def begin_shard(self) -> None:
        """Lets the first shard of a step begin without gradients, whatever the step before has left."""
        self._buffers = self._buffer_versions()
        if self.num_done == 0:
            for parameter in self._module.parameters():
                parameter.grad = None

    def end_shard(self) -> None:
        """Moves the gradients out of the parameters, into the tree; a missing one counts as zero.

        Raises:
            ValueError: a sparse gradient, other trained parameters than in the shards before, or a buffer that the
                shard changed, which would follow the number of shards that this rank runs.
        """
        versions = self._buffer_versions()
        changed = [name for name, version in self._buffers.items() if versions.get(name) != version]
        if changed:
            raise ValueError(
                explain(
                    "buffers that training_step leaves alone, because each rank runs other shards",
                    f"changes of {changed}",
                    "Change them once per optimizer step, alike on all ranks, such as in on_before_zero_grad",
                )
            )
        named = dict(self._module.named_parameters())
        is_trained = [parameter.requires_grad for parameter in named.values()]
        if self.num_done == 0:
            self._is_trained, self._is_used = is_trained, [False] * len(named)
        elif is_trained != self._is_trained:
            raise ValueError(
                explain(
                    "the same trained parameters in all shards of a step, because logical_shards adds them up",
                    "requires_grad that changed between two micro-batches",
                    "Change it between optimizer steps, such as in on_train_epoch_start",
                )
            )
        leaves = []
        for index, (name, parameter) in enumerate(named.items()):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.layout is not torch.strided:
                raise ValueError(
                    explain("dense gradients beside logical_shards", f"a sparse one of {name!r}", "Use dense layers")
                )
            if is_trained[index]:
                self._is_used[index] |= gradient is not None
                leaves.append(torch.zeros_like(parameter) if gradient is None else gradient.detach())
        with torch.no_grad():
            self._sum.add(leaves)

    def finish_step(self) -> None:
        """Puts the sum over all shards of all ranks into the parameters; the tree is empty again.

        A parameter that no shard of any rank used is left without a gradient, so that optimizers pass it over.

        Raises:
            DDPPluginError: another number of shards has run than a step has, or the ranks train different parameters;
                on all ranks.

        Collectives:
            One all-reduce of two numbers per parameter on the control group, then those of
            :func:`sum_in_tree_order`, on all ranks; none for one process.
        """
        named = dict(self._module.named_parameters())
        is_used = self._agree(list(named))
        total = self._sum.take()
        sum_in_tree_order(total)
        trained = [parameter for parameter, yes in zip(named.values(), self._is_trained, strict=True) if yes]
        used = [yes for yes, is_trained in zip(is_used, self._is_trained, strict=True) if is_trained]
        for parameter, gradient, yes in zip(trained, total, used, strict=True):
            parameter.grad = gradient if yes else None

    def _agree(self, names: list[str]) -> list[bool]:
        """Returns which parameters any rank used; raises on all ranks where one has run another step than asked."""
        num_done, world_size = self.num_done, 1
        is_trained, is_used = self._is_trained or [False] * len(names), self._is_used or [False] * len(names)
        num_ready, num_trained, num_used = int(num_done == self._num_micro_batches), is_trained, is_used
        if self._control_group is not None:
            counts = torch.tensor([num_ready, *is_trained, *is_used], dtype=torch.int32)
            dist.all_reduce(counts, group=self._control_group)
            world_size = self._control_group.size()
            num_ready, *others = counts.tolist()
            num_trained, num_used = others[: len(names)], others[len(names) :]
        if num_ready != world_size:
            self._sum.clear()
            raise DDPPluginError(
                explain(
                    f"{self._num_micro_batches} micro-batches with a loss on each rank in every optimizer step, as "
                    "logical_shards divides it",
                    f"{num_done} here; it is another number than asked for on {world_size - num_ready} ranks",
                    f"Let an epoch have a multiple of {self._num_micro_batches} batches on each rank (drop_last or "
                    "limit_train_batches), return a loss from every training_step, and resume from whole steps only",
                )
            )
        unequal = [name for name, count in zip(names, num_trained, strict=True) if count not in (0, world_size)]
        if unequal:
            self._sum.clear()
            raise DDPPluginError(
                explain(
                    "the same trained parameters on all ranks",
                    f"requires_grad that differs for {unequal}",
                    "Freeze and unfreeze on all ranks alike",
                )
            )
        return [count > 0 for count in num_used]

    def _buffer_versions(self) -> dict[str, tuple[int, int]]:
        return {name: (id(buffer), _compat.version_of(buffer)) for name, buffer in self._module.named_buffers()}
