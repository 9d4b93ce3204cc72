"""The page: one HTML file without anything from outside."""

import html
from collections.abc import Iterable, Sequence

from ddp_plugin.tracing.drawing import MAX_RANKS, draw_columns, draw_step
from ddp_plugin.tracing.findings import conclusions, headline, remarks
from ddp_plugin.tracing.issuers import DDP
from ddp_plugin.tracing.joining import Joined

__all__ = ["HEADING", "render_page"]

HEADING = "Where the time of a step goes"
"""What every page says first."""

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #e3e6ea; --card: #f6f7f9;
  --data: #b8bcc2; --forward: #56b4e9; --backward: #0072b2; --optimizer: #009e73;
  --hidden: #e3cf1f; --exposed: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e8eaed; --soft: #9aa4af; --line: #2b3138;
  --card: #1c2026; --data: #7b828b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 36px 28px 64px; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -.01em; } h2 { font-size: 17px; margin: 38px 0 10px; }
.sub, .note { color: var(--soft); } .sub { margin: 0 0 22px; font-size: 13.5px; word-break: break-all; }
.note { font-size: 13.5px; }
.lead { font-size: 17px; margin: 0 0 18px; }
.finding { background: var(--card); border-left: 4px solid var(--exposed); border-radius: 6px; padding: 12px 16px;
  margin: 10px 0; }
