"""When nothing goes on any more: who notices, who asks, and who tells."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ddp_plugin import _compat
from ddp_plugin.collectives.lane import in_lanes
from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board, BoardLostError
from ddp_plugin.supervision.diagnosis import Answer, Diagnosis, RankState, diagnose, named_ranks
from ddp_plugin.supervision.flight import Operation, operations
from ddp_plugin.supervision.pulse import ACTIVITY
from ddp_plugin.supervision.stacks import Frame, main_thread_stack

__all__ = ["HangWatcher", "Reporter", "answer_now"]

ASKED = "hang"
"""The board's topics ``hang/0``, ``hang/1``, … in which one rank asks all for their stacks."""

LEFT = "hang left"
"""The board's topic in which a rank says how it left the run."""

_LOOKS_PER_LIMIT = 20  # of the one rank that reads what all write
_ANSWER_WITHIN_BEATS = 5
_LOST_AFTER_BEATS = 5
_LONGEST_GAP_BEATS = 3  # between two looks; beyond it this process was stopped itself, or starved


class Reporter(Protocol):
    """What is done with what a watcher finds, in the thread of the pulse, on the one rank that tells."""

    def report(self, diagnosis: Diagnosis) -> None:
        """Tells of a stall."""

    def resume(self, sentence: str) -> None:
        """Tells that it is over."""


