"""The strategy: Lightning's DDPStrategy with the parts above put in its seams.

Read it as a list: what is checked at construction, how the process group starts, how the model is wrapped, what a
reduction gives, what happens to loaders.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_plugin import _compat, matching, process_group
from ddp_plugin.config import START_METHODS, NcclOptions, StrategyConfig
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.evaluation import combine_logged
from ddp_plugin.gather import gather_tensors
from ddp_plugin.hooks import HOOKS, CommHook, resolve_hook
from ddp_plugin.logical_shards import (
    check_num_shards,
    num_micro_batches,
    refuse_layers,
    refuse_other_reductions,
    shard_of,
)
from ddp_plugin.tree_exchange import ShardedGradient, broadcast_module
from ddp_plugin.wrapping.arguments import BucketObserver, check_ddp_arguments, no_sync, observed, refuse_contradictions
from ddp_plugin.wrapping.buckets import LayoutKeeper
from ddp_plugin.wrapping.rewrap import (
    TrainableParameters,
    agree_on_trainable,
    average_gradients,
    forget_buckets,
    in_words,
    meet,
    refuse_what_holds_on,
    release,
)
from ddp_plugin.wrapping.unused import named_parameter_errors

__all__ = ["CustomDDPStrategy", "DataLoaderTransform", "register_strategies"]

_UNFREEZE_WAIT = timedelta(minutes=5)  # for the other ranks to change their trainable parameters in the same step
_SAME_KEYS = matching.Rule(
    expected="every rank to log the same keys with sync_dist=True, in the same order",
    change="Log on every rank, outside `if rank == 0` (rank_zero_only=True is for values of one rank), in one order",
)
_SAME_SHAPES = matching.Rule(
    expected="tensors of one shape and dtype on all ranks for all_gather",
    change="Use strategy.all_gather_unequal(tensor), which returns a list of tensors of any shapes",
)

DataLoaderTransform = Callable[[object, RunningStage], object]
"""``(loader, stage) -> loader``: sees each loader of each stage before its iterator exists."""


class CustomDDPStrategy(DDPStrategy):
    """Distributed data parallel training that gives one process's numbers.

    It takes every keyword of :class:`lightning.pytorch.strategies.DDPStrategy` and of
    :class:`torch.nn.parallel.DistributedDataParallel`; ``None`` means "not given". Without ``comm_hook`` and without
    observers nothing is registered with DDP, and its own reducer runs.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: where ranks and addresses come from; found by Lightning when ``None``.
        checkpoint_io: how checkpoints are written.
        precision_plugin: set by the Trainer.
        comm_hook: how gradients are reduced: a name in :data:`ddp_plugin.hooks.HOOKS`, a mapping
            ``{"name": ..., **options}``, or a :class:`~ddp_plugin.hooks.CommHook`. Excludes ``ddp_comm_*``.
        bucket_cap_mb: bucket size in MiB. Written out it also replaces torch's small 1 MiB first bucket, so the first
            reduction starts later; leave it out unless you measured.
        bucket_cap_mb_list: sizes of the buckets in MiB, first to last (torch 2.13).
        static_graph: promise that the set of used parameters never changes; safe with accumulation.
        find_unused_parameters: search the graph for unused parameters in each step; costs a traversal.
        gradient_as_bucket_view: gradients are views into the buckets; saves memory and the copy back.
        broadcast_buffers: rank 0's buffers are broadcast at each training forward (before torch 2.13).
        forward_sync_buffers: the same by its new name (torch 2.13).
        init_sync: check shapes and broadcast rank 0's weights at the wrap.
        skip_all_reduce_unused_params: leave globally unused parameters out of the reduction (torch 2.13).
        batched_grad_copy: copy gradients into buckets with one fused kernel (torch 2.13).
        logical_shards: divide every optimizer step into this many shards, a power of two, and add their gradients in
            one fixed tree, so that the weights are the same bytes for 1, 2, 4, … processes; see
            :mod:`ddp_plugin.logical_shards`. It sets ``accumulate_grad_batches`` and replaces DDP's reducer.
        process_group_backend: ``"gloo"``, ``"nccl"``, …; chosen by the device when ``None``.
        timeout: timeout of the process group's collectives.
        nccl: options of the NCCL process group; refused where the backend is another one.
        ddp_comm_state: state of Lightning's own ``ddp_comm_hook``.
        ddp_comm_hook: a bare hook function, as with ``DDPStrategy``; here it runs on every device type.
        ddp_comm_wrapper: wrapper around ``ddp_comm_hook``.
        model_averaging_period: steps between averages of post-local SGD.
        start_method: ``"popen"``, ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **ddp_kwargs: any further argument of the installed torch's ``DistributedDataParallel``.

    Raises:
        TypeError: an argument that neither Lightning nor the installed torch has.
        ValueError: settings that contradict one another; raised here, before any process is started.

    Collectives:
        None in the constructor. ``setup_environment`` makes two groups (all ranks); the wrap broadcasts rank 0's
        weights once; a backward runs one all-reduce per bucket.
    """

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        comm_hook: str | dict[str, Any] | CommHook | None = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: list[int] | None = None,
        static_graph: bool | None = None,
        find_unused_parameters: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool | None = None,
        skip_all_reduce_unused_params: bool | None = None,
        batched_grad_copy: bool | None = None,
        logical_shards: int | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        nccl: NcclOptions | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        start_method: str = "popen",
        **ddp_kwargs: Any,
    ) -> None:
        named = {
            "bucket_cap_mb": bucket_cap_mb,
            "bucket_cap_mb_list": bucket_cap_mb_list,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "broadcast_buffers": broadcast_buffers,
            "forward_sync_buffers": forward_sync_buffers,
            "init_sync": init_sync,
            "skip_all_reduce_unused_params": skip_all_reduce_unused_params,
            "batched_grad_copy": batched_grad_copy,
        }
        given = {name: value for name, value in (named | ddp_kwargs).items() if value is not None}
        check_ddp_arguments(given, also_known=inspect.signature(CustomDDPStrategy).parameters)
        self._comm_hook = resolve_hook(comm_hook) if comm_hook is not None else None
        self._nccl = nccl
        lightning_hook = {
            "ddp_comm_hook": ddp_comm_hook,
            "ddp_comm_state": ddp_comm_state,
            "ddp_comm_wrapper": ddp_comm_wrapper,
        }
        refuse_contradictions(given, self._comm_hook, lightning_hook, model_averaging_period)
        if logical_shards is not None:
            check_num_shards(logical_shards)
            reductions = {"comm_hook": comm_hook, "model_averaging_period": model_averaging_period, **lightning_hook}
            refuse_other_reductions(given | {name: value for name, value in reductions.items() if value is not None})
        process_group.refuse_unusable_settings(nccl, process_group_backend, timeout)
        if start_method not in START_METHODS:
            raise ValueError(explain(f"start_method to be one of {START_METHODS}", repr(start_method), "Choose one"))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,  # type: ignore[arg-type]  # checked against START_METHODS above
            **given,
        )
        self._dataloader_transforms: list[DataLoaderTransform] = []
        self._bucket_observers: list[BucketObserver] = []
        self._hook_is_registered = False
        self._first_backward_done = False
        self._trainable: TrainableParameters | None = None  # of the latest wrap
        self._epoch_of_agreement: int | None = None  # in which all ranks' trainable parameters were compared last
        self._unused_at_first: list[str] = []
        self._layout = LayoutKeeper(bool(find_unused_parameters))
        self._release_logging: Callable[[], None] | None = None
        self._logical_shards = logical_shards
        self._sharded_gradient: ShardedGradient | None = None

    @classmethod
    def from_config(cls, config: StrategyConfig | Mapping[str, Any] | DictConfig) -> CustomDDPStrategy:
        """Builds the strategy from a :class:`StrategyConfig`, a dict or an OmegaConf ``DictConfig``.

        Args:
            config: fields of :class:`StrategyConfig`; missing ones keep their defaults.

        Raises:
            ValueError: a key that :class:`StrategyConfig` does not have, or a value of another type.

        Collectives:
            None.
        """
        if not (isinstance(config, (Mapping, DictConfig)) or is_dataclass(config)):
            raise TypeError(explain("a StrategyConfig, a dict or a DictConfig", repr(config), "Pass one of these"))
        try:
            merged = OmegaConf.merge(OmegaConf.structured(StrategyConfig), config)
            settings = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise ValueError(
                explain(
                    f"the fields of StrategyConfig: {[f.name for f in fields(StrategyConfig)]}",
                    str(error).splitlines()[0],
                    "Correct the configuration",
                )
            ) from error
        assert isinstance(settings, StrategyConfig)
        arguments = {f.name: getattr(settings, f.name) for f in fields(StrategyConfig)}
        timeout_s = arguments.pop("timeout_s")
        if not 0 < timeout_s <= timedelta.max.total_seconds():
            raise ValueError(explain("timeout_s above zero and finite", repr(timeout_s), "Give the timeout in seconds"))
        arguments["timeout"] = timedelta(seconds=timeout_s)
        return cls(**arguments)

    # ------------------------------------------------------------------------------------------------ process group

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The gloo group for small control messages, never on the gradient's path; made by ``setup_environment``."""
        return process_group.control_group(self._timeout)

    def setup_distributed(self) -> None:
        """Starts the process group with the options asked for, and the control group beside it.

        Raises:
            ValueError: ``nccl`` was given and the backend turned out to be another one.

        Collectives:
            Group creation, on all ranks.
        """
        _compat.reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend = self._get_process_group_backend()
        options: dict[str, Any] = {"timeout": self._timeout}
        if self.root_device.type != "cpu":
            options["device_id"] = self.root_device
        if self._nccl is not None:
            if "nccl" not in backend:
                raise ValueError(
                    explain(
                        "the NCCL backend, because nccl=NcclOptions(...) was given",
                        f"backend {backend!r} for {self.root_device.type} devices",
                        "Remove nccl= here",
                    )
                )
            options["pg_options"] = process_group.nccl_process_group_options(self._nccl, self._timeout)
        existed = dist.is_initialized()
        _compat.init_process_group(self.cluster_environment, backend, **options)
        process_group.destroy_at_exit()
        differences = process_group.settings_in_force(backend, self._timeout)
        if existed and self._nccl is not None:
            differences.append(f"{self._nccl} was asked for, the group keeps the options it was made with")
        for difference in differences:
            whose = (
                "A process group existed before this Trainer started" if existed else "The new process group differs"
            )
            rank_zero_warn(f"{whose}: {difference}.")
        process_group.control_group(self._timeout)

    # --------------------------------------------------------------------------------------------------------- wrap

    @property
    def comm_hook(self) -> CommHook | None:
        """The hook that was asked for by ``comm_hook``, or ``None`` where DDP's own reducer runs."""
        return self._comm_hook

    def add_bucket_observer(self, observer: BucketObserver) -> None:
        """Lets ``observer`` see each gradient bucket before and after its reduction.

        The first observer replaces DDP's reducer by the bit-identical ``allreduce`` hook, unless a hook runs already.
        Adding the same observer again changes nothing.

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
        if observer not in self._bucket_observers:
            self._bucket_observers.append(observer)
        if isinstance(self.model, DistributedDataParallel) and not self._hook_is_registered:
            self._register_ddp_hooks()

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        self._hook_is_registered = self._first_backward_done = self._pl_static_graph_delay_done = False
        self._unused_at_first = []
        self._trainable = trainable = self._trainable_parameters(model)
        group = self.control_group if self._one_model_on_all_ranks else None
        agree_on_trainable(trainable, group)
        with self._layout.first_buckets(trainable.names, group):
            return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        """Registers a hook only if a hook or an observer was asked for, on every device type."""
        assert isinstance(self.model, DistributedDataParallel)
        hook = self._comm_hook
        if self._ddp_comm_hook is not None:
            function = self._ddp_comm_hook
            if self._ddp_comm_wrapper is not None:
                function = self._ddp_comm_wrapper(function)
            state = self._ddp_comm_state
        elif hook is not None or self._bucket_observers:
            hook = hook or HOOKS["allreduce"]()
            function, state = hook.function, hook.make_state(self.model.process_group)
        else:
            return
        self.model.register_comm_hook(state, observed(function, self._bucket_observers))
        self._hook_is_registered = True

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skips the reduction while gradients accumulate; the first backward of a static graph still synchronises."""
        if not isinstance(self.model, DistributedDataParallel):
            yield
            return
        with no_sync(self.model, first_backward_done=self._first_backward_done):
            yield

    def post_backward(self, closure_loss: Tensor) -> None:
        """Notes that this wrap has seen a backward, beside what Lightning does, and looks whether it is complete."""
        super().post_backward(closure_loss)
        model, module = self.model, self.lightning_module
        if isinstance(model, DistributedDataParallel):
            if module is None or module.automatic_optimization:
                _compat.check_reduction_finished(model)
            if getattr(model, "static_graph", False) and not self._first_backward_done and self._trainable is not None:
                self._unused_at_first = self._trainable.without_gradient()
        self._first_backward_done = True
        if self._sharded_gradient is not None:
            self._sharded_gradient.end_shard()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step through the wrap; DDP's errors about parameters name them."""
        with self._parameter_errors():
            return super().training_step(*args, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Refuses parameters that were unfrozen inside the step, where no wrap can reduce their gradients any more."""
        wrapped, trainable = isinstance(self.model, DistributedDataParallel), self._trainable
        if wrapped and trainable is not None and (late := trainable.unfrozen()):
            raise DDPPluginError(
                explain(
                    "parameters to be unfrozen before the training step",
                    f"{in_words(late)} unfrozen inside it, so that their gradients would stay this rank's own",
                    "Unfreeze them in a hook before the step, such as on_train_epoch_start or on_train_batch_start",
                )
            )
        super().pre_backward(closure_loss)

    def _parameter_errors(self) -> AbstractContextManager[None]:
        model = self.model
        return named_parameter_errors(
            self._trainable.names if self._trainable is not None else (),
            static_graph=bool(getattr(model, "static_graph", False)),
            find_unused_parameters=bool(getattr(model, "find_unused_parameters", False)),
            unused_at_first=self._unused_at_first,
        )

    # ------------------------------------------------------------------------------------------------------- re-wrap

    def rewrap(self) -> None:
        """Wraps the model again, from rank 0's values; the hook and the observers are registered again.

        This happens by itself where the set of trainable parameters has changed when a training batch begins; call it
        after any other change that DistributedDataParallel has to know of. Optimizers are left as they are, and so are
        gradients that an accumulation window has gathered so far; those of parameters that are frozen now are averaged,
        because no wrap will do so any more. Does nothing while there is no wrap.

        Raises:
            DDPPluginError: on all ranks, when they differ in what is trainable; or where a setting holds the old wrap.

        Collectives:
            On every rank: what a wrap costs, a comparison on the control group, and an all-reduce for each frozen
            parameter that holds a gradient.
        """
        old, before = self.model, self._trainable
        if not isinstance(old, DistributedDataParallel) or before is None:
            return
        refuse_what_holds_on(old)
        now = self._trainable_parameters(old.module)
        unfrozen, frozen = now.added_since(before), before.added_since(now)
        if self._one_model_on_all_ranks:
            agree_on_trainable(now, self.control_group)
            left = [parameter for parameter in before.parameters() if not parameter.requires_grad]
            average_gradients(left, old.process_group, self.control_group)
        own_buffers = [] if old.broadcast_buffers else [(b, b.detach().clone()) for b in old.module.buffers()]
        self.model = release(old)
        forget_buckets(self._ddp_comm_state)
        self.configure_ddp()
        with torch.no_grad():
            for buffer, value in own_buffers:
                buffer.copy_(value)
        changes = [f"{verb} {in_words(n)}" for verb, n in (("unfrozen", unfrozen), ("frozen", frozen)) if n]
        rank_zero_info(f"CustomDDPStrategy: the model is wrapped again: {'; '.join(changes) or 'on request'}.")

    def _follow_trainable(self, model: DistributedDataParallel, known: TrainableParameters) -> None:
        """Wraps the model again if other parameters are trainable than at the wrap, on all ranks."""
        module = self.lightning_module
        assert module is not None
        epoch, automatic = module.trainer.current_epoch, module.automatic_optimization
        is_new_epoch = epoch != self._epoch_of_agreement
        # Manual optimization freezes and unfreezes at will inside a step: what is frozen there stays in the wrap.
        if not (is_new_epoch or (known.changed() if automatic else known.unfrozen())):
            return
        self._epoch_of_agreement = epoch
        now = self._trainable_parameters(model.module)
        unfrozen, frozen = now.added_since(known), known.added_since(now)
        if self._one_model_on_all_ranks:
            wait = self._timeout or timedelta(minutes=30)
            reason = f"{in_words([*unfrozen, *frozen])} changed here" if unfrozen or frozen else "a new epoch"
            meet(self.world_size, wait if is_new_epoch else min(wait, _UNFREEZE_WAIT), reason)
            agree_on_trainable(now, self.control_group)
        if unfrozen or (frozen and automatic):
            self.rewrap()

    def _trainable_parameters(self, module: torch.nn.Module) -> TrainableParameters:
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        delayed = {name for name, _ in self._ddp_kwargs.get("delay_all_reduce_named_params", ())}
        return TrainableParameters(module, ignored | delayed)

    @property
    def _one_model_on_all_ranks(self) -> bool:
        """Whether all ranks hold the same parameters; not so where the user's own group or mesh divides a model."""
        return self.world_size > 1 and not {"process_group", "device_mesh"} & set(self._ddp_kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint; one of a training run also keeps the layout of its gradient buckets.

        Collectives:
            Those of DDP's own rebuilding of its buckets on every rank, when it is due.
        """
        if "optimizer_states" in checkpoint:  # of a run, not of weights alone
            model = self.model if isinstance(self.model, DistributedDataParallel) else None
            self._layout.save(checkpoint, model, self._trainable)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint; the wrap that follows begins with the bucket layout of the run that saved it."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._layout.load(checkpoint)
        return checkpoint

    # ----------------------------------------------------------------------------------------------- logical shards

    @property
    def logical_shards(self) -> int | None:
        """How many shards every optimizer step is divided into, or ``None`` where DDP reduces."""
        return self._logical_shards

    @property
    def current_shard(self) -> int | None:
        """The shard that the micro-batch is which runs now or comes next; ``None`` without logical shards in ``fit``.

        Micro-batch ``j`` of an optimizer step on rank ``r`` of ``W`` is shard ``r S/W + j``.
        """
        if self._logical_shards is None or self._sharded_gradient is None:
            return None
        num_done = self._sharded_gradient.num_done
        return shard_of(self.global_rank, num_done, self._logical_shards, self.world_size)

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

    def on_train_start(self) -> None:
        """Refuses an epoch that ends inside a step of logical shards, where its length is known."""
        super().on_train_start()
        module = self.lightning_module
        if self._sharded_gradient is None or module is None:
            return
        num_batches, num_micro = module.trainer.num_training_batches, module.trainer.accumulate_grad_batches
        if num_batches != float("inf") and num_batches % num_micro:
            raise ValueError(
                explain(
                    f"a multiple of {num_micro} training batches on each rank, the shards of an optimizer step there",
                    f"{num_batches}",
                    "Set limit_train_batches, or let the loader drop the last ones",
                )
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Follows what is trainable, and begins a shard; Lightning calls this after all hooks of the same name."""
        super().on_train_batch_start(batch, batch_idx)
        if isinstance(self.model, DistributedDataParallel) and self._trainable is not None:
            self._follow_trainable(self.model, self._trainable)
            if complaint := self._layout.complaint(self.model, self._trainable.names):
                rank_zero_warn(f"Results may differ from the uninterrupted run's in the last bit: {complaint}.")
        if self._sharded_gradient is not None:
            self._sharded_gradient.begin_shard()

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the backward; with logical shards, that of ``loss / shards`` whatever the number of processes.

        Raises:
            DDPPluginError: a parameter got no gradient, or was unfrozen since the step began; it is named. Torch says
                so at the next forward only, after a step with unreduced gradients, and never in the last step.

        Collectives:
            One all-reduce per bucket on every rank, except while gradients accumulate.
        """
        if self._sharded_gradient is not None:
            closure_loss = closure_loss / self.world_size  # Lightning has divided by the number of micro-batches
        with self._parameter_errors():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

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
        gradient, module = self._sharded_gradient, self.lightning_module
        if isinstance(self.model, DistributedDataParallel) and module is not None and not module.automatic_optimization:
            with self._parameter_errors():  # several backwards may make one reduction here, but now it has to be one
                _compat.check_reduction_finished(self.model)
        if gradient is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def closure_and_sum() -> Any:
            result = closure()
            gradient.finish_step()
            return result

        return super().optimizer_step(optimizer, closure_and_sum, model, **kwargs)

    def teardown(self) -> None:
        """Lets go of the run, and leaves the Trainer's accumulation as it was given."""
        if self._release_logging is not None:
            self._release_logging()
        if isinstance(self.model, DistributedDataParallel) and self._trainable is not None:
            self._layout.end(self.model, self._trainable)
        self._release_logging = self._trainable = None
        module = self.lightning_module
        if self._sharded_gradient is not None and module is not None:
            module.trainer.accumulate_grad_batches = 1
        self._sharded_gradient = None
        super().teardown()

    # --------------------------------------------------------------------------------------------------- reductions

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

    def _device_for(self, device: torch.device, group: Any) -> torch.device:
        if not dist.is_initialized() or dist.get_rank(group) < 0:
            return device
        served = _compat.served_device_types(_compat.default_group() if group is None else group)
        return matching.collective_device(device, served, self.root_device)

    # ------------------------------------------------------------------------------------------------ logged values

    def setup(self, trainer: Any) -> None:
        """Sets up a run; from here on, what ``self.log(..., sync_dist=True)`` reduces knows its key."""
        super().setup(trainer)
        self._epoch_of_agreement = None
        if self.world_size > 1 and self._release_logging is None:
            self._release_logging = _compat.intercept_reductions(trainer, self)

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

    # ------------------------------------------------------------------------------------------------------ loaders

    def add_dataloader_transform(self, transform: DataLoaderTransform) -> None:
        """Lets ``transform`` replace each loader of each stage before its iterator exists, in the order of adding.

        Args:
            transform: ``(loader, stage) -> loader``; adding an equal one again changes nothing.

        Collectives:
            None.
        """
        if transform not in self._dataloader_transforms:
            self._dataloader_transforms.append(transform)

    def process_dataloader(self, dataloader: object) -> object:
        """Runs the transforms over a loader; Lightning calls this for every loader of every stage."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        stage = module.trainer.state.stage if module is not None else None
        if stage is not None:
            for transform in self._dataloader_transforms:
                dataloader = transform(dataloader, stage)
        return dataloader

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers this class under the names starting with ``ddp_plugin``; names that exist are left alone."""
        presets: dict[str, dict[str, Any]] = {
            "ddp_plugin": {},
            "ddp_plugin_spawn": {"start_method": "spawn"},
            "ddp_plugin_fork": {"start_method": "fork"},
            "ddp_plugin_notebook": {"start_method": "fork"},
            "ddp_plugin_static": {"static_graph": True},
            "ddp_plugin_find_unused_parameters_true": {"find_unused_parameters": True},
            "ddp_plugin_find_unused_parameters_false": {"find_unused_parameters": False},
            "ddp_plugin_fp16": {"comm_hook": "fp16"},
            "ddp_plugin_bf16": {"comm_hook": "bf16"},
        }
        for name, settings in presets.items():
            if name not in strategy_registry:
                described = ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "default settings"
                strategy_registry.register(name, cls, description=f"CustomDDPStrategy with {described}", **settings)


def register_strategies() -> None:
    """Makes ``Trainer(strategy="ddp_plugin")`` and its variants known; runs when the package is imported."""
    CustomDDPStrategy.register_strategies(StrategyRegistry)
