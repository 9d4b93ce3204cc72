"""Notices when a private name that the package leans on moves."""

import inspect
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, SequentialSampler
from torchmetrics import Metric

from ddp_plugin import CustomDDPStrategy, _compat
from tests.harness import ranks


def test_lightnings_private_names() -> None:
    from lightning.fabric.utilities.distributed import _init_dist_connection
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.connectors.logger_connector.result import (
        _Metadata,
        _ResultCollection,
        _ResultMetric,
        _Sync,
    )

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert list(inspect.signature(trainer._data_connector._prepare_dataloader).parameters) == [
        "dataloader",
        "shuffle",
        "mode",
    ]
    assert _compat.uses_distributed_sampler(trainer) is True
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
        assert isinstance(loop._results, _ResultCollection)
        assert hasattr(loop, "_combined_loader")
    assert _compat.logging_step(trainer) == trainer.fit_loop.epoch_loop._batches_that_stepped == 0
    progress = trainer.fit_loop.epoch_loop.batch_progress
    assert progress.is_last_batch is False
    assert list(inspect.signature(trainer.fit_loop.update_restart_stage).parameters) == []
    assert trainer.fit_loop.restarting is trainer.fit_loop.is_resuming is False
    for tracker in (progress.current, progress.total):
        assert set(vars(tracker)) == {"ready", "started", "processed", "completed"}
    assert hasattr(trainer.predict_loop, "_predictions")
    assert hasattr(trainer.fit_loop, "_data_fetcher")
    meta = _Metadata("validation_step", "x")
    meta.sync = _Sync()
    item = _ResultMetric(meta, is_tensor=True)
    for name in ("value", "cumulated_batch_size", "_update_count", "_computed", "has_reset"):
        assert name in item.__dict__, name
    assert meta.sync.rank_zero_only is False
    assert list(inspect.signature(_init_dist_connection).parameters)[:2] == [
        "cluster_environment",
        "torch_distributed_backend",
    ]
    wrapper = _IndexBatchSamplerWrapper(BatchSampler(SequentialSampler(range(3)), 2, False))
    assert list(wrapper) == [[0, 1], [2]]
    assert wrapper.seen_batch_indices == [[0, 1], [2]]
    connector, fit_loop = trainer._logger_connector, trainer.fit_loop
    for owner, name in ((connector, "callback_metrics"), (fit_loop, "skip")):
        assert isinstance(getattr(type(owner), name), property)
    for owner, method, parameters in (
        (fit_loop, "on_run_start", []),
        (fit_loop, "on_advance_end", []),
        (fit_loop.epoch_loop, "on_advance_end", ["data_fetcher"]),
        (fit_loop.epoch_loop, "update_lr_schedulers", ["interval", "update_plateau_schedulers"]),
        (fit_loop.epoch_loop, "_should_accumulate", []),
    ):
        assert list(inspect.signature(getattr(owner, method)).parameters) == parameters, method
    checkpoint = pl.callbacks.ModelCheckpoint(every_n_train_steps=3)
    assert checkpoint._every_n_train_steps == 3
    assert checkpoint._train_time_interval is None
    for method in ("_setup_model", "_register_ddp_hooks", "setup_distributed", "block_backward_sync"):
        assert callable(getattr(DDPStrategy, method))


def test_what_steps_and_saves_is_counted_as_lightning_counts() -> None:
    save = _compat.may_save_now
    checkpoint = pl.callbacks.ModelCheckpoint(every_n_train_steps=3)
    assert [save(checkpoint, step) for step in (2, 3, 4, 6)] == [False, True, False, True]
    assert not save(pl.callbacks.ModelCheckpoint(every_n_epochs=1), 1)
    assert save(pl.callbacks.ModelCheckpoint(train_time_interval=timedelta(hours=1)), 1)
    assert not save(pl.callbacks.EarlyStopping("x"), 1)


def test_layers_that_keep_statistics_of_their_batch() -> None:
    for layer in (torch.nn.BatchNorm2d(1), torch.nn.InstanceNorm1d(1), torch.nn.SyncBatchNorm(1)):
        assert _compat.keeps_batch_statistics(layer)
    for layer in (torch.nn.LayerNorm(1), torch.nn.GroupNorm(1, 1), torch.nn.Linear(1, 1)):
        assert not _compat.keeps_batch_statistics(layer)


