"""From stacks, activities and flight records to one sentence; who asks for them, and when. Without processes."""

import bdb
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board
from ddp_plugin.supervision.diagnosis import Answer, Diagnosis, RankState, diagnose, named_ranks
from ddp_plugin.supervision.flight import Operation, bucket_of, operations, parting, unfinished
from ddp_plugin.supervision.hang import ASKED, HangWatcher, answer_now
from ddp_plugin.supervision.pulse import ACTIVITY
from ddp_plugin.supervision.stacks import Frame, Standing, main_thread_stack, standing

# ------------------------------------------------------------------------------------------------------ stacks, by hand

SCRIPT = Frame("/home/me/train.py", 90, "<module>", "__main__", is_users=True)
TRAINER = [
    Frame("call.py", 1, "_call_and_handle_interrupt", "lightning.pytorch.trainer.call"),
    Frame("trainer.py", 1, "fit", "lightning.pytorch.trainer.trainer", owner="Trainer"),
    SCRIPT,
]
STEP = [Frame("fit_loop.py", 1, "advance", "lightning.pytorch.loops.fit_loop", owner="FitLoop"), *TRAINER]
BACKWARD = [
    Frame("graph.py", 1, "_engine_run_backward", "torch.autograd.graph"),
    Frame("__init__.py", 1, "backward", "torch.autograd"),
    *STEP,
]
C10D = [
    Frame("distributed_c10d.py", 1, "all_gather", "torch.distributed.distributed_c10d"),
    Frame("c10d_logger.py", 1, "wrapper", "torch.distributed.c10d_logger"),
    Frame("distributed_c10d.py", 2, "all_gather_object", "torch.distributed.distributed_c10d"),
    Frame("c10d_logger.py", 1, "wrapper", "torch.distributed.c10d_logger"),
]
COMPARED = [
    Frame("matching.py", 1, "_wait_aloud", "ddp_plugin.matching"),
    Frame("matching.py", 2, "match", "ddp_plugin.matching", note="loss (mean)"),
]


def within_callback(name: str, *, code: str = "self.lock.acquire()") -> list[Frame]:
    users = Frame("/home/me/mine.py", 7, name, "mine", owner="Mine", code=code, is_users=True)
    return [users, Frame("call.py", 2, "_call_callback_hooks", "lightning.pytorch.trainer.call"), *STEP]


def users_step(name: str) -> Frame:
    return Frame("/home/me/train.py", 12, name, "__main__", owner="Net", code="x = self.net(x)", is_users=True)


