"""Optimizer steps of a fixed number of logical shards: the same bytes on any number of processes."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ddp_plugin.errors import explain
from ddp_plugin.logical_shards import num_micro_batches, refuse_layers
from ddp_plugin.strategy.averaging import AveragedReplicas
from ddp_plugin.tree_exchange import ShardedGradient, broadcast_module
from ddp_plugin.wrapping.arguments import BucketObserver

__all__ = ["LogicalShards"]


class LogicalShards(AveragedReplicas):
    """With ``logical_shards`` nothing is wrapped: gradients are summed here, in one tree over the shards."""

    _logical_shards: int | None = None
    _sharded_gradient: ShardedGradient | None = None

    @property
    def logical_shards(self) -> int | None:
        """How many shards every optimizer step is divided into, or ``None`` where DDP reduces."""
        return self._logical_shards

    def setup_environment(self) -> None:
        """Starts the processes' group, then sets how many micro-batches a step of logical shards has on each rank.

        Raises:
            ValueError: with ``logical_shards``, a number of processes, an accumulation or an optimization that does
                not go with it.

        Collectives:
            Those of :meth:`setup_distributed`.
        """
        super().setup_environment()
        module = self.lightning_module
        if self._logical_shards is None or module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        num_micro = num_micro_batches(self._logical_shards, self.world_size)
        self._refuse_beside_logical_shards(module)
        module.trainer.accumulate_grad_batches = num_micro
        control_group = self.control_group if self.world_size > 1 else None
        self._sharded_gradient = ShardedGradient(module, num_micro, control_group)

    def _refuse_beside_logical_shards(self, module: LightningModule) -> None:
        trainer = module.trainer
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        accumulates = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        if trainer.accumulate_grad_batches != 1 or accumulates:
            raise ValueError(
                explain(
                    "accumulate_grad_batches=1, because logical_shards sets it to shards / processes",
                    "a GradientAccumulationScheduler" if accumulates else repr(trainer.accumulate_grad_batches),
                    "Leave it out; for larger steps raise logical_shards or the batch size",
                )
            )
        if not module.automatic_optimization:
            raise ValueError(
                explain(
                    "automatic optimization beside logical_shards, which acts between the backward and the step",
                    f"{type(module).__name__} with manual optimization",
                    "Use automatic optimization, or leave logical_shards out",
                )
            )

    def configure_ddp(self) -> None:
        """Wraps the model; with logical shards nothing is wrapped, and rank 0's values are broadcast.

        Raises:
            ValueError: with ``logical_shards``, layers whose result would follow the number of processes.

        Collectives:
            Those of DDP's wrap, or one broadcast per parameter and buffer, on all ranks.
        """
        if self._sharded_gradient is None:
            super().configure_ddp()
            return
        assert self.lightning_module is not None
        refuse_layers(self.lightning_module)
        broadcast_module(self.lightning_module)

    def add_bucket_observer(self, observer: BucketObserver) -> None:
        """Lets ``observer`` see each gradient bucket; see :class:`AveragedReplicas`.

        Raises:
            ValueError: with ``logical_shards``, where there are no buckets.

        Collectives:
            None.
        """
        if self._logical_shards is not None:
            raise ValueError(
                explain(
                    "gradient buckets to observe",
                    f"{type(observer).__name__} beside logical_shards, which reduces without buckets",
                    "Leave out what observes, or logical_shards",
                )
            )
        super().add_bucket_observer(observer)

    def on_train_start(self) -> None:
        """Refuses epochs that end inside a step of logical shards, and schedulers that read one shard's values.

        Raises:
            ValueError: with ``logical_shards``, either of them.
        """
        super().on_train_start()
        module = self.lightning_module
        if self._sharded_gradient is None or module is None:
            return
        if any(config.reduce_on_plateau and config.interval == "step" for config in self.lr_scheduler_configs):
            raise ValueError(
                explain(
                    "schedulers whose steps do not depend on the number of processes, beside logical_shards",
                    "a plateau scheduler with interval='step', which reads what the last shards logged",
                    "Use interval='epoch' with a validated metric, or leave logical_shards out",
                )
            )
        num_batches, num_micro = module.trainer.num_training_batches, module.trainer.accumulate_grad_batches
        if num_batches != float("inf") and num_batches % num_micro:
            raise ValueError(
                explain(
                    f"a multiple of {num_micro} training batches on each rank, the shards of an optimizer step there",
                    f"{num_batches}",
                    f"Use fast_dev_run={num_micro}"
                    if module.trainer.fast_dev_run  # type: ignore[attr-defined]  # set by a function
                    else "Set limit_train_batches, or let the loader drop the last ones",
                )
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begins a shard; Lightning calls this after all hooks of the same name."""
        super().on_train_batch_start(batch, batch_idx)
        if self._sharded_gradient is not None:
            self._sharded_gradient.begin_shard()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward; with logical shards, that of ``loss / shards`` whatever the number of processes.

        Collectives:
            With logical shards none; else see :class:`AveragedReplicas`.
        """
        if self._sharded_gradient is not None:
            closure_loss = closure_loss / self.world_size  # Lightning has divided by the number of micro-batches
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Takes a shard's gradients into the tree."""
        super().post_backward(closure_loss)
        if self._sharded_gradient is not None:
            self._sharded_gradient.end_shard()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure and the step; between them, logical shards are summed over the ranks.

        Collectives:
            With ``logical_shards``, those of :meth:`~ddp_plugin.tree_exchange.ShardedGradient.finish_step`.
        """
        gradient = self._sharded_gradient
        if gradient is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def closure_and_sum() -> Any:
            result = closure()
            gradient.finish_step()
            return result

        return super().optimizer_step(optimizer, closure_and_sum, model, **kwargs)

    def teardown(self) -> None:
        """Leaves the Trainer's accumulation as it was given."""
        module = self.lightning_module
        if self._sharded_gradient is not None and module is not None:
            module.trainer.accumulate_grad_batches = 1
        self._sharded_gradient = None
        super().teardown()
