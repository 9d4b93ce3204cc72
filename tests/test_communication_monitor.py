"""CommunicationMonitor: exposed time against delays of known size and a run without them, bytes, and the files."""

import importlib.util
import json
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy
from ddp_plugin.timeline.chrome_trace import aligned, chrome_trace
from ddp_plugin.timeline.picture import draw_timeline, typical_step
from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline, steady, summarize
from tests.delays import BUCKET_CAP_MB, LAYER_BYTES, NUM_LAYERS, Delayed, Samples, loader
from tests.harness import ranks, trainer
from tests.test_straggler_monitor import Numbers, exchanging_parameters, same_on_all_ranks

SLACK_S = 0.004  # of the shortest of some steps: other programs on the machine make steps longer, never shorter


class Spy(CommunicationMonitor):
    """Keeps the timelines of the steady steps of this rank."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.steps: list[StepTimeline] = []

    def _exchange(self, trainer: pl.Trainer, steps: list[StepTimeline], num_steps: int) -> None:
        self.steps += steady(steps)
        super()._exchange(trainer, steps, num_steps)

    def shortest_s(self, part: str) -> float:
        return min(step.seconds_of(part) for step in self.steps)


def fit(module: pl.LightningModule, data: Any, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    settings = {"strategy": CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB)} | settings
    run = trainer(callbacks=list(callbacks), use_distributed_sampler=False, **settings)
    run.fit(module, data)
    return run


# ---------------------------------------------------------------------------------------------------- exposed time


def delayed_hook(delay_s: float, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The gradient as it is, after a time that is known: a wire that is busy with each bucket for ``delay_s``."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    gradient = bucket.buffer()

    def finish() -> None:
        time.sleep(delay_s)
        future.set_result(gradient)

    if delay_s:
        threading.Thread(target=finish).start()
    else:
        future.set_result(gradient)
    return future


class Timed(Delayed):
    """Notes when each training batch begins, without the monitor."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.__dict__.setdefault("started_s", []).append(time.perf_counter())


def shortest_step_and_watch(delay_s: float) -> tuple[float, Spy]:
    watch, module = Spy(every_n_steps=40), Timed(base_s=0.008, forward_s=0.002)
    strategy = CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB, ddp_comm_hook=delayed_hook, ddp_comm_state=delay_s)
    fit(module, loader(40), watch, strategy=strategy)
    assert [report.step for report in watch.reports] == [40]
    started_s = module.started_s[5:]
    return min(b - a for a, b in zip(started_s, started_s[1:], strict=False)), watch


@ranks(2, init=False)
@pytest.mark.parametrize("delay_s", [0.004, 0.02])
def test_exposed_time_is_what_a_step_takes_longer(delay_s: float) -> None:
    """Buckets are ready 8 ms apart: with 4 ms each on the wire, 4 of 16 ms are exposed; with 20, 20 of 44."""
    without_s, without = shortest_step_and_watch(0.0)
    with_s, watch = shortest_step_and_watch(delay_s)
    exposed_s = min(step.exposed_s for step in watch.steps)
    assert delay_s < exposed_s < delay_s + SLACK_S
    assert with_s - without_s == pytest.approx(exposed_s, abs=SLACK_S)
    assert min(step.exposed_s for step in without.steps) < 0.001
    union_s = delay_s * NUM_LAYERS if delay_s < 0.008 else delay_s + 3 * 0.008
    best = min(watch.steps, key=lambda step: step.duration_s)
    assert best.communication_s == pytest.approx(union_s, abs=2 * SLACK_S)
    assert 1 - best.exposed_s / best.communication_s == pytest.approx(1 - delay_s / union_s, abs=0.15)
    assert summarize([best]).ready_ratios == pytest.approx((0.25, 0.5, 0.75, 1.0), abs=0.1)
    # The report holds the means of this.
    report, own = watch.reports[0], watch.reports[0].ranks[int(os.environ["RANK"])]
    assert own.exposed_s == pytest.approx(statistics.fmean(step.exposed_s for step in watch.steps), rel=1e-9)
    assert report.exposed_s == pytest.approx(statistics.fmean(rank.exposed_s for rank in report.ranks), rel=1e-9)
    assert report.overlap_ratio == pytest.approx(
        1 - sum(rank.exposed_s for rank in report.ranks) / sum(rank.communication_s for rank in report.ranks), rel=1e-9
    )
    assert min(own.in_flight_s) > delay_s
    assert report.sent_bytes == 0  # nobody knows what a bare hook sends