STANDINGS: dict[str, tuple[list[Frame], Standing]] = {
    "nothing is known": ([], Standing("other")),
    "the user's collective": (
        [*C10D, *within_callback("on_train_batch_end")],
        Standing(
            "collective",
            "`all_gather_object`",
            "Mine.on_train_batch_end",
            True,
            within_callback("on_train_batch_end")[0],
        ),
    ),
    "a collective of the package": (
        [*C10D, Frame("agreement.py", 1, "settle", "ddp_plugin.agreement", owner="Agreement"), *STEP],
        Standing("collective", "`all_gather_object` for `Agreement.settle`"),
    ),
    "a comparison": (
        [*C10D[:1], *COMPARED, Frame("reductions.py", 1, "reduce_logged", "ddp_plugin.strategy.reductions"), *STEP],
        Standing("comparison", "loss (mean)", in_logging=True),
    ),
    "buffers": (
        [
            Frame("distributed.py", 1, "_sync_module_states", "torch.nn.parallel.distributed"),
            Frame("distributed.py", 2, "forward", "torch.nn.parallel.distributed"),
            *STEP,
        ],
        Standing("collective", "DDP's broadcast of buffers"),
    ),
    "the wrap": (
        [Frame("distributed.py", 1, "__init__", "torch.nn.parallel.distributed"), *TRAINER],
        Standing("collective", "DDP's start"),
    ),
    "a backward": (BACKWARD, Standing("backward")),
    "a worker": (
        [
            Frame("queues.py", 1, "get", "multiprocessing.queues"),
            Frame("dataloader.py", 1, "_next_data", "torch.utils.data.dataloader", note="data worker 1 (pid 7)"),
            Frame("dataloader.py", 2, "__next__", "torch.utils.data.dataloader"),
            *STEP,
        ],
        Standing("data", "data worker 1 (pid 7)"),
    ),
    "the user's iterable": (
        [
            Frame("/home/me/data.py", 3, "__next__", "data", owner="Stream", is_users=True),
            Frame("fetchers.py", 1, "__next__", "lightning.pytorch.loops.fetchers"),
            *STEP,
        ],
        Standing("data", users=Frame("/home/me/data.py", 3, "__next__", "data", owner="Stream", is_users=True)),
    ),
    "a save": (
        [
            Frame("serialization.py", 1, "save", "torch.serialization"),
            Frame("trainer.py", 1, "save_checkpoint", "lightning.pytorch.trainer.trainer", owner="Trainer"),
            *STEP,
        ],
        Standing("save", in_save=True),
    ),
    "a collective of a save": (
        [*C10D, Frame("trainer.py", 1, "save_checkpoint", "lightning.pytorch.trainer.trainer"), *STEP],
        Standing("collective", "`all_gather_object` for `save_checkpoint`", in_save=True),
    ),
    "a callback": (
        within_callback("on_fit_end"),
        Standing("callback", "Mine.on_fit_end", "Mine.on_fit_end", True, within_callback("on_fit_end")[0]),
    ),
    "a step": (
        [users_step("training_step"), Frame("m.py", 1, "_call_impl", "torch.nn.modules.module"), *STEP],
        Standing("other", users=users_step("training_step")),
    ),
    "a debugger": (
        [Frame("cmd.py", 1, "cmdloop", "cmd"), Frame("bdb.py", 1, "user_line", "bdb"), *STEP],
        Standing("debugger"),
    ),
    "code after the run": ([SCRIPT], Standing("outside", users=SCRIPT)),
}


@pytest.mark.parametrize("name", STANDINGS)
def test_what_a_stack_means(name: str) -> None:
    stack, expected = STANDINGS[name]
    assert standing(stack) == expected


def test_the_stack_of_the_main_thread_is_read_from_another_one() -> None:
    read: list[list[Frame]] = []

    class Waiting:
        def wait_for(self, thread: threading.Thread) -> None:
            thread.start()
            thread.join()

    def look() -> None:
        time.sleep(0.2)  # until the main thread has come to wait
        read.append(main_thread_stack())

    Waiting().wait_for(threading.Thread(target=look))
    users = next(frame for frame in read[0] if frame.is_users)
    assert users.name == "Waiting.wait_for"
    assert users.code == "thread.join()"
    assert users.place == f"test_hang_diagnosis.py:{users.line}: thread.join()"
    assert not read[0][0].is_users, "threading's own"
    assert [Frame(*row) for row in json.loads(json.dumps(read[0]))] == read[0]


def test_a_debugger_is_seen_in_a_real_stack() -> None:
    read: list[list[Frame]] = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            read.append(main_thread_stack())
            self.set_quit()

    Debugger().run("1 + 1")
    assert standing(read[0]).kind == "debugger"
    assert standing(main_thread_stack()).kind != "debugger"


# -------------------------------------------------------------------------------------------------------- flight record


def entry(number: int, name: str, size: list[int], *, retired: bool, at: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [size],
        "input_dtypes": ["Float"],
        "process_group": ["0", "default_pg"],
        "retired": retired,
        "state": "scheduled",
        "time_created_ns": at,
        "is_p2p": False,
        **more,
    }


