"""`ddp-plugin trace`: hand-made records against hand-made sums, and runs whose collectives and numbers are known."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.callbacks import _tracing
from ddp_plugin.cli import main
from ddp_plugin.commands import trace as command
from ddp_plugin.commands.trace import write_page
from ddp_plugin.timeline.steps import BucketSpan, Phase, StepTimeline
from ddp_plugin.tracing.drawing import MAX_RANKS, draw_step, ticks
from ddp_plugin.tracing.findings import NOTHING_RECORDED, conclusions, headline, remarks
from ddp_plugin.tracing.issuers import Call, CollectiveRow, Frame, count, issuer_of
from ddp_plugin.tracing.joining import Joined, join, write_trace
from ddp_plugin.tracing.keeping import ASIDE, LOCK, alone_in, set_aside
from ddp_plugin.tracing.page import render_page
from ddp_plugin.tracing.records import (
    FAILED,
    OVER,
    SET_UP,
    TRAINING,
    WHOLE,
    BucketContents,
    Memory,
    RankRecord,
    operators_path,
    read_records,
    record_path,
    write_record,
)
from ddp_plugin.tracing.request import VARIABLE, TraceRequest, Window, request_in
from tests.delays import BUCKET_CAP_MB, LAYER_BYTES, NUM_LAYERS, Delayed, loader
from tests.harness import ROOT, ranks, trainer

# ------------------------------------------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (None, (5, 2, 10)),
        (17, (5, 2, 10)),
        (16, (4, 2, 10)),
        (12, (0, 2, 10)),
        (11, (0, 2, 9)),
        (3, (0, 2, 1)),
        (2, (0, 1, 1)),
        (1, (0, 1, 1)),
    ],
)
def test_a_window_gives_up_its_wait_first(num_steps: int | None, expected: tuple[int, int, int]) -> None:
    assert Window(5, 2, 10).fitted(num_steps) == Window(*expected)


def test_the_variable_says_what_was_asked() -> None:
    asked = TraceRequest("/a b/ü", Window(0, 1, 3), profiles=False)
    assert request_in({VARIABLE: asked.to_variable()}) == asked
    assert request_in({}) is None
    for wrong in ("1", "{}", '{"folder": "x", "window": {"num_wait": -1}, "profiles": true}', "nonsense"):
        with pytest.raises(ValueError, match="ddp-plugin trace|wait"):
            request_in({VARIABLE: wrong})


# ----------------------------------------------------------------------------------------------------------- issuers

ROOTS = {
    "python": "/py",
    "site-packages": "/py/site-packages",
    "torch": "/py/site-packages/torch",
    "Lightning": "/py/site-packages/lightning",
    "torchmetrics": "/py/site-packages/torchmetrics",
    "ddp_plugin": "/src/ddp_plugin",
}
C10D = "/py/site-packages/torch/distributed/distributed_c10d.py"
DDP_FORWARD = "/py/site-packages/torch/nn/parallel/distributed.py"
LOOP = "/py/site-packages/lightning/pytorch/loops/training_epoch_loop.py"
FIT = "/py/site-packages/lightning/pytorch/trainer/trainer.py"
FABRIC = "/py/site-packages/lightning/fabric/utilities/distributed.py"
REDUCTIONS = "/src/ddp_plugin/strategy/reductions.py"
MODEL, SCRIPT = "/home/me/model.py", "/home/me/train.py"


@pytest.mark.parametrize(
    ("files", "name", "at", "called_from"),
    [
        ([C10D, "/src/ddp_plugin/hooks/exact.py", "/py/threading.py"], "DDP", 1, None),
        ([C10D, "/src/ddp_plugin/collectives/execution.py", "/src/ddp_plugin/hooks/algorithms.py"], "DDP", 2, None),
        ([DDP_FORWARD, LOOP, FIT, SCRIPT], "DDP", 0, None),
        ([C10D, MODEL, DDP_FORWARD, LOOP, FIT, SCRIPT], "your code", 1, None),
        ([C10D, "/src/ddp_plugin/matching.py", REDUCTIONS, LOOP, MODEL, LOOP, FIT, SCRIPT], "ddp_plugin", 2, 4),
        ([C10D, "/src/ddp_plugin/agreement.py", LOOP, FIT, SCRIPT], "ddp_plugin", 1, None),
        ([C10D, FABRIC, LOOP, FIT, SCRIPT], "Lightning", 1, None),
        ([C10D, "/py/site-packages/torchmetrics/metric.py", "<string>", MODEL, LOOP, SCRIPT], "torchmetrics", 1, 3),
        ([C10D, "/py/site-packages/einops/x.py", MODEL, LOOP, SCRIPT], "einops", 1, 2),
        ([C10D, "/py/site-packages/single.py"], "single", 1, None),
        ([C10D, SCRIPT], "your code", 1, None),
        ([C10D, "/src/ddp_plugin/gather.py", "/py/threading.py"], "ddp_plugin", 1, None),
    ],
)  # fmt: skip
def test_the_stack_tells_who_issued_a_collective(files: list[str], name: str, at: int, called_from: int | None) -> None:
    found = issuer_of([Frame(file, 10 + index, "f") for index, file in enumerate(files)], ROOTS, "/home/me")
    assert found.name == name
    assert found.place.endswith(f":{10 + at} f")
    assert found.place.split(":")[0].endswith(Path(files[at]).name)
    assert found.called_from == (f"model.py:{10 + called_from} f" if called_from is not None else "")


def test_calls_that_are_alike_are_added_up() -> None:
    mine = [(C10D, 1, "all_reduce"), (MODEL, 7, "step"), (LOOP, 1, "run")]
    other = [(C10D, 1, "all_reduce"), (MODEL, 8, "step"), (LOOP, 1, "run")]
    calls = [
        Call(0, "all_reduce", 8, mine, True, True, 0.25),
        Call(1, "all_reduce", 16, mine, True, False, 0.0),
        Call(1, "all_reduce", 4, mine, False, True, 0.5),  # of a device: its stream waits, and no host
        Call(1, "all_reduce", 4, other, True, True, 1.0),
    ]
    assert count(calls, ROOTS, "/home/me") == (
        CollectiveRow("your code", "all_reduce", "model.py:7 step", "", 3, 28, 1, 0.25),
        CollectiveRow("your code", "all_reduce", "model.py:8 step", "", 1, 4, 1, 1.0),
    )


# --------------------------------------------------------------------------------------------- records made by hand


def step(number: int, late_s: float = 0.0, begin_s: float | None = None) -> StepTimeline:
    """10 ms of data, 20 of forward, a backward in which two buckets are ready after 20 and 40 ms, 10 of optimizer.

    Reductions end at 100 ms on all ranks, whose step is 110 ms long; a rank that is late is so in its forward.
    """
    zero_s = 0.11 * number if begin_s is None else begin_s
    at = [zero_s + seconds for seconds in (0.0, 0.01, 0.03 + late_s, 0.1, 0.11)]
    phases = tuple(
        Phase(p, a, b) for p, a, b in zip(("data", "forward", "backward", "optimizer"), at, at[1:], strict=False)
    )
    buckets = (
        BucketSpan(0, at[2] + 0.02, zero_s + 0.09),
        BucketSpan(1, at[2] + 0.04, zero_s + 0.1),
    )
    before = (Phase("backward", zero_s - 0.05, zero_s - 0.01), Phase("optimizer", zero_s - 0.01, zero_s))
    return StepTimeline(number, phases, buckets, True, zero_s - 0.01, 1, before)


def record(rank: int, late_s: float = 0.0, **changes: Any) -> RankRecord:
    made = RankRecord(
        rank=rank,
        world_size=2,
        host=f"node{rank}",
        device="cpu",
        state=WHOLE,
        asked=Window(),
        window=Window(),
        zero_unix_s=1000.0 + 50.0 * rank,
        steps=[step(number, late_s) for number in range(7, 15)],
        buckets={0: BucketContents(("head.<weight>",), 4000), 1: BucketContents(("body.weight", "body.bias"), 8000)},
        collectives=(CollectiveRow("your code", "all_reduce", "a.py:3 f", "", 16, 160, 8, 0.08 * (rank + 1)),),
        num_counted=8,
        memory=Memory(2_000_000_000 + rank),
    )
    return replace(made, **changes)


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    made = record(1, notes=["a", "b"], step_before_s=0.1, memory=Memory(1, 2, 3, 4))
    write_record(tmp_path / "new", made)
    (tmp_path / "new" / "rank3.json").write_text("{")
    (tmp_path / "new" / "rank4.json").write_text("[]")
    found, complaints = read_records(tmp_path / "new")
    assert found == {1: made}
    assert [text.split()[0] for text in complaints] == ["rank3.json", "rank4.json"]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_older_trace_takes_the_place_of_the_one_before_it_and_nothing_else_moves(tmp_path: Path) -> None:
    others = {"ranking.json", "notes.txt", "previous"}
    (tmp_path / "previous").mkdir()
    for name in ("ranking.json", "notes.txt", "previous/rank0.json", "previous/trace.json"):
        (tmp_path / name).write_text("the user's own")
    for rank in (1, 0):
        write_record(tmp_path, record(rank))
        for name in (f"rank{rank}.operators.json", "trace.html", "trace.json", "trace.png", ".0123abcd.trace.png"):
            (tmp_path / name).touch()
        ours = names_in(tmp_path) - others - {ASIDE}
        assert set_aside(tmp_path) == tmp_path / ASIDE
        assert names_in(tmp_path) == others | {ASIDE}
        assert names_in(tmp_path / ASIDE) == ours
        assert read_records(tmp_path / ASIDE)[0] == {rank: record(rank)}
    assert set_aside(tmp_path) is None  # what is no trace takes the place of none
    assert read_records(tmp_path / ASIDE)[0] == {0: record(0)}
    assert names_in(tmp_path / "previous") == {"rank0.json", "trace.json"}


@pytest.mark.parametrize("name", ["trace.json", "trace.png", "trace.html", "rank0.json"])
def test_what_another_program_wrote_is_not_replaced(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text("{}")
    assert main(["trace", "--folder", str(tmp_path), "--", sys.executable, "-c", ""]) == 2
    assert f"{name} of another program" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "{}"


def test_of_tracers_that_share_a_folder_the_first_alone_sets_aside(tmp_path: Path) -> None:
    """And a lock does not outlive its holder."""
    write_record(tmp_path, record(0))
    code = "import fcntl, sys; fcntl.flock(file := open(sys.argv[1], 'ab'), fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"\n"
        with alone_in(tmp_path) as is_alone:
            assert not is_alone
        assert main(["trace", "--folder", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(5)"]) == 5
        assert read_records(tmp_path)[0] == {0: record(0)}
        first.kill()
    assert main(["trace", "--folder", str(tmp_path), "--", sys.executable, "-c", "raise SystemExit(5)"]) == 5
    assert read_records(tmp_path)[0] == {}
    assert read_records(tmp_path / ASIDE)[0] == {0: record(0)}


def test_times_are_those_that_can_be_added_up_by_hand() -> None:
    joined = Joined({0: record(0), 1: record(1, late_s=0.02)})
    told = headline(joined)
    # Exposed: from 70 ms to 100 on rank 0, from 90 on rank 1; so 20 of 110 ms on average.
    assert "A step takes 110.0 ms on 2 ranks, mean of 8 steps" in told
    assert "data 10.0 ms, forward 30.0 ms, backward 40.0 ms" in told
    assert "no backward hides 20.0 ms, optimizer and callbacks 10.0 ms" in told
    (late, waits) = conclusions(joined)
    assert "Rank 1 (on node1) keeps the others waiting: it is 20.0 ms late in each step, 18 % of it" in late.what
    assert "20.0 ms of that in its forward" in late.what
    assert (
        "The host waits 15.0 ms of a step (14 %) in all_reduce by your code, 1.0 times a step, at a.py:3" in waits.what
    )
    (row,) = joined.collectives()
    assert (row.per_step, row.bytes_per_step, row.num_blocking_per_step) == (2.0, 20.0, 1.0)
    assert row.waited_s == pytest.approx(0.015)
    assert remarks(joined) == []


def test_exposed_communication_of_the_rank_that_waits_least_is_everyones_own() -> None:
    found = conclusions(Joined({0: record(0, collectives=()), 1: record(1, collectives=())}))
    assert [finding.what[:20] for finding in found] == ["27 % of a step is co"]  # 30 of 110 ms on both


def test_means_are_those_of_steady_steps() -> None:
    """The first recorded step waited 10 s for the workers of its epoch, which no profiler did."""
    first = step(7)
    slow = Phase("data", first.began_s - 10.0, first.phases[0].end_s)
    steps = [replace(first, phases=(slow, *first.phases[1:]), is_steady=False), *map(step, range(8, 15))]
    joined = Joined({0: record(0, steps=steps, step_before_s=0.11), 1: record(1, step_before_s=0.11)})
    assert remarks(joined) == []
    assert "A step takes 110.0 ms on 2 ranks, mean of 7 steps" in headline(joined)


def test_without_faults_nothing_is_said() -> None:
    quiet = [
        replace(
            step(number),
            phases=(Phase("data", 0, 0.001), Phase("forward", 0.001, 0.05), Phase("backward", 0.05, 0.1)),
            buckets=(),
        )
        for number in range(8)
    ]
    joined = Joined({0: record(0, steps=quiet, collectives=(), world_size=1)})
    assert conclusions(joined) == []
    assert "Nothing stands out" in render_page(joined, "x")


def test_what_is_missing_is_said() -> None:
    empty: dict[str, Any] = {"steps": [], "collectives": (), "num_counted": 0}
    joined = Joined(
        {
            0: record(0, world_size=6, window=Window(0, 2, 3), step_before_s=0.05),
            1: record(1, world_size=6, state=TRAINING, **empty),
            3: record(3, world_size=6, state=FAILED, notes=["Ended by ValueError: x"]),
            4: record(4, world_size=6, state=OVER),
            5: record(5, world_size=6, state=SET_UP, **empty),
        }
    )
    assert joined.missing == (1, 2, 5)
    told = "\n".join(remarks(joined))
    for words in (
        "Missing: rank 2 of 6 wrote nothing",
        "Rank 1 began to train and was killed",
        "Rank 3 failed before",
        "Rank 4 ended its training before",
        "Rank 5 took no training step",
        "shorter than the window that was asked for (wait 5, warmup 2, active 10)",
        "Ended by ValueError: x (rank 3)",
        "2.2 times as long",  # 110 ms after 50
    ):
        assert words in told
    page = render_page(joined, "python a.py")
    assert "Rank 1 began to train" in page
    assert headline(Joined({})) == NOTHING_RECORDED
    assert NOTHING_RECORDED.split("(")[0] in render_page(Joined({}), "python a.py")
    assert "took no training step" in headline(Joined({0: record(0, state=SET_UP, **empty)}))
    assert "No rank finished" in headline(Joined({0: record(0, state=TRAINING, **empty)}))
    render_page(Joined({0: record(0, state=TRAINING, **empty)}), "")


def test_the_picture_is_to_scale() -> None:
    joined = Joined({0: record(0), 1: record(1, late_s=0.015)})
    svg, number = draw_step(joined.timelines, {0: ("head.<weight>",)})
    assert number in range(7, 15)
    bars = [
        (bar.get("class"), float(bar.get("x", "")), float(bar.get("width", "")), bar[0].text)
        for bar in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
    ]
    scale = 1000 / 110  # 110 ms over the whole width, from 64 on
    backward = [bar for bar in bars if bar[0] == "backward"]
    assert [bar[1] for bar in backward] == pytest.approx([64 + 30 * scale, 64 + 45 * scale], abs=0.01)
    assert [bar[2] for bar in backward] == pytest.approx([70 * scale, 55 * scale], abs=0.01)
    exposed = [bar[2] / scale for bar in bars if bar[0] == "exposed"]
    assert exposed == pytest.approx([30, 20, 30, 15, 5, 15], abs=0.01)
    hidden = [bar[2] / scale for bar in bars if bar[0] == "hidden"]
    assert hidden == pytest.approx([20, 20], abs=0.01)
    assert "bucket 0 (head.<weight>): 20.00 ms" in [bar[3] for bar in bars]


def test_the_page_needs_nothing_from_outside_and_takes_words_as_words() -> None:
    joined = Joined({0: record(0), 1: record(1, notes=["<script>alert(1)</script>"])})
    page = render_page(joined, "python 'a & b.py' <x>", has_picture=True)
    assert not re.search(r"(src|href)\s*=|@import|url\(|<script|<link", page)
    assert "&lt;script&gt;" in page
    assert "a &amp; b.py" in page
    assert "head.&lt;weight&gt;" in page
    assert page.count("<svg") == 2
    assert '<td class="n">2.00</td>' in page  # collectives of a step
    many = Joined({rank: record(rank, world_size=40) for rank in range(40)})
    assert render_page(many, "").count('class="rank"') == MAX_RANKS


@pytest.mark.parametrize(("length", "last"), [(110.0, 100.0), (0.8, 0.8), (3.0, 3.0), (1234.0, 1200.0)])
def test_ticks_are_round(length: float, last: float) -> None:
    found = ticks(length)
    assert 4 <= len(found) <= 10
    assert found[0] == 0
    assert found[-1] == pytest.approx(last)


def test_the_merged_trace_lays_operators_over_the_steps_of_their_rank(tmp_path: Path) -> None:
    """Rank 1's clock is 0.02 s ahead; an operator at the begin of the forward is 10 ms after its step's begin."""
    ahead = [step(number, begin_s=0.11 * number + 0.02) for number in range(7, 15)]
    joined = Joined({0: record(0), 1: record(1, steps=ahead)})
    for rank in range(2):
        forward_unix_s = joined.records[rank].zero_unix_s + joined.records[rank].steps[0].phases[1].begin_s
        events = [
            {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 78, "ts": 1e6 * (forward_unix_s - 900), "dur": 5.0},
            {"ph": "s", "name": "ac2g", "pid": 77, "tid": 78, "ts": 1.0, "id": 4},
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 78, "args": {"name": "python"}},
            {"ph": "i", "name": "ignored", "pid": 77, "tid": 78, "ts": 1.0},
        ]
        trace = {"traceEvents": events, "baseTimeNanoseconds": 900 * 10**9}
        operators_path(tmp_path, rank).write_text(json.dumps(trace))
    write_trace(tmp_path / "all.json", joined, tmp_path)
    trace = json.loads((tmp_path / "all.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = trace["traceEvents"]
    found = [event for event in events if event["name"] == "aten::mm"]
    assert [event["pid"] for event in found] == [0, 1]
    assert [event["ts"] for event in found] == pytest.approx([10_000, 10_000], abs=1.0)  # microseconds
    forwards = {event["pid"]: event["ts"] for event in reversed(events) if event["name"] == "forward"}
    assert forwards == pytest.approx({0: 10_000, 1: 10_000}, abs=1.0)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {threads[event["pid"], event["tid"]] for event in found} == {"torch: python"}


def test_a_picture_or_a_trace_that_fails_costs_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(path: Path, timelines: object) -> None:
        path.write_text("half a picture")
        raise ImportError("no numpy")

    for rank in range(2):
        write_record(tmp_path, record(rank))
    monkeypatch.setattr(command, "draw_timeline", half)
    write_page(tmp_path, "x")
    assert "no picture: ImportError: no numpy" in capsys.readouterr().err
    pages = {"rank0.json", "rank1.json", "trace.html", "trace.json"}
    assert names_in(tmp_path) == pages
    assert "trace.png" not in (tmp_path / "trace.html").read_text()
    (tmp_path / "trace.html").unlink()
    operators_path(tmp_path, 1).write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        write_page(tmp_path, "x")
    assert names_in(tmp_path) == pages | {"rank1.operators.json"}


# ------------------------------------------------------------------------------------------------ what a run records


class Talking(Delayed):
    """Issues one collective of its own in each step, logs one value over the ranks, and keeps its losses."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if dist.is_initialized():
            dist.all_reduce(torch.ones(6))
            dist.all_reduce(torch.ones(2), async_op=True).wait()
        self.log("loss", loss, sync_dist=True)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


