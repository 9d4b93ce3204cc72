"""DDP does not synchronise BatchNorm.

Said: DDP synchronises BatchNorm by default; consider SyncBatchNorm "instead".

True: each rank normalises by its own batch and keeps its own running statistics, until the next training forward
replaces them by rank 0's. SyncBatchNorm *is* the synchronisation; torch's runs on accelerators only.

Instead: `ConvertSyncBatchNorm()`, on any device; here its conversion, beside one process with the whole batch.
"""

import torch
import torch.distributed as dist
from _start import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.batchnorm import convert_batchnorm

NUM_RANKS = 2
BATCH = torch.tensor([[0.0], [2.0], [4.0], [10.0]])


def running_mean(convert):
    net = nn.BatchNorm1d(1, momentum=1.0)  # keeps the latest batch alone
    if convert:
        convert_batchnorm(net)
    ddp = DistributedDataParallel(net)
    ddp(BATCH[2 * dist.get_rank() :][:2]).sum().backward()
    return net.running_mean.item()


def plain():
    """DDP."""
    return running_mean(False)


def converted():
    """converted."""
    return running_mean(True)


def one_process():
    """one process."""
    net = nn.BatchNorm1d(1, momentum=1.0)
    net(BATCH)
    return net.running_mean.item()


def check(plain, converted, one_process):
    assert plain == [1.0, 7.0]
    assert converted == one_process == [4.0] * NUM_RANKS


VARIANTS = (plain, converted, one_process)

if __name__ == "__main__":
    run(__file__)