def test_a_dump_of_gloo_and_one_of_nccl_are_read_alike() -> None:
    gloo = {"entries": [entry(1, "gloo:broadcast", [2, 3], retired=True, at=10)]}
    nccl = {
        "entries": [
            entry(7, "nccl:all_reduce", [5], retired=False, at=30, input_dtypes=["BFloat16"], state="started"),
            entry(6, "nccl:all_reduce", [], retired=False, at=20, state="completed"),
            entry(9, "nccl:send 0->1", [5], retired=False, at=40, is_p2p=True),
        ]
    }
    assert operations([nccl, gloo]) == [
        Operation("0", 1, "broadcast", 6, 24, True, 10),
        Operation("0", 6, "all_reduce", 1, 4, True, 20, is_on_device=True),
        Operation("0", 7, "all_reduce", 5, 10, False, 30, is_on_device=True),
    ]
    assert unfinished(operations([nccl, gloo])) == operations([nccl])[-1:]
    assert operations([nccl, gloo], num_latest=1)[0].number == 7
    assert operations([]) == []


def reductions(*sizes: int, at: int = 100, first: int = 1, name: str = "all_reduce") -> list[Operation]:
    return [Operation("0", first + index, name, size, 4 * size, False, at + index) for index, size in enumerate(sizes)]


def on_device(*sizes: int) -> list[Operation]:
    return [operation._replace(is_on_device=True) for operation in reductions(*sizes)]


def test_which_bucket_a_reduction_is_of() -> None:
    of_step = reductions(10, 10, 10)
    before = reductions(10, 10, at=50, first=-9)
    for index, operation in enumerate(of_step):
        assert bucket_of([*before, *of_step], operation, (40, 40, 40), begun_ns=100) == index
        assert bucket_of([*before, *of_step], operation, None, begun_ns=100) == index
    assert bucket_of([*before, *of_step], before[0], (40, 40, 40), begun_ns=100) is None, "of the step before"
    mixed = reductions(10, 3, 10)  # a layer that reduces three numbers in its backward
    assert bucket_of(mixed, mixed[2], (40, 40), begun_ns=100) == 1
    assert bucket_of(mixed, mixed[1], (40, 40), begun_ns=100) is None
    other = reductions(10, name="broadcast")
    assert bucket_of(other, other[0], None, begun_ns=100) is None


def test_where_collectives_part() -> None:
    alike = reductions(4, 5)
    assert parting({0: alike, 1: alike}) is None
    found = parting({0: alike, 1: alike[:1]})
    assert found is not None
    assert (found.number, found.by_rank) == (2, {0: alike[1], 1: None})
    other = [alike[0], reductions(5, first=2, name="broadcast")[0]]
    found = parting({0: alike, 1: other})
    assert found is not None
    assert found.by_rank == {0: alike[1], 1: other[1]}
    done = [operation._replace(is_done=True) for operation in alike]
    assert parting({0: done, 1: done[:1]}) is None, "nobody waits"
    assert parting({0: alike, 1: [op._replace(group="1") for op in alike]}) is None, "other groups"
    gathers = [operation._replace(name="all_gather") for operation in reductions(4)]
    assert parting({0: gathers, 1: [gathers[0]._replace(num_elements=9)]}) is None, "parts may differ in size"


# ------------------------------------------------------------------------------------------------------------ diagnoses


def rank_in(rank: int, stack: list[Frame] | None, *doing: str, **more: Any) -> RankState:
    place = {"stage": "train", "epoch": 0, "step": 120, "batch": 120, **more.pop("place", {})}
    keys = ("operations", "begun_ns", "bucket_bytes", "in_lanes")
    given = {key: more.pop(key) for key in keys if key in more}
    answer = None if stack is None else Answer(stack=stack, **given)
    return RankState(rank, doing, place, still_s=5.0, answer=answer, **more)


