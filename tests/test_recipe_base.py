"""What both recipes stand on: settings, plan, parameter groups, throughput."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import throughput as throughput_module
import torch
from omegaconf import DictConfig, OmegaConf
from optimizer import decay_groups, make_adamw, make_sgd
from plan import (
    Plan,
    activation_bytes,
    compute_dtype,
    count_parameters,
    effective_batch,
    memory_bytes,
    num_processes,
    process_layout,
    resolve_precision,
    stored_dtype,
)
from progress import StepBar
from run import checkpoint_to_load, describe_output, trainer_options, tuning_options
from settings import SettingsError, check_limits, load_settings
from throughput import Throughput, measured_peak_flops_per_s, num_samples, peak_memory_bytes
from torch import nn

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.learning_rate import EffectiveBatch
from tests.harness import ROOT

# --------------------------------------------------------------------------------------------------------- settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(
        "name: toy\nrate: 1.0e-3\nnum: 3\nflag: false\nnothing: null\nlist: [1, 2]\n"
        "part:\n  depth: 4\n  inner:\n    width: 8\nstrategy:\n  static_graph: true\n"
    )
    (tmp_path / "toy_big.yaml").write_text("part:\n  depth: 40\nnum: 30\n")
    (tmp_path / "toy_wrong.yaml").write_text("part:\n  dept: 40\n")
    return tmp_path


def test_the_file_alone(folder: Path) -> None:
    settings = load_settings("toy", [], folder)
    assert (settings.name, settings.rate, settings.num, settings.flag) == ("toy", 1e-3, 3, False)
    assert settings.part.inner.width == 8
    assert settings.strategy.static_graph is True
    assert settings.strategy.timeout_s == 1800.0  # every field of StrategyConfig is there


def test_the_command_line_wins_over_the_variant_and_the_variant_over_the_file(folder: Path) -> None:
    settings = load_settings("toy", ["num=300", "config=big", "nothing=/some/path", "list=[3]"], folder)
    assert (settings.num, settings.part.depth, settings.part.inner.width) == (300, 40, 8)
    assert settings.nothing == "/some/path"
    assert list(settings.list) == [3]


def test_an_integer_fits_where_a_float_is_wanted(folder: Path) -> None:
    assert load_settings("toy", ["rate=1"], folder).rate == 1


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("part.dept=3", "Did you mean 'depth'?"),
        ("part.inner.widht=3", "Did you mean 'width'?"),
        ("nmae=x", "Did you mean 'name'?"),
        ("zzzz=1", "--help"),
        ("strategy.static_grap=true", "Did you mean 'static_graph'?"),
        ("strategy.nccl.max_cta=1", "max_cta"),
        ("strategy.static_graph=perhaps", "not a valid bool"),
        ("num=1.5", "a value like 3 (int)"),
        ("num=true", "a value like 3 (int)"),
        ("num=null", "a value like 3 (int)"),
        ("flag=1", "a value like False (bool)"),
        ("name=3", "a value like 'toy' (str)"),
        ("rate=fast", "a value like 0.001 (float)"),
        ("part=3", "a section"),
        ("list=3", "a value like [1, 2]"),
        ("--num=3", "Write num=3"),
        ("num", "Write num="),
        ("list=[1", "a YAML value for list"),
        ("config=bigg", "Did you mean 'big'?"),
        ("config=wrong", "Did you mean 'depth'?"),
    ],
)
def test_mistakes_are_refused_with_a_hint(folder: Path, argument: str, hint: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(hint)):
        load_settings("toy", [argument], folder)


def test_keys_that_do_not_exist_raise_on_access(folder: Path) -> None:
    with pytest.raises(Exception, match="not in struct"):
        _ = load_settings("toy", ["config=big"], folder).part.dept


def test_help_prints_every_key_and_leaves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        load_settings("toy", ["--help"], folder)
    assert leaving.value.code == 0
    printed = capsys.readouterr().out
    assert "width: 8" in printed
    assert "big, wrong" in printed


def test_the_strategy_section_builds_the_strategy(folder: Path) -> None:
    settings = load_settings("toy", ["strategy.comm_hook=bf16", "strategy.nccl.high_priority_stream=true"], folder)
    assert isinstance(settings, DictConfig)
    strategy = CustomDDPStrategy.from_config(settings.strategy)
    assert strategy.comm_hook is not None
    assert strategy.comm_hook.name == "bf16"


LIMITS = {"num": (1, math.inf), "rate": (0.0, 1.0), "nothing": (1, 9), "part.inner.width": (8, 8)}


def test_numbers_at_their_limits_pass(folder: Path) -> None:
    for arguments in ([], ["num=1", "rate=0"], ["rate=1.0", "nothing=9"], ["nothing=null"]):
        check_limits(load_settings("toy", arguments, folder), LIMITS)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("num=0", "Expected num to be at least 1. Got 0."),
        ("rate=-0.1", "Expected rate to be between 0.0 and 1.0. Got -0.1."),
        ("rate=.nan", "rate to be a number"),
        ("rate=.inf", "rate to be a number"),
        ("nothing=10", "nothing to be between 1 and 9"),
        ("nothing=1.5", "nothing to be an integer, between 1 and 9"),
        ("nothing=few", "nothing to be an integer, between 1 and 9. Got 'few'"),
        ("nothing=true", "nothing to be an integer, between 1 and 9. Got True"),
        ("part.inner.width=9", "part.inner.width to be between 8 and 8"),
    ],
)
def test_numbers_beyond_their_limits_are_refused(folder: Path, argument: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        check_limits(load_settings("toy", [argument], folder), LIMITS)


# ------------------------------------------------------------------------------------------------------------- plan


def _plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "name": "toy",
        "batch": EffectiveBatch(4, 8, 8),
        "learning_rate": 0.1,
        "num_steps": 10,
        "num_warmup_steps": 2,
        "num_parameters": 1000,
        "precision": "32-true",
        "memory": memory_bytes(1000, "32-true", "adamw"),
        "units_per_sample": 128,
        "unit": "tokens",
    }
    return Plan(**(values | changes))


def test_effective_batch_and_length() -> None:
    plan = _plan()
    assert (plan.batch.total, plan.units_per_step, plan.num_units) == (256, 32_768, 327_680)
    text = str(plan)
    for part in (
        "4 per process x 8 processes x 8 accumulated = 256 samples = 32,768 tokens",
        "0.1 at its peak",
        "1,000",
    ):
        assert part in text


def test_memory_by_hand() -> None:
    # AdamW in fp32: weight 4, gradient 4, bucket 4, two moments 8 bytes.
    assert sum(memory_bytes(1000, "32-true", "adamw").values()) == 20_000
    assert sum(memory_bytes(1000, "32-true", "adamw", gradient_as_bucket_view=True).values()) == 16_000
    assert sum(memory_bytes(1000, "32-true", "adamw", distributed=False).values()) == 16_000
    # bf16 autocast adds a copy of 2 bytes; SGD with momentum keeps 4 bytes instead of 8.
    assert sum(memory_bytes(1000, "bf16-mixed", "sgd_momentum", activations=7).values()) == 18_007
    assert sum(memory_bytes(1000, "bf16-true", "sgd").values()) == 6_000


def test_memory_is_what_torch_allocates() -> None:
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    optimizer = make_adamw(model, 1e-3, 0.1)
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name.startswith("exp_avg")]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    stored = sum(t.numel() * t.element_size() for t in tensors if t is not None)
    assert sum(memory_bytes(count_parameters(model), "32-true", "adamw", distributed=False).values()) == stored


def test_activations_of_a_model_worked_out_by_hand() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Sigmoid(), nn.Linear(16, 4, bias=False))
        inputs = torch.empty(5, 8)
    # The two linears keep their inputs (the second's is the sigmoid's output, which the sigmoid keeps too).
    assert activation_bytes(model, lambda: model(inputs).sum()) == 4 * (5 * 8 + 5 * 16)


def _batch(**changes: Any) -> EffectiveBatch:
    chosen = {
        "accelerator": "cpu",
        "devices": 2,
        "num_nodes": 3,
        "batch_size": 4,
        "accumulate": 1,
        "global_batch_size": None,
    }
    return effective_batch(OmegaConf.create({"trainer": chosen | changes}))


def test_accumulation_follows_from_the_global_batch() -> None:
    assert _batch(accumulate=5) == EffectiveBatch(4, 6, 5)
    assert _batch(global_batch_size=24) == EffectiveBatch(4, 6, 1)
    assert _batch(global_batch_size=96) == EffectiveBatch(4, 6, 4)
    with pytest.raises(ValueError, match=r"a multiple of 4 per process x 6 processes. Got 95. Choose 72 or 96"):
        _batch(global_batch_size=95)
    with pytest.raises(ValueError, match=r"trainer.accumulate=1 beside trainer.global_batch_size"):
        _batch(global_batch_size=96, accumulate=4)


def test_number_of_processes() -> None:
    assert num_processes("cpu", 2, 3) == 6
    assert num_processes("cpu", -1, 1) == 1
    for devices, nodes in ((0, 1), (2, 0), ("two", 1)):
        with pytest.raises(ValueError, match="at least 1"):
            num_processes("cpu", devices, nodes)


def test_minus_one_is_what_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_layout("cpu", -1, -1) == (1, 1)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    assert process_layout("cpu", -1, -1) == (3, 2)
    assert process_layout("cpu", 2, 1) == (2, 1)  # what was asked for stays, and is compared by the Trainer's options
    assert num_processes("cpu", -1, -1) == 6
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(ValueError, match=r"as many processes on each node.*Got 3 of 5 on this one"):
        process_layout("cpu", -1, -1)


def test_other_numbers_than_torchruns_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = load_settings("llm", [f"output_dir={tmp_path}", "trainer.devices=2"])
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "3", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=r"the 3 processes that torchrun has started.*trainer.devices=-1"):
        trainer_options(settings, _plan(), [])


def test_a_job_that_waits_to_go_on_is_not_continued_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lightning goes on from such a file, whatever the settings say."""
    settings = load_settings("llm", [f"output_dir={tmp_path}"])
    assert checkpoint_to_load(settings, {}, 9, "trainer.max_steps") is None
    (tmp_path / "hpc_ckpt_3.ckpt").touch()
    with pytest.raises(SettingsError, match=r"hpc_ckpt_3\.ckpt.*resume=auto to go on with it, or another output_dir"):
        checkpoint_to_load(settings, {}, 9, "trainer.max_steps")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # it is this job's own
    assert checkpoint_to_load(settings, {}, 9, "trainer.max_steps") is None
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    settings.resume = "auto"
    assert checkpoint_to_load(settings, {}, 9, "trainer.max_steps") is None


