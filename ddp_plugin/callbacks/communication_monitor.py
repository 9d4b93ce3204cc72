"""What communication costs in a step: bytes, time, and how much of it the backward did not hide."""

import importlib.util
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn

from ddp_plugin import _compat
from ddp_plugin.callbacks._recording import MAX_REPORTS, StepRecording
from ddp_plugin.errors import explain
from ddp_plugin.gather import gather_objects, gather_objects_to
from ddp_plugin.hooks import HOOKS, Contents
from ddp_plugin.timeline.chrome_trace import write_chrome_trace
from ddp_plugin.timeline.picture import draw_timeline, picture_formats
from ddp_plugin.timeline.steps import StepSummary, StepTimeline, steady, summarize
from ddp_plugin.wrapping.lost_overlap import Compilation, given_cap_mb, why_late

__all__ = ["BucketReport", "CommunicationMonitor", "CommunicationReport"]


@dataclass(frozen=True)
class BucketReport:
    """One gradient bucket over a window.

    Attributes:
        parameters: names of what it holds.
        num_bytes: bytes of its gradient.
        sent_bytes: bytes that a rank sends for it in a step, as the hook declares; the most over the ranks.
        ready_ratio: the part of the backward that had passed when it was ready, mean over the ranks; 1 for the last.
        allreduce_s: seconds from its readiness to its mean on the rank that waited least, which was ready last.
    """

    parameters: tuple[str, ...]
    num_bytes: int
    sent_bytes: int
    ready_ratio: float
    allreduce_s: float


@dataclass(frozen=True)
class CommunicationReport:
    """What one window of steps tells; the same on all ranks. Times are means per step.

    Attributes:
        step: optimizer steps of the run at the end of the window.
        ranks: a :class:`~ddp_plugin.timeline.steps.StepSummary` for each rank.
        buckets: in the order of reduction; empty where nothing is reduced.
        sent_bytes: bytes that a rank sends in a step, as the hook declares; the most over the ranks.
        why_late: why gradients wait for the end of the backward, in words; ``None`` where they do not.
    """

    step: int
    ranks: tuple[StepSummary, ...]
    buckets: tuple[BucketReport, ...]
    sent_bytes: int
    why_late: str | None = None

    def mean_s(self, name: str) -> float:
        """Returns the mean over the ranks of a field of :class:`~ddp_plugin.timeline.steps.StepSummary`."""
        return float(sum(getattr(rank, name) for rank in self.ranks) / len(self.ranks))

    @property
    def allreduce_s(self) -> float:
        """Seconds of a step in which a bucket was on its way, mean over the ranks; waiting for other ranks included."""
        return self.mean_s("communication_s")

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that the backward did not hide, mean over the ranks."""
        return self.mean_s("exposed_s")

    @property
    def wait_s(self) -> float:
        """The part of :attr:`exposed_s` that was waiting for slower ranks: what exceeds the least exposed rank's."""
        return self.exposed_s - min(rank.exposed_s for rank in self.ranks)

    @property
    def overlap_ratio(self) -> float:
        """The part of the communication that the backward hid; 1 where there was none."""
        return 1.0 - self.exposed_s / self.allreduce_s if self.allreduce_s > 0 else 1.0