def traced(
    folder: Path, module: pl.LightningModule, num_batches: int, window: Window | None, **settings: Any
) -> pl.Trainer:
    """Trains with the variable set, as a process of a traced command does, or without for a window of ``None``."""
    callbacks = settings.pop("callbacks", [])
    settings = {"strategy": CustomDDPStrategy(bucket_cap_mb=BUCKET_CAP_MB)} | settings
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tracing._Process, "is_done", False)
        if window is not None:
            patch.setenv(VARIABLE, TraceRequest(str(folder), window).to_variable())
        run = trainer(callbacks=callbacks, use_distributed_sampler=False, **settings)
        run.fit(module, loader(num_batches))
    return run


class Outside(pl.Callback):
    """Notes in which steps torch's own methods are replaced."""

    def __init__(self) -> None:
        self.own = dist.ProcessGroup.allreduce, dist.Work.wait
        self.replaced: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if (dist.ProcessGroup.allreduce, dist.Work.wait) != self.own:
            self.replaced.append(batch_idx)


@ranks(2, init=False)
def test_a_run_is_recorded_and_its_numbers_are_left_alone(tmp_path: Path) -> None:
    plain, watched, outside = Talking(1, 0.02, base_s=0.004), Talking(1, 0.02, base_s=0.004), Outside()
    traced(tmp_path, plain, 16, None)
    run = traced(tmp_path, watched, 16, Window(3, 2, 7), callbacks=[outside])
    assert watched.losses == plain.losses
    for a, b in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    assert outside.replaced == list(range(5, 12))
    assert not [c for c in run.callbacks if isinstance(c, _tracing.TraceRecording)]
    dist.barrier()
    if os.environ["RANK"] == "1":
        return
    joined = write_page(tmp_path, "python train.py")
    assert set(joined.records) == {0, 1}
    for one in joined.records.values():
        assert one.state == WHOLE
        assert [each.step for each in one.steps] == list(range(5, 12))
        assert one.num_counted == 7
        assert [bucket.num_bytes for bucket in one.buckets.values()] == [LAYER_BYTES] * NUM_LAYERS
        assert one.step_before_s is not None
        assert one.memory.resident_bytes > 10**8
    # By hand: four buckets; two reductions of six and two numbers; one comparison of a logged value; the stop's.
    rows = {
        (row.issuer, row.operation, row.place.split(":")[0], row.num_blocking_per_step > 0): row
        for row in joined.collectives()
    }
    buckets = rows["DDP", "all_reduce", "ddp_plugin/hooks/exact.py", False]
    assert (buckets.per_step, buckets.bytes_per_step) == (NUM_LAYERS, NUM_LAYERS * LAYER_BYTES)
    own = [row for row in joined.collectives() if row.issuer == "your code"]
    assert [row.per_step for row in own] == [1.0, 1.0]
    assert sorted(row.bytes_per_step for row in own) == [8.0, 24.0]
    assert all("training_step" in row.place and row.num_blocking_per_step == 1.0 for row in own)
    (logged,) = (row for row in joined.collectives() if row.called_from)
    assert (logged.issuer, logged.per_step) == ("ddp_plugin", 1.0)
    assert "test_trace.py" in logged.called_from
    (stop,) = (row for row in joined.collectives() if "agreement.py" in row.place)
    assert stop.per_step == 1.0
    assert sum(row.per_step for row in joined.collectives()) == NUM_LAYERS + 2 + 1 + 1
    # Rank 1 is 20 ms late, in its second layer.
    assert any(finding.what.startswith("Rank 1") and "backward" in finding.what for finding in conclusions(joined))
    assert "ms late in each step" in (tmp_path / "trace.html").read_text()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"backward", "reduction", "aten::linear"} <= names
        steps = [
            event["name"] for event in events if event["pid"] == rank and event["name"].startswith("ProfilerStep#")
        ]
        assert len(set(steps)) == 7
        # An operator of the forward lies in a forward: both clocks are one.
        forwards = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["pid"] == rank and e["name"] == "forward"]
        linears = [e["ts"] for e in events if e["pid"] == rank and e["name"] == "aten::linear"]
        inside = [any(begin - 500 <= ts <= end + 500 for begin, end in forwards) for ts in linears]
        assert len(inside) == 7 * NUM_LAYERS
        assert all(inside)


