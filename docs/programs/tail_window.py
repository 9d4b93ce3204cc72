"""The last window of an accumulation is shorter, and counts.

Said: `if (i + 1) % k == 0: optimizer.step()`, with each loss divided by `k`.

True: with 6 batches and k = 4 the last two are dropped, or leak into the next epoch. Lightning takes the step, but
divides by 4 what is a window of 2. The mean over each window gives w = -(1 + 2 + 3 + 4) / 4 - (5 + 6) / 2 = -8.

Instead: `GlobalMeanLoss()`: the mean over all samples of a step, however many micro-batches and ranks it has.
"""

import lightning.pytorch as pl
import torch
from _start import run
from torch.utils.data import DataLoader

from ddp_plugin import GlobalMeanLoss

NUM_RANKS = 1
BATCHES = torch.arange(1.0, 7.0)


def loop_as_told():
    """the loop as told."""
    w = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    for i, x in enumerate(BATCHES):
        (w * x / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return w.item()


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        return (self.w * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def train(*callbacks):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=list(callbacks),
        **dict.fromkeys(quiet, False),
    )
    model = Model()
    trainer.fit(model, DataLoader(BATCHES))
    return model.w.item()


def lightning():
    """Trainer."""
    return train()


def global_mean():
    """Trainer with GlobalMeanLoss."""
    return train(GlobalMeanLoss())


def check(loop_as_told, lightning, global_mean):
    assert loop_as_told == -(1 + 2 + 3 + 4) / 4
    assert lightning == -(1 + 2 + 3 + 4) / 4 - (5 + 6) / 4
    assert global_mean == -(1 + 2 + 3 + 4) / 4 - (5 + 6) / 2


VARIANTS = (loop_as_told, lightning, global_mean)

if __name__ == "__main__":
    run(__file__)
