"""Compile first or wrap first: both keep the overlap. Running first loses it.

Said: compile, then wrap with DDP; the other way round compilation may fail completely.

True: either way compilation happens inside DDP's forward, which cuts the graph at the buckets so that each can be
reduced while the rest of the backward runs. One graph instead of several means that all gradients arrive at the end:
with `optimize_ddp=False`, or when the compiled model was run, with gradients, before it was wrapped.

Instead: compile each block, or do not call the model before `Trainer.fit` wraps it.
"""

import torch
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_RANKS = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def num_graphs(wrap_and_compile, optimize_ddp=True):
    """Returns into how many graphs the compiler cut the model."""
    torch.compiler.reset()
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph

    with torch._dynamo.config.patch(optimize_ddp=optimize_ddp):
        model = wrap_and_compile(Net(), lambda module: torch.compile(module, backend=compiler))
        model(torch.ones(1, 512)).sum().backward()
    return len(graphs)


def wrap(module):
    return DistributedDataParallel(module, bucket_cap_mb=1)  # a layer each


def run_once(module):
    module(torch.ones(1, 512)).sum().backward()
    return module


def compile_first():
    """compile, wrap."""
    return num_graphs(lambda net, compile: wrap(compile(net)))


def wrap_first():
    """wrap, compile."""
    return num_graphs(lambda net, compile: compile(wrap(net)))


def switched_off():
    """wrap, compile, optimize_ddp=False."""
    return num_graphs(lambda net, compile: compile(wrap(net)), optimize_ddp=False)


def run_before():
    """compile, run, wrap."""
    return num_graphs(lambda net, compile: wrap(run_once(compile(net))))


def check(compile_first, wrap_first, switched_off, run_before):
    assert compile_first == wrap_first == [4] * NUM_RANKS
    assert switched_off == run_before == [1] * NUM_RANKS


VARIANTS = (compile_first, wrap_first, switched_off, run_before)

if __name__ == "__main__":
    run(__file__)
