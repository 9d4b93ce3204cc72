"""`model.module.state_dict()` has a prefix if the model was compiled first.

Said: `ddp.module.state_dict()` is free of prefixes, so that is what one saves.

True: the wrapper `torch.compile` puts `_orig_mod.` before every name. `module.compile()` compiles in place and adds
nothing.

Instead: checkpoints of `CustomDDPStrategy` carry no prefix in any order of compiling and wrapping.
"""

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


def compile_then_wrap():
    """torch.compile(net), then DDP."""
    ddp = DistributedDataParallel(torch.compile(nn.Linear(1, 1)))
    return sorted(ddp.module.state_dict())


def in_place():
    """net.compile(), then DDP."""
    net = nn.Linear(1, 1)
    net.compile()
    return sorted(DistributedDataParallel(net).module.state_dict())


def check(compile_then_wrap, in_place):
    assert compile_then_wrap == [["_orig_mod.bias", "_orig_mod.weight"]] * NUM_RANKS
    assert in_place == [["bias", "weight"]] * NUM_RANKS


VARIANTS = (compile_then_wrap, in_place)

if __name__ == "__main__":
    run(__file__)
