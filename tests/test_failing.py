"""One rank fails, is killed, or goes: all end within seconds, and all say which one it was."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_plugin import CustomDDPStrategy, _compat
from ddp_plugin.checkpoints import verify
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.hooks._attached import AttachedHook
from ddp_plugin.supervision import failure_watch
from ddp_plugin.supervision.activity import Activity
from ddp_plugin.supervision.board import Board, BoardLostError
from ddp_plugin.supervision.failure import PeerFailedError, describe, is_consequence, one_line
from ddp_plugin.supervision.failure_watch import FailureWatch
from ddp_plugin.supervision.processes import has_ended, identify
from ddp_plugin.supervision.pulse import Pulse
from tests.harness import ROOT, RankFailureError, ranks, run_ranks, trainer

LONG_S = 600.0  # far beyond what any test may take: whoever waits that long was not ended
FAILS_AT = 2


class FailingDataset(RandomDataset):
    def __init__(self, failing_at: int | None, folder: str) -> None:
        super().__init__(32, 64)
        self.failing_at, self.folder = failing_at, folder

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.folder:
            Path(self.folder, f"worker-{os.getpid()}").touch()
        if self.failing_at is not None and index >= self.failing_at:
            Path(self.folder, "since").write_text(str(time.time()))
            raise ValueError("no such sample")
        return super().__getitem__(index)


class UnspeakableError(ValueError):
    """Raises again where it is to be put into words."""

    def __str__(self) -> str:
        raise KeyError("no words")


FAILURES: dict[str, Callable[[], BaseException]] = {
    "exit": lambda: SystemExit(0),
    "stop": lambda: StopIteration(),
    "stop validation": lambda: StopIteration(),
    "unspeakable": lambda: UnspeakableError(),
}


class FailingModel(BoringModel):
    """Fails on one rank in one place, at step 2; the others wait for it there, or sleep where no message reaches."""

    def __init__(self, where: str, who: int, others_sleep: bool = False, folder: str = "") -> None:
        super().__init__()
        self.where, self.who, self.others_sleep, self.folder = where, who, others_sleep, folder

    def fail_if(self, where: str, is_time: bool = True) -> None:
        if where != self.where or not is_time:
            return
        if self.global_rank != self.who:
            time.sleep(LONG_S if self.others_sleep else 0)
        elif self.where.startswith("kill"):
            time.sleep(1.0)  # until the others have seen this process
            Path(self.folder, "since").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            Path(self.folder, "since").write_text(str(time.time()))
            raise FAILURES.get(where, lambda: ValueError("the first one"))()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for where in ("training_step", "killed", "killed with workers", "exit", "stop", "unspeakable"):
            self.fail_if(where, batch_idx == FAILS_AT)
        if self.where == "killed worker" and batch_idx == FAILS_AT and self.global_rank == self.who:
            Path(self.folder, "since").write_text(str(time.time()))
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        if self.where == "lane" and batch_idx == FAILS_AT and self.global_rank == self.who:
            AttachedHook._exchange_in_lane = lambda *_: self.fail_if("lane")  # type: ignore[method-assign]
        output = super().training_step(batch, batch_idx)
        if batch_idx == FAILS_AT:
            output["loss"].register_hook(lambda _: self.fail_if("backward"))
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        for where in ("validation_step", "stop validation"):
            self.fail_if(where, batch_idx == FAILS_AT and not self.trainer.sanity_checking)
        self.log("loss", super().validation_step(batch, batch_idx)["x"], sync_dist=True, on_step=True)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.fail_if("optimizer", batch_idx == FAILS_AT)

    def train_dataloader(self) -> DataLoader[Any]:
        failing_at = 32 if self.where == "worker" and self.trainer.global_rank == self.who else None
        dataset = FailingDataset(failing_at, self.folder)
        return DataLoader(dataset, batch_size=4, num_workers=2 if "worker" in self.where else 0)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(RandomDataset(32, 64), batch_size=8)


class Hooks(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.fail_if("on_train_start")

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.fail_if("on_fit_end")
        if module.where == "on_fit_end":
            trainer.strategy.barrier()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.fail_if("on_train_batch_end", batch_idx == FAILS_AT)


@contextlib.contextmanager
def output_to(folder: str) -> Iterator[None]:
    """Writes what this rank prints, to its last breath, into a file."""
    file = os.open(str(Path(folder, f"output-{os.environ['RANK']}")), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    try:
        yield
    except BaseException:
        traceback.print_exc()  # what the interpreter does at the end of a program
        raise


def train(where: str, who: int, folder: str, others_sleep: bool = False, guarded: bool = True, **settings: Any) -> None:
    if not guarded:
        FailureWatch.look = lambda self, board: None  # type: ignore[method-assign]
        FailureWatch.raised = lambda self, error, doing=None: error  # type: ignore[method-assign]
    hook = {"name": "powersgd", "start_step": 1} if where == "lane" else None
    settings.setdefault("callbacks", []).append(Hooks())
    strategy = CustomDDPStrategy(timeout=timedelta(minutes=30), comm_hook=hook)
    with output_to(folder):
        trainer(strategy=strategy, num_sanity_val_steps=0, **settings).fit(
            FailingModel(where, who, others_sleep, folder)
        )


def last_line(folder: Path, rank: int) -> str:
    return Path(folder, f"output-{rank}").read_text().splitlines()[-1]


def run_and_fail(folder: Path, world_size: int, **settings: Any) -> tuple[str, float]:
    """Returns what the harness reports, and the seconds from the failure until all ranks had ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.harness.GRACE_S", 12.0)  # two tests may run at a time, on two cores
        with pytest.raises(RankFailureError) as caught:
            run_ranks(train, world_size, init=False, folder=str(folder), **settings)
    return str(caught.value), time.time() - float(Path(folder, "since").read_text())


