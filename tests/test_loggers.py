"""The tables of keys in docs/loggers.md, what a run really logs, and the source say the same."""

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader

from ddp_plugin import callbacks
from tests.harness import ROOT, run_ranks, trainer

ROW = re.compile(r"^\| `(ddp/\w+)` \| [^|]+ \| [^|]+ \|$", re.M)
SECTIONS = (ROOT / "docs" / "loggers.md").read_text().split("\n## ")[1:]
TABLE = {key: section.split("\n")[0] for section in SECTIONS for key in ROW.findall(section)}
LIGHTNINGS_OWN = {"epoch", "step", "hp_metric"}


class Plain(Logger):
    """As little as a logger may be."""

    name, version = "plain", 0

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.keys |= set(metrics)


class Quadratic(pl.LightningModule):
    """A gradient that is far larger than its noise, so that the noise scale is resolved."""

    def __init__(self) -> None:
        super().__init__()
        self.point = torch.nn.Parameter(torch.zeros(3))
        self.norm = torch.nn.BatchNorm1d(3)  # for ConvertSyncBatchNorm

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.point - batch).square().sum(1).mean() + 0 * self.norm(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def every_callback() -> list[pl.Callback]:
    named = [getattr(callbacks, name) for name in callbacks.__all__]
    return [cls() for cls in named if isinstance(cls, type) and issubclass(cls, pl.Callback)]


def keys_logged(folder: str, only: str | None = None) -> dict[str, set[str]]:
    warnings.simplefilter("ignore")  # callbacks speak of a slow rank, and of what they find nothing of
    loggers = [CSVLogger(folder), TensorBoardLogger(folder), plain := Plain()]
    chosen = [callback for callback in every_callback() if only in (None, type(callback).__name__)]
    run = trainer(
        max_steps=110,  # two windows of fifty steps, and the noise scale one window later
        log_every_n_steps=1,
        logger=loggers,
        callbacks=chosen,
        default_root_dir=folder,
    )
    generator = torch.Generator().manual_seed(0)
    run.fit(Quadratic(), DataLoader(5 + torch.randn(4 * 2 * 110, 3, generator=generator), batch_size=4))
    if run.global_rank != 0:
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(loggers[1].log_dir)
    events.Reload()
    with open(loggers[0].experiment.metrics_file_path) as file:
        header = file.readline().strip().split(",")
    found = {"csv": set(header), "tensorboard": set(events.Tags()["scalars"]), "plain": plain.keys}
    return {name: keys - LIGHTNINGS_OWN for name, keys in found.items()}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    return run_ranks(keys_logged, 2, init=False, folder=str(tmp_path_factory.mktemp("logs")))[0]


@pytest.mark.parametrize("logger", ["csv", "tensorboard", "plain"])
def test_the_table_has_what_every_callback_logs_on_two_ranks(logger: str, logged: dict[str, set[str]]) -> None:
    assert logged[logger] == set(TABLE)


@pytest.mark.parametrize("callback", sorted(set(TABLE.values()) - {"GradientNoiseScale"}))
def test_the_table_says_who_logs_a_key(callback: str, tmp_path: Path) -> None:
    found = run_ranks(keys_logged, 2, init=False, folder=str(tmp_path), only=callback)[0]["plain"]
    assert found == {key for key, who in TABLE.items() if who == callback}


# --------------------------------------------------------------------------------------------------------- the source


def patterns_in(source: str) -> set[str]:
    """Returns each key of a source as a regular expression; what is put into an f-string stands for any word."""
    tree = ast.parse(source)
    parts_of_f_strings = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    found = set()
    for node in ast.walk(tree):
        values: list[Any] = node.values if isinstance(node, ast.JoinedStr) else [node]
        if isinstance(node, ast.Constant) and id(node) in parts_of_f_strings:
            continue
        if values and isinstance(values[0], ast.Constant) and str(values[0].value).startswith("ddp/"):
            found.add("".join(re.escape(part.value) if isinstance(part, ast.Constant) else r"\w*" for part in values))
    return found


def test_the_source_has_the_keys_of_the_table_and_no_others() -> None:
    patterns = {pattern for path in (ROOT / "ddp_plugin").rglob("*.py") for pattern in patterns_in(path.read_text())}
    assert len(patterns) > 5
    assert [key for key in TABLE if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, key) for key in TABLE)] == []


def test_that_search_finds_keys() -> None:
    assert patterns_in('log({"ddp/new_s": 1, f"ddp/late_{part}_s": 2, "other": 3})') == {"ddp/new_s", r"ddp/late_\w*_s"}
