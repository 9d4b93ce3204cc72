"""Predictions of all ranks in one order, each sample once."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.callbacks._sharing import share_or_keep_in_step
from ddp_plugin.callbacks._shell import DataParallelStrategy, require_strategy
from ddp_plugin.errors import EvaluationMismatchError, explain
from ddp_plugin.gather import gather_objects, gather_objects_to
from ddp_plugin.loaders import replaced, shared_part
from ddp_plugin.lockstep import LockstepLoader
from ddp_plugin.predictions import Predictions, PredictionWriter
from ddp_plugin.sampling import ExactBatchSampler

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
        self._strategy: DataParallelStrategy | None = None
        self._trainer: pl.Trainer | None = None
        self._own: list[Predictions] = []
        self._writer: PredictionWriter | None = None
        self._parts: list[ExactBatchSampler | LockstepLoader | None] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the strategy for every prediction loader, and Lightning to leave them as the user made them."""
        if stage != "predict":
            return
        self._strategy = require_strategy(self, trainer)
        if self._strategy is None:
            return
        self._trainer = trainer
        self._strategy.add_dataloader_transform(self._share)
        _compat.keep_user_loaders(trainer, [RunningStage.PREDICTING])
        if self.output_dir is not None:
            self._refuse_used_folder(self.output_dir, self._strategy)

    @staticmethod
    def _refuse_used_folder(folder: str, strategy: DataParallelStrategy) -> None:
        try:
            PredictionWriter.refuse_used_folder(folder)
            problem = None
        except FileExistsError as error:
            problem = str(error)
        problems = [text for text in gather_objects(problem, strategy.control_group) if text]
        if problems:
            raise FileExistsError(problems[0])

    def _share(self, loader: object, stage: RunningStage) -> object:
        if self._trainer is None or self._strategy is None or stage is not RunningStage.PREDICTING:
            return loader
        loader = share_or_keep_in_step(loader, self._trainer, self._strategy.control_group)
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
        if self._strategy is None:
            self.predictions, self._own = self._own, []
            return
        if self._writer is not None:
            self._complete_files(self._writer, self._strategy)
            return
        self.predictions = [self._gathered(own, self._strategy) for own in self._own]
        self._own = []
        self._check(sum(len(part.outputs) for part in self.predictions), self._strategy, gathered=True)
        if trainer.predict_loop.return_predictions:
            _compat.set_predictions(trainer, [part.outputs for part in self.predictions])

    def _gathered(self, own: Predictions, strategy: DataParallelStrategy) -> Predictions:
        group = strategy.control_group
        destination = 0 if self.destination == "rank_zero" else None
        num_rounds = max(gather_objects(-(-len(own.outputs) // self.chunk_size), group))
        by_rank: list[Predictions] = [Predictions() for _ in range(group.size())]
        for first in range(0, num_rounds * self.chunk_size, self.chunk_size):
            chunk = slice(first, first + self.chunk_size)
            received = gather_objects_to((own.indices[chunk], own.outputs[chunk]), group, destination)
            for rank, (indices, outputs) in enumerate(received):
                by_rank[rank].indices += indices
                by_rank[rank].outputs += outputs
        return Predictions(
            [indices for part in by_rank for indices in part.indices],  # blocks in rank order: the loader's order
            [output for part in by_rank for output in part.outputs],
        )

    def _complete_files(self, writer: PredictionWriter, strategy: DataParallelStrategy) -> None:
        assert self.output_dir is not None
        assert self._trainer is not None
        writer.flush()
        reports = gather_objects((writer.files, writer.num_batches), strategy.control_group)
        self._check(sum(count for _, count in reports), strategy, gathered=False)
        if self._trainer.global_rank == 0:
            PredictionWriter.write_manifest(
                self.output_dir, [files for files, _ in reports], sum(count for _, count in reports)
            )
        gather_objects(None, strategy.control_group)  # nobody returns before the manifest is there

    def _check(self, num_batches: int, strategy: DataParallelStrategy, *, gathered: bool) -> None:
        """Compares the number of batches with the plan; a rank that received nothing has nothing to say."""
        own = [part.share.num_batches for part in self._parts if isinstance(part, ExactBatchSampler)]
        receives = not gathered or self.destination == "all" or self._trainer is None or self._trainer.global_rank == 0
        wrong = receives and len(own) == len(self._parts) and num_batches != sum(own)
        if any(gather_objects(wrong, strategy.control_group)):
            raise EvaluationMismatchError(
                explain(
                    f"predictions for {sum(own)} batches",
                    f"{num_batches}",
                    "Something ended the prediction early or read the loader on its own",
                )
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the Trainer."""
        self._trainer = self._strategy = self._writer = None
        self._parts = []
