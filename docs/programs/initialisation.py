"""Weights are made equal by DDP's first broadcast, not by the seed.

Said: seed all ranks alike so that the model begins alike; or seed with the rank, also for the initialisation.

True: the wrap sends rank 0's weights to all, whatever the seeds were. Only with `init_sync=False` does the seed count,
and then it must be the same, or every rank trains a model of its own.

Instead: the strategy makes weights equal at the wrap; `ReplicaConsistency()` looks that they stay so.
"""

import torch
import torch.distributed as dist
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def num_models(**settings):
    """Returns how many different models the ranks hold after the wrap."""
    torch.manual_seed(dist.get_rank())
    ddp = DistributedDataParallel(nn.Linear(2, 2), **settings)
    weights = [None] * dist.get_world_size()
    dist.all_gather_object(weights, ddp.module.weight.flatten().tolist())
    return len({tuple(weight) for weight in weights})


def by_rank():
    """seeded by rank."""
    return num_models()


def by_rank_without():
    """seeded by rank, init_sync=False."""
    return num_models(init_sync=False)


def check(by_rank, by_rank_without):
    assert by_rank == [1] * NUM_RANKS
    assert by_rank_without == [NUM_RANKS] * NUM_RANKS


VARIANTS = (by_rank, by_rank_without)

if __name__ == "__main__":
    run(__file__)
