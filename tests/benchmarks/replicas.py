"""What ``ReplicaConsistency`` costs at its default interval, and what ``DecisionSync`` adds to a step.

A check is made after every step here, and timed beside the step that it follows; by default it is made once in a
hundred steps, so its share is a hundredth of the ratio.
"""

import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_plugin import CustomDDPStrategy, DecisionSync, ReplicaConsistency
from ddp_plugin.agreement import Agreement
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row
from tests.benchmarks.training import fit, samples
from tests.harness import ROOT, trainer

__all__ = ["rows", "time_checks", "time_decisions", "time_posts"]

CHECK, STEP = "check", "step"
WITH, WITHOUT = "CustomDDPStrategy + DecisionSync", "CustomDDPStrategy"
NUM_SKIPPED = 3  # first steps: optimizer states are made, buckets rebuilt, allocators warmed up


class LanguageModel(pl.LightningModule):
    """The network, batch and optimizer of the language-model recipe's default configuration, on random tokens."""

    def __init__(self) -> None:
        from transformer import Transformer, TransformerConfig  # a recipe; on the path of the ranks only

        super().__init__()
        settings: Any = OmegaConf.load(ROOT / "recipes/conf/llm.yaml")
        torch.manual_seed(0)
        self.network = Transformer(TransformerConfig(vocab_size=settings.tokenizer.vocab_size, **settings.model))
        self.batch_size = settings.trainer.batch_size
        self.shape = (settings.tokenizer.vocab_size, settings.model.block_size + 1)

    def loader(self, num_steps: int) -> DataLoader[Any]:
        """Returns ``num_steps`` batches for each rank."""
        vocab_size, num_tokens = self.shape
        num_samples = num_steps * self.batch_size * dist.get_world_size()
        data = TensorDataset(torch.randint(0, vocab_size, (num_samples, num_tokens)))
        return DataLoader(data, self.batch_size, sampler=DistributedSampler(data, shuffle=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0]
        return F.cross_entropy(self.network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TimedConsistency(ReplicaConsistency):
    """Checks after every step, and notes when each check begins and ends."""

    def __init__(self) -> None:
        super().__init__(every_n_steps=1)
        self.began_s: list[float] = []
        self.ended_s: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Checks, between two readings of the clock."""
        self.began_s.append(time.perf_counter())
        super().on_train_batch_end(*arguments)
        self.ended_s.append(time.perf_counter())


def time_checks(num_steps: int, num_rounds: int) -> Times:
    """Returns the seconds of a check and of the step that it follows, on this rank.

    Collectives:
        Those of the trainings, on all ranks.
    """
    times: Times = {CHECK: [], STEP: []}
    for _ in range(num_rounds):
        module, timed = LanguageModel(), TimedConsistency()
        trainer(strategy=CustomDDPStrategy(), callbacks=[timed]).fit(module, module.loader(num_steps + NUM_SKIPPED + 1))
        pairs = list(zip(timed.began_s, timed.ended_s, strict=True))[NUM_SKIPPED:]
        times[CHECK].append(statistics.median(ended - began for began, ended in pairs[1:]))
        times[STEP].append(statistics.median(now[0] - before[1] for before, now in zip(pairs, pairs[1:], strict=False)))
    return times


def time_decisions(num_steps: int, num_rounds: int) -> Times:
    """Times a training step with and without ``DecisionSync`` on this rank.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    workload = WORKLOADS["MLP"]
    data = samples(workload, num_steps)
    return interleaved(
        {
            WITH: lambda: fit(workload, data, strategy=CustomDDPStrategy(), callbacks=[DecisionSync()])[0],
            WITHOUT: lambda: fit(workload, data, strategy=CustomDDPStrategy())[0],
        },
        num_rounds,
    )


def time_posts(num_steps: int, num_rounds: int) -> list[float]:
    """Returns the seconds of one exchange of wishes beside a step, one number a round; the step is a millisecond long.

    Collectives:
        One all-reduce per step and a group, on all ranks.
    """
    agreement = Agreement(dist.new_group(backend="gloo"))
    found = []
    for _ in range(num_rounds):
        elapsed_s = 0.0
        for _ in range(num_steps):
            time.sleep(1e-3)
            begin = time.perf_counter()
            agreement.post()
            elapsed_s += time.perf_counter() - begin
        found.append(elapsed_s / num_steps)
    agreement.settle()
    return found


def rows(checks: Times, decisions: Times, posts_by_rank: list[list[float]]) -> list[Row]:
    """Returns the report."""
    section = f"one check of ReplicaConsistency / one training step; made in 1 of {ReplicaConsistency().every_n_steps}"
    posts_us = [1e6 * max(round_) for round_ in zip(*posts_by_rank, strict=True)]
    wishes = "wishes to stop of DecisionSync per step, microseconds"
    return [
        ratio_row(section, "the language-model recipe's network", checks, CHECK, STEP),
        ratio_row("training step with DecisionSync / without", "MLP", decisions, WITH, WITHOUT),
        Row(wishes, "sent beside a step", "us", statistics.median(posts_us), min(posts_us), max(posts_us)),
    ]
