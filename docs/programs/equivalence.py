"""When data parallel is one process, and when not.

Said: DDP is strictly equivalent to training on the whole batch in one process.

True: it is, up to the order of additions, for the *mean* loss, *equal* shards, no BatchNorm, and the same dropout. DDP
divides the sum of gradients by the number of ranks, whatever the loss: a summed one comes out halved on two ranks, and
the mean over shards of 3 samples and 1 gives the one sample the weight of three.

Instead: `GlobalMeanLoss()` for unequal shards, `ConvertSyncBatchNorm()` for BatchNorm; docs/guarantees.md for the rest.
"""

import torch
import torch.distributed as dist
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2
SAMPLES = torch.tensor([[1.0], [2.0], [3.0], [10.0]])


def gradient(shards, reduction):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    reduction(ddp(SAMPLES[shards[dist.get_rank()]])).backward()
    return ddp.module.weight.grad.item()


def one_process(reduction):
    net = nn.Linear(1, 1, bias=False)
    reduction(net(SAMPLES)).backward()
    return net.weight.grad.item()


def equal_shards():
    """mean over shards of 2 and 2."""
    return {"one process": one_process(torch.mean), "DDP": gradient([[0, 1], [2, 3]], torch.mean)}


def unequal_shards():
    """mean over shards of 3 and 1."""
    return {"one process": one_process(torch.mean), "DDP": gradient([[0, 1, 2], [3]], torch.mean)}


def summed():
    """sum over shards of 2 and 2."""
    return {"one process": one_process(torch.sum), "DDP": gradient([[0, 1], [2, 3]], torch.sum)}


def check(equal_shards, unequal_shards, summed):
    mean, total = (1 + 2 + 3 + 10) / 4, 1 + 2 + 3 + 10
    assert equal_shards == [{"one process": mean, "DDP": mean}] * NUM_RANKS
    assert unequal_shards == [{"one process": mean, "DDP": ((1 + 2 + 3) / 3 + 10) / 2}] * NUM_RANKS
    assert summed == [{"one process": total, "DDP": total / 2}] * NUM_RANKS


VARIANTS = (equal_shards, unequal_shards, summed)

if __name__ == "__main__":
    run(__file__)
