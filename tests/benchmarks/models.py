"""The networks and batches that are timed, and the module that carries them through Lightning."""

import time
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

__all__ = ["WORKLOADS", "Classifier", "Workload", "make_optimizer"]

NUM_CLASSES = 10


class SmallTransformer(nn.Module):
    """Tokens in, one class out; without dropout, so that every variant computes the same numbers."""

    def __init__(self, vocab_size: int = 256, dim: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        layers = [
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        ]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(dim, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(dim=1))


class ConvNet(nn.Module):
    """A few convolutions with BatchNorm after each."""

    def __init__(self, num_channels: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels_in in (3, num_channels, num_channels, num_channels):
            layers += [nn.Conv2d(channels_in, num_channels, 3, padding=1), nn.BatchNorm2d(num_channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(num_channels, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).mean(dim=(2, 3)))


def _mlp(width: int, depth: int) -> nn.Module:
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, NUM_CLASSES))


@dataclass(frozen=True)
class Workload:
    """A network and the shape of its input.

    Attributes:
        kind: ``"mlp"``, ``"transformer"`` or ``"convnet"``.
        input_shape: of one sample.
        batch_size: samples per rank and step.
        sizes: ``(width, depth)`` of an MLP.
    """

    kind: str
    input_shape: tuple[int, ...]
    batch_size: int
    sizes: tuple[int, int] = (0, 0)

    def network(self) -> nn.Module:
        """Returns the network, with the same weights each time."""
        torch.manual_seed(0)
        if self.kind == "mlp":
            return _mlp(*self.sizes)
        return SmallTransformer() if self.kind == "transformer" else ConvNet()

    def samples(self, num_samples: int) -> TensorDataset:
        """Returns samples with labels, the same each time."""
        generator = torch.Generator().manual_seed(1)
        shape = (num_samples, *self.input_shape)
        if self.kind == "transformer":
            inputs = torch.randint(0, 256, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator))


WORKLOADS = {
    "tiny MLP": Workload("mlp", (32,), 32, sizes=(32, 1)),
    "MLP": Workload("mlp", (384,), 32, sizes=(384, 4)),
    "large MLP": Workload("mlp", (1024,), 64, sizes=(1024, 4)),
    "transformer": Workload("transformer", (32,), 8),
    "convnet": Workload("convnet", (3, 16, 16), 16),
}


def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
    """Returns the one optimizer of all variants."""
    return torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)


class Classifier(pl.LightningModule):
    """A workload in Lightning.

    Attributes:
        started_s: clock at the start of each training step.
        losses: of the training steps.
        num_evaluated: samples in the validation steps of this rank.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.network = workload.network()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES)
        self.started_s: list[float] = []
        self.losses: list[Tensor] = []
        self.num_evaluated = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.started_s.append(time.perf_counter())
        inputs, labels = batch
        loss = F.cross_entropy(self.network(inputs), labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        self.num_evaluated += len(labels)
        logits = self.network(inputs)
        self.accuracy.update(logits, labels)
        self.log("accuracy", self.accuracy)
        self.log("loss", F.cross_entropy(logits, labels), batch_size=len(labels), sync_dist=True)
        self.log("confidence", logits.softmax(dim=1).amax(dim=1).mean(), batch_size=len(labels), sync_dist=True)
        self.log("largest", logits.amax(), reduce_fx="max", batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.network)
