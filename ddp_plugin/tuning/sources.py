"""What to tune, found by name: in a configuration of LightningCLI, in a recipe, or as two classes.

Each function returns arguments of :func:`ddp_plugin.tune`; none starts a process.
"""

import inspect
import warnings
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import OmegaConf

from ddp_plugin.callbacks import ConvertSyncBatchNorm, GlobalMeanLoss, PerRankSeed, SamplerEpoch
from ddp_plugin.config import StrategyConfig
from ddp_plugin.errors import explain
from ddp_plugin.scripts import ask_script, build_by_name, class_by_name, make_importable
from ddp_plugin.tuning.trials import SET_BY_TRIALS

__all__ = ["from_classes", "from_lightning_config", "from_recipe", "strategy_settings"]

_STEP_CALLBACKS = (ConvertSyncBatchNorm, GlobalMeanLoss, PerRankSeed, SamplerEpoch)  # what a step consists of
_OF_RUNNING = ("ckpt_path", "weights_only", "verbose")  # of ``fit``, which a saved configuration holds as well


def from_classes(model: str, data: str | None, trainer_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a module and a datamodule from their import paths.

    Args:
        model: ``"package.module:Class"``, or a function, without required arguments, that gives a LightningModule.
        data: the same for a LightningDataModule; ``None`` where the module brings its loader.
        trainer_settings: arguments of the Trainer.

    Raises:
        ValueError: there is none, or what it gives is something else.

    Collectives:
        None.
    """
    _check_trainer(trainer_settings)
    found: dict[str, Any] = {"model": build_by_name("--model", model, pl.LightningModule)}
    if data is not None:
        found["datamodule"] = build_by_name("--data", data, pl.LightningDataModule)
    return found | dict(trainer_settings)


def from_recipe(path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Asks a recipe, by its function ``for_tuning``, with settings as on its own command line.

    Args:
        path: the recipe's file; what lies beside it can be imported by it, as when it runs.
        arguments: ``a.b=c``, each.

    Raises:
        ValueError: no such file, one without the function, or what the recipe refuses.

    Collectives:
        None.
    """
    return ask_script(path, "for_tuning", arguments, dict)


def from_lightning_config(
    path: Path, trainer_settings: Mapping[str, Any], model: str | None = None, data: str | None = None
) -> dict[str, Any]:
    """Builds what a configuration of LightningCLI describes.

    What trial runs set themselves is passed over: loggers, limits, lengths, checkpoints. Of the callbacks those stay
    that belong to a training step: ``GlobalMeanLoss``, ``ConvertSyncBatchNorm``, ``SamplerEpoch`` and ``PerRankSeed``.

    Args:
        path: the YAML file.
        trainer_settings: arguments of the Trainer that take the place of the file's.
        model: ``"package.module:Class"`` for a file of a ``LightningCLI(Class)``; ``None`` where the file has a
            ``class_path``.
        data: the same for the datamodule.

    Raises:
        ValueError: no such file or class, what the parser refuses, or a strategy that is no DistributedDataParallel.
        ModuleNotFoundError: jsonargparse is not installed.

    Collectives:
        None.
    """
    _check_trainer(trainer_settings)
    if not path.is_file():
        raise ValueError(explain("--config to be a file", f"{path}, which is none", "Correct the path"))
    try:
        given = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # YAML of any kind of malformation
        raise ValueError(explain(f"YAML in {path}", " ".join(str(error).split()), "Correct the file")) from error
    if not isinstance(given, dict) or not isinstance(given.get("trainer") or {}, dict):
        raise ValueError(explain("sections model, data and trainer", f"none in {path}", "Correct the file"))
    known = inspect.signature(pl.Trainer).parameters
    trainer = {str(key): value for key, value in (given.get("trainer") or {}).items()}
    if unknown := sorted(set(trainer) - set(known)):
        raise ValueError(explain(f"arguments of the Trainer in {path}", f"{unknown}", "Correct the file"))
    strategy = strategy_settings(trainer.pop("strategy", None))
    kept = {name: value for name, value in trainer.items() if name not in SET_BY_TRIALS}
    sections = {str(key): value for key, value in given.items() if key not in _OF_RUNNING}
    make_importable(Path.cwd())
    classes = {
        "model_class": None if model is None else class_by_name("--model", model, pl.LightningModule),
        "datamodule_class": None if data is None else class_by_name("--data", data, pl.LightningDataModule),
    }
    try:
        built_model, datamodule, built = _built_by_lightning({**sections, "trainer": kept}, classes)
    except ArgumentError as error:
        raise ValueError(
            explain(
                f"a configuration of LightningCLI in {path}",
                " ".join(str(error).split()),
                "Correct the file, or give --model and --data where it is for a LightningCLI(Model, Data)",
            )
        ) from error
    callbacks = built.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    settings = {name: built[name] for name in kept if name != "callbacks"} | dict(trainer_settings)
    found = {
        "model": built_model,
        "strategy": strategy,
        "callbacks": [callback for callback in callbacks if isinstance(callback, _STEP_CALLBACKS)],
    }
    return found | ({} if datamodule is None else {"datamodule": datamodule}) | settings


def _built_by_lightning(sections: Mapping[str, Any], classes: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Builds a configuration's module and datamodule, and what its Trainer's arguments name; but no Trainer."""
    from lightning.pytorch.cli import LightningCLI  # here, because its import changes settings of jsonargparse

    class Reading(LightningCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            return None  # trial runs make their own

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LightningCLI's args parameter")  # this command has a line of its own
        read = Reading(
            **classes,
            args=dict(sections),
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
            load_from_checkpoint_support=False,
            parser_kwargs={"exit_on_error": False},
        )
    return read.model, read.datamodule, read.config_init.get("trainer") or {}


def strategy_settings(given: Any) -> dict[str, Any]:
    """Returns fields of :class:`~ddp_plugin.StrategyConfig` for what a configuration says of the strategy.

    Args:
        given: a name that Lightning knows, a mapping with ``class_path`` and ``init_args``, or ``None``.

    Raises:
        ValueError: another strategy than DDP, or an argument that a trial run cannot be given.

    Collectives:
        None.
    """
    if given is None or given == "auto":
        return {}
    name, arguments, loose = given, None, {}
    if not isinstance(given, str):
        name, arguments, loose = (given.get(key) for key in ("class_path", "init_args", "dict_kwargs"))
        name, loose = name or "", loose or {}
    if isinstance(given, str) and given in StrategyRegistry:
        entry = StrategyRegistry[given]
        name, arguments = entry["strategy"].__name__, entry["init_params"]
    if name.rpartition(".")[2] not in ("CustomDDPStrategy", "DDPStrategy"):
        raise ValueError(
            explain("a strategy of DistributedDataParallel", repr(given), "Tune with ddp_plugin.CustomDDPStrategy")
        )
    settings = {str(key): value for key, value in {**(arguments or {}), **loose}.items() if value is not None}
    if "timeout" in settings:
        settings["timeout_s"] = _seconds(settings.pop("timeout"))
    if others := sorted(set(settings) - set(StrategyConfig.__dataclass_fields__)):
        raise ValueError(
            explain(
                f"arguments of the strategy among {sorted(StrategyConfig.__dataclass_fields__)}, and timeout",
                f"{others}, which trial runs cannot copy",
                "Leave them out for tuning",
            )
        )
    return settings


def _seconds(text: Any) -> float:
    """Returns the seconds of ``"h:m:s"`` or ``"d days, h:m:s"``, as jsonargparse writes a duration."""
    if isinstance(text, (int, float)):
        return float(text)  # YAML reads 1:30:00 without quotes as a number, of seconds
    days, _, clock = str(text).rpartition(", ")
    parts = clock.split(":")
    try:
        hours, minutes, seconds = (float(part) for part in parts)
        return 86400.0 * float(days.split()[0] if days else 0) + 3600.0 * hours + 60.0 * minutes + seconds
    except ValueError as error:
        raise ValueError(explain('timeout as "hours:minutes:seconds"', repr(text), "Correct it")) from error


def _check_trainer(given: Mapping[str, Any]) -> None:
    known = inspect.signature(pl.Trainer).parameters
    if unknown := [name for name in given if name not in known or name in ("strategy", "callbacks")]:
        raise ValueError(
            explain("arguments of the Trainer, such as devices=2 accelerator=cpu", f"{unknown}", "Correct the names")
        )
