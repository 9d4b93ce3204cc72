"""The shell around both scripts: command line and messages, checkpoints, loaders, the common options of the Trainer."""

import contextlib
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, ListConfig, OmegaConf
from plan import Plan, process_layout
from progress import StepBar, write_above
from saving import SaveCheckpoints, saved_steps
from settings import Limits, SettingsError

from ddp_plugin import AutoResume, default_callbacks
from ddp_plugin.errors import explain

__all__ = [
    "CHECKPOINT_LIMITS",
    "checkpoint_folder",
    "checkpoint_to_load",
    "describe_output",
    "facts_of",
    "loader_options",
    "make_saving",
    "mistakes_of_settings",
    "refuse_other_run",
    "run",
    "say",
    "say_if_finished",
    "trainer_options",
    "tuning_options",
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
    for name in ("lightning.pytorch", "ddp_plugin", "py.warnings"):
        logging.getLogger(name).handlers = [_AboveTheBar()]
    try:
        main(sys.argv[1:])
    except SettingsError as mistake:
        # What is found once all processes run, all of them find.
        sys.exit(f"error: {mistake}" if _speaks() else 1)


def _speaks() -> bool:
    """Whether this is rank 0, as far as a process can know before the others are there."""
    return not getattr(rank_zero_only, "rank", 0)


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


def checkpoint_folder(settings: DictConfig) -> Path:
    """Returns where a run's checkpoints are, however often it is started."""
    return Path(settings.output_dir) / "checkpoints"


def checkpoint_to_load(settings: DictConfig, facts: Mapping[str, Any], num_steps: int, length: str) -> Path | None:
    """Returns the checkpoint that ``resume=`` names; ``None`` for a new run and for ``auto``, which looks later.

    With ``auto`` rank 0 looks for all, once they have found each other: see :class:`ddp_plugin.AutoResume`. A path is
    looked at here, by rank 0 alone, so that a mistake is told before anything is started.

    Args:
        settings: the recipe's settings.
        facts: what has to be equal in that run and in this one.
        num_steps: optimizer steps of the whole run.
        length: name of the setting that makes a run longer.

    Raises:
        SettingsError: there is none, it is unreadable, it belongs to another run, or it has no step left to do.
    """
    wanted = settings.resume
    if wanted != "auto" and _speaks() and int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
        refuse_requeued(Path(settings.output_dir))
    if wanted is None or wanted == "auto":
        return None
    if not isinstance(wanted, str) or not wanted:
        raise SettingsError(
            explain("resume= to be auto, the path of a checkpoint, or null", repr(wanted), "Write resume=auto")
        )
    path = Path(wanted)
    if not _speaks():
        return path
    if not path.is_file():
        raise SettingsError(explain("resume= to name a checkpoint", f"{path}, which is no file", "Correct it"))
    try:
        found = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        step = int(found["global_step"])
    except Exception as error:  # a file that is no checkpoint can fail with nearly any exception
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingsError(explain(f"a checkpoint of Lightning's in {path}", first_line, "Correct resume=")) from error
    refuse_other_run(found, facts)
    if step >= num_steps:
        raise SettingsError(
            explain(
                "a run longer than its checkpoint",
                f"{num_steps} steps and a checkpoint at {step}",
                f"Raise {length}, or leave resume out",
            )
        )
    return path


def refuse_requeued(folder: Path) -> None:
    """Refuses a folder with a checkpoint of a SLURM job that went back into the queue: Lightning would go on from it.

    Raises:
        SettingsError: naming the checkpoint.
    """
    if found := sorted(folder.glob("hpc_ckpt_*.ckpt")):
        raise SettingsError(
            explain(
                "an output_dir in which no job waits to go on",
                str(found[-1]),
                "Write resume=auto to go on with it, or another output_dir for a new run",
            )
        )


def refuse_other_run(checkpoint: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Refuses to continue a run whose settings were others; on all ranks, which have loaded the same file.

    Args:
        checkpoint: what was loaded; a module keeps its run's facts as the hyperparameter ``run``.
        facts: this run's, by the name of the setting.

    Raises:
        SettingsError: naming each setting with both values, this run's second.
    """
    saved = checkpoint.get("hyper_parameters", {}).get("run")
    if not isinstance(saved, Mapping):
        raise SettingsError(
            explain("a checkpoint of this recipe", "one without a run's settings", "Give another one, or resume=null")
        )
    absent = "nothing"
    names = [name for name in {**saved, **facts} if saved.get(name, absent) != facts.get(name, absent)]
    if names:
        differences = "; ".join(
            f"{name} {saved.get(name, absent)} there, {facts.get(name, absent)} here" for name in names
        )
        hint = "Give that run's settings, or resume=null and another output_dir for a new run"
        if SAMPLES_PER_STEP in names:
            hint += (
                f"; trainer.global_batch_size={saved.get(SAMPLES_PER_STEP)} keeps the steps on any number of processes"
            )
        raise SettingsError(explain("a checkpoint of a run with these settings", differences, hint))


SAMPLES_PER_STEP = "samples per optimizer step"
"""Name of the fact that stays when processes, micro-batches and their size change and their product does not."""


def facts_of(settings: DictConfig, plan: Plan, sections: Sequence[str]) -> dict[str, Any]:
    """Returns what decides a run's numbers, by the name of the setting: what must be equal when it is continued.

    Args:
        settings: the recipe's settings.
        plan: for the precision and the samples of a step, which are resolved there.
        sections: settings, or sections of settings, that count with all that they hold.
    """
    facts: dict[str, Any] = {}
    for section in sections:
        value = OmegaConf.select(settings, section)
        if isinstance(value, DictConfig):
            facts |= facts_of(settings, plan, [f"{section}.{key!s}" for key in value])
        else:
            facts[section] = OmegaConf.to_container(value) if isinstance(value, ListConfig) else value
    return facts | {"trainer.precision": plan.precision, SAMPLES_PER_STEP: plan.batch.total}


def make_saving(settings: DictConfig, every_steps: int | None, at_epoch_end: bool = False) -> list[Callback]:
    """Returns what saves checkpoints, and what finds the newest one where ``resume=auto``.

    Args:
        settings: the recipe's settings.
        every_steps: steps between two checkpoints where the settings say nothing.
        at_epoch_end: whether each epoch's end is saved where the settings say nothing.

    Raises:
        ValueError: settings that cannot be.
    """
    chosen, folder = settings.checkpoint, checkpoint_folder(settings)
    if (chosen.every_steps, chosen.every_minutes) != (None, None):
        every_steps, at_epoch_end = chosen.every_steps, False
    saving = SaveCheckpoints(folder, every_steps, chosen.every_minutes, at_epoch_end, chosen.keep)
    return [saving, AutoResume(str(folder))] if settings.resume == "auto" else [saving]


CHECKPOINT_LIMITS: Limits = {
    "checkpoint.every_steps": (1, math.inf),
    "checkpoint.every_minutes": (0.001, math.inf),
    "checkpoint.keep": (1, math.inf),
}
"""Of the numbers in the section ``checkpoint``."""


def describe_output(settings: DictConfig) -> tuple[str, str]:
    """Returns the plan's row that says where results go, and what becomes of a run that is there."""
    text = str(settings.output_dir)
    if settings.resume == "auto":
        text += ", continued from its newest complete checkpoint if it has one"
    elif settings.resume is not None:
        text += f", continued from {settings.resume}"
    elif saved_steps(checkpoint_folder(settings)):
        text += ", whose checkpoints will be moved aside (resume=auto continues them)"
    if settings.resume != "auto" and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        text += "; without resume=auto a restart by torchrun does not continue what was done"
    return "output", text


def say_if_finished(trainer: pl.Trainer) -> None:
    """Says so where a run that was continued had nothing left to do."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, AutoResume) and callback.step == trainer.global_step:
            say(f"The run is finished: its newest checkpoint is that of its last step, {callback.step:,}.")


# ------------------------------------------------------------------------------------------------ loaders and Trainer


def loader_options(settings: DictConfig) -> dict[str, Any]:
    """Returns how a ``DataLoader`` fetches: its workers live as long as the run, and memory is pinned for a GPU."""
    num_workers = settings.data.num_workers
    return {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": settings.trainer.accelerator != "cpu" and torch.cuda.is_available(),
    }


def tuning_options(settings: DictConfig, plan: Plan) -> dict[str, Any]:
    """Returns the arguments of :func:`ddp_plugin.tune` that both recipes share.

    Raises:
        SettingsError: the model is to be compiled.
    """
    if settings.compile:
        raise SettingsError(
            explain("compile=false", "true, and each of many trial runs would compile the model", "Tune without it")
        )
    options = trainer_options(settings, plan, [])
    names = ("accelerator", "devices", "num_nodes", "precision", "accumulate_grad_batches")
    return {name: options[name] for name in names} | {
        "strategy": settings.strategy,
        "keep_workers": True,  # as loader_options has it
    }


def trainer_options(settings: DictConfig, plan: Plan, callbacks: list[Callback]) -> dict[str, Any]:
    """Returns the arguments of a Trainer that both recipes share; the log is a CSV file in ``output_dir``."""
    chosen = settings.trainer
    devices, num_nodes = process_layout(chosen.accelerator, chosen.devices, chosen.num_nodes)
    if torch.distributed.is_torchelastic_launched() and devices * num_nodes != int(os.environ["WORLD_SIZE"]):
        raise SettingsError(
            explain(
                f"the {os.environ['WORLD_SIZE']} processes that torchrun has started",
                f"trainer.devices={chosen.devices} and trainer.num_nodes={chosen.num_nodes}",
                "Write trainer.devices=-1 trainer.num_nodes=-1 for as many as there are",
            )
        )
    bar = [StepBar(plan.num_steps, chosen.log_every)] if chosen.progress_bar else []
    return {
        "accelerator": chosen.accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
        "precision": plan.precision,
        "accumulate_grad_batches": plan.batch.num_accumulated,
        "callbacks": [*default_callbacks(), *callbacks, *bar],
        "num_sanity_val_steps": 0,
        "log_every_n_steps": chosen.log_every,
        # Each start of a run writes the steps it makes to a version_N of its own; a killed one has written its lines.
        "logger": CSVLogger(settings.output_dir, name="logs", flush_logs_every_n_steps=chosen.log_every),
        "default_root_dir": settings.output_dir,  # where SLURM's checkpoint lies until the job runs again
        "enable_progress_bar": chosen.progress_bar,
        "enable_model_summary": False,
    }
