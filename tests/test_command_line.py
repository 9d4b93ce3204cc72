"""``ddp-plugin``: what a person types, and what comes back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_plugin.cli import main
from ddp_plugin.collectives import ALGORITHMS, render_walk, walk

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LLM = str(RECIPES / "llm.py")


class Net(nn.Module):
    """A model with an example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 8)
        self.example_input_array = torch.randn(16, 64)

    def forward(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.second(self.first(data).relu())}


def without_example() -> nn.Module:
    return nn.Linear(100, 10)


def not_a_model() -> int:
    return 3


def model_with_a_mistake() -> nn.Module:
    raise ValueError("my own mistake")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_ring_prints_the_walk(algorithm: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ring", "--ranks", "3", "--algorithm", algorithm]) == 0
    assert capsys.readouterr().out == render_walk(walk(3, algorithm))


@pytest.mark.parametrize("ending", ["png", "svg", "gif"])
def test_ring_draws_the_walk(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"ring.{ending}"
    assert main(["ring", "--picture", str(path)]) == 0
    beginning = {"png": b"\x89PNG", "svg": b"<?xml", "gif": b"GIF8"}[ending]
    content = path.read_bytes()
    assert content.startswith(beginning)
    if ending == "svg":
        assert b"round 6" in content or b"glyph" in content
    if ending == "gif":
        from PIL import Image

        with Image.open(path) as image:
            assert image.n_frames == len(walk(4).rounds)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ring", "--ranks", "0"], "--ranks"),
        (["ring", "--ranks", "17", "--picture", "x.png"], "at most 16 ranks"),
        (["ring", "--picture", "x.docx"], "ends in one of"),
        (["plan", "--parameters", "-1"], "--parameters above 0"),
        (["plan", "--parameters", "1e6", "--nodes", "0"], "--nodes"),
        (["plan", "--parameters", "1e6", "--between", "pigeon"], "a link out of"),
        (["plan", "--parameters", "1e6", "--base-batch", "3"], "--batch-size"),
        (["plan", "--parameters", "1e6", "--picture", "x.png"], "--step-s"),
        (["plan", "--model", "tests.test_command_line"], "colon"),
        (["plan", "--model", "tests.test_command_line:Nothing"], "Nothing"),
        (["plan", "--model", "no.such.module:Net"], "no.such.module"),
        (["plan", "--model", "tests.test_command_line:not_a_model"], "a Module from --model"),
        (["plan"], "--parameters, --model or --recipe"),
        (["plan", "--parameters", "1e30"], "at most 1,000,000 processes"),
        (["plan", "--parameters", "1e6", "--gpus", "100000", "--nodes", "100000"], "at most 1,000,000 processes"),
        (["ring", "--picture", "/proc/ring.png"], "/proc/ring.png"),
        (["plan", "--parameters", "1e6", "--gpus", "0"], "--gpus"),
        (["plan", "--recipe", "no/such/script.py"], "a training script"),
        (["plan", "--recipe", f"{RECIPES}/text.py"], "describe_run"),
        (["plan", "--recipe", LLM, "trainer.divices=3"], "trainer.divices"),
        (["plan", "--recipe", LLM, "--gpus", "4"], "--gpus as well"),
        (["plan", "--recipe", "/etc/passwd"], "a training script"),
        (["plan", "--parameters", "1e6", "--batch-size", "0"], "--batch-size"),
        (["plan", "--parameters", "1e6", "--bucket-cap-mb", "0"], "--bucket-cap-mb above 0"),
        (["plan", "--parameters", "1e6", "--step-s", "1", "--picture", "x.txt"], "--picture to end in"),
        (["plan", "--check", "--parameters", "1e6"], "--parameters as well"),
        (["ring", "--ranks", "1000000"], "--ranks to be an integer from 1 to 32"),
        (["doctor", "--save-link", "."], "--save-link to be a file"),
        (["tune", "--recipe", LLM, "--num-rounds", "1"], "--num-rounds to be an integer of at least 3"),
        (["trace", "--active", "0", "--", "true"], "--active to be an integer of at least 1"),
    ],
)
def test_what_a_person_can_correct_is_said_in_words(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert words in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


def test_plan_of_a_number_of_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--parameters", "7e9", "--memory-gb", "80"]) == 0
    told = capsys.readouterr().out
    assert "7,000,000,000 parameters on 8 processes" in told
    assert "112 GB, 16 bytes for each parameter" in told
    assert "does not fit 80 GB: use FSDP" in told


def test_plan_of_a_model_that_brings_an_example_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    model = "tests.test_command_line:Net"
    assert main(["plan", "--model", model, "--gpus", "2", "--batch-size", "16", "--picture", str(picture)]) == 0
    told = capsys.readouterr().out
    assert f"{64 * 128 + 128 + 128 * 8 + 8:,} parameters" in told
    assert "measured here" in told
    assert "activations" in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_of_a_model_without_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tests.test_command_line:without_example", "--step-s", "0.5"]) == 0
    told = capsys.readouterr().out
    assert "1,010 parameters" in told
    assert "as given" in told
    assert "Activations are not counted" in told


def test_a_mistake_in_a_persons_own_code_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tests.test_command_line:model_with_a_mistake"]) == 2
    told = capsys.readouterr().err
    assert "in model_with_a_mistake" in told
    assert told.endswith("ddp-plugin plan: my own mistake\n")
    assert main(["plan", "--model", "tests.test_command_line:not_a_model"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_plan_of_a_recipe_is_that_of_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.num_layers=1", "model.dim=32", "model.num_heads=2", "model.num_kv_heads=1", "model.hidden_dim=48"]
    own = ["trainer.devices=3", "trainer.batch_size=2", "trainer.accumulate=4", "strategy.comm_hook=powersgd"]
    assert main(["plan", "--json", "--recipe", LLM, *small, *own, "strategy.bucket_cap_mb=2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["world_size"], plan["num_nodes"], plan["effective_batch"]) == (3, 1, 24)
    assert plan["bucket_cap_mb"] == 2.0
    assert [hook["name"] for hook in plan["hooks"]].count("powersgd") == 1
    assert plan["hooks"][0]["name"] == "powersgd"
    assert plan["forward_s"] > 3 * plan["backward_s"] > 0, "four micro-batches, run here"
    assert plan["memory_bytes"]["activations"] > 0
    vocabulary, dim, heads_dim, hidden = 2048, 32, 16, 48
    attention = dim * dim * 2 + 2 * dim * heads_dim  # queries and output; keys and values of one head
    assert plan["num_parameters"] == vocabulary * dim + attention + 3 * dim * hidden + 3 * dim


def test_plan_of_a_recipe_for_devices_that_are_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", LLM, "config=a100_multinode", "--memory-gb", "80"]) == 0
    told = capsys.readouterr().out
    assert "on 32 processes (4 nodes of 8)" in told
    assert "= 512 samples" in told or "512 samples" in told
    assert ("measured here" in told) is torch.cuda.is_available()


def test_plan_of_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", str(RECIPES / "resnet.py"), "model.width=4", "trainer.batch_size=4"]) == 0
    assert "measured here" in capsys.readouterr().out


def test_plan_says_how_far_off_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--check"]) == 0
    table = capsys.readouterr().out
    assert "a link of 100 Mbit/s" in table
    assert main(["plan", "--check", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["steps"]
    for step in steps:
        assert f"{step['error_ratio']:+.1%}" in table
        assert step["error_ratio"] == pytest.approx(step["predicted_s"] / step["measured_s"] - 1)
    assert main(["plan", "--parameters", "1e6"]) == 0
    sentence = capsys.readouterr().out.splitlines()[-1]
    assert sentence == table.rstrip().splitlines()[-1]
    exact = [step["error_ratio"] for step in steps if step["is_exact"]]
    assert f"{min(exact):+.0%} to {max(exact):+.0%} off with exact all-reduces" in sentence


def test_plan_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--parameters", "1e8", "--nodes", "2", "--gpus", "4", "--json", "--batch-size", "2"]
    assert main([*arguments, "--base-batch", "4", "--step-s", "0.3", "--hooks", "bf16", "int8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["world_size"] == 8
    assert plan["effective_batch"] == 16
    assert plan["learning_rate_ratios"] == {"linear": 4.0, "sqrt": 2.0}
    assert plan["state_bytes"] == 16 * 100_000_000
    assert [hook["name"] for hook in plan["hooks"]] == ["bf16", "int8"]
    assert plan["forward_s"] + plan["backward_s"] == pytest.approx(0.3)
    assert set(plan["efficiency_ratios"]) == {str(4 * 2**k) for k in range(10)}


def test_the_program_is_installed_and_says_what_it_can_do() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "ddp_plugin", "--help"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "plan" in told
    assert "ring" in told
