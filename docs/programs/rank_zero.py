"""Rank 0 is false.

Said: `self.rank = rank or dist.get_rank()` takes the rank that was given, or asks for it; and padding is
`order += order[:missing]`.

True: an explicit 0 is ignored, because `0 or x` is `x`; here both ranks ask for the shard of rank 0. And an order that
is shorter than what is missing must be repeated more than once: one sample for four ranks leaves two without any.

Instead: `None` means "not given"; torch's `DistributedSampler`, or the sampler that `SamplerEpoch` deals out.
"""

import math

import torch.distributed as dist
from _start import run

NUM_RANKS = 2


def shards(order, num_ranks, repeat):
    missing = -len(order) % num_ranks
    order = order + (order * math.ceil(missing / len(order)) if repeat else order)[:missing]
    return [len(order[rank::num_ranks]) for rank in range(num_ranks)]


def as_told():
    """as told."""
    rank = 0
    return {"shard": rank or dist.get_rank(), "samples of 4 ranks": shards([7], 4, repeat=False)}


def asked_for_none():
    """is None, repeated."""
    rank = 0
    return {"shard": dist.get_rank() if rank is None else rank, "samples of 4 ranks": shards([7], 4, repeat=True)}


def check(as_told, asked_for_none):
    assert [result["shard"] for result in as_told] == [0, 1]
    assert [result["shard"] for result in asked_for_none] == [0, 0]
    assert all(result["samples of 4 ranks"] == [1, 1, 0, 0] for result in as_told)
    assert all(result["samples of 4 ranks"] == [1, 1, 1, 1] for result in asked_for_none)


VARIANTS = (as_told, asked_for_none)

if __name__ == "__main__":
    run(__file__)
