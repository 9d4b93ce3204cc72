"""Whatever asks a run to stop, on whatever rank: all ranks leave at the same step, and what was asked for is kept."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint, Timer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset

from ddp_plugin import CustomDDPStrategy, default_callbacks
from ddp_plugin.stopping.shield import ShieldWorker
from ddp_plugin.stopping.signals import StopSignals, is_free
from ddp_plugin.stopping.slurm import job_id, requeue
from ddp_plugin.strategy import stopping
from tests.harness import ROOT, RankFailureError, ranks, run_ranks, trainer
from tests.traffic import counted_calls

EPOCHS, BATCH_SIZE = 3, 2
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 1, signal.SIGUSR1: 138}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Augmented(Dataset[torch.Tensor]):
    """Items are (index, noise): the noise is drawn where the item is fetched."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()], dtype=torch.float64)


class Model(pl.LightningModule):
    """Dropout and a plateau scheduler, so that what a resume forgets is seen in the weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)).double()
        self.steps: list[tuple[int, int]] = []  # (epoch, batch)
        self.validated_after: list[tuple[int, int]] = []  # (epoch, batch)
        self.evaluated: list[int] = []  # batches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps.append((self.current_epoch, batch_idx))
        return (self.net(batch / 100) - batch[:, 1:]).square().mean()

    def evaluation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.sanity_checking:
            return
        self.evaluated.append(batch_idx)
        if batch_idx == 0:
            self.validated_after.append((self.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx))
        self.log("loss", self.net(batch / 100).mean(), sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.evaluated.append(batch_idx)
        return batch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    @property
    def values(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in self.state_dict().values()]).clone()


class Sends(pl.Callback):
    """Sends a signal to the process of some ranks, in one hook, at its n-th call."""

    def __init__(self, number: signal.Signals, hook: str, call: int, on_ranks: tuple[int, ...] = (0,)) -> None:
        self.num_calls = 0

        def send(trainer: pl.Trainer, *_: Any, **__: Any) -> None:
            self.num_calls += not trainer.sanity_checking or "sanity" in hook
            if self.num_calls == call and rank() in on_ranks:
                os.kill(os.getpid(), number)

        setattr(self, hook, send)


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def loaders(num_train: int = 6, num_val: int = 2, **settings: Any) -> tuple[Any, Any]:
    """Returns loaders with that many batches on each rank; without the latter if it is 0."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    train = DataLoader(Augmented(num_train * BATCH_SIZE * world_size), batch_size=BATCH_SIZE, shuffle=True, **settings)
    val = DataLoader(Augmented(num_val * BATCH_SIZE * world_size), batch_size=BATCH_SIZE, **settings)
    return train, val if num_val else None


def fit(
    *callbacks: Any, resume: Path | str | None = None, data: tuple[Any, Any] | None = None, **settings: Any
) -> tuple[Model, Any, int | None]:
    """Trains; returns model, Trainer, and the status that the process would end with, ``None`` if it went on."""
    pl.seed_everything(11, verbose=False)
    model, status = Model(), None
    defaults = settings.pop("defaults", default_callbacks)
    run = trainer(**({"max_epochs": EPOCHS, "callbacks": [*defaults(), *callbacks]} | settings))
    try:
        run.fit(model, *(data or loaders()), ckpt_path=resume)
    except SystemExit as leaving:
        status = leaving.code  # type: ignore[assignment]
    return model, run, status


def strategy(**settings: Any) -> CustomDDPStrategy:
    return CustomDDPStrategy(checkpoint_on_stop=True, **settings)


# -------------------------------------------------------------------------------------- the same step, an exact resume


WHERE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "in a step": ("on_train_batch_start", 3, {}),
    "before a validation": ("on_train_batch_start", 3, {"val_check_interval": 2}),
    "in a validation": ("on_validation_batch_end", 3, {"val_check_interval": 2}),
    "at the end of a validation": ("on_validation_end", 2, {"val_check_interval": 2}),
    "at the end of an epoch": ("on_train_batch_start", 11, {}),
    "after an epoch": ("on_train_epoch_end", 1, {}),
    "inside a window": ("on_train_batch_start", 1, {"accumulate_grad_batches": 3}),
    "in a validation inside a window": (
        "on_validation_batch_end",
        2,
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
    ),
}