@ranks(2, init=False)
def test_the_parts_of_a_step_are_those_that_were_made_long() -> None:
    watch = Spy(every_n_steps=30)
    fit(Delayed(base_s=0.004, forward_s=0.01), loader(30, delay_s=0.008, slow_rank=0), watch)
    assert watch.shortest_s("data") == pytest.approx(0.008 if os.environ["RANK"] == "0" else 0.0, abs=SLACK_S)
    assert watch.shortest_s("forward") == pytest.approx(0.01, abs=SLACK_S)
    assert watch.shortest_s("backward") == pytest.approx(0.004 * NUM_LAYERS, abs=SLACK_S)
    assert watch.shortest_s("optimizer") < SLACK_S
    for rank in watch.reports[0].ranks:
        parts_s = rank.data_s + rank.forward_s + rank.backward_s + rank.exposed_s + rank.optimizer_s
        assert rank.step_s == pytest.approx(parts_s, rel=1e-9)


# ------------------------------------------------------------------------------------------------- bytes and reports


@ranks(2, 3, init=False)
@pytest.mark.parametrize(("hook", "factor"), [(None, 1.0), ("bf16", 0.5)])
def test_bytes_are_those_of_a_ring(hook: str | None, factor: float, world_size: int) -> None:
    watch, numbers = CommunicationMonitor(every_n_steps=4), Numbers()
    strategy = CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB, comm_hook=hook)
    fit(Delayed(base_s=0.0, forward_s=0.0), loader(8), watch, strategy=strategy, logger=numbers)
    report = watch.last_report
    assert report is not None
    assert same_on_all_ranks(watch.reports)
    assert report.sent_bytes == pytest.approx(
        factor * NUM_LAYERS * LAYER_BYTES * 2 * (world_size - 1) / world_size, abs=8
    )
    assert [bucket.num_bytes for bucket in report.buckets] == [LAYER_BYTES] * NUM_LAYERS
    assert sum(bucket.sent_bytes for bucket in report.buckets) == report.sent_bytes
    found = [set(bucket.parameters) for bucket in report.buckets]
    assert found == [{f"layers.{i}.weight", f"layers.{i}.bias"} for i in reversed(range(NUM_LAYERS))]
    if os.environ["RANK"] == "0":
        assert [step for step, _ in numbers.rows] == [3, 7]
        row = numbers.rows[-1][1]
        assert row["ddp/sent_bytes"] == report.sent_bytes
        for name in ("exposed_s", "allreduce_s", "wait_s", "overlap_ratio"):
            assert row[f"ddp/{name}"] == getattr(report, name)
        for name in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
            mean_s = statistics.fmean(getattr(rank, name) for rank in report.ranks)
            assert row[f"ddp/{name}"] == pytest.approx(mean_s, rel=1e-12)
    else:
        assert numbers.rows == []


@ranks(2, init=False)
def test_accumulation_reduces_once_a_step_and_the_rest_is_exchanged_at_the_end() -> None:
    watch = Spy(every_n_steps=4)
    fit(Delayed(base_s=0.0, forward_s=0.005), loader(19), watch, accumulate_grad_batches=3)
    assert [report.step for report in watch.reports] == [4, 7]  # the last one of a single micro-batch
    assert min(step.seconds_of("forward") for step in watch.steps[:3]) > 3 * 0.005
    assert watch.steps[-1].seconds_of("forward") > 0.005
    assert [len(step.phases) for step in watch.steps] == [12] * (len(watch.steps) - 1) + [4]
    assert len(watch.reports[0].buckets) == NUM_LAYERS