PLACES = {
    "training_step": "at step 2 in training_step: ValueError: the first one",
    "validation_step": "at step 8, validate batch 2 in validation_step: ValueError: the first one",
    "backward": "at step 2 in backward: ValueError: the first one",
    "optimizer": "at step 2 in FailingModel.optimizer_step: ValueError: the first one",
    "on_train_start": "at step 0 in Hooks.on_train_start: ValueError: the first one",
    "on_train_batch_end": "at step 3 in Hooks.on_train_batch_end: ValueError: the first one",
    "worker": "at step 0 in a data loader: ValueError: Caught ValueError in DataLoader worker process 0.",
    "on_fit_end": "at step 8 in Hooks.on_fit_end: ValueError: the first one",
    "stop": "at step 2 in training_step: DDPPluginError: CustomDDPStrategy.training_step raised StopIteration",
    "stop validation": "at step 8, validate batch 2 in validation_step: DDPPluginError: CustomDDPStrategy.valid",
    "unspeakable": "at step 2 in training_step: UnspeakableError: <its str() failed>",
    "lane": "at step 2 in backward: RuntimeError: Got the following error when running the callback: ValueError: the",
}


@pytest.mark.parametrize(("place", "who"), [(place, index % 2) for index, place in enumerate(PLACES)])
def test_an_exception_on_one_rank_ends_all(place: str, who: int, tmp_path: Path) -> None:
    report, seconds = run_and_fail(tmp_path, 2, where=place, who=who)
    assert "did not finish in time" not in report
    assert seconds < 12.0, "on a busy machine; see the next test for what an idle one takes"
    for rank in range(2):
        assert last_line(tmp_path, rank).startswith(f"rank {who} failed {PLACES[place]}"), rank


def test_without_the_watch_the_others_go_on_waiting(tmp_path: Path) -> None:
    """The control: what the harness says where nobody ends the others."""
    report, _ = run_and_fail(tmp_path, 2, where="on_train_batch_end", who=1, others_sleep=True, guarded=False)
    assert "rank 0 of 2: did not finish in time" in report
    assert "rank 1 of 2: Traceback" in report


