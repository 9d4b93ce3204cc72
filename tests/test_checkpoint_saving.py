"""Saving and loading in a Trainer: all ranks learn of a failure, and nothing old goes before the new is whole."""

import contextlib
import errno
import hashlib
import json
import logging.handlers
import os
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from ddp_plugin import CustomDDPStrategy, _compat, default_callbacks, process_group
from ddp_plugin.checkpoints import RefusedCheckpointError, verify
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.gather import gather_objects
from ddp_plugin.strategy import checkpoint_io
from ddp_plugin.strategy.checkpoint_io import SealedCheckpointIO
from tests.harness import ranks, run_ranks, trainer
from tests.test_checkpoint_files import small_disk as small_disk
from tests.test_checkpoint_mismatch import Model, data, fit
from tests.test_checkpoint_reading import RunsCode


def everywhere(run: Any, value: Any) -> list[Any]:
    return gather_objects(value, run.strategy.control_group)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_stops_all_ranks_and_leaves_what_was_there(small_disk: Path, world_size: int) -> None:
    run_ranks(fill_the_disk, world_size, init=False, folder=small_disk)


def fill_the_disk(folder: Path) -> None:
    run = fit(Model(), epochs=1)
    path = folder / "last.ckpt"
    run.save_checkpoint(path)
    before = hashlib.sha256(path.read_bytes()).digest()
    run.lightning_module.register_buffer("large", torch.zeros(8 << 20, dtype=torch.uint8))
    with pytest.raises(DDPPluginError) as caught:
        run.save_checkpoint(path)
    texts = everywhere(run, str(caught.value))
    assert len(set(texts)) == 1
    for words in (str(path), "No space left on device", "bytes are free", "is as it was"):
        assert words in texts[-1]
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert os.listdir(folder) == ["last.ckpt"]
    run.strategy.barrier()
    del run.lightning_module.large
    run.save_checkpoint(path)
    assert verify(path) is not None


@ranks(2, init=False)
def test_any_failure_of_a_save_reaches_all_ranks(tmp_path: Path) -> None:
    run = fit(Model(), epochs=1)
    (tmp_path / "taken.ckpt").mkdir(exist_ok=True)
    with pytest.raises(DDPPluginError, match=r"taken\.ckpt.*IsADirectoryError"):
        run.save_checkpoint(tmp_path / "taken.ckpt")
    run.strategy.save_checkpoint({"fine": 1}, tmp_path / "fine.ckpt")
    with pytest.raises(DDPPluginError, match=r"bad\.ckpt.*pickle"):
        run.strategy.save_checkpoint({"lock": threading.Lock()}, tmp_path / "bad.ckpt")
    with pytest.raises(DDPPluginError, match="no storage_options"):
        run.save_checkpoint(tmp_path / "options.ckpt", storage_options={"a": 1})
    assert not {path.name for path in tmp_path.iterdir()} - {"taken.ckpt", "fine.ckpt"}


@ranks(1, 2, init=False)
def test_the_seal_tells_the_run(tmp_path: Path, world_size: int) -> None:
    path = tmp_path / "a.ckpt"
    run = fit(Model(), epochs=1, strategy=CustomDDPStrategy(comm_hook="bf16"), callbacks=default_callbacks())
    run.save_checkpoint(path)
    said = verify(path)
    assert said is not None
    assert (said.step, said.world_size, said.comm_hook, said.resumes) == (run.global_step, world_size, "bf16()", True)
    assert said.versions["torch"] == torch.__version__
    json.dumps(torch.load(path, weights_only=True)["ddp_plugin"]["run"])  # plain values
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    said = verify(tmp_path / "weights.ckpt")
    assert said is not None
    assert not said.resumes


@ranks(2, init=False)
def test_a_run_goes_on_from_a_file_that_only_rank_0_has(tmp_path: Path) -> None:
    """Against the run that was not interrupted, in the same process."""
    rank = int(os.environ["RANK"])
    own = tmp_path / str(rank)
    own.mkdir()
    os.chdir(own)
    whole, resumed = Model(), Model(seed=1)
    fit(whole, epochs=3)
    fit(Model(), epochs=1).save_checkpoint("a.ckpt")
    assert os.path.exists("a.ckpt") == (rank == 0)
    fit(resumed, Path("a.ckpt"), epochs=3)
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("make_io", [None, TorchCheckpointIO, AsyncCheckpointIO])
@ranks(1, 2, init=False)
def test_code_in_a_checkpoint_is_run_through_no_door(tmp_path: Path, make_io: Any) -> None:
    path, trace = tmp_path / "a.ckpt", tmp_path / "trace"
    run = fit(Model(), epochs=1)
    run.save_checkpoint(tmp_path / "good.ckpt")
    if run.is_global_zero:
        torch.save(torch.load(tmp_path / "good.ckpt") | {"x": RunsCode(trace)}, path)
    run.strategy.barrier()
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"

    def again() -> Any:
        io = make_io() if make_io is not None else None
        return trainer(strategy=CustomDDPStrategy(checkpoint_io=io), max_epochs=2)

    for enter in ("fit", "validate", "test", "predict"):
        with pytest.raises(RefusedCheckpointError, match=r"posix\.mkdir"):
            getattr(again(), enter)(Model(), data(), ckpt_path=path)
    with pytest.raises(RefusedCheckpointError):
        SealedCheckpointIO().load_checkpoint(path)
    assert not trace.exists()
    run.strategy.barrier()
    if run.world_size == 1:
        again().fit(Model(), data(), ckpt_path=path, weights_only=False)
        assert trace.exists()


