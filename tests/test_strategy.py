"""CustomDDPStrategy: construction, launchers, hooks, observers, loaders; numbers against one process and plain DDP."""

import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import ddp_plugin
from ddp_plugin import CustomDDPStrategy, NcclOptions, StrategyConfig
from ddp_plugin.hooks import HOOKS, Contents, attach
from tests.harness import ROOT, ranks, run_ranks, trainer


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def make_data(num_samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x[:, :3]))


class Regression(pl.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = make_net(seed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def fit(world_size: int, seed: int = 0, accumulate: int = 1, **strategy: Any) -> Tensor:
    """Trains one epoch in order: step k sees samples [4 k, 4 k + 4) whatever the number of ranks."""
    module = Regression(seed)
    run = trainer(strategy=CustomDDPStrategy(**strategy), accumulate_grad_batches=accumulate)
    # Lightning's sampler strides through a shuffled order; this is the plain one.
    sampler = torch.utils.data.DistributedSampler(make_data(), world_size, int(os.environ["RANK"]), shuffle=False)
    run.fit(module, DataLoader(make_data(), batch_size=4 // world_size, sampler=sampler))
    return flat(module)


def one_process(num_accumulated: int = 1) -> Tensor:
    net, optimizer_steps = make_net(), 6 // num_accumulated
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data().tensors
    for step in range(optimizer_steps):
        optimizer.zero_grad()
        for micro in range(num_accumulated):
            first = 4 * (step * num_accumulated + micro)
            loss = nn.functional.mse_loss(net(x[first : first + 4]), y[first : first + 4]) / num_accumulated
            loss.backward()
        optimizer.step()
    return flat(net)


# --------------------------------------------------------------------------------------------------------- the numbers


@ranks(1, 2, 4, init=False)
def test_training_equals_one_process(world_size: int) -> None:
    assert torch.allclose(fit(world_size), one_process(), rtol=0, atol=1e-12)


@ranks(2, init=False)
@pytest.mark.parametrize("settings", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_accumulation_equals_one_process_also_with_a_static_graph(settings: dict[str, Any]) -> None:
    assert torch.allclose(fit(2, accumulate=3, **settings), one_process(3), rtol=0, atol=1e-12)


@ranks(2, init=False)
def test_a_second_fit_with_a_static_graph_and_accumulation() -> None:
    run = trainer(strategy=CustomDDPStrategy(static_graph=True), accumulate_grad_batches=3)
    sampler = torch.utils.data.DistributedSampler(make_data(), 2, int(os.environ["RANK"]), shuffle=False)
    for _ in range(2):
        module = Regression()
        run.fit(module, DataLoader(make_data(), batch_size=2, sampler=sampler))
        assert torch.allclose(flat(module), one_process(3), rtol=0, atol=1e-12)
        run.fit_loop.epoch_progress.reset()
        run.fit_loop.epoch_loop.batch_progress.reset()


@ranks(2, init=False)
def test_lightnings_static_graph_with_accumulation_fails() -> None:
    run = trainer(strategy=DDPStrategy(static_graph=True), accumulate_grad_batches=3)
    with pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
        run.fit(Regression(), DataLoader(make_data(), batch_size=2))


@ranks(2, 3, init=False)
def test_unequal_initial_weights_end_equal(world_size: int) -> None:
    module = Regression(seed=int(os.environ["RANK"]))
    trainer().fit(module, DataLoader(make_data(), batch_size=2))
    parts = [torch.empty_like(flat(module)) for _ in range(world_size)]
    dist.all_gather(parts, flat(module))
    assert all(torch.equal(part, parts[0]) for part in parts)


@ranks(2, init=False)
@pytest.mark.parametrize("hook", ["allreduce", "fp16", "bf16"])
def test_a_hook_is_within_its_own_bound(hook: str) -> None:
    plain, hooked = fit(2), fit(2, comm_hook=hook)
    if hook == "allreduce":
        assert torch.equal(plain, hooked)
    else:
        bound = HOOKS[hook]().error_bound(torch.ones(2, 1), Contents(("w",), ((1,),), torch.float32)).item()
        assert 0 < (plain - hooked).abs().max() < bound * 6  # six steps of rate 0.1, gradients below one


@ranks(2, init=False)
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
def test_lightnings_own_hook_arguments_work_on_cpu(hook: Callable[..., Any]) -> None:
    calls = []

    def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        return hook(state, bucket)

    hooked = fit(2, ddp_comm_hook=counting, ddp_comm_state=None)
    assert len(calls) >= 6
    assert torch.allclose(hooked, fit(2), atol=1e-2)


@ranks(2, init=False)
def test_torchs_bf16_hook_and_a_wrapper_work_on_cpu() -> None:
    plain = fit(2)
    assert 0 < (plain - fit(2, ddp_comm_hook=default_hooks.bf16_compress_hook)).abs().max() < 1e-2
    wrapped = fit(2, ddp_comm_hook=default_hooks.allreduce_hook, ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)
    assert 0 < (plain - wrapped).abs().max() < 1e-2


@ranks(2, init=False)
def test_lightnings_ddpstrategy_ignores_a_hook_on_cpu() -> None:
    def failing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise AssertionError("never called")

    run = trainer(strategy=DDPStrategy(ddp_comm_hook=failing))
    run.fit(Regression(), DataLoader(make_data(), batch_size=2))


# ------------------------------------------------------------------------------------------------ hooks and observers


class Watches:
    def __init__(self) -> None:
        self.before: list[tuple[int, Tensor, int]] = []
        self.after: list[tuple[int, Tensor, int]] = []

    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.before.append((bucket_index, gradient.clone(), len(parameters)))

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.after.append((bucket_index, gradient.clone(), len(parameters)))


def _registered_hooks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    registered: list[Any] = []
    original = DistributedDataParallel.register_comm_hook

    def register(self: Any, state: object, hook: Callable[..., Any]) -> None:
        registered.append(hook)
        original(self, state, hook)

    monkeypatch.setattr(DistributedDataParallel, "register_comm_hook", register)
    return registered


@ranks(2, init=False)
def test_nothing_is_registered_unless_asked_for() -> None:
    with pytest.MonkeyPatch.context() as patch:
        registered = _registered_hooks(patch)
        fit(2)
        assert registered == []
        fit(2, comm_hook="allreduce")
        assert len(registered) == 1


@ranks(2, init=False)
@pytest.mark.parametrize("hook", [None, "bf16"])
@pytest.mark.parametrize("late", [False, True])
def test_an_observer_sees_each_bucket_before_and_after(hook: str | None, late: bool) -> None:
    watches, strategy = Watches(), CustomDDPStrategy(comm_hook=hook)

    class Adds(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if late:
                strategy.add_bucket_observer(watches)

    if not late:
        strategy.add_bucket_observer(watches)
        strategy.add_bucket_observer(watches)
    module = Regression()
    trainer(strategy=strategy, callbacks=[Adds()]).fit(module, DataLoader(make_data(), batch_size=4))
    assert len(watches.before) == len(watches.after) == 3
    assert all(count == 4 for _, _, count in watches.before)
    for (index, local, _), (same_index, mean, _) in zip(watches.before, watches.after, strict=True):
        parts = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(parts, local)
        assert index == same_index
        assert torch.allclose(sum(parts) / 2, mean, atol=1e-12 if hook is None else 1e-2)  # type: ignore[arg-type]
        assert not torch.equal(parts[0], parts[1])


@ranks(2)
def test_fp16_scales_before_it_casts() -> None:
    net = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(net)
    attach("fp16", model)
    model(torch.full((1, 1), 1e5 if dist.get_rank() == 0 else 0.0)).sum().backward()
    assert net.weight.grad is not None
    assert net.weight.grad.item() == pytest.approx(5e4, rel=1e-3)  # cast first, it would be inf


def test_bytes_on_the_wire() -> None:
    for world_size, num_elements in ((1, 1000), (2, 1000), (4, 1000), (3, 7)):
        # A ring sends each of its n chunks n - 1 times to reduce and n - 1 times to spread the result.
        by_hand = -(-2 * (world_size - 1) * num_elements * 4 // world_size)
        single = Contents(("weight",), ((num_elements,),), torch.float32)
        double = Contents(("weight",), ((num_elements,),), torch.float64)
        assert HOOKS["allreduce"]().wire_bytes(single, world_size, 0) == by_hand
        half = HOOKS["bf16"]().wire_bytes(single, world_size, 0)
        assert half == HOOKS["fp16"]().wire_bytes(double, world_size, 0) == -(-by_hand // 2)


# ------------------------------------------------------------------------------------------------------- construction


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"comm_hook": "bf17"}, "comm_hook to be one of"),
        ({"comm_hook": {"name": "bf16", "ranks": 3}}, "options that comm_hook='bf16' has"),
        ({"comm_hook": "bf16", "ddp_comm_hook": print}, "comm_hook or Lightning's ddp_comm_"),
        ({"ddp_comm_state": 3}, "ddp_comm_hook beside its state"),
        ({"static_graph": True, "find_unused_parameters": True}, "static_graph=True alone"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb above 0 MiB and finite"),
        ({"bucket_cap_mb": 25, "bucket_cap_mb_list": [1, 2]}, "bucket_cap_mb or bucket_cap_mb_list"),
        ({"broadcast_buffers": True, "forward_sync_buffers": True}, "broadcast_buffers or forward_sync_buffers"),
        ({"nccl": NcclOptions(max_ctas=8), "process_group_backend": "gloo"}, "process_group_backend='nccl' beside"),
        ({"timeout": timedelta(0)}, "a timeout above zero"),
        ({"start_method": "thread"}, "start_method to be one of"),
        ({"comm_hook": "fp16", "mixed_precision": object()}, "mixed_precision or a communication hook"),
        ({"model_averaging_period": 4}, "PostLocalSGDState"),
    ],
)
def test_contradictions_raise_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CustomDDPStrategy(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket_cap": 3}, "Did you mean 'bucket_cap_mb'"),
        ({"com_hook": "bf16"}, "Did you mean 'comm_hook'"),
        ({"comm_hook": print}, "ddp_comm_hook="),
    ],
)
def test_unknown_things_raise_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CustomDDPStrategy(**settings)


def test_the_nccl_options_check_themselves() -> None:
    with pytest.raises(ValueError, match="min_ctas to be at least 1"):
        NcclOptions(min_ctas=0)
    with pytest.raises(ValueError, match="min_ctas=8 and max_ctas=4"):
        NcclOptions(min_ctas=8, max_ctas=4)


@ranks(1, init=False)
def test_nccl_options_are_refused_where_the_backend_is_gloo() -> None:
    run = trainer(strategy=CustomDDPStrategy(nccl=NcclOptions(high_priority_stream=True)))
    with pytest.raises(ValueError, match="Got backend 'gloo' for cpu devices"):
        run.fit(Regression(), DataLoader(make_data()))


def test_what_ddp_is_given_is_what_was_given() -> None:
    assert CustomDDPStrategy()._ddp_kwargs == {}
    given = CustomDDPStrategy(find_unused_parameters=False, bucket_cap_mb=7, dim=0)._ddp_kwargs
    assert given == {"find_unused_parameters": False, "bucket_cap_mb": 7, "dim": 0}


def test_every_keyword_of_lightning_and_torch_is_accepted() -> None:
    import inspect

    ours = set(inspect.signature(CustomDDPStrategy).parameters) - {"ddp_kwargs"}
    lightning = set(inspect.signature(DDPStrategy).parameters) - {"kwargs"}
    assert lightning <= ours
    for name, parameter in inspect.signature(DistributedDataParallel).parameters.items():
        if name not in ("module", "device_ids") and name not in ours and parameter.default is not None:
            CustomDDPStrategy(**{name: parameter.default})
    assert {"bucket_cap_mb", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"} <= ours


def test_the_strategy_pickles_before_it_starts() -> None:
    strategy = CustomDDPStrategy(comm_hook="bf16", nccl=NcclOptions(max_ctas=4), start_method="spawn")
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.comm_hook.name == "bf16"


@pytest.mark.parametrize("form", [dict, OmegaConf.create, lambda values: StrategyConfig(**values)])
def test_from_config(form: Callable[[dict[str, Any]], Any]) -> None:
    values = {"comm_hook": "fp16", "bucket_cap_mb": 10, "timeout_s": 90.0, "start_method": "fork"}
    strategy = CustomDDPStrategy.from_config(form(values))
    assert strategy.comm_hook is not None
    assert strategy.comm_hook.name == "fp16"
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 10}
    assert strategy._timeout == timedelta(seconds=90)


def test_from_config_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="fields of StrategyConfig"):
        CustomDDPStrategy.from_config({"bucket_cap": 3})
    with pytest.raises(ValueError, match="fields of StrategyConfig"):
        CustomDDPStrategy.from_config({"bucket_cap_mb": "large"})
    with pytest.raises(TypeError, match="a StrategyConfig, a dict"):
        CustomDDPStrategy.from_config("bf16")  # type: ignore[arg-type]
    nested = CustomDDPStrategy.from_config({"nccl": {"max_ctas": 8}})
    assert nested._nccl == NcclOptions(max_ctas=8)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 0.0, -1.0])
def test_from_config_refuses_a_timeout_that_is_none(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s above zero and finite"):
        CustomDDPStrategy.from_config({"timeout_s": timeout_s})


@pytest.mark.parametrize("cap_mb", [float("nan"), float("inf"), -1])
def test_a_bucket_that_is_no_size_is_refused(cap_mb: float) -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb above 0 MiB and finite"):
        CustomDDPStrategy(bucket_cap_mb=cap_mb)


def test_the_config_has_every_plain_setting() -> None:
    from dataclasses import fields

    names = {field.name for field in fields(StrategyConfig)} - {"timeout_s"} | {"timeout"}
    import inspect

    made_by_the_trainer = {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
    }
    objects = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "ddp_kwargs"}
    assert names == set(inspect.signature(CustomDDPStrategy).parameters) - made_by_the_trainer - objects


@pytest.mark.filterwarnings("ignore")  # Lightning's CLI uses what jsonargparse deprecates
def test_lightning_cli_reads_the_constructors_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    arguments = {
        "strategy": "ddp_plugin.CustomDDPStrategy",
        "strategy.comm_hook": "bf16",
        "strategy.timeout": "0:10:00",
        "strategy.nccl.max_ctas": "8",
        "accelerator": "cpu",
        "logger": "false",
        "enable_checkpointing": "false",
    }
    names = ["DecisionSync", "ExactEvaluation", "GatherPredictions", "GlobalMeanLoss", "GradientNoiseScale"]
    names += ["PerRankSeed", "ReplicaConsistency", "SamplerEpoch", "ScaleLearningRate"]
    names.append("ConvertSyncBatchNorm")
    monkeypatch.setattr(sys, "argv", ["program"])
    cli = LightningCLI(
        BoringModel,
        run=False,
        seed_everything_default=False,
        save_config_callback=None,
        args=[f"--trainer.{key}={value}" for key, value in arguments.items()]
        + [f"--trainer.callbacks+=ddp_plugin.{name}" for name in names],
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, CustomDDPStrategy)
    assert strategy.comm_hook is not None
    assert (strategy.comm_hook.name, strategy._timeout) == ("bf16", timedelta(minutes=10))
    assert strategy._nccl == NcclOptions(max_ctas=8)
    assert strategy._ddp_kwargs == {}
    assert set(names) <= {type(callback).__name__ for callback in cli.trainer.callbacks}


# ------------------------------------------------------------------------------------------------------ registration


def test_names_are_registered_on_import() -> None:
    names = [name for name in StrategyRegistry.available_strategies() if name.startswith("ddp_plugin")]
    assert {"ddp_plugin", "ddp_plugin_spawn", "ddp_plugin_fork", "ddp_plugin_static"} <= set(names)
    for name in names:
        assert type(StrategyRegistry.get(name)) is CustomDDPStrategy
    assert type(StrategyRegistry.get("ddp")) is DDPStrategy
    ddp_plugin.strategy.register_strategies()  # again: no complaint, nothing replaced


def test_importing_changes_nothing_else_in_the_process() -> None:
    program = """
        import logging, os, signal, sys, warnings
        import lightning.pytorch, torchmetrics, omegaconf
        def state():
            handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
            return dict(os.environ), handlers, list(warnings.filters), logging.root.level, list(logging.root.handlers)
        before = state()
        import ddp_plugin
        assert state() == before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, cwd=ROOT)


def test_pytorch_lightning_alone_is_refused() -> None:
    program = "import sys, types; sys.modules['pytorch_lightning'] = types.ModuleType('x'); import ddp_plugin"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert "another class tree" in done.stderr


# --------------------------------------------------------------------------------------------------------- launchers

SCRIPT = """
    import sys
    import torch
    import lightning.pytorch as pl
    import ddp_plugin
    from torch.utils.data import DataLoader
    from tests.test_strategy import Regression, make_data, flat

    if __name__ == "__main__":
        strategy, devices = sys.argv[1], int(sys.argv[2])
        if strategy == "object":
            strategy = ddp_plugin.CustomDDPStrategy()
        module = Regression()
        run = pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        run.fit(module, DataLoader(make_data(), batch_size=2))
        if run.global_rank == 0:
            print("TRAINED", run.world_size, run.global_step, float(flat(module).sum()), flush=True)
"""


def _launch(tmp_path: Path, *command: str) -> list[str]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = [part if part != "SCRIPT" else str(script) for part in command]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line.split() for line in done.stdout.splitlines() if line.startswith("TRAINED"))


@pytest.mark.long
def test_every_launcher_trains_the_same(tmp_path: Path) -> None:
    popen = _launch(tmp_path, "SCRIPT", "object", "2")
    assert popen[:3] == ["TRAINED", "2", "6"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert _launch(tmp_path, *torchrun, "SCRIPT", "object", "2") == popen
    for name in ("ddp_plugin_spawn", "ddp_plugin_fork"):  # the launching process gets the weights, not the step count
        assert float(_launch(tmp_path, "SCRIPT", name, "2")[3]) == pytest.approx(float(popen[3]), abs=1e-12)


def test_one_device(tmp_path: Path) -> None:
    assert _launch(tmp_path, "SCRIPT", "ddp_plugin", "1")[:3] == ["TRAINED", "1", "12"]


# ---------------------------------------------------------------------------------------- process group and reductions


@ranks(2, init=False)
def test_the_control_group_is_gloo_and_beside_the_gradients_group() -> None:
    strategy = CustomDDPStrategy()
    trainer(strategy=strategy).fit(Regression(), DataLoader(make_data(), batch_size=4))
    group = strategy.control_group
    assert group is strategy.control_group
    assert group is not dist.group.WORLD
    assert dist.get_backend(group) == "gloo"
    assert group.size() == 2


@ranks(2)
def test_settings_that_came_too_late_are_named() -> None:
    strategy = CustomDDPStrategy(timeout=timedelta(seconds=77))
    run = trainer(strategy=strategy)
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match=r"timeout 0:01:17 was asked for, 0:02:00 is in force"):
            run.fit(Regression(), DataLoader(make_data(), batch_size=4))
    else:
        run.fit(Regression(), DataLoader(make_data(), batch_size=4))


@ranks(2, init=False)
def test_the_timeout_asked_for_is_in_force() -> None:
    from ddp_plugin import _compat

    run = trainer(strategy=CustomDDPStrategy(timeout=timedelta(seconds=77)))
    run.fit(Regression(), DataLoader(make_data(), batch_size=4))
    assert _compat.default_group_timeout() == timedelta(seconds=77)


@ranks(2, 3, init=False)
def test_a_mean_of_integers_is_not_floored(world_size: int) -> None:
    strategy = CustomDDPStrategy()
    trainer(strategy=strategy).fit(Regression(), DataLoader(make_data(), batch_size=4))
    rank = dist.get_rank()
    mean = strategy.reduce(torch.tensor(rank + 2), reduce_op="mean")
    assert mean.item() == pytest.approx(sum(r + 2 for r in range(world_size)) / world_size, abs=1e-15)
    assert strategy.reduce(torch.tensor(rank + 2), reduce_op="sum").item() == sum(r + 2 for r in range(world_size))
    assert strategy.reduce("text") == "text"


def _exit_code_program(index: int) -> str:
    return f"""
        import torch.distributed as dist
        from ddp_plugin.process_group import destroy_at_exit
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        destroy_at_exit(); destroy_at_exit()
        import atexit
        atexit.register(lambda: print("before", dist.is_initialized(), {index}))
    """


def test_the_process_group_is_destroyed_at_exit() -> None:
    code = textwrap.dedent(_exit_code_program(1)).replace(
        "destroy_at_exit(); destroy_at_exit()",
        "import atexit; atexit.register(lambda: print('after', dist.is_initialized())); destroy_at_exit()",
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["before", "True", "1", "after", "False"]


# ------------------------------------------------------------------------------------------------------------ loaders


@ranks(2, init=False)
def test_transforms_see_every_loader_of_every_stage_once_and_in_order() -> None:
    seen: list[tuple[str, str]] = []

    def first(loader: object, stage: Any) -> object:
        seen.append(("first", stage.value))
        return loader

    def second(loader: object, stage: Any) -> object:
        seen.append(("second", stage.value))
        return loader

    class Evaluates(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    strategy = CustomDDPStrategy()
    for transform in (first, second, first):
        strategy.add_dataloader_transform(transform)
    loader = DataLoader(make_data(), batch_size=4)
    run = trainer(strategy=strategy, num_sanity_val_steps=1)
    run.fit(Evaluates(), loader, loader)
    assert seen == [("first", "sanity_check"), ("second", "sanity_check"), ("first", "train"), ("second", "train")]


def _global_step() -> int:
    run = trainer()
    run.fit(Regression(), DataLoader(make_data(), batch_size=4))
    return int(run.global_step)


def test_more_ranks_take_fewer_steps() -> None:
    assert run_ranks(_global_step, 1, init=False) == [6]
    assert run_ranks(_global_step, 3, init=False) == [2, 2, 2]


# ------------------------------------------------------------------------------------------------------------- LBFGS


class Quadratic(pl.LightningModule):
    """A loss whose line search ends elsewhere on each rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return ((batch[0] @ self.weight - 3).square() + self.weight.square().square().sum()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), line_search_fn="strong_wolfe", tolerance_change=1e-3)


@ranks(1, 2, 3, init=False)
def test_lbfgs_searches_along_the_line_of_all_ranks(world_size: int) -> None:
    rank = int(os.environ["RANK"])
    data = torch.randn(6 * 3, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = Quadratic()
    own = TensorDataset(data[rank::world_size])
    trainer(use_distributed_sampler=False, max_epochs=2).fit(module, DataLoader(own, batch_size=len(own)))
    plain = Quadratic()
    optimizer = plain.configure_optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = plain.training_step([data], 0)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    torch.testing.assert_close(module.weight, plain.weight, rtol=1e-9, atol=1e-9)