@pytest.mark.parametrize(("where", "who"), [("killed", 0), ("killed", 2), ("on_train_batch_end", 2)])
def test_ranks_that_hear_nothing_of_the_others_are_ended_too(where: str, who: int, tmp_path: Path) -> None:
    """They sleep in user code: no connection that breaks wakes them."""
    report, seconds = run_and_fail(tmp_path, 3, where=where, who=who, others_sleep=True)
    assert "did not finish in time" not in report
    assert seconds < 12.0
    words = (
        rf"rank {who} \(process \d+ on .+\) ended without a word at step 2"
        if where == "killed"
        else f"rank {who} failed at step 3"
    )
    for rank in {0, 1, 2} - {who}:
        assert re.match(words, last_line(tmp_path, rank)), last_line(tmp_path, rank)


@pytest.mark.parametrize("where", ["killed", "killed with workers"])
def test_a_killed_rank_is_named_by_those_whose_connection_broke(where: str, tmp_path: Path) -> None:
    report, seconds = run_and_fail(tmp_path, 2, where=where, who=1)
    assert "did not finish in time" not in report
    assert seconds < 12.0
    assert last_line(tmp_path, 0).startswith("rank 1 (process ")


def test_a_killed_worker_is_its_ranks_failure(tmp_path: Path) -> None:
    report, seconds = run_and_fail(tmp_path, 2, where="killed worker", who=1)
    assert "did not finish in time" not in report
    assert seconds < 12.0
    for rank in range(2):
        assert last_line(tmp_path, rank).startswith("rank 1 failed at step "), last_line(tmp_path, rank)
        # What torch says depends on where it was when the signal came: in the queue, in a batch that was half received.
        words = (
            r"in a data loader: (RuntimeError: DataLoader worker \(pid.*(Killed|exited)|ConnectionResetError|EOFError)"
        )
        assert re.search(words, last_line(tmp_path, rank))


def test_what_torch_tells_of_a_worker_while_an_exception_is_looked_at_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that is killed breaks its connection first; then comes the signal."""
    interruption = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")
    told: list[tuple[BaseException, str]] = []

    def raised(error: BaseException, doing: str) -> BaseException:
        told.append((error, doing))
        return error

    def interrupted(error: BaseException) -> str:
        raise interruption

    def fail() -> None:
        raise ConnectionResetError("of the worker")

    strategy: Any = CustomDDPStrategy()
    strategy._failures = SimpleNamespace(raised=raised)
    monkeypatch.setattr(_compat, "hook_of", interrupted)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        strategy._run_guarded(fail)
    assert told == [(interruption, "a data loader")]


def test_a_rank_that_leaves_alone_is_missed(tmp_path: Path) -> None:
    report, _ = run_and_fail(tmp_path, 2, where="exit", who=1)
    assert "did not finish in time" not in report
    assert last_line(tmp_path, 0) == LEFT.format(1)
    assert last_line(tmp_path, 1) == f"SystemExit: {LEFT.format(1)}", "which ends a program with status 1"


LEFT = "rank {} left the run at step 2 in training_step, the other ranks did not: SystemExit: 0"


class DiesAfterOneStep(BoringModel):
    """Where DDP is about to rebuild its buckets."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def die_after_one_step(folder: str) -> None:
    callbacks = [OnExceptionCheckpoint(folder)]
    trainer(callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=0).fit(DiesAfterOneStep())


def test_the_checkpoint_of_an_exception_needs_no_other_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailureError, match="rank 1 of 2: died without a word"):
        run_ranks(die_after_one_step, 2, init=False, folder=str(tmp_path))
    manifest = verify(tmp_path / "on_exception.ckpt")
    assert manifest is not None
    assert manifest.step == 1


