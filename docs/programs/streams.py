"""Random streams: `seed + rank` and `seed + epoch` meet.

Said: seed every rank alike; or, with more thought, with `seed + rank`, and data with `seed + epoch`.

True: alike, all ranks draw the same dropout masks, so the masks of a step are not independent. With sums, rank 1's
stream in epoch 0 is rank 0's in epoch 1: of two ranks and two epochs, three different streams are left. A hash of the
key has no such neighbours. (Weights must be equal on all ranks; DDP's first broadcast makes them so.)

Instead: `PerRankSeed()`: streams by (seed, rank, worker, epoch, batch), and the samplers' seed left alone.
"""

import torch
from _start import run

from ddp_plugin.streams import stream_seed

NUM_RANKS = 1


def num_masks(seed_of):
    """Returns how many different dropout masks two ranks draw in two epochs."""
    masks = set()
    for rank in range(2):
        for epoch in range(2):
            torch.manual_seed(seed_of(rank, epoch))
            masks.add(tuple(torch.nn.functional.dropout(torch.ones(64)).tolist()))
    return len(masks)


def alike():
    """seed + epoch."""
    return num_masks(lambda rank, epoch: 42 + epoch)


def sums():
    """seed + rank + epoch."""
    return num_masks(lambda rank, epoch: 42 + rank + epoch)


def hashed():
    """hash of (seed, rank, epoch)."""
    return num_masks(lambda rank, epoch: stream_seed(42, rank, "dropout", epoch))


def check(alike, sums, hashed):
    assert (alike, sums, hashed) == (2, 3, 4)


VARIANTS = (alike, sums, hashed)

if __name__ == "__main__":
    run(__file__)
