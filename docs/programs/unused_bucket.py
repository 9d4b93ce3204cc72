"""Buckets of unused parameters are sent all the same.

Said: with `find_unused_parameters=True`, buckets without a gradient are marked "no communication".

True: the parameters are marked *ready*; their bucket is reduced, full of zeros. Only what does not require a gradient
when DDP wraps the model is not sent.

Instead: freeze with `requires_grad_(False)`; `CustomDDPStrategy` wraps again when that changes in a run.
"""

import torch
from _start import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(1000, 1, bias=False), nn.Linear(1000, 1, bias=False)

    def forward(self, x):
        return self.used(x)


def elements_sent(net, **settings):
    ddp = DistributedDataParallel(net, **settings)
    sent = []

    def note(state, bucket):
        sent.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, note)
    ddp(torch.ones(1, 1000)).sum().backward()
    return sum(sent)


def find_unused():
    """find_unused_parameters."""
    return elements_sent(Net(), find_unused_parameters=True)


def frozen():
    """frozen before the wrap."""
    net = Net()
    net.unused.requires_grad_(False)
    return elements_sent(net)


def check(find_unused, frozen):
    assert find_unused == [2000] * NUM_RANKS
    assert frozen == [1000] * NUM_RANKS


VARIANTS = (find_unused, frozen)

if __name__ == "__main__":
    run(__file__)
