"""The first failure of a run ends all ranks, each within seconds, and each says which one it was."""

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.utils.data import dataloader

from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board, BoardLostError
from ddp_plugin.supervision.ending import be_interruptible, end_process, interrupt_main_thread, say
from ddp_plugin.supervision.failure import PeerFailedError, describe, describe_at_length, gist, is_consequence, one_line
from ddp_plugin.supervision.processes import has_ended, identify
from ddp_plugin.supervision.pulse import ACTIVITY

__all__ = ["FailureWatch"]

FIRST = "ending"
"""The board's topic for the first event that ends the run: a failure of any rank, or the regular end of rank 0."""

PROCESS = "process"
"""The board's topic for :func:`~ddp_plugin.supervision.processes.identify`."""

_OVER, _HAS_RAISED, _IS_TOLD = "over", "has raised", "is told"
_THE_SAME = "has raised the same"  # as the first, in the same place

PATIENCE_S = {"raised": 1.0, "left": 10.0, "died": 0.5, "silent": 0.5, "lost": 1.0, "slept": 1.0, "told": 0.0}
"""How long a rank may still come to an end of its own, by the kind of the first event: all ranks often raise alike, and
all come to an agreed stop."""

GRACE_S = 1.0
"""How long an interrupted main thread may take to leave what it is in."""

WIND_UP_S = 5.0
"""How long callbacks, loggers and the rest of the program may take to end, once the Trainer has raised."""

LEAVE_S = WIND_UP_S + 1.0
"""How long a rank that is stuck stays at most after it has said so, until whoever failed first has left before it."""

OVER_WITHIN_S = 10.0
"""How long rank 0 waits at its regular end for the other ranks to come to theirs."""

INQUEST_S = 2.5
"""How long a rank whose connection broke looks for the failure behind it."""

CENSUS_S, MAX_SILENT_CENSUSES = 10.0, 12
"""How often rank 0 looks whether the pulses of ranks on other machines beat, and how many such looks in a row may find
one standing still. A process that holds Python's interpreter lock has none either, for instance while it unpickles."""

ASLEEP_S = 8.0
"""How long a process that is merely starved may not have run; beyond it, what it misses afterwards is no news."""

_POLL_S = 0.02


