"""Accumulation saves traffic under `no_sync` only, with the forward inside.

Said: accumulating gradients saves communication; and without `no_sync` the earlier reductions are overwritten.

True: without `no_sync` each backward reduces, and the gradient comes out the same: what is lost is traffic, not
numbers. DDP decides in the *forward* whether the backward will reduce, so `no_sync` around the backward alone does
nothing.

Instead: `Trainer(accumulate_grad_batches=4)` places `no_sync` where it belongs.
"""

from contextlib import nullcontext

import torch
from _start import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def accumulate(around_forward, around_backward):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    reduced = []

    def count(state, bucket):
        reduced.append(bucket)
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, count)
    for i, x in enumerate((1.0, 2.0, 3.0, 4.0)):
        with ddp.no_sync() if around_forward and i < 3 else nullcontext():
            loss = ddp(torch.full((1, 1), x)).sum()
        with ddp.no_sync() if around_backward and i < 3 else nullcontext():
            loss.backward()
    return {"reductions": len(reduced), "gradient": ddp.module.weight.grad.item()}


def without():
    """no no_sync."""
    return accumulate(False, False)


def backward_only():
    """no_sync around the backward."""
    return accumulate(False, True)


def both():
    """no_sync around both."""
    return accumulate(True, True)


def check(without, backward_only, both):
    assert without == backward_only == [{"reductions": 4, "gradient": 10.0}] * NUM_RANKS
    assert both == [{"reductions": 1, "gradient": 10.0}] * NUM_RANKS


VARIANTS = (without, backward_only, both)

if __name__ == "__main__":
    run(__file__)
