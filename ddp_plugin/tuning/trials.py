"""Short trial runs of somebody else's training, timed, that leave everything of theirs as it was."""

import copy
import gc
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_plugin.data.loaders import asks_its_sampler, replaced
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.streams import StreamStates

__all__ = [
    "PREFETCHED_PER_WORKER",
    "SCRATCH",
    "SET_BY_TRIALS",
    "StepClock",
    "TrialRun",
    "borrowed",
    "fresh_copy",
    "fresh_datamodule",
    "fresh_loaders",
    "kept_settings",
    "untouched_process",
    "with_workers",
]

_MAX_STEPS = 1_000_000  # never reached: a finite number for schedules that ask how long the run will be
SCRATCH = "ddp_plugin-tune-"
"""Beginning of the name of a trial's folder, before the number of its process."""

SET_BY_TRIALS: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "max_steps": _MAX_STEPS,
    "max_epochs": None,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "fast_dev_run": False,
    "overfit_batches": 0.0,
    "limit_train_batches": None,
    "logger": None,
    "default_root_dir": None,
    "profiler": None,
}
"""Arguments of the Trainer that a trial run decides on; ``None``: for each run."""


class StepClock(pl.Callback):
    """Times a window of training batches, and ends the run behind it.

    The device is synchronised at both ends of the window and at the ends of epochs inside it, never in a step.

    Args:
        num_warmup_batches: batches before the window.
        num_batches: batches in the window.
        counts_epoch_starts: whether what lies between two epochs counts, such as the start of data workers.
    """

    def __init__(self, num_warmup_batches: int, num_batches: int, counts_epoch_starts: bool = False) -> None:
        self._counts_epoch_starts = counts_epoch_starts
        self._first, self._last = num_warmup_batches, num_warmup_batches + num_batches
        self._num_done = 0
        self._since_s: float | None = None
        self._elapsed_s = 0.0

    @property
    def elapsed_s(self) -> float | None:
        """Seconds that the window took; ``None`` before its end."""
        return self._elapsed_s if self._num_done >= self._last else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lets schedulers that wait for a metric of an evaluation wait: a trial has no evaluation."""
        for config in trainer.lr_scheduler_configs:
            config.strict = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock again in a new epoch."""
        if self._since_s is None and self._num_done >= self._first:
            self._since_s = _now_s(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, and starts and stops the clock at the ends of the window."""
        self._num_done += 1
        if self._num_done == self._first:
            self._since_s = _now_s(trainer)
        elif self._num_done == self._last:
            self._stop(trainer)
        if self._num_done >= self._last:
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step  # here and now, on all ranks alike

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops the clock until the next epoch's first batch."""
        if self._num_done < self._last and not self._counts_epoch_starts:
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        if self._since_s is not None:
            self._elapsed_s += _now_s(trainer) - self._since_s
            self._since_s = None


def _now_s(trainer: pl.Trainer) -> float:
    device = trainer.strategy.root_device
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return time.perf_counter()


# -------------------------------------------------------------------------------------------------- the user's objects

PREFETCHED_PER_WORKER = 2
"""Batches that torch's ``DataLoader`` lets each worker prepare ahead, where nothing else was asked for."""


def with_workers(num_workers: int, keep_alive: bool | None = None) -> Callable[[object, RunningStage], object]:
    """Returns a transform of loaders that gives each training loader so many data workers.

    The order of samples stays; random numbers that a dataset draws inside workers become others.

    Args:
        num_workers: workers of each loader on each rank; 0 loads in the rank's own process.
        keep_alive: whether workers live on over epochs; ``None``: as the loader has it.

    Returns:
        What ``CustomDDPStrategy.add_dataloader_transform`` takes. It raises a ``ValueError`` for a loader that may
        deliver something else with other workers: one with an iterable dataset, or with an ``__iter__`` of its own.
    """

    def transform(loader: object, stage: RunningStage) -> object:
        if stage is not RunningStage.TRAINING:
            return loader
        if not isinstance(loader, DataLoader) or not asks_its_sampler(loader):
            raise ValueError(
                explain(
                    "a DataLoader with a map-style dataset, whose samples do not depend on the number of workers",
                    f"{type(loader).__name__} of {type(getattr(loader, 'dataset', None)).__name__}",
                    "Choose its number of workers by hand",
                )
            )
        is_kept = loader.persistent_workers if keep_alive is None else keep_alive
        return replaced(
            loader,
            num_workers=num_workers,
            prefetch_factor=(loader.prefetch_factor or PREFETCHED_PER_WORKER) if num_workers else None,
            persistent_workers=is_kept and num_workers > 0,
        )

    return transform


@contextmanager
def borrowed(model: pl.LightningModule) -> Iterator[pl.LightningModule]:
    """Lends a module to a trial: a deep copy, or, where it has none, the module itself, put back at the end.

    Put back are parameters (with their gradients and ``requires_grad``), buffers, submodules, hooks, training modes and
    what attributes refer to. Generators, samplers and loaders in attributes are copied, as for
    :func:`fresh_datamodule`; other objects that attributes refer to are neither.
    """
    try:
        copied = fresh_copy(model)
    except Exception:  # anything at all may lie in a module
        with _put_back(model):
            yield model
    else:
        yield copied


def fresh_copy(model: pl.LightningModule) -> pl.LightningModule:
    """Returns a deep copy of a module, without the Trainer that it may be attached to."""
    left_out: dict[int, Any] = {}
    with suppress(RuntimeError):  # it has no Trainer
        left_out[id(model.trainer)] = None
    return copy.deepcopy(model, left_out)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    tensors = [(tensor, tensor.data, tensor.grad, tensor.requires_grad) for tensor in (*parameters, *buffers)]
    attributes = [(module, {k: _shallow(v) for k, v in vars(module).items()}) for module in model.modules()]
    memo: dict[int, Any] = {}
    try:
        for module, _ in attributes:
            vars(module).update({name: _fresh(value, memo) for name, value in vars(module).items()})
        for tensor, data, _, _ in tensors:
            tensor.data, tensor.grad = data.clone(), None
        yield
    finally:
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for tensor, data, grad, requires_grad in tensors:
            tensor.grad = None  # of another device or shape, perhaps
            tensor.data, tensor.requires_grad = data, requires_grad
            tensor.grad = grad


def _shallow(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def fresh_loaders(loaders: Any, memo: dict[int, Any] | None = None) -> Any:
    """Returns loaders that share the datasets of the given ones and have samplers and generators of their own.

    Args:
        loaders: as for ``Trainer.fit``.
        memo: as for ``copy.deepcopy``: what is copied together with the loaders.

    Raises:
        TypeError: they can be iterated once only, or a sampler has no copy.
    """
    memo = {} if memo is None else memo
    leaves = CombinedLoader(loaders).flattened if not isinstance(loaders, CombinedLoader) else loaders.flattened
    shared: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Iterator) and not hasattr(leaf, "__len__"):
            raise TypeError(
                explain("a loader that can be iterated again", f"the iterator {leaf!r}", "Pass what it was made from")
            )
        shared += [leaf.dataset, leaf.collate_fn, leaf.worker_init_fn] if isinstance(leaf, DataLoader) else [leaf]
    memo.update({id(item): item for item in shared})
    try:
        return copy.deepcopy(loaders, memo)
    except Exception as error:
        raise TypeError(
            explain(
                "training loaders whose samplers can be copied, so that trial runs take nothing from the real one",
                f"{type(error).__name__}: {error}",
                "Pass a datamodule, whose train_dataloader() makes new ones",
            )
        ) from error


def fresh_datamodule(module: pl.LightningDataModule) -> pl.LightningDataModule:
    """Returns a shallow copy of a datamodule that has generators, samplers and loaders of its own.

    They are copied where attributes refer to them, also inside lists, tuples and dicts, all together: what two of them
    shared, their copies share. Datasets and other objects are shared with the given one.

    Raises:
        TypeError: as for :func:`fresh_loaders`.
    """
    copied, memo = copy.copy(module), dict[int, Any]()
    vars(copied).update({name: _shallow(_fresh(value, memo)) for name, value in vars(module).items()})
    return copied


_WITH_POSITION = (torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState, random.Random)


def _fresh(value: Any, memo: dict[int, Any]) -> Any:
    """Returns a copy of what moves on as it is used; of a container only where it holds such; else the value itself."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, DataLoader | CombinedLoader):
        return fresh_loaders(value, memo)
    if isinstance(value, Sampler):
        memo.update({id(item): item for item in _samples_of(value)})
        return copy.deepcopy(value, memo)
    if isinstance(value, _WITH_POSITION) and not isinstance(value, random.SystemRandom):
        return copy.deepcopy(value, memo)
    if not isinstance(value, list | tuple | dict):
        return value
    memo[id(value)] = value  # where it contains itself
    keys = list(value) if isinstance(value, dict) else range(len(value))
    changed = {key: new for key in keys if (new := _fresh(value[key], memo)) is not value[key]}
    if changed and isinstance(value, tuple):
        items = [changed.get(index, item) for index, item in enumerate(value)]
        memo[id(value)] = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif changed:
        memo[id(value)] = copy.copy(value)
        for key, new in changed.items():
            memo[id(value)][key] = new
    return memo[id(value)]


def _samples_of(sampler: Sampler[Any]) -> Iterator[Any]:
    """Yields the datasets that a sampler, or one that it wraps, refers to."""
    for name, value in vars(sampler).items():
        if isinstance(value, Sampler):
            yield from _samples_of(value)
        elif isinstance(value, Dataset) or name in ("data_source", "dataset"):
            yield value


@contextmanager
def kept_settings() -> Iterator[None]:
    """Puts back what the making of a Trainer may set in this process: determinism, benchmarking, seeds."""
    names = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG")
    environment = {name: os.environ.get(name) for name in names}
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark, grad_enabled = torch.backends.cudnn.benchmark, torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_grad_enabled(grad_enabled)
        for name, value in environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def untouched_process(device_type: str) -> Iterator[None]:
    """Puts back what trial runs may change in this process: :func:`kept_settings`, random streams, logging, warnings.

    Args:
        device_type: type of the devices that the trials run on.
    """
    if device_type == "cuda" and torch.cuda.is_available():
        torch.cuda.init()  # type: ignore[no-untyped-call]  # its streams as well
    streams = StreamStates.capture()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with kept_settings(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real run will say the same again
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        streams.restore()


# ------------------------------------------------------------------------------------------------------------- one run


class TrialRun:
    """A user's training, ready to be run for some steps with one strategy after the other.

    Each run has a copy of the module, of the loaders (see :func:`fresh_loaders`) and of the callbacks, optimizers and
    schedulers of its own, and begins where the random streams stood when this object was made.

    Args:
        model: the user's module.
        train_dataloaders: as for ``Trainer.fit``, or ``None``.
        datamodule: as for ``Trainer.fit``, or ``None``; runs see copies of it (see :func:`fresh_datamodule`).
        callbacks: callbacks that belong to a step.
        trainer_settings: further arguments of the Trainer, none of :data:`SET_BY_TRIALS`.
        counts_epoch_starts: see :class:`StepClock`.
    """

    def __init__(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any,
        datamodule: pl.LightningDataModule | None,
        callbacks: Sequence[pl.Callback],
        trainer_settings: Mapping[str, Any],
        counts_epoch_starts: bool = False,
    ) -> None:
        self.counts_epoch_starts = counts_epoch_starts
        self.model, self.train_dataloaders, self.datamodule = model, train_dataloaders, datamodule
        self.callbacks, self.trainer_settings = list(callbacks), dict(trainer_settings)

    def make_trainer(self, strategy: Any, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
        """Makes a Trainer that writes nothing."""
        fixed = {name: value for name, value in SET_BY_TRIALS.items() if value is not None}
        own = {
            name: copy.deepcopy(value) if name == "plugins" else value for name, value in self.trainer_settings.items()
        }
        return pl.Trainer(
            **(own | fixed | settings),
            strategy=strategy,
            callbacks=[*copy.deepcopy(self.callbacks), *callbacks],
            logger=DummyLogger(),  # a module may write to self.logger.experiment
        )

    def seconds_per_step(self, strategy: Any, num_warmup_steps: int, num_steps: int) -> float:
        """Trains for some optimizer steps; returns the seconds that one of the counted ones took on this rank.

        Raises:
            Exception: whatever the training raised.

        Collectives:
            Those of the training, on all ranks.
        """
        gc.collect()  # the last run's Trainer, at nobody's cost
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        with ExitStack() as stack:
            stack.callback(StreamStates.capture().restore)
            model = stack.enter_context(borrowed(self.model))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-"))
            num_micro_batches = self.trainer_settings.get("accumulate_grad_batches", 1)
            num_batches = num_steps * num_micro_batches
            clock = StepClock(num_warmup_steps * num_micro_batches, num_batches, self.counts_epoch_starts)
            num_epochs = num_warmup_steps * num_micro_batches + num_batches  # enough if one has a single batch
            trainer = self.make_trainer(strategy, clock, max_epochs=num_epochs, default_root_dir=folder)
            model.configure_callbacks = list  # type: ignore[method-assign]  # they may write, or need metrics
            if self.datamodule is not None:
                trainer.fit(model, datamodule=fresh_datamodule(self.datamodule))
            elif self.train_dataloaders is not None:
                trainer.fit(model, fresh_loaders(self.train_dataloaders))
            else:
                trainer.fit(model)
        elapsed_s = clock.elapsed_s
        if elapsed_s is None:
            raise DDPPluginError(
                explain(
                    f"training data and a model that train for {num_epochs} batches in as many epochs",
                    "a run that ended before",
                    "Look at the loader's length, and for what sets trainer.should_stop",
                )
            )
        return elapsed_s / num_steps
