"""LightningCLI reads the strategy and every callback: their arguments, their documentation, and their values."""

import inspect
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from docstring_parser import parse
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_plugin
from ddp_plugin import CustomDDPStrategy, NcclOptions
from tests.harness import ROOT, ranks

CALLBACKS = sorted(
    name
    for name in ddp_plugin.__all__
    if inspect.isclass(cls := getattr(ddp_plugin, name)) and issubclass(cls, pl.Callback)
)
PAGE = ROOT / "docs" / "how-to" / "lightning-cli.md"


class Model(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(5, 4)), self.batch_size)


def num_samples(batch: Any) -> int:
    return len(batch[0])


def settings_of_callbacks(folder: Path) -> dict[str, dict[str, Any]]:
    """Arguments of every callback, each with another value than its default where that can be trained with."""
    return {
        "AutoResume": {"folder": str(folder / "checkpoints")},
        "CommunicationMonitor": {"every_n_steps": 3, "trace_path": str(folder / "trace.json"), "num_traced_steps": 2},
        "ConvertSyncBatchNorm": {"num_ranks": 2},
        "DecisionSync": {"on_difference": "raise"},
        "ExactEvaluation": {},
        "GatherPredictions": {"destination": "all", "chunk_size": 8},
        "GlobalMeanLoss": {"weight": f"{__name__}.num_samples"},
        "GradientNoiseScale": {"every_n_steps": 3, "window_steps": 30, "batch_size": 2},
        "HangWatchdog": {"limit_s": 50.0, "on_hang": "raise", "report_file": None},
        "PerRankSeed": {"seed": 3},
        "ReplicaConsistency": {"every_n_steps": 2, "on_difference": "warn", "ignore": ["codebook.*"]},
        "SamplerEpoch": {"last_batch": "exact"},
        "ScaleLearningRate": {"base_batch_size": 2, "rule": "sqrt", "warmup_steps": 1, "schedule": "cosine"},
        "StragglerMonitor": {"every_n_steps": 10, "threshold_ratio": 0.5, "num_windows": 2, "num_late_windows": 1},
    }


def configuration(folder: Path) -> dict[str, Any]:
    strategy = {"bucket_cap_mb": 2.0, "static_graph": True, "timeout": "0:01:40", "comm_hook": {"name": "allreduce"}}
    return {
        "model": {"class_path": f"{__name__}.Model", "init_args": {"width": 6}},
        "data": {"class_path": f"{__name__}.Data", "init_args": {"batch_size": 3}},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
            "strategy": {"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": strategy},
            "callbacks": [
                {"class_path": f"ddp_plugin.{name}", "init_args": arguments}
                for name, arguments in settings_of_callbacks(folder).items()
            ],
        },
    }


def test_every_callback_has_a_place_here() -> None:
    assert list(settings_of_callbacks(Path())) == CALLBACKS
    for name, arguments in settings_of_callbacks(Path()).items():
        assert set(arguments) <= set(inspect.signature(getattr(ddp_plugin, name)).parameters)


@ranks(2, init=False)
def test_all_callbacks_train_from_one_file(tmp_path: Path) -> None:
    file = tmp_path / f"config-{os.environ['RANK']}.yaml"
    file.write_text(yaml.safe_dump(configuration(tmp_path)))
    sys.argv = ["train.py"]
    cli = LightningCLI(args=["fit", "--config", str(file)], save_config_callback=None, seed_everything_default=7)
    trainer = cli.trainer
    assert trainer.global_step == 3  # 16 samples in batches of 3 on each of two ranks, the last one not full
    assert isinstance(trainer.strategy, CustomDDPStrategy)
    assert trainer.strategy._timeout.total_seconds() == 100.0
    assert trainer.strategy._ddp_kwargs == {"bucket_cap_mb": 2.0, "static_graph": True}
    by_name = {type(callback).__name__: callback for callback in trainer.callbacks}
    assert set(CALLBACKS) <= set(by_name)
    for name, arguments in settings_of_callbacks(tmp_path).items():
        for key, value in arguments.items():
            held = {**vars(by_name[name]), **{k.lstrip("_"): v for k, v in vars(by_name[name]).items()}}
            assert key in held, f"{name} keeps {key} under another name"
            expected = {"weight": num_samples, "ignore": ("codebook.*",)}.get(key, value)
            assert held[key] == expected, f"{name}.{key}"


