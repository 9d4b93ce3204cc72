"""The image recipe's training loop in plain torch: the yardstick for its numbers and its speed.

It shares the network and the images with the recipe, and nothing else: no Lightning, no plugin.
"""

import math

import torch
import torch.distributed as dist
from residual import resnet
from sources import load_images
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def rate(step, num_warmup_steps, num_steps, peak):
    """The learning rate of a step: from zero to the peak in a line, then to zero in half a cosine."""
    if step < num_warmup_steps:
        return peak * step / num_warmup_steps
    return peak * 0.5 * (1 + math.cos(math.pi * (step - num_warmup_steps) / (num_steps - num_warmup_steps)))


def losses(*, num_steps, seed, batch_size, width, learning_rate, base_batch_size, warmup_epochs, weight_decay):
    """Trains on this rank of an existing gloo group and returns its loss in each step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    splits = load_images("digits", seed=seed)
    torch.manual_seed(seed)
    network = resnet("resnet18", num_classes=10, in_channels=1, stem="cifar", width=width, zero_init_residual=True)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in network.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=learning_rate,
        momentum=0.9,
        nesterov=True,
    )
    sampler = DistributedSampler(splits.train, world_size, rank, shuffle=True, seed=seed)
    loader = DataLoader(splits.train, batch_size, sampler=sampler, drop_last=True)
    peak = learning_rate * batch_size * world_size / base_batch_size
    num_warmup_steps = round(len(loader) * warmup_epochs)
    found = []
    for epoch in range(math.ceil(num_steps / len(loader))):
        sampler.set_epoch(epoch)
        splits.train.set_epoch(epoch)
        for images, labels in loader:
            for group in optimizer.param_groups:
                group["lr"] = rate(len(found), num_warmup_steps, num_steps, peak)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            if len(found) == num_steps:
                break
    return found