class StopsIn(BoringModel):
    """Raises ``StopIteration`` in one hook, below a decorator."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, torch.no_grad()(lambda *_: next(iter(()))))


@ranks(1, init=False)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_no_hook_ends_the_data() -> None:
    settings = {"num_sanity_val_steps": 0, "limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 3}
    on_end = ("on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end")
    for hook in ("on_train_epoch_start", "on_validation_start", *on_end):
        callback = LambdaCallback(**{hook: lambda *_: next(iter(()))})
        for model, callbacks in ((BoringModel(), [callback]), (StopsIn(hook), [])):
            with pytest.raises(DDPPluginError, match=f"{hook} raised StopIteration"):
                trainer(callbacks=callbacks, **settings).fit(model)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(6, 32))


class SkipsTheRest(BoringModel):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class TakesTheIterator(BoringModel):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


@ranks(1, init=False)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_what_ends_an_epoch_rightly_still_does() -> None:
    rows, stream = DataLoader(torch.ones(8, 32), batch_size=2), DataLoader(Stream(), batch_size=2)
    for model, loader, num_steps in (
        (BoringModel(), stream, 3),
        (SkipsTheRest(), rows, 2),
        (TakesTheIterator(), rows, 4),
        (TakesTheIterator(), stream, 3),
    ):
        run = trainer(max_epochs=2, limit_val_batches=0)
        run.fit(model, loader)
        assert run.global_step == 2 * num_steps


# ------------------------------------------------------------------------------------------------- what is no failure


class AllFail(BoringModel):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.2 * self.global_rank)
        raise ValueError("all of us")


@ranks(2, init=False)
def test_what_all_ranks_raise_ends_nobody(world_size: int, tmp_path: Path) -> None:
    """Also a collective save in on_exception is possible then."""
    save = OnExceptionCheckpoint(tmp_path)
    run = trainer(callbacks=[save], enable_checkpointing=True, default_root_dir=str(tmp_path))
    start = time.monotonic()
    with pytest.raises(ValueError, match="all of us") as caught:
        run.fit(AllFail())
    assert time.monotonic() - start < 30.0
    assert Path(save.ckpt_path).exists()
    note = "all ranks failed at step 1 in AllFail.on_train_batch_end: ValueError: all of us"
    assert getattr(caught.value, "__notes__", [note]) == [note]
    time.sleep(failure_watch.WIND_UP_S + 0.5)  # nobody ends this process
    run = trainer(limit_train_batches=2)
    run.fit(BoringModel())
    assert run.global_step == 2


class SlowEnd(Callback):
    def on_train_end(self, trainer: Any, module: Any) -> None:
        time.sleep(1.5 * trainer.global_rank)


@ranks(2, init=False)
def test_runs_that_end_at_different_times_are_regular(world_size: int) -> None:
    run = trainer(callbacks=[SlowEnd()], limit_train_batches=2)
    for _ in range(2):
        run.fit(BoringModel())
        assert run.strategy.failures is None
    run.test(BoringModel(), verbose=False)


@ranks(1, init=False)
def test_one_process_keeps_its_exception(world_size: int) -> None:
    run = trainer()
    with pytest.raises(ValueError, match="all of us") as caught:
        run.fit(AllFail())
    assert not getattr(caught.value, "__notes__", [])
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("ddp_plugin")] == []


# ------------------------------------------------------------------------------------------------------------ parts


def test_a_stopped_process_lives_and_a_killed_one_does_not() -> None:
    own = identify()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        other = identify() | {"pid": child.pid, "started": started_of(child.pid)}
        child.send_signal(signal.SIGSTOP)
        assert not has_ended(other, own)
        assert has_ended(other | {"started": other["started"] + 1}, own), "another process with the same number"
        assert not has_ended(other | {"pid": 2**22 + 1, "pid_space": "elsewhere"}, own)
        child.kill()
        deadline = time.monotonic() + 10.0
        while not has_ended(other, own):  # a zombie: nobody has waited for it yet
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
    assert has_ended(other, own)
    assert not has_ended(own, own)


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_sentences() -> None:
    note: dict[str, Any] = {"kind": "raised", "rank": 2, "error": "ValueError: x", "doing": "training_step"}
    note["place"] = {"stage": "train", "epoch": 0, "step": 7, "batch": 7}
    assert describe(note) == "rank 2 failed at step 7 in training_step: ValueError: x"
    note["place"] |= {"stage": "validate", "batch": 3}
    assert describe(note) == "rank 2 failed at step 7, validate batch 3 in training_step: ValueError: x"
    assert describe({"kind": "raised", "rank": 0, "error": "E"}) == "rank 0 failed: E"
    assert describe(note, is_for_all=True).startswith("rank 2 failed at step 7, validate batch 3 in training_step (and")
    words = "all ranks failed at step 7, validate batch 3 in training_step: ValueError: x"
    assert describe(note, is_for_all=True, is_the_same=True) == words, "who told of it first means nothing"
    died = {"kind": "died", "rank": 1, "pid": 4711, "host": "a", "place": {"step": 12}}
    assert describe(died).startswith("rank 1 (process 4711 on a) ended without a word at step 12: killed by a signal")


def test_which_errors_have_their_cause_elsewhere() -> None:
    text = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711"
    assert is_consequence(RuntimeError(text))
    assert is_consequence(ConnectionResetError(104, "Connection reset by peer"))
    assert not is_consequence(ValueError("Connection closed by peer"))
    assert not is_consequence(RuntimeError("CUDA out of memory"))


def raises_with_words(length: int) -> None:
    raise ValueError("the real one, " + length * "w" + "\nin two lines")


def test_an_error_of_a_data_worker_is_said_by_its_beginning_and_its_own_last_line() -> None:
    try:
        raises_with_words(100)
    except ValueError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(ValueError, match="Caught") as caught:
        wrapped.reraise()
    said = f"ValueError: the real one, {100 * 'w'} in two lines"
    assert one_line(caught.value) == f"ValueError: Caught ValueError in DataLoader worker process 0. {said}"


@ranks(2)
def test_the_first_of_two_failures_counts(world_size: int) -> None:
    board = Board.beside(_compat.default_group())
    watch = FailureWatch(board, Activity(lambda: {"step": 5}))
    watch.start()
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
    error = ValueError(f"of rank {dist.get_rank()}")
    assert watch.raised(error) is error
    assert watch.first is not None
    assert watch.first["rank"] == 1
    note = "rank 1 failed at step 5 (and so did all other ranks): ValueError: of rank 1"
    assert getattr(error, "__notes__", [note]) == [note]
    dist.barrier()


@ranks(2)
def test_who_tells_first_of_an_error_that_all_share_means_nothing(world_size: int) -> None:
    """As of a save that fails on rank 0, and is told to all before they raise; or of an argument that all refuse."""
    board = Board.beside(_compat.default_group())
    watch = FailureWatch(board, Activity(lambda: {"step": 5}))
    watch.start()
    dist.barrier()
    time.sleep(0.3 * (1 - dist.get_rank()))
    error = watch.raised(DDPPluginError("the disk is full, on rank 0 of 2"), "the save of x.ckpt")
    assert watch.first is not None
    assert watch.first["rank"] == 1
    note = "all ranks failed at step 5 in the save of x.ckpt: DDPPluginError: the disk is full, on rank 0 of 2"
    assert getattr(error, "__notes__", [note]) == [note]
    dist.barrier()
    watch = FailureWatch(Board.beside(_compat.default_group()), Activity(lambda: {"step": 5}))
    watch.start()
    error = watch.raised(ValueError(explain(f"{400 * 'x'} on all ranks", "[8, 4]", "Change it")))
    assert getattr(error, "__notes__", ["all"])[0].startswith("all ranks failed at step 5: ValueError: Expected xxx")
    dist.barrier()


@ranks(2)
def test_what_all_ranks_leave_by_keeps_its_status(world_size: int) -> None:
    watch = FailureWatch(Board.beside(_compat.default_group()), Activity(lambda: {"step": 5}))
    watch.start()
    dist.barrier()
    error = SystemExit(0)
    assert watch.raised(error) is error
    dist.barrier()


def woken(slept_s: float) -> None:
    board = Board(dist.HashStore(), 1, 2)  # type: ignore[attr-defined]
    watch = FailureWatch(board, Activity(lambda: {"step": 5}), [0], lambda: slept_s)
    board.post("process", {})
    child = subprocess.Popen([sys.executable, "-c", ""])  # the process that held the store
    gone = identify() | {"pid": child.pid, "started": started_of(child.pid)}
    watch._processes[0] = gone
    child.wait()
    watch.lose(BoardLostError())
    assert watch.first is not None
    print(describe(watch.first))


@pytest.mark.parametrize(
    ("slept_s", "words"),
    [
        (0.2, r"rank 0 \(process \d+ on .+\) ended without a word at step 5"),
        (55.0, r"rank 1 did not run for 55 s at step 5 \(stopped, .*, and the run ended meanwhile: rank 0's last line"),
    ],
)
def test_whoever_wakes_when_all_is_over_blames_nobody(slept_s: float, words: str) -> None:
    """It ends this process; so another one does it."""
    script = f"from tests.test_failing import woken; woken({slept_s}); import time; time.sleep(600)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.match(words, done.stdout), done.stdout + done.stderr


class FarAway(Dataset[int]):
    """Lies on a server that has gone."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_connection_that_a_loader_lost_is_its_own_ranks_failure() -> None:
    with pytest.raises(ConnectionResetError) as caught:
        list(DataLoader(FarAway()))
    assert is_consequence(caught.value), "by its words alone"
    assert not failure_watch._follows_from_others(caught.value)
    assert failure_watch._follows_from_others(ConnectionResetError(104, "Connection reset by peer"))


