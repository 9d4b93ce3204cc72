"""Notices when a private name that the package leans on moves."""

import inspect
import threading
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
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
    assert trainer.fit_loop._data_source.instance is None
    assert _compat.given_train_loaders(trainer) == []
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
    restore = trainer._checkpoint_connector._restore_modules_and_callbacks
    assert next(iter(inspect.signature(restore).parameters)) == "checkpoint_path"
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


def test_what_dynamo_knows_of_a_module() -> None:
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.utils import get_optimize_ddp_mode

    module = torch.nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    assert type(torch.compile(module, backend="eager")).__name__ == "OptimizedModule"
    assert get_optimize_ddp_mode() == "ddp_optimizer"
    assert _debug_get_cache_entry_list(test_what_dynamo_knows_of_a_module.__code__) == []
    assert pl.LightningModule()._compiler_ctx is None


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


def test_what_python_and_torch_tell_of_a_stuck_process(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = _compat.main_thread_frame()
    assert frame.f_code.co_name == "main_thread_frame"
    assert frame.f_back.f_code.co_name == "test_what_python_and_torch_tell_of_a_stuck_process"
    c10d = torch._C._distributed_c10d
    assert callable(c10d._dump_fr_trace_json)
    dumped = []

    def dump(includes_collectives: bool, only_active: bool) -> bytes:
        dumped.append((includes_collectives, only_active))
        return b'{"entries": [{"profiling_name": "nccl:all_reduce"}]}'

    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", dump, raising=False)
    assert _compat.flight_records()[0]["entries"] == [{"profiling_name": "nccl:all_reduce"}]
    assert dumped == [(True, False)]


def test_which_data_worker_is_awaited() -> None:
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=1)  # type: ignore[arg-type]
    iterator = iter(loader)
    awaited = _compat.awaited_worker(iterator)
    assert awaited is not None
    assert awaited.startswith("data worker 0 (pid ")
    assert len(list(iterator)) == 4
    assert _compat.awaited_worker(iter(torch.utils.data.DataLoader([1]))) is None  # type: ignore[arg-type]


