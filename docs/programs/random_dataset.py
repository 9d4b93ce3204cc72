"""A data set drawn without a seed is another one on every rank.

Said: `data = torch.randn(1000, 10)` and a `DistributedSampler`: disjoint shards of one data set.

True: each process draws its own. The indices are disjoint, the samples are of different data sets.

Instead: draw from a generator with a seed, or read a file. `SamplerEpoch()` compares the lengths of the ranks' data;
to keep their contents equal is yours.
"""

import torch
import torch.distributed as dist
from _start import run

NUM_RANKS = 2


def num_data_sets(data):
    data_sets = [None] * dist.get_world_size()
    dist.all_gather_object(data_sets, data.tolist())
    return len({tuple(one) for one in data_sets})


def without_seed():
    """without a seed."""
    torch.seed()  # as each fresh process begins
    return num_data_sets(torch.randn(1000))


def with_seed():
    """with a seed."""
    return num_data_sets(torch.randn(1000, generator=torch.Generator().manual_seed(0)))


def check(without_seed, with_seed):
    assert without_seed == [2] * NUM_RANKS
    assert with_seed == [1] * NUM_RANKS


VARIANTS = (without_seed, with_seed)

if __name__ == "__main__":
    run(__file__)
