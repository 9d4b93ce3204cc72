"""The newest checkpoint that is whole is found, and what is passed over is said."""

import errno
import io
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ddp_plugin.checkpoints import NewerFormatError, newest_checkpoint, verify
from ddp_plugin.checkpoints.files import write
from ddp_plugin.checkpoints.finding import folders_below
from tests.harness import ranks, trainer
from tests.test_checkpoint_reading import RunsCode, make


def save(path: Path, step: int, *, saved_at_s: float, sealed: bool = True, **more: Any) -> Path:
    """Saves a checkpoint that says it was written at some time."""
    content = {"global_step": step, "epoch": 0, "state_dict": {"w": torch.ones(3)}, "optimizer_states": []} | more
    content = {key: value for key, value in content.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    if sealed:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: saved_at_s)
            write(content, path)
    else:
        torch.save(content, path)
        os.utime(path, (saved_at_s, saved_at_s))
    return path


def flip(path: Path, position: int) -> None:
    content, times = bytearray(path.read_bytes()), path.stat()
    content[position] ^= 1
    path.write_bytes(content)
    os.utime(path, (times.st_atime, times.st_mtime))


def test_nothing_to_find(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "notes.txt").write_text("no checkpoint")
    assert newest_checkpoint(str(tmp_path)) is None
    with pytest.raises(ValueError, match=r"notes\.txt"):
        newest_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="s3://bucket"):
        newest_checkpoint("s3://bucket/run")


def test_the_one_that_was_written_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path / "version_0" / "checkpoints" / "of an older run.ckpt", 900, saved_at_s=1000)
    newest = save(tmp_path / "version_1" / "checkpoints" / "epoch=0-step=20.ckpt", 20, saved_at_s=3000)
    save(tmp_path / "version_1" / "checkpoints" / "epoch=0-step=10.ckpt", 10, saved_at_s=2000)
    assert newest_checkpoint(tmp_path) == newest
    copied = shutil.copy(tmp_path / "version_1" / "checkpoints" / "epoch=0-step=10.ckpt", tmp_path / "copied now.ckpt")
    assert newest_checkpoint(tmp_path) == newest, copied
    last = save(tmp_path / "last.ckpt", 21, saved_at_s=3000)  # in the same second: after more steps
    assert newest_checkpoint(tmp_path) == last
    requeued = save(tmp_path / "hpc_ckpt_1.ckpt", 22, saved_at_s=3001)
    assert newest_checkpoint(tmp_path) == requeued
    assert newest_checkpoint(tmp_path / "version_1", [requeued]) == requeued
    requeued_before = save(tmp_path / "hpc_ckpt_0.ckpt", 19, saved_at_s=2999)
    assert newest_checkpoint(tmp_path / "version_1", [requeued_before]) == newest
    assert newest_checkpoint(tmp_path / "nothing here", [requeued_before]) == requeued_before
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path / "version_1", [tmp_path / "gone.ckpt"]) == newest
    assert caplog.messages == [f"{tmp_path / 'gone.ckpt'} is skipped: No such file or directory."]


def test_what_is_torn_changed_or_not_enough_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(tmp_path / "good.ckpt", 1, saved_at_s=1000)
    flip(save(tmp_path / "changed.ckpt", 2, saved_at_s=2000), 700)
    os.truncate(save(tmp_path / "cut.ckpt", 3, saved_at_s=3000), 900)
    end = (cut := save(tmp_path / "cut in its table.ckpt", 3, saved_at_s=3000, w=torch.ones(2000))).stat().st_size
    os.truncate(cut, end - 700)  # where torch's reader asks for what is before the beginning
    (tmp_path / "empty.ckpt").touch()
    save(tmp_path / "weights.ckpt", 4, saved_at_s=4000, optimizer_states=None)
    (tmp_path / "dangling.ckpt").symlink_to("absent")
    (tmp_path / "sharded.ckpt").mkdir()
    flip(save(tmp_path / "old and changed.ckpt", 2, saved_at_s=10), 700)  # older than the good one: nobody asks
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == good
    said = {path.name: message for message in caplog.messages for path in tmp_path.iterdir() if f"{path} is" in message}
    names = {path.name for path in tmp_path.iterdir()} - {"good.ckpt", "old and changed.ckpt"}
    assert said.keys() == names
    assert len(caplog.messages) == len(names) == 7
    assert "the hash differs" in said["changed.ckpt"]
    assert "weights alone" in said["weights.ckpt"]
    assert "it was cut short: only 900 bytes are there, without the end" in said["cut.ckpt"]
    assert f"it was cut short: only {end - 700} bytes are there" in said["cut in its table.ckpt"]
    assert "No such file" in said["dangling.ckpt"]
    good.unlink()
    assert newest_checkpoint(tmp_path) is None


def test_files_of_others_have_to_be_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = save(tmp_path / "good.ckpt", 1, saved_at_s=1000, sealed=False)
    save(tmp_path / "weights.ckpt", 3, saved_at_s=3000, sealed=False, optimizer_states=None)
    changed = save(tmp_path / "changed.ckpt", 4, saved_at_s=4000, sealed=False)
    flip(changed, changed.read_bytes().index(torch.ones(3).numpy().tobytes()))
    torch.load(changed)  # it does not notice
    older = save(tmp_path / "older, with a seal.ckpt", 5, saved_at_s=500)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == good
    assert len(caplog.messages) == 2
    good.unlink()
    assert newest_checkpoint(tmp_path) == older


