"""A checkpoint is read once for all ranks, all fail alike, and nothing in the file is run."""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_plugin.checkpoints import (
    DamagedCheckpointError,
    NewerFormatError,
    RefusedCheckpointError,
    newest_checkpoint,
    read,
    reading,
    verify,
)
from ddp_plugin.checkpoints import manifest as manifests
from ddp_plugin.checkpoints.files import write
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.gather import gather_objects
from tests.harness import ranks


def checkpoint(step: int = 7) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(300, 7, generator=generator, dtype=torch.float64)
    return {
        "global_step": step,
        "epoch": 1,
        "state_dict": {"weight": weight, "tied": weight, "half": weight.to(torch.bfloat16), "none": torch.empty(0)},
        "optimizer_states": [
            {"state": {0: {"exp_avg": weight.T.clone()}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        ],
        "words": ["a", {"b": (1, 2.5, None, True)}],
    }


class RunsCode:
    """What an attacker puts into a file: unpickling it calls a function."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values are equal to the bit, tensors with shape and dtype."""
    if isinstance(first, torch.Tensor):
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return False
        return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def control_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("in_memory_bytes", [0, 1 << 20])
@ranks(1, 2, 3)
def test_rank_0_alone_opens_the_file_once(tmp_path: Path, sealed: bool, in_memory_bytes: int) -> None:
    """The path is relative, and only rank 0 is where it leads: as on nodes with disks of their own."""
    group, rank = control_group(), dist.get_rank()
    own = tmp_path / f"rank-{rank}"
    own.mkdir()
    os.chdir(own)
    tempfile.tempdir = str(own)
    if rank == 0:
        (write if sealed else torch.save)(checkpoint(), "a.ckpt")
    reading.CHUNK_BYTES, reading.IN_MEMORY_BYTES = 1000, in_memory_bytes  # many chunks, the last one shorter
    opened: list[str] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and "a.ckpt" in str(arguments[0]):
            opened.append(str(arguments[0]))

    sys.addaudithook(hear)
    loaded = read("a.ckpt", group)
    assert len(opened) == (1 if rank == 0 else 0)
    assert same(loaded, checkpoint())
    assert loaded["state_dict"]["weight"].data_ptr() == loaded["state_dict"]["tied"].data_ptr()
    assert os.listdir(own) == (["a.ckpt"] if rank == 0 else [])


def raised(path: Any, group: dist.ProcessGroup | None, **options: Any) -> list[tuple[str, str]]:
    """Reads, and returns the kind and text of the error on each rank."""
    try:
        read(path, group, **options)
    except Exception as error:
        return gather_objects((type(error).__name__, str(error)), group)
    return gather_objects(("nothing", ""), group)


@ranks(1, 3)
def test_what_is_wrong_with_a_file_is_raised_on_all_ranks(tmp_path: Path) -> None:
    group, path = control_group(), tmp_path / "a.ckpt"
    reading.CHUNK_BYTES = 1000
    cases: dict[str, tuple[str, str]] = {
        "absent": ("FileNotFoundError", "nothing at"),
        "a folder": ("DDPPluginError", "IsADirectoryError"),
        "empty": ("DamagedCheckpointError", "a.ckpt"),
        "text": ("DamagedCheckpointError", "a.ckpt"),
        "cut": ("DamagedCheckpointError", "a.ckpt"),
        "flipped": ("DamagedCheckpointError", "the hash differs"),
        "unsealed and flipped": ("DamagedCheckpointError", "has changed since it was written"),
        "newer": ("NewerFormatError", "format 99"),
        "code": ("RefusedCheckpointError", "mkdir"),
    }
    for case, (kind, words) in cases.items():
        if dist.get_rank() == 0:
            make(case, path, tmp_path / "trace")
        got = raised(path, group)
        assert {name for name, _ in got} == {kind}, (case, got)
        assert all(words in text for _, text in got), (case, got)
        assert len({text for _, text in got}) == 1, (case, got)
    assert not (tmp_path / "trace").exists()
    raised(path, group, weights_only=False)
    assert (tmp_path / "trace").exists()  # that was asked for


def make(case: str, path: Path, trace: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if case == "absent":
        return
    if case == "a folder":
        path.mkdir()
        return
    if case in ("empty", "text"):
        path.write_bytes(b"" if case == "empty" else b"no checkpoint " * 1000)
        return
    if case == "code":
        write({"global_step": 1, "state_dict": {}, "optimizer_states": [], "x": [RunsCode(trace)]}, path)
        return
    if case == "newer":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manifests, "asdict", lambda said: vars(said) | {"format": 99})
            write(checkpoint(), path)
        return
    (torch.save if "unsealed" in case else write)(checkpoint(), path)
    whole = bytearray(path.read_bytes())
    if case == "cut":
        del whole[len(whole) // 2 :]
    else:
        whole[whole.index(checkpoint()["state_dict"]["weight"].numpy().tobytes()) + 5000] ^= 4
    path.write_bytes(whole)


@ranks(3)
def test_a_rank_that_cannot_keep_the_bytes_fails_all(tmp_path: Path) -> None:
    group, path = control_group(), tmp_path / "a.ckpt"
    if dist.get_rank() == 0:
        write(checkpoint(), path)
    reading.CHUNK_BYTES, reading.IN_MEMORY_BYTES = 1000, 0
    if dist.get_rank() == 1:
        tempfile.tempdir = str(tmp_path / "absent")
    got = raised(path, group)
    assert {name for name, _ in got} == {"DDPPluginError"}
    assert "on rank 1 of 3" in got[0][1]
    if dist.get_rank() == 1:
        tempfile.tempdir = str(tmp_path)
    assert same(read(path, group), checkpoint())


@ranks(2)
def test_a_file_that_fails_half_way_fails_all(tmp_path: Path) -> None:
    group, path = control_group(), tmp_path / "a.ckpt"
    if dist.get_rank() == 0:
        write(checkpoint(), path)
        into, calls = reading._read_into, iter(range(100))

        def fail(file: Any, view: memoryview) -> None:
            if next(calls) == 3:
                raise OSError(5, "Input/output error")
            into(file, view)

        reading._read_into = fail
    reading.CHUNK_BYTES = 1000
    got = raised(path, group)
    assert {name for name, _ in got} == {"DDPPluginError"}
    assert "Input/output error" in got[1][1]


# --------------------------------------------------------------------------------------------------------------- code


@pytest.mark.parametrize("sealed", [True, False])
def test_code_in_a_file_is_not_run_and_every_name_is_told(tmp_path: Path, sealed: bool) -> None:
    path, trace = tmp_path / "a.ckpt", tmp_path / "trace"
    saved = checkpoint() | {"hyper_parameters": argparse.Namespace(width=3), "x": RunsCode(trace)}
    (write if sealed else torch.save)(saved, path)
    with pytest.raises(RefusedCheckpointError) as caught:
        read(path)
    words = str(caught.value)
    assert "argparse.Namespace, posix.mkdir" in words
    assert "torch.serialization.add_safe_globals([argparse.Namespace, posix.mkdir])" in words
    verify(path)
    newest_checkpoint(tmp_path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # so it would have run


def test_what_is_allowed_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write(checkpoint() | {"hyper_parameters": argparse.Namespace(width=3)}, path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        assert read(path)["hyper_parameters"].width == 3
    with pytest.raises(RefusedCheckpointError):
        read(path)
    assert read(path, weights_only=False)["hyper_parameters"].width == 3


def test_what_code_does_is_not_called_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    (tmp_path / "trace").mkdir()
    write({"x": RunsCode(tmp_path / "trace")}, path)
    with pytest.raises(DDPPluginError, match="FileExistsError") as caught:
        read(path, weights_only=False)
    assert type(caught.value) is DDPPluginError


def test_no_variable_of_the_environment_opens_that_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    write({"x": RunsCode(tmp_path / "trace")}, tmp_path / "a.ckpt")
    with pytest.raises(RefusedCheckpointError):
        read(tmp_path / "a.ckpt")
    assert not (tmp_path / "trace").exists()


def test_errors_are_of_their_kind(tmp_path: Path) -> None:
    make("newer", tmp_path / "a.ckpt", tmp_path)
    with pytest.raises(NewerFormatError, match="Install ddp_plugin"):
        read(tmp_path / "a.ckpt")
    with pytest.raises(NewerFormatError):
        verify(tmp_path / "a.ckpt")
    (tmp_path / "a.ckpt").write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="newest_checkpoint"):
        read(tmp_path / "a.ckpt")
