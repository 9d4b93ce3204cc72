"""A run that stands still says why: real ranks, real hangs, one report each."""

import contextlib
import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_plugin import CustomDDPStrategy, HangWatchdog
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.supervision.diagnosis import RankState, diagnose
from tests.harness import RankFailureError, ranks, run_ranks, trainer

LIMIT_S = 4.0


class Numbers(Dataset[Tensor]):
    """Samples; rank 1 may find one that never comes."""

    def __init__(self, length: int, stuck_at: int | None = None) -> None:
        self.length = length
        self.stuck_at = stuck_at

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index == self.stuck_at:
            time.sleep(1000)
        return torch.full((4,), float(index))


class Unsized(IterableDataset[Tensor]):
    """Samples without a length, so that nobody can compare it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.length, 4))


class Model(pl.LightningModule):
    """Logs nothing and waits for nobody, but for its gradients."""

    num_batches = (4, 4)
    num_validation_batches = (0, 0)
    stuck_at: int | None = None
    num_workers = 0
    comm_hook: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        data = Numbers(2 * self.num_batches[rank], self.stuck_at if rank == 1 else None)
        return DataLoader(data, batch_size=2, num_workers=self.num_workers)

    def val_dataloader(self) -> Any:
        return DataLoader(Unsized(2 * self.num_validation_batches[self.trainer.global_rank]), batch_size=2)


class UnequalTraining(Model):
    num_batches = (4, 3)


class UnequalValidation(Model):
    num_validation_batches = (2, 0)


class SkippedBackward(Model):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if (batch_idx, self.trainer.global_rank) != (2, 1):
            self.manual_backward(loss)
        self.optimizers().step()


class SkippedByHook(SkippedBackward):
    comm_hook = "powersgd"


class KeyOfOneRank(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.log("only_here", loss, on_step=True, sync_dist=True)
        return loss


class GatherOfOneRank(Model):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.all_gather(loss)
        return loss


class BarrierOfOneRank(Model):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank == 1:
            dist.barrier()


class SaveOfOneRank(Model):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.is_global_zero:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "mine.ckpt"))


class SleepingLoader(Model):
    stuck_at = 5


class SleepingWorker(SleepingLoader):
    num_workers = 1


class Swallowing(SkippedBackward):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        try:
            if (batch_idx, self.trainer.global_rank) == (1, 1):
                raise KeyError("a bad sample")
            super().training_step(batch, 0)
        except KeyError:
            pass


class LongValidation(Model):
    num_validation_batches = (2, 2)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            time.sleep(1000)
        super().validation_step(batch, batch_idx)


class ValidatingAlone(Model):
    num_validation_batches = (2, 2)

    def on_train_epoch_start(self) -> None:
        if self.trainer.global_rank == 1:
            self.trainer.val_check_batch = 2


class Stopped(Model):
    stopped_rank = 1

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if (batch_idx, self.trainer.global_rank) == (1, self.stopped_rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().training_step(batch, batch_idx)


class FirstStopped(Stopped):
    stopped_rank = 0


class DeadlockedCallback(pl.Callback):
    """Takes a lock twice, on one rank."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        self.lock = threading.Lock()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == self.rank:
            self.lock.acquire()
            self.lock.acquire()


class SlowCallback(pl.Callback):
    """Takes longer than the limit, on rank 1, and then goes on."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx > 0:
            time.sleep(LIMIT_S + 5 if batch_idx == 1 else 1.5)


def fit(name: str, folder: str, watchdog: pl.Callback | None) -> None:
    kind: Any = globals()[name]
    callbacks: list[pl.Callback] = [] if watchdog is None else [watchdog]
    if issubclass(kind, pl.Callback):
        callbacks.append(kind())
        kind = Model
    run = trainer(
        callbacks=callbacks,
        strategy=CustomDDPStrategy(comm_hook=kind.comm_hook),
        num_sanity_val_steps=0,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    run.fit(kind())


def fit_watched(name: str, folder: str) -> None:
    fit(name, folder, HangWatchdog(LIMIT_S, on_hang="raise"))


def fit_unwatched(name: str, folder: str) -> None:
    fit(name, folder, None)


class Recording(HangWatchdog):
    """Keeps what it says at the end of a stall."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.said: list[str] = []

    def resume(self, sentence: str) -> None:
        self.said.append(sentence)


def fit_reported(name: str, folder: str) -> tuple[list[str], list[str]]:
    watchdog = Recording(LIMIT_S)
    fit(name, folder, watchdog)
    return [diagnosis.headline for diagnosis in watchdog.diagnoses], watchdog.said