@ranks(2, init=False)
def test_hooks_that_exchange_parameters_are_said_to_have_no_buckets() -> None:
    watch, said = CommunicationMonitor(every_n_steps=4), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.callbacks._recording.rank_zero_info", said.append)
        fit(Delayed(base_s=0.0), loader(8), watch, strategy=exchanging_parameters())
    assert len(said) == 1
    assert "times steps, but no communication, with comm_hook='local_sgd'" in said[0]
    report = watch.last_report
    assert report is not None
    assert report.buckets == ()
    assert report.exposed_s == report.allreduce_s == 0.0
    assert report.sent_bytes == NUM_LAYERS * LAYER_BYTES // 8  # once in eight steps, by two ranks


@ranks(2, init=False)
def test_the_bytes_of_exact_first_steps_are_those_of_the_exact_mean() -> None:
    watch = CommunicationMonitor(every_n_steps=4)
    strategy = CustomDDPStrategy(
        bucket_cap_mb=BUCKET_CAP_MB, comm_hook={"name": "topk", "density": 0.01, "start_step": 4}
    )
    fit(Delayed(base_s=0.0), loader(8), watch, strategy=strategy)
    exact, compressed = watch.reports
    assert exact.sent_bytes == pytest.approx(NUM_LAYERS * LAYER_BYTES, abs=8)
    assert compressed.sent_bytes < 0.1 * exact.sent_bytes


def test_one_process_is_timed_under_any_strategy() -> None:
    for strategy in ("auto", CustomDDPStrategy()):
        watch = Spy(every_n_steps=4)
        fit(Delayed(base_s=0.0, forward_s=0.01), loader(8), watch, strategy=strategy, devices=1)
        report = watch.last_report
        assert report is not None
        assert (report.buckets, report.sent_bytes, report.overlap_ratio) == ((), 0, 1.0)
        assert 0.01 < watch.shortest_s("forward") < 0.02


@ranks(2, init=False)
def test_other_strategies_are_refused() -> None:
    with pytest.raises(TypeError, match="CommunicationMonitor runs on several processes"):
        fit(Delayed(), loader(2), CommunicationMonitor(), strategy=DDPStrategy())


@pytest.mark.parametrize("name", ["every_n_steps", "num_traced_steps"])
@pytest.mark.parametrize("value", [0, 2.5, True])
def test_settings_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        CommunicationMonitor(**{name: value})


# ------------------------------------------------------------------------------------------------------------- files


def read_trace(path: Path) -> tuple[list[dict[str, Any]], dict[tuple[int, int], str]]:
    """Returns the complete events and the names of the threads, after a look whether the file is a trace."""
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert all(event["ph"] in ("X", "M") for event in events)
    assert min(event["ts"] for event in complete) == 0.0
    for thread in names:
        own = sorted((e for e in complete if (e["pid"], e["tid"]) == thread), key=lambda event: event["ts"])
        assert own
        for first, second in zip(own, own[1:], strict=False):  # a viewer draws no two events over one another
            assert first["ts"] + first["dur"] <= second["ts"] + 0.01
    return complete, names


@ranks(2, init=False)
def test_the_trace_holds_the_last_steps_of_all_ranks(tmp_path: Path) -> None:
    watch = CommunicationMonitor(every_n_steps=4, folder=str(tmp_path / "new"), num_traced_steps=5)
    fit(Delayed(1, 0.02), loader(11), watch)
    dist.barrier()
    if os.environ["RANK"] == "1":
        return
    events, threads = read_trace(tmp_path / "new" / "trace.json")
    expected = {"step", "exposed communication", *(f"bucket {index}" for index in range(NUM_LAYERS))}
    for rank in range(2):
        assert {name for (process, _), name in threads.items() if process == rank} == expected
        own = [event for event in events if event["pid"] == rank]
        assert {event["args"]["step"] for event in own} == {6, 7, 8, 9, 10}
        backward_us = [event["dur"] for event in own if event["name"] == "backward"]
        assert len(backward_us) == 5
        assert statistics.median(backward_us) > 1e6 * (
            0.02 + NUM_LAYERS * 0.002
        )  # on both ranks: rank 0 waits for rank 1
        buckets = {event["tid"]: set(event["args"]["parameters"]) for event in own if event["name"] == "reduction"}
        assert next(iter(buckets.values())) == {"layers.3.weight", "layers.3.bias"}
    exposed_us = {rank: [e["dur"] for e in events if e["name"] == "exposed" and e["pid"] == rank] for rank in range(2)}
    assert statistics.median(exposed_us[0]) > 1.5e4 > 1e4 > min(exposed_us[1])
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")