def test_torchmetrics_private_names() -> None:
    class Sum(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

        def update(self, value: torch.Tensor) -> None:
            self.total += value

        def compute(self) -> torch.Tensor:
            return self.total

    metric = Sum()
    assert list(inspect.signature(metric._sync_dist).parameters) == ["dist_sync_fn", "process_group"]
    assert set(metric._reductions) == set(metric._defaults) == {"total"}
    snapshot = _compat.metric_snapshot(metric)
    metric.update(torch.tensor(3.0))
    metric.compute()
    assert metric._update_count == 1
    _compat.restore_metric(metric, snapshot)
    assert metric.total.item() == 0.0
    assert metric._update_count == 0
    assert metric._computed is None


@ranks(2)
def test_torchs_private_names() -> None:
    assert _compat.default_group() is dist.group.WORLD
    timeout = _compat.default_group_timeout()
    assert timeout is not None
    assert timeout.total_seconds() == 120


def test_torch_counts_changes_in_place() -> None:
    tensor = torch.zeros(2)
    before = _compat.version_of(tensor)
    tensor.add_(1)
    assert _compat.version_of(tensor) == before + 1


def test_ddp_names_its_first_hook_argument_bucket() -> None:
    model = torch.nn.Linear(1, 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(KeyError, match="bucket"):
            ddp.register_comm_hook(None, lambda state, other: None)
        assert ddp.static_graph is False
    finally:
        dist.destroy_process_group()


def test_torchs_kernels_and_counters_for_gradients() -> None:
    gradients = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16)]
    versions = [_compat.version_of(gradient) for gradient in gradients]
    _compat.multiply_all_(gradients, torch.tensor(0.5))
    assert all((gradient == 0.5).all() for gradient in gradients)
    assert all(_compat.version_of(gradient) > version for gradient, version in zip(gradients, versions, strict=True))
    versions = [_compat.version_of(gradient) for gradient in gradients]
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.grad = gradients[0]
    torch.optim.SGD([parameter], lr=1.0).zero_grad(set_to_none=False)
    assert _compat.version_of(gradients[0]) > versions[0]
    assert _compat.version_of(gradients[1]) == versions[1]


def test_where_lightning_keeps_the_state_of_post_local_sgd() -> None:
    from lightning.pytorch.strategies import DDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)  # type: ignore[no-untyped-call]
    assert _compat.averages_models(DDPStrategy(ddp_comm_state=state))
    assert not _compat.averages_models(DDPStrategy())
    assert _compat.averages_models(CustomDDPStrategy(comm_hook="diloco"))
    assert not _compat.averages_models(CustomDDPStrategy(comm_hook="bf16"))
    assert _compat.runs_bare_hook(DDPStrategy(ddp_comm_hook=print))
    assert not _compat.runs_bare_hook(DDPStrategy())


@ranks(1)
def test_ddps_private_names() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    assert model._delay_all_reduce_params == []
    assert model._has_rebuilt_buckets is False
    for method in ("_check_reducer_finalized", "_get_ddp_logging_data"):
        assert callable(getattr(model, method))
    for method in ("_rebuild_buckets", "_get_zeros_like_grad_buckets"):
        assert callable(getattr(model.reducer, method))
    assert callable(dist._compute_bucket_assignment_by_size)
    assert dist.distributed_c10d._get_default_store() is _compat.default_store()
    assert {device.type for device in _compat.default_group()._device_types} >= {"cpu"}
    assert model.require_forward_param_sync is True
    static = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), static_graph=True)
    assert static._static_graph_delay_allreduce_enqueued is False
    for name in ("reducer", "logger", "bucket_bytes_cap", "bucket_bytes_cap_default", "broadcast_buffers"):
        assert hasattr(model, name), name


def test_where_lightning_reduces_what_was_logged() -> None:
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _Sync

    parameters = inspect.signature(_ResultCollection.log).parameters
    assert list(parameters)[:4] == ["self", "fx", "name", "value"]
    assert {"sync_dist", "sync_dist_fn", "add_dataloader_idx"} <= set(parameters)
    for method in ("epoch_end_reached", "on_epoch_end"):
        assert list(inspect.signature(getattr(_LoggerConnector, method)).parameters) == ["self"]
    assert _Sync(fn=print, _should=True) == _Sync(fn=print, _should=True)  # compared when a key is logged again
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    assert trainer.fit_loop.epoch_loop._results.training
    assert trainer._results is None
