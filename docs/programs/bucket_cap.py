"""`bucket_cap_mb=25` is not the default.

Said: the default bucket is 25 MB, so writing `bucket_cap_mb=25` changes nothing.

True: left alone, the first bucket is 1 MiB, so that the first reduction starts early; 25 written out makes it 25 MiB
too. Here are eight gradients of half a MiB each, and the buckets they fill.

Instead: leave `bucket_cap_mb=None`, or let `ddp_plugin.tune()` measure it.
"""

import torch
from _start import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
MIB = 2**20


def buckets_mib(**settings):
    layers = [nn.Linear(512, 256, bias=False) if i % 2 == 0 else nn.Linear(256, 512, bias=False) for i in range(8)]
    ddp = DistributedDataParallel(nn.Sequential(*layers), **settings)
    sizes = []

    def note(state, bucket):
        sizes.append(bucket.buffer().nbytes / MIB)
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, note)
    for _ in range(2):  # after the first backward DDP builds its buckets again, in the order of arrival
        sizes.clear()
        ddp(torch.ones(1, 512)).sum().backward()
    return sizes


def left_alone():
    """bucket_cap_mb=None."""
    return buckets_mib()


def written_out():
    """bucket_cap_mb=25."""
    return buckets_mib(bucket_cap_mb=25)


def check(left_alone, written_out):
    assert all(sizes[0] == 1.0 and sum(sizes) == 4.0 for sizes in left_alone)
    assert all(sizes == [4.0] for sizes in written_out)


VARIANTS = (left_alone, written_out)

if __name__ == "__main__":
    run(__file__)
