"""A checkpoint file is the old one or the new one, whatever happens while it is written; any change is noticed."""

import hashlib
import json
import multiprocessing
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ddp_plugin.checkpoints import DamagedCheckpointError, Manifest, files, newest_checkpoint, read, verify
from ddp_plugin.checkpoints.files import remove_leftovers, why_not_written, write
from ddp_plugin.checkpoints.manifest import Damage


def checkpoint(step: int = 7, num_elements: int = 10) -> dict[str, Any]:
    weights = torch.arange(float(num_elements), dtype=torch.float64) + step
    return {
        "epoch": 2,
        "global_step": step,
        "state_dict": {"weight": weights, "tied": weights},
        "optimizer_states": [],
        "ddp_plugin": {"run": {"world_size": 4, "comm_hook": "bf16()", "versions": {"ddp_plugin": "0.1.0"}}},
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with room for 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs Linux and root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ----------------------------------------------------------------------------------------------------------- the seal


@pytest.mark.parametrize("num_elements", [10, 1 << 17, (1 << 17) + 1, 1 << 19])  # around and above the write buffer
def test_torch_and_zip_read_it_as_they_read_their_own(tmp_path: Path, num_elements: int) -> None:
    path, saved = tmp_path / "a.ckpt", checkpoint(num_elements=num_elements)
    write(saved, path)
    for options in ({}, {"mmap": True}):
        loaded = torch.load(path, weights_only=True, **options)
        assert torch.equal(loaded["state_dict"]["weight"], saved["state_dict"]["weight"])
        assert loaded["state_dict"]["tied"].data_ptr() == loaded["state_dict"]["weight"].data_ptr()
        assert loaded["global_step"] == 7
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        lines = archive.comment.decode().splitlines()
    everything = path.read_bytes()
    assert lines[2] == "sha256 " + hashlib.sha256(everything[:-65]).hexdigest()
    said = json.loads(lines[1])
    assert (said["step"], said["epoch"], said["resumes"], said["world_size"]) == (7, 2, True, 4)
    assert said["comm_hook"] == "bf16()"
    assert abs(said["saved_at_s"] - time.time()) < 60
    torch.save(saved, tmp_path / "plain.ckpt")
    plain = zipfile.ZipFile(tmp_path / "plain.ckpt").infolist()
    own = zipfile.ZipFile(path).infolist()
    contents = [(entry.file_size, entry.CRC) for entry in own if ".data/serialization_id" not in entry.filename]
    assert contents == [(e.file_size, e.CRC) for e in plain if ".data/serialization_id" not in e.filename]
    assert verify(path) == Manifest(**said)


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(checkpoint(), path)
    whole = path.read_bytes()
    unnoticed_by_torch = 0
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(Damage):
            verify(path)
        if position % 64 == 0:
            with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt"):
                read(path)
            try:
                torch.load(path, weights_only=True)
                unnoticed_by_torch += 1
            except Exception:
                continue
    assert unnoticed_by_torch > 5  # so it is the seal that notices


def test_every_shorter_or_longer_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(checkpoint(), path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(Damage):
            verify(path)
        if length % 64 == 0:
            with pytest.raises(DamagedCheckpointError):
                read(path)
    for more in (b"\0", b"\n", whole[:-1], whole[:100]):
        path.write_bytes(whole + more)
        with pytest.raises(Damage):
            verify(path)
    path.write_bytes(whole)
    assert verify(path) is not None


def test_a_file_without_a_seal_has_at_least_whole_records(tmp_path: Path) -> None:
    path, saved = tmp_path / "plain.ckpt", checkpoint(num_elements=1000)
    torch.save(saved, path)
    assert verify(path) is None
    assert read(path)["global_step"] == 7
    whole = path.read_bytes()
    position = whole.index(saved["state_dict"]["weight"].numpy().tobytes()) + 100
    path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    assert torch.load(path)["global_step"] == 7  # torch says nothing
    with pytest.raises(Damage, match="data/0 has changed"):
        verify(path)
    with pytest.raises(DamagedCheckpointError, match="data/0 has changed"):
        read(path)
    entry = whole.index(b"PK\x01\x02")  # the first in the directory
    for position, bit, says in ((8, 1, RuntimeError), (10, 8, zlib.error)):  # encrypted, and deflated
        changed = bytearray(whole)
        changed[entry + position] ^= bit
        path.write_bytes(changed)
        with zipfile.ZipFile(path) as archive, pytest.raises(says):
            archive.testzip()
        with pytest.raises(Damage, match="no whole archive"):
            verify(path)
        with pytest.raises(DamagedCheckpointError, match="no whole archive"):
            read(path)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(saved, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert verify(path) is None
    assert read(path)["global_step"] == 7


@pytest.mark.parametrize(
    "own", [{"run": None}, {"run": {"versions": None, "world_size": "two", "comm_hook": 3}}, None, 1]
)
@pytest.mark.parametrize("count", [None, "many", float("nan"), float("inf"), torch.ones(2)])
def test_a_seal_keeps_no_checkpoint_from_being_written(tmp_path: Path, own: Any, count: Any) -> None:
    path = tmp_path / "a.ckpt"
    write({"global_step": count, "epoch": count, "optimizer_states": [], "ddp_plugin": own}, path)
    said = verify(path)
    assert said == Manifest(resumes=True, saved_at_s=said.saved_at_s if said else 0.0)


# ------------------------------------------------------------------------------------------------------------ writing


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "a.ckpt"
    write(checkpoint(1), path)
    before = path.read_bytes()
    with pytest.raises(TypeError, match="pickle"):
        write(checkpoint(2) | {"unpicklable": threading.Lock()}, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["a.ckpt"]
    write(checkpoint(3), path)
    assert read(path)["global_step"] == 3


def test_it_has_the_rights_and_the_place_that_a_new_file_has(tmp_path: Path) -> None:
    write(checkpoint(), tmp_path / "a.ckpt")
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "a.ckpt").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "link.ckpt").symlink_to("a.ckpt")  # as ModelCheckpoint(save_last="link") leaves it
    write(checkpoint(8), tmp_path / "link.ckpt")
    assert not (tmp_path / "link.ckpt").is_symlink()
    assert [read(tmp_path / f"{name}.ckpt")["global_step"] for name in ("a", "link")] == [7, 8]


def test_another_file_system_gets_it_whole_or_not_at_all() -> None:
    path = "memory://checkpoints/a.ckpt"
    write(checkpoint(1), path)
    assert read(path)["global_step"] == 1
    before = fsspec.filesystem("memory").cat("/checkpoints/a.ckpt")
    assert b"sha256 " + hashlib.sha256(before[:-65]).hexdigest().encode() in before
    with pytest.raises(TypeError, match="pickle"):
        write(checkpoint(2) | {"unpicklable": threading.Lock()}, path)
    assert fsspec.filesystem("memory").cat("/checkpoints/a.ckpt") == before
    with pytest.raises(FileNotFoundError, match="memory://checkpoints/other"):
        read("memory://checkpoints/other.ckpt")


@pytest.mark.parametrize("num_mib", [5, 30])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk: Path, num_mib: int) -> None:
    path = small_disk / "last.ckpt"
    write(checkpoint(1, 2 << 17), path)  # 2 MiB of 4
    before = hashlib.sha256(path.read_bytes()).digest()
    free_bytes = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize
    with pytest.raises(OSError, match="No space left on device") as caught:
        write(checkpoint(2, num_mib << 17), path)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert os.listdir(small_disk) == ["last.ckpt"]
    words = why_not_written(caught.value, path)
    assert str(path) in words
    assert f"{free_bytes} bytes are free" in words
    assert "is as it was" in words
    write(checkpoint(3, 1 << 17), path)
    assert read(path)["global_step"] == 3


def test_a_disk_that_is_full_to_the_last_byte(small_disk: Path) -> None:
    """Also where only the seal, or the archive's directory, has no room any more."""
    path = small_disk / "last.ckpt"
    write(checkpoint(1), path)
    page = os.statvfs(small_disk).f_bsize
    num_failed = 0
    for num_pages in range(8):
        filler = small_disk / "filler"
        free_bytes = os.statvfs(small_disk).f_bavail * page
        filler.write_bytes(b"\0" * (free_bytes - num_pages * page))
        try:
            write(checkpoint(2 + num_pages, 1024), path)
        except OSError:
            num_failed += 1
            assert read(path)["global_step"] == 1
        else:
            assert read(path)["global_step"] == 2 + num_pages
            break
        filler.unlink()
        assert os.listdir(small_disk) == ["last.ckpt"]
    assert 2 <= num_failed < 8


# -------------------------------------------------------------------------------------------------------------- kills

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "lightning.pytorch", "torchmetrics", "ddp_plugin", "tests.harness"])
STAGES = ("torch.save", "write", "os.fsync", "os.replace", "after os.replace", "folder")


