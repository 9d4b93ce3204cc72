"""Seven billion parameters do not fit DDP on 80 GB.

Said: DDP with static graphs speeds up a 7B model on eight GPUs by 5 to 15 percent.

True: in float32 with Adam each process holds 16 bytes for each parameter: weight, gradient, two moments. Counted here
on a small model, times 7e9; DDP's buckets come on top. (A speed-up of what does not fit cannot have been measured.)

Instead: `ddp-plugin plan --parameters 7e9 --memory-gb 80` says what fits; shard with FSDP what does not.
"""

import torch
from _start import run
from torch import nn

from ddp_plugin.planning.memory import memory_bytes, state_bytes

NUM_RANKS = 1


def counted(trained):
    net = nn.Linear(100, 100)
    tensors = list(net.parameters())
    if trained:
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 100)).sum().backward()
        optimizer.step()
        tensors += [parameter.grad for parameter in net.parameters()]
        tensors += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    return f"{7e9 * sum(tensor.nbytes for tensor in tensors) / num_parameters / 1e9:.0f} GB"


def weights():
    """the weights alone."""
    return counted(trained=False)


def training():
    """after a step of Adam."""
    return counted(trained=True)


def planned():
    """ddp-plugin plan."""
    return f"{state_bytes(memory_bytes(7 * 10**9, '32-true', 'adam')) / 1e9:.0f} GB"


def check(weights, training, planned):
    assert weights == "28 GB"
    assert training == planned == "112 GB"


VARIANTS = (weights, training, planned)

if __name__ == "__main__":
    run(__file__)