def in_backward(rank: int, bucket: int = 0, **more: Any) -> RankState:
    done = [operation._replace(is_done=True) for operation in reductions(*[10] * bucket)]
    awaited = reductions(10, first=bucket + 1, at=100 + bucket)
    more = {"operations": [*done, *awaited], "begun_ns": 100, **more}
    return rank_in(rank, BACKWARD, "optimizer_step", "backward", **more)


ZERO_WAITS = "rank 0 waits in the all-reduce of bucket 0 since step 120; "
CASES: dict[str, tuple[list[RankState], str]] = {
    "unequal validation": (
        [
            rank_in(
                0,
                [users_step("validation_step"), *STEP],
                "validation_step",
                place={"stage": "validate", "batch": 7},
            ),
            in_backward(2, bucket=3),
        ],
        "rank 2 waits in the all-reduce of bucket 3 since step 120; rank 0 is in `validation_step`, batch 7: unequal "
        "numbers of validation batches?",
    ),
    "unequal test": (
        [
            rank_in(0, [*C10D, *STEP], place={"stage": "test", "batch": 7}),
            rank_in(1, [*C10D, *within_callback("on_test_end")], place={"stage": "test", "batch": 6}),
        ],
        "rank 0 waits in `all_gather_object` for `FitLoop.advance` of the test, batch 7; rank 1 waits in "
        "`all_gather_object`, in `Mine.on_test_end` (mine.py:7: self.lock.acquire()) of the test, batch 6: a "
        "collective that rank 1 alone calls?",
    ),
    "unequal training": (
        [in_backward(0), rank_in(1, [*C10D, *STEP], place={"batch": 118})],
        ZERO_WAITS + "rank 1 waits in `all_gather_object` for `FitLoop.advance` since step 120: unequal numbers of "
        "training batches?",
    ),
    "unequal training, then validation": (
        [
            in_backward(0, place={"train_batch": 120, "is_last_batch": True}),
            rank_in(
                1,
                [*C10D, *STEP],
                place={"stage": "validate", "batch": None, "train_batch": 118, "is_last_batch": True},
            ),
        ],
        ZERO_WAITS + "rank 1 waits in `all_gather_object` for `FitLoop.advance` of the validation: unequal numbers of "
        "training batches?",
    ),
    "another epoch": (
        [in_backward(0), rank_in(1, [*C10D, *STEP], place={"epoch": 1, "batch": None})],
        ZERO_WAITS + "rank 1 waits in `all_gather_object` for `FitLoop.advance` since step 120: unequal numbers of "
        "training batches?",
    ),
    "a backward skipped": (
        [in_backward(0), rank_in(1, [*C10D, *STEP])],
        ZERO_WAITS + "rank 1 waits in `all_gather_object` for `FitLoop.advance` since step 120: a backward that rank "
        "1 skipped?",
    ),
    "a key of one rank": (
        [
            rank_in(0, STANDINGS["a comparison"][0], "optimizer_step", "training_step"),
            in_backward(1),
            in_backward(2),
        ],
        "rank 0 waits to reduce the logged value loss (mean) since step 120; ranks 1 and 2 wait in the all-reduce of "
        "bucket 0 since step 120: loss (mean) logged with sync_dist=True on rank 0 alone?",
    ),
    "a collective of one rank": (
        [rank_in(0, [*C10D, users_step("training_step"), *STEP], "training_step"), in_backward(1)],
        "rank 0 waits in `all_gather_object`, in `Net.training_step` (train.py:12: x = self.net(x)) since step 120; "
        "rank 1 waits in the all-reduce of bucket 0 since step 120: a collective that rank 0 alone calls?",
    ),
    "a save of one rank": (
        [rank_in(0, STANDINGS["a collective of a save"][0], "the save of a.ckpt", "the barrier 'x'"), in_backward(1)],
        "rank 0 waits in the save of a checkpoint since step 120; rank 1 waits in the all-reduce of bucket 0 since "
        "step 120: a checkpoint that rank 0 alone saves?",
    ),
    "a slow disk": (
        [
            rank_in(0, STANDINGS["a save"][0], "the save of a.ckpt"),
            rank_in(1, STANDINGS["a collective of a save"][0], "the barrier 'x'"),
        ],
        "rank 1 waits in the save of a checkpoint since step 120; rank 0 saves a checkpoint, batch 120: a file system "
        "that is slow or hangs under the save of rank 0?",
    ),
    "a worker": (
        [in_backward(0), rank_in(1, STANDINGS["a worker"][0])],
        ZERO_WAITS + "rank 1 waits for data worker 1 (pid 7), batch 120: a data loader that is stuck or slow on rank "
        "1?",
    ),
    "a callback": (
        [in_backward(0), rank_in(1, within_callback("on_train_batch_end"))],
        ZERO_WAITS + "rank 1 is in `Mine.on_train_batch_end`, batch 120: `Mine.on_train_batch_end` does not return on "
        "rank 1?",
    ),
    "a step": (
        [in_backward(0), rank_in(1, [users_step("training_step"), *STEP], "optimizer_step", "training_step")],
        ZERO_WAITS + "rank 1 is in `training_step`, batch 120: `training_step` does not return on rank 1?",
    ),
    "silence": (
        [in_backward(0), rank_in(1, None, silent_s=12.2)],
        ZERO_WAITS + "rank 1 has not been heard of for 12 s: rank 1 stopped, dead, or on a host that is gone?",
    ),
    "an exception caught": (
        [in_backward(0), rank_in(1, [SCRIPT], left="KeyError: 'x'")],
        ZERO_WAITS + "rank 1 has left the run by KeyError: 'x': an exception that rank 1 alone met, and caught?",
    ),
    "an early end": (
        [in_backward(0), rank_in(1, None, left="")],
        ZERO_WAITS + "rank 1 has ended its run: fewer batches or epochs on rank 1?",
    ),
    "outside": (
        [in_backward(0), rank_in(1, [SCRIPT])],
        ZERO_WAITS + "rank 1 is outside of the run, in train.py:90, batch 120: code that rank 1 alone runs?",
    ),
    "a link": (
        [in_backward(rank) for rank in range(5)],
        "ranks 0 to 4 wait in the all-reduce of bucket 0 since step 120: a link between hosts that is down or blocked?",
    ),
    "a hook's lane": (
        [
            rank_in(rank, BACKWARD, "optimizer_step", "backward", in_lanes=["the exchange of bucket 2"])
            for rank in range(2)
        ],
        "ranks 0 and 1 wait in the exchange of bucket 2 since step 120: a link between hosts that is down or blocked?",
    ),
    "no flight recorder": (
        [rank_in(0, BACKWARD, "backward"), rank_in(1, STANDINGS["a worker"][0])],
        "rank 0 waits in the backward for the gradients since step 120; rank 1 waits for data worker 1 (pid 7), batch "
        "120: a data loader that is stuck or slow on rank 1?",
    ),
    "NCCL: the host is further on than the device": (
        [
            rank_in(0, [users_step("training_step"), *STEP], "training_step", operations=on_device(4, 5)),
            rank_in(1, within_callback("on_fit_end"), operations=reductions(4)[:0]),
        ],
        "rank 0 waits in `all_reduce` of 4 elements, in `Net.training_step` (train.py:12: x = self.net(x)) since step "
        "120; rank 1 is in `Mine.on_fit_end`, batch 120: `Mine.on_fit_end` does not return on rank 1?",
    ),
    "unlike collectives": (
        [
            rank_in(0, [*C10D, *STEP], "training_step", operations=reductions(4, 5)),
            rank_in(1, [*C10D[:1], *STEP], "training_step", operations=reductions(4, 6)),
        ],
        "rank 0 waits in `all_gather_object` for `FitLoop.advance` since step 120; rank 1 waits in `all_gather` for "
        "`FitLoop.advance` since step 120: collectives that differ between ranks?",
    ),
    "a collective that runs unattended": (
        [
            in_backward(0, operations=[*reductions(3, at=1), *reductions(10, first=2)]),
            rank_in(1, within_callback("on_train_batch_end"), operations=reductions(3, at=1)),
        ],
        ZERO_WAITS + "rank 1 is in `Mine.on_train_batch_end`, batch 120: `Mine.on_train_batch_end` does not return on "
        "rank 1?",
    ),
    "one process": (
        [rank_in(0, within_callback("on_fit_end"))],
        "rank 0 is in `Mine.on_fit_end`, batch 120: `Mine.on_fit_end` does not return on rank 0?",
    ),
    "a rank that does not answer": (
        [in_backward(0), rank_in(1, None, "optimizer_step", "training_step")],
        ZERO_WAITS + "rank 1 is in `training_step`, batch 120: `training_step` does not return on rank 1?",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(name: str) -> None:
    states, expected = CASES[name]
    diagnosis = diagnose(states, 300.0)
    assert diagnosis.headline == expected
    assert not diagnosis.is_debugged
    assert diagnosis.report.startswith(f"No progress for 300 s: {expected}\n\n{diagnosis.cause.change}.")
    for state in states:
        assert f"\nrank {state.rank}: " in diagnosis.report
        for frame in (state.answer or Answer()).stack:
            assert f"{frame.file}:{frame.line} in {frame.name}" in diagnosis.report


def test_a_debugger_is_no_hang() -> None:
    diagnosis = diagnose([in_backward(0), rank_in(1, STANDINGS["a debugger"][0])], 300.0)
    assert diagnosis.is_debugged
    assert "rank 1 is held by a debugger" in diagnosis.headline


def test_where_the_collectives_part_is_in_the_report() -> None:
    states = [in_backward(0, bucket=1), rank_in(1, STANDINGS["a worker"][0], operations=reductions(10))]
    assert (
        "Collective number 2 of group 0: rank 0 calls `all_reduce` of 10 elements; rank 1 has not come to it."
        in diagnose(states, 300.0).report
    )


def test_many_ranks_make_a_short_report() -> None:
    states = [in_backward(rank) for rank in range(255)] + [rank_in(255, STANDINGS["a worker"][0])]
    diagnosis = diagnose(states, 300.0)
    assert diagnosis.headline.startswith("ranks 0 to 254 wait in the all-reduce of bucket 0")
    assert diagnosis.report.count("_engine_run_backward") == 1


def test_ranks_in_words() -> None:
    assert named_ranks([2]) == "rank 2"
    assert named_ranks([2, 0]) == "ranks 0 and 2"
    assert named_ranks([0, 1, 2, 3, 7]) == "ranks 0 to 3 and 7"
    assert named_ranks([0, 1, 4, 5, 6, 9]) == "ranks 0, 1, 4 to 6 and 9"


# ------------------------------------------------------------------------------------------ who notices, asks and tells


class World:
    """Ranks that share a board and a clock, without processes; each beats once a second while it lives."""

    def __init__(self, size: int, limit_s: float = 10.0) -> None:
        store = dist.HashStore()
        self.now_s = 0.0
        self.boards = [Board(store, rank, size) for rank in range(size)]
        self.activities = [Activity() for _ in range(size)]
        self.reporters = [Told() for _ in range(size)]
        self.watchers = [
            HangWatcher(activity, limit_s, 1.0, reporter, answer(activity), lambda: self.now_s)
            for activity, reporter in zip(self.activities, self.reporters, strict=True)
        ]
        self.beats = [0] * size

    def run(self, num_s: int, stopped: tuple[int, ...] = (), busy: tuple[int, ...] = ()) -> None:
        for _ in range(num_s):
            self.now_s += 1.0
            for rank, watcher in enumerate(self.watchers):
                if rank in stopped:
                    continue
                if rank in busy:
                    with self.activities[rank].doing("training_step"):
                        pass
                self.beats[rank] += 1
                self.boards[rank].post(ACTIVITY, {**self.activities[rank].snapshot(), "beat": self.beats[rank]})
                watcher.look(self.boards[rank])

    @property
    def reports(self) -> list[tuple[int, str]]:
        return [(rank, text) for rank, told in enumerate(self.reporters) for text in told.texts]


class Told:
    def __init__(self) -> None:
        self.texts: list[str] = []
        self.diagnoses: list[Diagnosis] = []

    def report(self, diagnosis: Diagnosis) -> None:
        self.texts.append("stall")
        self.diagnoses.append(diagnosis)

    def resume(self, sentence: str) -> None:
        self.texts.append(sentence)


def answer(activity: Activity, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {**answer_now(activity), **more}


def test_a_run_that_goes_on_is_left_alone() -> None:
    world = World(3)
    world.run(100, busy=(0, 1, 2))
    assert world.reports == []


def test_one_rank_that_stands_still_is_reported_once_by_rank_0() -> None:
    world = World(3)
    world.run(20, busy=(0, 1, 2))
    world.run(9, busy=(0, 2))
    assert world.reports == []
    world.run(40, busy=(0, 2))
    assert world.reports == [(0, "stall")]
    world.run(5, busy=(0, 1, 2))
    assert world.reports[1:] == [(0, world.reporters[0].texts[1])]
    assert world.reporters[0].texts[1].startswith("The run goes on: rank 1 had made no progress for ")
    world.run(30, busy=(1, 2))
    assert [text for _, text in world.reports].count("stall") == 2, "another stall is told anew"


def test_the_next_rank_tells_where_rank_0_is_stopped() -> None:
    world = World(3)
    world.run(5, busy=(0, 1, 2))
    world.run(40, stopped=(0,))
    assert world.reports == [(1, "stall")]
    (diagnosis,) = world.reporters[1].diagnoses
    assert "rank 0 has not been heard of for " in diagnosis.headline
    world.run(30)
    assert world.reporters[0].texts == ["stall"], "rank 0, awake again, sees that nothing has gone on since"


def test_time_in_which_all_were_stopped_does_not_count() -> None:
    world = World(2)
    world.run(5, busy=(0, 1))
    for _ in range(3):
        world.now_s += 1000.0
        world.run(1)
    assert world.reports == []


def test_a_rank_that_has_left_is_no_stall_but_explains_one() -> None:
    world = World(2)
    world.run(5, busy=(0, 1))
    world.watchers[1].leave(world.boards[1], "KeyError: 'x'")
    world.run(50, stopped=(1,), busy=(0,))
    assert world.reports == []
    world.run(50, stopped=(1,))
    assert world.reports == [(0, "stall")]
    assert "rank 1 has left the run by KeyError: 'x'" in world.reporters[0].diagnoses[0].headline


def test_what_a_debugger_holds_is_not_told() -> None:
    world = World(2)
    world.watchers[1] = HangWatcher(
        world.activities[1],
        10.0,
        1.0,
        world.reporters[1],
        answer(world.activities[1], stack=STANDINGS["a debugger"][0]),
        lambda: world.now_s,
    )
    world.run(50)
    world.run(20, busy=(0, 1))
    assert world.reports == []
    world.run(20, busy=(0, 1))
    assert world.boards[0].claimed(f"{ASKED}/0") is not None, "but it was asked for"


def test_an_answer_travels_as_json() -> None:
    activity = Activity(lambda: {"stage": "train", "step": 3})
    with activity.doing("backward"):
        told = json.loads(json.dumps(answer_now(activity, (8, 4))))
    assert told["doing"] == ["backward"]
    assert told["bucket_bytes"] == [8, 4]
    assert Frame(*told["stack"][0]).module == "ddp_plugin._compat"
