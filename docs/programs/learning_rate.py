"""The learning rate follows the batch, not the number of cards.

Said: multiply the learning rate by the number of GPUs.

True: DDP averages. The same eight samples on two ranks are the same step as on one, at the same rate. What the rate
follows is the *effective* batch (per rank x ranks x accumulation) over the one that it was tuned for.

Instead: `ScaleLearningRate(base_batch_size=..)`: from the effective batch, once, by a stated rule.
"""

import torch
import torch.distributed as dist
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.learning_rate import EffectiveBatch, scale_ratio

NUM_RANKS = 2
SAMPLES = torch.arange(8.0)[:, None]


def step(net, samples, rate):
    nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net) if len(samples) < 8 else net
    model(samples).mean().backward()
    torch.optim.SGD(net.parameters(), lr=rate).step()
    return net.weight.item()


def one_process():
    """one process, 8 samples."""
    return step(nn.Linear(1, 1, bias=False), SAMPLES, rate=0.5)


def by_cards():
    """2 ranks of 4, rate x 2."""
    return step(nn.Linear(1, 1, bias=False), SAMPLES[4 * dist.get_rank() :][:4], rate=0.5 * NUM_RANKS)


def by_batch():
    """2 ranks of 4, by the batch."""
    ratio = scale_ratio("linear", EffectiveBatch(4, num_processes=NUM_RANKS).total / 8)
    return step(nn.Linear(1, 1, bias=False), SAMPLES[4 * dist.get_rank() :][:4], rate=0.5 * ratio)


def check(one_process, by_cards, by_batch):
    assert one_process == by_batch == [-0.5 * 3.5] * NUM_RANKS
    assert by_cards == [2 * -0.5 * 3.5] * NUM_RANKS


VARIANTS = (one_process, by_cards, by_batch)

if __name__ == "__main__":
    run(__file__)