def die_at(stage: str, folder: str) -> None:
    """Writes a checkpoint over another one, and is killed at a stage of that."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if stage == "torch.save":
        files.torch.save = die  # type: ignore[assignment]
    elif stage == "write":
        put, calls = files._Sealing._put, iter(range(3))
        files._Sealing._put = lambda self, data: put(self, data) if next(calls) < 2 else die()  # type: ignore[method-assign]
    elif stage == "after os.replace":
        replace = os.replace
        files.os.replace = lambda a, b: (replace(a, b), die())  # type: ignore[assignment]
    elif stage == "folder":
        files._flush_folder = die  # type: ignore[assignment]
    else:
        setattr(files.os, stage.removeprefix("os."), die)
    write(checkpoint(2, 1 << 19), Path(folder, "last.ckpt"))


@pytest.mark.parametrize("stage", STAGES)
def test_killed_at_each_stage_there_is_the_old_one_or_the_new_one(tmp_path: Path, stage: str) -> None:
    write(checkpoint(1), tmp_path / "last.ckpt")
    process = FORKS.Process(target=die_at, args=(stage, str(tmp_path)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    is_new = stage in ("after os.replace", "folder")
    assert verify(tmp_path / "last.ckpt") is not None
    assert read(tmp_path / "last.ckpt")["global_step"] == (2 if is_new else 1)
    leftovers = [name for name in os.listdir(tmp_path) if name != "last.ckpt"]
    assert len(leftovers) == (0 if is_new or stage == "torch.save" and not leftovers else 1)
    assert not any("ckpt" in name or "last" in name for name in leftovers)  # Lightning takes numbers out of such names
    write(checkpoint(3), tmp_path / "other.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]


def save_for_ever(save: Callable[[Any, Path], object], folder: str, acknowledge: Connection, first: int) -> None:
    for step in range(first, first + 100_000):
        name = "last.ckpt" if step % 2 else f"step={step % 6}.ckpt"
        save(checkpoint(step, 1 << 17), Path(folder, name))
        acknowledge.send(step)


def save_plainly(saved: Any, path: Path) -> None:
    torch.save(saved, path)


def killed_at_random(save: Callable[[Any, Path], object], folder: Path, num_kills: int) -> Iterator[int]:
    """Yields the last step whose save was complete for its writer, after each kill."""
    moments, done = random.Random(0), 0
    for _ in range(num_kills):
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=save_for_ever, args=(save, str(folder), sender, done + 1))
        process.start()
        sender.close()
        assert receiver.poll(60)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        while True:
            try:
                done = receiver.recv()
            except EOFError:
                break
        yield done


def test_killed_at_random_moments_the_newest_is_never_lost(tmp_path: Path) -> None:
    found = 0
    for acknowledged in killed_at_random(write, tmp_path, 20):
        path = newest_checkpoint(tmp_path)
        assert path is not None
        found = read(path)["global_step"]
        assert found in (acknowledged, acknowledged + 1)
        for other in tmp_path.glob("*.ckpt"):
            assert verify(other) is not None
    assert found > 20
    write(checkpoint(), tmp_path / "last.ckpt")
    assert {path.suffix for path in tmp_path.iterdir()} == {".ckpt"}


def test_that_test_sees_files_that_are_written_in_place(tmp_path: Path) -> None:
    num_torn = 0
    for _ in killed_at_random(save_plainly, tmp_path, 20):
        for path in tmp_path.glob("*.ckpt"):
            try:
                verify(path)
            except Damage:
                num_torn += 1
        if num_torn:
            return
    pytest.fail("no kill hit a write")


def test_the_unfinished_file_of_a_writer_that_lives_stays(tmp_path: Path) -> None:
    with files._unfinished_file(tmp_path) as (unfinished, raw):
        assert remove_leftovers(tmp_path) == []
        write(checkpoint(), tmp_path / "a.ckpt")
        assert unfinished.exists()
        os.fstat(raw.fileno())
    assert os.listdir(tmp_path) == ["a.ckpt"]
    (tmp_path / unfinished.name).write_bytes(b"of a writer that was killed")
    assert remove_leftovers(tmp_path) == [tmp_path / unfinished.name]


def test_an_unfinished_file_of_another_host_stays_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock may not be seen here, as if there were none."""
    with monkeypatch.context() as patch:
        patch.setattr(platform, "node", lambda: "last hpc_ckpt_7/../elsewhere")
        with files._unfinished_file(tmp_path) as (unfinished, _):
            name = unfinished.name
    assert not any(text in name for text in ("last", "hpc_ckpt_", "7/"))
    left = tmp_path / name
    left.write_bytes(b"of a writer that lives")
    assert remove_leftovers(tmp_path) == []
    write(checkpoint(), tmp_path / "a.ckpt")
    half_a_day, two_days = time.time() - 43200, time.time() - 2 * 86400
    os.utime(left, (half_a_day, half_a_day))
    assert remove_leftovers(tmp_path) == []
    os.utime(left, (two_days, two_days))
    assert remove_leftovers(tmp_path) == [left]
    assert os.listdir(tmp_path) == ["a.ckpt"]
