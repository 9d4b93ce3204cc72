"""The sampler's seed must be the same on all ranks.

Said: give each card another seed, or all of them shuffle alike.

True: all of them must shuffle alike. A `DistributedSampler` shuffles the whole data set and takes every second sample;
with another order on each rank the shards overlap, and samples are missing.

Instead: `SamplerEpoch()` agrees on one order over the ranks; `PerRankSeed()` lets everything else differ.
"""

from _start import run
from torch.utils.data import DistributedSampler

NUM_RANKS = 1
DATA = range(10)


def num_covered(seeds):
    return len({index for rank, seed in enumerate(seeds) for index in DistributedSampler(DATA, 2, rank, seed=seed)})


def by_rank():
    """seed + rank."""
    return f"{num_covered([42, 43])} of 10"


def same():
    """the same seed."""
    return f"{num_covered([42, 42])} of 10"


def check(by_rank, same):
    assert int(by_rank.split()[0]) < 10
    assert same == "10 of 10"


VARIANTS = (by_rank, same)

if __name__ == "__main__":
    run(__file__)
