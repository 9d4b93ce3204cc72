"""Before a process group exists: all ranks come together at a store, and rank 0 says whether they fit together.

A process group waits in silence for ranks that never come, and begins to talk with ranks that expect another number of
them. A store needs neither: it is a small server in rank 0's process, or in torchrun's agent.

Under torchrun the store lives on when the processes are started again, with all that the last ones wrote. So each
process has a token of its own, and rank 0 counts only those that answer when they are called by it.
"""

import json
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.preflight.addresses import is_this_machine
from ddp_plugin.preflight.comparison import Finding, in_ranks
from ddp_plugin.preflight.facts import WORLD, Facts

__all__ = ["Complete", "Meeting", "raise_errors", "roll_call"]

PATIENCE_S = 30.0
"""After this a rank says whom it waits for; Python and torch may take as long to start on a busy file system."""

_DEFAULT_WAIT = timedelta(minutes=30)
_GRACE_S = 3.0  # for what is on its way, where the run will not go on
_LOOK_EVERY_S = 0.01  # rank 0 alone, while ranks are missing
_PREFIX = "ddp_plugin/roll_call"


@dataclass(frozen=True)
class Meeting:
    """Where ranks meet.

    Attributes:
        address: host of the store.
        port: of the store.
        world_size: how many ranks are to come.
        timeout: after this a rank gives up; ``None`` is half an hour.
    """

    address: str
    port: int
    world_size: int
    timeout: timedelta | None = None

    @property
    def is_hosted_by_agent(self) -> bool:
        """Whether torchrun's agent holds the store, so that rank 0 does not have to."""
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


@dataclass(frozen=True)
class Complete:
    """A roll call to which all ranks have answered.

    Attributes:
        findings: what rank 0 has found; none is an error.
        store: an empty one, in which these processes are alone. Type checkers do not see torch's name for it.
    """

    findings: list[Finding]
    store: Any


@contextmanager
def roll_call(
    meeting: Meeting, facts: Facts, compare: Callable[[Sequence[Facts]], list[Finding]]
) -> Iterator[Complete]:
    """Brings all ranks together, and compares what they say about themselves.

    The process group is to be made inside the ``with`` block: rank 0's store serves it too, so that nobody can take the
    port in between.

    Args:
        meeting: where.
        facts: this rank's.
        compare: run by rank 0 alone.

    Yields:
        What all ranks have now.

    Raises:
        DDPPluginError: on all ranks that came, with the same words, where ranks do not fit together or have not come in
            time; on this rank alone, where no store answers or its port is taken.

    Collectives:
        None; all ranks must call it equally often. Each rank sends its facts to the store once; rank 0 reads them.
    """
    deadline = time.monotonic() + _wait_s(meeting)
    server = _reach_store(meeting, facts, deadline)
    store = dist.PrefixStore(_PREFIX, server)  # type: ignore[attr-defined]
    token = uuid.uuid4().hex
    store.set(f"arrival {store.add('arrivals', 1) - 1}", json.dumps([token, facts.to_json()]))
    if facts.rank == 0:
        findings, caller = _call_all(store, meeting, token, compare, deadline), token
    else:
        patient = deadline + _wait_s(meeting)  # rank 0 may come much later, and says who is missing
        findings, caller = _answer(store, meeting, token, facts.rank, patient)
    raise_errors(findings, meeting.world_size)
    server.set_timeout(timedelta(seconds=_wait_s(meeting)))
    yield Complete(findings, dist.PrefixStore(f"{_PREFIX}/{caller}", server))  # type: ignore[attr-defined]


def _wait_s(meeting: Meeting) -> float:
    return (meeting.timeout or _DEFAULT_WAIT).total_seconds()


def raise_errors(findings: Sequence[Finding], world_size: int) -> None:
    """Raises what is an error among the findings.

    Raises:
        DDPPluginError: there is one.
    """
    errors = [finding.sentence for finding in findings if finding.is_error]
    if errors:
        raise DDPPluginError(
            explain(
                f"all {world_size} ranks to fit together before the first step",
                f"{len(errors)} difference{'s' * (len(errors) > 1)} between them",
                "; ".join(errors),  # in small letters, for many begin with a name
            )
        )


def _reach_store(meeting: Meeting, facts: Facts, deadline: float) -> Any:
    """Opens the store in a thread beside: torch may wait longer than it was told for a port that never answers."""
    is_master = facts.rank == 0 and not meeting.is_hosted_by_agent
    outcome: list[Any] = []

    def reach() -> None:
        try:
            outcome.append(
                dist.TCPStore(  # type: ignore[attr-defined]
                    meeting.address,
                    meeting.port,
                    is_master=is_master,
                    timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
                    wait_for_workers=False,
                    multi_tenant=is_master,
                    use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
                )
            )
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=reach, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if thread.is_alive():
        warnings.warn(
            f"Rank {facts.rank} waits for {meeting} to answer{_why_silent(meeting, is_master)}.", stacklevel=4
        )
        thread.join(max(0.0, deadline - time.monotonic()))
    result = outcome[0] if outcome else TimeoutError("no answer")
    if not isinstance(result, Exception):
        return result
    if "EADDRINUSE" in str(result) or "already in use" in str(result):
        got, change = "it in use, by another run or another program", "Choose another MASTER_PORT, or end what uses it"
        raise DDPPluginError(explain(f"port {meeting.port} to be free for rank 0", got, change)) from result
    raise DDPPluginError(
        explain(
            f"an answer from {meeting}, where rank 0 meets the others",
            f"none for rank {facts.rank}, {facts.process}{_why_silent(meeting, is_master)}",
            "Look whether rank 0 has started, and whether MASTER_ADDR and MASTER_PORT are the same for all processes",
        )
    ) from result