@pytest.mark.parametrize("recipe", ["llm", "resnet"])
def test_a_compiled_model_is_not_tuned_as_another_one(recipe: str) -> None:
    settings = load_settings(recipe, ["compile=true"])
    with pytest.raises(SettingsError, match="compile=false"):
        tuning_options(settings, _plan())


def test_the_plan_says_what_becomes_of_a_run_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        return describe_output(load_settings("llm", [f"output_dir={tmp_path}", *arguments]))[1]

    assert said() == str(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step=20.ckpt").touch()
    assert "moved aside" in said()
    assert "newest complete checkpoint" in said("resume=auto")
    assert "continued from here.ckpt" in said("resume=here.ckpt")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert "a restart by torchrun does not continue" in said()
    assert "restart" not in said("resume=auto")


def test_precision() -> None:
    assert resolve_precision("auto", "cpu") == "32-true"
    assert resolve_precision("bf16-mixed", "cpu") == "bf16-mixed"
    computed = {name: compute_dtype(name) for name in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")}
    assert list(computed.values()) == [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16, torch.float64]
    stored = {name: stored_dtype(name) for name in ("32-true", "bf16-mixed", "bf16-true", "64-true")}
    assert list(stored.values()) == [torch.float32, torch.float32, torch.bfloat16, torch.float64]
    with pytest.raises(ValueError, match=r"trainer\.precision to be one of"):
        resolve_precision("bf17", "cpu")
    with pytest.raises(ValueError, match="optimizer to be one of"):
        memory_bytes(1, "32-true", "adagrad")


# -------------------------------------------------------------------------------------------------------- optimizer


def test_what_decays() -> None:
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(5, 4),
            "conv": nn.Conv2d(3, 4, 3),
            "batch_norm": nn.BatchNorm2d(4),
            "layer_norm": nn.LayerNorm((4, 4)),  # its weight has two dimensions
            "rms_norm": nn.RMSNorm(4),
            "linear": nn.Linear(4, 5),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
        }
    )
    model["linear"].weight = model["embedding"].weight  # tied
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["name"]: group for group in decay_groups(model, 0.1)}
    assert {names[id(p)] for p in groups["decay"]["params"]} == {"embedding.weight", "conv.weight"}
    assert {names[id(p)] for p in groups["no_decay"]["params"]} == {
        "conv.bias",
        "batch_norm.weight",
        "batch_norm.bias",
        "layer_norm.weight",
        "layer_norm.bias",
        "rms_norm.weight",
        "linear.bias",
    }
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)


