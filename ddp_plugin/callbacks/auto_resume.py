"""A run that is started again goes on where it was, without being told from which file."""

import functools
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import control_group_of
from ddp_plugin.checkpoints import newest_checkpoint
from ddp_plugin.checkpoints.files import remove_leftovers
from ddp_plugin.checkpoints.finding import folders_below
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import broadcast_object

__all__ = ["AutoResume"]


class AutoResume(pl.Callback):
    """Continues a fit from the newest complete checkpoint below a folder, or begins a new run where there is none.

    Meant for programs that are started again with the same command line: by ``torchrun --max-restarts``, by a job
    queue, by hand. Torn files are passed over, each with a sentence; see
    :func:`ddp_plugin.checkpoints.newest_checkpoint`. Rank 0 looks once the processes have found each other, and all
    take its answer, so ranks whose file systems lag behind, or that have no such file, cannot disagree. What is found,
    or that nothing is, is said with its step. What earlier runs that were killed in a save have left in those folders
    is removed; see :func:`ddp_plugin.checkpoints.files.remove_leftovers`. ``fast_dev_run`` begins anew.

    A checkpoint given to ``trainer.fit(ckpt_path=...)`` comes first. That of a requeued SLURM job, which Lightning
    takes by itself, is one of those among which the newest is looked for. Other runs' checkpoints do not belong into
    the folder: the newest is taken, whoever wrote it.

    Args:
        folder: where to look, with all folders below; ``None`` for the Trainer's ``default_root_dir``, below which
            Lightning's ``version_N`` folders lie.

    Attributes:
        step: the optimizer step of the checkpoint that the last fit began with, by whatever way it was given; ``None``
            for a new run.

    Raises:
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        DDPPluginError: on all ranks, the folder cannot be read on rank 0, or a later version of this package wrote its
            newest checkpoint.

    Collectives:
        Two broadcasts over the control group at the start of a fit, on all ranks.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self.step: int | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to be asked which checkpoint is restored."""
        if stage != "fit":
            return
        self.step = None
        group = control_group_of(self, trainer)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # it tries the code, and has to end after a few steps
            return
        _compat.choose_checkpoint(
            trainer, functools.partial(self._choose, self.folder or trainer.default_root_dir, group)
        )

    def _choose(self, folder: str, group: dist.ProcessGroup | None, requeued: str | None) -> str | None:
        found: str | None = None
        problem = ""
        if group is None or dist.get_rank(group) == 0:
            try:
                if requeued is not None and "://" in requeued:  # nothing here compares with it
                    found = requeued
                elif (path := newest_checkpoint(folder, [] if requeued is None else [requeued])) is not None:
                    found = str(path)
                for each in folders_below(folder):
                    remove_leftovers(each)
            except (OSError, ValueError, DDPPluginError) as error:
                problem = str(error)
        found, problem = broadcast_object((found, problem), group)
        if problem:
            raise DDPPluginError(
                explain(f"a folder of checkpoints at {folder}", problem, "Correct the folder of AutoResume")
            )
        if found is None:
            rank_zero_info(f"AutoResume: there is no complete checkpoint in {folder}; a new run begins.")
        return found

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Says where the run goes on."""
        if trainer.state.fn == "fit":
            self.step = int(checkpoint["global_step"])
            rank_zero_info(
                f"AutoResume: goes on at step {self.step} of epoch {checkpoint['epoch']}, from {trainer.ckpt_path}."
            )
