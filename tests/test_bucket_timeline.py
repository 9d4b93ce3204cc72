"""Timelines: their arithmetic against brute force, and the recorder against a clock that the test moves."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from ddp_plugin.timeline.recorder import DeviceClock, HostClock, StepRecorder, clock_for
from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline, steady, summarize, union_s


def phases(*lengths: float, begin: float = 0.0, parts: tuple[str, ...] = ()) -> tuple[Phase, ...]:
    parts, found = parts or ("data", "forward", "backward", "optimizer"), []
    for part, length in zip(parts, lengths, strict=True):
        found.append(Phase(part, begin, begin + length))
        begin += length
    return tuple(found)


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_the_union_equals_counting_ticks() -> None:
    generator = random.Random(0)
    for _ in range(200):
        begins = [generator.randrange(50) for _ in range(generator.randrange(8))]
        intervals = [(begin, begin + generator.randrange(10)) for begin in begins]
        ticks = {tick for begin, end in intervals for tick in range(begin, end)}
        assert union_s(intervals) == len(ticks)


def test_exposed_is_what_no_backward_hides() -> None:
    """Forward 2 to 5, backward 5 to 15 of which 9 to 14 is exposed; ticks of a tenth, counted one by one."""
    buckets = (BucketSpan(0, 6.0, 7.5), BucketSpan(1, 8.0, 12.0), BucketSpan(2, 9.0, 14.0))
    step = StepTimeline(0, phases(2.0, 3.0, 10.0, 1.0), buckets)
    ticks = {tick for bucket in buckets for tick in range(round(10 * bucket.ready_s), round(10 * bucket.reduced_s))}
    assert step.communication_s == pytest.approx(len(ticks) / 10)
    assert step.exposed_s == pytest.approx(len([tick for tick in ticks if tick >= 90]) / 10)
    assert step.seconds_of("backward") == 5.0
    assert sum(step.seconds_of(part) for part in ("data", "forward", "backward", "optimizer")) + step.exposed_s == 16.0


def test_a_bucket_that_is_ready_first_may_be_reduced_last() -> None:
    step = StepTimeline(0, phases(2.0, 3.0, 10.0, 1.0), (BucketSpan(0, 6.0, 14.0), BucketSpan(1, 9.0, 10.0)))
    assert step.exposed_s == 5.0


def test_several_reductions_in_a_step_add_up() -> None:
    parts = ("data", "forward", "backward", "forward", "backward", "optimizer")
    first, second = BucketSpan(0, 4.0, 5.0), BucketSpan(0, 10.0, 13.0)
    step = StepTimeline(0, phases(1.0, 1.0, 4.0, 2.0, 6.0, 1.0, parts=parts), (first, second))
    assert step.reductions == ((first,), (second,))
    assert step.exposed_s == 1.0 + 3.0
    assert step.backward_of(second) == Phase("backward", 8.0, 14.0)


def test_means_are_over_steps_of_one_kind() -> None:
    def step(number: int, data: float, is_steady: bool, layout: int = 1) -> StepTimeline:
        buckets = tuple(BucketSpan(i, data + 3.0 + ready, data + 8.0 + i) for i, ready in enumerate((1.0, 2.0, 4.0)))
        return StepTimeline(number, phases(data, 3.0, 9.0, 1.0), buckets, is_steady=is_steady, layout=layout)

    first, old = step(0, 90.0, False, layout=0), step(1, 50.0, True, layout=0)
    interrupted, one, two = step(2, 70.0, False), step(3, 1.0, True), step(4, 3.0, True)
    assert steady([first, old, interrupted, one, two]) == [one, two]
    assert steady([first, old, interrupted]) == [interrupted]
    summary = summarize([one, two])
    assert (summary.num_steps, summary.data_s, summary.forward_s, summary.optimizer_s) == (2, 2.0, 3.0, 1.0)
    assert summary.exposed_s == pytest.approx(10.0 - 7.0)
    assert summary.backward_s == pytest.approx(9.0 - 3.0)
    assert summary.step_s == pytest.approx(15.0)
    assert summary.ready_ratios == pytest.approx((0.25, 0.5, 1.0))
    assert summary.in_flight_s == pytest.approx((8.0 - 4.0, 9.0 - 5.0, 10.0 - 7.0))
    with pytest.raises(ValueError, match="at least one step"):
        summarize([])


# --------------------------------------------------------------------------------------------------------- recording


class Clock(HostClock):
    """Is moved by the test."""

    time_s = 100.0

    def now(self) -> float:  # type: ignore[override]
        return self.time_s


@pytest.fixture
def recording() -> tuple[StepRecorder, Clock, nn.Module]:
    recorder, clock, module = StepRecorder(), Clock(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    recorder.start(clock, module.named_parameters, first_step=7)
    recorder.interrupt()
    return recorder, clock, module


def play(
    recorder: StepRecorder, clock: Clock, module: nn.Module, *, num_micro: int = 1, one_bucket: bool = False
) -> None:
    """One step: in each micro-batch 1 s data, 2 s forward, 4 s backward, 0.5 s optimizer; a bucket each second."""
    buckets = (
        [list(reversed(list(module.parameters())))] if one_bucket else [list(layer.parameters()) for layer in module]
    )
    for micro in range(num_micro):
        for part, length in (("data", 1.0), ("forward", 2.0)):
            clock.time_s += length
            recorder.mark(part)
        is_last = micro == num_micro - 1
        for index, parameters in enumerate(buckets if is_last else []):
            clock.time_s += 1.0
            recorder.before_reduction(index, torch.zeros(3), parameters)
        clock.time_s += 1.5 if is_last else 4.0
        for index, parameters in enumerate(buckets if is_last else []):
            recorder.after_reduction(index, torch.zeros(3), parameters)
        clock.time_s += 0.5
        recorder.mark("backward")
        clock.time_s += 0.5
        recorder.mark("optimizer")
    recorder.end_step()


def test_steps_are_recorded(recording: Any) -> None:
    recorder, clock, _ = recording
    play(*recording)
    play(*recording)
    first, second = recorder.take()
    assert recorder.take() == []
    assert (first.step, second.step) == (7, 8)
    assert first.phases == phases(1.0, 2.0, 4.0, 0.5, begin=100.0)
    assert first.buckets == (BucketSpan(0, 104.0, 106.5), BucketSpan(1, 105.0, 106.5))
    assert (first.is_steady, first.common_s) == (False, None)
    assert (second.is_steady, second.common_s) == (True, 106.5)
    assert (first.before, second.before) == ((), first.phases[2:])  # from the backward of that reduction on
    assert second.began_s == first.ended_s == 107.5
    assert [recorder.contents[index].names for index in (0, 1)] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]
    assert clock.time_s == second.ended_s


def test_what_comes_in_between_is_no_part_of_a_step(recording: Any) -> None:
    recorder, clock, _ = recording
    play(*recording)
    clock.time_s += 1000.0
    recorder.interrupt()
    play(*recording)
    play(*recording)
    _, after, then = recorder.take()
    assert after.phases == phases(1.0, 2.0, 4.0, 0.5, begin=1107.5)
    assert (after.is_steady, after.common_s) == (False, None)
    assert (then.is_steady, then.common_s) == (True, after.buckets[-1].reduced_s)


def test_micro_batches_are_one_step(recording: Any) -> None:
    recorder = recording[0]
    play(*recording, num_micro=3)
    play(*recording, num_micro=3)
    step, after = recorder.take()
    assert after.before == step.phases[-2:]
    assert [phase.part for phase in step.phases] == ["data", "forward", "backward", "optimizer"] * 3
    assert len(step.buckets) == 2
    assert step.seconds_of("forward") == 6.0


def test_other_buckets_are_another_layout(recording: Any) -> None:
    recorder = recording[0]
    play(*recording, one_bucket=True)
    play(*recording)
    play(*recording)
    layouts = [step.layout for step in recorder.take()]
    assert layouts[0] != layouts[1] == layouts[2]
    assert set(recorder.contents) == {0, 1}
    play(*recording, one_bucket=True)
    assert {index: contents.names for index, contents in recorder.contents.items()} == {
        0: ("1.bias", "1.weight", "0.bias", "0.weight")
    }


def test_nothing_is_recorded_before_the_start_and_after_the_stop(recording: Any) -> None:
    recorder, clock, module = recording
    recorder.stop()
    play(recorder, clock, module)
    assert recorder.take() == []
    assert recorder.contents == {}


def test_a_parameter_without_a_name_does_no_harm(recording: Any) -> None:
    recorder = recording[0]
    recorder.before_reduction(0, torch.zeros(2), [torch.zeros(2)])
    assert recorder.contents[0].names == ("unnamed",)


class Event:
    """A CUDA event on a device whose clock the test moves; distances are float32 milliseconds, as torch's are."""

    device_s, host_s, num_waits = 0.0, 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = Event.host_s

    def query(self) -> bool:
        return Event.device_s >= self.at_s

    def synchronize(self) -> None:
        Event.num_waits += 1
        Event.device_s = max(Event.device_s, self.at_s)

    def elapsed_time(self, other: "Event") -> float:
        assert self.query()
        assert other.query()
        return float(torch.tensor((other.at_s - self.at_s) * 1e3, dtype=torch.float32))


def test_device_times_are_read_when_they_have_passed_and_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    recorder = StepRecorder()
    recorder.start(clock_for(torch.device("cuda")), tuple)
    recorder.interrupt()

    def step(length_s: float) -> None:
        for part in ("data", "forward", "backward", "optimizer"):
            Event.host_s += length_s
            recorder.mark(part)
        recorder.end_step()

    step(900.0)  # an hour
    step(1e-5)
    assert recorder.take() == []  # the device has done nothing yet
    Event.device_s = Event.host_s - 2e-5
    (long,) = recorder.take()
    assert long.ended_s - long.began_s == pytest.approx(3600.0, rel=1e-6)
    assert Event.num_waits == 0
    (short,) = recorder.take(wait=True)
    assert Event.num_waits == 1
    assert short.seconds_of("forward") == pytest.approx(
        1e-5, rel=1e-3
    )  # an hour in float32 milliseconds has steps of 0.25


def test_the_clock_follows_the_device() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 1)), DeviceClock)
