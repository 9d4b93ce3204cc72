"""A module whose ranks can be slowed down by known amounts, each in one part of the step."""

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH, NUM_LAYERS = 256, 4
BUCKET_CAP_MB = 0.25  # one layer a bucket: 256 * 257 * 4 bytes are just above it
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Delayed(pl.LightningModule):
    """Some layers, each of which takes ``base_s`` in the backward, after a forward of ``forward_s``.

    Args:
        where: what is slow on ``slow_rank``: ``"forward"``, ``"optimizer"``, the number of a layer in the backward; or
            ``None``.
        delay_s: by how much.
        until: optimizer steps after which it is slow no longer.
    """

    def __init__(
        self,
        where: str | int | None = None,
        delay_s: float = 0.03,
        slow_rank: int = 1,
        base_s: float = 0.002,
        forward_s: float = 0.004,
        until: int = 10**9,
        batchnorm: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])
        self.norm = nn.BatchNorm1d(WIDTH, affine=False) if batchnorm else nn.Identity()
        self.where = where if rank() == slow_rank else None
        self.delay_s, self.base_s, self.forward_s, self.until = delay_s, base_s, forward_s, until

    def delay_in(self, place: str | int) -> float:
        return self.delay_s if self.where == place and self.global_step < self.until else 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.forward_s)
        time.sleep(self.delay_in("forward"))
        value = self.norm(batch)
        for number, layer in enumerate(self.layers):
            value = _SlowBackward.apply(layer(value).relu(), self.base_s + self.delay_in(number))  # type: ignore[no-untyped-call]
        return value.square().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if delay_s := self.delay_in("optimizer"):
            time.sleep(delay_s)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples(Dataset[Tensor]):
    """Batches of 4 take ``delay_s`` to load on one rank."""

    def __init__(self, num_samples: int, delay_s: float = 0.0, slow_rank: int = 1) -> None:
        self.values = torch.randn(num_samples, WIDTH, generator=torch.Generator().manual_seed(rank()))
        self.delay_s = delay_s if rank() == slow_rank else 0.0

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        if index % 4 == 0:
            time.sleep(self.delay_s)
        return self.values[index]


def loader(num_batches: int, **settings: Any) -> DataLoader[Tensor]:
    """Batches of this rank alone; a Trainer must not shard them again."""
    return DataLoader(Samples(4 * num_batches, **settings), batch_size=4)
