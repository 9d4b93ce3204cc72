"""What ranks bring to a collective is compared before it is mixed: logged values by key, tensors by shape."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_plugin import _compat, matching
from ddp_plugin.evaluation import combine_logged
from ddp_plugin.gather import gather_tensors
from ddp_plugin.strategy.preflight import Preflight

__all__ = ["MatchedReductions"]

_SAME_KEYS = matching.Rule(
    expected="every rank to log the same keys with sync_dist=True, in the same order",
    change="Log on every rank, outside `if rank == 0` (rank_zero_only=True is for values of one rank), in one order",
)
_SAME_SHAPES = matching.Rule(
    expected="tensors of one shape and dtype on all ranks for all_gather",
    change="Use strategy.all_gather_unequal(tensor), which returns a list of tensors of any shapes",
)


class MatchedReductions(Preflight):
    """Reduces without flooring, gathers without garbage, and raises on all ranks where they log different keys."""

    _release_logging: Callable[[], None] | None = None

    def setup(self, trainer: Any) -> None:
        """Sets up a run; from here on, what ``self.log(..., sync_dist=True)`` reduces knows its key."""
        super().setup(trainer)
        if self.world_size > 1 and self._release_logging is None:
            self._release_logging = _compat.intercept_reductions(trainer, self)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the ranks; a mean of integers is a float64 mean, not a floored one.

        Args:
            tensor: a tensor of any shape; anything else is returned as it is.
            group: process group, all ranks when ``None``.
            reduce_op: ``"mean"``/``"avg"``, ``"sum"``, ``"min"``, ``"max"`` or a ``ReduceOp``.

        Returns:
            The reduced tensor, same shape.

        Collectives:
            What ``DDPStrategy.reduce`` runs: a barrier and one all-reduce, on all ranks of the group. A tensor on a
            device that the group does not serve, such as the CPU under NCCL, travels by the root device.
        """
        name = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
        is_mean = name in ("mean", "avg", dist.ReduceOp.AVG)
        if isinstance(tensor, Tensor) and is_mean and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float64)
        if not isinstance(tensor, Tensor) or (device := self._device_for(tensor.device, group)) == tensor.device:
            return super().reduce(tensor, group=group, reduce_op=reduce_op)
        return tensor.copy_(super().reduce(tensor.to(device), group=group, reduce_op=reduce_op))

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers tensors of one shape and dtype; ``module.all_gather`` ends here.

        Args:
            tensor: a tensor of any shape, the same on all ranks of the group.
            group: process group, all ranks when ``None``.
            sync_grads: whether gradients flow back through the gather.

        Returns:
            All ranks' tensors in rank order, shape ``(world_size, *tensor.shape)``.

        Raises:
            DDPPluginError: on all ranks, when shapes or dtypes differ.

        Collectives:
            A small all-gather (on the control group when all ranks take part), then the all-gather of the tensors.
        """
        is_world = group is None or group is dist.group.WORLD
        if dist.is_initialized() and dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1:
            matching.match(
                f"shape {tuple(tensor.shape)}, {tensor.dtype}",
                self.control_group if is_world else group,
                _SAME_SHAPES,
                device=None if is_world else self._device_for(torch.device("cpu"), group),
            )
        device = self._device_for(tensor.device, group)
        gathered: Tensor = super().all_gather(tensor.to(device), group=group, sync_grads=sync_grads)
        return gathered.to(tensor.device)

    def all_gather_unequal(self, tensor: Tensor) -> list[Tensor]:
        """Gathers tensors whose shapes and dtypes may differ between ranks; without gradients.

        Args:
            tensor: a dense tensor of any shape, also an empty one.

        Returns:
            The tensors of all ranks in rank order, bit for bit, on the device of ``tensor``.

        Collectives:
            One object gather on the control group and one all-gather of bytes, on every rank.
        """
        if self.world_size == 1:
            return [tensor.detach()]
        parts = gather_tensors([tensor], _compat.default_group(), self.control_group)
        return [part.to(tensor.device) for (part,) in parts]

    def reduce_logged(self, key: str, value: Any, group: Any, reduce_op: Any) -> Any:
        """Reduces one logged value; ranks that log different keys at the same time raise, all of them.

        Args:
            key: the hook and the name by which it was logged.
            value: one number.
            group: the user's ``sync_dist_group``; such a one is reduced without asking for keys.
            reduce_op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.

        Returns:
            The reduced value.

        Raises:
            DDPPluginError: on all ranks, when their keys differ.

        Collectives:
            One all-gather of two numbers on the control group, on every rank.
        """
        if (group is not None and group is not dist.group.WORLD) or not isinstance(value, Tensor) or value.numel() != 1:
            return self.reduce(value, group=group, reduce_op=reduce_op)
        return matching.reduce_matched(f"{key} ({reduce_op})", value, self.control_group, reduce_op, _SAME_KEYS)

    def reduce_epoch(self, logged: _compat.LoggedValues) -> None:
        """Reduces all that was logged with ``sync_dist=True`` in a training epoch, or for one evaluation loader.

        An evaluation in which this rank logged nothing of that kind exchanges nothing.

        Args:
            logged: the values of the loop that is about to compute them.

        Raises:
            DDPPluginError: on all ranks, when their keys differ.

        Collectives:
            Two small all-gathers on the control group, on every rank.
        """
        pending, module = logged.pending(synced=True), self.lightning_module
        assert module is not None
        if not pending and not module.trainer.training:
            return
        numbers = [number for _, value, weight, _ in pending.values() for number in (value, weight)]
        of_ranks = matching.match_all(list(pending), numbers, self.control_group, _SAME_KEYS)
        for index, (key, (reduction, _, _, settings)) in enumerate(pending.items()):
            parts = [(rank[2 * index], rank[2 * index + 1]) for rank in of_ranks]
            logged.resolve(key, combine_logged(reduction, parts), settings, module.device)

    def after_training_epoch(self) -> None:
        """Meets a rank that reduces a key of an epoch-end hook which this one did not log.

        Collectives:
            One all-gather of two numbers on the control group, on every rank.
        """
        matching.match("nothing more in this epoch", self.control_group, _SAME_KEYS)

    def teardown(self) -> None:
        """Lets Lightning log as it always does."""
        if self._release_logging is not None:
            self._release_logging()
        self._release_logging = None
        super().teardown()

    def _device_for(self, device: torch.device, group: Any) -> torch.device:
        if not dist.is_initialized() or dist.get_rank(group) < 0:
            return device
        served = _compat.served_device_types(_compat.default_group() if group is None else group)
        return matching.collective_device(device, served, self.root_device)