def test_decay_moves_only_the_decaying_group() -> None:
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = make_adamw(model, learning_rate=0.5, weight_decay=0.1)
    (model(torch.ones(1, 3)) * 0).sum().backward()  # zero gradients: decay alone is at work
    optimizer.step()
    torch.testing.assert_close(model.weight, torch.full((3, 3), 1 - 0.5 * 0.1))
    torch.testing.assert_close(model.bias, torch.ones(3), rtol=0, atol=0)


def test_sgd_has_the_settings_asked_for() -> None:
    optimizer = make_sgd(nn.Linear(2, 2), learning_rate=0.3, weight_decay=0.01, momentum=0.8)
    assert [(g["lr"], g["momentum"], g["nesterov"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.3, 0.8, True, 0.01),
        (0.3, 0.8, True, 0.0),
    ]


# ------------------------------------------------------------------------------------------------------- throughput


class _Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_throughput_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Time()
    monkeypatch.setattr(throughput_module, "time", clock)
    logged: dict[str, float] = {}
    trainer: Any = SimpleNamespace(world_size=2, precision="32-true", global_step=0, max_steps=7, log_every_n_steps=2)
    module: Any = SimpleNamespace(
        device=torch.device("cpu"), log=lambda name, value, **_: logged.update({name: float(value)})
    )
    meter = Throughput(10, "tokens", flops_per_unit=6.0, peak_flops_per_s=480.0, num_skipped=2)
    meter.on_train_start(trainer, module)
    assert meter.report() is None
    for step in range(1, 8):
        clock.now_s += 100.0 if step <= 3 else 0.5  # the first three are slow and not measured
        trainer.global_step = step
        meter.on_train_batch_end(trainer, module, None, {"tokens": torch.zeros(4, 3)}, step - 1)
        if step == 5:
            meter.on_validation_start(trainer, module)
            clock.now_s += 1000.0
            meter.on_validation_end(trainer, module)
    # 4 samples of 10 tokens in half a second on each of two processes.
    report = meter.report()
    assert report is not None
    assert report.units_per_s == pytest.approx(160.0, rel=1e-12)
    assert report.model_flops_per_s == pytest.approx(960.0, rel=1e-12)
    assert report.utilisation_ratio == pytest.approx(1.0, rel=1e-12)
    assert report.step_s == pytest.approx(0.5, rel=1e-12)
    assert not report.is_peak_measured
    assert logged["tokens_per_s"] == pytest.approx(160.0, rel=1e-12)
    assert logged["model_flop_utilisation"] == pytest.approx(1.0, rel=1e-12)
    assert "160 tokens/s" in str(report)


def test_only_a_step_that_is_logged_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited_at = _Time(), []
    monkeypatch.setattr(throughput_module, "time", clock)
    trainer: Any = SimpleNamespace(world_size=1, precision="32-true", global_step=0, max_steps=-1, log_every_n_steps=3)
    module: Any = SimpleNamespace(device=torch.device("cpu"), log=lambda *_, **__: None)
    meter = Throughput(peak_flops_per_s=1.0, num_skipped=0)
    meter.on_train_start(trainer, module)
    for micro in range(1, 29):  # seven steps of four micro-batches
        monkeypatch.setattr(throughput_module, "_wait_for", lambda _, micro=micro: waited_at.append(micro))
        clock.now_s += 2.0
        trainer.global_step = micro // 4
        meter.on_train_batch_end(trainer, module, None, torch.zeros(5), micro - 1)
    assert waited_at == [1, 12, 24]  # the start of the clock, and the ends of steps three and six
    report = meter.report()
    assert report is not None
    assert report.units_per_s == pytest.approx(5 / 2.0, rel=1e-12)


def test_memory_is_that_of_the_device_that_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Time()
    monkeypatch.setattr(throughput_module, "time", clock)
    monkeypatch.setattr(throughput_module, "_wait_for", lambda _: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**20)
    trainer: Any = SimpleNamespace(world_size=1, precision="32-true", global_step=0, max_steps=2, log_every_n_steps=1)
    module: Any = SimpleNamespace(device=torch.device("cuda", 0), log=lambda *_, **__: None)
    meter = Throughput(peak_flops_per_s=1.0, num_skipped=0)
    meter.on_train_start(trainer, module)
    for step in (1, 2):
        clock.now_s += 1.0
        trainer.global_step = step
        meter.on_train_batch_end(trainer, module, None, torch.zeros(1), step - 1)
    module.device = torch.device("cpu")  # as after a fit
    report = meter.report()
    assert report is not None
    assert report.peak_memory_bytes == 3 * 2**20
    assert str(report).endswith("peak memory 3 MiB")


def test_a_missing_peak_is_measured_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []
    monkeypatch.setattr(throughput_module, "measured_peak_flops_per_s", lambda _, dtype: asked.append(dtype) or 1.0)
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    for precision in ("32-true", "bf16-mixed", "16-mixed", "64-true"):
        trainer: Any = SimpleNamespace(world_size=1, precision=precision, global_step=0)
        Throughput().on_train_start(trainer, module)
    assert asked == [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def test_the_size_of_a_batch() -> None:
    assert num_samples((torch.zeros(3, 2), torch.zeros(3))) == 3
    assert num_samples({"name": "x", "image": [torch.zeros(5)]}) == 5
    assert num_samples("nothing") == 0


def test_measured_peak_and_memory_are_plausible() -> None:
    peak = measured_peak_flops_per_s(num_repeats=2)
    assert 1e8 < peak < 1e15
    assert 2**24 < peak_memory_bytes(torch.device("cpu")) < 2**45


@pytest.mark.parametrize("wrong", [{"units_per_sample": 0}, {"num_skipped": -1}, {"peak_flops_per_s": 0.0}])
def test_throughput_refuses_numbers_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Correct the number"):
        Throughput(**wrong)


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    held = torch.ones(math.ceil(before / 4) + 2**24)
    assert peak_memory_bytes(torch.device("cpu")) >= before + 2**25
    del held


# -------------------------------------------------------------------------------------------------- what is printed


def _train(bar: StepBar, num_steps: int) -> None:
    trainer: Any = SimpleNamespace(global_step=0, progress_bar_metrics={}, state=SimpleNamespace(fn="fit"))
    module: Any = None
    bar.on_train_start(trainer, module)
    for step in range(1, num_steps + 1):
        for _ in range(2):  # the second micro-batch finishes the step
            bar.on_train_batch_end(trainer, module, None, None, 0)
            trainer.global_step = step
        trainer.progress_bar_metrics = {"loss": 1 / step, "tokens_per_s": 1234.5}
        bar.on_train_batch_end(trainer, module, None, None, 0)
    bar.on_validation_start(trainer, module)
    trainer.progress_bar_metrics["val"] = 0.5
    bar.on_validation_end(trainer, module)
    bar.on_train_end(trainer, module)


def test_progress_in_a_file_is_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _train(StepBar(1000, refresh_every=10, num_lines=4), 1000)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"step {step}/1,000" for step in ("250", "500", "750", "1,000")),
        "step 1,000/1,000",
    ]
    assert lines[-1] == "step 1,000/1,000: loss 0.001, tokens_per_s 1,234, val 0.5"