class FailureWatch:
    """Tells the others when this rank fails, and ends this one when another did.

    A rank that raises claims the board's topic, so that one failure is the first, and waits a moment until all ranks
    know. The others get :class:`PeerFailedError` in their main threads; where a main thread cannot be reached, because
    it waits for a collective inside C++, the process is ended with status 1. A rank that was killed tells nothing: the
    ranks on its machine miss its process, and rank 0 misses the pulses of a machine that is gone.

    Where all ranks raise, each by itself, nobody is ended, and the program may catch it and go on. A rank that leaves
    alone by ``sys.exit(0)`` ends with status 1.

    Args:
        board: of this run.
        activity: of this rank.
        neighbours: the ranks on this machine.
        slept_s: tells for how many seconds this process has not run, where it has only just woken.

    Collectives:
        None; all goes through the board.
    """

    def __init__(
        self,
        board: Board,
        activity: Activity,
        neighbours: Sequence[int] = (),
        slept_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._board = board
        self._slept_s = slept_s
        self._activity = activity
        self._own = identify()
        self._neighbours = {rank: None for rank in neighbours if rank != board.rank}
        self._processes: dict[int, dict[str, Any]] = {}
        self._first: dict[str, Any] | None = None
        self._next_census = time.monotonic() + CENSUS_S
        self._beats: dict[int, tuple[int, int]] = {}  # the last one of each rank, and at how many looks it stood still
        self._has_answered = False
        self._is_over = False
        self._has_come = threading.Event()  # the main thread, to raised()
        self._is_leaving = threading.Event()  # the main thread, from raised()
        self._is_for_all = threading.Event()  # all ranks raised, each by itself
        self._lock = threading.Lock()

    def start(self) -> None:
        """Shows the others where this process is; in its main thread.

        Raises:
            BoardLostError: the board does not answer.
        """
        be_interruptible()
        self._board.post(PROCESS, self._own)

    @property
    def first(self) -> Mapping[str, Any] | None:
        """What ended the run, as far as this rank knows: ``kind``, ``rank``, ``place``, ``doing``, ``error`` …"""
        return self._first

    # ---------------------------------------------------------------------------------------- in the pulse's thread

    def look(self, board: Board) -> None:
        """Looks for the first failure, and for processes on this machine that are gone."""
        if self._first is not None or self._is_over:
            return
        note = board.claimed(FIRST) or self._missed(board) or self._silent(board)
        if note is not None:
            self._learn(note)

    def lose(self, error: BoardLostError) -> None:
        """Ends this process: without the store no failure can be told, and no group could be made."""
        if self._first is None and not self._is_over:
            self._learn(self._describe_lost(error))

    # ----------------------------------------------------------------------------------------- in any other thread

    def tell(self, sentence: str) -> Mapping[str, Any]:
        """Ends all ranks for a reason that no rank raised, as for a hang; returns what ended them first.

        Args:
            sentence: what all ranks are told.

        Raises:
            BoardLostError: the board does not answer.
        """
        note = self._board.claim(FIRST, {"kind": "told", "rank": self._board.rank, "error": sentence})
        self._learn(note)
        return note

    # ------------------------------------------------------------------------------------------ in the main thread

    def raised(self, error: BaseException, doing: str | None = None) -> BaseException:
        """Tells the others that an exception ends this rank's run, and waits a few seconds at most until they know.

        Args:
            error: what was raised.
            doing: in what, where the activity does not know.

        Returns:
            What to raise: the exception itself, or :class:`PeerFailedError` where it only followed from a failure
            elsewhere; in place of a ``SystemExit`` with status 0 that the others did not raise, one with status 1.
        """
        if self._is_over or self._is_leaving.is_set():
            return error
        self._has_come.set()
        try:
            try:
                return self._raised(error, doing)
            except BoardLostError:
                raise
            except RuntimeError as interruption:  # torch's handler of a killed data worker's signal, wherever this was
                return self._raised(interruption, "a data loader")
        except BoardLostError as lost:
            if self._first is None:
                self._learn(self._describe_lost(lost))
            return self._blame(error)
        finally:
            self._is_leaving.set()

    def over(self) -> None:
        """Tells the others that this rank comes to its regular end.

        Rank 0 waits for the others, 10 s at most, and then says that it goes: its process may hold the store.
        """
        if self._first is not None or self._is_over or self._is_leaving.is_set():
            return
        with contextlib.suppress(BoardLostError):
            self._is_over = self._board.rank != 0
            self._board.post(_OVER, {})
            if self._is_over:
                self._answer(_OVER)
            elif not self._are_over(OVER_WITHIN_S) and self._first is None:
                note = {"kind": "over", "rank": 0, "place": self._activity.snapshot()["place"]}
                self._learn(self._board.claim(FIRST, note))
                self._are_over(GRACE_S)
        self._is_over = True

    # -------------------------------------------------------------------------------------------------------- parts

    def _raised(self, error: BaseException, doing: str | None) -> BaseException:
        if isinstance(error, PeerFailedError):
            self._say_on_rank_0()
            self._answer(_IS_TOLD)
            return error
        follows = _follows_from_others(error)
        if follows:
            self._look_for_cause()
        own = self._describe_own(error, doing)
        note = self._first or self._board.claim(FIRST, own)
        self._learn(note)
        if note["kind"] == "over" and not follows:
            _append(error, describe(own))
            return error
        if follows and note["rank"] != self._board.rank:
            self._say_on_rank_0()
            self._answer(_IS_TOLD)
            return self._blame(error)
        _tell_torchrun(error)
        if all(own[key] == note.get(key) for key in ("kind", "place", "doing", "gist")):
            self._board.count(_THE_SAME, 1)
        self._answer(_HAS_RAISED)
        if self._wait_for_all(PATIENCE_S.get(note["kind"], 0.0) + 2 * GRACE_S):
            self._is_for_all.set()
            if note["kind"] == "raised":
                is_the_same = self._board.count(_THE_SAME) == self._board.world_size
                _append(error, describe(note, is_for_all=True, is_the_same=is_the_same))
            return error
        self._say_on_rank_0()
        if isinstance(error, SystemExit) and not error.code:
            return SystemExit(describe(note))  # Python writes it to standard error, and ends with status 1
        _append(error, describe(note))
        return error

    def _say_on_rank_0(self) -> None:
        """Says what happened at once: the launcher may kill this process before its traceback is written."""
        if self._board.rank == 0 and self._first is not None:
            say(describe(self._first))

    def _are_over(self, within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while self._board.count(_OVER) < self._board.world_size - 1:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _look_for_cause(self) -> None:
        """Looks for what broke a connection, faster than the pulse does, and at last for ranks gone silent."""
        before = None
        deadline = time.monotonic() + INQUEST_S
        while self._first is None and time.monotonic() < deadline:
            self.look(self._board)
            before = before or self._board.read_all(ACTIVITY)
            time.sleep(_POLL_S)
        if self._first is None and before is not None:
            now = self._board.read_all(ACTIVITY)
            over = self._board.read_all(_OVER)
            for rank, activity in before.items():
                if now[rank]["beat"] == activity["beat"] and rank not in over and rank != self._board.rank:
                    self._learn(self._board.claim(FIRST, self._describe_dead(rank, self._board)))
                    return

    def _wait_for_all(self, within_s: float) -> bool:
        """Waits until all ranks know; returns whether all of them raised, each by itself."""
        deadline = time.monotonic() + within_s
        while True:
            num_raised = self._board.count(_HAS_RAISED)
            if num_raised == self._board.world_size:
                return True
            if num_raised + self._board.count(_IS_TOLD) >= self._board.world_size or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)

    def _answer(self, topic: str) -> None:
        with self._lock:
            has_answered, self._has_answered = self._has_answered, True
        if not has_answered:
            self._board.count(topic, 1)

    def _missed(self, board: Board | None) -> dict[str, Any] | None:
        """Returns the claimed note about a process on this machine that ended without a word."""
        for rank in tuple(self._neighbours):
            if board is not None and rank not in self._processes:
                found = board.read(PROCESS, rank)
                if found is None:
                    continue
                self._processes[rank] = found
            process = self._processes.get(rank)
            if process is None or not has_ended(process, self._own):
                continue
            if board is None:
                return self._describe_dead(rank, None)
            if board.read(_OVER, rank) is not None:
                del self._neighbours[rank]
                continue
            return board.claim(FIRST, self._describe_dead(rank, board))  # unless it told why, before it went
        return None

    def _silent(self, board: Board) -> dict[str, Any] | None:
        """Returns the claimed note about a process on another machine that has not been heard of for long."""
        now = time.monotonic()
        if board.rank != 0 or now < self._next_census:
            return None
        self._next_census = now + CENSUS_S
        for rank in range(1, board.world_size):
            if rank in self._processes and self._processes[rank]["pid_space"] == self._own["pid_space"]:
                continue
            beat = (board.read(ACTIVITY, rank) or {}).get("beat", -1)
            last, num_silent = self._beats.get(rank, (beat, -1))
            num_silent = num_silent + 1 if beat == last else 0
            self._beats[rank] = beat, num_silent
            if num_silent >= MAX_SILENT_CENSUSES and board.read(_OVER, rank) is None:
                note = self._describe_dead(rank, board) | {"kind": "silent", "for_s": num_silent * CENSUS_S}
                return board.claim(FIRST, note)
        return None

    def _learn(self, note: dict[str, Any]) -> None:
        with self._lock:
            is_news, self._first = self._first is None, self._first or note
        if not is_news:
            return
        if note["kind"] == "over":
            if self._board.rank != 0:
                with contextlib.suppress(BoardLostError):
                    self._answer(_OVER)
        else:
            threading.Thread(target=self._end_in_time, args=(note,), name="ddp_plugin-end", daemon=True).start()

    def _end_in_time(self, note: Mapping[str, Any]) -> None:
        """Sees to it that this process ends: by itself, by an exception, or at once."""
        if not self._has_come.wait(PATIENCE_S[note["kind"]]):
            interrupt_main_thread(PeerFailedError(describe_at_length(note)))
            if not self._has_come.wait(GRACE_S):
                say(describe(note))
                with contextlib.suppress(BoardLostError):
                    self._answer(_IS_TOLD)
                if not self._is_released(note):
                    end_process()
        self._is_leaving.wait()
        if not self._is_for_all.wait(WIND_UP_S):
            end_process(describe(note))

    def _is_released(self, note: Mapping[str, Any]) -> bool:
        """Waits until whoever failed has left; its closed connections may release this rank's main thread."""
        deadline = time.monotonic() + LEAVE_S
        while not self._has_come.wait(_POLL_S) and time.monotonic() < deadline:
            if "process" in note and has_ended(note["process"], self._own):
                return self._has_come.wait(GRACE_S / 2)
        return self._has_come.is_set()

    def _blame(self, error: BaseException) -> BaseException:
        """Returns the error to raise in place of one that followed from the first failure."""
        if not _follows_from_others(error) or self._first is None:
            return error
        blaming = PeerFailedError(describe_at_length(self._first))
        blaming.__cause__ = error
        return blaming

    def _describe_own(self, error: BaseException, doing: str | None) -> dict[str, Any]:
        snapshot = self._activity.snapshot()
        return {
            "kind": "raised" if isinstance(error, Exception) else "left",
            "rank": self._board.rank,
            "process": self._own,
            "place": snapshot["place"],
            "doing": "a data loader"
            if _tells_of_worker(error)
            else self._activity.failed_in or _loader(error) or doing,
            "error": one_line(error),
            "gist": gist(error),
            "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__, limit=-8))[-4000:],
        }

    def _describe_lost(self, error: BoardLostError) -> dict[str, Any]:
        """Looks for the process behind a lost store; one that was killed takes a moment to be gone."""
        if (slept_s := self._slept_s()) > ASLEEP_S:  # whoever is gone by now need not be at fault
            snapshot = self._activity.snapshot()
            doing = next(reversed(snapshot["doing"]), None)
            place = snapshot["place"]
            return {"kind": "slept", "rank": self._board.rank, "for_s": slept_s, "place": place, "doing": doing}
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            if (note := self._missed(None)) is not None:
                return note
            time.sleep(_POLL_S)
        return {"kind": "lost", "rank": self._board.rank, "error": one_line(error)}

    def _describe_dead(self, rank: int, board: Board | None) -> dict[str, Any]:
        activity = (board.read(ACTIVITY, rank) if board is not None else None) or {}
        process = self._processes.get(rank) or (board.read(PROCESS, rank) if board is not None else None) or {}
        place, doing = activity.get("place", {}), next(reversed(activity.get("doing", [])), None)
        own = self._activity.snapshot()["place"]
        if own.get("step", 0) > place.get("step", 0):  # it was heard of a beat ago; ranks train in step
            place, doing = own, None
        return {
            "kind": "died",
            "rank": rank,
            "place": place,
            "doing": doing,
            "pid": process.get("pid"),
            "host": process.get("host"),
        }


def _follows_from_others(error: BaseException) -> bool:
    """Whether a connection broke that was not one to a data worker, or one of the user's own dataset."""
    return is_consequence(error) and _loader(error) is None


def _tells_of_worker(error: BaseException) -> bool:
    """Whether torch's handler raised because a data worker was killed: wherever this process was just then."""
    return one_line(error).startswith("RuntimeError: DataLoader worker (pid")


def _loader(error: BaseException) -> str | None:
    frames = traceback.walk_tb(error.__traceback__)
    return "a data loader" if any(frame.f_code.co_filename == dataloader.__file__ for frame, _ in frames) else None


def _tell_torchrun(error: BaseException) -> None:
    """Lets torchrun's own report name the rank that failed first, not the one that ended first."""
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)


def _append(error: BaseException, sentence: str) -> None:
    """Lets an exception's traceback end with a sentence; Python 3.10 has no notes, and says it now."""
    if hasattr(error, "add_note"):
        error.add_note(sentence)
    else:
        say(sentence)
