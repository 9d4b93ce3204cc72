"""What writing a checkpoint whole, hashed and flushed costs, and reading it once for all ranks."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from ddp_plugin.checkpoints import read
from ddp_plugin.strategy.checkpoint_io import SealedCheckpointIO
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row

__all__ = ["rows", "time_files"]

_SAVES = ("Lightning's save", "SealedCheckpointIO's save")
_LOADS = ("Lightning's load", "one load for all ranks")


def time_files(num_mib: int, num_rounds: int) -> Times:
    """Returns the seconds of a save and of a load, Lightning's and this package's, of the same weights.

    Rank 0 saves; each rank loads. Lightning's save does not flush to the disk, the other one does.

    Args:
        num_mib: size of the weights in MiB, in tensors of 1 MiB each.
        num_rounds: how often.

    Collectives:
        Barriers, and those of :func:`ddp_plugin.checkpoints.read` with the default group, on all ranks.
    """
    weights = {str(index): torch.full((1 << 18,), float(index)) for index in range(num_mib)}
    checkpoint = {"global_step": 1, "epoch": 0, "state_dict": weights, "optimizer_states": []}
    with tempfile.TemporaryDirectory() as own:
        folder: list[Any] = [own]
        dist.broadcast_object_list(folder)  # rank 0's
        files = [str(Path(folder[0], name)) for name in ("lightning.ckpt", "sealed.ckpt")]
        if dist.get_rank() == 0:
            TorchCheckpointIO().save_checkpoint(checkpoint, files[0])
            SealedCheckpointIO().save_checkpoint(checkpoint, files[1])

        def saved(io: CheckpointIO, path: str) -> Callable[[], float]:
            return lambda: _elapsed_s(lambda: io.save_checkpoint(checkpoint, path) if dist.get_rank() == 0 else None)

        times = interleaved(
            {
                _SAVES[0]: saved(TorchCheckpointIO(), files[0]),
                _SAVES[1]: saved(SealedCheckpointIO(), files[1]),
                _LOADS[0]: lambda: _elapsed_s(lambda: TorchCheckpointIO().load_checkpoint(files[0])),
                _LOADS[1]: lambda: _elapsed_s(lambda: read(files[1], dist.group.WORLD)),
            },
            num_rounds,
        )
        dist.barrier()
    return times


def _elapsed_s(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def rows(times: Times) -> list[Row]:
    """Returns the report: what is this package's, by Lightning's."""
    section = "checkpoint / Lightning's"
    return [
        ratio_row(section, "save, hashed and flushed", times, _SAVES[1], _SAVES[0]),
        ratio_row(section, "load, read once for all ranks", times, _LOADS[1], _LOADS[0]),
    ]
