"""What a lossy hook costs in held-out loss: the language-model recipe, trained with each one on two gloo ranks.

    python -m tests.benchmarks.losses                            # every lossy hook, a few minutes
    python -m tests.benchmarks.losses powersgd "topk density=0.05" --seeds 3

The yardstick is the spread of exact runs that differ in their seed, which draws the weights and the order of the data:
a hook whose loss lies above the exact runs' mean by more than twice their standard deviation does not pass.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import torch

from ddp_plugin.hooks import HOOKS, CommHook, Contents
from tests.benchmarks.report import machine
from tests.harness import run_ranks

__all__ = ["lossy_hooks", "train", "verdict"]

WORLD_SIZE = 2
NUM_DEVIATIONS = 2.0
SMALL = (
    "data.max_bytes=2_000_000",
    "tokenizer.vocab_size=1024",
    "model.num_layers=2",
    "model.dim=128",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.hidden_dim=352",
    "model.block_size=64",
    "trainer.batch_size=8",
    "trainer.progress_bar=false",
    "trainer.peak_flops_per_s=1e9",  # not measured: no throughput is reported
)
OPTIONS: dict[str, dict[str, Any]] = {
    "hierarchical": {"between": "int8", "ranks_per_node": 1},
    "diloco": {"period": 30},
}
"""Options without which a hook is exact, or does not exchange anything within so few steps; others keep their defaults,
of which ``start_step`` leaves a third of the steps to ``powersgd``, ``topk``, ``local_sgd`` and ``diloco``."""


def lossy_hooks() -> list[str]:
    """Returns the name of every hook that may train and changes what is computed.

    So says the hook's own error bound, or that it exchanges parameters now and then.
    """
    contents = Contents(("weight",), ((64, 64),), torch.float32)
    gradients = torch.randn(WORLD_SIZE, contents.num_elements, generator=torch.Generator().manual_seed(0))
    rounding = 64 * torch.finfo(torch.float32).eps * gradients.abs().max()
    found = []
    for name in HOOKS:
        hook = make(name)
        if hook is None:
            continue
        if hook.outer is not None or bool((hook.error_bound(gradients, contents) > rounding).any()):
            found.append(name)
    return found


def make(name: str) -> CommHook | None:
    """Returns the hook with this module's options for it; ``None`` for one that must not train."""
    hook = HOOKS[name](**OPTIONS.get(name, {}))
    return hook if hook.refusal is None else None


def train(hook: str | dict[str, Any] | None, seed: int, num_steps: int, cache: str, overrides: list[str]) -> float:
    """Trains the recipe's model from the start, and evaluates it once at the end.

    Args:
        hook: as for ``CustomDDPStrategy(comm_hook=...)``.
        seed: draws the weights and the order of the data.
        num_steps: optimizer steps; the schedule of the learning rate ends there.
        cache: folder for tokenizer and tokens.
        overrides: of the recipe's settings, as on its command line.

    Returns:
        Bits per byte of the held-out text.

    Collectives:
        Those of a training run, on all ranks.
    """
    import lightning.pytorch as pl
    from llm import LanguageModel, TextData, make_plan, make_schedule, make_trainer
    from settings import load_settings
    from text import TokenFiles, find_corpus
    from transformer import TransformerConfig

    from ddp_plugin import CustomDDPStrategy

    warnings.simplefilter("ignore")  # Lightning's advice, which this does not want
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            "llm",
            [
                *SMALL,
                f"trainer.max_steps={num_steps}",
                f"trainer.validate_every={num_steps}",
                f"seed={seed}",
                f"data.cache_dir={cache}",
                f"output_dir={folder}",
                f"trainer.devices={WORLD_SIZE}",
                *overrides,
            ],
        )
        config = TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model)
        plan, chosen = make_plan(settings, config), settings.data
        corpus = find_corpus(chosen.path, list(chosen.patterns), chosen.max_bytes, chosen.validation_ratio)
        files = TokenFiles(corpus, config.vocab_size, chosen.cache_dir)
        pl.seed_everything(settings.seed, workers=True, verbose=False)
        strategy = CustomDDPStrategy(comm_hook=hook, static_graph=True)
        trainer = make_trainer(settings, plan, strategy, [make_schedule(settings)])
        trainer.fit(LanguageModel(settings, config, files), TextData(settings, plan, files))
        return float(trainer.callback_metrics["val_bits_per_byte"])


def verdict(losses: list[float], exact: list[float]) -> tuple[float, bool]:
    """Compares a hook's runs with the exact ones.

    Args:
        losses: of the hook, at least one.
        exact: of exact runs with different seeds, at least two.

    Returns:
        How many of the exact runs' standard deviations the hook's mean lies above theirs, and whether that is noise.
    """
    above = (statistics.mean(losses) - statistics.mean(exact)) / statistics.stdev(exact)
    return above, above <= NUM_DEVIATIONS


def read_hook(text: str) -> tuple[str, dict[str, Any]]:
    """Reads ``"name option=value ..."``; values are JSON."""
    name, *options = text.split()
    given = dict(OPTIONS.get(name, {}))
    for option in options:
        key, _, value = option.partition("=")
        given[key] = json.loads(value)
    return text, {"name": name, **given}


def main() -> None:
    """Trains, prints a line for each hook as it comes, and fails if one is not within the noise."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.losses", description=__doc__)
    parser.add_argument("hooks", nargs="*", help="names, with options as 'name option=value'; default: all lossy ones")
    parser.add_argument("--seeds", type=int, default=8, help="exact runs")
    parser.add_argument("--lossy-seeds", type=int, default=1, help="runs of each hook, with the first of these seeds")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--settings", nargs="*", default=[], metavar="A.B=C", help="of the recipe, over the small ones")
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error("a spread needs --seeds of at least 2")
    print("  ".join(f"{name}={value}" for name, value in machine(WORLD_SIZE).items()))

    with tempfile.TemporaryDirectory() as cache:

        def losses(hook: dict[str, Any] | None, num_seeds: int) -> tuple[list[float], float]:
            begin = time.perf_counter()
            runs = [
                run_ranks(
                    train,
                    WORLD_SIZE,
                    init=False,
                    timeout_s=1800,
                    hook=hook,
                    seed=seed,
                    num_steps=arguments.steps,
                    cache=cache,
                    overrides=arguments.settings,
                )[0]
                for seed in range(num_seeds)
            ]
            return runs, (time.perf_counter() - begin) / num_seeds

        exact, elapsed_s = losses(None, arguments.seeds)
        deviation = statistics.stdev(exact)
        print(
            f"{arguments.steps} steps, held-out bits per byte of {len(exact)} exact runs: "
            f"{', '.join(f'{loss:.4f}' for loss in exact)}; mean {statistics.mean(exact):.4f}, "
            f"standard deviation {deviation:.4f}, {elapsed_s:.0f} s each",
            flush=True,
        )
        all_passed = True
        for text, hook in map(read_hook, arguments.hooks or lossy_hooks()):
            found, elapsed_s = losses(hook, arguments.lossy_seeds)
            above, passed = verdict(found, exact)
            all_passed &= passed
            words = "within the noise" if passed else "NOT within the noise"
            print(
                f"  {text:<40}{statistics.mean(found):.4f}  {above:+6.1f} standard deviations  "
                f"{words}  ({elapsed_s:.0f} s)",
                flush=True,
            )
    if not all_passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