def _why_silent(meeting: Meeting, is_master: bool) -> str:
    is_here = is_this_machine(meeting.address)
    if is_here is None:
        return f": the name {meeting.address} is not known on this machine"
    if is_master and not is_here:
        return f": this is rank 0, and {meeting.address} is another machine"
    return ""


def _answer(store: Any, meeting: Meeting, token: str, rank: int, deadline: float) -> tuple[list[Finding], str]:
    """Answers rank 0's call, and returns what it finds, with its token."""

    def saying() -> str:
        return f"Rank {rank} waits at {meeting} for rank 0 and all others"

    _wait(store, f"call {token}", deadline, saying)
    store.set(f"here {token}", "")
    _wait(store, f"verdict {token}", deadline, saying)
    caller = store.get(f"verdict {token}").decode()
    findings = [Finding(sentence, is_error) for sentence, is_error in json.loads(store.get(f"findings {caller}"))]
    store.add(f"readers {caller}", 1)
    return findings, caller


def _call_all(
    store: Any, meeting: Meeting, own: str, compare: Callable[[Sequence[Facts]], list[Finding]], deadline: float
) -> list[Finding]:
    """Calls who has arrived until all have answered, or those that did cannot be parts of one world."""
    seen = int(store.get("seen")) if store.check(["seen"]) else 0  # arrivals that an earlier call has dealt with
    waiting: list[int] = []  # numbers of arrivals that are not written yet
    called: dict[str, Facts] = {}  # by token
    here: dict[str, Facts] = {}
    speaks_at, until = time.monotonic() + PATIENCE_S, deadline

    def missing() -> str:
        ranks = sorted(set(range(meeting.world_size)) - {facts.rank for facts in here.values()})
        return f"{in_ranks(ranks)} of {meeting.world_size} {'have' if len(ranks) > 1 else 'has'} not come"

    while len(here) < meeting.world_size and time.monotonic() < until:
        waiting += range(seen, num_arrivals := store.add("arrivals", 0))
        seen = max(seen, num_arrivals)
        for number in [number for number in waiting if store.check([f"arrival {number}"])]:
            waiting.remove(number)
            token, text = json.loads(store.get(f"arrival {number}"))
            called[token] = Facts.from_json(text)
            store.set(f"call {token}", "")
        if store.check([f"call {own}"]):  # by this process, or by another one that takes itself for rank 0
            store.set(f"here {own}", "")
        for token in [token for token in called if store.check([f"here {token}"])]:
            here[token] = called.pop(token)
            if not _is_one_world(here.values()):
                until = min(until, time.monotonic() + _GRACE_S)
        if time.monotonic() >= speaks_at:
            warnings.warn(f"Rank 0 waits at {meeting}: {missing()}.", stacklevel=4)
            speaks_at = float("inf")
        time.sleep(_LOOK_EVERY_S)
    findings = compare(list(here.values()))
    if len(here) < meeting.world_size and _is_one_world(here.values()):
        where = "look for an error of theirs, and at MASTER_ADDR, MASTER_PORT, NODE_RANK and LOCAL_RANK there"
        findings.insert(0, Finding(f"{missing()} to {meeting} in time: {where}", is_error=True))
    store.set("seen", str(seen))
    store.set(f"findings {own}", json.dumps([[finding.sentence, finding.is_error] for finding in findings]))
    for token in here.keys() - {own}:
        store.set(f"verdict {token}", own)
    if any(finding.is_error for finding in findings):
        _let_read(store, f"readers {own}", sum(facts.rank != 0 for facts in here.values()))
    return findings


def _is_one_world(facts: Collection[Facts]) -> bool:
    """Whether these ranks wait for the same ones, so that it is worth while to wait for the rest."""
    worlds = [each.values[WORLD] for each in facts]
    return len({each.rank for each in facts}) == len(facts) and all(world == worlds[0] for world in worlds)


def _let_read(store: Any, counter: str, num_readers: int) -> None:
    """Keeps the store, and with it this process, until the others know what ends this run."""
    until = time.monotonic() + _GRACE_S
    while store.add(counter, 0) < num_readers and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)


def _wait(store: Any, key: str, deadline: float, saying: Callable[[], str]) -> None:
    """Waits for a key, and says so when it takes long.

    Raises:
        DDPPluginError: the time is up, or the store is gone.
    """
    speaks_at = time.monotonic() + PATIENCE_S
    while True:
        left_s = min(deadline, speaks_at) - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.001, left_s)))
            return
        except RuntimeError as error:
            if "timeout" not in str(error) or time.monotonic() >= deadline:
                raise DDPPluginError(
                    explain(
                        "all ranks to come together", saying(), "Look for the first error in the output of all ranks"
                    )
                ) from error
        if time.monotonic() >= speaks_at:
            warnings.warn(f"{saying()}.", stacklevel=4)
            speaks_at = float("inf")
