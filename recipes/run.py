"""The shell around both scripts: command line and messages, checkpoints, loaders, the common options of the Trainer."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from plan import Plan
from progress import StepBar, write_above
from settings import SettingsError

from ddp_plugin import default_callbacks
from ddp_plugin.errors import explain

__all__ = [
    "describe_output",
    "find_checkpoint",
    "last_checkpoint",
    "loader_options",
    "mistakes_of_settings",
    "run",
    "say",
    "trainer_options",
]

say = rank_zero_only(print)

# Libraries that speak of themselves and not of the run. Everything else they say is shown.
_NOISE = (
    r".*isinstance\(treespec, LeafSpec\).* is deprecated",  # Lightning's use of torch, for Lightning to change
    r".*LeafSpec.* is deprecated",  # the same in another version's words
    r"Checkpoint directory .* exists and is not empty",  # describe_output says what that means here
    r".*does not have many workers",  # data.num_workers says how many, and why
)
_ADVERTS = ("\N{ELECTRIC LIGHT BULB} Tip:", "TPU available: False")


def run(main: Callable[[list[str]], None]) -> None:
    """Calls a recipe with the command line; a mistake in the settings ends it with one line and no traceback."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message)
    logging.captureWarnings(True)
    for name in ("lightning.pytorch", "py.warnings"):
        logging.getLogger(name).handlers = [_AboveTheBar()]
    try:
        main(sys.argv[1:])
    except SettingsError as mistake:
        sys.exit(f"error: {mistake}")


class _AboveTheBar(logging.Handler):
    """Writes to the standard error without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        message = self.format(record)
        if not message.startswith(_ADVERTS):
            write_above(message.rstrip("\n"))


@contextlib.contextmanager
def mistakes_of_settings() -> Iterator[None]:
    """Shows what a constructor refuses, or a package that is missing, as what it is here: a mistake in the settings."""
    try:
        yield
    except (ImportError, TypeError, ValueError) as error:
        raise SettingsError(str(error)) from error


# ------------------------------------------------------------------------------------------------------- checkpoints


def last_checkpoint(settings: DictConfig) -> Path:
    """Returns where the newest checkpoint of a run is written."""
    return Path(settings.output_dir) / "checkpoints" / "last.ckpt"


def find_checkpoint(settings: DictConfig, model: Any, num_steps: int, length: str) -> Path | None:
    """Returns the checkpoint to continue from, or ``None`` for a new run.

    Args:
        settings: the recipe's settings.
        model: what the module saved as the hyperparameter ``model``, and what has to be equal.
        num_steps: optimizer steps of the whole run.
        length: name of the setting that makes a run longer.

    Raises:
        SettingsError: there is none, it is unreadable, it belongs to another model, or it has no step left to do.
    """
    if not settings.resume:
        return None
    path = last_checkpoint(settings) if settings.resume is True else Path(str(settings.resume))
    if not path.is_file():
        raise SettingsError(explain("resume= to name a checkpoint", f"{path}, which is no file", "Correct it"))
    try:
        found = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        step = int(found["global_step"])
    except Exception as error:  # a file that is no checkpoint can fail with nearly any exception
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(explain(f"a checkpoint of Lightning's in {path}", first_line, "Correct resume=")) from error
    saved = found.get("hyper_parameters", {}).get("model")
    if saved != model:
        raise SettingsError(explain(f"a checkpoint of the model {model}", f"{saved}", "Give that run's settings"))
    if step >= num_steps:
        raise SettingsError(
            explain(
                "a run longer than its checkpoint",
                f"{num_steps} steps and a checkpoint at {step}",
                f"Raise {length}, or leave resume out",
            )
        )
    return path


def describe_output(settings: DictConfig) -> tuple[str, str]:
    """Returns the plan's row that says where results go, and what becomes of a run that is there."""
    text = str(settings.output_dir)
    if settings.resume:
        text += ", continued from its checkpoint" if settings.resume is True else f", continued from {settings.resume}"
    elif last_checkpoint(settings).exists():
        text += ", whose checkpoints will be replaced (resume=true continues them)"
    return "output", text


# ------------------------------------------------------------------------------------------------ loaders and Trainer


def loader_options(settings: DictConfig) -> dict[str, Any]:
    """Returns how a ``DataLoader`` fetches: its workers live as long as the run, and memory is pinned for a GPU."""
    num_workers = settings.data.num_workers
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": settings.trainer.accelerator != "cpu" and torch.cuda.is_available(),
    }


def trainer_options(settings: DictConfig, plan: Plan, callbacks: list[Callback]) -> dict[str, Any]:
    """Returns the arguments of a Trainer that both recipes share; the log is a CSV file in ``output_dir``."""
    chosen = settings.trainer
    bar = [StepBar(plan.num_steps, chosen.log_every)] if chosen.progress_bar else []
    return {
        "accelerator": chosen.accelerator,
        "devices": chosen.devices,
        "num_nodes": chosen.num_nodes,
        "precision": plan.precision,
        "accumulate_grad_batches": plan.batch.num_accumulated,
        "callbacks": [*default_callbacks(), *callbacks, *bar],
        "num_sanity_val_steps": 0,
        "log_every_n_steps": chosen.log_every,
        "logger": CSVLogger(settings.output_dir, name="logs"),
        "enable_progress_bar": chosen.progress_bar,
        "enable_model_summary": False,
    }
