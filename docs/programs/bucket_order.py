"""Buckets are in the order in which gradients arrive.

Said: DDP reduces in the reverse order of definition, so define layers in the order of their use.

True: the first backward sends all in one bucket and notes in which order gradients arrive; from then on buckets are in
that order. Here the layer that is defined first is used last, so that its gradient is the first. Reverse definition is
what is left with `find_unused_parameters=True`, where DDP does not build its buckets again.

Instead: nothing to do; a resume with `CustomDDPStrategy` also keeps the layout, and with it the order of additions.
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
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        return self.a(self.b(self.c(x)))


def order_of_buckets(num_backwards, **settings):
    net = Net()
    names = {parameter: name[0] for name, parameter in net.named_parameters()}
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01, **settings)  # a layer each
    reduced = []

    def note(state, bucket):
        reduced.append("".join(names[parameter] for parameter in bucket.parameters()))
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, note)
    for _ in range(num_backwards):
        reduced.clear()
        ddp(torch.ones(1, 64)).sum().backward()
    return " ".join(reduced)


def first():
    """first backward."""
    return order_of_buckets(1)


def second():
    """second backward."""
    return order_of_buckets(2)


def find_unused():
    """the same, find_unused_parameters."""
    return order_of_buckets(2, find_unused_parameters=True)


def check(first, second, find_unused):
    assert [sorted(buckets) for buckets in first] == [["a", "b", "c"]] * NUM_RANKS  # together
    assert second == ["a b c"] * NUM_RANKS
    assert find_unused == ["c b a"] * NUM_RANKS


VARIANTS = (first, second, find_unused)

if __name__ == "__main__":
    run(__file__)
