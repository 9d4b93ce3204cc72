"""The benchmark runs, prints every ratio that it names, and refuses to compare what differs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.timing import Row, ratio_row, slowest
from tests.benchmarks.training import TRAINING_HOOKS, require_equal
from tests.harness import ROOT

NAMED = {
    "evaluation": ["tiny MLP, 96 samples", "large MLP, 192 samples"],
    "training step / Lightning": ["CustomDDPStrategy", "+ PerRankSeed", "+ default_callbacks()"],
    "training step / plain torch": ["Lightning's DDPStrategy", "CustomDDPStrategy", "+ default_callbacks()"],
    "training step with comm_hook": TRAINING_HOOKS,
    "bytes": TRAINING_HOOKS,
    "training step in plain torch, synchronised BatchNorm": ["convnet"],
    "one check of ReplicaConsistency": ["the language-model recipe's network"],
    "training step with DecisionSync": ["MLP"],
    "wishes": ["sent beside a step"],
    "training step with both monitors / without": ["MLP", "language-model recipe"],
    "training step with both monitors / an observer": ["MLP"],
    "CPU time of both monitors in a step": ["language-model recipe, 2 buckets", "MLP of 32 layers"],
    "of that": ["language-model recipe, 2 buckets: callbacks", "2 buckets: hook", "end of the all-reduce"],
    "CPU time of both monitors / 1%": ["language-model recipe, 2 buckets"],
    "length of a step of which that is 1%": ["language-model recipe, 2 buckets", "MLP of 32 layers"],
    "random streams": ["shuffled"],
    "checkpoint": ["save, hashed and flushed", "load, read once for all ranks"],
}


@pytest.mark.long
def test_quick_run_prints_every_number(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    finished = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr
    loaded = json.loads(report.read_text())
    assert loaded["machine"]["world_size"] == 2
    assert loaded["machine"]["torch"] == torch.__version__
    for fact in ("cores", "torch", "lightning", "world_size"):
        assert f"{fact}={loaded['machine'][fact]}" in finished.stdout
    for section, names in NAMED.items():
        rows = [row for row in loaded["rows"] if row["section"].startswith(section)]
        for name in names:
            assert any(name in row["name"] for row in rows), f"{section}: {name} is missing"
        for row in rows:
            assert row["section"] in finished.stdout
            assert any(line.strip().startswith(row["name"]) for line in finished.stdout.splitlines())
            for key in ("value", "lowest", "highest"):
                assert math.isfinite(row[key]), row
                assert row[key] > 0, row
            assert row["lowest"] <= row["value"] <= row["highest"]
    assert {row["unit"] for row in loaded["rows"]} == {"ratio", "us", "bytes"}


def test_a_ratio_is_taken_within_its_round() -> None:
    ranks = [{"a": [1.0, 2.0, 9.0], "b": [4.0, 4.0, 4.0]}, {"a": [3.0, 1.0, 1.0], "b": [1.0, 8.0, 2.0]}]
    times = slowest(ranks)
    assert times == {"a": [3.0, 2.0, 9.0], "b": [4.0, 8.0, 4.0]}
    row = ratio_row("section", "name", times, "a", "b")
    assert row == Row("section", "name", "ratio", 0.75, 0.25, 2.25, of_fastest=0.5, subject_s=3.0, baseline_s=4.0)


def test_different_trainings_are_not_compared() -> None:
    require_equal({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.0])})
    with pytest.raises(RuntimeError, match="b and a trained differently"):
        require_equal({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1.0, 2.5])})
