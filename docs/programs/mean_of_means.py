"""The mean of the ranks' means is not the mean.

Said: average each rank's mean loss over the ranks, and that is the loss.

True: only if all ranks hold equally many samples. Add up sums and counts, and divide once.

Instead: `ExactEvaluation()` does that for what `self.log` and torchmetrics collect.
"""

import torch
import torch.distributed as dist
from _start import run

NUM_RANKS = 2
LOSSES = [1.0, 2.0, 3.0, 10.0, 14.0]


def mine():
    return torch.tensor(LOSSES[:3] if dist.get_rank() == 0 else LOSSES[3:])


def mean_of_means():
    """mean of means."""
    value = mine().mean()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


def sum_over_count():
    """sums over counts."""
    total = torch.tensor([mine().sum(), mine().numel()])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def check(mean_of_means, sum_over_count):
    assert mean_of_means == [(2.0 + 12.0) / 2] * NUM_RANKS
    assert sum_over_count == [sum(LOSSES) / len(LOSSES)] * NUM_RANKS


VARIANTS = (mean_of_means, sum_over_count)

if __name__ == "__main__":
    run(__file__)
