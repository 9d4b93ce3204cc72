"""Parameters without a gradient: named in the step where it happens, the last one included, with the cheapest cure."""

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from ddp_plugin import CustomDDPStrategy, _compat
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.wrapping.unused import named_parameter_errors, reworded
from tests.harness import RankFailureError, ranks, run_ranks, trainer

FREEZE, STATIC, FIND = "freeze them with requires_grad_", "set static_graph=True", "set find_unused_parameters=True"


def loader(num_batches: int = 4) -> DataLoader[Any]:
    world_size = int(os.environ["WORLD_SIZE"])
    x = torch.randn(2 * num_batches * world_size, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return DataLoader(TensorDataset(x), batch_size=2, shuffle=False)


class TwoHeads(pl.LightningModule):
    """A model of which some steps leave one head out."""

    def __init__(self, uses_both: Callable[[int], bool], manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(4, 4).double().requires_grad_(False)  # so that DDP's indices are not the module's
        self.body = nn.Linear(4, 4).double()
        self.left, self.right = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()
        self.uses_both, self.automatic_optimization = uses_both, not manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.body(self.frozen(batch[0]))
        loss = self.left(hidden).square().mean()
        if self.uses_both(batch_idx):
            loss = loss + self.right(hidden).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        return optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: pl.LightningModule, num_batches: int = 4, accumulate: int = 1, **strategy: Any) -> Any:
    run = trainer(strategy=CustomDDPStrategy(**strategy), accumulate_grad_batches=accumulate)
    run.fit(module, loader(num_batches))
    return run


def never(batch_idx: int) -> bool:
    return False


def all_but_the_last(batch_idx: int) -> bool:
    return batch_idx < 3


@ranks(1, 2, init=False)
@pytest.mark.parametrize("manual", [False, True])
def test_an_unused_parameter_is_named_in_its_own_step_with_its_cures(world_size: int, manual: bool) -> None:
    module = TwoHeads(lambda batch_idx: batch_idx != 1, manual)
    before: list[Tensor] = []

    class Notes(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            before.append(module.body.weight.detach().clone())

    run = trainer(callbacks=[Notes()])
    with pytest.raises(DDPPluginError, match=r"Got none for right\.weight, right\.bias") as error:
        run.fit(module, loader())
    assert all(cure in str(error.value) for cure in (FREEZE, FIND))
    assert (STATIC in str(error.value)) != manual  # a static graph does not go with several backwards in a step
    assert "prior iteration" in str(error.value.__cause__)
    assert run.global_step == 1
    assert torch.equal(module.body.weight, before[0])  # the step with unreduced gradients did not happen


@ranks(2, init=False)
@pytest.mark.parametrize("manual", [False, True])
def test_the_last_step_of_a_run_is_no_exception(manual: bool) -> None:
    with pytest.raises(DDPPluginError, match=r"none for right\.weight, right\.bias"):
        fit(TwoHeads(all_but_the_last, manual))


def _drift(strategy: DDPStrategy) -> list[float]:
    module = TwoHeads(all_but_the_last)
    trainer(strategy=strategy).fit(module, loader())
    return module.body.weight.flatten().tolist()


def _drift_of_lightnings() -> list[float]:
    return _drift(DDPStrategy())


def test_lightnings_strategy_lets_the_last_step_drift_without_a_word() -> None:
    first, second = run_ranks(_drift_of_lightnings, 2, init=False)
    assert first != second


def _one_rank_leaves_out() -> None:
    rank = int(os.environ["RANK"])
    fit(TwoHeads(lambda batch_idx: batch_idx < 3 or rank == 0))


def test_a_rank_that_alone_leaves_one_out_says_so_instead_of_letting_the_others_wait() -> None:
    with pytest.raises(RankFailureError, match=r"none for right\.weight, right\.bias, on rank 1 of 2"):
        run_ranks(_one_rank_leaves_out, 2, init=False, timeout_s=60)


@ranks(2, init=False)
def test_each_cure_cures() -> None:
    assert fit(TwoHeads(never), static_graph=True).global_step == 4
    assert fit(TwoHeads(lambda batch_idx: batch_idx % 2 == 0), find_unused_parameters=True).global_step == 4
    module = TwoHeads(never)
    module.right.requires_grad_(False)
    assert fit(module).global_step == 4


@ranks(2, init=False)
def test_a_static_graph_that_changes_names_what_changed() -> None:
    with pytest.raises(DDPPluginError, match=r"none for right\.weight, right\.bias.*static_graph=True promises"):
        fit(TwoHeads(lambda batch_idx: batch_idx != 2), static_graph=True)
    with pytest.raises(DDPPluginError, match=r"first step did not use: right\.weight, right\.bias.*instead of static"):
        fit(TwoHeads(lambda batch_idx: batch_idx == 2), static_graph=True)


@ranks(2, init=False)
def test_a_parameter_that_is_ready_twice_is_named() -> None:
    class Twice(TwoHeads):
        use_reentrant = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.frozen(batch[0])
            for _ in range(2):
                hidden = checkpoint(self.body, hidden, use_reentrant=self.use_reentrant)
            return (self.left(hidden) + self.right(hidden)).mean()

    def module(use_reentrant: bool = True) -> Twice:
        made = Twice(never)
        made.frozen.requires_grad_(True)
        made.use_reentrant = use_reentrant
        return made

    with pytest.raises(DDPPluginError, match=r"two for body\.(weight|bias).*use_reentrant=False"):
        fit(module())
    assert fit(module(), static_graph=True).global_step == 4  # the cures cure
    assert fit(module(use_reentrant=False)).global_step == 4


@ranks(2, init=False)
def test_accumulation_checks_where_it_reduces() -> None:
    # The head is used in the first micro-batch of each window only, which does not reduce.
    with pytest.raises(DDPPluginError, match=r"none for right\.weight, right\.bias"):
        fit(TwoHeads(lambda batch_idx: batch_idx % 2 == 0), accumulate=2)
    # And in the last one only: whatever came before, the reduction is complete.
    assert fit(TwoHeads(lambda batch_idx: batch_idx % 2 == 1), accumulate=2).global_step == 2


@ranks(1)
def test_the_messages_of_the_installed_torch_are_the_ones_that_are_reworded() -> None:
    net = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    net.forward = lambda x: net["a"](x)  # type: ignore[method-assign]
    model = DistributedDataParallel(net)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="prior iteration") as error:
        _compat.check_reduction_finished(model)
    text = reworded(str(error.value), [name for name, _ in net.named_parameters()])
    assert text is not None
    assert "none for b.weight, b.bias, on rank 0 of 1" in text


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({}, "If they never are, freeze them"),
        ({"static_graph": True}, "set find_unused_parameters=True instead"),
        ({"find_unused_parameters": True}, "detach what it returns beside the loss"),
    ],
)
def test_the_cure_is_one_that_is_not_in_force_already(settings: dict[str, bool], cure: str) -> None:
    message = "Expected to have finished reduction in the prior iteration ... Parameter indices which did not receive "
    text = reworded(message + "grad for rank 1: 0 2\n In addition", ["a", "b", "c"], **settings)
    assert text is not None
    assert "none for a, c. " in text
    assert cure in text


def test_names_that_torch_tells_itself_are_used() -> None:
    message = "Expected to have finished reduction in the prior iteration ...\nParameters which did not receive grad "
    text = reworded(message + "for rank 0: net.a.weight, net.a.bias\nParameter indices which ...", [])
    assert text is not None
    assert "none for net.a.weight, net.a.bias" in text


def test_other_errors_pass_as_they_are() -> None:
    assert reworded("CUDA out of memory", ["a"]) is None
    named_already = DDPPluginError("has been marked as ready twice")
    for error in (RuntimeError("CUDA out of memory"), ValueError("x"), named_already):
        with pytest.raises(type(error)) as raised, named_parameter_errors(["a"]):
            raise error
        assert raised.value is error
