"""A run that was killed, compared with the one that was not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.chaos.history import Start, coverage_problems, read_starts, surviving_steps
from tests.chaos.killing import Kill, Outcome, run_with_kills

__all__ = ["PRECISION", "SAVE_EVERY", "Verdict", "compare", "run_whole", "settings", "write_texts"]

# A step of 12 samples on 1, 2 or 3 processes. In float64, so that "equal to rounding" is a sharp thing to say.
PRECISION = 1e-9
SAVE_EVERY = 4
_SAMPLES_PER_STEP = 12


def write_texts(folder: Path) -> Path:
    """Writes two texts whose blocks are all different."""
    folder.mkdir(parents=True)
    for part, num_lines in ((0, 210), (1, 24)):
        lines = (f"{(7919 * (line + 1000 * part)) % 10007} is line {line}, part {part}\n" for line in range(num_lines))
        (folder / f"{part}.txt").write_text("".join(lines))
    return folder


def settings(texts: Path, num_steps: int, keep: int = 10_000) -> list[str]:
    """Returns settings of the language-model recipe for a model of a few thousand parameters."""
    return [
        f"data.path={texts}",
        f"data.cache_dir={texts.parent / 'cache'}",
        "data.validation_ratio=0.1",
        "tokenizer.vocab_size=300",
        "model.block_size=16",
        "model.num_layers=1",
        "model.dim=16",
        "model.num_heads=2",
        "model.num_kv_heads=1",
        "model.hidden_dim=24",
        "optimizer.warmup_steps=4",
        "trainer.precision=64-true",
        "trainer.devices=-1",
        "trainer.num_nodes=-1",
        "trainer.batch_size=2",
        f"trainer.global_batch_size={_SAMPLES_PER_STEP}",
        f"trainer.max_steps={num_steps}",
        f"trainer.validate_every={num_steps}",
        "trainer.progress_bar=false",
        "trainer.peak_flops_per_s=1.0e+9",
        f"checkpoint.every_steps={SAVE_EVERY}",
        f"checkpoint.keep={keep}",
        "sample.num_tokens=0",
        # A static graph reduces its first micro-batch by itself, after each start anew, which rounds once more.
        "strategy.static_graph=false",
        "resume=auto",
    ]


def run_whole(folder: Path, texts: Path, world_size: int, num_steps: int) -> Path:
    """Runs the recipe without a kill."""
    folder.mkdir()
    run_with_kills(folder, settings(texts, num_steps), world_size, [])
    return folder


@dataclass
class Verdict:
    """What was found.

    Attributes:
        problems: one sentence each; empty where the killed run is the other one.
        starts: of the killed run.
        outcome: of its kills.
        num_identical: checkpoints, of those that both runs have, with the same bits in all weights.
        num_compared: checkpoints that both runs have.
        num_elsewhere: surviving steps that were made on another number of processes than the whole run's.
        worst_loss_ratio: largest relative difference of a step's loss.
        worst_after_change: the same, over the first steps after a change of the number of processes.
    """

    problems: list[str]
    starts: list[Start]
    outcome: Outcome
    num_identical: int = 0
    num_compared: int = 0
    num_elsewhere: int = 0
    worst_loss_ratio: float = 0.0
    worst_after_change: float = 0.0


def compare(whole: Path, folder: Path, texts: Path, world_size: int, num_steps: int, kills: list[Kill]) -> Verdict:
    """Runs the recipe under kills, and says where it differs from the whole run in the other folder.

    Args:
        whole: what :func:`run_whole` returned.
        folder: of the killed run; must not exist.
        texts: what is trained on.
        world_size: processes of both runs, until a kill changes them in the second.
        num_steps: of both.
        kills: in this order.
    """
    folder.mkdir()
    outcome = run_with_kills(folder, settings(texts, num_steps), world_size, kills, step_s=0.02, save_s=0.1)
    verdict = Verdict([], read_starts(folder), outcome)
    expected, steps = surviving_steps(read_starts(whole)), surviving_steps(verdict.starts)
    verdict.problems += coverage_problems(steps, verdict.starts[0].num_samples, num_steps)
    changes = [start.begins_at for start in verdict.starts if start.world_size != world_size]
    elsewhere = {
        id(step) for start in verdict.starts if start.world_size != world_size for step in start.steps.values()
    }
    verdict.num_elsewhere = sum(id(step) in elsewhere for step in steps.values())
    first_change = min(changes, default=num_steps)
    for number in sorted(expected.keys() & steps.keys()):
        if sorted(expected[number].samples) != sorted(steps[number].samples):
            verdict.problems.append(f"step {number} was trained on other samples")
        difference = abs(steps[number].loss / expected[number].loss - 1)
        verdict.worst_loss_ratio = max(verdict.worst_loss_ratio, difference)
        if number - 1 in changes:
            verdict.worst_after_change = max(verdict.worst_after_change, difference)
        if difference > (0 if number <= first_change else PRECISION):
            verdict.problems.append(f"the loss of step {number} differs by {difference:.1e}")
    _compare_weights(whole, folder, first_change, verdict)
    return verdict


def _compare_weights(whole: Path, folder: Path, first_change: int, verdict: Verdict) -> None:
    for path in sorted(whole.glob("checkpoints/step=*.ckpt")):
        other = folder / "checkpoints" / path.name
        if not other.exists():
            verdict.problems.append(f"{path.name} is missing")
            continue
        wanted, got = _weights(path), _weights(other)
        verdict.num_compared += 1
        is_identical = wanted.keys() == got.keys() and all(torch.equal(wanted[name], got[name]) for name in wanted)
        verdict.num_identical += is_identical
        step = int(path.stem.removeprefix("step="))
        if not is_identical and step <= first_change:
            verdict.problems.append(f"{path.name} holds other bits")
        elif any(not torch.allclose(wanted[name], got[name], rtol=PRECISION, atol=PRECISION) for name in wanted):
            verdict.problems.append(f"{path.name} differs by more than rounding")


def _weights(path: Path) -> dict[str, Any]:
    weights: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return weights
