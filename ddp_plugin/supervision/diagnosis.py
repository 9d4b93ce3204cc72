"""What every rank is doing while nothing goes on, put into one sentence, with its likely cause."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ddp_plugin.supervision.flight import Operation, bucket_of, named, parting, unfinished
from ddp_plugin.supervision.stacks import Frame, Standing, standing

__all__ = ["Answer", "Cause", "Diagnosis", "RankState", "diagnose", "named_ranks"]

_EVALUATIONS = {"validate": "validation", "sanity_check": "sanity check", "test": "test", "predict": "prediction"}
_WAITS = ("collective", "comparison", "backward")
_NUM_OPERATIONS = 3


@dataclass(frozen=True)
class Answer:
    """What a rank says when it is asked.

    Attributes:
        stack: of its main thread, the innermost call first.
        operations: its latest collectives.
        begun_ns: when the latest thing that it does began, by the clock of ``operations``.
        bucket_bytes: sizes of DDP's buckets, where they are known.
        in_lanes: what its communication threads run.
    """

    stack: Sequence[Frame] = ()
    operations: Sequence[Operation] = ()
    begun_ns: int = 0
    bucket_bytes: Sequence[int] | None = None
    in_lanes: Sequence[str] = ()


@dataclass(frozen=True)
class RankState:
    """What is known of a rank.

    Attributes:
        rank: which one.
        doing: what it has begun and not ended, outermost first.
        place: ``stage``, ``epoch``, ``step`` and ``batch`` of its Trainer; ``train_batch``, its latest training batch
            also while it validates; ``is_last_batch``, whether no further one comes in the epoch. Keys may be missing.
        still_s: seconds since anything changed there.
        silent_s: seconds since it was heard of, where that is too long; else ``None``.
        left: how it left the run (empty for an end without an error); ``None`` while it is inside.
        answer: what it said; ``None`` where it does not answer.
    """

    rank: int
    doing: Sequence[str] = ()
    place: Mapping[str, Any] = field(default_factory=dict)
    still_s: float = 0.0
    silent_s: float | None = None
    left: str | None = None
    answer: Answer | None = None


class Cause(NamedTuple):
    """A likely cause.

    Attributes:
        question: it, in a few words, without the question mark.
        change: what to look at or to change.
    """

    question: str
    change: str


@dataclass(frozen=True)
class Diagnosis:
    """What a stall looks like.

    Attributes:
        headline: which rank does what, and the likely cause, in one sentence.
        cause: the likely one.
        is_debugged: whether a debugger holds some rank, so that nothing is wrong.
        report: all of it, with what each rank does and with the stacks.
    """

    headline: str
    cause: Cause
    is_debugged: bool
    report: str


def diagnose(states: Sequence[RankState], limit_s: float) -> Diagnosis:
    """Explains a stall.

    Args:
        states: what is known of each rank.
        limit_s: the time without progress after which it is asked for, in seconds.

    Collectives:
        None.
    """
    ranks = [_Rank(state) for state in states]
    cause = _cause(ranks)
    groups = _grouped(ranks, lambda rank: rank.sentence())
    told = "; ".join(_told(who, what) for what, who in groups)
    headline = f"{told}: {cause.question}?"
    is_debugged = any(rank.stands.kind == "debugger" for rank in ranks)
    lines = [f"No progress for {limit_s:g} s: {headline}", "", f"{cause.change}.", ""]
    lines += [line for rank in ranks for line in rank.details()]
    if (parted := _parting_in_words(ranks)) is not None:
        lines.append(parted)
    for what, who in _grouped(ranks, _Rank.stack):
        lines += ["", f"Stack of {named_ranks(who)}, the innermost call first:", what]
    return Diagnosis(headline, cause, is_debugged, "\n".join(lines))


def named_ranks(ranks: Sequence[int]) -> str:
    """Returns ranks in words: ``"rank 2"``, ``"ranks 0 and 2"``, ``"ranks 0 to 3 and 7"``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    several = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {several}"


