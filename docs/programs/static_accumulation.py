"""A static graph and accumulation: the first backward must synchronise.

Said: `static_graph=True` for speed and `no_sync` for accumulation, together.

True: DDP records the graph in the first backward. If that one runs under `no_sync`, the next one dies. Let the very
first micro-batch of the run synchronise: the gradient is what it would be without a static graph.

Instead: `CustomDDPStrategy(static_graph=True)` with any `accumulate_grad_batches`; it does this by itself.
"""

from contextlib import nullcontext

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def accumulate(first_synchronises, **settings):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), **settings)
    for i, x in enumerate((1.0, 2.0, 3.0, 4.0)):
        synchronises = i == 3 or (i == 0 and first_synchronises)
        try:
            with nullcontext() if synchronises else ddp.no_sync():
                ddp(torch.full((1, 1), x)).sum().backward()
        except RuntimeError as error:
            return "INTERNAL ASSERT FAILED" if "INTERNAL ASSERT FAILED" in str(error) else str(error)
    return ddp.module.weight.grad.item()


def as_told():
    """static, only the last synchronises."""
    return accumulate(False, static_graph=True)


def first_too():
    """static, the first one too."""
    return accumulate(True, static_graph=True)


def not_static():
    """not static."""
    return accumulate(False)


def check(as_told, first_too, not_static):
    assert as_told == ["INTERNAL ASSERT FAILED"] * NUM_RANKS
    assert first_too == not_static == [1.0 + 2.0 + 3.0 + 4.0] * NUM_RANKS


VARIANTS = (as_told, first_too, not_static)

if __name__ == "__main__":
    run(__file__)
