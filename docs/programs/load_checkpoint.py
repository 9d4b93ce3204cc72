"""After a checkpoint was loaded on rank 0, broadcasting the parameters is not enough.

Said: load on rank 0, then `dist.broadcast` each of `model.parameters()`.

True: buffers (BatchNorm's statistics) and the optimizer's state stay what they were on the other ranks, and so the next
step differs. Load on all ranks, with `map_location`, or send all of it.

Instead: the strategy reads the file once and hands it to all; `ReplicaConsistency()` names what differs.
"""

import io

import torch
import torch.distributed as dist
from _start import run
from torch import nn

NUM_RANKS = 2


def make():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def step(net, optimizer):
    net(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).square().sum().backward()
    optimizer.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


def equal_on_all_ranks(net, optimizer):
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    parts = {"parameters": [*net.parameters()], "buffers": [*net.buffers()], "optimizer": momenta}
    equal = {}
    for name, tensors in parts.items():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, [tensor.tolist() for tensor in tensors])
        equal[name] = all(value == values[0] for value in values)
    return equal


def parameters_only():
    """parameters broadcast."""
    net, optimizer = make()
    if dist.get_rank() == 0:
        state = step(*make())
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    for parameter in net.parameters():
        dist.broadcast(parameter.detach(), 0)
    return equal_on_all_ranks(net, optimizer)


def everything():
    """the whole file sent."""
    net, optimizer = make()
    content = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(step(*make()), file)
        content = [file.getvalue()]
    dist.broadcast_object_list(content, 0)
    state = torch.load(io.BytesIO(content[0]), map_location="cpu", weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return equal_on_all_ranks(net, optimizer)


def check(parameters_only, everything):
    assert parameters_only == [{"parameters": True, "buffers": False, "optimizer": False}] * NUM_RANKS
    assert everything == [{"parameters": True, "buffers": True, "optimizer": True}] * NUM_RANKS


VARIANTS = (parameters_only, everything)

if __name__ == "__main__":
    run(__file__)