_OF_SEVERAL = {
    "waits": "wait",
    "is": "are",
    "has": "have",
    "does": "do",
    "loads": "load",
    "saves": "save",
    "calls": "call",
}


def _told(ranks: Sequence[int], what: str) -> str:
    verb, space, rest = what.partition(" ")
    return f"{named_ranks(ranks)} {_OF_SEVERAL[verb] if len(ranks) > 1 else verb}{space}{rest}"


class _Rank:
    """What is known of a rank, and what that means."""

    def __init__(self, state: RankState) -> None:
        self.state = state
        self.rank = state.rank
        answer = state.answer or Answer()
        self.answer = answer
        self.stands = standing(answer.stack) if answer.stack else Standing("other")
        self.awaited = self._awaited()
        self.stage = state.place.get("stage")
        self.batch: int | None = state.place.get("batch")
        self.epoch: int | None = state.place.get("epoch")

    def _awaited(self) -> Operation | None:
        """Returns the collective in which it may be stuck, where its stack does not tell; others may run unattended."""
        answer = self.answer
        for operation in unfinished(answer.operations):
            if operation.begun_ns >= answer.begun_ns if self.stands.kind == "backward" else operation.is_on_device:
                return operation
        return None

    @property
    def is_present(self) -> bool:
        return self.state.silent_s is None and self.state.left is None

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        if not self.is_present:
            return False
        if self.stands.kind == "backward":
            return bool(self.awaited or self.answer.in_lanes or not self.answer.operations)
        in_code = self.stands.kind in ("callback", "hook", "other")  # in a kernel that waits for one of NCCL's, perhaps
        return self.stands.kind in _WAITS or (in_code and self.awaited is not None)

    @property
    def bucket(self) -> int | None:
        if self.awaited is None or self.innermost != "backward":
            return None
        return bucket_of(self.answer.operations, self.awaited, self.answer.bucket_bytes, self.answer.begun_ns)

    @property
    def alone_in(self) -> str:
        """The user's own call that waits, ``""`` where it is not the user who calls."""
        stands = self.stands
        if stands.kind not in ("collective", "comparison") or stands.users is None or stands.in_save:
            return ""
        return "" if stands.in_logging else stands.users.place

    def sentence(self) -> str:
        """Returns what it does, as the headline says it."""
        state = self.state
        if state.left is not None:
            return f"has left the run by {state.left}" if state.left else "has ended its run"
        if state.silent_s is not None:
            return f"has not been heard of for {state.silent_s:.0f} s"
        if self.waits:
            return f"waits {self._waited_for()}{self._since()}"
        return f"{self._doing()}{self._at()}"

    def details(self) -> list[str]:
        place = self.state.place
        where = ", ".join(
            f"{key} {place[key]}" for key in ("stage", "epoch", "step", "batch") if place.get(key) is not None
        )
        doing = " > ".join(self.state.doing) or "between two steps"
        still = f"the same for {self.state.still_s:.0f} s"
        lines = [f"rank {self.rank}: {self.sentence()}. {where or 'no place'}; {doing}; {still}"]
        for operation in self.answer.operations[-_NUM_OPERATIONS:]:
            end = "ended" if operation.is_done else "not ended"
            lines.append(f"    number {operation.number} of group {operation.group}: {named(operation)}, {end}")
        return lines

    def stack(self) -> str:
        if not self.answer.stack:
            return "    (none: it did not answer)"
        return "\n".join(
            f"    {frame.file}:{frame.line} in {frame.name}" + (f": {frame.code}" if frame.code else "")
            for frame in self.answer.stack
        )

    @property
    def innermost(self) -> str:
        """The innermost of what it has begun, or empty."""
        return self.state.doing[-1] if self.state.doing else ""

    def _waited_for(self) -> str:
        stands, innermost = self.stands, self.innermost
        if stands.kind == "comparison":
            if stands.in_logging:
                return f"to reduce the logged value {stands.what}{self._called()}"
            return f"to compare {stands.what} with the other ranks{self._called()}"
        if self.answer.in_lanes and self.innermost == "backward":
            return f"in {' and '.join(self.answer.in_lanes)}"
        if (bucket := self.bucket) is not None:
            return f"in the all-reduce of bucket {bucket}"
        if stands.kind == "backward":
            return f"in the backward, in {named(self.awaited)}" if self.awaited else "in the backward for the gradients"
        if stands.in_save:
            return "in the save of a checkpoint"
        if stands.kind == "collective":
            words = innermost if innermost.startswith(("the ", "a ", "an ")) else stands.what
            return f"in {words}{self._called()}"
        assert self.awaited is not None
        return f"in {named(self.awaited)}{self._called()}"

    def _doing(self) -> str:
        stands, innermost = self.stands, self.innermost
        if stands.kind == "data":
            if stands.what:
                return f"waits for {stands.what}"
            return f"loads data in `{stands.users.name}`" if stands.users is not None else "loads data"
        if stands.kind == "debugger":
            return "is held by a debugger"
        if stands.kind == "save" or innermost.startswith("the save"):
            return "saves a checkpoint"
        if stands.kind == "outside" and stands.users is not None:
            return f"is outside of the run, in {stands.users.place}"
        if stands.kind == "callback":
            return f"is in `{stands.hook}`"
        if innermost:
            return f"is in {innermost}" if " " in innermost else f"is in `{innermost}`"
        if stands.hook:
            return f"is in `{stands.hook}`"
        return f"is in `{self.answer.stack[0].name}`" if self.answer.stack else "does not answer"

    def _called(self) -> str:
        users = self.stands.users
        if users is None:
            return f", in `{self.stands.hook}`" if self.stands.hook else ""
        return f", in `{self.stands.hook or users.name}` ({users.place})"

    def _since(self) -> str:
        step = self.state.place.get("step")
        evaluation = _EVALUATIONS.get(str(self.stage))
        if evaluation is not None:
            return f" of the {evaluation}" + (f", batch {self.batch}" if self.batch is not None else "")
        return f" since step {step}" if step is not None else ""

    def _at(self) -> str:
        evaluation = _EVALUATIONS.get(str(self.stage))
        in_evaluation = f" of the {evaluation}" if evaluation and "_step" not in self.innermost else ""
        return in_evaluation + (f", batch {self.batch}" if self.batch is not None else "")


