"""The strategy that a person writes: what is checked at construction, and what happens to loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import RunningStage
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_plugin import process_group
from ddp_plugin.config import START_METHODS, NcclOptions, StrategyConfig
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import note_original, original_of
from ddp_plugin.hooks import CommHook, resolve_hook
from ddp_plugin.logical_shards import check_num_shards, refuse_other_reductions
from ddp_plugin.strategy.traced import Traced
from ddp_plugin.wrapping.arguments import check_ddp_arguments, refuse_contradictions

__all__ = ["CustomDDPStrategy", "DataLoaderTransform", "register_strategies"]

DataLoaderTransform = Callable[[object, RunningStage], object]
"""``(loader, stage) -> loader``: sees each loader of each stage before its iterator exists."""


class CustomDDPStrategy(Traced):
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
        checkpoint_on_stop: write ``stop.ckpt`` when a signal or ``max_time`` stops the run; see
            :class:`~ddp_plugin.strategy.stopping.Stopping`.
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
        None in the constructor. ``setup_environment`` makes two groups (all ranks); the wrap gathers a fingerprint of
        what is trainable, again at each epoch, and broadcasts rank 0's weights once; a backward runs one all-reduce per
        bucket; logged values travel as in :class:`~ddp_plugin.strategy.reductions.MatchedReductions`.
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
        checkpoint_on_stop: bool = False,
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
        if self._comm_hook is not None and self._comm_hook.refusal is not None:
            raise ValueError(self._comm_hook.refusal)
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
            start_method=start_method,
            **given,
        )
        self._dataloader_transforms: list[DataLoaderTransform] = []
        self._logical_shards = logical_shards
        self._checkpoint_on_stop = checkpoint_on_stop

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
        """Runs the transforms over a loader; Lightning calls this for every loader of every stage.

        It begins with the user's own loader: Lightning puts what this returns into the user's ``CombinedLoader``, and
        the next run gets it from there.
        """
        original = original_of(dataloader)
        dataloader = super().process_dataloader(original)
        module = self.lightning_module
        stage = module.trainer.state.stage if module is not None else None
        if stage is not None:
            for transform in self._dataloader_transforms:
                dataloader = transform(dataloader, stage)
        note_original(dataloader, original)
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