@ranks(2)
def test_a_machine_that_falls_silent_is_missed(world_size: int) -> None:
    failure_watch.CENSUS_S = 0.1
    board = Board.beside(_compat.default_group())
    pulse = Pulse(board, Activity(lambda: {"step": 5}), interval_s=0.05)
    watch = FailureWatch(board, Activity())  # without neighbours: as if the other rank were elsewhere
    watch.start()
    pulse.start()
    dist.barrier()
    if dist.get_rank() == 0:
        while "beat" not in (board.read("activity", 1) or {}):
            time.sleep(0.01)
        look_soon(watch, board, within_s=2.0)
        assert watch.first is None, "it beats"
        board.post("asked", {})
        with pytest.raises(PeerFailedError, match=r"rank 1 \(.*\) has not been heard of for 1 s at step 5"):
            look_soon(watch, board, within_s=60.0)
        board.post("seen", {})
    else:
        while board.read("asked", 0) is None:
            time.sleep(0.02)
        pulse.stop()
        while board.read("seen", 0) is None:
            time.sleep(0.02)
    pulse.stop()


def interrupted() -> None:
    board = Board.beside(_compat.default_group())
    watch = FailureWatch(board, Activity())
    watch.start()
    dist.barrier()
    threading.Thread(target=look_soon, args=(watch, board)).start()
    deadlock = threading.Lock()
    deadlock.acquire()
    if dist.get_rank() == 0:
        threading.Thread(target=watch.tell, args=("nothing goes on any more",)).start()
    with pytest.raises(PeerFailedError, match="nothing goes on"):
        time.sleep(LONG_S) if dist.get_rank() == 0 else deadlock.acquire()
    watch.raised(PeerFailedError())
    time.sleep(failure_watch.WIND_UP_S + 1.0)  # who does not end by itself is ended


