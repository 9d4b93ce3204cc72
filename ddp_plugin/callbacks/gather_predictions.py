"""Predictions of all ranks in one order, each sample once."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.callbacks._sharing import share_or_keep_in_step
from ddp_plugin.callbacks._shell import framework_attributes, transform_loaders
from ddp_plugin.data.loaders import replaced, shared_part
from ddp_plugin.data.lockstep import LockstepLoader
from ddp_plugin.data.sampling import ExactBatchSampler
from ddp_plugin.errors import EvaluationMismatchError, explain
from ddp_plugin.gather import gather_objects, gather_objects_to
from ddp_plugin.ghost import ModuleSnapshot
from ddp_plugin.predictions import Predictions, PredictionWriter

__all__ = ["GatherPredictions"]


class GatherPredictions(pl.Callback):
    """``trainer.predict`` returns what one process would return: every batch once, in the loader's order.

    Outputs may be any nesting of tensors, numbers and strings. Batches are shared out whole, as in
    :class:`~ddp_plugin.ExactEvaluation`; a rank without a batch left takes ghost steps, whose outputs are dropped.

    Args:
        destination: ``"rank_zero"`` or ``"all"``: who gets the predictions. Other ranks' ``predict`` returns ``[]``.
        output_dir: stream to files in this folder instead, for predictions that do not fit in memory; nothing is
            gathered then, ``predict`` returns ``None``, and :func:`ddp_plugin.read_predictions` reads them in order.
            All nodes must see the folder. It is refused, before predicting, if it holds predictions already.
        chunk_size: batches per gathered message, and per file.

    Attributes:
        predictions: one :class:`~ddp_plugin.predictions.Predictions` per loader where they were gathered to;
            ``predictions[0].samples()`` gives one output per sample, in dataset order.

    Raises:
        ValueError: an unknown destination or a chunk size below 1, at construction.
        FileExistsError: on all ranks, if ``output_dir`` holds predictions already.
        EvaluationMismatchError: on all ranks, if not every batch arrived.

    Collectives:
        On the control group, at the end: object gathers of ``chunk_size`` batches at a time; with ``output_dir`` one
        object gather of file names. One broadcast of the order where it may be random.
    """

    def __init__(self, destination: str = "rank_zero", output_dir: str | None = None, chunk_size: int = 64) -> None:
        if destination not in ("rank_zero", "all"):
            raise ValueError(explain("destination='rank_zero' or 'all'", repr(destination), "Choose one of these"))
        if chunk_size < 1:
            raise ValueError(explain("a chunk_size of at least 1", repr(chunk_size), "Raise it"))
        self.destination = destination
        self.output_dir = output_dir
        self.chunk_size = chunk_size
        self.predictions: list[Predictions] = []
        self._group: dist.ProcessGroup | None = None
        self._trainer: pl.Trainer | None = None
        self._own: list[Predictions] = []
        self._writer: PredictionWriter | None = None
        self._before_ghost: ModuleSnapshot | None = None
        self._parts: list[ExactBatchSampler | LockstepLoader | None] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the strategy for every prediction loader, and Lightning to leave them as the user made them."""
        if stage != "predict":
            return
        self._group = transform_loaders(self, trainer, self._share)
        self._trainer = trainer
        _compat.keep_user_loaders(trainer, [RunningStage.PREDICTING])
        self._refuse_what_would_be_lost(trainer)
        if self.output_dir is not None:
            problems = gather_objects(PredictionWriter.used_files(self.output_dir), self._group)
            if used := next(filter(None, problems), None):
                raise FileExistsError(
                    explain(
                        f"no predictions in {self.output_dir!r} yet", f"{used}", "Choose another folder, or empty it"
                    )
                )

    def _refuse_what_would_be_lost(self, trainer: pl.Trainer) -> None:
        if self.output_dir is None and _compat.leaves_processes(trainer):
            raise ValueError(
                explain(
                    "output_dir=, because the spawn and fork launchers' processes end with the run",
                    "GatherPredictions() without it",
                    "Pass GatherPredictions(output_dir=...), or use the default start_method='popen'",
                )
            )
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        early = callbacks[: callbacks.index(self)]
        if any(isinstance(other, BasePredictionWriter) and other.interval.on_epoch for other in early):
            raise ValueError(
                explain(
                    "GatherPredictions before a prediction writer that writes at the epoch's end",
                    f"{[type(other).__name__ for other in (*early, self)]}",
                    "Put GatherPredictions first in the Trainer's list of callbacks",
                )
            )

    def _share(self, loader: object, stage: RunningStage) -> object:
        if self._trainer is None or stage is not RunningStage.PREDICTING:
            return loader
        loader = share_or_keep_in_step(loader, self._trainer, self._group)
        part = shared_part(loader)
        if part is not None and getattr(loader, "batch_sampler", None) is part:
            # Lightning's prediction writers look for the indices in this wrapper.
            return replaced(loader, batch_sampler=_compat.index_tracking(part))  # type: ignore[arg-type]
        return loader

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepares an empty place for each loader."""
        loaders, _ = _compat.loaders_of(trainer.predict_loop)
        self._parts = [loader if isinstance(loader, LockstepLoader) else shared_part(loader) for loader in loaders]
        self._own = [Predictions() for _ in loaders]
        self.predictions = []
        if self.output_dir is not None:
            self._writer = PredictionWriter(self.output_dir, trainer.global_rank, self.chunk_size)
            trainer.predict_loop.return_predictions = False  # or Lightning would keep them all in memory

    def on_predict_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Takes back the ghost step before, and remembers the module if this is one."""
        self._end_ghost_step()
        part = self._parts[dataloader_idx]
        if part is not None and part.is_ghost(batch_idx):
            self._before_ghost = ModuleSnapshot(pl_module, [], ignore=framework_attributes())

    def _end_ghost_step(self) -> None:
        before, self._before_ghost = self._before_ghost, None
        if before is not None:
            before.restore()

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps or writes the outputs of a real batch."""
        part = self._parts[dataloader_idx]
        if part is not None and part.is_ghost(batch_idx):
            return
        indices = list(part.indices(batch_idx)) if isinstance(part, ExactBatchSampler) else []
        outputs = move_data_to_device(outputs, torch.device("cpu"))
        if self._writer is not None:
            self._writer.add(dataloader_idx, indices, outputs)
        else:
            self._own[dataloader_idx].indices.append(indices)
            self._own[dataloader_idx].outputs.append(outputs)

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gathers, or completes the files."""
        self._end_ghost_step()
        if self._writer is not None:
            self._complete_files(self._writer, trainer.global_rank)
            return
        counts = gather_objects([len(own.outputs) for own in self._own], self._group)
        self._require_all(sum(map(sum, counts)))
        self.predictions = [
            self._gathered(own, max(count[index] for count in counts)) for index, own in enumerate(self._own)
        ]
        self._own = []
        if trainer.predict_loop.return_predictions:
            outputs = [part.outputs for part in self.predictions]
            _compat.set_predictions(trainer, outputs, [part.indices for part in self.predictions])

    def _gathered(self, own: Predictions, most_batches: int) -> Predictions:
        destination = 0 if self.destination == "rank_zero" else None
        by_rank: list[Predictions] = []
        for first in range(0, most_batches, self.chunk_size):
            chunk = slice(first, first + self.chunk_size)
            received = gather_objects_to((own.indices[chunk], own.outputs[chunk]), self._group, destination)
            by_rank = by_rank or [Predictions() for _ in received]
            for part, (indices, outputs) in zip(by_rank, received, strict=True):
                part.indices += indices
                part.outputs += outputs
        return Predictions(
            [indices for part in by_rank for indices in part.indices],  # blocks in rank order: the loader's order
            [output for part in by_rank for output in part.outputs],
        )

    def _complete_files(self, writer: PredictionWriter, rank: int) -> None:
        writer.flush()
        reports = gather_objects((writer.files, writer.num_batches), self._group)
        num_batches = sum(count for _, count in reports)
        self._require_all(num_batches)
        if rank == 0:
            writer.write_manifest([files for files, _ in reports], num_batches)
        gather_objects(None, self._group)  # nobody returns before the manifest is there

    def _require_all(self, num_batches: int) -> None:
        """Compares the number of batches of all ranks with the plan; every rank knows both, so all raise alike."""
        planned = [part.share.num_batches for part in self._parts if isinstance(part, ExactBatchSampler)]
        if len(planned) == len(self._parts) and num_batches != sum(planned):
            raise EvaluationMismatchError(
                explain(
                    f"predictions for {sum(planned)} batches",
                    f"{num_batches}",
                    "Something ended the prediction early or read the loader on its own",
                )
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the Trainer."""
        self._trainer = self._group = self._writer = None
        self._parts = []