def _grouped(ranks: Sequence[_Rank], key: Callable[[_Rank], str]) -> list[tuple[str, list[int]]]:
    """Groups ranks by a text; those that wait first, as the others explain them."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(ranks, key=lambda rank: (not rank.waits, rank.rank)):
        groups.setdefault(key(rank), []).append(rank.rank)
    return list(groups.items())


# --------------------------------------------------------------------------------------------------------------- causes


def _cause(ranks: Sequence[_Rank]) -> Cause:
    for rule in _RULES:
        if (cause := rule(ranks)) is not None:
            return cause
    if (parted := _parting_in_words(ranks)) is not None:
        return Cause("collectives that differ between ranks", parted.rstrip("."))
    return Cause("a cause that the stacks may show", "Compare the stacks below")


def _left(ranks: Sequence[_Rank]) -> Cause | None:
    by_error = [rank.rank for rank in ranks if rank.state.left]
    ended = [rank.rank for rank in ranks if rank.state.left == ""]
    if by_error:
        return Cause(
            f"an exception that {named_ranks(by_error)} alone met, and caught",
            "Let it pass, so that the run ends on all ranks, or catch it on all of them",
        )
    if ended and len(ended) < len(ranks):
        return Cause(
            f"fewer batches or epochs on {named_ranks(ended)}",
            "Give all ranks equal numbers of both; SamplerEpoch lets ranks of unequal lengths stop together",
        )
    return None


def _silent(ranks: Sequence[_Rank]) -> Cause | None:
    silent = [rank.rank for rank in ranks if rank.state.silent_s is not None and rank.state.left is None]
    if not silent:
        return None
    return Cause(
        f"{named_ranks(silent)} stopped, dead, or on a host that is gone",
        "Look for the process: one that is stopped has state T; one that is gone was killed, perhaps for memory "
        "(dmesg); one that runs is in code that holds Python's interpreter lock",
    )


def _debugged(ranks: Sequence[_Rank]) -> Cause | None:
    held = [rank.rank for rank in ranks if rank.stands.kind == "debugger"]
    return Cause(f"the debugger on {named_ranks(held)}", "Nothing; the others wait for it") if held else None


def _outside(ranks: Sequence[_Rank]) -> Cause | None:
    outside = [rank for rank in ranks if rank.is_present and rank.stands.kind == "outside" and rank.stands.users]
    if not outside or len(outside) == len(ranks):
        return None
    return Cause(
        f"code that {named_ranks([rank.rank for rank in outside])} alone runs",
        "Run it on all ranks, or after the run",
    )


def _loader(ranks: Sequence[_Rank]) -> Cause | None:
    loading = [rank for rank in ranks if rank.is_present and not rank.waits and rank.stands.kind == "data"]
    if not loading:
        return None
    worker = next((rank.stands.what for rank in loading if rank.stands.what), "")
    look = f"Look into it with `py-spy dump` on the worker: {worker}" if worker else "Look at its stack below"
    return Cause(
        f"a data loader that is stuck or slow on {named_ranks([rank.rank for rank in loading])}",
        f"{look}. A file system that hangs, a lock, and a worker without memory look like this; "
        "DataLoader(timeout=...) makes it an error",
    )


def _save(ranks: Sequence[_Rank]) -> Cause | None:
    waiting = [rank.rank for rank in ranks if rank.waits and rank.stands.in_save]
    if waiting and len([rank for rank in ranks if rank.stands.in_save]) < len(ranks):
        return Cause(
            f"a checkpoint that {named_ranks(waiting)} alone saves",
            "Call trainer.save_checkpoint on all ranks, outside `if trainer.is_global_zero`; only rank 0 writes a file",
        )
    writing = [rank.rank for rank in ranks if not rank.waits and (rank.stands.kind == "save" or rank.stands.in_save)]
    if writing:
        return Cause(
            f"a file system that is slow or hangs under the save of {named_ranks(writing)}",
            "Look at the disk; if it is only slow, raise limit_s above the time of a save",
        )
    return None


def _logged(ranks: Sequence[_Rank]) -> Cause | None:
    logging = [rank for rank in ranks if rank.waits and rank.stands.in_logging]
    if not logging or len({rank.stands.what for rank in logging}) == 1 and len(logging) == len(ranks):
        return None
    key = logging[0].stands.what
    return Cause(
        f"{key} logged with sync_dist=True on {named_ranks([rank.rank for rank in logging])} alone",
        "Log it on every rank, or with rank_zero_only=True and without sync_dist",
    )


def _own_collective(ranks: Sequence[_Rank]) -> Cause | None:
    calling = [rank for rank in ranks if rank.waits and rank.alone_in]
    places = {(rank.alone_in, rank.stands.hook) for rank in calling}
    if not calling or (len(places) == 1 and len(calling) == len(ranks)):
        return None
    who = [
        rank.rank
        for rank in calling
        if (rank.alone_in, rank.stands.hook) == (calling[0].alone_in, calling[0].stands.hook)
    ]
    return Cause(
        f"a collective that {named_ranks(who)} alone calls",
        "Call it on every rank: not inside `if trainer.is_global_zero` or under a condition that differs between ranks",
    )


def _stages(ranks: Sequence[_Rank]) -> Cause | None:
    present = [rank for rank in ranks if rank.is_present]
    stages = {str(rank.stage) for rank in present if rank.stage}
    evaluations = [stage for stage in _EVALUATIONS if stage in stages]
    if not evaluations or not any(rank.waits for rank in present):
        return None
    if len(stages) == 1 and len({(rank.batch, rank.sentence()) for rank in present}) == 1:
        return None
    if len(stages) == 1 and len({rank.batch for rank in present}) == 1:
        return None  # all in the same batch: another rule says what they do there
    training = [rank for rank in present if rank.stage == "train" and rank.state.doing]
    ended = [rank for rank in present if rank.stage != "train" and rank.state.place.get("is_last_batch")]
    if training and ended and all(rank.epoch == training[0].epoch for rank in ended):
        return _training_cause(training, ended)  # some are past an epoch in which others still train
    return Cause(
        f"unequal numbers of {_EVALUATIONS[evaluations[0]]} batches",
        "Use ExactEvaluation, which gives all ranks as many steps; else look for a rank that evaluates alone, as with "
        "val_check_interval in time, or a trainer.validate under a condition",
    )


def _stuck(ranks: Sequence[_Rank]) -> Cause | None:
    """One rank does something of its own, and the others wait for it."""
    busy = [rank for rank in ranks if rank.is_present and not rank.waits]
    if not busy or (len(busy) == len(ranks) and len(ranks) > 1):
        return None
    first = busy[0]
    name = first.stands.hook if first.stands.kind == "callback" else first.innermost or first.stands.hook
    if not name:
        return None
    users = first.stands.users
    where = f"It stands at {users.place}. " if users is not None else ""
    return Cause(
        f"`{name}` does not return on {named_ranks([rank.rank for rank in busy])}",
        f"{where}A lock that nobody releases, a slow disk or network, or a very long computation",
    )


def _training(ranks: Sequence[_Rank]) -> Cause | None:
    """Some rank waits for gradients that another one does not bring."""
    waiting = [rank for rank in ranks if rank.waits and rank.stage == "train" and rank.state.doing]
    others = [rank for rank in ranks if rank.is_present and rank.stage == "train" and not rank.state.doing]
    if not waiting or not others:
        return None
    return _training_cause(waiting, others)


def _training_cause(inside: Sequence[_Rank], past: Sequence[_Rank]) -> Cause:
    """Some ranks are inside a training step for which others, which are past it or past the epoch, do not come."""
    skipping = [rank.rank for rank in past if _position(rank) >= _position(inside[0])]
    if len(skipping) < len(past) or any(rank.epoch != inside[0].epoch for rank in past):
        return Cause(
            "unequal numbers of training batches",
            "Use SamplerEpoch, which lets all ranks stop together, or give every rank as many batches",
        )
    return Cause(
        f"a backward that {named_ranks(skipping)} skipped",
        "Run one backward in each training step of each rank, on a loss of zero if need be; let exceptions in it pass",
    )


def _alike(ranks: Sequence[_Rank]) -> Cause | None:
    if not ranks or not all(rank.waits for rank in ranks):
        return None
    if len(ranks) > 1 and len({(rank.sentence(), rank.batch, rank.epoch) for rank in ranks}) == 1:
        return Cause(
            "a link between hosts that is down or blocked",
            "All ranks wait in one and the same collective, so their programs agree: look at the network, at "
            "firewalls, and at the driver",
        )
    return None


def _single(ranks: Sequence[_Rank]) -> Cause | None:
    if len(ranks) != 1:
        return None
    rank = ranks[0]
    where = rank.stands.users.place if rank.stands.users is not None else rank.sentence()
    return Cause(f"code that does not go on ({where})", "Look at the stack below")


_RULES: tuple[Callable[[Sequence[_Rank]], Cause | None], ...] = (
    _debugged,
    _left,
    _silent,
    _outside,
    _save,
    _loader,
    _logged,
    _own_collective,
    _stages,
    _stuck,
    _training,
    _alike,
    _single,
)


def _position(rank: _Rank) -> tuple[int, int]:
    batch = rank.state.place.get("train_batch", rank.batch)
    return (-1 if rank.epoch is None else rank.epoch), (-1 if batch is None else batch)


def _parting_in_words(ranks: Sequence[_Rank]) -> str | None:
    found = parting({rank.rank: rank.answer.operations for rank in ranks if rank.state.answer is not None})
    if found is None:
        return None
    words: dict[str, list[int]] = {}
    for rank, operation in found.by_rank.items():
        words.setdefault("has not come to it" if operation is None else f"calls {named(operation)}", []).append(rank)
    told = "; ".join(_told(who, what) for what, who in words.items())
    return f"Collective number {found.number} of group {found.group}: {told}."
