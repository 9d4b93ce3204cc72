"""Reductions overlap the backward by default.

Said: `gradient_as_bucket_view=True` and `static_graph=True` give the overlap of communication and backward.

True: DDP starts to reduce a bucket as soon as it is full, with or without them. Counted here: how many of eight
gradients were there when each bucket was sent. Overlap is lost by a single bucket.

Instead: defaults; `CommunicationMonitor` says how much of the communication is not hidden.
"""

import torch
from _start import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def gradients_there(**settings):
    """Returns, for each bucket, how many gradients were there when it was sent."""
    net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])  # 16 KiB each
    ddp = DistributedDataParallel(net, **settings)
    arrived, at_each_bucket = [], []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(arrived.append)

    def note(state, bucket):
        at_each_bucket.append(len(arrived))
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, note)
    for _ in range(3):
        arrived.clear()
        at_each_bucket.clear()
        ddp(torch.ones(1, 64)).sum().backward()
    return at_each_bucket


def plain():
    """small buckets."""
    return gradients_there(bucket_cap_mb=0.03)


def with_both():
    """the same, view and static."""
    return gradients_there(bucket_cap_mb=0.03, gradient_as_bucket_view=True, static_graph=True)


def one_bucket():
    """one bucket, view and static."""
    return gradients_there(bucket_cap_mb=25, gradient_as_bucket_view=True, static_graph=True)


def check(plain, with_both, one_bucket):
    assert plain == with_both == [[2, 4, 6, 8]] * NUM_RANKS
    assert one_bucket == [[8]] * NUM_RANKS


VARIANTS = (plain, with_both, one_bucket)

if __name__ == "__main__":
    run(__file__)