.finding.fine { border-color: var(--optimizer); } .finding b { display: block; font-weight: 600; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 22px 0 0; }
.card { background: var(--card); border-radius: 8px; padding: 12px 16px; }
.card span { display: block; color: var(--soft); font-size: 12.5px; }
.card strong { font-size: 22px; font-weight: 600; }
.figure { border: 1px solid var(--line); border-radius: 8px; padding: 16px; overflow-x: auto; }
svg { display: block; width: 100%; min-width: 640px; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .tick { fill: var(--soft); font-size: 11px; } svg .rank { font-weight: 600; }
.grid { stroke: var(--line); } .last { stroke: var(--ink); stroke-dasharray: 4 3; }
.data { fill: var(--data); } .forward { fill: var(--forward); } .backward { fill: var(--backward); }
.optimizer { fill: var(--optimizer); } .hidden { fill: var(--hidden); } .exposed { fill: var(--exposed); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: 0 0 12px; font-size: 12.5px; color: var(--soft); }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
td code { font-size: 12.5px; } code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.block { color: var(--exposed); font-weight: 600; } ul { padding-left: 20px; margin: 8px 0; }
"""
_NUMBER = ' class="n"'
_LEGEND = {
    "data": "data, and what is between two steps",
    "forward": "forward",
    "backward": "backward",
    "hidden": "a bucket on its way, hidden by the backward",
    "exposed": "communication that no backward hides",
    "optimizer": "optimizer and callbacks",
}


def render_page(joined: Joined, command: str, *, has_picture: bool = False) -> str:
    """Returns the page.

    Args:
        joined: what was recorded; nothing of it is needed.
        command: what was run, for the first lines.
        has_picture: whether ``trace.png`` lies beside it.
    """
    body = [
        f"<h1>{HEADING}</h1>",
        f'<p class="sub"><code>{_text(command)}</code></p>' if command else "",
        f'<p class="lead">{_text(headline(joined))}</p>',
        *_conclusions(joined),
    ]
    if joined.timelines:
        body += [*_cards(joined), *_step(joined), *_columns(joined)]
    if joined.records:
        body += _ranks(joined)
    if joined.timelines:
        body += [*_collectives(joined), *_buckets(joined)]
    if told := remarks(joined):
        body += ["<h2>To be known beside the numbers</h2><ul>", *(f"<li>{_text(one)}</li>" for one in told), "</ul>"]
    if joined.timelines:
        beside = ", and <code>trace.png</code> is a picture of a step" if has_picture else ""
        body.append(
            '<p class="note">Beside this page, <code>trace.json</code> opens in Perfetto (ui.perfetto.dev), where each '
            f"process is a rank{beside}. Ranks' clocks are laid over one another at the ends of the reductions.</p>"
        )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Trace of {_text(command or 'a run')}</title><style>{_STYLE}</style></head>\n<body><main>"
        + "\n".join(part for part in body if part)
        + "</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _conclusions(joined: Joined) -> Iterable[str]:
    found = conclusions(joined)
    for finding in found:
        yield f'<div class="finding"><b>{_text(finding.what)}</b>{_text(finding.remedy)}</div>'
    if joined.timelines and not found:
        yield '<div class="finding fine"><b>Nothing stands out.</b>No part of the step is worth changing first.</div>'


def _cards(joined: Joined) -> list[str]:
    summaries = list(joined.summaries.values())
    step_s = sum(summary.step_s for summary in summaries) / len(summaries)
    exposed_s = sum(summary.exposed_s for summary in summaries) / len(summaries)
    rows = joined.collectives()
    cards = {
        "a step": f"{1e3 * step_s:.1f} ms",
        "communication exposed": f"{100 * exposed_s / step_s:.1f} %" if step_s else "0 %",
        "collectives of a step": f"{sum(row.per_step for row in rows):.1f}" if _counted(joined) else "not counted",
        "of them the host waits in": (
            f"{sum(row.num_blocking_per_step for row in rows):.1f}" if _counted(joined) else "not counted"
        ),
        "most memory of a rank": _bytes(max(_peak(joined, rank) for rank in joined.records)),
    }
    return [
        '<div class="cards">',
        *(f'<div class="card"><span>{name}</span><strong>{value}</strong></div>' for name, value in cards.items()),
        "</div>",
    ]


def _counted(joined: Joined) -> bool:
    return any(record.num_counted for record in joined.records.values())


def _peak(joined: Joined, rank: int) -> int:
    memory = joined.records[rank].memory
    return (memory.resident_bytes or 0) if memory.allocated_bytes is None else memory.allocated_bytes


def _step(joined: Joined) -> list[str]:
    names = {index: bucket.names for record in joined.records.values() for index, bucket in record.buckets.items()}
    drawing, number = draw_step(joined.timelines, names)
    shown = f", the {MAX_RANKS} ranks that are ready first and last" if len(joined.timelines) > MAX_RANKS else ""
    return [f"<h2>Step {number}{shown}</h2>", '<div class="figure">', _legend(_LEGEND), drawing, "</div>"]


def _columns(joined: Joined) -> list[str]:
    parts = [part for part in _LEGEND if part != "hidden"]
    return ["<h2>Every step</h2>", '<div class="figure">', _legend(parts), draw_columns(joined.timelines), "</div>"]


def _legend(parts: Iterable[str]) -> str:
    shown = (f'<span><i style="background: var(--{part})"></i>{_LEGEND[part]}</span>' for part in parts)
    return f'<div class="legend">{"".join(shown)}</div>'


def _ranks(joined: Joined) -> list[str]:
    summaries, compared = joined.summaries, joined.lateness()
    late = dict(zip(compared[0], compared[1].late_s, strict=True)) if compared is not None else {}
    rows = []
    for rank, record in joined.records.items():
        cells: list[str] = [f"{rank}", f"{record.host}, {record.device}"]
        if rank in summaries:
            one = summaries[rank]
            parts_s = (one.step_s, one.data_s, one.forward_s, one.backward_s, one.exposed_s, one.optimizer_s)
            cells += [f"{1e3 * seconds:.2f}" for seconds in parts_s]
        else:
            cells += ["–"] * 6
        cells.append(f"{1e3 * late[rank]:.2f}" if rank in late else "–")
        cells.append(_bytes(record.memory.resident_bytes) if record.memory.resident_bytes else "–")
        memory = record.memory
        cells.append("–" if memory.allocated_bytes is None else _bytes(memory.allocated_bytes))
        rows.append(cells)
    head = ["rank", "where", "step ms", "data", "forward", "backward", "exposed", "optimizer", "late ms"]
    told = (
        "Means of a step. Exposed is communication that no backward hides; on an early rank it is waiting for others. "
        "Late is by how much a rank falls behind the earliest one"
        + ("" if late or len(joined.timelines) < 2 else " (not compared: too few steps that are alike on all ranks)")
        + ". Memory is the most since the process started."
    )
    return ["<h2>Ranks</h2>", _table([*head, "host memory", "device memory"], rows, 2), f'<p class="note">{told}</p>']


def _collectives(joined: Joined) -> list[str]:
    if not _counted(joined):
        return ["<h2>Collectives</h2>", "<p>Not counted: the training was over before the window began.</p>"]
    rows = joined.collectives()
    if not rows:
        return ["<h2>Collectives</h2>", "<p>None was issued.</p>"]
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.issuer] = totals.get(row.issuer, 0.0) + row.per_step
    ordered = sorted(totals.items(), key=lambda pair: -pair[1])
    cells = [
        [
            _text("DDP's reduction of gradients and buffers" if row.issuer == DDP else row.issuer),
            _text(row.operation),
            f"<code>{_text(row.place)}</code>"
            + (f"<br>for <code>{_text(row.called_from)}</code>" if row.called_from else ""),
            f"{row.per_step:.2f}",
            _bytes(row.bytes_per_step),
            f'<span class="block">{row.num_blocking_per_step:.2f}</span>' if row.num_blocking_per_step else "–",
            f"{1e3 * row.waited_s:.3f}" if row.num_blocking_per_step else "–",
        ]
        for row in rows
    ]
    head = ["issued by", "what", "where", "per step", "bytes", "host waits", "for ms"]
    summary = "; ".join(f"{name}: {number:.1f}" for name, number in ordered)
    note = (
        f"Per step and rank, by who issued them: {summary}. The host waits where the thread that trains waited for a "
        "collective of CPU tensors, or at a barrier; others pass beside it."
    )
    return ["<h2>Collectives</h2>", f'<p class="note">{_text(note)}</p>', _table(head, cells, 3, is_html=True)]


def _buckets(joined: Joined) -> list[str]:
    summaries = list(joined.summaries.values())
    buckets = next((record.buckets for record in joined.records.values() if record.buckets), {})
    rows = []
    for index, bucket in sorted(buckets.items()):
        ready = [one.ready_ratios[index] for one in summaries if index < len(one.ready_ratios)]
        in_flight_s = [one.in_flight_s[index] for one in summaries if index < len(one.in_flight_s)]
        if not ready or not in_flight_s:
            continue
        more = f" and {len(bucket.names) - 3} more" if len(bucket.names) > 3 else ""
        rows.append(
            [
                f"{index}",
                ", ".join(bucket.names[:3]) + more,
                _bytes(bucket.num_bytes),
                f"{100 * sum(ready) / len(ready):.0f} %",
                f"{1e3 * min(in_flight_s):.2f}",
            ]
        )
    if not rows:
        return []
    head = ["bucket", "parameters", "bytes", "ready after", "ms on its way"]
    note = "Ready after so much of the backward; on its way on the rank that waits least, to the mean over all ranks."
    return ["<h2>Buckets</h2>", _table(head, rows, 2), f'<p class="note">{note}</p>']


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], num_words: int, *, is_html: bool = False) -> str:
    """Returns a table whose columns after the first few are numbers."""

    def row(cells: Sequence[str], tag: str, as_html: bool) -> str:
        shown = (
            f"<{tag}{_NUMBER if column >= num_words else ''}>{cell if as_html else _text(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td", is_html) for cells in rows)
    return f'<div class="table"><table><thead>{row(head, "th", False)}</thead><tbody>{body}</tbody></table></div>'


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
