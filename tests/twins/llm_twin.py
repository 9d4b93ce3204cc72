"""The language-model recipe in plain torch: a process group, DistributedDataParallel, a loop.

It shares the network and the token files with the recipe, and nothing of Lightning or of the package: order of the
data, learning rate, clipping and accumulation are written out again.
"""

import contextlib
import itertools
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import BlockDataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from transformer import Transformer, TransformerConfig


def train(
    token_file: Path,
    model: dict[str, Any],
    seed: int,
    batch_size: int,
    accumulate: int,
    num_steps: int,
    schedule_steps: int,
    learning_rate: float,
    warmup_steps: int,
    final_ratio: float,
    weight_decay: float,
    clip_norm: float,
) -> list[float]:
    """Returns this rank's loss of the first ``num_steps * accumulate`` micro-batches, in nats per token."""
    torch.manual_seed(seed)
    network = Transformer(TransformerConfig(**model))
    ddp = DistributedDataParallel(network)

    dtype = "uint16" if model["vocab_size"] <= 2**16 else "uint32"
    blocks = BlockDataset(token_file, dtype, model["block_size"], model["vocab_size"] - 1, keep_tail=False)
    step_size = batch_size * accumulate * dist.get_world_size()
    usable = Subset(blocks, range(len(blocks) // step_size * step_size))
    sampler: DistributedSampler[Any] = DistributedSampler(usable, shuffle=True, seed=seed)
    loader = DataLoader(usable, batch_size, sampler=sampler)

    matrices = [p for p in network.parameters() if p.ndim >= 2]
    vectors = [p for p in network.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
        eps=1e-8,
    )

    losses: list[float] = []
    batches = itertools.chain.from_iterable(_epoch(loader, sampler, epoch) for epoch in itertools.count())
    for step in range(num_steps):
        if step < warmup_steps:
            ratio = step / warmup_steps
        else:
            way = (step - warmup_steps) / (schedule_steps - warmup_steps)
            ratio = final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * way)) / 2
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * ratio
        for micro in range(accumulate):
            inputs, targets = next(batches)
            is_last = micro == accumulate - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / targets.numel()
                (loss / accumulate).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(matrices + vectors, clip_norm)  # in this order Lightning sums the squares
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _epoch(loader: DataLoader[Any], sampler: DistributedSampler[Any], epoch: int) -> Any:
    sampler.set_epoch(epoch)
    yield from loader
