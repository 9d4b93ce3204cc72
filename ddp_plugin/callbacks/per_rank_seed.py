"""Ranks draw different numbers where they should, the same where they must, and the same again in the next run."""

import itertools
import os
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import shards_of, transform_loaders
from ddp_plugin.data.loaders import order_of, replaced
from ddp_plugin.data.lockstep import StopTogetherLoader
from ddp_plugin.errors import explain
from ddp_plugin.gather import gather_objects
from ddp_plugin.seeding import (
    KeyedDataset,
    LoaderStreams,
    RunStreams,
    SeedWorker,
    StreamedSampler,
    may_draw,
    streamed,
)
from ddp_plugin.streams import seed_streams, stream_seed

__all__ = ["PerRankSeed"]

_MAX_SEED = 2**63 - 1
_num_runs = itertools.count()  # of this process, whatever callback object they had; the same on all ranks


class PerRankSeed(pl.Callback):
    """Gives every rank, loader worker, epoch and step a random stream of its own, keyed by where the run stands.

    What it covers: python's ``random``, numpy's global generator, torch's CPU generator and the current CUDA device's.

    - **Shared by all ranks**: everything before the first training epoch (the model's initialisation included), and the
      order of samplers that draw from a global generator, so that the ranks' shards never overlap.
    - **Different on every rank**: dropout and all else in a training step; augmentation, in workers or in the main
      process; validation, test and predict.
    - **Independent of what else happens**: a training step draws the same numbers whether validation runs or not, and
      in a resumed run. No generator's state is saved.

    After the run, also after an exception, all ranks go on from one shared stream, a new one after each run.

    Where the seed comes from: the argument, else ``PL_GLOBAL_SEED`` (``seed_everything``), else the checkpoint of the
    run that is resumed, else rank 0 draws one. It is logged with its source. ``PL_GLOBAL_SEED`` and ``PL_SEED_WORKERS``
    are never changed, and a user's ``worker_init_fn`` is called after the worker is seeded.

    What it cannot do: persistent workers are seeded once and run on, so with them a resumed run augments differently;
    iterables that are no ``DataLoader`` are not looked into; an iterable loader without workers that
    ``configure_optimizers`` already made Lightning build fetches the run's very first batch from the shared stream; a
    generator object of the user's own is the user's. An ``IterableDataset`` that shuffles *before* it takes its rank's
    part needs such a generator, seeded alike on all ranks.

    Args:
        seed: 0 to 2**63 - 1, the same on all ranks; ``None`` for the sources above.

    Raises:
        TypeError: ``seed`` is no integer; at setup, several processes run without ``CustomDDPStrategy``.
        ValueError: ``seed`` is out of range; at setup, on all ranks, it or ``PL_GLOBAL_SEED`` differs between ranks.

    Collectives:
        At setup, one gather of three numbers per rank on the control group, on all ranks; none later.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TypeError(explain("seed to be an integer or None", repr(seed), "Pass an integer, or leave it out"))
        if seed is not None and not 0 <= seed <= _MAX_SEED:
            raise ValueError(explain("seed to be 0 to 2**63 - 1", repr(seed), "Pass one in this range"))
        self.seed = seed
        self._trainer: pl.Trainer | None = None
        self._streams: RunStreams | None = None
        self._is_drawn = False
        self._announced: tuple[int, str] | None = None
        self._train_seed: int | None = None
        self._num_loaders: dict[str, tuple[Any, int]] = {}  # stage: (when they were loaded, how many)
        self._train_loaders: list[LoaderStreams] = []

    # -------------------------------------------------------------------------------------------------------- the seed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Agrees on the seed and asks to see the loaders."""
        seed, source = self._agree(transform_loaders(self, trainer, self._prepare))
        self._is_drawn = source == "drawn by rank 0"
        self._trainer = trainer
        self._streams = RunStreams(
            seed, trainer.global_rank, self._epoch, live=stage != "fit", shards=shards_of(trainer)
        )
        self._train_seed = None
        self._num_loaders = {}
        self._train_loaders = []
        if (seed, source) != self._announced:
            self._announced = (seed, source)
            rank_zero_info(
                f"PerRankSeed: random streams from seed {seed} ({source}); PerRankSeed(seed={seed}) repeats them."
            )
        if "PL_GLOBAL_SEED" not in os.environ:  # else Lightning has just seeded all ranks alike
            self._streams.enter_shared("setup")

    def _agree(self, group: dist.ProcessGroup | None) -> tuple[int, str]:
        drawn = int.from_bytes(os.urandom(4), "little")
        everyone = gather_objects((os.environ.get("PL_GLOBAL_SEED"), self.seed, drawn), group)
        environment, arguments, draws = zip(*everyone, strict=True)
        if len(set(environment)) > 1:
            raise ValueError(
                explain(
                    "PL_GLOBAL_SEED to be the same on all ranks, because the DistributedSampler that Lightning injects "
                    "shuffles by it: with different seeds the ranks' shards overlap, and an epoch over 16 samples on 2 "
                    "ranks saw 11 of them",
                    f"by rank {list(environment)}",
                    "Call seed_everything with one number on all ranks; PerRankSeed makes the streams differ",
                )
            )
        if len(set(arguments)) > 1:
            raise ValueError(
                explain(
                    "PerRankSeed(seed=...) to be the same on all ranks",
                    f"by rank {list(arguments)}",
                    "Pass one number; the rank is hashed into each stream",
                )
            )
        if self.seed is not None:
            return self.seed, "the argument"
        if environment[0] is not None:
            return int(environment[0]), "PL_GLOBAL_SEED"
        return int(draws[0]), "drawn by rank 0"

    def state_dict(self) -> dict[str, Any]:
        """Returns the seed, for runs that are resumed without one."""
        return {} if self._streams is None else {"seed": self._streams.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the seed of the run that is resumed, unless one is given."""
        saved = state_dict.get("seed")
        if self._streams is None or saved is None or saved == self._streams.seed:
            return
        if self._is_drawn:
            self._streams.seed = saved
            rank_zero_info(f"PerRankSeed: random streams from seed {saved} (the checkpoint's) instead.")
        elif self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING:
            rank_zero_warn(
                f"PerRankSeed: the checkpoint's run drew from seed {saved}, this one from {self._streams.seed}: it "
                f"does not continue as if it had never stopped. PerRankSeed(seed={saved}) would."
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Moves on to a stream that all ranks share, and lets go of the Trainer."""
        self._leave()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Does what ``teardown`` does; Lightning calls none after an exception."""
        self._leave()

    def _leave(self) -> None:
        # What comes after a run (a random split for the next fold, say) is the same on all ranks, as it was before the
        # run, and new after each run: Lightning seeds anew at each start, so going back would repeat the last draws.
        if self._trainer is not None and self._streams is not None:
            seed_streams(stream_seed(self._streams.seed, None, "after a run", next(_num_runs), 0))
        self._trainer = None

    # ---------------------------------------------------------------------------------------------------- the training

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on, ranks may differ: the model is there, and its parameters are equal."""
        self._run.live = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes iterators anew that were made for an epoch that turned out to be another one."""
        epoch = self._epoch()
        if any(loader.pass_epoch not in (None, epoch) for loader in self._train_loaders):
            _compat.recreate_train_iterator(trainer)
        self._run.enter_shared("train start")
        if getattr(trainer.fit_loop, "restarted_mid_epoch", False):  # the epoch's start is not announced again
            self._enter("fetch", trainer.fit_loop.epoch_loop.batch_idx + 1)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keys what is drawn before the first step."""
        self._enter("fetch", 0)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keys the step."""
        self._enter("step", trainer.fit_loop.epoch_loop.batch_idx)  # batch_idx itself lags in dataloader_iter steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keys what is drawn until the next step, such as transforms of its batch on the device."""
        self._enter("fetch", trainer.fit_loop.epoch_loop.batch_idx + 1)

    def _enter(self, purpose: str, num_before: int) -> None:
        self._train_seed = self._run.training_seed(purpose, self._epoch(), num_before)
        seed_streams(self._train_seed)

    # -------------------------------------------------------------------------------------------------- the evaluations

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keys the validation."""
        self._run.enter("validate", self._epoch())

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Goes back to where training stood."""
        if trainer.state.fn == TrainerFn.FITTING and self._train_seed is not None:
            seed_streams(self._train_seed)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keys the test."""
        self._run.enter("test", self._epoch())

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keys the prediction."""
        self._run.enter("predict", self._epoch())

    # ------------------------------------------------------------------------------------------------------ the loaders

    def _prepare(self, loader: object, stage: RunningStage) -> object:
        if isinstance(loader, StopTogetherLoader):
            loader.forwards_to = self._prepare(loader.forwards_to, stage)
        if self._trainer is None or not isinstance(loader, DataLoader):
            return loader
        training, iterable = stage is RunningStage.TRAINING, isinstance(loader.dataset, IterableDataset)
        streams = self._loader_streams(stage)
        changes: dict[str, Any] = {}
        if loader.num_workers > 0:
            user_init = loader.worker_init_fn
            then = user_init.then if isinstance(user_init, SeedWorker) else user_init  # a loader that was here before
            changes["worker_init_fn"] = SeedWorker(streams.worker_key, then)
            if loader.generator is None:
                # A loader with workers draws a seed for each iterator, from the global generator unless it has one.
                changes["generator"] = torch.Generator().manual_seed(streams.order_seed(0))
        name, sampler = order_of(loader)
        if isinstance(sampler, StreamedSampler):
            sampler = sampler.forwards_to
        draws = not iterable and may_draw(sampler)
        fetches_here = loader.num_workers == 0 and (training or iterable)
        keyed = loader.num_workers > 0 and training and not iterable
        if training or draws or fetches_here:
            changes[name] = streamed(sampler, streams, draws=draws, fetches_here=fetches_here, keyed=keyed)
        if keyed and type(loader.dataset) is not KeyedDataset:
            changes["dataset"] = KeyedDataset(loader.dataset)
        return replaced(loader, **changes) if changes else loader

    def _loader_streams(self, stage: RunningStage) -> LoaderStreams:
        # The sanity check and validation share a loader, whichever comes first.
        name = "validate" if stage is RunningStage.SANITY_CHECKING else stage.value
        epoch = self._epoch()
        making: Any = epoch
        if stage is RunningStage.TRAINING and self._trainer is not None:
            making = (epoch, _compat.train_fetcher(self._trainer))
        loaded_epoch, position = self._num_loaders.get(name, (making, 0))
        if (
            loaded_epoch != making
        ):  # reload_dataloaders_every_n_epochs, or a run before the run, such as a rate finder's
            position = 0
        self._num_loaders[name] = (making, position + 1)
        streams = LoaderStreams(self._run, f"{name}/{position}", repeats=stage is RunningStage.TRAINING)
        if stage is RunningStage.TRAINING:
            self._train_loaders = [*self._train_loaders[:position], streams]
        return streams

    def _epoch(self) -> int:
        # Evaluation by itself is keyed alike after a fit and in a process of its own.
        fitting = self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING
        return _compat.train_epoch(self._trainer) if fitting else 0

    @property
    def _run(self) -> RunStreams:
        if self._streams is None:
            raise RuntimeError(explain("setup before any other hook", "none", "Pass PerRankSeed to the Trainer"))
        return self._streams