class Failing(Delayed):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 6:
            raise RuntimeError("the user's own error")
        return super().training_step(batch, batch_idx)


@ranks(1, init=False)
def test_what_cuts_a_window_short(tmp_path: Path) -> None:
    """One process: an error, too few steps, an end that nobody foresaw, shards, and a profiler of the user's own."""
    fast: dict[str, Any] = {"base_s": 0.0, "forward_s": 0.001}
    with pytest.raises(RuntimeError, match="the user's own error"):
        traced(tmp_path / "a", Failing(**fast), 30, Window(2, 1, 10))
    failed = join(tmp_path / "a").records[0]
    assert (failed.state, [one.step for one in failed.steps]) == (FAILED, [3, 4, 5])
    assert failed.notes == ["Ended by RuntimeError: the user's own error"]

    traced(tmp_path / "b", Delayed(**fast), 4, Window(5, 2, 10))
    short = join(tmp_path / "b").records[0]
    assert (short.state, short.window, [one.step for one in short.steps]) == (WHOLE, Window(0, 2, 2), [2, 3])
    assert operators_path(tmp_path / "b", 0).exists()

    traced(tmp_path / "c", Delayed(**fast), 40, Window(20, 2, 3), callbacks=[Stopping()])
    early = join(tmp_path / "c").records[0]
    assert early.step_before_s is None
    assert (early.state, [one.step for one in early.steps], early.num_counted) == (OVER, [3, 4, 5], 0)
    assert any("window was not reached" in note for note in early.notes)
    assert "Not counted" in render_page(join(tmp_path / "c"), "")

    traced(tmp_path / "g", Delayed(**fast), 8, Window(3, 2, 1))
    single = join(tmp_path / "g").records[0]
    assert ([one.step for one in single.steps], single.num_counted) == ([5], 1)
    assert single.step_before_s is not None

    strategy = CustomDDPStrategy(logical_shards=2)
    traced(tmp_path / "d", Delayed(**fast), 12, Window(0, 1, 2), strategy=strategy)
    assert [one.step for one in join(tmp_path / "d").records[0].steps] == [1, 2]

    own = PyTorchProfiler(dirpath=str(tmp_path / "own"), filename="own", export_to_chrome=True)
    traced(tmp_path / "e", Delayed(**fast), 12, Window(1, 1, 3), profiler=own)
    assert any("torch profiler of its own" in note for note in join(tmp_path / "e").records[0].notes)
    assert not operators_path(tmp_path / "e", 0).exists()
    assert any((tmp_path / "own").iterdir())

    run = trainer(strategy=CustomDDPStrategy())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tracing._Process, "is_done", False)
        patch.setenv(VARIABLE, TraceRequest(str(tmp_path / "f"), Window()).to_variable())
        run.predict(Predicting(), loader(2))
    assert json.loads(record_path(tmp_path / "f", 0).read_text())["state"] == SET_UP