def parser() -> LightningArgumentParser:
    made = LightningArgumentParser()
    made.add_lightning_class_args(pl.Trainer, "trainer")
    return made


def help_of(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        parser().parse_args([f"--trainer.{kind}.help=ddp_plugin.{name}"])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["CustomDDPStrategy", *CALLBACKS])
def test_help_lists_every_argument_with_its_documentation(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    cls = getattr(ddp_plugin, name)
    kind = "strategy" if name == "CustomDDPStrategy" else "callbacks"
    text = help_of(kind, name, capsys)
    flat = " ".join(text.split())
    documented = {item.arg_name.lstrip("*"): item.description or "" for item in parse(inspect.getdoc(cls) or "").params}
    arguments = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    missing = [p.name for p in arguments if not re.search(rf"--[\w.]*\b{p.name}(?![\w])", text)]
    assert missing == []
    for argument in arguments:
        words = " ".join(documented[argument.name].split())[:50]
        assert words, f"{argument.name} is not documented"
        assert words in flat, f"{argument.name}: {words}"
    assert "required" not in text


def test_nothing_in_nccl_is_missing_from_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("strategy", "CustomDDPStrategy", capsys)
    assert "nccl" in text
    given = parser().parse_args(
        ["--trainer.strategy=ddp_plugin.CustomDDPStrategy", "--trainer.strategy.nccl.max_ctas=8"]
    )
    assert parser().instantiate_classes(given).trainer.strategy._nccl == NcclOptions(max_ctas=8)


def test_a_printed_configuration_is_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Printing(LightningCLI):
        def instantiate_classes(self) -> None:
            """Only what was parsed is looked at."""

    def parsed(file: Path, *more: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py"])
            settings: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": 7}
            cli = Printing(args=["--config", str(file), *more], **settings)
        return yaml.safe_load(cli.parser.dump(cli.config, skip_none=False))

    given, printed = tmp_path / "given.yaml", tmp_path / "printed.yaml"
    given.write_text(yaml.safe_dump(configuration(tmp_path)))
    with pytest.raises(SystemExit, match="0"):
        parsed(given, "--print_config")
    printed.write_text(capsys.readouterr().out)
    first, second = parsed(given), parsed(printed)
    assert first == second
    assert first["trainer"]["strategy"]["init_args"]["timeout"] == "0:01:40"
    assert [entry["class_path"] for entry in first["trainer"]["callbacks"]] == [f"ddp_plugin.{n}" for n in CALLBACKS]


def test_a_name_is_enough_for_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parser().parse_args(["--trainer.strategy=ddp_plugin_bf16", "--trainer.accelerator=cpu"])
    assert given.trainer.strategy == "ddp_plugin_bf16"


@ranks(2, init=False)
def test_the_page_s_program_trains_with_the_page_s_configuration(tmp_path: Path) -> None:
    folder = tmp_path / os.environ["RANK"]
    folder.mkdir()
    for kind, name in (("python", "train.py"), ("yaml", "config.yaml")):
        (block,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.S | re.M)
        (folder / name).write_text(block)
    os.chdir(folder)
    steps: list[tuple[int, str | None]] = []

    def note(trainer: pl.Trainer, model: pl.LightningModule) -> None:
        assert isinstance(trainer.strategy, CustomDDPStrategy)
        hook = trainer.strategy.comm_hook
        steps.append((trainer.global_step, None if hook is None else hook.name))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_plugin.ReplicaConsistency, "on_fit_end", lambda self, *arguments: note(*arguments))
        patch.setattr(sys, "argv", ["train.py", "fit", "--config", "config.yaml"])
        runpy.run_path("train.py", run_name="__main__")
    assert steps == [(64 // (4 * 2), "powersgd")]
