"""A compiled model hands its gradients over while its backward runs, in both orders, or it is said why not."""

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, _compat
from ddp_plugin.wrapping.lost_overlap import Compilation, given_cap_mb, look_at_compilation, why_late
from tests.harness import ranks, run_ranks, trainer

MIB = 1 << 20
WIDTH, NUM_BLOCKS = 512, 4  # a block is a MiB: a bucket


class Block(nn.Module):
    """A layer in a class of its own: torch does not compile its own layers' ``.compile()``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, data: Tensor) -> Tensor:
        return data @ self.weight


class Chain(nn.Module):
    """Blocks one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))

    def forward(self, data: Tensor) -> Tensor:
        for block in self.blocks:
            data = block(data)
        return data


class Blocks(pl.LightningModule):
    """Equal blocks, whose gradients become ready one after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Chain()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))), 4)


class Events(Callback):
    """The order in which parts of the backward end and buckets become ready, in each step: no clock."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.strategy.add_bucket_observer(self)  # type: ignore[attr-defined]

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.steps.append([])

    def before_reduction(self, index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.steps[-1].append("bucket")

    def after_reduction(self, index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        """A compiler that notes when each of its backward graphs has been through."""
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def backward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            def noted(*arguments: Any) -> Any:
                result = graph(*arguments)
                if self.steps:
                    self.steps[-1].append("backward")
                return result

            return make_boxed_func(noted)

        def forward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=forward, bw_compiler=backward)(graph, inputs)  # type: ignore[no-untyped-call]


class CompileTheWrap(Callback):
    """Compiles what the strategy has wrapped."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.model = torch.compile(trainer.strategy.model, backend=self.backend)


def train(how: str) -> tuple[list[str], list[Tensor], Compilation, list[str]]:
    """Trains some steps; returns the last step's events, the weights, what the wrap saw, and what was warned."""
    events, model = Events(), Blocks()
    callbacks: list[Callback] = [events]
    if how == "module, then wrap":
        model = torch.compile(model, backend=events.backend)
    elif how == "wrap, then compile":
        callbacks.append(CompileTheWrap(events.backend))
    elif how == "block by block, uncut":
        for block in model.network.blocks:
            block.compile(backend=events.backend)
    elif how != "eager":
        model.network.compile(backend=events.backend)
    if how.endswith("uncut"):
        torch._dynamo.config.optimize_ddp = False
    if how == "ran before":
        model.network(torch.randn(4, WIDTH)).square().mean().backward()
        model.zero_grad()
    strategy = CustomDDPStrategy(bucket_cap_mb=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy=strategy, callbacks=callbacks, max_epochs=2).fit(model)
    weights = [p.detach().clone() for p in strategy.lightning_module.parameters()]  # type: ignore[union-attr]
    names = list(strategy.lightning_module_state_dict())
    assert names == [f"network.blocks.{number}.weight" for number in range(NUM_BLOCKS)], "no prefix of any wrapper"
    return events.steps[-1], weights, strategy.compilation, [str(warning.message) for warning in caught]


def is_overlapped(events: list[str]) -> bool:
    """Whether the first bucket is ready before the last part of the backward is through."""
    return events.index("bucket") < len(events) - 1 - events[::-1].index("backward")


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """The weights of a run without a compiler."""
    weights: list[Tensor] = run_ranks(train, 2, init=False, how="eager")[0][1]
    return weights


@pytest.mark.parametrize("how", ["compiled, then wrap", "wrap, then compile", "module, then wrap"])
def test_both_orders_reduce_while_the_backward_runs(how: str, expected: list[Tensor]) -> None:
    for events, weights, compilation, said in run_ranks(train, 2, init=False, how=how):
        assert events.count("bucket") == NUM_BLOCKS
        assert events.count("backward") >= 2
        assert is_overlapped(events), events
        torch.testing.assert_close(weights, expected)
        assert not any("optimize_ddp" in words for words in said)
        assert compilation == Compilation(how != "wrap, then compile", True, False)


@pytest.mark.parametrize("how", ["compiled, uncut", "ran before"])
def test_what_loses_the_overlap_is_known_at_the_wrap(how: str) -> None:
    for rank, (events, _, compilation, said) in enumerate(run_ranks(train, 2, init=False, how=how)):
        assert events.count("bucket") == NUM_BLOCKS
        assert not is_overlapped(events), events
        if how == "ran before":
            assert compilation == Compilation(True, True, True)
        else:
            assert compilation == Compilation(True, False, False)
            assert any("optimize_ddp is off" in words for words in said) is (rank == 0)


def test_block_by_block_needs_no_cuts() -> None:
    for events, *_ in run_ranks(train, 2, init=False, how="block by block, uncut"):
        assert is_overlapped(events), events


class AllAtOnce(torch.autograd.Function):
    """One backward function for all weights, as a recurrent network's kernel is."""

    @staticmethod
    def forward(context: Any, *weights: Tensor) -> Tensor:
        context.save_for_backward(*weights)
        return sum(weight.square().mean() for weight in weights)  # type: ignore[return-value]

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        found = []
        for weight in context.saved_tensors:
            for _ in range(6):
                found_now = torch.mm(weight, weight)
            found.append(found_now * gradients[0])
        return tuple(found)


class AtOnce(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return AllAtOnce.apply(*self.parameters())  # type: ignore[no-untyped-call, no-any-return]


@ranks(2, init=False)
@pytest.mark.filterwarnings("ignore")
def test_the_monitor_says_once_what_waits_for_the_end() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = CommunicationMonitor(every_n_steps=3)
        run = trainer(strategy=CustomDDPStrategy(bucket_cap_mb=1), callbacks=[monitor], max_epochs=3)
        run.fit(AtOnce())
    assert len(monitor.reports) > 2
    assert all(re.search(r"ready when \d+% of the backward", report.why_late or "") for report in monitor.reports)
    said = [str(warning.message) for warning in caught if "of the backward have passed" in str(warning.message)]
    assert len(set(said)) == len(said)
    assert bool(said) is run.is_global_zero


@ranks(2, init=False)
def test_the_monitor_is_silent_where_nothing_waits() -> None:
    monitor = CommunicationMonitor(every_n_steps=4)
    trainer(strategy=CustomDDPStrategy(bucket_cap_mb=1), callbacks=[monitor], max_epochs=3).fit(Wide())
    assert monitor.last_report is not None
    assert len(monitor.last_report.buckets) == NUM_BLOCKS
    assert monitor.last_report.why_late is None


class Wide(Blocks):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(1024, WIDTH)), 128)


