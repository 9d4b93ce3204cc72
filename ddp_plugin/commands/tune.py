"""``ddp-plugin tune``: settings chosen by short runs of your own training, written for whoever reads them."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_only
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from ddp_plugin.errors import DDPPluginError, check_count, explain
from ddp_plugin.tuning import tune
from ddp_plugin.tuning.choice import MIN_ROUNDS
from ddp_plugin.tuning.interrupting import INTERRUPTED_STATUS
from ddp_plugin.tuning.layouts import LAYOUTS
from ddp_plugin.tuning.sources import from_classes, from_lightning_config, from_recipe
from ddp_plugin.tuning.tuner import MIN_WARMUP_STEPS

__all__ = ["HELP", "add_arguments", "run"]

HELP = "choose bucket size, hook and data workers by short runs of your own training"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    source = parser.add_argument_group("what is trained: --config, --recipe or --model")
    source.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML of LightningCLI with model, data and trainer; with --model and --data if it is for one that has "
        "classes of its own, LightningCLI(Model, Data)",
    )
    source.add_argument("--recipe", type=Path, metavar="FILE", help="a recipe, such as recipes/llm.py")
    source.add_argument("--model", metavar="PACKAGE.MODULE:NAME", help="a LightningModule; alone: without arguments")
    source.add_argument("--data", metavar="PACKAGE.MODULE:NAME", help="with --model: its LightningDataModule")
    source.add_argument(
        "settings",
        nargs="*",
        metavar="KEY=VALUE",
        help="with --recipe its own settings, such as trainer.devices=4; else arguments of the Trainer, such as "
        "devices=4 accelerator=cpu",
    )
    competing = parser.add_argument_group("what competes; lists are separated by commas")
    competing.add_argument(
        "--bucket-caps-mb",
        type=_sizes,
        default="default,1,5,25,50,100",
        metavar="LIST",
        help="bucket sizes in MiB; 'default': torch's own; 'none': do not try any (default: default,1,5,25,50,100)",
    )
    competing.add_argument("--static-graph", action="store_true", help="try static_graph=True, a promise: see its docs")
    competing.add_argument("--gradient-as-bucket-view", action="store_true", help="try that too: it saves memory")
    competing.add_argument(
        "--hooks", type=_names, default="", metavar="LIST", help="allow these hooks, most of which change the numbers"
    )
    competing.add_argument(
        "--num-workers",
        type=_workers,
        default="auto",
        metavar="LIST",
        help="data workers of each rank; 'auto': as many as this machine can have; 'none': leave the loaders alone "
        "(default: auto)",
    )
    length = parser.add_argument_group("how long")
    length.add_argument(
        "--num-steps", type=int, default=20, metavar="N", help="steps of a measurement, 1 or more (default 20)"
    )
    length.add_argument(
        "--num-warmup-steps",
        type=int,
        default=5,
        metavar="N",
        help=f"steps before, {MIN_WARMUP_STEPS} or more (default 5)",
    )
    length.add_argument(
        "--num-rounds", type=int, default=7, metavar="N", help=f"measurements of each, {MIN_ROUNDS} or more (default 7)"
    )
    written = parser.add_argument_group("what is written")
    written.add_argument("--output", type=Path, metavar="FILE", help="a YAML file; else it is printed")
    written.add_argument(
        "--format",
        choices=LAYOUTS,
        help="'recipe': a variant of its configuration; 'lightning': for LightningCLI, on top of another --config "
        "('lightning_fixed': for LightningCLI(Model, Data)); 'strategy': for CustomDDPStrategy.from_config (default: "
        "that of the source; strategy with --model alone)",
    )
    written.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def run(chosen: argparse.Namespace) -> int:
    """Measures, prints the tables on rank 0, and writes or prints the settings.

    Returns:
        0; 2 where the Trainer refuses its arguments, or ranks could not measure together, which is said in words; 130
        where it was interrupted.

    Raises:
        ValueError: what a person can correct, in words.
        Exception: whatever the training raises with the settings that were given.

    Collectives:
        Those of :func:`ddp_plugin.tune`.
    """
    for name, least in (("num_steps", 1), ("num_warmup_steps", MIN_WARMUP_STEPS), ("num_rounds", MIN_ROUNDS)):
        check_count(f"--{name.replace('_', '-')}", getattr(chosen, name), least)
    arguments = _training(chosen)
    layout = chosen.format or _layout_of_source(chosen)
    try:
        tuning = tune(
            **arguments,
            bucket_caps_mb=chosen.bucket_caps_mb,
            comm_hooks=chosen.hooks,
            static_graph=[True] if chosen.static_graph else [],
            gradient_as_bucket_view=[True] if chosen.gradient_as_bucket_view else [],
            num_workers=chosen.num_workers,
            num_steps=chosen.num_steps,
            num_warmup_steps=chosen.num_warmup_steps,
            num_rounds=chosen.num_rounds,
            path=chosen.output,
            layout=layout,
            overwrite=chosen.overwrite,
        )
    except (DDPPluginError, MisconfigurationException) as failure:
        print(f"ddp-plugin tune: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if getattr(rank_zero_only, "rank", 0) == 0:
            print("\nddp-plugin tune: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED_STATUS
    if getattr(rank_zero_only, "rank", 0) == 0:
        if chosen.output is None:
            print(tuning.to_yaml(layout=layout), end="")
        else:
            print(f"{tuning}\nWritten: {chosen.output}")
    return 0


def _layout_of_source(chosen: argparse.Namespace) -> str:
    if chosen.config is not None:
        return "lightning" if chosen.data is None else "lightning_fixed"
    return "strategy" if chosen.recipe is None else "recipe"


def _training(chosen: argparse.Namespace) -> dict[str, Any]:
    others = [name for name in ("config", "model", "data") if getattr(chosen, name) is not None]
    if (chosen.recipe is None) == (not others):
        got = "nothing" if not others else f"--recipe and --{others[0]}"
        raise ValueError(explain("--config, --recipe or --model", got, "Give one of them"))
    if chosen.data is not None and chosen.model is None:
        raise ValueError(explain("--data beside --model", "--data alone", "Give --model too, or leave --data out"))
    if chosen.recipe is not None:
        return from_recipe(chosen.recipe, chosen.settings)
    trainer_settings = dict(_key_and_value(text) for text in chosen.settings)
    if chosen.config is not None:
        return from_lightning_config(chosen.config, trainer_settings, chosen.model, chosen.data)
    return from_classes(chosen.model, chosen.data, trainer_settings)


def _key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(explain("arguments of the Trainer as KEY=VALUE", repr(text), "Write devices=2, for instance"))
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([text]))[key]  # type: ignore[index,call-overload]
    except Exception as error:  # YAML of any kind of malformation
        raise ValueError(explain(f"a YAML value for {key}", repr(value), "Quote it if it is text")) from error


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _sizes(text: str) -> list[float | None]:
    try:
        sizes = [None if name == "default" else float(name) for name in _names(text) if name != "none"]
        if all(size is None or 0 < size < math.inf for size in sizes):
            return sizes
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(explain("sizes in MiB above 0, such as default,1,25", repr(text), "Correct it"))


def _workers(text: str) -> list[int] | str:
    if text == "auto":
        return text
    try:
        counts = [int(name) for name in _names(text) if name != "none"]
        if min(counts, default=0) >= 0:
            return counts
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(explain("whole numbers from 0 on, such as 0,2,4", repr(text), "Correct it"))