class Failing(Delayed):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 7:
            raise RuntimeError("the user's own error")
        return super().training_step(batch, batch_idx)


@ranks(2, init=False)
def test_after_an_exception_rank_0_writes_what_it_knows(tmp_path: Path) -> None:
    watch = CommunicationMonitor(every_n_steps=4, trace_path=str(tmp_path / "trace.json"))
    with pytest.raises(RuntimeError, match="the user's own error"):
        fit(Failing(), loader(11), watch)
    dist.barrier()
    events, _ = read_trace(tmp_path / "trace.json")
    assert {event["pid"] for event in events} == {0}
    assert {event["args"]["step"] for event in events} == set(range(7))
    assert not (tmp_path / "timeline.png").exists()


@ranks(2, init=False)
@pytest.mark.parametrize(
    ("setting", "path", "words"),
    [
        ("trace_path", "folder", "Is a directory"),
        ("folder", "file", "File exists"),
        ("picture_path", "file/a.png", "file"),
        ("trace_path", "read_only/trace.json", "Permission denied"),
        ("picture_path", "a.pn", "a.pn'"),
        ("picture_path", "a", "picture_path to end in one of"),
    ],
)
def test_files_that_cannot_be_written_are_refused_on_all_ranks_before_training(
    tmp_path: Path, setting: str, path: str, words: str
) -> None:
    if setting == "picture_path":
        pytest.importorskip("matplotlib")
    (tmp_path / "folder").mkdir(exist_ok=True)
    (tmp_path / "file").touch()
    watch, module = CommunicationMonitor(every_n_steps=4, **{setting: str(tmp_path / path)}), Timed()
    with pytest.MonkeyPatch.context() as patch:
        if "read_only" in path:  # whoever runs the tests may be root, who can write everywhere
            patch.setattr("tempfile.TemporaryFile", forbidden)
        with pytest.raises(ValueError, match="Expected .* on rank 0 of 2") as caught:
            fit(module, loader(4), watch)
    assert words in str(caught.value)
    assert "started_s" not in module.__dict__


def forbidden(**settings: Any) -> None:
    raise PermissionError(13, "Permission denied")


def test_a_look_at_a_file_leaves_it_as_it_is_and_a_fit_writes_it_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of a run before")
    module, seen = Delayed(base_s=0.0, forward_s=0.0), []

    class Looks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append((path.read_text(), [file.name for file in tmp_path.iterdir()]))

    fit(module, loader(4), CommunicationMonitor(trace_path=str(path)), Looks(), strategy="auto", devices=1)
    assert seen == [("of a run before", ["trace.json"])]
    assert len(json.loads(path.read_text())["traceEvents"]) > 4 * 4


class CannotWrite(CommunicationMonitor):
    def _write(self, by_rank: Any) -> None:
        raise self.error

    error: Exception


def test_a_file_that_cannot_be_written_in_the_end_is_a_warning(tmp_path: Path) -> None:
    module = Delayed(base_s=0.0, forward_s=0.0)
    watch = CannotWrite(folder=str(tmp_path))
    watch.error = OSError("No space left on device")
    with pytest.warns(UserWarning, match="could not write its files: No space left on device"):
        fit(module, loader(4), watch, strategy="auto", devices=1)


def test_the_first_exception_stays_the_one_that_is_raised(tmp_path: Path) -> None:
    watch = CannotWrite(folder=str(tmp_path))
    watch.error = ValueError("no such format")
    with (
        pytest.warns(UserWarning, match="after the exception: no such format"),
        pytest.raises(RuntimeError, match="the user's own error"),
    ):
        fit(Failing(base_s=0.0), loader(11), watch, strategy="auto", devices=1)