# ----------------------------------------------------------------------------------------------------------- the words

EAGER, COMPILED = Compilation(), Compilation(is_compiled=True)
UNCUT, RAN = Compilation(True, is_cut=False), Compilation(True, has_run=True)


@pytest.mark.parametrize(
    ("ready_ratios", "compilation", "words"),
    [
        ([0.24, 0.49, 0.79, 1.0], EAGER, None),
        ([0.35, 0.61, 0.84, 1.0], COMPILED, None),
        ([0.35, 0.61, 0.84, 1.0], RAN, None),  # it had run without gradients
        ([0.35, 1.0], UNCUT, None),  # it was compiled block by block
        ([0.99, 0.99, 0.99, 1.0], UNCUT, "optimize_ddp"),
        ([0.93, 0.99, 0.99, 1.0], RAN, r"torch\.compiler\.reset\(\)"),
        ([0.99, 1.0], COMPILED, "block by block"),
        ([0.99, 1.0], EAGER, "recurrent"),
        ([1.0], EAGER, None),
        ([], EAGER, None),
    ],
)
def test_the_cause_of_late_buckets(ready_ratios: list[float], compilation: Compilation, words: str | None) -> None:
    found = why_late(ready_ratios, [8 * MIB] * len(ready_ratios), compilation)
    assert (found is None) if words is None else re.search(words, found or "")


def test_one_bucket_for_all_is_late_where_it_was_asked_for() -> None:
    assert "bucket_cap_mb=25" in (why_late([1.0], [20 * MIB], EAGER, 25) or "")
    assert why_late([1.0], [1 * MIB], EAGER, 25) is None, "too small to matter"
    assert why_late([1.0], [30 * MIB], EAGER, 25) is None, "a parameter of that size, which nobody can divide"
    assert why_late([1.0], [20 * MIB], EAGER, None) is None, "before DDP has made its buckets again"


@ranks(1)
def test_sizes_that_were_given() -> None:
    def wrapped(**settings: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(nn.Linear(2, 2), **settings)

    assert given_cap_mb(wrapped()) is None
    assert given_cap_mb(wrapped(bucket_cap_mb=25)) == 25.0
    assert given_cap_mb(wrapped(bucket_cap_mb_list=[1, 25])) is None
    assert given_cap_mb(None) is None


@ranks(1)
def test_what_dynamo_tells(world_size: int) -> None:
    model = nn.Sequential(Block())
    assert look_at_compilation(model) == Compilation()
    model[0].compile(backend="eager")
    assert look_at_compilation(model) == Compilation(True, True, False)
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert look_at_compilation(model) == Compilation(True, False, False)
    model(torch.ones(1, WIDTH))
    assert _compat.has_compiled_code(model)
    torch.compiler.reset()
    assert not _compat.has_compiled_code(model)
    linear: nn.Module = torch.compile(nn.Linear(2, 2), backend="eager")  # type: ignore[assignment]
    assert look_at_compilation(linear) == Compilation(True, True, False)
    linear(torch.ones(1, 2))
    assert look_at_compilation(linear) == Compilation(True, True, True)