# What the report's first sentence is, as a regular expression.
BUFFERS = r"waits in DDP's broadcast of buffers"
BUCKET = r"waits in the all-reduce of bucket 0"
HANGS = {
    "UnequalTraining": rf"rank 0 {BUFFERS} since step 3; rank 1 waits .*: unequal numbers of training batches\?",
    "UnequalValidation": rf"rank 0 {BUFFERS} of the validation, batch 0; rank 1 waits in .*: unequal numbers of "
    r"validation batches\?",
    "ValidatingAlone": r"rank 0 .*; rank 1 .* of the validation.*: unequal numbers of validation batches\?",
    "SkippedBackward": rf"rank 0 {BUCKET} since step 3; rank 1 waits in .*: a backward that rank 1 skipped\?",
    "SkippedByHook": r"rank 0 waits in the exchange of bucket 0 since step 3; rank 1 waits in .*: a backward that "
    r"rank 1 skipped\?",
    "Swallowing": rf"rank 0 {BUCKET} since step 3; rank 1 waits in .*: a backward that rank 1 skipped\?",
    "KeyOfOneRank": r"rank 0 waits to reduce the logged value training_step.only_here \(mean\), in "
    rf"`KeyOfOneRank.training_step` \(.*\) since step 1; rank 1 {BUCKET} since step 1: training_step.only_here "
    r"\(mean\) logged with sync_dist=True on rank 0 alone\?",
    "GatherOfOneRank": r"rank 0 waits to compare shape \(\), torch.float32 with the other ranks, in "
    rf"`GatherOfOneRank.training_step` \(.*: self.all_gather\(loss\)\) since step 1; rank 1 {BUCKET} since step 1: a "
    r"collective that rank 0 alone calls\?",
    "BarrierOfOneRank": rf"rank 0 {BUFFERS} since step 2; rank 1 waits in `barrier`, in "
    r"`BarrierOfOneRank.on_train_batch_end` \(.*: dist.barrier\(\)\) since step 2: a collective that rank 1 alone "
    r"calls\?",
    "SaveOfOneRank": rf"rank 0 waits in the save of a checkpoint since step 2; rank 1 {BUFFERS} since step 2: a "
    r"checkpoint that rank 0 alone saves\?",
    "SleepingLoader": rf"rank 0 {BUFFERS} since step 2; rank 1 loads data in `Numbers.__getitem__`, batch 1: a data "
    r"loader that is stuck or slow on rank 1\?",
    "SleepingWorker": rf"rank 0 {BUFFERS} since step 2; rank 1 waits for data worker 0 \(pid \d+\), batch 1: a data "
    r"loader that is stuck or slow on rank 1\?",
    "LongValidation": r"rank 0 waits in .* of the validation, batch 1; rank 1 is in `validation_step`, batch 1: "
    r"`validation_step` does not return on rank 1\?",
    "DeadlockedCallback": rf"rank 0 {BUFFERS} since step 2; rank 1 is in `DeadlockedCallback.on_train_batch_end`, "
    r"batch 1: `DeadlockedCallback.on_train_batch_end` does not return on rank 1\?",
    "Stopped": rf"rank 0 {BUCKET} since step 1; rank 1 has not been heard of for \d+ s: rank 1 stopped, dead, or on a "
    r"host that is gone\?",
    "FirstStopped": rf"rank 1 {BUCKET} since step 1; rank 0 has not been heard of for \d+ s: rank 0 stopped, dead, or "
    r"on a host that is gone\?",
}


class Outcome(NamedTuple):
    """What a run came to.

    Attributes:
        report: the file, empty where there is none.
        error: what the ranks raised, or ``None``.
        returned: what they returned.
        lasted_s: seconds.
    """

    report: str
    error: str | None
    returned: list[Any]
    lasted_s: float


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Outcome]]:
    """All runs at once: most of their time is waiting."""

    def run(function: Callable[..., Any], name: str, timeout_s: float) -> Outcome:
        folder, error, returned = tmp_path_factory.mktemp(name), None, []
        begun_s = time.monotonic()
        try:
            returned = run_ranks(function, 2, init=False, timeout_s=timeout_s, name=name, folder=str(folder))
        except RankFailureError as failure:
            error = str(failure)
        report = folder / "hang_report.txt"
        return Outcome(report.read_text() if report.exists() else "", error, returned, time.monotonic() - begun_s)

    runs = [(fit_watched, name, 90.0) for name in HANGS]
    runs += [(fit_reported, "SlowCallback", 90.0), (fit_unwatched, "BarrierOfOneRank", 3 * LIMIT_S)]
    with ThreadPoolExecutor(6) as pool:
        begun = {(run_of[0].__name__, run_of[1]): pool.submit(run, *run_of) for run_of in runs}
        yield lambda function, name: begun[function, name].result()


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_explained_and_ends_on_all_ranks(name: str, outcomes: Callable[[str, str], Outcome]) -> None:
    outcome = outcomes("fit_watched", name)
    first = outcome.report.partition("\n")[0]
    assert re.fullmatch(rf"[-0-9]+ [:0-9]+ No progress for {LIMIT_S:g} s: {HANGS[name]}", first), first
    assert outcome.report.count("No progress for") == 1
    assert outcome.error is not None
    headline = first.partition(" s: ")[2]
    assert f"HangWatchdog ends the run after {LIMIT_S:g} s without progress: {headline}" in outcome.error or (
        "exit code 1" in outcome.error
    )
    for stopped in {"Stopped": [1], "FirstStopped": [0]}.get(name, []):
        assert f"rank {stopped} of 2: did not finish in time" in outcome.error, "a stopped process ends itself never"
    assert outcome.error.count("did not finish in time") == (1 if "Stopped" in name else 0)
    assert outcome.lasted_s < 80, "the timeout of the group is 30 minutes"


