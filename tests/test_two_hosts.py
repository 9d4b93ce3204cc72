"""Two hosts under torchrun with c10d: the link goes down for seconds and for good; a host dies and is replaced.

The hosts are network namespaces, which need root rights; both see one folder, as they would on a network file system.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.benchmarks.slow_link.hosts import HostsError, two_hosts
from tests.chaos.history import Start, coverage_problems, read_starts, surviving_steps
from tests.chaos.two_agents import TwoAgents, two_agents
from tests.chaos.verdict import run_whole, settings, write_texts

NUM_STEPS = 36
DOWN_S = 3.0
# Dead agents are noticed after three seconds instead of fifteen, a missing one is waited for 60 s instead of 600.
REPLACED = "join_timeout=60,keep_alive_interval=1"
CUT = "join_timeout=5,keep_alive_interval=1,read_timeout=5"
PATIENCE_S = 240.0  # on a busy machine

# The process group's timeout ends the host of rank 0, whose store answers; the other one ends when Linux gives up its
# connection to that store. Both are shorter here than by default: 1800 s, and 15 times, a quarter of an hour.
CUT_TIMEOUT_S = 15.0
CUT_TCP_RETRIES = 5

# What docs/guarantees.md says of an idle machine, and what one gets that is shared with other jobs.
ENDED_WITHIN_S = 30.0


def why_no_namespaces() -> str:
    try:
        with two_hosts():
            return ""
    except HostsError as error:
        return str(error)


@dataclass
class Story:
    """What happened to one run.

    Attributes:
        folder: of the run.
        times_s: durations by what they are of.
        starts: at its end.
        outputs: of both hosts.
        statuses: of both agents.
        seen: steps that were made when something happened.
    """

    folder: Path
    times_s: dict[str, float] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    outputs: tuple[str, str] = ("", "")
    statuses: tuple[int | None, int | None] = (None, None)
    seen: dict[str, int] = field(default_factory=dict)

    def last_step(self, begins_after: int = 0) -> int:
        """Returns the newest step that both ranks have made, in the latest start."""
        starts = read_starts(self.folder)[begins_after:]
        if not starts or len(starts[-1].pids) < 2:
            return -1
        full = {number for number, step in starts[-1].steps.items() if len(step.samples) == 12}
        return max(full, default=starts[-1].begins_at)

    def finish(self, run: TwoAgents) -> None:
        self.starts = read_starts(self.folder)
        self.outputs = run.output(0), run.output(1)
        self.statuses = run.status(0), run.status(1)
        print(f"seconds: {self.times_s}; steps: {self.seen}")  # shown with -rP


def both_ended(run: TwoAgents) -> bool:
    return None not in (run.status(0), run.status(1))


def has_worker(run: TwoAgents, number: int, pid: int) -> bool:
    return pid in run.hosts[number].pids()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    return write_texts(tmp_path_factory.mktemp("two_hosts") / "texts")


@pytest.fixture(scope="module")
def whole(texts: Path) -> Path:
    """The same run on one host, that nothing happens to."""
    return run_whole(texts.parent / "whole", texts, 2, NUM_STEPS)


@pytest.fixture(scope="module")
def replaced(texts: Path) -> Iterator[Story]:
    """The link is down for three seconds; later the second host dies, and another one takes its place."""
    story = Story(texts.parent / "replaced")
    story.folder.mkdir()
    with two_agents(story.folder, settings(texts, NUM_STEPS), rendezvous=REPLACED) as run:
        run.wait_until(lambda: story.last_step() >= 6, PATIENCE_S)
        run.set_link("down")
        time.sleep(DOWN_S)
        story.seen["link up"] = story.last_step()
        run.set_link("up")
        story.times_s["to go on"] = run.wait_until(lambda: story.last_step() > story.seen["link up"] + 1, PATIENCE_S)
        story.seen["starts before the death"] = len(read_starts(story.folder))
        run.wait_until(lambda: story.last_step() >= 14, PATIENCE_S)
        survivor = read_starts(story.folder)[-1].pids[0]
        run.kill_host(1)
        story.times_s["survivor ended"] = run.wait_until(lambda: not has_worker(run, 0, survivor), PATIENCE_S)
        run.start(1)
        story.times_s["new start"] = run.wait_until(lambda: story.last_step(1) >= 0, PATIENCE_S)
        run.wait_until(lambda: both_ended(run), PATIENCE_S)
        story.finish(run)
        yield story


@pytest.fixture(scope="module")
def cut(texts: Path) -> Iterator[Story]:
    """The link goes down and stays down."""
    story = Story(texts.parent / "cut")
    story.folder.mkdir()
    arguments = [*settings(texts, 10_000), f"strategy.timeout_s={CUT_TIMEOUT_S}"]
    with two_agents(story.folder, arguments, rendezvous=CUT, tcp_retries=CUT_TCP_RETRIES) as run:
        run.wait_until(lambda: story.last_step() >= 6, PATIENCE_S)
        pids = read_starts(story.folder)[-1].pids
        run.set_link("down")
        begun_s = time.monotonic()
        events = {f"worker {number}": (number, pids[number]) for number in (0, 1)}

        def look() -> bool:
            now_s = time.monotonic() - begun_s
            for name, (number, pid) in events.items():
                if name not in story.times_s and not has_worker(run, number, pid):
                    story.times_s[name] = now_s
            for number in (0, 1):
                if f"agent {number}" not in story.times_s and run.status(number) is not None:
                    story.times_s[f"agent {number}"] = now_s
            return len(story.times_s) == 4

        run.wait_until(look, PATIENCE_S)
        story.finish(run)
        yield story


def test_a_link_that_is_down_for_seconds_costs_those_seconds(replaced: Story) -> None:
    assert replaced.seen["starts before the death"] == 1  # the processes are those of before
    assert replaced.times_s["to go on"] < ENDED_WITHIN_S
    first = replaced.starts[0]
    assert list(range(1, replaced.seen["link up"] + 2)) == sorted(first.steps)[: replaced.seen["link up"] + 1]


def test_nothing_passes_while_the_link_is_down(replaced: Story) -> None:
    assert 6 <= replaced.seen["link up"] <= 8  # of the thirty steps that three seconds hold


def test_a_host_that_dies_ends_the_others_within_seconds(replaced: Story) -> None:
    assert replaced.times_s["survivor ended"] < ENDED_WITHIN_S


def test_another_host_takes_its_place_and_the_run_is_the_uninterrupted_one(replaced: Story, whole: Path) -> None:
    assert replaced.statuses == (0, 0)
    assert [start.world_size for start in replaced.starts] == [2, 2]
    assert replaced.starts[1].begins_at in (8, 12, 16)
    steps, expected = surviving_steps(replaced.starts), surviving_steps(read_starts(whole))
    assert coverage_problems(steps, replaced.starts[0].num_samples, NUM_STEPS) == []
    assert {number: sorted(step.losses) for number, step in steps.items()} == {
        number: sorted(step.losses) for number, step in expected.items()
    }


def test_a_link_that_is_cut_ends_both_hosts(cut: Story) -> None:
    assert cut.times_s["worker 0"] < 2 * ENDED_WITHIN_S
    assert cut.times_s["worker 1"] < 2 * ENDED_WITHIN_S
    assert all(status not in (0, None) for status in cut.statuses)


def test_what_was_saved_before_the_cut_is_complete(cut: Story) -> None:
    from ddp_plugin.checkpoints import newest_checkpoint

    newest = newest_checkpoint(cut.folder / "checkpoints")
    assert newest is not None
    last = max(max(start.steps) for start in cut.starts)
    assert last - 4 <= int(newest.stem.removeprefix("step=")) <= last
    assert os.path.getsize(newest) > 0
