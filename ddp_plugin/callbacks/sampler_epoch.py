"""Training data in the user's own order, each sample where one process would see it, also after a resume."""

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import logical_shards, shards_of, transform_loaders
from ddp_plugin.callbacks.global_mean_loss import GlobalMeanLoss
from ddp_plugin.data.epochs import share_epoch, tell_epoch
from ddp_plugin.data.lockstep import StopTogetherLoader
from ddp_plugin.data.sharded_sampler import Position, ShardedBatchSampler
from ddp_plugin.data.sharding import LAST_BATCHES
from ddp_plugin.data.training_loader import shard_training_loader, sharded_part
from ddp_plugin.errors import counted, explain
from ddp_plugin.gather import broadcast_object
from ddp_plugin.ghost import metrics_of
from ddp_plugin.streams import stream_seed

__all__ = ["SamplerEpoch"]


class SamplerEpoch(pl.Callback):
    """Shares out the training data, tells everything in reach the epoch, and resumes in the middle of one.

    **The order is the user's.** Lightning puts its own sampler in the place of the user's; here the user's sampler is
    asked for its whole order, the same on all ranks, and each global batch of it is dealt out. So N ranks with batches
    of B train step by step on the samples that one process with a batch of N x B would train on. ``replacement``,
    ``num_samples``, weights and ``shuffle=False`` mean what they mean. A batch sampler of the user's own is dealt out
    by whole batches. A plain shuffle is that of torch's ``DistributedSampler``.

    **The epoch is told in time**, to every ``set_epoch`` that :func:`ddp_plugin.data.loaders.walk` finds in any leaf of
    a ``CombinedLoader``, once per epoch and object: before the first iterator is made, also after a resume, and in
    persistent workers before they fetch an epoch's first sample.

    **A checkpoint keeps the position in the epoch**, at any step. A resumed run goes on with the samples that were
    left, in the order they would have had, on any number of ranks. A checkpoint in the middle of an accumulation window
    resumes at the window's beginning, because the gradients of its first part are not in the checkpoint (running
    statistics of BatchNorm have seen that part twice then).

    **What is left alone is kept in step**: iterable datasets, iterables that are no ``DataLoader``, loaders that share
    themselves out (subclasses of ``DistributedSampler``), and under ``use_distributed_sampler=False`` all but those
    with torch's own ``DistributedSampler``. All ranks stop when one has no batch left, and what was dropped is said. On
    a resume on the same number of ranks their first batches are fetched and dropped; on another number it is refused.

    The seed of orders is ``PL_GLOBAL_SEED`` (``seed_everything``), else rank 0's global generator gives one; a resumed
    run takes the interrupted one's.

    Args:
        last_batch: what becomes of a last global batch that is not full: ``"pad"`` repeats samples until all ranks hold
            equally many, as torch's ``DistributedSampler`` does; ``"drop"`` leaves it out; ``"exact"`` trains on each
            sample once, with batches that differ by one sample between ranks, and needs
            :class:`~ddp_plugin.GlobalMeanLoss` to weigh them. A rank without any sample takes a *ghost step* then: it
            repeats a batch with weight zero, and what it logs for the epoch, and torchmetrics, are taken back.

    Attributes:
        is_ghost_step: whether the step that runs now is a ghost; ask it where a step has effects of another kind.

    Raises:
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        ValueError: an unknown ``last_batch``; at setup ``"exact"`` without :class:`~ddp_plugin.GlobalMeanLoss`; on all
            ranks, training data that is shared out already, or that is not the interrupted run's, or loaders of unequal
            ``batch_size`` or ``drop_last``.
        RuntimeError: when a ``set_epoch`` raises; the message names the object.

    Collectives:
        On the control group: at the start a broadcast of the seed and a gather of lengths per loader; per epoch one
        gather of a hash for orders that do not depend on seed and epoch alone. None per step, except for loaders that
        are only kept in step.
    """

    def __init__(self, last_batch: str = "pad") -> None:
        if last_batch not in LAST_BATCHES:
            raise ValueError(explain(f"last_batch to be one of {LAST_BATCHES}", repr(last_batch), "Choose one"))
        self.last_batch = last_batch
        self._trainer: pl.Trainer | None = None
        self._group: dist.ProcessGroup | None = None
        self._said: set[str] = set()
        self._quiet: Any = None  # a warnings.catch_warnings that is entered
        self._forget()

    def _forget(self) -> None:
        self._told_epoch: int | None = None  # what all leaves heard last; they are loaded, and told, together
        self._seed: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._prepared: tuple[Any, int] = (None, 0)  # when the loaders were made, how many
        self._skipped: set[int] = set()  # loaders, kept in step, whose iterator has been brought to the position
        self._resumed_at: tuple[int, int] = (-1, 0)  # epoch, batches that were done
        self._epoch_of_batch: int | None = None  # of the latest batch
        self._is_announced = True  # to a GradientAccumulationScheduler
        self._after_ghost: list[Callable[[], None]] = []
        self.is_ghost_step = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the loaders, as the user made them."""
        if stage != "fit":
            return
        self._forget()
        self._trainer = trainer
        self._group = transform_loaders(self, trainer, self._prepare)
        self._shards = shards_of(trainer)
        if self._has_ghosts:
            self._require_weights(trainer)
        if _compat.uses_distributed_sampler(trainer):
            _compat.keep_user_loaders(trainer, [RunningStage.TRAINING])

    def _require_weights(self, trainer: pl.Trainer) -> None:
        if not any(isinstance(callback, GlobalMeanLoss) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                explain(
                    "GlobalMeanLoss() among the callbacks, because last_batch='exact' gives ranks unequal batches",
                    "none",
                    "Add GlobalMeanLoss(), or choose last_batch='pad' or 'drop'",
                )
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the Trainer."""
        self._unquiet()
        self._trainer, self._after_ghost = None, []

    # ------------------------------------------------------------------------------------------------- the loaders

    def _prepare(self, loader: Any, stage: RunningStage) -> object:
        trainer = self._trainer
        if stage is not RunningStage.TRAINING or trainer is None:
            return loader
        self._reenter(trainer)
        epoch = _compat.train_epoch(trainer)
        making = (epoch, _compat.train_fetcher(trainer))
        index = self._prepared[1] if self._prepared[0] == making else 0
        self._prepared = (making, index + 1)
        if index > 0 and self._has_ghosts:
            raise ValueError(
                explain(
                    "one training loader beside last_batch='exact', because a batch of several has no one weight",
                    f"{index + 1} or more",
                    "Choose last_batch='pad' or 'drop'",
                )
            )
        self._order_seed()
        loader = share_epoch(loader)
        loader = self._share(loader, index, trainer)
        part = sharded_part(loader)
        if part is not None:
            part.resume(self._position(index))
        self._told_epoch = epoch
        tell_epoch(loader, epoch)
        if part is not None:
            part.draw_early()
        return loader

    def _share(self, loader: Any, index: int, trainer: pl.Trainer) -> Any:
        shared = shard_training_loader(
            loader,
            self._shards,
            self.last_batch,
            # Leaves of a CombinedLoader are not to be paired in the same way in each epoch.
            lambda: stream_seed(self._order_seed(), None, "leaf", batch=index) if index else self._order_seed(),
            lambda: _compat.train_epoch(trainer),
            self._group,
            only_torchs=trainer.world_size > 1 and not _compat.uses_distributed_sampler(trainer),
        )
        if shared is not None:
            self._describe(sharded_part(shared), index, trainer)
            return shared
        if self._shards.num_per_rank > 1 or logical_shards(trainer) is not None:
            raise ValueError(
                explain(
                    "a map-style training loader to deal out to logical shards",
                    f"{type(loader).__name__}, which is left as it is",
                    "Use a dataset with indices and let SamplerEpoch share it out, or leave logical_shards out",
                )
            )

        def report(num_delivered: int, has_more: list[bool]) -> None:
            ended, left = ([rank for rank, more in enumerate(has_more) if more is wanted] for wanted in (False, True))
            self._say(
                f"SamplerEpoch: training loader {index} ended after {counted(num_delivered, 'batch')} on every rank, "
                f"because ranks {ended} had no more; what ranks {left} had was dropped. Give the ranks equal parts."
            )

        kept = StopTogetherLoader(
            loader,
            self._group,
            lambda: self._num_skipped(loader, index),
            report,
            cycles=lambda: _compat.train_loaders_are_cycled(trainer),
        )
        if len(set(kept.lengths)) > 1 and None not in kept.lengths:
            self._say(
                f"SamplerEpoch: training loader {index} has {list(kept.lengths)} batches, by rank; every rank trains "
                f"on {min(kept.lengths)} of them per epoch and the rest is dropped. Give the ranks equal parts."
            )
        return kept

    def _describe(self, part: ShardedBatchSampler | None, index: int, trainer: pl.Trainer) -> None:
        plan = part.plan if part is not None else None
        if part is None or plan is None or self._shards.num_shards == 1:
            return
        what = "sample" if part.deals_samples else "batch"
        rest = f"; the last step repeats {counted(plan.num_repeated, what)} to be even" if plan.num_repeated else ""
        rest = f"; the last {counted(plan.num_dropped, what)} dropped" if plan.num_dropped else rest
        if plan.num_ghosts:
            rest = (
                f"; in the last step, {counted(plan.num_ghosts, 'rank')} without one of its own take part with weight 0"
            )
        limit = trainer.limit_train_batches
        limit = int(len(part) * limit) if isinstance(limit, float) else limit
        if limit < len(part):
            rest = f"; limit_train_batches ends each epoch after {limit} of the batches of each rank"
        line = (
            f"SamplerEpoch: training loader {index}: {counted(plan.num_items, what)} in "
            f"{counted(plan.num_steps, 'step')} of {plan.num_shards} x {plan.batch_size}{rest}."
        )
        if line not in self._said:
            self._said.add(line)
            rank_zero_info(line)

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            rank_zero_warn(line)

    def _order_seed(self) -> int:
        """Seed of orders; agreed on when the first loader is made, by which time other callbacks have set theirs up."""
        if self._seed is None:
            # Read, not drawn: whatever draws next gets what it would have got without this callback.
            state = torch.default_generator.get_state()
            drawn = int(torch.randint(2**31, (), generator=torch.default_generator))
            torch.default_generator.set_state(state)
            given = _global_seed()
            self._seed = broadcast_object(drawn if given is None else given, self._group)
        return self._seed

    # --------------------------------------------------------------------------------------------------- the epochs

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Takes up the position; makes the iterators anew if they were made for another epoch."""
        self._reenter(trainer)
        self._resume(trainer)
        if self._tell_all(trainer):
            for index, leaf in enumerate(_compat.loaders_of(trainer.fit_loop)[0]):
                if (part := sharded_part(leaf)) is not None:
                    part.resume(self._position(index))
            _compat.recreate_train_iterator(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells the epoch; Lightning makes the iterators of all but the first epoch after this."""
        self._tell_all(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Says once if ranks trained on the same data."""
        self._loaded = None  # loaders that are made later are not the ones that it describes
        for leaf in _compat.loaders_of(trainer.fit_loop)[0]:
            if isinstance(leaf, StopTogetherLoader) and leaf.delivers_the_same:
                self._say(
                    "SamplerEpoch: some ranks' training loaders began with the same batch. Loaders that are iterable, "
                    "or that use_distributed_sampler=False keeps as they are, are trained on as each rank delivers "
                    "them; let each rank deliver its own part, or every sample counts once for each rank."
                )

    def _tell_all(self, trainer: pl.Trainer) -> bool:
        """Tells all leaves the epoch unless they know it; returns whether they did not."""
        epoch = _compat.train_epoch(trainer)
        if epoch == self._told_epoch:
            return False
        self._told_epoch = epoch
        for leaf in _compat.loaders_of(trainer.fit_loop)[0]:
            tell_epoch(leaf, epoch)
        return True

    # ------------------------------------------------------------------------------------------------- the position

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed of orders and the position of every loader: plain numbers and tensors."""
        trainer = self._trainer
        if trainer is None or self._seed is None or self._told_epoch is None:
            return {} if self._seed is None else {"seed": self._seed}
        # Until an epoch has its first batch, Lightning's count is that of the epoch before.
        done = _compat.train_batches_done(trainer) if self._epoch_of_batch == self._told_epoch else 0
        is_complete = done >= trainer.num_training_batches or _compat.is_last_train_batch(trainer)
        is_complete = is_complete and done > 0
        if not is_complete and trainer.lightning_module.automatic_optimization:
            done -= done % trainer.accumulate_grad_batches  # the window's gradients so far are not saved
        before = self._resumed_at[1] if self._resumed_at[0] == self._told_epoch else 0
        parts = [sharded_part(leaf) for leaf in _compat.loaders_of(trainer.fit_loop)[0]]
        cycles = _compat.train_loaders_are_cycled(trainer)
        num_done = max(done - before, 0)
        positions = [None if part is None else part.position(num_done, cycles=cycles) for part in parts]
        return {
            "seed": self._seed,
            "epoch": self._told_epoch,
            "num_batches": done,
            "is_complete": is_complete,
            "world_size": trainer.world_size,
            "items_per_step": [self._items_per_step(part, trainer, self._told_epoch) for part in parts],
            "positions": [dataclasses.asdict(position) if position else None for position in positions],
        }

    def _items_per_step(self, part: ShardedBatchSampler | None, trainer: pl.Trainer, epoch: int) -> int | None:
        if part is None:
            return None
        accumulate = trainer.accumulate_grad_batches
        for scheduler in _accumulation_schedulers(trainer):
            accumulate = scheduler.get_accumulate_grad_batches(epoch)
        return part.items_per_batch * trainer.world_size * accumulate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the interrupted run's seed and position."""
        if self._trainer is None or "seed" not in state_dict:
            return
        self._loaded = state_dict
        self._seed = state_dict["seed"]
        given = _global_seed()
        if given is not None and given != self._seed:
            rank_zero_info(
                f"SamplerEpoch: orders follow seed {self._seed}, the checkpoint's, not PL_GLOBAL_SEED={given}."
            )

    def _position(self, index: int) -> Position | None:
        positions = (self._loaded or {}).get("positions", [])
        return Position(**positions[index]) if index < len(positions) and positions[index] else None

    def _reenter(self, trainer: pl.Trainer) -> None:
        """Goes back into the epoch if the interrupted run was stopped inside it, and Lightning counted it as over."""
        loaded = self._loaded or {}
        was_inside = loaded.get("num_batches", 0) > 0 and not loaded["is_complete"]
        if was_inside and trainer.fit_loop.is_resuming and loaded["epoch"] == _compat.train_epoch(trainer) - 1:
            _compat.reenter_train_epoch(trainer)

    def _resume(self, trainer: pl.Trainer) -> None:
        """Brings Lightning's count of batches to the position, in batches of this run's ranks."""
        loaded, epoch = self._loaded, _compat.train_epoch(trainer)
        if loaded is None or "epoch" not in loaded:
            return
        self._is_announced = False
        leaves, mode = _compat.loaders_of(trainer.fit_loop)
        parts = [sharded_part(leaf) for leaf in leaves]
        before, now = loaded["items_per_step"], [self._items_per_step(part, trainer, loaded["epoch"]) for part in parts]
        if before != now:
            self._say(
                f"SamplerEpoch: an optimizer step of the interrupted run held {before} samples (or batches) of each "
                f"training loader, one of this run holds {now}: learning rates and schedules meant the former. Keep "
                "ranks x batch size x accumulate_grad_batches to continue as it was."
            )
        if loaded["epoch"] != epoch:
            if loaded["is_complete"]:  # Lightning goes to the next epoch, but not always to its start
                _compat.set_train_batches_done(trainer, 0, in_total=False)
                trainer.fit_loop.reset_restart_stage()
            return
        done = loaded["num_batches"]
        if not loaded["is_complete"]:
            done = _batches_done(parts, epoch, mode, done)
        elif not math.isinf(trainer.num_training_batches):
            done = int(trainer.num_training_batches)
        self._resumed_at = (epoch, done)
        if done:
            rank_zero_info(f"SamplerEpoch: goes on in epoch {epoch} after {counted(done, 'batch')} of it on each rank.")
        _compat.set_train_batches_done(trainer, done)
        # Lightning warns that the loader is not resumable; it asks for methods that no DataLoader has.
        self._quiet = warnings.catch_warnings()
        self._quiet.__enter__()
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remembers what is logged if no sample of this step is this rank's, and lets Lightning warn again."""
        self._epoch_of_batch = self._told_epoch
        self._after_ghost, self.is_ghost_step = [], False
        self._unquiet()
        for scheduler in () if self._is_announced else _accumulation_schedulers(trainer):
            scheduler.on_train_epoch_start(trainer, pl_module)  # Lightning does not announce an epoch that is resumed
        self._is_announced = True
        parts = [sharded_part(leaf) for leaf in _compat.loaders_of(trainer.fit_loop)[0]] if self._has_ghosts else []
        index = trainer.fit_loop.epoch_loop.batch_idx
        if any(part is not None and part.is_ghost_train_batch(index) for part in parts):
            logged = _compat.LoggedValues(trainer.fit_loop)
            values = logged.snapshot()
            metrics = {*metrics_of(pl_module), *logged.metric_objects().values()}
            self.is_ghost_step = True
            self._after_ghost = [
                functools.partial(logged.restore, values, keep_new=True),
                *(functools.partial(_compat.restore_metric, m, _compat.metric_snapshot(m)) for m in metrics),
            ]

    def on_train_batch_end(self, *_: Any) -> None:
        """Takes back what a ghost step logged."""
        self._end_ghost_step()

    def _end_ghost_step(self) -> None:
        restores, self._after_ghost, self.is_ghost_step = self._after_ghost, [], False
        for restore in restores:
            restore()

    @property
    def _has_ghosts(self) -> bool:
        return self.last_batch == "exact" and self._shards.num_shards > 1

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Lets Lightning warn again."""
        self._unquiet()

    def _unquiet(self) -> None:
        if self._quiet is not None:
            self._quiet.__exit__(None, None, None)
            self._quiet = None

    def _num_skipped(self, loader: Any, index: int) -> int:
        """Batches that a loader which is only kept in step has to fetch and drop, once, to be at the position."""
        loaded, trainer = self._loaded, self._trainer
        is_resumed = loaded is not None and trainer is not None and loaded.get("epoch") == _compat.train_epoch(trainer)
        if not is_resumed or index in self._skipped or loaded is None or not loaded["num_batches"]:
            return 0
        self._skipped.add(index)
        if hasattr(loader, "load_state_dict"):  # Lightning brings those to their position
            return 0
        world_size = self._shards.num_shards
        if loaded["world_size"] != world_size:
            raise ValueError(
                explain(
                    f"{loaded['world_size']} ranks to go on in the middle of an epoch, because "
                    f"{type(loader).__name__} (training loader {index}) shares itself out",
                    f"{world_size} ranks",
                    "Resume on as many ranks, or from a checkpoint at an epoch's end; or let SamplerEpoch share out a "
                    "map-style dataset",
                )
            )
        return int(loaded["num_batches"])


def _accumulation_schedulers(trainer: pl.Trainer) -> list[GradientAccumulationScheduler]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)]


def _global_seed() -> int | None:
    given = os.environ.get("PL_GLOBAL_SEED")
    return None if given is None else int(given)


def _batches_done(parts: list[ShardedBatchSampler | None], epoch: int, mode: str, saved: int) -> int:
    """Returns how many of an epoch's batches are done, counted so that those left are as many as there are."""
    counts = [
        (len(part), left)
        for part in parts
        if part is not None and part.plan is not None and (left := part.num_batches_left(epoch)) is not None
    ]
    if len(counts) < len(parts):
        return saved
    if mode == "min_size":
        length, left = min(length for length, _ in counts), min(left for _, left in counts)
    else:
        length, left = max(counts)
    return length - left