def test_without_the_watchdog_the_run_hangs(outcomes: Callable[[str, str], Outcome]) -> None:
    outcome = outcomes("fit_unwatched", "BarrierOfOneRank")
    assert outcome.report == ""
    assert outcome.error is not None
    assert outcome.error.count("did not finish in time") == 2


def test_a_slow_run_is_reported_and_goes_on(outcomes: Callable[[str, str], Outcome]) -> None:
    outcome = outcomes("fit_reported", "SlowCallback")
    assert outcome.error is None
    (headlines, said), of_rank_1 = outcome.returned
    assert of_rank_1 == ([], []), "one rank tells"
    assert len(headlines) == len(said) == 1
    assert headlines[0].endswith("`SlowCallback.on_train_batch_end` does not return on rank 1?")
    assert said[0].startswith("The run goes on: ")


@ranks(1, init=False)
def test_one_process_under_any_strategy_is_ended_by_an_exception() -> None:
    stuck = DeadlockedCallback(0)
    watchdog = HangWatchdog(1.0, on_hang="raise", report_file=None)
    run = trainer(strategy="auto", callbacks=[watchdog, stuck], max_steps=4, limit_val_batches=0)
    with pytest.raises(DDPPluginError, match="`DeadlockedCallback.on_train_batch_end` does not return on rank 0?"):
        run.fit(Model())
    assert len(watchdog.diagnoses) == 1
    assert not any(thread.name == "ddp_plugin-pulse" for thread in threading.enumerate())


@ranks(1, init=False)
def test_one_process_that_goes_on_is_not_reported() -> None:
    watchdog = HangWatchdog(1.0, report_file=None)
    slow = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: time.sleep(0.4))
    trainer(strategy="auto", callbacks=[watchdog, slow], max_steps=4, limit_val_batches=0).fit(Model())
    assert watchdog.diagnoses == []
    left = [thread for thread in threading.enumerate() if thread.name.startswith("ddp_plugin-")]
    for thread in left:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in left)


@ranks(2, init=False)
def test_a_limit_beyond_the_timeout_of_the_group_is_said() -> None:
    strategy = CustomDDPStrategy(timeout=timedelta(seconds=60))
    run = trainer(strategy=strategy, callbacks=[HangWatchdog(60.0)], max_steps=1, limit_val_batches=0)
    warned = pytest.warns(UserWarning, match="collectives time out after 60 s, before limit_s=60")
    with warned if run.is_global_zero else contextlib.nullcontext():
        run.fit(Model())


@ranks(2, init=False)
def test_several_processes_need_the_strategy() -> None:
    with pytest.raises(TypeError, match="HangWatchdog runs on several processes"):
        trainer(strategy="ddp", callbacks=[HangWatchdog()]).fit(Model())


def test_a_watchdog_travels_to_spawned_processes() -> None:
    assert pickle.loads(pickle.dumps(HangWatchdog(7.0))).limit_s == 7.0


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="limit_s above zero"):
        HangWatchdog(0.0)
    with pytest.raises(ValueError, match="limit_s above zero"):
        HangWatchdog(float("nan"))
    with pytest.raises(ValueError, match="on_hang to be one of"):
        HangWatchdog(on_hang="kill")


def test_a_folder_that_cannot_be_written_costs_the_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    watchdog = HangWatchdog()
    run = trainer(strategy="auto", devices=1, default_root_dir=str(tmp_path / "file"))
    watchdog.setup(run, Model(), "fit")
    watchdog.report(diagnose([RankState(0)], 3.0))
    watchdog.teardown(run, Model(), "fit")
    said = capsys.readouterr().err
    assert "HangWatchdog: No progress for 3 s: rank 0 does not answer" in said
    assert "(not in a file: " in said