class Recording(TorchCheckpointIO):
    """A user's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> Any:
        self.calls.append(f"load {weights_only}")
        return super().load_checkpoint(path, map_location, weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.calls.append(f"save {storage_options}")
        super().save_checkpoint(checkpoint, path)


@ranks(2, init=False)
def test_a_checkpoint_io_of_the_users_own_is_used(tmp_path: Path) -> None:
    io = Recording()
    run = fit(Model(), epochs=1, strategy=CustomDDPStrategy(checkpoint_io=io))
    run.save_checkpoint(tmp_path / "a.ckpt", storage_options={"a": 1})
    fit(Model(), tmp_path / "a.ckpt", strategy=CustomDDPStrategy(checkpoint_io=io))
    assert run.strategy.checkpoint_io is io
    assert io.calls == (["save {'a': 1}"] if run.is_global_zero else []) + ["load True"]  # on each rank, without code
    by_plugin = trainer(plugins=[AsyncCheckpointIO()])
    assert isinstance(by_plugin.strategy.checkpoint_io.checkpoint_io, SealedCheckpointIO)
    assert isinstance(trainer().strategy.checkpoint_io, SealedCheckpointIO)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("settings", [{"save_top_k": 1}, {"save_top_k": 2, "save_last": True}, {"filename": "same"}])
@ranks(2, init=False)
def test_at_any_moment_there_is_a_whole_checkpoint(
    tmp_path: Path, asynchronous: bool, settings: dict[str, Any]
) -> None:
    """Looked at before and after each change of the folder."""
    least: list[int] = []
    write, lock = checkpoint_io.write, threading.Lock()
    remove = SealedCheckpointIO.remove_checkpoint

    def look() -> None:
        with lock:
            least.append(sum(verify(path) is not None for path in tmp_path.glob("*.ckpt")))

    def slow_write(*arguments: Any) -> Any:
        if least:
            look()
        threading.Event().wait(0.1)
        if least:
            look()
        result = write(*arguments)
        look()
        return result

    def watched_remove(self: Any, path: Any) -> None:
        remove(self, path)
        look()

    saving = ModelCheckpoint(tmp_path, monitor="step", mode="max", enable_version_counter=False, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_io, "write", slow_write)
        patch.setattr(SealedCheckpointIO, "remove_checkpoint", watched_remove)
        io = AsyncCheckpointIO() if asynchronous else None
        strategy = CustomDDPStrategy(checkpoint_io=io)
        run = fit(Model(), epochs=4, strategy=strategy, callbacks=[saving], enable_checkpointing=True)
    if run.is_global_zero:
        assert len(least) > 4
        assert min(least) >= 1
        names = {path.name for path in tmp_path.iterdir()}
        assert Path(saving.best_model_path).name in names
        assert len(names) == settings.get("save_top_k", 1) + bool(settings.get("save_last"))


class WrappingIO(_WrappingCheckpointIO):
    """Hands everything on."""


@pytest.mark.parametrize("wrapped", [False, True])
@ranks(1, init=False)
def test_a_save_that_failed_in_the_background_keeps_the_old_one(wrapped: bool, tmp_path: Path) -> None:
    io = AsyncCheckpointIO()
    run = fit(Model(), epochs=1, strategy=CustomDDPStrategy(checkpoint_io=WrappingIO(io) if wrapped else io))
    run.save_checkpoint(tmp_path / "old.ckpt")
    with contextlib.suppress(DDPPluginError):  # it may fail before the call returns
        io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "new.ckpt")
    run.strategy.remove_checkpoint(tmp_path / "old.ckpt")
    with pytest.raises(DDPPluginError, match=r"new\.ckpt\. Got TypeError: .*pickle"):
        io.teardown()
    assert verify(tmp_path / "old.ckpt") is not None
    io._error = None
    run.strategy.remove_checkpoint(tmp_path / "old.ckpt")
    assert list(tmp_path.iterdir()) == []
    with contextlib.suppress(DDPPluginError):  # it may fail before the call returns
        io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "new.ckpt")
    io._executor.submit(int).result()  # type: ignore[union-attr]
    with pytest.raises(DDPPluginError, match=r"new\.ckpt\. Got TypeError"):
        run.save_checkpoint(tmp_path / "a.ckpt")
    run.save_checkpoint(tmp_path / "b.ckpt")  # it is not said twice
    run.strategy.finish_saves()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt"]


class SavesOutside(pl.Callback):
    """Saves where no training goes on that would wait for the file at its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.told = path, list[str]()

    def save(self, trainer: pl.Trainer, *_: Any) -> None:
        with pytest.raises(DDPPluginError, match="No space left on device") as caught:
            trainer.save_checkpoint(self.path)
        self.told.append(str(caught.value))

    on_fit_end = on_validation_end = save