def look_soon(watch: FailureWatch, board: Board, within_s: float = LONG_S) -> None:
    """Looks until there is something to see, and then a little longer."""
    deadline = time.monotonic() + within_s
    while watch.first is None and time.monotonic() < deadline:
        watch.look(board)
        time.sleep(0.02)
    time.sleep(2.0 if watch.first is not None else 0.0)


def test_a_rank_that_does_not_leave_is_ended() -> None:
    with pytest.raises(RankFailureError) as caught:
        run_ranks(interrupted, 2)
    assert str(caught.value).count("died without a word, exit code 1") == 2, str(caught.value)


# -------------------------------------------------------------------------------------------------------- launchers

SCRIPT = """
    import sys
    from datetime import timedelta
    import lightning.pytorch as pl
    from ddp_plugin import CustomDDPStrategy
    from tests.test_failing import FailingModel, Hooks

    if __name__ == "__main__":
        where, who, folder, start_method = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
        strategy = CustomDDPStrategy(start_method=start_method, timeout=timedelta(minutes=30))
        run = pl.Trainer(accelerator="cpu", devices=3, strategy=strategy, max_epochs=1, logger=False,
                         num_sanity_val_steps=0, callbacks=[Hooks()],
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        run.fit(FailingModel(where, who, folder=folder))
"""


