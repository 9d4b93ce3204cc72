"""Ranks with unequal numbers of batches wait for each other for ever.

Said: an unused parameter or a missing batch gives "a hang or an error".

True: which of the two is no matter of luck. What all ranks do alike is an *error*, in the next step (see the unused
parameters above). What they do differently is a *hang*: one rank has 3 batches, the other waits in its fourth backward
until the time limit of the group. `Join` lets the rank that has finished take part.

Instead: `SamplerEpoch()` deals out equal numbers of batches, or stops all ranks together where lengths are unknown.
"""

from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from _start import run
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def train(together):
    group = dist.new_group(timeout=timedelta(seconds=3))
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    with Join([ddp]) if together else nullcontext():
        for batch in range(1, 4 + dist.get_rank()):
            try:
                ddp(torch.ones(1, 1)).sum().backward()
            except RuntimeError:
                return f"gave up waiting in batch {batch}"
    return f"{batch} batches"


def alone():
    """DDP."""
    return train(together=False)


def joined():
    """DDP in Join."""
    return train(together=True)


def check(alone, joined):
    assert alone == ["3 batches", "gave up waiting in batch 4"]
    assert joined == ["3 batches", "4 batches"]


VARIANTS = (alone, joined)

if __name__ == "__main__":
    run(__file__)
