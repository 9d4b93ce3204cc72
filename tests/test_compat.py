"""Notices when a private name that the package leans on moves."""

import inspect

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, SequentialSampler
from torchmetrics import Metric

from ddp_plugin import _compat
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
    for method in ("_setup_model", "_register_ddp_hooks", "setup_distributed", "block_backward_sync"):
        assert callable(getattr(DDPStrategy, method))


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
