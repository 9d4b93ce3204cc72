"""The loops: one in plain torch, and the Trainer with Lightning's strategy or with ours."""

import logging
import warnings
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import CustomDDPStrategy
from tests.benchmarks.slow_link.variants import Variant
from tests.benchmarks.slow_link.workload import Batches, LanguageModel
from tests.harness import trainer

__all__ = ["Clock", "quiet", "train"]


class Clock(Protocol):
    """What ends a loop."""

    def step_ended(self) -> bool:
        """Notes the end of a step; returns whether the loop ends here, the same on all ranks."""


class _EndedBy(pl.Callback):
    """Ends the Trainer's loop when the clock says so."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        if self.clock.step_ended():
            # Here and now, on both ranks: ``should_stop`` is a wish, on which the ranks agree a step later.
            trainer.fit_loop.epoch_loop.max_steps = trainer.global_step


def quiet() -> None:
    """Silences Lightning's advice on loaders and loggers, and torch's on its own hooks."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


def train(variant: Variant, model: LanguageModel, batches: Batches, clock: Clock) -> None:
    """Trains in the variant's way until the clock ends it.

    Collectives:
        The variant's, on all ranks.
    """
    if variant.loop == "plain":
        _train_plainly(variant, model, batches, clock)
        return
    strategy: DDPStrategy = DDPStrategy()
    if variant.loop == "custom":
        strategy = CustomDDPStrategy(comm_hook=variant.comm_hook, **variant.ddp)
    # One process on each of two hosts; the batches are this rank's already.
    trainer(strategy=strategy, devices=1, num_nodes=2, callbacks=[_EndedBy(clock)]).fit(model, batches)


def _train_plainly(variant: Variant, model: LanguageModel, batches: Batches, clock: Clock) -> None:
    wrapped = DistributedDataParallel(model, **variant.ddp)
    optimizer: Any = model.configure_optimizers()
    if variant.register is not None:
        optimizer = variant.register(wrapped, optimizer)
    for inputs, targets in batches:
        optimizer.zero_grad()
        wrapped(inputs, targets).backward()
        optimizer.step()
        if clock.step_ended():
            return
