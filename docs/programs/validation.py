"""A validation of seven samples on two ranks is one of eight.

Said: `self.log("val_loss", loss, sync_dist=True)` gives the validation loss over all ranks.

True: with `strategy="ddp"` the Trainer puts in a sampler that pads, so the sample 0 counts twice and the mean of
0, 1, .. 6 is not 3.

Instead: `ExactEvaluation()`, one of the `default_callbacks()`: each sample once, and means weighted by samples.
"""

import lightning.pytorch as pl
import torch
from _start import run
from torch.utils.data import DataLoader

from ddp_plugin import CustomDDPStrategy, ExactEvaluation

NUM_RANKS = 2


class Model(pl.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", batch.mean(), sync_dist=True)


def validate(strategy, *callbacks):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=strategy,
        callbacks=list(callbacks),
        **dict.fromkeys(quiet, False),
    )
    return trainer.validate(Model(), DataLoader(torch.arange(7.0)), verbose=False)[0]["val_loss"]


def ddp():
    """ddp."""
    return validate("ddp")


def exact():
    """CustomDDPStrategy, ExactEvaluation."""
    return validate(CustomDDPStrategy(), ExactEvaluation())


def check(ddp, exact):
    assert ddp == [(0 + 1 + 2 + 3 + 4 + 5 + 6 + 0) / 8] * NUM_RANKS
    assert exact == [3.0] * NUM_RANKS


VARIANTS = (ddp, exact)

if __name__ == "__main__":
    run(__file__)
