"""``ddp-plugin tune``: what it measures, what it writes, and that its readers read it."""

import contextlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.trainer.states import RunningStage
from settings import CONF, load_settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import ddp_plugin.tuning.trials as trials
import ddp_plugin.tuning.tuner as tuner
from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, NcclOptions, StrategyConfig, Tuning, tune
from ddp_plugin.cli import main
from ddp_plugin.tuning.choice import Candidate
from ddp_plugin.tuning.layouts import LAYOUTS
from ddp_plugin.tuning.sources import from_classes, from_lightning_config, strategy_settings
from ddp_plugin.tuning.trials import StepClock, with_workers
from tests.harness import ranks, trainer

PAUSE_S = 0.01  # of a slow sample


class Model(pl.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.net = nn.Linear(4, width)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples(Dataset[Any]):
    """Slow in the rank's own process, or in its workers; waiting keeps no core busy."""

    def __init__(self, slow_in_workers: bool) -> None:
        self.slow_in_workers = slow_in_workers

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        if (get_worker_info() is not None) == self.slow_in_workers:
            time.sleep(PAUSE_S)
        return (torch.ones(4),)


class Data(pl.LightningDataModule):
    """Slow without workers."""

    def __init__(self, num_workers: int = 0, slow_in_workers: bool = False) -> None:
        super().__init__()
        self.num_workers, self.slow_in_workers = num_workers, slow_in_workers

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(self.slow_in_workers), 1, num_workers=self.num_workers)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from (torch.ones(4) for _ in range(100))


# ------------------------------------------------------------------------------------------------- numbers of workers


def tune_workers(slow_in_workers: bool) -> Tuning:
    return tune(
        Model(),
        Data(slow_in_workers=slow_in_workers),
        bucket_caps_mb=[],
        num_workers=[1],
        num_steps=2,
        num_warmup_steps=3,
        num_rounds=3,
        accelerator="cpu",
        devices=1,
    )


@ranks(1, init=False)
@pytest.mark.parametrize("slow_in_workers", [False, True])
def test_workers_are_chosen_where_they_are_faster_and_only_there(slow_in_workers: bool) -> None:
    tuning = tune_workers(slow_in_workers)
    assert tuning.loaders is not None
    assert tuning.num_workers == (None if slow_in_workers else 1)
    default, workers = tuning.loaders.rows
    slow = workers if slow_in_workers else default
    assert min(slow.times_s) > PAUSE_S  # a lower bound: one sample a step, and nobody else to fetch it
    assert tuning.config == StrategyConfig()
    assert "Data workers. " in str(tuning)


def test_batches_prepared_ahead_cannot_decide() -> None:
    counts, num_accumulated = [0, 2, 4], 2
    warmup, steps = tuner._lengths_for_workers(counts, 5, 6, num_accumulated)
    num_ahead = max(counts) * DataLoader(TensorDataset(torch.ones(1)), num_workers=1).prefetch_factor
    assert warmup * num_accumulated >= 2 * num_ahead
    assert steps * num_accumulated >= 4 * num_ahead
    assert tuner._lengths_for_workers([0], 5, 6, 1) == (5, 6)


def test_the_numbers_that_compete_by_themselves_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "workers_per_rank", lambda machine, num_ranks: 24 // num_ranks)
    assert tuner._worker_counts("auto", 4) == [0, 1, 2, 4, 6]
    assert tuner._worker_counts("auto", 100) == [0, 1]
    assert tuner._worker_counts([3, 0, 3], 4) == [3, 0]


@ranks(2, init=False)
def test_ranks_on_unlike_machines_try_the_same_numbers_of_workers() -> None:
    most = 2 if os.environ["RANK"] == "0" else 1
    tuner.workers_per_rank = lambda machine, num_ranks: most  # type: ignore[assignment]
    lengths = {"num_steps": 1, "num_warmup_steps": 3, "num_rounds": 3}
    loader = DataLoader(TensorDataset(torch.ones(96, 4)))
    tuning = tune(Model(), loader, bucket_caps_mb=[], num_workers="auto", devices=2, accelerator="cpu", **lengths)
    assert tuning.loaders is not None
    assert [row.candidate.name for row in tuning.loaders.rows] == ["default", "num_workers=0", "num_workers=1"]


