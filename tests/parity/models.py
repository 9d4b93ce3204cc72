"""What is trained: three small float64 models, their data, and their losses per sample or token."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.parity.table import Cell

VOCABULARY, LENGTH, IGNORED = 7, 5, -100


class Net(nn.Module):
    """A trunk with an extra branch, used as the cell says: always, never, or in every other optimizer step."""

    def __init__(self, trunk: nn.Module, num_features: int, num_outputs: int, graph: str) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(num_features, num_outputs)
        self.branch = nn.Linear(num_features, num_outputs)
        self.graph = graph

    def forward(self, x: Tensor, step: int) -> Tensor:
        features = self.trunk(x)
        used = {"plain": True, "static": False, "unused": step % 2 == 0}[self.graph]
        return self.head(features) + self.branch(features) if used else self.head(features)


class Attention(nn.Module):
    """One causal block over an embedding with positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(LENGTH, width) / 4)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 2, batch_first=True)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        y = self.norm(x)
        x = x + self.mix(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(x)


def mlp() -> tuple[nn.Module, int, int]:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()), 8, 2


def convnet() -> tuple[nn.Module, int, int]:
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten()), 16, 3


def transformer() -> tuple[nn.Module, int, int]:
    return Attention(8), 8, VOCABULARY


def regression_data(n: int) -> TensorDataset:
    x = torch.randn(n, 6, dtype=torch.float64)
    return TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], 1))


def image_data(n: int) -> TensorDataset:
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0].sum((1, 2)) > 0).long() + (x[:, 1].sum((1, 2)) > 0).long())


def token_data(n: int) -> TensorDataset:
    """Sentences of 0 to 5 tokens: what follows the end is ignored, so batches differ in tokens."""
    tokens = torch.randint(VOCABULARY, (n, LENGTH))
    targets = (3 * tokens + 1) % VOCABULARY
    lengths = torch.arange(n) * 2 % (LENGTH + 1)
    targets[torch.arange(LENGTH) >= lengths[:, None]] = IGNORED
    return TensorDataset(tokens, targets)


def squared_errors(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), len(target)


def class_errors(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


def token_errors(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, int((target != IGNORED).sum())


@dataclass(frozen=True)
class Model:
    """How a model, its data and its optimizer are made, and its loss: the sum over its units, and their number."""

    trunk: Callable[[], tuple[nn.Module, int, int]]
    data: Callable[[int], TensorDataset]
    errors: Callable[[Tensor, Tensor], tuple[Tensor, int]]
    optimizer: Callable[[Any], torch.optim.Optimizer]


MODELS = {
    "mlp": Model(mlp, regression_data, squared_errors, lambda p: torch.optim.AdamW(p, lr=0.02)),
    "convnet": Model(convnet, image_data, class_errors, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "transformer": Model(transformer, token_data, token_errors, lambda p: torch.optim.AdamW(p, lr=0.01)),
}
SEED = 13
CLIP_NORM = 0.5


def net_of(cell: Cell) -> Net:
    torch.manual_seed(SEED)
    trunk, num_features, num_outputs = MODELS[cell.model].trunk()
    return Net(trunk, num_features, num_outputs, cell.graph).double()


def data_of(cell: Cell) -> TensorDataset:
    torch.manual_seed(SEED)
    return MODELS[cell.model].data(cell.num_samples)


def values_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone().double() for name, value in net.state_dict().items()}