def test_no_file_that_is_cut_keeps_an_older_one_from_being_found(tmp_path: Path) -> None:
    """Also one of the form before the archives, from which torch raises what it raises."""
    good = save(tmp_path / "good.ckpt", 1, saved_at_s=1000)
    state = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))]).state_dict()
    buffer, raised = io.BytesIO(), set[str]()
    torch.save({"optimizer_states": [state]}, buffer, _use_new_zipfile_serialization=False)
    for size_bytes in range(100, 140):
        content = buffer.getvalue()[:size_bytes]
        with pytest.raises(Exception) as caught:
            torch.load(io.BytesIO(content), weights_only=True)
        raised.add(type(caught.value).__name__)
        (tmp_path / "newer.ckpt").write_bytes(content)
        assert newest_checkpoint(tmp_path) == good
    assert raised >= {"IndexError", "error"}  # of struct


@pytest.mark.parametrize("sealed", [False, True])
def test_whether_code_may_run_is_for_the_load_to_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sealed: bool
) -> None:
    """An older checkpoint is not taken in place of a whole one that is refused; of a torn one it is."""
    code, trace = RunsCode(tmp_path / "trace"), tmp_path / "trace"
    good = save(tmp_path / "good.ckpt", 1, saved_at_s=1000)
    refused = save(tmp_path / "code.ckpt", 2, saved_at_s=2000, sealed=sealed, hook=code)
    save(tmp_path / "weights.ckpt", 3, saved_at_s=3000, sealed=sealed, hook=code, optimizer_states=None)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(tmp_path) == refused
        [message] = caplog.messages
        assert "weights.ckpt is skipped: it holds weights alone" in message
        flip(refused, refused.read_bytes().index(torch.ones(3).numpy().tobytes()))
        assert newest_checkpoint(tmp_path) == good
    assert not trace.exists()


def test_links_do_not_count_twice_and_lead_out(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    good = save(folder / "epoch=1.ckpt", 1, saved_at_s=1000)
    (folder / "last.ckpt").symlink_to(good.name)
    assert newest_checkpoint(folder) == good
    save(tmp_path / "elsewhere.ckpt", 2, saved_at_s=2000)
    (folder / "out.ckpt").symlink_to("../elsewhere.ckpt")
    assert newest_checkpoint(folder) == folder / "out.ckpt"


def test_linked_folders_are_searched_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where ``lightning_logs`` lies on another disk; loops end, and other runs' folders are not reached."""
    run, disk = tmp_path / "runs" / "mine", tmp_path / "disk"
    newest = save(disk / "version_0" / "checkpoints" / "step=5.ckpt", 5, saved_at_s=2000)
    (newest.parent / "last.ckpt").symlink_to(newest.name)
    save(run / "step=1.ckpt", 1, saved_at_s=1000)
    save(tmp_path / "runs" / "another" / "step=9.ckpt", 9, saved_at_s=3000)
    (run / "lightning_logs").symlink_to(disk)
    found = run / "lightning_logs" / "version_0" / "checkpoints" / "step=5.ckpt"
    assert newest_checkpoint(run) == found
    (run / "itself").symlink_to(run)
    (run / "above").symlink_to("..")
    (run / "twice").symlink_to(disk / "version_0")
    (disk / "back").symlink_to(run)
    (disk / "version_0" / "up").symlink_to(disk)
    assert newest_checkpoint(run) == run / "twice" / "checkpoints" / "step=5.ckpt"
    folders = [folder.resolve() for folder in folders_below(run)]
    assert sorted(folders) == [disk, disk / "version_0", newest.parent, run]
    (tmp_path / "link").symlink_to(run)
    assert newest_checkpoint(tmp_path / "link") == tmp_path / "link" / "twice" / "checkpoints" / "step=5.ckpt"
    assert caplog.messages == []


def test_what_cannot_be_listed_or_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = save(tmp_path / "good.ckpt", 1, saved_at_s=1000)
    os.mkfifo(tmp_path / "pipe.ckpt")  # opened, it would be waited for
    (tmp_path / "folder").mkdir()
    scandir, error = os.scandir, OSError(errno.EACCES, "Permission denied", str(tmp_path / "folder"))

    def deny(path: Any) -> Any:
        if Path(path).name == "folder":
            raise error
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)
    assert newest_checkpoint(tmp_path) == good
    assert [message.split(" is skipped: ")[1] for message in sorted(caplog.messages)] == [
        "Permission denied.",
        "it is no file.",
    ]
    error = OSError(errno.ESTALE, "Stale file handle")  # so newer ones may be there
    with pytest.raises(OSError, match="Stale"):
        newest_checkpoint(tmp_path)


def test_a_newer_format_is_not_replaced_by_an_older_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "good.ckpt", 1, saved_at_s=1000)
    make("newer", tmp_path / "later.ckpt", tmp_path)
    with pytest.raises(NewerFormatError, match="format 99"):
        newest_checkpoint(tmp_path)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("strategy", ["auto", "ddp_plugin"])
@ranks(1, init=False)
def test_what_lightning_leaves_behind(tmp_path: Path, strategy: str) -> None:
    """Under its own strategy without a seal, under this one with it; fit goes on from what was found."""

    def run(max_epochs: int, path: Path | None = None) -> pl.Trainer:
        saving = ModelCheckpoint(tmp_path, save_last="link", save_top_k=2, monitor="epoch", mode="max")
        run = trainer(strategy=strategy, max_epochs=max_epochs, enable_checkpointing=True, callbacks=[saving])
        run.fit(Model(), torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2), ckpt_path=path)
        return run

    run(3)
    found = newest_checkpoint(tmp_path)
    assert found == tmp_path / "epoch=2-step=9.ckpt"
    assert (verify(found) is None) == (strategy == "auto")
    assert run(4, found).global_step == 12
