"""The gradient's all-reduce is not all that DDP sends.

Said: DDP communicates in the backward only, by all-reduce.

True: with buffers, each training forward broadcasts rank 0's, once for each dtype among them; with
`find_unused_parameters=True`, each backward also reduces a bitmap of the parameters that were used. (The wrap itself
checks shapes and broadcasts the weights.)

Instead: docs/step.md lists every collective of a run; `CommunicationMonitor` counts those of yours.
"""

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

NUM_RANKS = 2


def count(net, **settings):
    ddp = DistributedDataParallel(net, **settings)
    for _ in range(2):  # the first steps have more: DDP agrees on its buckets
        ddp(torch.ones(2, 4)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        ddp(torch.ones(2, 4)).sum().backward()
    counts = {event.key: event.count for event in profiled.key_averages()}
    return {name: counts.get(f"gloo:{name}", 0) for name in ("all_reduce", "broadcast")}


def one_layer():
    """one layer."""
    return count(nn.Linear(4, 4))


def batch_norm():
    """with a BatchNorm."""
    return count(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def find_unused():
    """with find_unused_parameters."""
    return count(nn.Linear(4, 4), find_unused_parameters=True)


def check(one_layer, batch_norm, find_unused):
    assert one_layer == [{"all_reduce": 1, "broadcast": 0}] * NUM_RANKS
    assert batch_norm == [{"all_reduce": 1, "broadcast": 2}] * NUM_RANKS
    assert find_unused == [{"all_reduce": 2, "broadcast": 0}] * NUM_RANKS


VARIANTS = (one_layer, batch_norm, find_unused)

if __name__ == "__main__":
    run(__file__)
