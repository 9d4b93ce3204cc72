"""The device under check, Trainers that run on it, and the plain torch that the results are compared with.

``DDP_PLUGIN_CHECK_DEVICE=cpu`` runs the bodies on the CPU with gloo in NCCL's place. That shows that the checks
themselves work; it shows nothing about a GPU.
"""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.harness import trainer

DEVICE = torch.device(os.environ.get("DDP_PLUGIN_CHECK_DEVICE", "cuda"), 0)
if DEVICE.type == "cpu":
    DEVICE = torch.device("cpu")
ON_CUDA = DEVICE.type == "cuda"

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 24, 4
LEARNING_RATE = 0.1


def device_trainer(**settings: Any) -> pl.Trainer:
    """Makes a Trainer on the device for the ranks that are running; all of them share the one card.

    To Lightning each rank is a machine with one device, because it knows no two processes on the same card.
    """
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return trainer(
        accelerator="gpu" if ON_CUDA else "cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), **settings
    )


def wait_for_device() -> None:
    """Waits for all streams: what a communication callback wrote is not ordered with the stream that reads it."""
    if ON_CUDA:
        torch.cuda.synchronize(DEVICE)


def rank_and_world_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def make_net(dtype: torch.dtype = torch.float64, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def make_data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs.to(dtype), torch.sin(inputs[:, :3]).to(dtype))


def train_loader(data: TensorDataset) -> DataLoader[Any]:
    """Shards by hand and in order, so that step ``k`` of all ranks together sees samples ``4 k`` to ``4 k + 3``."""
    rank, world_size = rank_and_world_size()
    sampler: DistributedSampler[Any] = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, GLOBAL_BATCH_SIZE // world_size, sampler=sampler)


class Regression(pl.LightningModule):
    """A small network under SGD with momentum."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        assert inputs.device == self.device == DEVICE
        return F.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.net)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)


def batches(data: TensorDataset) -> Iterator[tuple[Tensor, ...]]:
    for first in range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE):
        yield tuple(tensor[first : first + GLOBAL_BATCH_SIZE].to(DEVICE) for tensor in data.tensors)


def train_plainly(
    net: nn.Module, data: TensorDataset, accumulate: int = 1, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """One process, whole batches, no DDP; returns the parameters at the end and the very first gradient."""
    net.to(DEVICE)
    optimizer = make_optimizer(net)
    first_gradient: Tensor | None = None
    for number, (inputs, targets) in enumerate(batches(data)):
        with torch.autocast(DEVICE.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.mse_loss(net(inputs), targets) / accumulate
        loss.backward()
        if first_gradient is None:
            first_gradient = flat_gradient(net)
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert first_gradient is not None
    return flat(net), first_gradient


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).clone()


def flat_gradient(net: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in net.parameters() if parameter.grad is not None])