@pytest.mark.parametrize("where", WHERE)
@ranks(1, 2, init=False)
def test_a_stopped_run_goes_on_to_the_last_bit(world_size: int, where: str, tmp_path: Path) -> None:
    hook, call, settings = WHERE[where]
    whole, _, status = fit(**settings)
    assert status is None
    wisher = list(WHERE).index(where) % world_size
    sends = Sends(signal.SIGTERM, hook, call, (wisher,))
    stopped, run, status = fit(sends, strategy=strategy(), default_root_dir=tmp_path, **settings)
    assert (status, run.strategy.stop_reason) == (143, "SIGTERM")
    assert run.received_sigterm
    assert 0 < len(stopped.steps) < len(whole.steps)
    assert everywhere(stopped.steps) == [stopped.steps] * world_size
    if where == "inside a window":
        assert len(stopped.steps) == 3
    resumed, _, status = fit(resume=tmp_path / "stop.ckpt", **settings)
    assert status is None
    assert stopped.steps + resumed.steps == whole.steps
    again = stopped.validated_after + resumed.validated_after
    assert sorted(set(again)) == whole.validated_after  # one that was left is done anew, none is left out
    assert torch.equal(resumed.values, whole.values)


@ranks(2, 3, init=False)
def test_each_signal_on_each_rank_stops_all_at_the_same_step_with_its_status(world_size: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the harness uses it, in native code
    import faulthandler

    faulthandler.unregister(signal.SIGUSR1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        for wisher in (0, world_size - 1):
            before = signal.getsignal(number)
            model, run, status = fit(Sends(number, "on_train_batch_end", 3, (wisher,)))
            assert status == STATUS[number]
            assert run.strategy.stop_reason == number.name
            assert len(model.steps) == 4  # beside the fourth the wish travelled
            assert everywhere(model.steps) == [model.steps] * world_size
            assert signal.getsignal(number) == before


@ranks(2, init=False)
def test_the_next_run_knows_nothing_of_it() -> None:
    fit(Sends(signal.SIGTERM, "on_train_batch_end", 3, (1,)))
    model, run, status = fit()
    assert (status, run.strategy.stop_reason, len(model.steps)) == (None, None, EPOCHS * 6)
    assert not run.received_sigterm


@ranks(2, init=False)
def test_lightnings_own_checkpoints_are_written_at_that_step(tmp_path: Path) -> None:
    on_exception = OnExceptionCheckpoint(tmp_path)
    folder = tmp_path / "of the callback"
    saves = ModelCheckpoint(folder, filename="{step}", save_on_exception=True)
    sends = Sends(signal.SIGINT, "on_train_batch_end", 3, (1,))
    model, _, status = fit(on_exception, saves, sends, strategy=strategy(), enable_checkpointing=True)
    assert status == 1
    for path in (tmp_path / "on_exception.ckpt", folder / "step=4.ckpt", folder / "stop.ckpt"):
        saved = torch.load(path, weights_only=True)
        assert saved["global_step"] == 4
        assert all(torch.equal(saved["state_dict"][name], value) for name, value in model.state_dict().items())


@ranks(1, init=False)
def test_a_stop_checkpoint_is_of_signals_and_no_word_says_it_may_run_code(tmp_path: Path) -> None:
    """Lightning says that ``weights_only`` defaults to ``False``, which sounds like this but is another thing."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning.pytorch").addHandler(handler)
    wish = LambdaCallback(on_train_batch_end=lambda run, *_: setattr(run, "should_stop", True))
    fit(wish, strategy=strategy(), default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == [], "fit returned, and the program can save"
    fit(Sends(signal.SIGTERM, "on_train_batch_end", 3, (0,)), strategy=strategy(), default_root_dir=tmp_path)
    assert (tmp_path / "stop.ckpt").exists()
    assert [line for line in said if "weights_only" in line] == []


@ranks(2, init=False)
def test_without_being_asked_nothing_is_written(tmp_path: Path) -> None:
    fit(Sends(signal.SIGTERM, "on_train_batch_end", 3, (1,)), default_root_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ where no step comes


@ranks(2, init=False)
def test_before_the_first_step_nothing_is_trained_or_written(tmp_path: Path) -> None:
    for hook in ("setup", "on_fit_start", "on_sanity_check_start", "on_train_start"):
        sends = Sends(signal.SIGTERM, hook, 1, (1,))
        model, _, status = fit(sends, strategy=strategy(), default_root_dir=tmp_path)
        assert (status, model.steps) == (143, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@ranks(2, init=False)
def test_an_evaluation_is_left_between_two_batches(what: str) -> None:
    hook = f"on_{what.replace('validate', 'validation')}_batch_end"
    for number in (signal.SIGTERM, signal.SIGINT):
        model, run = Model(), trainer(callbacks=[*default_callbacks(), Sends(number, hook, 2, (1,))])
        with pytest.raises(SystemExit) as left:
            getattr(run, what)(model, loaders(num_val=8)[1])
        assert left.value.code == STATUS[number]
        assert everywhere(model.evaluated) == [[0, 1, 2]] * 2


@ranks(2, init=False)
def test_one_with_unequal_numbers_of_batches_too(tmp_path: Path) -> None:
    """Without ExactEvaluation and without Lightning's sampler each rank has what its loader gives."""

    class Plain(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.evaluated.append(batch_idx)

    def validate(*callbacks: Any) -> tuple[list[int], Any]:
        model = Plain()
        run = trainer(callbacks=list(callbacks), use_distributed_sampler=False)
        status = None
        try:
            run.validate(model, DataLoader(Augmented(3 + 4 * rank())))
        except SystemExit as leaving:
            status = leaving.code
        return model.evaluated, status

    assert validate(Sends(signal.SIGTERM, "on_validation_batch_end", 1, (1,))) == ([0, 1], 143)
    # In the last batch that all have there is no place left where all look, but at the end.
    assert validate(Sends(signal.SIGTERM, "on_validation_batch_end", 2, (1,))) == (list(range(3 + 4 * rank())), 143)
    assert validate() == (list(range(3 + 4 * rank())), None)


# ------------------------------------------------------------------------------------------------------ the time is up


class Clock(Timer):
    """A timer whose time is up at a step, on one rank."""

    def __init__(self, step: int, on_rank: int) -> None:
        super().__init__({"hours": 1})
        self.step, self.on_rank, self.num_steps = step, on_rank, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        self.num_steps += 1
        super().on_train_batch_end(trainer, *arguments)

    def time_remaining(self, stage: Any = "train") -> float:
        return -1.0 if self.num_steps >= self.step and rank() == self.on_rank else 1.0


@ranks(1, 2, init=False)
def test_any_ranks_clock_stops_all_and_a_checkpoint_is_kept(world_size: int, tmp_path: Path) -> None:
    whole, _, _ = fit()
    stopped, run, status = fit(Clock(3, world_size - 1), strategy=strategy(), default_root_dir=tmp_path)
    assert (status, run.strategy.stop_reason) == (None, "max_time")
    assert len(stopped.steps) == 3 + (world_size > 1)
    assert everywhere(stopped.steps) == [stopped.steps] * world_size
    resumed, _, _ = fit(resume=tmp_path / "stop.ckpt")
    assert stopped.steps + resumed.steps == whole.steps
    assert torch.equal(resumed.values, whole.values)


@ranks(2, init=False)
def test_max_time_is_the_trainers() -> None:
    class Slow(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    model = Slow()
    run = trainer(max_time={"seconds": 1}, max_epochs=1000)
    run.fit(model, *loaders(num_val=0))
    assert run.strategy.stop_reason == "max_time"
    assert everywhere(len(model.steps)) == [len(model.steps)] * 2


class Counts(pl.Callback):
    """Counts what is handed to torch.distributed between two steps' ends, and what the strategy broadcasts."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if pl_module.steps[-1] == (0, 1):
            self.counting = counted_calls()
            self.counted = self.counting.__enter__()
            self.objects = patch.object(trainer.strategy, "broadcast", wraps=trainer.strategy.broadcast)
            self.broadcast = self.objects.start()
        elif pl_module.steps[-1] == (0, 5):
            self.calls = {**self.counted.num_calls, "objects": self.broadcast.call_count}
            self.counting.__exit__(None, None, None)
            self.objects.stop()


def calls_of_four_steps(**settings: Any) -> dict[str, int]:
    counts = Counts()
    trainer(callbacks=[counts, Timer({"hours": 1})], **settings).fit(Model(), *loaders(num_val=0))
    return counts.calls


@ranks(2, init=False)
def test_a_step_has_one_message_and_none_on_the_gradients_group() -> None:
    assert calls_of_four_steps() == {"all_reduce": 4, "objects": 0}
    # Lightning's strategy: a broadcast for SIGTERM, and the timer's.
    assert calls_of_four_steps(strategy=DDPStrategy()) == {"broadcast": 4, "objects": 4}


# ---------------------------------------------------------------------------------------------------------- the control


def stop_under_lightnings_strategy() -> None:
    sends = Sends(signal.SIGTERM, "on_train_batch_end", 3, (1,))
    with contextlib.suppress(SystemExit):
        trainer(callbacks=[sends], strategy=DDPStrategy()).fit(Model(), *loaders(num_val=0))
    time.sleep(60)  # one that has left, and whose process is still there


def test_under_lightnings_strategy_a_signal_to_the_last_rank_hangs_the_others() -> None:
    with pytest.raises(RankFailureError, match="rank 0 of 2: did not finish in time"):
        run_ranks(stop_under_lightnings_strategy, 2, init=False, timeout_s=6)


# ---------------------------------------------------------------------------------------------------------------- SLURM


@contextlib.contextmanager
def slurm(folder: Path, works: bool = True) -> Iterator[Path]:
    """Variables of a job of these ranks, and a ``scontrol`` that writes down how it was called."""
    calls, programs = folder / "calls", folder / "bin"
    programs.mkdir(exist_ok=True)
    script = programs / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\necho no such job >&2\nexit {0 if works else 1}\n')
    script.chmod(0o755)
    named = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    named["SLURM_NTASKS_PER_NODE"] = os.environ["WORLD_SIZE"]
    named |= {"SLURM_NTASKS": os.environ["WORLD_SIZE"], "SLURM_PROCID": str(rank()), "SLURM_LOCALID": str(rank())}
    named["PATH"] = f"{programs}:{os.environ['PATH']}"
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        yield calls
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@ranks(2, init=False)
def test_slurm_requeues_the_job_and_it_goes_on_to_the_last_bit(world_size: int, tmp_path: Path) -> None:
    whole, _, _ = fit()
    steps: list[tuple[int, int]] = []
    number = signal.SIGUSR2
    if rank() == 0:
        (tmp_path / "bin").mkdir()
    time.sleep(0.2)
    with slurm(tmp_path) as calls:
        for wisher, hook in ((1, "on_train_batch_end"), (0, "on_validation_start")):
            callbacks = [Sends(number, hook, 2, (wisher,))]
            plugins = [SLURMEnvironment(requeue_signal=number)]
            stopped, run, status = fit(*callbacks, plugins=plugins, default_root_dir=tmp_path)
            steps += stopped.steps
            assert (status, run.strategy.stop_reason) == (0, "requeue")
        resumed, _, status = fit(plugins=[SLURMEnvironment(requeue_signal=number)], default_root_dir=tmp_path)
    assert status is None
    assert steps + resumed.steps == whole.steps
    assert torch.equal(resumed.values, whole.values)
    assert calls.read_text().splitlines() == ["requeue 4711"] * 2  # by rank 0 alone
    assert {path.name for path in tmp_path.glob("hpc_ckpt_*.ckpt")} == {"hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"}


@pytest.mark.filterwarnings("ignore:CustomDDPStrategy. SLURM did not requeue")
@ranks(2, init=False)
def test_a_requeue_that_fails_is_no_success(tmp_path: Path) -> None:
    import warnings

    warnings.filterwarnings("ignore", "CustomDDPStrategy: SLURM did not requeue")
    sends, number = Sends(signal.SIGUSR2, "on_train_batch_end", 2, (1,)), signal.SIGUSR2
    if rank() == 0:
        (tmp_path / "bin").mkdir()
    time.sleep(0.2)
    with slurm(tmp_path, works=False):
        _, _, status = fit(sends, plugins=[SLURMEnvironment(requeue_signal=number)], default_root_dir=tmp_path)
    assert status == 138
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists()


def test_the_jobs_name() -> None:
    assert job_id({"SLURM_JOB_ID": "12"}) == "12"
    assert job_id({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}) == "7_3"
    for environment in ({}, {"SLURM_JOB_ID": "12; rm"}, {"SLURM_ARRAY_JOB_ID": "7"}):
        with pytest.raises(ValueError, match="job number"):
            job_id(environment)
    assert "job number" in (requeue({}) or "")


# -------------------------------------------------------------------------------------------------------------- signals


def own_handler(calls: list[int]) -> Any:
    return lambda number, frame: calls.append(number)


@ranks(1, init=False)
def test_handlers_of_others() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGTERM, own_handler(calls))
    signal.signal(signal.SIGUSR1, own_handler(calls))
    noted = StopSignals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), is_alone=True)
    noted.install()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.raise_signal(number)
    assert calls == [signal.SIGTERM, signal.SIGUSR1]  # SIGTERM for both; SIGUSR1 is somebody else's
    assert noted.received == [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the second one: at once
    with pytest.raises(KeyboardInterrupt):  # too late for the run, not for the program
        noted.restore(forget=[signal.SIGTERM])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignored = StopSignals((signal.SIGINT,), is_alone=True)
    ignored.install()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert ignored.received == []


@ranks(1, init=False)
def test_one_of_several_processes_is_killed_by_a_second_interrupt_and_a_fork_by_the_first() -> None:
    for number_of_signals, setup in ((2, "parent"), (1, "child")):
        pid = os.fork()
        if pid == 0:
            noted = StopSignals((signal.SIGINT,), is_alone=False)
            noted.install()
            if setup == "child":
                inner = os.fork()
                if inner:
                    os._exit(0 if os.waitpid(inner, 0)[1] != 0 else 9)
            try:
                for _ in range(number_of_signals):
                    os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
            except KeyboardInterrupt:
                os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status) if setup == "parent" else status == 0


def test_a_signal_that_native_code_waits_for_is_not_free() -> None:
    assert is_free(signal.SIGUSR2)
    assert not is_free(signal.SIGUSR2, lambda: f"SigCgt:\t{1 << (signal.SIGUSR2 - 1):016x}\n")
    assert is_free(signal.SIGUSR2, lambda: f"SigCgt:\t{1 << (signal.SIGUSR1 - 1):016x}\n")
    assert not is_free(signal.SIGINT)


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.2)
        return torch.tensor(index)


def deliver(shield: Any) -> list[int]:
    """Loads with workers, of which all get the launcher's SIGTERM in the middle."""
    loader = DataLoader(Slow(), batch_size=None, num_workers=2, worker_init_fn=shield)
    iterator: Any = iter(loader)
    items = [int(next(iterator))]
    for worker in iterator._workers:
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    items += map(int, iterator)
    workers = list(iterator._workers)
    del iterator
    assert not any(worker.is_alive() for worker in workers)
    return items


@ranks(1, init=False)
def test_workers_outlive_the_launchers_signal_and_not_their_rank() -> None:
    shield = ShieldWorker((signal.SIGTERM, signal.SIGINT))
    assert deliver(shield) == list(range(6))
    for worker_init, sender, status in (
        (None, "launcher", -signal.SIGTERM),  # the control
        (shield, "rank", 0),
    ):
        iterator: Any = iter(DataLoader(Slow(), batch_size=None, num_workers=1, worker_init_fn=worker_init))
        next(iterator)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises wherever the main thread happens to be
        worker = iterator._workers[0]
        if sender == "rank":
            worker.terminate()
        else:
            subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
        worker.join(5)
        assert worker.exitcode == status, sender


def test_the_first_process_awaits_the_others_and_kills_who_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's launcher kills all, the first process too, within 5 s after one of the others ended with a status."""
    at_exit: list[Any] = []
    monkeypatch.setattr(stopping, "_CHILDREN_MAY_TAKE_S", 0.5)
    monkeypatch.setattr(stopping.atexit, "register", lambda *call: at_exit.append(call))
    children = [subprocess.Popen(["sleep", "0.1"]), subprocess.Popen(["sleep", "60"])]
    launcher = SimpleNamespace(procs=list(children))
    stopping._look_after_children(SimpleNamespace(launcher=launcher))
    assert launcher.procs == []  # the list that the launcher's observer reads
    ((function, *arguments),) = at_exit
    function(*arguments)
    assert [child.returncode for child in children] == [0, -signal.SIGKILL]


# ------------------------------------------------------------------------------------------------------- real launchers


def start(folder: Path, launcher: str, num_ranks: int, num_workers: int) -> subprocess.Popen[str]:
    arguments = [str(ROOT / "tests" / "stopping_job.py"), str(folder), str(num_ranks), str(num_workers)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--standalone"]
    command = [sys.executable, *(torchrun if launcher == "torchrun" else []), *arguments]
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )


def await_steps(folder: Path, num_ranks: int, num_steps: int) -> list[int]:
    """Waits until all ranks are at a step, and returns their processes."""
    deadline = time.monotonic() + 100
    logs = [folder / f"{rank}.log" for rank in range(num_ranks)]
    while time.monotonic() < deadline:
        if all(log.exists() and len(log.read_text().splitlines()) >= num_steps for log in logs):
            return [int(log.read_text().split()[1]) for log in logs]
        time.sleep(0.1)
    raise AssertionError("the job did not begin")


def in_session(session: int) -> list[int]:
    """Returns the processes of a session that have not ended; torchrun gives each worker one of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


CASES = [
    ("torchrun", 2, 2, "agent", signal.SIGTERM, 1),  # torchrun's own status, whatever the workers answer
    ("torchrun", 2, 0, 1, signal.SIGTERM, 1),
    ("lightning", 3, 0, 2, signal.SIGTERM, 143),
    ("lightning", 2, 1, "group", signal.SIGINT, 1),
]


@pytest.mark.parametrize(("launcher", "num_ranks", "num_workers", "whom", "number", "status"), CASES)
def test_under_real_launchers(
    launcher: str, num_ranks: int, num_workers: int, whom: Any, number: int, status: int, tmp_path: Path
) -> None:
    job = start(tmp_path, launcher, num_ranks, num_workers)
    try:
        processes = await_steps(tmp_path, num_ranks, 3)
        begin = time.time()
        if whom == "group":
            os.killpg(job.pid, number)
        else:
            os.kill(job.pid if whom == "agent" else processes[whom], number)
        errors = job.communicate(timeout=60)[1]
        last = {log.read_text().splitlines()[-1].split()[0] for log in tmp_path.glob("*.log")}
        assert len(last) == 1, errors  # of all ranks
        assert job.returncode == status, errors
        checkpoint = tmp_path / "stop.ckpt"
        assert checkpoint.stat().st_mtime - begin < 10  # seconds
        assert torch.load(checkpoint, weights_only=True)["global_step"] == int(last.pop())
        assert "Unable to shutdown" not in errors  # torchrun's patience ends after 30 s
        if whom == 1:
            assert "exitcode  : 143" in errors
        time.sleep(0.5)
        assert [pid for session in {job.pid, *processes} for pid in in_session(session)] == []
    finally:
        for session in {job.pid, *(processes if "processes" in locals() else ())}:
            for pid in in_session(session):
                os.kill(pid, signal.SIGKILL)
        job.wait()