class CommunicationMonitor(StepRecording):
    """Measures what communication costs in each step, logs it, and draws it.

    For every bucket it notes when its last local gradient was ready and when it held the mean over ranks. Communication
    time is the union of these intervals. *Exposed* is the part after this rank's backward: from the readiness of the
    last bucket, when no local gradient is left to compute, to the last bucket's mean. On a rank that is early it
    includes waiting for the others, and :attr:`CommunicationReport.wait_s` says how much that was. A step is the sum of
    ``data_s``, ``forward_s``, ``backward_s``, ``exposed_s`` and ``optimizer_s``
    (:data:`ddp_plugin.timeline.steps.PARTS`). Means leave out first steps, those after validations and exchanges, and
    those before DDP rebuilt its buckets, where others remain.

    Times are the host's under gloo, and CUDA events otherwise, which are read when they have long passed: no step waits
    for the device. Bytes are what ``comm_hook`` declares, those of a ring all-reduce without one, and without a claim
    where a bare ``ddp_comm_hook`` runs, whose bytes nobody knows.

    At the end of ``fit`` rank 0 writes the last steps of all ranks as a Chrome trace (open it in Perfetto or
    ``chrome://tracing``) and as a picture of one of them. After an exception it writes those of its own rank, because
    the others may not answer. Ranks' clocks are laid over one another at the ends of the reductions. Each ``fit``
    writes the files again, over those that are there. Folders are made before training, and a file that could not be
    written is refused then; if writing fails nevertheless, that is a warning, and the training stands.

    Watching the buckets replaces DDP's reducer by the bit-identical ``allreduce`` hook. On one process steps are timed
    and nothing else.

    Args:
        every_n_steps: optimizer steps of a window, whose means are exchanged and logged.
        folder: where ``trace.json`` and ``timeline.png`` are written, for those two that have no path of their own. The
            picture needs matplotlib (``pip install 'ddp_plugin[plot]'``); without it a sentence says so.
        trace_path: file of the trace.
        picture_path: file of the picture; its ending tells the format, such as ``.png`` or ``.svg``.
        num_traced_steps: how many of the last steps the trace holds.

    Attributes:
        reports: a :class:`CommunicationReport` for each window of this ``fit``, the newest 1000, the same on all ranks.

    Raises:
        ValueError: a number out of range; at setup, ``logical_shards``, which reduce without buckets, and on all ranks
            a file that rank 0 cannot write, or a picture of an unknown format.
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        ModuleNotFoundError: at setup, ``picture_path`` without matplotlib on rank 0.

    Collectives:
        One object gather of some numbers for each bucket on the control group, every ``every_n_steps`` optimizer steps
        and at the end of training, on all ranks; at setup one of what rank 0 refuses; at the end one more of the traced
        steps to rank 0, if a file is asked for.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        folder: str | None = None,
        trace_path: str | None = None,
        picture_path: str | None = None,
        num_traced_steps: int = 50,
    ) -> None:
        super().__init__(every_n_steps)
        if isinstance(num_traced_steps, bool) or not isinstance(num_traced_steps, int) or num_traced_steps < 1:
            raise ValueError(
                explain(
                    "num_traced_steps, a whole number of at least 1", repr(num_traced_steps), "Count optimizer steps"
                )
            )
        self.folder, self.trace_path, self.picture_path = folder, trace_path, picture_path
        self.num_traced_steps = num_traced_steps
        self.reports: list[CommunicationReport] = []
        self._traced: deque[StepTimeline] = deque(maxlen=num_traced_steps)
        self._said: set[str] = set()

    @property
    def last_report(self) -> CommunicationReport | None:
        """The newest report; ``None`` before the first."""
        return self.reports[-1] if self.reports else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the buckets, and looks whether the files can be written.

        Collectives:
            One object gather, on all ranks.
        """
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        refusal = gather_objects(self._refusal() if trainer.is_global_zero else None, self._group)[0]
        if refusal is not None:
            raise refusal
        self.reports = []
        self._traced.clear()
        self._said.clear()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchanges what is left, and writes the files.

        Collectives:
            Those of the last exchange, and a gather to rank 0 where files are asked for, on all ranks.
        """
        super().on_train_end(trainer, pl_module)
        if any(self._paths()):
            by_rank = gather_objects_to(list(self._traced), self._group, destination=0)
            if trainer.is_global_zero:
                try:
                    self._write(dict(enumerate(by_rank)))
                except Exception as error:  # what is trained is worth more than a picture of it
                    rank_zero_warn(f"CommunicationMonitor could not write its files: {error}")
        self._traced.clear()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Writes what rank 0 knows."""
        if not (self._is_on and trainer.is_global_zero and any(self._paths())):
            return
        try:
            self._traced.extend(self._recorder.take())
            self._write({trainer.global_rank: list(self._traced)})
        except Exception as error:  # a device that failed cannot be read; the first error is what matters
            rank_zero_warn(f"CommunicationMonitor could not write its files after the exception: {error}")
        self._traced.clear()

    # --------------------------------------------------------------------------------------------------------- exchange

    def _exchange(self, trainer: pl.Trainer, steps: list[StepTimeline], num_steps: int) -> None:
        """Combines the ranks' means.

        Collectives:
            One object gather, on all ranks.
        """
        self._traced.extend(steps)
        own = (summarize(steady(steps)), self._own_bytes(trainer)) if steps else None
        by_rank = [rank for rank in gather_objects(own, self._group) if rank is not None]
        if len(by_rank) < trainer.world_size:
            return  # a device that is not done with its only step
        summaries, sent_bytes = zip(*by_rank, strict=True)
        self.reports.append(report := self._report(trainer, summaries, sent_bytes))
        del self.reports[:-MAX_REPORTS]
        if report.why_late is not None and report.why_late not in self._said:
            self._said.add(report.why_late)
            rank_zero_warn(f"CommunicationMonitor: {report.why_late}")
        metrics = {
            f"ddp/{name}": report.mean_s(name)
            for name in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "exposed_s")
        }
        if report.buckets:
            metrics |= {
                "ddp/allreduce_s": report.allreduce_s,
                "ddp/wait_s": report.wait_s,
                "ddp/overlap_ratio": report.overlap_ratio,
            }
        if report.sent_bytes:
            metrics["ddp/sent_bytes"] = float(report.sent_bytes)
        self._log(trainer, metrics)

    def _report(
        self, trainer: pl.Trainer, summaries: tuple[StepSummary, ...], sent_bytes: tuple[tuple[int, ...], ...]
    ) -> CommunicationReport:
        num_buckets = min(len(summary.in_flight_s) for summary in summaries)
        most_bytes = [max(column) for column in zip(*sent_bytes, strict=True)]
        buckets = [
            BucketReport(
                parameters=contents.names,
                num_bytes=contents.num_elements * contents.element_size_bytes,
                sent_bytes=most_bytes[index],
                ready_ratio=sum(summary.ready_ratios[index] for summary in summaries) / len(summaries),
                allreduce_s=min(summary.in_flight_s[index] for summary in summaries),
            )
            for index, contents in sorted(self._recorder.contents.items())
            if index < num_buckets
        ]
        late = why_late(
            [bucket.ready_ratio for bucket in buckets],
            [bucket.num_bytes for bucket in buckets],
            getattr(trainer.strategy, "compilation", Compilation()),
            given_cap_mb(trainer.strategy.model),
        )
        return CommunicationReport(trainer.global_step, summaries, tuple(buckets), sum(most_bytes), late)

    def _own_bytes(self, trainer: pl.Trainer) -> tuple[int, ...]:
        """Returns the bytes that this rank sends in a step, for each bucket; in one number where there are none."""
        world_size, rank = trainer.world_size, trainer.global_rank
        hook = getattr(trainer.strategy, "comm_hook", None)
        if _compat.runs_bare_hook(trainer.strategy):
            return (0,) * len(self._recorder.contents)
        if self._watches_buckets:
            if hook is None or trainer.global_step <= hook.start_step:  # exact until then
                hook = HOOKS["allreduce"]()
            wire_bytes = hook.wire_bytes
            contents = [self._recorder.contents[index] for index in sorted(self._recorder.contents)]
            return tuple(wire_bytes(bucket, world_size, rank) for bucket in contents)
        if self._group is None or hook is None:
            return (0,)
        named = [(name, p) for name, p in trainer.lightning_module.named_parameters() if p.requires_grad]
        everything = Contents.of([p for _, p in named], {id(p): name for name, p in named})
        if trainer.global_step <= hook.start_step:
            return (HOOKS["allreduce"]().wire_bytes(everything, world_size, rank),)
        return (hook.wire_bytes(everything, world_size, rank) // hook.period,)

    # ------------------------------------------------------------------------------------------------------------ files

    def _paths(self) -> tuple[Path | None, Path | None]:
        folder = Path(self.folder) if self.folder is not None else None
        trace = Path(self.trace_path) if self.trace_path is not None else folder and folder / "trace.json"
        picture = Path(self.picture_path) if self.picture_path is not None else folder and folder / "timeline.png"
        return trace, picture

    def _refusal(self) -> Exception | None:
        """Returns what to raise because a file could not be written; makes their folders."""
        if self.picture_path is not None and not _can_draw():
            return ModuleNotFoundError(
                explain(
                    "matplotlib, because picture_path was given",
                    "no such package",
                    "pip install 'ddp_plugin[plot]', or leave picture_path out",
                )
            )
        trace, picture = self._paths()
        for path in (trace, picture):
            if path is not None and (error := _error_of_writing(path)) is not None:
                return ValueError(explain(f"{path} to be a file that can be written", str(error), "Name another file"))
        if picture is not None and _can_draw() and picture.suffix.lower().lstrip(".") not in picture_formats():
            expected = f"picture_path to end in one of .{', .'.join(sorted(picture_formats()))}"
            return ValueError(explain(expected, repr(str(picture)), "The ending tells the format"))
        return None

    def _write(self, by_rank: dict[int, list[StepTimeline]]) -> None:
        if not all(by_rank.values()):
            return
        trace, picture = self._paths()
        if trace is not None:
            write_chrome_trace(trace, by_rank, {i: self._recorder.contents[i].names for i in self._recorder.contents})
        if picture is not None and _can_draw():
            draw_timeline(picture, by_rank)
        elif picture is not None:
            rank_zero_info(
                "CommunicationMonitor draws no timeline: pip install 'ddp_plugin[plot]' gives it matplotlib."
            )


def _can_draw() -> Any:
    return importlib.util.find_spec("matplotlib") is not None


def _error_of_writing(path: Path) -> OSError | None:
    """Returns what writing to a file would raise, whose folder is made; leaves a file that is there as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        return error
    return None
