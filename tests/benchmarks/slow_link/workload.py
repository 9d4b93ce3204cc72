"""What is trained: the language-model recipe's transformer, on text that is drawn from a Markov chain."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.harness import ROOT

if str(ROOT / "recipes") not in sys.path:
    sys.path.append(str(ROOT / "recipes"))

from optimizer import make_adamw  # the recipes are programs beside one another, not a package
from transformer import Transformer, TransformerConfig, token_nats

__all__ = ["FULL", "SHORT", "TINY", "Batches", "LanguageModel", "MarkovText", "Workload"]

PROBABILITIES = (0.55, 0.25, 0.15, 0.05)  # of a symbol's successors
HELD_OUT = 2**20  # a stream that no rank trains on


@dataclass(frozen=True)
class Workload:
    """A model and its batches.

    Attributes:
        vocab_size: ids of the model; the text uses ``num_symbols`` of them.
        num_symbols: different tokens in the text.
        block_size: tokens of a sample.
        batch_size: samples per rank and step.
        num_layers: blocks.
        dim: width.
        learning_rate: of AdamW.
    """

    vocab_size: int
    num_symbols: int
    block_size: int
    batch_size: int
    num_layers: int
    dim: int
    learning_rate: float = 2e-3

    @property
    def config(self) -> TransformerConfig:
        """The transformer's sizes: heads of 32, half as many for keys and values, a feed-forward 3.5 times as wide."""
        num_heads = self.dim // 32
        return TransformerConfig(
            vocab_size=self.vocab_size,
            block_size=self.block_size,
            num_layers=self.num_layers,
            dim=self.dim,
            num_heads=num_heads,
            num_kv_heads=num_heads // 2,
            hidden_dim=self.dim * 7 // 2,
        )

    def network(self, seed: int) -> Transformer:
        """Returns the network, with the same weights for the same seed."""
        torch.manual_seed(seed)
        return Transformer(self.config)


FULL = Workload(vocab_size=3072, num_symbols=16, block_size=112, batch_size=8, num_layers=8, dim=256)
SHORT = replace(FULL, block_size=64, batch_size=2)  # the same model, where what counts is steps and not their time
TINY = Workload(vocab_size=256, num_symbols=16, block_size=16, batch_size=2, num_layers=2, dim=64)


class MarkovText:
    """Text in which each symbol has four successors, of unequal probability: a model has something to learn.

    Args:
        num_symbols: different tokens, ``0 … num_symbols - 1``.
        seed: of the table of successors; the same text for everyone who uses the same.
    """

    def __init__(self, num_symbols: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(num_symbols, num_symbols, generator=generator).argsort(dim=1)
        self.successors = order[:, : len(PROBABILITIES)]
        self.probabilities = torch.tensor(PROBABILITIES)

    @property
    def entropy_nats(self) -> float:
        """What no model can do better than, per token, once it knows the token before."""
        return float(-(self.probabilities.double() * self.probabilities.double().log()).sum())

    def draw(self, num_samples: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Returns tokens: int64, shape ``(num_samples, num_tokens)``."""
        tokens = torch.empty(num_samples, num_tokens, dtype=torch.int64)
        tokens[:, 0] = torch.randint(len(self.successors), (num_samples,), generator=generator)
        shape = (num_samples, num_tokens)
        choices = torch.multinomial(self.probabilities, num_samples * num_tokens, True, generator=generator).view(shape)
        for position in range(1, num_tokens):
            tokens[:, position] = self.successors[tokens[:, position - 1], choices[:, position]]
        return tokens


class Batches:
    """One rank's batches without end, the same in each run: ``(inputs, targets)``, int64, ``(batch, block)`` each.

    Args:
        workload: gives the shapes.
        seed: of the run.
        stream: rank, or another number for a stream of its own.
    """

    def __init__(self, workload: Workload, seed: int, stream: int) -> None:
        self.workload = workload
        self.text = MarkovText(workload.num_symbols)
        self.seed = seed * 2 * HELD_OUT + stream

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = self.text.draw(self.workload.batch_size, self.workload.block_size + 1, generator)
            yield tokens[:, :-1], tokens[:, 1:]

    @classmethod
    def held_out(cls, workload: Workload, num_batches: int = 16) -> tuple[Tensor, Tensor]:
        """Returns one large batch that is the same for all seeds and ranks, and in nobody's training."""
        batches = iter(cls(workload, 0, HELD_OUT))
        inputs, targets = zip(*(next(batches) for _ in range(num_batches)), strict=True)
        return torch.cat(inputs), torch.cat(targets)


class LanguageModel(pl.LightningModule):
    """The network with its loss and its optimizer, for Lightning and for a plain loop alike."""

    def __init__(self, workload: Workload, seed: int) -> None:
        super().__init__()
        self.workload = workload
        self.network = workload.network(seed)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over tokens in nats."""
        return token_nats(self.network(inputs), targets) / targets.numel()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_adamw(self, self.workload.learning_rate, weight_decay=0.1)

    @torch.no_grad()
    def held_out_nats(self) -> float:
        """Returns the loss on the held-out batch, of this rank's parameters."""
        pairs = zip(*(t.split(self.workload.batch_size) for t in Batches.held_out(self.workload)), strict=True)
        losses = [float(self(inputs, targets)) for inputs, targets in pairs]
        return sum(losses) / len(losses)
