"""Ctrl+C in the middle of trial runs: one press ends all of them, and nothing stays behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_plugin.tuning.interrupting import INTERRUPTED_STATUS, interruptible
from ddp_plugin.tuning.trials import SCRATCH
from tests.test_stopping import in_session

ROOT = Path(__file__).parents[1]
PROGRAM = '''
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_plugin import tune


class Model(pl.LightningModule):
    """The second trial run of a process says that it is under way."""

    num_runs = 0

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def on_fit_start(self):
        Model.num_runs += 1

    def training_step(self, batch, batch_idx):
        if Model.num_runs == 2 and batch_idx == 2:
            Path(f"begun{self.global_rank}").touch()
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(400, 4))


if __name__ == "__main__":
    try:
        tune(Model(), strategy={"start_method": "spawn"}, bucket_caps_mb=[None, 1], devices=2, accelerator="cpu")
    except KeyboardInterrupt:
        sys.exit("Interrupted")
'''


@pytest.mark.parametrize("start_method", ["popen", pytest.param("spawn", marks=pytest.mark.long)])
def test_one_press_ends_all_trial_runs(start_method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = ["program.py"]
    if start_method == "popen":
        command = ["-m", "ddp_plugin", "tune", "--model", "program:Model", "devices=2", "accelerator=cpu"]
        command += ["--bucket-caps-mb", "default,1", "--output", "tuned.yaml"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"begun{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, "the trial runs did not begin"
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.communicate(timeout=60)[1]
    finally:
        left = [pid for pid in in_session(process.pid) if pid != process.pid]
        for pid in [*left, process.pid] if process.poll() is None else left:
            os.kill(pid, signal.SIGKILL)
    assert left == []
    assert "Traceback" not in said
    if start_method == "popen":
        assert process.returncode == INTERRUPTED_STATUS
        assert said.splitlines()[-1] == "ddp-plugin tune: interrupted; nothing was written"
    else:
        assert (process.returncode, said.splitlines()[-1]) == (1, "Interrupted")
    assert not (tmp_path / "tuned.yaml").exists()
    assert list(scratch.glob(f"{SCRATCH}*")) == []


@pytest.fixture
def plain_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@interruptible()
def press_in_garbage() -> None:
    pressed = Pressed()
    del pressed
    time.sleep(10)


@interruptible()
def press_in_a_trainer() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        sys.exit(1)


@pytest.mark.usefixtures("plain_interrupts")
def test_a_press_that_finds_the_garbage_collector_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt):
        press_in_garbage()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("plain_interrupts")
def test_an_exit_that_a_trainer_makes_of_an_interrupt_is_one_again() -> None:
    with pytest.raises(KeyboardInterrupt):
        press_in_a_trainer()
    with pytest.raises(SystemExit), interruptible():
        sys.exit(1)


@pytest.mark.usefixtures("plain_interrupts")
def test_children_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_plugin.tuning.interrupting._CHILDREN_MAY_TAKE_S", 0.3)
    deaf = subprocess.Popen(["sh", "-c", "trap '' INT; exec sleep 60"])
    time.sleep(0.5)
    obeying = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    obeying.start()
    launcher = SimpleNamespace(procs=[deaf, obeying])
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{deaf.pid}-"))
    with pytest.raises(KeyboardInterrupt), interruptible(launcher):
        signal.raise_signal(signal.SIGINT)
    assert deaf.returncode == -signal.SIGKILL
    assert not scratch.exists()
    assert not obeying.is_alive()
    assert launcher.procs == []


@pytest.mark.usefixtures("plain_interrupts")
def test_somebody_elses_handler_stays() -> None:
    def own(number: int, frame: object) -> None:
        heard.append(number)

    heard: list[int] = []
    signal.signal(signal.SIGINT, own)
    with interruptible():
        signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]
