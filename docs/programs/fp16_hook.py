"""The fp16 hook overflows.

Said: register `fp16_compress_hook` and halve the traffic.

True: float16 ends at 65504. A gradient of 100000 arrives as infinity: the hook scales nothing. bfloat16 has float32's
range, with three digits.

Instead: `CustomDDPStrategy(comm_hook="bf16")`, which also runs on CPU; docs/choosing.md says what each hook costs.
"""

import torch
from _start import run
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.hooks import attach

NUM_RANKS = 2


def wrapped():
    return DistributedDataParallel(nn.Linear(1, 1, bias=False))


def gradient(ddp):
    ddp(torch.full((1, 1), 1e5)).sum().backward()
    return ddp.module.weight.grad.item()


def fp16():
    """fp16_compress_hook."""
    ddp = wrapped()
    ddp.register_comm_hook(None, fp16_compress_hook)
    return gradient(ddp)


def bf16():
    """bf16 of ddp_plugin."""
    ddp = wrapped()
    hook = attach("bf16", ddp)
    value = gradient(ddp)
    hook.close()
    return value


def exact():
    """no hook."""
    return gradient(wrapped())


def check(fp16, bf16, exact):
    assert fp16 == [float("inf")] * NUM_RANKS
    assert all(abs(value - 1e5) < 1e5 * 2**-8 and value != 1e5 for value in bf16)
    assert exact == [1e5] * NUM_RANKS


VARIANTS = (fp16, bf16, exact)

if __name__ == "__main__":
    run(__file__)
