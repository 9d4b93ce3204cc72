"""What a trace says, in sentences: what is wrong, and what to try."""

import statistics
from dataclasses import dataclass

from ddp_plugin.errors import counted
from ddp_plugin.timeline.steps import steady
from ddp_plugin.tracing.issuers import DDP, LIGHTNING, PLUGIN, TORCHMETRICS, YOURS
from ddp_plugin.tracing.joining import Joined, TotalRow
from ddp_plugin.tracing.records import FAILED, OVER, SET_UP, TRAINING

__all__ = ["NOTHING_RECORDED", "Finding", "conclusions", "headline", "remarks"]

_NOTABLE_RATIO = 0.1  # of a step: what is less is not worth a sentence
_NOTABLE_WAIT_RATIO = 0.02  # of a step, in one kind of collective
_EVERY_OTHER_STEP = 0.5  # calls of a step: what this package asks less often, it asks once an epoch
_NEARLY_FULL_RATIO = 0.9

NOTHING_RECORDED = (
    "No rank recorded anything: the program makes no Trainer with CustomDDPStrategy (pass strategy=CustomDDPStrategy() "
    'or strategy="ddp_plugin"), or it ended before its Trainer was set up.'
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        what: a sentence or two.
        remedy: what to try, a sentence or two.
    """

    what: str
    remedy: str


def headline(joined: Joined) -> str:
    """Returns what a step is, in a sentence."""
    summaries = joined.summaries
    if not summaries:
        if not joined.records:
            return NOTHING_RECORDED
        if all(record.state == SET_UP for record in joined.records.values()):
            return "Nothing was trained: a Trainer was set up, and took no training step."
        return "No rank finished a training step."

    def mean_ms(name: str) -> str:
        return f"{1e3 * statistics.fmean(getattr(summary, name) for summary in summaries.values()):.1f} ms"

    num_steps = min(summary.num_steps for summary in summaries.values())
    return (
        f"A step takes {mean_ms('step_s')} on {counted(joined.world_size, 'rank')}, mean of "
        f"{counted(num_steps, 'step')}: data {mean_ms('data_s')}, forward {mean_ms('forward_s')}, backward "
        f"{mean_ms('backward_s')}, communication that no backward hides {mean_ms('exposed_s')}, optimizer and "
        f"callbacks {mean_ms('optimizer_s')}."
    )


def conclusions(joined: Joined) -> list[Finding]:
    """Returns what is wrong with the steps, worst first as far as times tell."""
    summaries = joined.summaries
    if not summaries:
        return []
    step_s = statistics.fmean(summary.step_s for summary in summaries.values())
    found: list[tuple[float, Finding]] = []
    if (late := _late(joined)) is not None:
        found.append(late)
    own_exposed_s = min(summary.exposed_s for summary in summaries.values())
    if own_exposed_s > _NOTABLE_RATIO * step_s:
        found.append((own_exposed_s, _exposed(own_exposed_s / step_s)))
    data_s = statistics.fmean(summary.data_s for summary in summaries.values())
    if data_s > _NOTABLE_RATIO * step_s:
        what = f"{_percent(data_s / step_s)} of a step is waiting for data, and for what runs between two steps."
        remedy = (
            "Give the DataLoader more workers, pin_memory and persistent_workers; `ddp-plugin doctor` says how many."
        )
        found.append((data_s, Finding(what, remedy)))
    for row in joined.collectives():
        is_rare = row.issuer == PLUGIN and row.num_blocking_per_step < _EVERY_OTHER_STEP
        if row.issuer != DDP and not is_rare and row.waited_s > _NOTABLE_WAIT_RATIO * step_s:
            found.append((row.waited_s, _waiting(row, step_s)))
    found += [(0.0, finding) for finding in _memory(joined)]
    return [finding for _, finding in sorted(found, key=lambda pair: -pair[0])]


def _late(joined: Joined) -> tuple[float, Finding] | None:
    compared = joined.lateness()
    if compared is None:
        return None
    ranks, lateness = compared
    suspect = lateness.suspect(_NOTABLE_RATIO)
    if suspect is None:
        return None
    late_s, lost_s = lateness.late_s[suspect], lateness.lost_s(suspect)
    part = max(lost_s, key=lost_s.__getitem__)
    host = joined.records[ranks[suspect]].host
    remedies = {
        "data": "Look at its data: larger samples, fewer or busier workers, a slower disk.",
        "forward": "Look for longer sequences or other work on this rank alone, and for other programs on its machine.",
        "backward": "Look for longer sequences on this rank, and for a slower or busier device.",
        "optimizer": "Look for what only this rank does after a step: logging, checkpoints, `if rank == 0`.",
    }
    what = (
        f"Rank {ranks[suspect]} (on {host}) keeps the others waiting: it is {1e3 * late_s:.1f} ms late in each step, "
        f"{_percent(late_s / lateness.step_s)} of it, {1e3 * lost_s[part]:.1f} ms of that in its {part}."
    )
    return late_s, Finding(what, remedies[part])


def _exposed(ratio: float) -> Finding:
    return Finding(
        f"{_percent(ratio)} of a step is communication that no backward hides, also on the rank that waits least.",
        'Let each step compute more (a larger batch, or accumulate_grad_batches), send less (comm_hook="bf16"), or let '
        "`ddp_plugin.tune()` look for better bucket sizes; `ddp-plugin plan` says what each hook would save.",
    )


def _waiting(row: TotalRow, step_s: float) -> Finding:
    where = row.called_from or row.place
    remedies = {
        LIGHTNING: "Do it less often, or without sync_dist in each step.",
        TORCHMETRICS: "Compute the metric at the end of an epoch (on_step=False), not in each step.",
        PLUGIN: "Log with sync_dist=True once an epoch (on_step=False), or let the callback run less often.",
        YOURS: "Do it less often, or with async_op=True and wait for it a step later.",
    }
    what = (
        f"The host waits {1e3 * row.waited_s:.1f} ms of a step ({_percent(row.waited_s / step_s)}) in "
        f"{row.operation} by {row.issuer}, {row.num_blocking_per_step:.1f} times a step, at {where}."
    )
    return Finding(what, remedies.get(row.issuer, "See whether it is needed in each step."))


def _memory(joined: Joined) -> list[Finding]:
    found = []
    for rank, record in joined.records.items():
        memory = record.memory
        if memory.reserved_bytes and memory.device_bytes:
            ratio = memory.reserved_bytes / memory.device_bytes
            if ratio > _NEARLY_FULL_RATIO:
                what = f"Rank {rank} has held {_percent(ratio)} of its device's memory."
                remedy = "Take a smaller batch and accumulate, gradient_as_bucket_view=True, or a sharding strategy."
                found.append(Finding(what, remedy))
    return found


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.0f} %"


def remarks(joined: Joined) -> list[str]:
    """Returns what a reader has to know to take the numbers for what they are, in sentences."""
    found = list(joined.complaints)
    absent = [rank for rank in range(joined.world_size) if rank not in joined.records]
    if absent:
        found.append(f"Missing: {_ranks(absent)} of {joined.world_size} wrote nothing; killed, or on another machine.")
    words = {
        TRAINING: "began to train and {was} killed before the window was over",
        FAILED: "failed before the window was over",
        OVER: "ended {their} training before the window was over",
        SET_UP: "took no training step",
    }
    for state, text in words.items():
        ranks = [rank for rank, record in joined.records.items() if record.state == state]
        if ranks:
            one = len(ranks) == 1
            told = text.format(was="was" if one else "were", their="its" if one else "their")
            named = _ranks(ranks)
            found.append(f"{named[0].upper()}{named[1:]} {told}.")
    for record in joined.records.values():
        if record.window != record.asked and record.steps:
            asked, window = record.asked, record.window
            found.append(
                f"The run is shorter than the window that was asked for (wait {asked.num_wait}, warmup "
                f"{asked.num_warmup}, active {asked.num_active}); recorded with wait {window.num_wait}, warmup "
                f"{window.num_warmup}, active {window.num_active}."
            )
            break
    slower = [
        statistics.fmean(step.duration_s for step in steady(record.steps)) / record.step_before_s
        for record in joined.records.values()
        if record.steps and record.step_before_s
    ]
    if slower and statistics.fmean(slower) > 1 + _NOTABLE_RATIO:
        found.append(
            f"While the profiler looked, steps took {statistics.fmean(slower):.1f} times as long as just before; "
            "--no-operators records without it."
        )
    told_by: dict[str, list[int]] = {}
    for rank, record in joined.records.items():
        for note in record.notes:
            told_by.setdefault(note, []).append(rank)
    found += [
        note if len(ranks) == joined.world_size else f"{note} ({_ranks(ranks)})" for note, ranks in told_by.items()
    ]
    return found


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown}"
