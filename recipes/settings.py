"""Settings of a recipe: one YAML file that lists every key, a variant file over it, the command line over both.

``python recipes/llm.py config=a100_8x trainer.num_nodes=4`` reads ``conf/llm.yaml``, then ``conf/llm_a100_8x.yaml``,
then the overrides. The first file is the law: a key it does not list is refused, and so is a value of another type.
"""

import difflib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddp_plugin import StrategyConfig
from ddp_plugin.errors import explain

__all__ = ["CONF", "Limits", "SettingsError", "check_limits", "load_settings"]

CONF = Path(__file__).resolve().parent / "conf"

Limits = Mapping[str, tuple[float, float]]
"""Smallest and largest value by key; where the smallest is an integer, the value has to be one."""


class SettingsError(ValueError):
    """A mistake in what the user asked for, found before anything was started; scripts print it without a traceback."""


def load_settings(recipe: str, argv: list[str], folder: Path = CONF) -> DictConfig:
    """Merges ``conf/<recipe>.yaml``, the variant of ``config=<variant>`` and the overrides ``a.b=c``.

    The section ``strategy`` takes every field of :class:`ddp_plugin.StrategyConfig`, listed in the file or not.

    Args:
        recipe: name of the recipe, such as ``"llm"``.
        argv: command line without the program's name; ``--help`` prints the file with all keys and leaves.
        folder: where the YAML files are.

    Returns:
        All settings; keys that do not exist raise on access too.

    Raises:
        SettingsError: an argument that is no override, an unknown variant or key, a value of another type.

    Collectives:
        None.
    """
    base_path = folder / f"{recipe}.yaml"
    if {"-h", "--help"} & set(argv):
        print(f"Any of these settings can be given as a.b=c. Variants: {', '.join(_variants(recipe, folder))}.\n")
        print(base_path.read_text())
        sys.exit(0)
    overrides = [_split(argument) for argument in argv]
    base = _merge(
        OmegaConf.create({"strategy": OmegaConf.structured(StrategyConfig)}), OmegaConf.load(base_path), recipe
    )
    OmegaConf.set_struct(base, True)
    settings = base
    for key, name in overrides:
        if key == "config":
            source = f"conf/{recipe}_{name}.yaml"
            settings = _changed(settings, base, _variant(recipe, name, folder), source)
    for key, text in overrides:
        if key != "config":
            settings = _changed(settings, base, _dotted(key, text), f"{key}={text}")
    return settings


def check_limits(settings: DictConfig, limits: Limits) -> None:
    """Refuses numbers that would only be refused, or misunderstood, once a run has started; ``null`` passes.

    Raises:
        SettingsError: a value that is no number, not finite, or outside its limits.

    Collectives:
        None.
    """
    for key, (lowest, highest) in limits.items():
        value = OmegaConf.select(settings, key)
        if value is None:
            continue
        kind = int if isinstance(lowest, int) else (int, float)
        is_number = isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)
        if is_number and lowest <= value <= highest:
            continue
        noun = "an integer" if kind is int else "a number"
        bounds = f"at least {lowest}" if highest == math.inf else f"between {lowest} and {highest}"
        raise SettingsError(
            explain(f"{key} to be {bounds if is_number else f'{noun}, {bounds}'}", repr(value), "Correct the value")
        )


def _split(argument: str) -> tuple[str, str]:
    key, equals, text = argument.partition("=")
    if not equals or not key or key.startswith("-"):
        hint = f"Write {key.lstrip('-')}={text or '...'}" if key.lstrip("-") else "Write a.b=c"
        raise SettingsError(explain("arguments of the form a.b=c", repr(argument), hint))
    return key, text


def _dotted(key: str, text: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([f"{key}={text}"])
    except Exception as error:  # YAML of any kind of malformation
        raise SettingsError(explain(f"a YAML value for {key}", repr(text), "Quote it if it is text")) from error


def _variants(recipe: str, folder: Path) -> list[str]:
    return sorted(path.stem.removeprefix(f"{recipe}_") for path in folder.glob(f"{recipe}_*.yaml"))


def _variant(recipe: str, name: str, folder: Path) -> DictConfig:
    known = _variants(recipe, folder)
    if name not in known:
        raise SettingsError(explain(f"config= to be one of {known}", repr(name), _did_you_mean(name, known)))
    loaded = OmegaConf.load(folder / f"{recipe}_{name}.yaml")
    assert isinstance(loaded, DictConfig)
    return loaded


def _changed(settings: DictConfig, base: DictConfig, change: DictConfig, source: str) -> DictConfig:
    _check(base, change, source)
    return _merge(settings, change, source)


def _merge(settings: DictConfig, change: Any, source: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(settings, change)
    except OmegaConfBaseException as error:  # the strategy's section, which OmegaConf checks by its own types
        first_line = str(error).splitlines()[0]
        raise SettingsError(explain(f"{source} to fit the settings", first_line, "Correct it")) from error
    assert isinstance(merged, DictConfig)
    return merged


def _check(base: DictConfig, change: DictConfig, source: str, prefix: str = "") -> None:
    """Refuses keys that the base does not have and values that are not of the base's type."""
    for key, value in _items(change):
        known = [str(name) for name in base]
        path = f"{prefix}{key}"
        if key not in known:
            section = prefix.rstrip(".") or "the settings"
            raise SettingsError(
                explain(f"a key of {section} in {source}: {known}", repr(path), _did_you_mean(str(key), known))
            )
        old = None if OmegaConf.is_missing(base, key) else base[key]
        if isinstance(old, DictConfig) and isinstance(value, DictConfig):
            _check(old, value, source, f"{path}.")
        elif not _fits(old, value) and not prefix.startswith("strategy."):
            wanted = "a section" if isinstance(old, DictConfig) else f"a value like {old!r} ({type(old).__name__})"
            raise SettingsError(explain(f"{path} to be {wanted}", f"{value!r} in {source}", "Correct the value"))


def _items(config: DictConfig) -> Iterator[tuple[Any, Any]]:
    yield from config.items_ex(resolve=False)


def _fits(old: Any, new: Any) -> bool:
    if old is None:
        return True  # the base says nothing about the type
    if isinstance(old, bool) or isinstance(new, bool):
        return isinstance(old, bool) and isinstance(new, bool)
    if isinstance(old, float):
        return isinstance(new, (int, float))
    if isinstance(old, (DictConfig, ListConfig)):
        return type(new) is type(old)
    return isinstance(new, type(old))


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else "Run with --help to see every key"