@ranks(2, init=False)
def test_a_save_outside_a_training_is_waited_for(tmp_path: Path) -> None:
    def fails(*_: Any) -> None:
        time.sleep(0.1)
        raise OSError(errno.ENOSPC, "No space left on device")

    saves = SavesOutside(tmp_path / "a.ckpt")
    run = trainer(strategy=CustomDDPStrategy(checkpoint_io=AsyncCheckpointIO()), callbacks=[saves])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_io, "write", fails)
        model = Model()
        run.fit(model, data())
        run.validate(model, data(), verbose=False)
        saves.save(run)
        assert len(saves.told) == 3
        run.state.status = "interrupted"
        if run.is_global_zero:  # nobody waits for the others then
            with pytest.raises(DDPPluginError, match="No space left on device"):
                run.strategy.save_checkpoint({}, tmp_path / "b.ckpt")
    assert len(set(gather_objects(tuple(saves.told), process_group.control_group()))) == 1


class FillsTheDisk(pl.Callback):
    """Takes all room after a step, and lets nothing be written in the background until others, or all, are done."""

    def __init__(self, path: Path, step: int, until: int) -> None:
        self.path, self.step, self.until, self.may_write = path, step, until, threading.Event()
        self.may_write.set()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            _compat.finish_saves(trainer.strategy.checkpoint_io)
            self.may_write.clear()
            with contextlib.suppress(OSError), open(self.path, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if trainer.global_step == self.until:
            self.may_write.set()

    def on_train_end(self, *_: Any) -> None:
        self.may_write.set()


@pytest.mark.parametrize("num_steps", [3, 9])
def test_a_disk_that_fills_up_while_it_is_written_in_the_background(small_disk: Path, num_steps: int) -> None:
    run_ranks(fill_the_disk_in_the_background, 2, init=False, folder=small_disk, num_steps=num_steps)


def fill_the_disk_in_the_background(folder: Path, num_steps: int) -> None:
    """Noticed at a later save, or at the end of the fit: on all ranks, with the path of the file that failed."""
    fills = FillsTheDisk(folder / "filler", 2, until=4)

    class Waits(SealedCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            fills.may_write.wait()
            super().save_checkpoint(*args, **kwargs)

    io = AsyncCheckpointIO(Waits())
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run = trainer(
        strategy=CustomDDPStrategy(checkpoint_io=io),
        callbacks=[fills, saving],
        max_epochs=-1,
        max_steps=num_steps,
        enable_checkpointing=True,
    )
    with pytest.raises(DDPPluginError) as caught:
        run.fit(Model(), data())
    texts = gather_objects(str(caught.value), process_group.control_group())
    assert len(set(texts)) == 1
    for words in (f"{folder}/step=", "No space left on device", "bytes are free", "is as it was"):
        assert words in texts[1]
    assert "step=1.ckpt" not in texts[1]
    assert run.global_step <= num_steps
    assert verify(folder / "step=1.ckpt") is not None
    assert sorted(os.listdir(folder)) == ["filler", "step=1.ckpt"]


@ranks(1, init=False)
def test_a_failed_save_does_not_take_the_place_of_what_ended_the_run(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            with contextlib.suppress(DDPPluginError):  # it may fail before the call returns
                trainer.strategy.checkpoint_io.save_checkpoint({"lock": threading.Lock()}, tmp_path / "new.ckpt")
            raise KeyError("the user's own")

    said = logging.handlers.BufferingHandler(9)
    logging.getLogger(checkpoint_io.__name__).addHandler(said)
    with pytest.raises(KeyError, match="the user's own"):
        fit(Model(), epochs=1, strategy=CustomDDPStrategy(checkpoint_io=AsyncCheckpointIO()), callbacks=[Fails()])
    texts = [record.getMessage() for record in said.buffer]
    assert [f"{tmp_path}/new.ckpt. Got TypeError" in text for text in texts] == [True]


@ranks(2, init=False)
def test_after_an_exception_of_one_rank_nobody_waits_for_the_others(tmp_path: Path) -> None:
    run = fit(Model(), epochs=1)
    if run.is_global_zero:
        run.state.status = "interrupted"  # as Lightning sets it before on_exception
        run.strategy.save_checkpoint(run._checkpoint_connector.dump_checkpoint(), tmp_path / "a.ckpt")
        assert verify(tmp_path / "a.ckpt") is not None
        with pytest.raises(DDPPluginError, match="IsADirectoryError"):
            run.strategy.save_checkpoint({}, tmp_path)