class HangWatcher:
    """Notices that some rank has made no progress for a time, and lets one rank tell what all are doing.

    Progress is any change of what a rank has told of its activity: something begun, another step, batch, epoch or
    stage. The lowest rank whose pulse beats reads what all ranks write, at a twentieth of the limit; the others look
    whether it lives. It asks all for their stacks, waits five beats at most, and reports once; again only after all
    ranks have made progress.

    The time in which this process was stopped itself does not count, nor what a debugger holds.

    Args:
        activity: of this process.
        limit_s: seconds without progress.
        interval_s: between two beats of the pulse.
        reporter: what is done with a report.
        answer: what this rank says when it is asked; :func:`answer_now`, and what the caller adds.
        clock: seconds that only grow.

    Collectives:
        None; all goes through the board.
    """

    def __init__(
        self,
        activity: Activity,
        limit_s: float,
        interval_s: float,
        reporter: Reporter,
        answer: Callable[[], Mapping[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity = activity
        self._limit_s = limit_s
        self._interval_s = interval_s
        self._reporter = reporter
        self._answer = answer
        self._clock = clock
        self._looked_at = clock()
        self._time_s = 0.0  # of this watcher: it stands still while this process does
        self._check_at_s = 0.0
        self._records: dict[int, _Record] = {}
        self._num_asked = 0  # questions that this rank has answered
        self._pending: tuple[int, float] | None = None  # this rank's own question, and when it asked
        self._reported: dict[int, float] = {}  # ranks of the stall that was told last, and since when they stand
        self._is_quiet = False  # about that stall
        self._is_over = False

    def leave(self, board: Board, how: str = "") -> None:
        """Says that this rank leaves the run, and looks no more.

        Args:
            board: of the run.
            how: the exception, or empty for the regular end.
        """
        self._is_over = True
        board.post(LEFT, {"by": how})

    def lose(self, error: BoardLostError) -> None:
        """Looks no more: without the board nobody can be asked."""
        self._is_over = True

    def look(self, board: Board) -> None:
        """Answers if asked; on the rank that leads, looks whether all go on."""
        now = self._clock()
        self._time_s += min(now - self._looked_at, _LONGEST_GAP_BEATS * self._interval_s)
        self._looked_at = now
        if self._is_over:
            return
        self._answer_if_asked(board)
        if self._pending is not None:
            self._collect(board, *self._pending)
        elif self._time_s >= self._check_at_s:
            self._check_at_s = self._time_s + self._limit_s / _LOOKS_PER_LIMIT
            if all(self._is_gone(board, rank) for rank in range(board.rank)):
                self._check(board)

    # ----------------------------------------------------------------------------------------------------- any rank

    def _answer_if_asked(self, board: Board) -> None:
        if board.claimed(f"{ASKED}/{self._num_asked}") is not None:
            board.post(f"{ASKED}/{self._num_asked}", self._answer())
            self._num_asked += 1

    def _is_gone(self, board: Board, rank: int) -> bool:
        record = self._observe(board, rank)
        return self._is_silent(record) or board.read(LEFT, rank) is not None

    def _observe(self, board: Board, rank: int) -> "_Record":
        record = self._records.setdefault(rank, _Record(self._time_s))
        record.follow(board.read(ACTIVITY, rank), self._time_s)
        return record

    def _is_silent(self, record: "_Record") -> bool:
        return self._time_s - record.beat_since_s >= self._lost_after_s

    @property
    def _lost_after_s(self) -> float:
        return max(_LOST_AFTER_BEATS * self._interval_s, 2 * self._limit_s / _LOOKS_PER_LIMIT)

    # ------------------------------------------------------------------------------------------- the rank that leads

    def _check(self, board: Board) -> None:
        stalled = self._stalled(board)
        if not stalled and self._reported:
            lasted_s = self._time_s - min(self._reported.values())
            if not self._is_quiet:
                who = named_ranks(list(self._reported))
                self._reporter.resume(f"The run goes on: {who} had made no progress for {lasted_s:.0f} s.")
            self._reported = {}
        elif stalled and not self._reported:
            number = self._num_asked
            if board.claim(f"{ASKED}/{number}", {"rank": board.rank})["rank"] == board.rank:
                self._pending = number, self._time_s

    def _stalled(self, board: Board) -> dict[int, float]:
        """Returns the ranks inside the run that have made no progress for the limit, and since when."""
        stalled = {}
        for rank in range(board.world_size):
            record = self._observe(board, rank)
            has_left = self._is_silent(record) and board.read(LEFT, rank) is not None
            if self._time_s - record.progress_since_s >= self._limit_s and not has_left:
                stalled[rank] = record.progress_since_s
        return stalled

    def _collect(self, board: Board, number: int, asked_at_s: float) -> None:
        """Waits for the answers, and tells what they say together, if nothing has gone on meanwhile."""
        stalled = self._stalled(board)
        answers = board.read_all(f"{ASKED}/{number}")
        left = board.read_all(LEFT)
        awaited = [
            rank
            for rank, record in self._records.items()
            if rank not in answers and rank not in left and not self._is_silent(record)
        ]
        if awaited and self._time_s - asked_at_s < _ANSWER_WITHIN_BEATS * self._interval_s:
            return
        self._pending = None
        if not stalled:
            return
        states = [self._state(rank, answers.get(rank), left.get(rank)) for rank in range(board.world_size)]
        diagnosis = diagnose(states, self._limit_s)
        self._reported, self._is_quiet = stalled, diagnosis.is_debugged
        if not self._is_quiet:
            self._reporter.report(diagnosis)

    def _state(self, rank: int, answered: Mapping[str, Any] | None, left: Mapping[str, Any] | None) -> RankState:
        record = self._records[rank]
        told = answered or record.told
        silent_s = self._time_s - record.beat_since_s
        return RankState(
            rank=rank,
            doing=told.get("doing", ()),
            place=told.get("place", {}),
            still_s=self._time_s - record.progress_since_s if answered is None else answered["for_s"],
            silent_s=None if answered is not None or silent_s < _LONGEST_GAP_BEATS * self._interval_s else silent_s,
            left=None if left is None else str(left["by"]),
            answer=None if answered is None else _parsed(answered),
        )


class _Record:
    """What a rank has told, and since when it has not told anything else."""

    def __init__(self, time_s: float) -> None:
        self.told: Mapping[str, Any] = {}
        self.beat_since_s = time_s
        self.progress_since_s = time_s

    def follow(self, told: Mapping[str, Any] | None, time_s: float) -> None:
        if told is None:
            return
        if told["beat"] != self.told.get("beat"):
            self.beat_since_s = time_s
        if any(told[key] != self.told.get(key) for key in ("num_changes", "place")):
            self.progress_since_s = time_s
        self.told = told


def answer_now(activity: Activity, bucket_bytes: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns what this rank is doing, with its main thread's stack and its latest collectives, as JSON can hold it.

    Args:
        activity: of this process.
        bucket_bytes: sizes of DDP's buckets in the order of reduction, where they are known.

    Collectives:
        None.
    """
    snapshot = activity.snapshot()
    return {
        **snapshot,
        "begun_ns": time.time_ns() - int(1e9 * snapshot["for_s"]),
        "stack": main_thread_stack(),
        "operations": operations(_compat.flight_records()),
        "bucket_bytes": bucket_bytes,
        "in_lanes": in_lanes(),
    }


def _parsed(note: Mapping[str, Any]) -> Answer:
    return Answer(
        stack=[Frame(*values) for values in note["stack"]],
        operations=[Operation(*values) for values in note["operations"]],
        begun_ns=note["begun_ns"],
        bucket_bytes=note["bucket_bytes"],
        in_lanes=note["in_lanes"],
    )
