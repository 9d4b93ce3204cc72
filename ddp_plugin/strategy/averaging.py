"""Hooks that exchange parameters: when the ranks train alone, and when they have to be one model."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from ddp_plugin import _compat, matching
from ddp_plugin.averaging import average_optimizer
from ddp_plugin.errors import explain
from ddp_plugin.hooks import Averager
from ddp_plugin.replica_state import BUFFER, OPTIMIZER_STATE, PARAMETER
from ddp_plugin.strategy.wrapping import FollowingWrap
from ddp_plugin.wrapping.arguments import BucketObserver

__all__ = ["AveragedReplicas"]

_SAME_STEPS = matching.Rule(
    expected="every rank to make the same number of optimizer steps, because the ranks exchange their parameters",
    change="Give every rank as many batches; SamplerEpoch, one of default_callbacks(), does so for any loader",
)
_EXCLUDED = {
    "process_group": "the ranks would not be those that hold one model",
    "device_mesh": "the ranks would not be those that hold one model",
    "delay_all_reduce_named_params": "no reduction is left to be delayed",
}


class AveragedReplicas(FollowingWrap):
    """With ``local_sgd`` and ``diloco`` no gradient travels: the ranks train alone and meet once a period.

    Their first steps, until ``start_step``, are plain data parallel training; after these DDP reduces nothing more.
    The ranks are one model also while they validate, in a checkpoint, and after the training.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self._averages_parameters:
            _refuse_beside_averaging(str(self._comm_hook), kwargs)
        super().__init__(*args, **kwargs)
        self._are_parameters_parted = False
        self._parted_optimizers: set[int] = set()
        self._has_stepped = False  # an optimizer, in this batch of manual optimization

    @property
    def parted(self) -> frozenset[str]:
        """Kinds of :mod:`ddp_plugin.replica_state` that differ between ranks now, by design; none for most hooks."""
        kinds = {PARAMETER, BUFFER} if self._are_parameters_parted else set()
        return frozenset(kinds | ({OPTIMIZER_STATE} if self._parted_optimizers else set()))

    @property
    def _averager(self) -> Averager | None:
        attached = self._attached_hook
        return attached if isinstance(attached, Averager) else None

    def add_bucket_observer(self, observer: BucketObserver) -> None:
        """Lets ``observer`` see each gradient bucket; see :class:`FollowingWrap`.

        Raises:
            ValueError: beside a hook that exchanges parameters, where no bucket is reduced.

        Collectives:
            None.
        """
        if self._averages_parameters:
            raise ValueError(
                explain(
                    "gradient buckets to observe",
                    f"{type(observer).__name__} beside comm_hook={self._comm_hook}, which exchanges parameters instead",
                    "Leave out what observes, or use another comm_hook",
                )
            )
        super().add_bucket_observer(observer)

    def setup(self, trainer: Any) -> None:
        """Sets up a run, in which the ranks begin as one model.

        Raises:
            ValueError: beside a hook that exchanges parameters, an optimizer that is divided among the ranks, or a
                callback that keeps an average of weights, which would be each rank's own.
        """
        self._are_parameters_parted = False
        self._parted_optimizers.clear()
        super().setup(trainer)
        averages = [c for c in trainer.callbacks if "WeightAveraging" in (base.__name__ for base in type(c).__mro__)]
        if self._averager is not None and averages:
            raise ValueError(
                explain(
                    f"no callback that averages weights over steps, beside comm_hook={self._comm_hook}",
                    f"{type(averages[0]).__name__}, whose average would be each rank's own",
                    "Leave one of them out",
                )
            )
        divided = [type(o).__name__ for o in self.optimizers if hasattr(o, "consolidate_state_dict")]
        if self._averager is not None and divided:
            raise ValueError(
                explain(
                    f"optimizers that each rank has for itself, beside comm_hook={self._comm_hook}",
                    f"{divided[0]}, which is divided among the ranks",
                    "Use the optimizer that it divides",
                )
            )

    def _register_ddp_hooks(self) -> None:
        """Registers the hook; where the ranks train alone from here on, DDP is told so."""
        super()._register_ddp_hooks()
        if self._averager is not None and self._averager.trains_alone:
            self._never_reduce()

    def _never_reduce(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        _compat.never_reduce(self.model)
        self._pl_static_graph_delay_done = True  # the same for Lightning's manual optimization

    # ------------------------------------------------------------------------------------------------------ one step

    def on_train_start(self) -> None:
        """Notes what the ranks begin with: hooks of the same name may have changed it, on all ranks alike."""
        super().on_train_start()
        averager = self._averager
        if averager is not None and averager.num_steps <= averager.hook.start_step:
            averager.take_anchor()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; where the ranks train alone, without any message of DDP's.

        Collectives:
            In manual optimization those of :meth:`optimizer_step`, after the step.
        """
        averager, module = self._averager, self.lightning_module
        if averager is None or module is None:
            return super().training_step(*args, **kwargs)
        if averager.trains_alone:
            self._are_parameters_parted = self.world_size > 1  # buffers at least
        self._has_stepped = False
        with self._without_reduction():
            output = super().training_step(*args, **kwargs)
        if self._has_stepped and not module.automatic_optimization:
            self._after_step(averager)
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward; see :class:`FollowingWrap`.

        Collectives:
            None where the ranks train alone.
        """
        with self._without_reduction():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure and the step; at the end of a period the ranks become one model.

        Several optimizers of one batch, in manual optimization, make one step. In the exact steps LBFGS is given the
        mean of the ranks' losses, as it is without such a hook.

        Raises:
            DDPPluginError: on all ranks, where one of them exchanges and another does not.

        Collectives:
            See :class:`FollowingWrap`; with a hook that exchanges parameters, at the end of a period, one all-gather of
            two numbers on the control group, and those of :meth:`~ddp_plugin.hooks.Averager.after_step`.
        """
        averager, module = self._averager, self.lightning_module
        if averager is not None and not averager.trains_alone and isinstance(optimizer, LBFGS) and self.world_size > 1:
            closure = partial(self._mean_loss, closure)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if averager is not None and module is not None:
            self._has_stepped = True
            if averager.trains_alone and self.world_size > 1:
                self._are_parameters_parted = True
                self._parted_optimizers.add(id(optimizer))
            if module.automatic_optimization:
                self._after_step(averager)
        return result

    def _after_step(self, averager: Averager) -> None:
        is_exact = not averager.trains_alone
        if meets := averager.exchanges_next:
            what = "the beginning of the first period (start_step)" if is_exact else "an exchange of parameters"
            self._meet(f"{what} after {averager.num_steps + 1} optimizer steps")
        averager.after_step()
        if meets:
            self._are_parameters_parted = False
        if meets and is_exact and isinstance(self.model, DistributedDataParallel):
            _compat.finish_rebuilding_buckets(self.model)  # or the first local forward would, by a message
            self._never_reduce()

    def _without_reduction(self) -> AbstractContextManager[None]:
        averager = self._averager
        if averager is None or not averager.trains_alone or not isinstance(self.model, DistributedDataParallel):
            return nullcontext()
        return self.model.no_sync()

    # --------------------------------------------------------------------------------------------- being one model

    def _become_one(self, why: str) -> None:
        """Averages what has parted; all ranks have stepped equally often, so they agree on whether it has."""
        averager = self._averager
        if averager is None or not self._are_parameters_parted:
            return
        if self.is_interrupted:
            rank_zero_warn(f"The ranks' parameters are not averaged for {why}, because the run was interrupted.")
            return
        self._meet(f"the mean of all parameters for {why}, after {averager.num_steps} optimizer steps")
        averager.average()
        self._are_parameters_parted = False

    def _meet(self, what: str) -> None:
        if self.world_size > 1:
            matching.match(what, self.control_group, _SAME_STEPS)

    def on_validation_start(self) -> None:
        """Makes the ranks one model before they validate; see :meth:`~ddp_plugin.hooks.Averager.average`."""
        super().on_validation_start()
        self._become_one("a validation")

    def on_train_end(self) -> None:
        """Makes the ranks one training: the model, and what the optimizers remember."""
        super().on_train_end()
        self._become_one("the end of the training")
        for optimizer in self.optimizers:
            self._average_optimizer(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the model's state for a checkpoint, on all ranks at the same time; the ranks become one model first.

        Collectives:
            With a hook that exchanges parameters, those of :meth:`~ddp_plugin.hooks.Averager.average`, inside a period.
        """
        self._become_one("a checkpoint")
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Returns an optimizer's state for a checkpoint, on all ranks at the same time.

        With a hook that exchanges parameters it becomes the ranks' mean first, on all of them, so that this run and one
        that begins with the checkpoint go on alike.

        Collectives:
            With such a hook, those of :func:`~ddp_plugin.averaging.average_optimizer`, if the optimizer has stepped.
        """
        self._average_optimizer(optimizer)
        return super().optimizer_state(optimizer)

    def _average_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        averager = self._averager
        if averager is not None and id(optimizer) in self._parted_optimizers and not self.is_interrupted:
            average_optimizer(optimizer, averager.group, self.control_group)
            self._parted_optimizers.discard(id(optimizer))

    def rewrap(self) -> None:
        """Wraps the model again; ranks that have parted become one model first, and parameters new to it begin there.

        Raises:
            DDPPluginError: see :class:`FollowingWrap`.

        Collectives:
            See :class:`FollowingWrap`.
        """
        self._become_one("another wrap of the model")
        super().rewrap()


def _refuse_beside_averaging(hook: str, arguments: Mapping[str, Any]) -> None:
    for name, why in _EXCLUDED.items():
        if arguments.get(name):
            raise ValueError(explain(f"no {name} beside comm_hook={hook}", f"it, but {why}", f"Leave {name} out"))
