"""Both recipes on the device, with their speed and memory beside those of plain torch. Nothing here asserts a speed."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from settings import load_settings
from throughput import peak_memory_bytes
from torch.utils.data import DataLoader

from tests.gpu.device import DEVICE, ON_CUDA
from tests.harness import ROOT, run_ranks
from tests.twins import llm_twin, resnet_twin

pytestmark = pytest.mark.gpu
NUM_SKIPPED = 10  # first steps, which warm up
TIMEOUT_S = 120

# On the CPU only the checks themselves are tried, with as little work as shows that they run.
LLM = [
    "optimizer.warmup_steps=10",
    "sample.num_tokens=0",
    "trainer.max_steps=150",
    "trainer.validate_every=150",
    "trainer.batch_size=32",
    "model.num_layers=8",
    "model.dim=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.hidden_dim=1408",
    "model.block_size=256",
]
LLM_ON_CPU = [
    "optimizer.warmup_steps=10",
    "sample.num_tokens=0",
    "trainer.max_steps=20",
    "trainer.validate_every=20",
    "trainer.batch_size=2",
    "model.num_layers=1",
    "data.max_bytes=200_000",
    "model.block_size=64",
]
RESNET = ["trainer.max_epochs=20", "trainer.batch_size=128", "model.width=64"]
RESNET_ON_CPU = ["trainer.max_epochs=2", "trainer.batch_size=64", "model.width=8"]
PRECISIONS = ("32-true", "bf16-mixed") if ON_CUDA else ("32-true",)


def arguments_for(folder: Path, precision: str, *more: str) -> list[str]:
    return [
        f"trainer.accelerator={'gpu' if ON_CUDA else 'cpu'}",
        "trainer.devices=1",
        f"trainer.precision={precision}",
        "trainer.progress_bar=false",
        "trainer.log_every=5",
        f"output_dir={folder / precision}",
        *more,
    ]


def run_recipe(name: str, arguments: list[str]) -> str:
    mine = ("PL_", "WORLD", "RANK", "LOCAL_", "MASTER")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=ROOT)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def speed_and_memory(output: str, unit: str) -> tuple[float, float]:
    """Reads units per second and peak MiB from the recipe's own report."""
    found = re.search(rf"training +([\d,]+) {unit}/s.* peak memory ([\d,]+) MiB", output)
    assert found is not None, output
    speed, memory = (float(text.replace(",", "")) for text in found.groups())
    assert speed > 0
    return speed, memory


class _Timed(DataLoader[Any]):
    """Moves batches to the device and notes when each was asked for."""

    asked_s: list[float] = []

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            _Timed.asked_s.append(time.perf_counter())
            yield [tensor.to(DEVICE) for tensor in batch]


def run_twin(name: str, settings: dict[str, Any]) -> tuple[float, float, list[float]]:
    """Runs a twin, which was written for the CPU, on the device: its network and its batches are put there.

    Returns:
        Seconds of a micro-batch, peak MiB, and the losses.
    """
    dist.init_process_group("nccl" if ON_CUDA else "gloo", device_id=DEVICE if ON_CUDA else None)
    _Timed.asked_s.clear()
    twin: Any = llm_twin if name == "llm" else resnet_twin
    network = "Transformer" if name == "llm" else "resnet"
    build = getattr(twin, network)
    setattr(twin, network, lambda *args, **kwargs: build(*args, **kwargs).to(DEVICE))
    twin.DataLoader = _Timed
    if name == "resnet":
        torch.set_float32_matmul_precision("high")  # as the recipe does
    losses = twin.train(**settings) if name == "llm" else twin.losses(**settings)
    asked_s = _Timed.asked_s[NUM_SKIPPED : len(losses)]
    return (asked_s[-1] - asked_s[0]) / (len(asked_s) - 1), peak_memory_bytes(DEVICE) / 2**20, losses


def show(capsys: pytest.CaptureFixture[str], lines: list[str]) -> None:
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def line(who: str, speed: float, memory: float, unit: str) -> str:
    return f"  {who:<28}{speed:>12,.0f} {unit}/s{memory:>10,.0f} MiB at most"


def test_llm_beside_plain_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"language model on {DEVICE}"]
    arguments = [f"data.cache_dir={tmp_path / 'cache'}", *(LLM if ON_CUDA else LLM_ON_CPU)]
    for precision in PRECISIONS:
        output = run_recipe("llm", arguments_for(tmp_path, precision, *arguments))
        lines.append(line(f"recipe, {precision}", *speed_and_memory(output, "tokens"), "tokens"))
    settings = load_settings("llm", arguments_for(tmp_path, "32-true", *arguments))
    batch_size, optimizer = settings.trainer.batch_size, settings.optimizer
    step_s, memory, losses = run_ranks(
        run_twin,
        1,
        init=False,
        timeout_s=TIMEOUT_S,
        name="llm",
        settings={
            "token_file": next((tmp_path / "cache").iterdir()) / "train.bin",
            "model": {"vocab_size": settings.tokenizer.vocab_size, **OmegaConf.to_container(settings.model)},
            "seed": settings.seed,
            "batch_size": batch_size,
            "accumulate": 1,
            "num_steps": settings.trainer.max_steps,
            "schedule_steps": settings.trainer.max_steps,
            "learning_rate": optimizer.learning_rate,
            "warmup_steps": optimizer.warmup_steps,
            "final_ratio": optimizer.final_ratio,
            "weight_decay": optimizer.weight_decay,
            "clip_norm": optimizer.clip_norm,
        },
    )[0]
    lines.append(line("plain torch, 32-true", batch_size * settings.model.block_size / step_s, memory, "tokens"))
    show(capsys, lines)
    assert sum(losses[-5:]) < sum(losses[:5])


def test_resnet_beside_plain_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, arguments = [f"residual network on {DEVICE}"], RESNET if ON_CUDA else RESNET_ON_CPU
    for precision in PRECISIONS:
        output = run_recipe("resnet", arguments_for(tmp_path, precision, *arguments))
        lines.append(line(f"recipe, {precision}", *speed_and_memory(output, "images"), "images"))
    settings = load_settings("resnet", arguments_for(tmp_path, "32-true", *arguments))
    batch_size, optimizer = settings.trainer.batch_size, settings.optimizer
    step_s, memory, losses = run_ranks(
        run_twin,
        1,
        init=False,
        timeout_s=TIMEOUT_S,
        name="resnet",
        settings={
            "num_steps": NUM_SKIPPED + (60 if ON_CUDA else 10),
            "seed": settings.seed,
            "batch_size": batch_size,
            "width": settings.model.width,
            "learning_rate": optimizer.learning_rate,
            "base_batch_size": optimizer.base_batch_size,
            "warmup_epochs": optimizer.warmup_epochs,
            "weight_decay": optimizer.weight_decay,
        },
    )[0]
    lines.append(line("plain torch, 32-true", batch_size / step_s, memory, "images"))
    show(capsys, lines)
    assert sum(losses[-5:]) < sum(losses[:5])
