"""Chosen settings, arranged for whoever reads them: the strategy, a recipe, or LightningCLI. Plain mappings only."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ddp_plugin.errors import explain

__all__ = ["LAYOUTS", "arranged", "check_layout"]

LAYOUTS = ("strategy", "recipe", "lightning", "lightning_fixed")
"""``"strategy"``: what ``CustomDDPStrategy.from_config`` takes. ``"recipe"``: a variant of a recipe's configuration.
``"lightning"``: a configuration that LightningCLI reads on top of another, with the data by ``class_path``;
``"lightning_fixed"``: the same for a ``LightningCLI(Model, Data)``, whose file names no class."""


def check_layout(layout: str, section: str | None = None) -> None:
    """Refuses a layout that does not exist, and a section of one that has its own.

    Raises:
        ValueError: it is none of :data:`LAYOUTS`, or none that goes into a section.
    """
    if section is not None and layout != "strategy":
        raise ValueError(explain("section or layout", f"{section!r} and {layout!r}", "Leave one of them out"))
    if layout not in LAYOUTS:
        raise ValueError(explain(f"layout to be one of {LAYOUTS}", repr(layout), "Choose one"))


def arranged(
    settings: Mapping[str, Any], num_workers: int | None, layout: str, data_class: str | None = None
) -> dict[str, Any]:
    """Returns settings as one reader wants them.

    Args:
        settings: fields of :class:`~ddp_plugin.StrategyConfig` with plain values.
        num_workers: data workers of each rank; ``None`` says nothing about them.
        layout: one of :data:`LAYOUTS`; ``"strategy"`` has no place for data workers.
        data_class: for LightningCLI, the import path of a datamodule whose constructor takes ``num_workers``; ``None``
            leaves them out.

    Raises:
        ValueError: an unknown layout.
    """
    check_layout(layout)
    if layout == "strategy":
        return dict(settings)
    if layout == "recipe":
        return {"strategy": dict(settings)} | ({} if num_workers is None else {"data": {"num_workers": num_workers}})
    arguments = dict(settings)
    if (timeout_s := arguments.pop("timeout_s", None)) is not None:
        arguments["timeout"] = str(timedelta(seconds=timeout_s))
    if isinstance(nccl := arguments.get("nccl"), Mapping):
        arguments["nccl"] = {name: value for name, value in nccl.items() if value is not None}
    strategy = {"class_path": "ddp_plugin.CustomDDPStrategy", "init_args": arguments}
    written: dict[str, Any] = {"trainer": {"strategy": strategy}}
    if num_workers is not None and data_class is not None:
        data = {"num_workers": num_workers}
        written["data"] = data if layout == "lightning_fixed" else {"class_path": data_class, "init_args": data}
    return written
