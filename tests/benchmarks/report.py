"""The table that a person reads, and the file that a program reads."""

import dataclasses
import json
import os
import platform
from pathlib import Path
from typing import Any

import lightning
import torch

from tests.benchmarks.timing import Row

__all__ = ["machine", "table", "write_json"]


def machine(world_size: int) -> dict[str, Any]:
    """Returns what a number means nothing without."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "world_size": world_size,
        "backend": "gloo",
        "threads_per_rank": 1,
    }


def table(facts: dict[str, Any], rows: list[Row]) -> str:
    """Lays the rows out, a heading for each section."""
    lines = ["  ".join(f"{name}={value}" for name, value in facts.items())]
    lines.append("ratios: median of paired rounds, smallest .. largest, ratio of the fastest rounds, median times")
    width = max(len(row.name) for row in rows) + 2
    previous = None
    for row in rows:
        if row.section != previous:
            lines += ["", row.section]
            previous = row.section
        lines.append(f"  {row.name:<{width}}{_numbers(row)}")
    return "\n".join(lines)


def _numbers(row: Row) -> str:
    if row.unit == "bytes":
        return f"{row.value:>9,.0f}"
    digits = 3 if row.unit == "ratio" else 1
    if row.lowest == row.highest and row.subject_s is None:  # counted, not timed
        return f"{row.value:>9.{digits}f}"
    text = f"{row.value:>9.{digits}f}   {row.lowest:.{digits}f} .. {row.highest:.{digits}f}"
    if row.of_fastest is None or row.subject_s is None or row.baseline_s is None:
        return text
    return f"{text:<30}fastest {row.of_fastest:.3f}{row.subject_s * 1e3:>11.2f} ms / {row.baseline_s * 1e3:.2f} ms"


def write_json(path: Path, facts: dict[str, Any], rows: list[Row]) -> None:
    """Writes facts and rows."""
    path.write_text(json.dumps({"machine": facts, "rows": [dataclasses.asdict(row) for row in rows]}, indent=2) + "\n")
