"""`gradient_as_bucket_view` saves memory and one copy, not both copies.

Said: with `gradient_as_bucket_view=True` nothing is copied between gradients and buckets.

True: it spares the memory of the gradients and the copy back out of the buckets. As `zero_grad` sets gradients to
`None` by default, backward makes new ones, and each is still copied in. With `set_to_none=False` that ends too.

Instead: `CustomDDPStrategy(gradient_as_bucket_view=True)` for the memory; expect no more.
"""

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

NUM_RANKS = 2


def copies(gradient_as_bucket_view, set_to_none):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=gradient_as_bucket_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = ddp(torch.ones(1, 4)).sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            loss.backward()
    counts = {event.key: event.count for event in profiled.key_averages()}
    return {
        "copies in": counts.get("torch::distributed::reducer::mul_out", 0),
        "copies out": counts.get("torch.distributed.ddp.reducer::copy_bucket_to_grad", 0),
    }


def default():
    """default."""
    return copies(False, True)


def view():
    """bucket view."""
    return copies(True, True)


def view_kept():
    """bucket view, set_to_none=False."""
    return copies(True, False)


def check(default, view, view_kept):
    assert default == [{"copies in": 4, "copies out": 4}] * NUM_RANKS  # two weights, two biases
    assert view == [{"copies in": 4, "copies out": 0}] * NUM_RANKS
    assert view_kept == [{"copies in": 0, "copies out": 0}] * NUM_RANKS


VARIANTS = (default, view, view_kept)

if __name__ == "__main__":
    run(__file__)
