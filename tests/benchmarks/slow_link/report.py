"""The tables that a person reads, the same as Markdown, and the file that a program reads."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.slow_link.summary import Bar, Losses, RateResult, Row

__all__ = ["markdown", "text", "write_json"]

HEAD = ("variant", "kind", "step (ms)", "steps", "/ noop", "sent / step", "declared", "link use", "loss", "- exact")
COST_HEAD = ("all-reduce", "bytes", "measured (ms)", "predicted (ms)", "error", "")
Table = list[Sequence[str]]


def text(facts: Mapping[str, Any], results: Sequence[RateResult], losses: Losses | None, bars: Sequence[Bar]) -> str:
    """Lays everything out for a terminal."""
    return _lay_out(facts, results, losses, bars, heading="{}", table=_text_table, code="{}")


def markdown(
    facts: Mapping[str, Any], results: Sequence[RateResult], losses: Losses | None, bars: Sequence[Bar]
) -> str:
    """Lays everything out as Markdown."""
    return _lay_out(facts, results, losses, bars, heading="### {}\n", table=_markdown_table, code="`{}`")


def write_json(
    path: Path,
    facts: Mapping[str, Any],
    results: Sequence[RateResult],
    losses: Losses | None,
    bars: Sequence[Bar],
) -> None:
    """Writes everything."""
    found = {
        "machine": facts,
        "rates": [dataclasses.asdict(result) for result in results],
        "losses": None if losses is None else dataclasses.asdict(losses),
        "bars": [dataclasses.asdict(bar) | {"verdict": bar.verdict} for bar in bars],
    }
    path.write_text(json.dumps(found, indent=2) + "\n")


def _lay_out(
    facts: Mapping[str, Any],
    results: Sequence[RateResult],
    losses: Losses | None,
    bars: Sequence[Bar],
    *,
    heading: str,
    table: Any,
    code: str,
) -> str:
    parts = [", ".join(f"{name} {code.format(value)}" for name, value in facts.items())]
    for result in results:
        parts += [heading.format(f"{result.rate_mbit:g} Mbit/s"), _link_words(result)]
        parts.append(table([HEAD, *(_cells(row, losses) for row in result.rows)]))
        if result.costs:
            parts.append(table([COST_HEAD, *_cost_cells(result)]))
    if losses is not None:
        parts += [heading.format(f"Loss after {losses.num_steps} steps"), _loss_words(losses)]
        names = [name for name in losses.by_variant if not any(name == r.variant for x in results for r in x.rows)]
        if names:
            rows = [(name, f"{losses.by_variant[name]:.3f}", _signed(losses.gap_nats(name))) for name in names]
            parts.append(table([("variant", "loss", "- exact"), *rows]))
    failures = {} if losses is None else dict(losses.failures)
    failures = {name: why for result in results for name, why in result.failures.items()} | failures
    if failures:
        parts += [heading.format("What did not run"), table([("variant", "why"), *failures.items()])]
    parts.append(heading.format("Asked for"))
    parts.append(table([("what", "found", "asked for", "", ""), *(_bar_cells(bar) for bar in bars)]))
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _link_words(result: RateResult) -> str:
    link = result.link
    words = []
    if link:
        words.append(
            f"The link carries {link['raw_one_way_mbit']:.4g} Mbit/s of plain TCP payload one way and "
            f"{link['raw_both_ways_mbit']:.4g} each way at once. Exact all-reduces of the whole gradient take "
            f"{link['all_reduce_s'] * 1e3:.4g} ms and use {link['packet_use']:.3f} of the link "
            f"({link['payload_use']:.3f} without headers)."
        )
    medians = ", ".join(f"{s * 1e3:.4g}" for s in result.baseline_s)
    return " ".join([*words, f"Steps without communication over the run: {medians} ms."])


def _loss_words(losses: Losses) -> str:
    seeds = ", ".join(f"{loss:.3f} (seed {seed})" for seed, loss in losses.reference.items())
    return f"Held-out nats per token. The exact run: {seeds or 'none'}." + (
        f" The seeds differ by {losses.spread_nats:.3f}." if losses.reference else ""
    )


def _cells(row: Row, losses: Losses | None) -> Sequence[str]:
    loss = None if losses is None else losses.by_variant.get(row.variant)
    gap = None if losses is None else losses.gap_nats(row.variant)
    return (
        row.variant,
        row.kind,
        f"{row.step_s * 1e3:.0f} ({row.lowest_s * 1e3:.0f} .. {row.highest_s * 1e3:.0f})",
        str(row.num_steps),
        f"{row.ratio:.2f}",
        _bytes(row.sent_bytes),
        "" if row.declared_bytes is None else _bytes(row.declared_bytes),
        "" if row.use_while_busy is None else f"{row.use_while_busy:.2f}",
        "" if loss is None else f"{loss:.3f}",
        _signed(gap),
    )


def _cost_cells(result: RateResult) -> list[Sequence[str]]:
    return [
        (
            one.algorithm,
            str(one.num_bytes),
            f"{one.measured_s * 1e3:.1f}",
            f"{one.predicted_s * 1e3:.1f}",
            f"{one.error_ratio:+.1%}",
            "fitted" if one.is_fitted else "",
        )
        for one in result.costs
    ]


def _bar_cells(bar: Bar) -> Sequence[str]:
    found = "" if bar.value is None else f"{bar.value:.3f}"
    return bar.name, found, f"{'>=' if bar.at_least else '<='} {bar.limit:g}", bar.verdict, bar.remark


def _bytes(count: float) -> str:
    return f"{count:,.0f}"


def _signed(number: float | None) -> str:
    return "" if number is None else f"{number:+.3f}"


def _text_table(rows: Table) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join("  " + line.rstrip() for line in lines)


def _markdown_table(rows: Table) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)