def launch(folder: Path, launcher: str, where: str, who: int) -> tuple[int, str]:
    """Runs the script; returns its status and what it wrote, and looks that nothing is left of it."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={port}"]
    logs = [f"--log-dir={folder}", "--redirects=3"]
    start = [*torchrun, *logs] if launcher == "torchrun" else []
    method = "popen" if launcher == "torchrun" else launcher
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *start, str(script), where, str(who), str(folder), method],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=180,
    )  # fmt: skip
    deadline = time.monotonic() + 15.0
    while left := processes_with(str(script)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
        probe.bind(("127.0.0.1", port))
        probe.listen()
    for name in (path.name for path in folder.glob("worker-*")):
        pid = name.removeprefix("worker-")
        while is_running(int(pid)):  # one that is just ending has no command line any more
            assert time.monotonic() < deadline, f"left behind: worker {pid}"
            time.sleep(0.1)
        assert [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"torch_{pid}_")] == []
    return done.returncode, done.stdout


def is_running(pid: int) -> bool:
    """Whether a process is more than an entry that its parent, or init, has not read yet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def processes_with(argument: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if argument.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def test_under_torchrun_rank_0_ends_with_the_first_failure(tmp_path: Path) -> None:
    status, output = launch(tmp_path, "torchrun", "on_train_batch_end", 2)
    assert status == 1
    (log,) = tmp_path.glob("*/attempt_0/0/stderr.log")
    sentence = "rank 2 failed at step 3 in Hooks.on_train_batch_end: ValueError: the first one"
    assert log.read_text().splitlines()[-1].removeprefix("[rank0]: ") == sentence
    root_cause = output.partition("Root Cause")[2]
    assert "rank      : 2" in root_cause, "torchrun itself names the rank that failed first"
    assert "ValueError: the first one" in root_cause


def test_under_lightnings_launcher_rank_0_ends_with_the_first_failure(tmp_path: Path) -> None:
    status, output = launch(tmp_path, "popen", "worker", 2)
    # Lightning's launcher looks every 5 s, and kills rank 0 where another rank ended, and says so. On a busy machine
    # that is before rank 0 ends by itself, but it has said what failed.
    assert status in (1, -signal.SIGKILL)
    said = [line for line in output.splitlines() if "Forcefully terminating all other processes" not in line]
    assert "Connection closed by peer" not in said[-1]
    assert "rank 2 failed at step " in said[-1]


def test_when_the_process_that_holds_the_store_is_killed_the_others_end(tmp_path: Path) -> None:
    """Under Lightning's launcher that is rank 0."""
    status, output = launch(tmp_path, "popen", "killed", 0)
    assert status == -signal.SIGKILL
    assert re.search(r"rank 0 \(process \d+ on .+\) ended without a word", output.splitlines()[-1])


RAISED = "rank 2 failed at step 3 in Hooks.on_train_batch_end: ValueError: the first one"


@pytest.mark.parametrize(
    ("method", "where", "who", "words"),
    [
        ("fork", "on_train_batch_end", 2, RAISED),
        pytest.param("spawn", "on_train_batch_end", 2, RAISED, marks=pytest.mark.long),
        ("fork", "killed", 1, "process 1 terminated with signal SIGKILL"),
        ("spawn", "killed", 1, "process 1 terminated with signal SIGKILL"),
    ],
)
def test_processes_that_the_program_itself_starts_fail_as_one(
    method: str, where: str, who: int, words: str, tmp_path: Path
) -> None:
    """Their parent, which is no rank, raises what ended the first of them."""
    status, output = launch(tmp_path, method, where, who)
    assert status == 1
    assert words in output.rstrip().splitlines()[-1]
    if where == "killed":
        assert re.search(r"rank 1 \(process \d+ on .+\) ended without a word", output)
