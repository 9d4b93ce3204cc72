"""A new sampler in each epoch leaks nothing, but never shuffles anew.

Said: do not make a new `DistributedSampler` for every epoch: it leaks memory.

True: the old ones are gone as soon as nothing holds them. The harm is another one: a new sampler begins with epoch 0,
so each epoch has the same order. (And a new `DataLoader` starts its workers again.)

Instead: one loader, and `SamplerEpoch()`, which tells every `set_epoch` in reach the epoch.
"""

import weakref

from _start import run
from torch.utils.data import DataLoader, DistributedSampler

NUM_RANKS = 1
DATA = list(range(100))


def train(new_each_epoch):
    alive, orders = weakref.WeakSet(), set()
    for epoch in range(20):
        if new_each_epoch or epoch == 0:
            sampler = DistributedSampler(DATA, 2, 0)
            loader = DataLoader(DATA, batch_size=10, sampler=sampler)
            alive.add(sampler)
        if not new_each_epoch:
            sampler.set_epoch(epoch)
        orders.add(tuple(sample for batch in loader for sample in batch.tolist()))
    return {"samplers alive": len(alive), "different orders in 20 epochs": len(orders)}


def new():
    """a new one each epoch."""
    return train(True)


def kept():
    """one, with set_epoch."""
    return train(False)


def check(new, kept):
    assert new == {"samplers alive": 1, "different orders in 20 epochs": 1}
    assert kept == {"samplers alive": 1, "different orders in 20 epochs": 20}


VARIANTS = (new, kept)

if __name__ == "__main__":
    run(__file__)