@ranks(1)
def test_ddp_tells_its_buckets_after_some_steps() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    assert _compat.bucket_bytes(model) is None
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
    assert _compat.bucket_bytes(model) == (12,)
    (record,) = _compat.flight_records()
    assert record["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert record["entries"][-1]["input_sizes"] == [[3]]


def test_what_a_launcher_runs_can_be_guarded() -> None:
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    class Launcher(_SubprocessScriptLauncher):
        def launch(self, function, *args, trainer=None, **kwargs):
            return function(*args, **kwargs)

    calls = []
    launcher = Launcher(None, 1, 1)
    _compat.guard_launched(launcher, lambda function, *args: (calls.append("in"), function(*args))[1])
    assert launcher.launch(lambda value: value + 1, 2, trainer=None) == 3
    assert calls == ["in"]
    _compat.guard_launched(None, print)
    assert pl.Trainer(accelerator="cpu", strategy=CustomDDPStrategy(), logger=False).strategy.launcher is not None


def test_which_hook_raised() -> None:
    class Fails(pl.Callback):
        def on_sanity_check_start(self, trainer, module):
            self.deeper()

        def deeper(self):
            raise ValueError("here")

    class Static(pl.Callback):
        on_sanity_check_start = staticmethod(lambda trainer, module: Fails().deeper())

    class Decorated(pl.Callback):
        @torch.no_grad()
        def on_sanity_check_start(self, trainer, module):
            Fails().deeper()

    lambdas = pl.callbacks.LambdaCallback(on_sanity_check_start=lambda trainer, module: Fails().deeper())
    unnamed = ((callback, "on_sanity_check_start") for callback in (Static(), lambdas))
    for callback, hook in ((Fails(), "Fails.on_sanity_check_start"), (Decorated(), "on_sanity_check_start"), *unnamed):
        run = pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=[callback], max_steps=1,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        with pytest.raises(ValueError, match="here") as caught:
            run.fit(BoringModel())
        assert _compat.hook_of(caught.value) == hook
    assert _compat.hook_of(ValueError()) is None


def test_where_lightning_stops() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, max_time="00:00:01:00")
    fit_loop = trainer.fit_loop
    assert list(inspect.signature(fit_loop.epoch_loop._broadcast_sigterm_tensor).parameters) == []
    assert isinstance(type(fit_loop.epoch_loop)._is_training_done, property)
    for name in ("on_advance_start", "advance", "on_advance_end"):
        assert list(inspect.signature(getattr(fit_loop, name)).parameters) == []
    assert list(inspect.signature(trainer._signal_connector.register_signal_handlers).parameters) == []
    _compat.note_sigterm(trainer)
    assert trainer.received_sigterm is True
    for loop in (fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        assert callable(loop._evaluation_step)
        assert not hasattr(loop, "_predict_step")
    assert callable(trainer.predict_loop._predict_step)
    for loop in (fit_loop.epoch_loop.val_loop, trainer.predict_loop):
        assert callable(loop.run)
        assert list(inspect.signature(loop.setup_data).parameters) == []
        assert loop._combined_loader is None
    (timer,) = (callback for callback in trainer.callbacks if isinstance(callback, pl.callbacks.Timer))
    assert list(inspect.signature(timer._check_time_remaining).parameters) == ["trainer"]
    assert _compat.hpc_checkpoint_path(trainer).endswith("hpc_ckpt_1.ckpt")


def test_a_validation_that_is_left_counts_as_begun() -> None:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.batch_progress.increment_by(3)
    _compat.interrupt_validation(trainer)
    loop.restarting = True
    loop.update_restart_stage()
    assert loop.restarted_mid_evaluation
    _compat.forget_interrupted_validation(trainer)
    loop.update_restart_stage()
    assert not loop.restarted_mid_evaluation


def test_classes_put_on_an_object_are_taken_back_in_any_order() -> None:
    class Plain:
        def answer(self) -> int:
            return 1

    for order in ((0, 1), (1, 0)):
        item = Plain()
        undo = [
            _compat._specialise(item, answer=lambda self: 2),
            _compat._specialise(item, answer=lambda self: 3),
        ]
        assert item.answer() == 3
        undo[order[0]]()
        assert item.answer() == (3 if order[0] == 0 else 2)
        undo[order[1]]()
        assert type(item) is Plain


def test_what_wraps_a_checkpoint_io_and_saves_in_the_background() -> None:
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    io, inner = AsyncCheckpointIO(), TorchCheckpointIO()
    assert isinstance(io, _WrappingCheckpointIO)
    assert _compat.wraps_checkpoint_io(io)
    assert not _compat.wraps_checkpoint_io(inner)
    assert io.checkpoint_io is io._executor is io._error is None
    io.checkpoint_io = inner
    assert io.checkpoint_io is _compat.innermost_checkpoint_io(io) is inner

    class Changes(AsyncCheckpointIO):
        def load_checkpoint(self, *args: object, **kwargs: object) -> dict[str, object]:
            return {}

    changes = Changes(inner)
    assert _compat.innermost_checkpoint_io(changes) is changes

    class FailsOnce(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            if checkpoint:
                may_fail.wait()
                raise ValueError(path)

    assert not _compat.saves_in_background(inner)
    assert _compat.finish_saves(inner) is None
    saves, may_fail = AsyncCheckpointIO(FailsOnce()), threading.Event()
    for outer in (saves, _WrappingCheckpointIO(saves)):
        assert _compat.saves_in_background(outer)
        assert _compat.finish_saves(outer) is None
        may_fail.clear()
        saves.save_checkpoint({"a": 1}, "first")
        saves.save_checkpoint({}, "second")
        threading.Timer(0.05, may_fail.set).start()
        assert str(_compat.finish_saves(outer)) == "first"
        assert saves._error is None
        saves.teardown()


class Watching:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def issued(self, operation: str, num_bytes: int, stack: list[tuple[str, int, str]], *, is_on_host: bool) -> str:
        assert stack[0][0].endswith(("distributed_c10d.py", "test_compat.py"))
        self.told.append((operation, num_bytes, is_on_host))
        return operation

    def under_way(self, call: str, work: object, begun_s: float) -> None:
        self.told.append(call if work is None else "under way")

    def waited(self, work: object, begun_s: float) -> None:
        self.told.append("waited")


class Blind(Watching):
    def issued(self, operation: str, num_bytes: int, stack: Any, *, is_on_host: bool) -> str:
        raise RuntimeError("cannot see it")


@ranks(2)
def test_every_collective_that_python_issues_can_be_watched() -> None:
    ones, parts = torch.ones(6), [torch.ones(6) for _ in range(2)]
    own = {name: vars(dist.ProcessGroup).get(name) for name in _compat._COLLECTIVES}
    watching = Watching()
    undo = _compat.watch_collectives(watching)
    dist.all_reduce(ones)
    dist.all_gather(parts, ones)
    dist.broadcast(ones, 0)
    dist.all_gather_into_tensor(torch.ones(12), ones)
    dist.all_to_all_single(torch.ones(6), ones)
    dist.gather(ones, parts if dist.get_rank() == 0 else None)
    dist.scatter(ones, parts if dist.get_rank() == 0 else None)
    dist.barrier()
    dist._broadcast_coalesced(dist.group.WORLD, [ones], 100, 0)
    dist.all_reduce(torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], (1000,)))
    work = dist.all_reduce(ones, async_op=True)
    assert work is not None
    work.wait()
    undo()
    assert own == {name: vars(dist.ProcessGroup).get(name) for name in _compat._COLLECTIVES}
    dist.all_reduce(ones)
    operations = [told for told in watching.told if isinstance(told, tuple)]
    assert [name for name, *_ in operations] == [
        "all_reduce", "all_gather", "broadcast", "all_gather", "all_to_all", "gather", "scatter", "barrier",
        "broadcast", "all_reduce", "all_reduce",
    ]  # fmt: skip
    sizes = [24, 24, 24, 24, 24, 24, 48 if dist.get_rank() == 0 else 0, 0, 24, 8, 24]
    assert [num_bytes for _, num_bytes, *_ in operations] == sizes
    assert all(is_on_host for *_, is_on_host in operations)
    assert watching.told[-2:] == ["under way", "waited"]
    total = torch.ones(1)
    undo = _compat.watch_collectives(Blind())
    dist.all_reduce(total)
    undo()
    assert total == 2
    assert _compat.profiler_is_on() is False
    with torch.profiler.profile():
        assert _compat.profiler_is_on() is True