def test_without_matplotlib_the_trace_is_written_and_a_picture_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    monkeypatch.setattr("ddp_plugin.callbacks.communication_monitor.rank_zero_info", said.append)
    module = Delayed(base_s=0.0, forward_s=0.0)
    fit(module, loader(4), CommunicationMonitor(folder=str(tmp_path)), strategy="auto", devices=1)
    assert (tmp_path / "trace.json").exists()
    assert not (tmp_path / "timeline.png").exists()
    assert len(said) == 1
    assert "ddp_plugin[plot]" in said[0]
    with pytest.raises(ModuleNotFoundError, match="matplotlib"):
        fit(module, loader(4), CommunicationMonitor(picture_path=str(tmp_path / "a.svg")), strategy="auto", devices=1)


def step(number: int, begin: float = 0.0, ready: float = 5.0, clock: float = 0.0) -> StepTimeline:
    """In seconds: 1 data, 2 forward, a backward until 9 with a bucket on its way from ``ready`` to 8, 2 optimizer."""
    begin += clock
    ends = [begin + end for end in (0.0, 1.0, 3.0, 9.0, 11.0)]
    parts = ("data", "forward", "backward", "optimizer")
    phases = tuple(Phase(part, ends[i], ends[i + 1]) for i, part in enumerate(parts))
    return StepTimeline(number, phases, (BucketSpan(0, begin + ready, begin + 8.0),))


def test_clocks_are_laid_over_one_another_at_the_reductions() -> None:
    by_rank = {0: [step(1), step(2, 20.0)], 1: [step(1, clock=500.0), step(2, 20.0, clock=500.0)]}
    assert aligned(by_rank) == {0: 0.0, 1: -500.0}
    trace = chrome_trace(by_rank, {0: ("w",)})["traceEvents"]
    ours, theirs = ([e["ts"] for e in trace if e["ph"] == "X" and e["pid"] == rank] for rank in range(2))
    assert ours == theirs
    assert max(ours) == 1e6 * (20.0 + 9.0)


def test_the_step_that_is_drawn_is_of_median_length() -> None:
    short = StepTimeline(1, step(1).phases[:2])
    long = StepTimeline(3, (*step(3).phases, Phase("optimizer", 11.0, 90.0)))
    assert typical_step({0: [short, step(2), long]}) == 2


def test_the_picture_is_to_scale(tmp_path: Path) -> None:
    """Along the step's bar: 1 of data's colour, 2 forward, 2 backward, 3 exposed, 1 backward, 2 optimizer."""
    image_module = pytest.importorskip("PIL.Image")
    draw_timeline(tmp_path / "a.png", {0: [step(1)]})
    image = image_module.open(tmp_path / "a.png").convert("RGB")
    colours = {
        "data": (187, 187, 187),
        "forward": (86, 180, 233),
        "backward": (0, 114, 178),
        "optimizer": (0, 158, 115),
    }
    counts: dict[str, int] = {}
    for y in range(0, image.height, 3):
        row = [image.getpixel((x, y)) for x in range(image.width)]
        here = {part: row.count(colour) for part, colour in colours.items()}
        if all(here.values()) and sum(here.values()) > sum(counts.values()):
            counts = here
    assert counts["data"] > 50
    for part, length in (("forward", 2), ("backward", 3), ("optimizer", 2)):
        assert counts[part] / counts["data"] == pytest.approx(length, rel=0.03)
    draw_timeline(tmp_path / "b.svg", {0: [step(1)]})
    assert "the last rank" not in (tmp_path / "b.svg").read_text()


def test_of_many_ranks_the_first_and_the_last_are_drawn(tmp_path: Path) -> None:
    draw_timeline(tmp_path / "a.svg", {rank: [step(1, ready=4.0 + 0.1 * rank)] for rank in range(20)})
    text = (tmp_path / "a.svg").read_text()
    shown = [rank for rank in range(20) if f"<!-- rank {rank} -->" in text]
    assert shown == [0, 1, 2, 3, 16, 17, 18, 19]
    assert "8 of 20 ranks" in text


def test_samples_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    other = Samples(4)
    monkeypatch.setenv("RANK", "0")
    assert not torch.equal(other.values, Samples(4).values)