def test_a_loader_gets_workers_and_keeps_its_order() -> None:
    numbers = TensorDataset(torch.arange(12))
    loader = DataLoader(numbers, 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    given = with_workers(2, keep_alive=True)(loader, RunningStage.TRAINING)
    assert isinstance(given, DataLoader)
    assert (given.num_workers, given.persistent_workers, given.prefetch_factor) == (2, True, 2)
    assert (loader.num_workers, loader.persistent_workers) == (0, False)
    state = loader.generator.get_state()
    alone = [batch[0].tolist() for batch in loader]
    loader.generator.set_state(state)
    assert [batch[0].tolist() for batch in given] == alone
    taken = with_workers(0)(given, RunningStage.TRAINING)
    assert isinstance(taken, DataLoader)
    assert (taken.num_workers, taken.persistent_workers, taken.prefetch_factor) == (0, False, None)
    assert with_workers(2)(loader, RunningStage.VALIDATING) is loader


def test_a_loader_whose_samples_depend_on_its_workers_is_left_out() -> None:
    with pytest.raises(ValueError, match="map-style dataset.*DataLoader of Stream"):
        with_workers(2)(DataLoader(Stream()), RunningStage.TRAINING)


@ranks(1, init=False)
def test_the_starts_of_epochs_count_where_they_are_asked_for() -> None:
    passed_s = [0.0]

    class Pausing(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            passed_s[0] += 1.0

    trials._now_s = lambda _: passed_s[0]
    loader = DataLoader(TensorDataset(torch.ones(2, 4)), 1)
    for counts, expected_s in ((True, 2.0), (False, 0.0)):
        clock = StepClock(1, 4, counts)  # from the first of two batches to the first of the epoch after next
        trainer(max_epochs=5, callbacks=[Pausing(), clock]).fit(Model(), loader)
        assert clock.elapsed_s == expected_s


# ------------------------------------------------------------------------------------------------------ what is written


def chosen(**settings: Any) -> Tuning:
    config = StrategyConfig(**{"bucket_cap_mb": 5.0, "static_graph": True} | settings)
    loaders = Tuning(config, Candidate({}, "num_workers=3", num_workers=3), "Data workers. Chosen.")
    candidate = Candidate({"bucket_cap_mb": 5.0}, "bucket_cap_mb=5")
    return Tuning(config, candidate, "Chosen.", loaders=loaders, data_class=f"{__name__}.Data")


def read_by_lightning(*files: Path, **classes: Any) -> LightningCLI:
    arguments = [text for file in files for text in ("--config", str(file))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py"])
        settings: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(args=arguments, **settings, **classes)


def base_config(folder: Path, **strategy: Any) -> Path:
    trainer_section = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "callbacks": [
            {"class_path": "ddp_plugin.ConvertSyncBatchNorm"},
            {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "loss"}},
        ],
        "strategy": {"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": {"static_graph": True, **strategy}},
    }
    sections = {
        "model": {"class_path": f"{__name__}.Model", "init_args": {"width": 3}},
        "data": {"class_path": f"{__name__}.Data", "init_args": {"slow_in_workers": False}},
        "trainer": trainer_section,
        "ckpt_path": None,
    }
    file = folder / "base.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def test_lightning_reads_it_on_top_of_another_configuration(tmp_path: Path) -> None:
    tuned, base = tmp_path / "tuned.yaml", base_config(tmp_path)
    sections = yaml.safe_load(base.read_text())
    del sections["ckpt_path"]  # of `fit`
    base.write_text(yaml.safe_dump(sections))
    tuning = chosen(comm_hook={"name": "powersgd", "matrix_rank": 4}, timeout_s=90000.5)
    tuned.write_text(tuning.to_yaml(layout="lightning"))
    read = read_by_lightning(base, tuned)
    strategy = read.trainer.strategy
    assert isinstance(strategy, CustomDDPStrategy)
    assert strategy.comm_hook is not None
    assert (strategy.comm_hook.name, strategy.comm_hook.options["matrix_rank"]) == ("powersgd", 4)
    assert strategy._ddp_kwargs == {"static_graph": True, "bucket_cap_mb": 5.0}
    assert strategy._timeout.total_seconds() == 90000.5
    assert (read.datamodule.num_workers, read.datamodule.slow_in_workers, read.model.net.out_features) == (3, False, 3)
    assert read.trainer.max_epochs == 3


def test_options_of_nccl_arrive_in_lightning(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned.yaml"
    tuned.write_text(chosen(nccl=NcclOptions(max_ctas=8)).to_yaml(layout="lightning"))
    assert yaml.safe_load(tuned.read_text())["trainer"]["strategy"]["init_args"]["nccl"] == {"max_ctas": 8}
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump({"model": {"class_path": f"{__name__}.Model"}, "trainer": {"logger": False}}))
    assert read_by_lightning(base, tuned).trainer.strategy._nccl == NcclOptions(max_ctas=8)


def test_a_recipe_reads_it_as_a_variant(tmp_path: Path) -> None:
    (tmp_path / "llm.yaml").write_text((CONF / "llm.yaml").read_text())
    (tmp_path / "llm_tuned.yaml").write_text(chosen().to_yaml(layout="recipe"))
    settings = load_settings("llm", ["config=tuned"], tmp_path)
    assert (settings.strategy.bucket_cap_mb, settings.data.num_workers, settings.seed) == (5.0, 3, 1234)


def test_what_has_no_place_is_said() -> None:
    assert "# Not in this file: num_workers=3" in chosen().to_yaml()
    assert "Not in this file" not in chosen().to_yaml(layout="lightning")
    with pytest.raises(ValueError, match="section or layout"):
        chosen().to_yaml("strategy", layout="recipe")
    with pytest.raises(ValueError, match="layout to be one of"):
        chosen().to_yaml(layout="yaml")
    assert len(LAYOUTS) == 4


# ------------------------------------------------------------------------------------------------------- what is tuned


def test_a_configuration_of_lightning_gives_the_arguments_of_a_tuning(tmp_path: Path) -> None:
    found = from_lightning_config(base_config(tmp_path, timeout="1 day, 1:00:00.5"), {"devices": 2})
    assert found["model"].net.out_features == 3
    assert isinstance(found["datamodule"], Data)
    assert found["strategy"] == {"static_graph": True, "timeout_s": 90000.5}
    assert [type(callback) for callback in found["callbacks"]] == [ConvertSyncBatchNorm]
    assert {name: found[name] for name in ("accelerator", "devices")} == {"accelerator": "cpu", "devices": 2}
    assert not {"max_epochs", "logger", "enable_checkpointing"} & set(found)


def test_a_program_with_classes_of_its_own_reads_and_is_read(tmp_path: Path) -> None:
    base, tuned = tmp_path / "base.yaml", tmp_path / "tuned.yaml"
    base.write_text("model: {width: 3}\ndata: {slow_in_workers: true}\ntrainer: {accelerator: cpu, logger: false}\n")
    found = from_lightning_config(base, {}, f"{__name__}:Model", f"{__name__}:Data")
    assert (found["model"].net.out_features, found["datamodule"].slow_in_workers) == (3, True)
    tuned.write_text(chosen().to_yaml(layout="lightning_fixed"))
    read = read_by_lightning(base, tuned, model_class=Model, datamodule_class=Data)
    assert (read.datamodule.num_workers, read.datamodule.slow_in_workers, read.model.net.out_features) == (3, True, 3)
    with pytest.raises(ValueError, match="a class of LightningModule for --model"):
        from_lightning_config(base, {}, f"{__name__}:Data")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ("auto", {}),
        ("ddp", {"start_method": "popen"}),
        ("ddp_plugin_static", {"static_graph": True}),
        ({"class_path": "lightning.pytorch.strategies.DDPStrategy"}, {}),
        ({"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": {"timeout": "0:01:30"}}, {"timeout_s": 90.0}),
        ({"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": {"timeout": 5400}}, {"timeout_s": 5400.0}),
    ],
)
def test_strategies_by_every_name(given: Any, expected: dict[str, Any]) -> None:
    assert strategy_settings(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fsdp", "a strategy of DistributedDataParallel"),
        ({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, "a strategy of DistributedDataParallel"),
        ({"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": {"timeout": "soon"}}, "hours:minutes:seconds"),
        ({"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": {"ddp_comm_hook": "x"}}, "ddp_comm_hook"),
        ({"class_path": "DDPStrategy", "dict_kwargs": {"gradients_as_views": True}}, "gradients_as_views"),
    ],
)
def test_strategies_that_cannot_be_tuned(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_settings(given)


def test_classes_by_name() -> None:
    found = from_classes(f"{__name__}:Model", f"{__name__}:Data", {"devices": 2})
    assert isinstance(found["model"], Model)
    assert isinstance(found["datamodule"], Data)
    assert found["devices"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no.such.module:Model"], "No module named"),
        (["--model", "tests.test_tune_command"], "Put a colon"),
        (["--model", "tests.test_tune_command:Data"], "a LightningModule from --model"),
        (
            ["--model", "tests.test_tune_command:Model", "--data", "tests.test_tune_command:Model"],
            "LightningDataModule",
        ),
        (["--model", "tests.test_tune_command:Model", "device=2"], "arguments of the Trainer"),
        (["--model", "tests.test_tune_command:Model", "2"], "KEY=VALUE"),
        (["--model", "tests.test_tune_command:Model", "accelerator=cpu", "devices=0"], "devices"),
        (["--model", "tests.test_tune_command:Model", "--output", "no/such/folder/x.yaml"], "folder that exists"),
        (["--model", "tests.test_tune_command:Model", "--output", "pyproject.toml"], "which exists"),
        (["--model", "tests.test_tune_command:Model", "--hooks", "bf17"], "bf17"),
        ([], "Got nothing"),
        (["--recipe", "recipes/llm.py", "--config", "a.yaml"], "Got --recipe and --config"),
        (["--config", "recipes/conf/llm.yaml", "--model", "tests.harness:ranks"], "arguments of the Trainer"),
        (["--recipe", "no/recipe.py"], "--recipe to be a training script"),
        (["--recipe", "recipes/plan.py"], "for_tuning"),
        (["--recipe", "recipes/llm.py", "model.dimm=3"], "dimm"),
        (["--config", "no/config.yaml"], "--config to be a file"),
        (["--config", "pyproject.toml"], "pyproject.toml"),
        (["--config", "recipes/conf/llm.yaml"], "arguments of the Trainer"),
        (["--config", "recipes/conf/llm.yaml", "--data", "a:B"], "--data beside --model"),
    ],
)
def test_mistakes_are_told_in_words(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


def test_a_configuration_that_the_parser_refuses_is_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model:\n  class_path: {__name__}.Model\n  init_args:\n    depth: 3\n")
    assert main(["tune", "--config", str(file)]) == 2
    assert "depth" in capsys.readouterr().err


def test_lists_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--bucket-caps-mb", "--num-workers"):
        with pytest.raises(SystemExit, match="2"):
            main(["tune", "--model", "a:B", option, "many"])
        assert "Got 'many'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ the whole of it

QUICK = ["--num-steps", "2", "--num-warmup-steps", "3", "--num-rounds", "3"]


def told_by(arguments: list[str]) -> tuple[int, str]:
    sys.argv = ["ddp-plugin", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = main(arguments)
    return status, told.getvalue()


@ranks(2, init=False)
def test_a_configuration_is_tuned_on_two_ranks_and_read_back_by_lightning(tmp_path: Path) -> None:
    is_first = os.environ["RANK"] == "0"
    base, tuned = tmp_path / "base.yaml", tmp_path / "tuned.yaml"
    if is_first:
        base_config(tmp_path).rename(tmp_path / "ready.yaml")
        (tmp_path / "ready.yaml").rename(base)
    while not base.exists():
        time.sleep(0.01)
    command = ["tune", "--config", str(base), "--output", str(tuned), "--bucket-caps-mb", "default,0.001"]
    status, told = told_by([*command, "--num-workers", "1", *QUICK, "devices=2"])
    assert status == 0
    assert ("Data workers. Chosen: num_workers=1" in told) == is_first
    assert ("bucket_cap_mb=0.001" in told) == is_first
    if not is_first:
        assert told == ""
        return
    written = yaml.safe_load(tuned.read_text())
    chosen_mb = written["trainer"]["strategy"]["init_args"]["bucket_cap_mb"]
    sections = yaml.safe_load(base.read_text())
    del sections["ckpt_path"]
    base.write_text(yaml.safe_dump(sections))
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]  # the reader is one process
    read = read_by_lightning(base, tuned)
    assert read.datamodule.num_workers == 1
    given = {} if chosen_mb is None else {"bucket_cap_mb": chosen_mb}
    assert read.trainer.strategy._ddp_kwargs == {"static_graph": True, **given}


@ranks(2, init=False)
@pytest.mark.parametrize("recipe", ["llm", "resnet"])
def test_a_recipe_is_tuned_on_two_ranks_and_reads_its_own_variant(recipe: str, tmp_path: Path) -> None:
    folder, ready = tmp_path / "conf", tmp_path / "ready"
    if os.environ["RANK"] == "0":
        folder.mkdir()
        (folder / f"{recipe}.yaml").write_text((CONF / f"{recipe}.yaml").read_text())
        (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 600)
        ready.touch()
    while not ready.exists():
        time.sleep(0.01)
    small = {
        "llm": [
            *("model.num_layers=1", "model.dim=12", "model.hidden_dim=8", "model.block_size=8"),
            *("tokenizer.vocab_size=300", f"data.path={tmp_path / 'text.txt'}", f"data.cache_dir={tmp_path / 'cache'}"),
            "trainer.batch_size=2",
        ],
        "resnet": ["model.width=2", "trainer.batch_size=4"],
    }[recipe]
    output = folder / f"{recipe}_tuned.yaml"
    program = Path(__file__).resolve().parent.parent / "recipes" / f"{recipe}.py"
    command = ["tune", "--recipe", str(program), "--output", str(output), "--bucket-caps-mb", "default,0.01"]
    status, _ = told_by([*command, "--num-workers", "none", *QUICK, *small])
    assert status == 0
    if os.environ["RANK"] == "0":
        settings = load_settings(recipe, ["config=tuned"], folder)
        assert settings.strategy.bucket_cap_mb == yaml.safe_load(output.read_text())["strategy"]["bucket_cap_mb"]
        assert settings.strategy.static_graph is True  # the recipe's own, kept
        assert CustomDDPStrategy.from_config(settings.strategy) is not None
    with contextlib.redirect_stderr(io.StringIO()) as refusal:
        assert main([*command, *QUICK, *small]) == 2
    assert "which exists" in refusal.getvalue()
