"""Evaluation to the last sample: each one exactly once, the same metrics as one process, on any number of ranks."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.callbacks._sharing import share_or_keep_in_step
from ddp_plugin.callbacks._shell import framework_attributes, transform_loaders
from ddp_plugin.data.loaders import shared_part
from ddp_plugin.data.lockstep import LockstepLoader
from ddp_plugin.data.sampling import ExactBatchSampler
from ddp_plugin.errors import DDPPluginError, EvaluationMismatchError, explain
from ddp_plugin.evaluation import EvaluationRecord, combine_logged
from ddp_plugin.gather import gather_objects, gather_tensors
from ddp_plugin.ghost import ModuleSnapshot, metrics_of

__all__ = ["ExactEvaluation"]

_STAGES = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


class ExactEvaluation(pl.Callback):
    """Validation and test give one process's numbers on any number of ranks, alone and inside ``fit``.

    Whole batches of the loader's own order are shared out, so each sample is evaluated exactly once, in the batch in
    which one process would see it. Ranks take the same number of steps; a rank without a batch left repeats one, and
    that *ghost step* leaves no trace in what is logged, in torchmetrics objects or in the module's own plain
    attributes.

    What ``self.log`` is given in a step is reduced over the samples of all ranks, in float64 and in one message for all
    keys, whether or not ``sync_dist`` was set (``rank_zero_only=True`` is left alone); a key that only some ranks
    logged counts where it was logged, as in one process. What is logged in ``on_validation_epoch_end`` is left as it
    is. torchmetrics objects are gathered exactly, also where ranks made different numbers of updates.

    ``limit_val_batches`` and its like count steps on each rank, as in Lightning: the first ``limit * world_size``
    batches are evaluated. ``drop_last`` drops what it drops in one process. Iterable datasets, loaders that are no
    DataLoader and, with ``use_distributed_sampler=False``, all loaders but those with torch's own
    ``DistributedSampler`` are taken as each rank delivers them, and only kept in step.

    Attributes:
        records: one :class:`~ddp_plugin.evaluation.EvaluationRecord` per shared-out loader of the latest evaluation.
        is_ghost_step: whether the step that runs now is a ghost; ask it where a step has effects outside the module.

    Raises:
        TypeError: in ``setup``, when several processes run under another strategy.
        EvaluationMismatchError: on all ranks, when not every planned sample was evaluated exactly once.
        DDPPluginError: on all ranks, when the ranks logged different torchmetrics objects.

    Collectives:
        On the control group: one object gather per loader and evaluation for what was logged, and one for the audit;
        for loaders whose order may be random a broadcast of the order and a gather of a flag. A torchmetrics object
        costs one object gather there and one all-gather of its states when it is computed. None per step, except for
        loaders that are only kept in step: one all-reduce of an integer.
    """

    def __init__(self) -> None:
        self.records: list[EvaluationRecord] = []
        self.is_ghost_step = False
        self._group: dist.ProcessGroup | None = None
        self._trainer: pl.Trainer | None = None
        self._announced: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._parts: list[ExactBatchSampler | LockstepLoader | None] = []
        self._side_by_side = False
        self._tallies: list[list[int]] = []  # for each loader: samples, batches, sum of fingerprints
        self._logged: _compat.LoggedValues | None = None
        self._release_metrics: Callable[[], None] | None = None
        self._before_ghost: list[Callable[[], None]] = []
        self._due = False

    # ---------------------------------------------------------------------------------------------- before the loaders

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks the strategy for every evaluation loader, and Lightning to leave them as the user made them."""
        self._group = transform_loaders(self, trainer, self._share)
        self._trainer = trainer
        if _compat.uses_distributed_sampler(trainer):
            _compat.keep_user_loaders(trainer, _STAGES)

    def _share(self, loader: object, stage: RunningStage) -> object:
        if self._trainer is None or stage not in _STAGES:
            return loader
        return share_or_keep_in_step(loader, self._trainer, self._group)

    # ------------------------------------------------------------------------------------------------ one evaluation

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins an evaluation."""
        self._release()
        loop = _compat.evaluation_loop(trainer)
        loaders, mode = _compat.loaders_of(loop)
        self._parts = [loader if isinstance(loader, LockstepLoader) else shared_part(loader) for loader in loaders]
        self._side_by_side = mode != "sequential"
        if trainer.world_size > 1:
            self._refuse_what_cannot_be_shared(mode, takes_iterator=_compat.takes_iterator(loop))
        elif self._side_by_side or _compat.takes_iterator(loop):
            self._parts = [None for _ in loaders]  # one process: nothing is shared out, and the loop may end early
        self._tallies = [[0, 0, 0] for _ in loaders]
        self._logged = _compat.LoggedValues(loop)
        self._logged.on_epoch_metrics(lambda: self._reduce_logged(pl_module))
        self._release_metrics = _compat.sync_metrics_exactly(self._gather)

    def _refuse_what_cannot_be_shared(self, mode: str, *, takes_iterator: bool) -> None:
        """A step must be told its batch; and loaders read side by side must be shared out alike, to stay paired."""
        if takes_iterator:
            raise ValueError(
                explain(
                    "a step that takes its batch, because a rank without one must be told to leave no trace",
                    "a step that takes dataloader_iter",
                    "Take (batch, batch_idx) in validation_step and test_step, or leave ExactEvaluation out",
                )
            )
        if not self._side_by_side:
            return
        batches = [part.num_batches if isinstance(part, ExactBatchSampler) else None for part in self._parts]
        if len(batches) > 1 and (None in batches or len(set(batches)) > 1):
            raise ValueError(
                explain(
                    f"evaluation loaders with equal numbers of batches in a CombinedLoader(mode={mode!r})",
                    f"{batches} batches",
                    "Use mode='sequential' (pass a list of loaders), or make their lengths equal",
                )
            )

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Takes back the ghost step before, and remembers the state if this is one."""
        self._end_ghost_step()
        if self._logged is None:
            return
        self._due = True
        part = self._parts[dataloader_idx]
        if part is not None and part.is_ghost(batch_idx):
            logged, values = self._logged, self._logged.snapshot()
            snapshot = ModuleSnapshot(pl_module, list(logged.metric_objects().values()), ignore=framework_attributes())
            self.is_ghost_step = True
            self._before_ghost = [snapshot.restore, lambda: logged.restore(values)]

    def _end_ghost_step(self) -> None:
        restores, self._before_ghost, self.is_ghost_step = self._before_ghost, [], False
        for restore in restores:
            restore()

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts the batch if it was a real one."""
        read_now = slice(None) if self._side_by_side else slice(dataloader_idx, dataloader_idx + 1)
        for part, tally in zip(self._parts[read_now], self._tallies[read_now], strict=True):
            if isinstance(part, ExactBatchSampler) and not part.is_ghost(batch_idx):
                tally[0] += len(part.indices(batch_idx))
                tally[1] += 1
                tally[2] = (tally[2] + part.fingerprint(batch_idx)) % 2**64

    # ----------------------------------------------------------------------------------------------- what was logged

    def _reduce_logged(self, module: pl.LightningModule) -> None:
        """Runs once for each loader, right before Lightning computes its epoch-level values."""
        self._end_ghost_step()
        if self._logged is None or not self._due:
            return
        self._due = False
        for metric in {*metrics_of(module), *self._logged.metric_objects().values()}:
            _compat.forget_computed(metric)
        parts = gather_objects((self._logged.pending(), list(self._logged.metric_objects())), self._group)
        if any(metric_keys != parts[0][1] for _, metric_keys in parts):
            raise DDPPluginError(
                explain(
                    "every rank to log the same torchmetrics objects in the same order",
                    "; ".join(f"{keys} on rank {rank}" for rank, (_, keys) in enumerate(parts)),
                    "Log metric objects unconditionally; plain values may be logged on some ranks only",
                )
            )
        for key in dict.fromkeys(key for values, _ in parts for key in values):
            logged = [values[key] for values, _ in parts if key in values]
            reduction, _, _, settings = logged[0]
            value = combine_logged(reduction, [(part_value, weight) for _, part_value, weight, _ in logged])
            self._logged.resolve(key, value, settings, module.device)

    def _gather(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        return gather_tensors(tensors, _compat.default_group(), self._group)

    # ---------------------------------------------------------------------------------------------------- the audit

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Audits the evaluation and ends it."""
        if self._logged is None:
            return
        stage = str(trainer.state.stage.value) if trainer.state.stage is not None else "?"
        same = any(isinstance(part, LockstepLoader) and part.delivers_the_same for part in self._parts)
        reports = gather_objects((self._tallies, same), self._group)
        self.records = []
        for index, part in enumerate(self._parts):
            if isinstance(part, ExactBatchSampler):
                self.records.append(_audit(stage, index, part, [tallies[index] for tallies, _ in reports]))
        self._release()
        if any(same for _, same in reports):
            rank_zero_warn(
                f"ExactEvaluation: some ranks' {stage} loaders began with the same batch. Loaders that are iterable, "
                "or that use_distributed_sampler=False keeps as they are, are evaluated as the ranks deliver them, so "
                "these samples counted once for each rank; let each rank deliver its own part."
            )
        for record in self.records:
            line = "ExactEvaluation: " + record.describe(trainer.world_size)
            is_news = trainer.state.fn != "fit" or line not in self._announced
            if is_news and not trainer.sanity_checking:
                self._announced.add(line)
                rank_zero_info(line)

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    def _release(self) -> None:
        self._end_ghost_step()
        if self._logged is not None:
            self._logged.release()
        if self._release_metrics is not None:
            self._release_metrics()
        self._forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Takes the interceptions out, so that the module and the Trainer stay usable."""
        self._release()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the Trainer."""
        self._release()
        self._trainer = self._group = None


def _audit(stage: str, index: int, part: ExactBatchSampler, tallies: list[list[int]]) -> EvaluationRecord:
    num_samples, num_batches, order_hash = (sum(column) for column in zip(*tallies, strict=True))
    if (num_samples, num_batches) != (part.num_samples_planned, part.share.num_batches):
        raise EvaluationMismatchError(
            explain(
                f"{part.num_samples_planned} samples in {part.share.num_batches} batches from {stage} loader {index}",
                f"{num_samples} samples in {num_batches} batches",
                "Something ended the evaluation early or read the loader on its own, so its metrics are not exact",
            )
        )
    drop_last, batch_size = getattr(part, "drop_last", False), getattr(part, "batch_size", None)
    dropped = len(part.sampler) % batch_size if drop_last and batch_size and hasattr(part.sampler, "__len__") else 0
    return EvaluationRecord(
        stage=stage,
        dataloader_idx=index,
        num_samples=num_samples,
        num_batches=num_batches,
        num_steps=part.share.num_steps,
        num_ghost_steps=part.share.num_steps * part.world_size - num_batches,
        num_batches_left_out=part.num_batches_left_out,
        num_samples_dropped=dropped,
        order_hash=order_hash % 2**64,
    )