@pytest.mark.parametrize(
    ("device", "world_size", "stopped"), [("cpu", 2, [FAILED]), ("cuda:0", 1, [FAILED]), ("cuda:0", 2, [])]
)
@pytest.mark.parametrize("can_read", [True, False])
def test_a_failure_is_written_before_the_profiler_is_stopped(
    device: str, world_size: int, stopped: list[str], can_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler waits for the device: for ever, where a collective of it waits for a rank that has failed."""
    states = []

    def take(**arguments: Any) -> list[StepTimeline]:
        if can_read:
            return []  # the device has finished none
        raise RuntimeError("CUDA error")

    recording = _tracing.TraceRecording(TraceRequest(str(tmp_path), Window(3, 2, 10)))
    recording._record, recording._is_on = record(0, state=TRAINING, window=Window(3, 2, 10), steps=[]), True
    recording._has_counted, recording._num_done = True, 3 + 2 + 4
    recording._watch.calls.append(Call(8, "barrier", 0, [(SCRIPT, 1, "f")], True))
    recording._profile = SimpleNamespace(stop=lambda: states.append(read_records(tmp_path)[0][0].state))
    monkeypatch.setattr(recording._recorder, "take", take)
    monkeypatch.setattr(_tracing, "_memory", lambda trainer: Memory(1))
    strategy = SimpleNamespace(root_device=torch.device(device), remove_bucket_observer=lambda observer: None)
    run: Any = SimpleNamespace(strategy=strategy, world_size=world_size, callbacks=[recording])
    with contextlib.nullcontext() if can_read else pytest.warns(UserWarning, match="CUDA error"):
        recording.on_exception(run, Delayed(), ValueError("x"))
    written = read_records(tmp_path)[0][0]
    assert (written.state, written.notes) == (FAILED, ["Ended by ValueError: x"])
    if can_read:
        assert states == stopped
        assert (written.num_counted, [row.num_calls for row in written.collectives]) == (4, [1])


class Stopping(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            trainer.should_stop = True


class Predicting(Delayed):
    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return batch


# ------------------------------------------------------------------------------------------------------- the command

TRAIN = """
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from ddp_plugin import CustomDDPStrategy

if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, max_steps=9, strategy=CustomDDPStrategy(), logger=False, limit_val_batches=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    sys.exit(int(sys.argv[2]))
"""


def test_the_command_traces_every_process_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lightning's own launcher starts the second process; the script's arguments and its status are its own."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "out").mkdir()
    write_record(tmp_path / "out", record(5))
    (tmp_path / "out" / "trace.html").write_text("of an older trace")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = [sys.executable, "-W", "ignore", "train.py", "--", "3"]
    assert main(["trace", "--folder", "out", "--wait", "2", "--active", "5", "--", *script]) == 3
    told = capfd.readouterr().err
    assert "A step takes" in told
    assert "on 2 ranks, mean of 5 steps" in told
    written = {path.name for path in (tmp_path / "out").iterdir()}
    operators = {f"rank{rank}.operators.json" for rank in range(2)}
    own = {"trace.html", "trace.json", "trace.png", "rank0.json", "rank1.json"}
    assert written == own | operators | {ASIDE, LOCK}
    assert read_records(tmp_path / "out" / ASIDE)[0] == {5: record(5)}
    assert (tmp_path / "out" / ASIDE / "trace.html").read_text() == "of an older trace"
    page = (tmp_path / "out" / "trace.html").read_text()
    assert shlex.join(script).replace("'", "&#x27;") in page
    (tmp_path / "out" / "trace.html").unlink()
    assert main(["trace", "--join", "out"]) == 0
    assert "on 2 ranks, mean of 5 steps" in (tmp_path / "out" / "trace.html").read_text()


@pytest.mark.parametrize(
    ("code", "status"), [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_a_script_that_never_trains_keeps_its_status(
    code: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "--folder", str(tmp_path / "new"), "--", sys.executable, "-c", code]) == status
    assert NOTHING_RECORDED in capsys.readouterr().err
    assert "makes no Trainer with CustomDDPStrategy" in (tmp_path / "new" / "trace.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "a command after --"),
        (["--join", ".", "--", "python"], "both"),
        (["--join", "nowhere"], "a folder that ranks wrote to"),
        (["--active", "0", "--", "python"], "active"),
        (["--folder", "file/x", "--", "python"], "a folder that can be written"),
    ],
)
def test_what_a_person_can_correct(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["trace", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_command_that_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--folder", str(tmp_path), "--", "no-such-program-here"]) == 127
    assert "no-such-program-here" in capsys.readouterr().err