def test_progress_in_a_terminal_is_one_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _train(StepBar(40, refresh_every=10), 40)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert "| 40/40 [" in printed.splitlines()[-1]
    assert printed.rstrip().endswith(
        "val 0.5, loss 0.025, tokens_per_s 1,234"
    )  # the validation first: it is never cut off


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    bar = StepBar(10)
    bar.disable()
    _train(bar, 10)
    assert capsys.readouterr().out == ""


SPEAKS = """
import logging, sys, warnings
from run import run
from settings import SettingsError

def main(arguments):
    warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use something else", FutureWarning)
    warnings.warn("Checkpoint directory /some/where exists and is not empty.")
    warnings.warn("The 'val_dataloader' does not have many workers which may be a bottleneck.")
    warnings.warn("the disk is nearly full")
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.info("\N{ELECTRIC LIGHT BULB} Tip: try our product")
    log.info("TPU available: False, using: 0 TPU cores")
    log.info("GPU available: True, used: False")
    raise SettingsError("Expected that. Got this.")

run(main)
"""


def test_libraries_are_heard_where_they_speak_of_the_run(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'recipes'}", "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, "-c", SPEAKS], capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path
    )
    assert (finished.returncode, finished.stdout) == (1, "")
    spoken = [line for line in finished.stderr.splitlines() if not line.startswith(" ")]
    assert len(spoken) == 3, finished.stderr
    assert spoken[0].endswith("UserWarning: the disk is nearly full")
    assert spoken[1:] == ["GPU available: True, used: False", "error: Expected that. Got this."]
