"""Links by name, for a plan that is made before anything could be measured."""

import json
from pathlib import Path
from typing import Any

from ddp_plugin.collectives.cost import SEEDS, Link
from ddp_plugin.errors import explain

__all__ = ["LINKS", "find_link", "read_link", "write_link"]


def _ethernet(mbit_per_s: float, latency_s: float = 50e-6) -> Link:
    return Link(alpha_s=latency_s, beta_s_per_byte=8 / (mbit_per_s * 1e6))


LINKS: dict[str, Link] = {
    **SEEDS,
    "ethernet_100g": _ethernet(100_000, 10e-6),
    "ethernet_25g": _ethernet(25_000, 20e-6),
    "ethernet_10g": _ethernet(10_000),
    "ethernet_1g": _ethernet(1_000),
    "ethernet_100m": _ethernet(100),
    "internet_20m": _ethernet(20, 10e-3),
}
"""Starting points: see :data:`~ddp_plugin.collectives.cost.SEEDS` for those of GPUs; the others are the nominal rate of
the wire with a latency of the usual size, which no protocol reaches. Measure yours."""


def find_link(name: str) -> Link:
    """Returns a link by its name in :data:`LINKS`, or out of a file that :func:`write_link` wrote.

    Raises:
        ValueError: neither.
    """
    if name in LINKS:
        return LINKS[name]
    if Path(name).is_file():
        return read_link(Path(name))
    raise ValueError(
        explain(
            f"a link out of {sorted(LINKS)}, or a file with a measured one",
            repr(name),
            "Choose a name, or measure: ddp-plugin doctor --save-link link.json",
        )
    )


def write_link(path: Path, link: Link, note: str) -> None:
    """Writes a measured link as JSON, with a note on where and how it was measured."""
    fields: dict[str, Any] = {
        "alpha_s": link.alpha_s,
        "beta_s_per_byte": link.beta_s_per_byte,
        "gamma_s_per_byte": link.gamma_s_per_byte,
        "medium": link.medium,
        "note": note,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields, indent=2) + "\n")


def read_link(path: Path) -> Link:
    """Reads what :func:`write_link` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        fields = json.loads(path.read_text())
        fields.pop("note", None)
        return Link(**fields)
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            explain(
                "a link's file, with alpha_s, beta_s_per_byte, gamma_s_per_byte and medium",
                f"{path}, which is none ({error})",
                "Write one by ddp-plugin doctor --save-link FILE",
            )
        ) from error
