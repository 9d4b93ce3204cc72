"""One process, plain torch: each optimizer step is the gradient of the mean over all of its samples or tokens."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.parity.models import CLIP_NORM, MODELS, SEED, data_of, net_of, values_of
from tests.parity.table import BATCH_SIZE, NUM_STEPS, Cell


def windows(cell: Cell) -> Iterator[list[list[int]]]:
    """Yields, epoch after epoch, the micro-batches of each optimizer step, as lists of indices."""
    size = cell.num_ranks * BATCH_SIZE
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(cell.num_samples, generator=generator).tolist()
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        for start in range(0, len(batches), cell.accumulate):
            yield batches[start : start + cell.accumulate]


def train(cell: Cell) -> tuple[dict[str, Tensor], int]:
    """Returns the weights and buffers after :data:`NUM_STEPS` steps, and in how many of them the clipping did bite."""
    model, net, data = MODELS[cell.model], net_of(cell), data_of(cell)
    optimizer = model.optimizer(net.parameters())
    num_clipped = 0
    for step, window in enumerate(itertools.islice(windows(cell), NUM_STEPS)):
        optimizer.zero_grad()
        num_units = 0
        for indices in window:
            x, target = data[indices]
            total, num = model.errors(net(x, step), target)
            total.backward()
            num_units += num
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= num_units
        if cell.clipping:
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
            num_clipped += bool(norm > CLIP_NORM)
        optimizer.step()
    return values_of(net), num_clipped
