"""A static graph may have unused parameters.

Said: `static_graph=True` wants a gradient for every parameter in every step, and with `find_unused_parameters=True`
it raises an error.

True: the *set* of used parameters must stay the same. Those that never get a gradient are found in the first step, and
the second flag only earns a warning. It is DDP without either flag that refuses unused parameters, in the next step.

Instead: `CustomDDPStrategy(static_graph=True)` where the set stays the same; the error without it names the parameters
and the cheapest setting that works.
"""

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def train(**settings):
    ddp = DistributedDataParallel(Net(), **settings)
    for step in range(1, 4):
        try:
            ddp(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return f"step {step}: {str(error).split(' in the ')[0]}"
    return f"{step} steps"


def plain():
    """DDP as it is."""
    return train()


def static():
    """static_graph."""
    return train(static_graph=True)


def static_and_unused():
    """static_graph, find_unused_parameters."""
    return train(static_graph=True, find_unused_parameters=True)


def check(plain, static, both):
    assert all(outcome.startswith("step 2: Expected to have finished reduction") for outcome in plain)
    assert static == both == ["3 steps"] * NUM_RANKS


VARIANTS = (plain, static, static_and_unused)

if __name__ == "__main__":
    run(__file__)
