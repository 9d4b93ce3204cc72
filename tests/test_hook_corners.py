"""Communication hooks where their users' programs are unusual: two models, sixteen bits, GANs, runs between runs."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import CustomDDPStrategy, SamplerEpoch
from ddp_plugin.hooks import HOOKS, Contents, attach
from tests.harness import ranks, trainer
from tests.test_hook_contract import REDUCING, everyone, flat, record
from tests.test_hooks_in_training import Model, loader


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_record_travels_to_a_spawned_process(name: str) -> None:
    assert pickle.loads(pickle.dumps(HOOKS[name]())).name == name


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_two_models_with_a_hook_each_in_one_backward(name: str) -> None:
    nets = [nn.Linear(40, size, dtype=torch.float64) for size in (40, 7)]
    models = [DistributedDataParallel(net) for net in nets]
    hooks = [attach(record(name), model) for model in models]
    given, expected = torch.zeros(1), torch.zeros(1)
    for step in range(4):
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
        own = flat(
            torch.autograd.grad(sum(net(x).square().sum() for net in nets), [p for n in nets for p in n.parameters()])
        )
        for model in models:
            model.zero_grad()
        sum(model(x).square().sum() for model in models).backward()  # type: ignore[union-attr]
        found = flat(p.grad for net in nets for p in net.parameters())
        assert all(torch.equal(part, found) for part in everyone(found))
        given, expected = given + found, expected + everyone(own).mean(dim=0)
    held = [(hook.state() or {"residuals": {}})["residuals"] for hook in hooks]
    kept = flat(
        h.get(n, torch.zeros_like(p)) for h, net in zip(held, nets, strict=True) for n, p in net.named_parameters()
    )
    atol = 1e-9 if hooks[0].leaves_error else 0.02
    assert torch.allclose(given + kept, expected, rtol=0, atol=atol * float(expected.abs().max()))
    for hook in hooks:
        hook.close()


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_sixteen_bits_without_feedback_stay_within_the_bound(name: str, dtype: torch.dtype) -> None:
    hook = HOOKS[name](error_feedback=False)
    for largest in (1e-3, 1.0, 8.0):
        values = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank())).mul(largest).to(dtype)
        given = everyone(values)
        hook.make_exchange(dist.group.WORLD).mean_(values, contents := Contents(("w",), ((999,),), dtype))
        rounding = 4 * torch.finfo(dtype).eps * given.double().abs().amax(dim=0) + torch.finfo(dtype).tiny
        error = (values.double() - given.double().mean(dim=0)).abs()
        assert (error <= hook.error_bound(given, contents).amax(dim=0) + rounding).all()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = (nn.Linear(30, 30, dtype=torch.float64) for _ in range(2))


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_what_was_left_out_of_a_network_waits_while_another_one_trains(name: str) -> None:
    net = Pair()
    net.forward = lambda x, part: getattr(net, part)(x)  # type: ignore[method-assign,assignment]
    model = DistributedDataParallel(net, find_unused_parameters=True)
    attached = attach(record(name), model)
    given, expected = torch.zeros(1), torch.zeros(1)
    for step in range(8):
        part = ("first", "second")[step % 2]
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).double()
        own = torch.autograd.grad(net(x, part).square().sum(), list(net.parameters()), allow_unused=True)
        model.zero_grad()
        model(x, part).square().sum().backward()
        given = given + flat(torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters())
        mean = everyone(
            flat(torch.zeros_like(p) if g is None else g for p, g in zip(net.parameters(), own, strict=True))
        )
        expected = expected + mean.mean(dim=0)
    held = (attached.state() or {"residuals": {}})["residuals"]
    kept = flat(held.get(key, torch.zeros_like(p)) for key, p in net.named_parameters())
    atol = 1e-9 if attached.leaves_error else 0.02
    assert torch.allclose(given + kept, expected, rtol=0, atol=atol * float(expected.abs().max()))


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_a_parameter_without_elements_alone_in_its_dtype(name: str) -> None:
    net = nn.Linear(4, 2)
    net.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    net.forward = lambda x: nn.functional.linear(x, net.weight, net.bias) + net.empty.sum()  # type: ignore[method-assign]
    model = DistributedDataParallel(net)
    attach(record(name), model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert net.weight.grad is not None


@ranks(2, init=False)
@pytest.mark.parametrize("name", ["int8", "diloco"])
def test_a_validation_between_the_fit_and_the_checkpoint_drops_nothing(name: str, tmp_path: Path) -> None:
    run = trainer(strategy=CustomDDPStrategy(comm_hook=name), callbacks=[SamplerEpoch()])
    module = Model()
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    run.fit(module, loader())
    run.validate(module, loader(), verbose=False)
    run.save_checkpoint(path := str(tmp_path / "after.ckpt"))
    assert torch.load(path, weights_only=True)["ddp_plugin"]["comm_hook"]["name"] == name


@ranks(2, init=False)
def test_a_checkpoint_that_was_only_tested_does_not_reach_the_next_fit(tmp_path: Path) -> None:
    strategy = CustomDDPStrategy(comm_hook="int8")
    run = trainer(strategy=strategy, callbacks=[SamplerEpoch()])
    module = Model()
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    run.fit(module, loader())
    run.save_checkpoint(path := str(tmp_path / "end.ckpt"))
    dist.barrier()
    run.test(module, loader(), ckpt_path=path, verbose=False)

    class Look(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            state = strategy._attached_hook.state()  # type: ignore[union-attr]
            assert state is not None
            assert (state["num_steps"], state["residuals"]) == (0, {})

    run.callbacks.append(Look())
    run.fit_loop.max_epochs = 2
    run.fit(Model(), loader())


@ranks(2, init=False)
def test_leaving_diloco_says_what_is_dropped(tmp_path: Path) -> None:
    strategy = CustomDDPStrategy(comm_hook={"name": "diloco", "period": 2, "start_step": 0})
    run = trainer(strategy=strategy, callbacks=[SamplerEpoch()])
    run.fit(Model(), loader())
    run.save_checkpoint(path := str(tmp_path / "end.ckpt"))
    dist.barrier()
    for hook in ("int8", None):
        again = trainer(strategy=CustomDDPStrategy(comm_hook=hook), callbacks=[SamplerEpoch()], max_epochs=2)
        with pytest.MonkeyPatch.context() as patch:
            said: list[str] = []
            patch.setattr("ddp_plugin.strategy.wrapping.rank_zero_warn", said.append)
            again.fit(Model(), loader(), ckpt_path=path)
        assert any("comm_hook='diloco'; the outer momentum is dropped" in line for line in said), said


@ranks(1, init=False)
def test_an_average_of_weights_is_refused_beside_ranks_that_train_alone() -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    run = trainer(strategy=CustomDDPStrategy(comm_hook="local_sgd"), callbacks=[callbacks.EMAWeightAveraging()])
    with pytest.raises(ValueError, match="EMAWeightAveraging, whose average would be each rank's own"):
        run.fit(Model(), loader())
