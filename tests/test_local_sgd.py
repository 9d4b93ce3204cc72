"""Local SGD and DiLoCo, against plain torch: as many models as ranks, side by side in one process, in float64."""

import contextlib
import copy
import io
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_plugin import (
    CustomDDPStrategy,
    GlobalMeanLoss,
    GradientNoiseScale,
    ReplicaConsistency,
    SamplerEpoch,
    _compat,
    matching,
)
from ddp_plugin.averaging import average, average_optimizer, chunks, take_from_first_rank
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.hooks import Averager, Contents, OuterStep, attach, resolve_hook
from ddp_plugin.hooks.periodic import outer_step
from ddp_plugin.replica_state import BUFFER, OPTIMIZER_STATE, PARAMETER
from tests.harness import RankFailureError, ranks, run_ranks, trainer

MICRO = 4  # samples of a micro-batch on each rank
NUM_MICRO = 22
DILOCO: dict[str, Any] = {"name": "diloco", "period": 3, "learning_rate": 0.6, "momentum": 0.8, "start_step": 0}
LATE: dict[str, Any] = DILOCO | {"start_step": 4}


def make_net(with_batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(7) if with_batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(5, 7), middle, nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def data_of(rank: int) -> TensorDataset:
    x = torch.randn(MICRO * NUM_MICRO, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x[:, :2] + rank))


def batch_of(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    part = slice(micro * MICRO, (micro + 1) * MICRO)
    x, y = data_of(rank).tensors
    return x[part], y[part]


def loader() -> DataLoader[Any]:
    return DataLoader(data_of(int(os.environ["RANK"])), batch_size=MICRO)


def loss_of(net: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def two_groups(net: nn.Module, kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    first, *others = net.parameters()
    settings: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return kind([{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.02}], **settings)  # type: ignore[call-arg]


def flat(net: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()]).clone()


def everything(net: nn.Module) -> Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in net.state_dict().values()]).clone()


def everyones(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def are_equal(values: list[Tensor]) -> bool:
    return all(torch.equal(value, values[0]) for value in values)


class Simulation:
    """As many models as ranks, and what they have in common now and then."""

    def __init__(self, world_size: int, spec: dict[str, Any], with_batch_norm: bool = False, **settings: Any) -> None:
        self.nets = [make_net(with_batch_norm) for _ in range(world_size)]
        kind = settings.get("kind", torch.optim.AdamW)
        self.optimizers = [two_groups(net, kind) for net in self.nets]
        self.anchor = copy.deepcopy(self.nets[0])
        is_local = spec["name"] == "local_sgd"
        self.outer = torch.optim.SGD(
            self.anchor.parameters(),
            lr=1.0 if is_local else spec["learning_rate"],
            momentum=0.0 if is_local else spec["momentum"],
            nesterov=not is_local and spec.get("nesterov", True),
        )
        self.period, self.start_step, self.num_steps = spec["period"], spec["start_step"], 0

    def step(self, micros: range, accumulate: int = 1) -> None:
        """One optimizer step on every rank, of several micro-batches."""
        is_exact = self.num_steps < self.start_step
        if is_exact:  # as DDP does
            for first, *others in zip(*(net.buffers() for net in self.nets), strict=True):
                for buffer in others:
                    buffer.copy_(first)
        for rank, net in enumerate(self.nets):
            net.zero_grad()
            for micro in micros:
                (loss_of(net, batch_of(rank, micro)) / accumulate).backward()
        if is_exact:
            self.average_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_steps += 1
        num_alone = self.num_steps - self.start_step
        if is_exact and num_alone == 0:
            self.anchor.load_state_dict(self.nets[0].state_dict())
            self.average_buffers()
        elif not is_exact and num_alone % self.period == 0:
            self.exchange()

    @torch.no_grad()
    def average_gradients(self) -> None:
        for parameters in zip(*(net.parameters() for net in self.nets), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(dim=0)
            for parameter in parameters:
                parameter.grad = mean.clone()

    @torch.no_grad()
    def exchange(self) -> None:
        for parameter, *others in zip(self.anchor.parameters(), *(net.parameters() for net in self.nets), strict=True):
            parameter.grad = parameter - torch.stack(list(others)).mean(dim=0)
        self.outer.step()
        for net in self.nets:
            for parameter, common in zip(net.parameters(), self.anchor.parameters(), strict=True):
                parameter.copy_(common)
        self.average_buffers()

    @torch.no_grad()
    def average(self) -> None:
        for values in zip(*(net.parameters() for net in self.nets), strict=True):
            mean = torch.stack(list(values)).mean(dim=0)
            for value in values:
                value.copy_(mean)
        self.average_buffers()

    def average_buffers(self) -> None:
        for values in zip(*(net.buffers() for net in self.nets), strict=True):
            mean = torch.stack(list(values)).mean(dim=0) if values[0].is_floating_point() else values[0].clone()
            for value in values:
                value.copy_(mean)

    def run(self, num_micro: int = NUM_MICRO, accumulate: int = 1) -> Tensor:
        for first in range(0, num_micro, accumulate):
            self.step(range(first, min(first + accumulate, num_micro)), accumulate)
        if self.num_steps >= self.start_step:
            self.average()
        return everything(self.nets[0])


class Regression(pl.LightningModule):
    def __init__(self, with_batch_norm: bool = False, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = make_net(with_batch_norm)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return two_groups(self.net, self.kind)


class TwoOptimizers(Regression):
    """Both step in each batch; manual optimization."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss_of(self.net, batch))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first, *others = self.net.parameters()
        return [torch.optim.AdamW([first], lr=0.05), torch.optim.AdamW(others, lr=0.02)]


def fit(spec: Any, module: Regression | None = None, strategy: dict[str, Any] | None = None, **settings: Any) -> Any:
    module = module or Regression()
    settings = {"use_distributed_sampler": False, "limit_train_batches": NUM_MICRO} | settings
    whole = trainer(strategy=CustomDDPStrategy(comm_hook=spec, **(strategy or {})), **settings)
    whole.fit(module, loader())
    return module


# --------------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("nesterov", [True, False])
def test_the_outer_step_is_torchs_sgd(nesterov: bool) -> None:
    torch.manual_seed(0)
    anchor, gradients = torch.randn(40), torch.randn(6, 40)
    parameter = nn.Parameter(anchor.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    momentum = torch.zeros(40)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        outer_step(anchor, gradient.clone(), momentum, OuterStep(1, 0.7, 0.9, nesterov))
        assert torch.equal(anchor, parameter)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"strategy": {"static_graph": True}},
    "search for unused": {"strategy": {"find_unused_parameters": True}},
    "gradients are views": {"strategy": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}},
    "accumulation": {"accumulate_grad_batches": 2},
    "accumulation in a static graph": {"accumulate_grad_batches": 4, "strategy": {"static_graph": True}},
}


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("start_step", [0, 4])
def test_diloco_is_what_it_says_in_any_setting_of_ddp(start_step: int, world_size: int) -> None:
    """Also with exact steps before it."""
    spec = DILOCO | {"start_step": start_step}
    for setting, settings in SETTINGS.items():
        expected = Simulation(world_size, spec).run(accumulate=settings.get("accumulate_grad_batches", 1))
        found = everything(fit(spec, **settings).net)
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12), (setting, (found - expected).abs().max())
    expected = Simulation(world_size, spec).run()
    for other in ({"momentum": 0.7}, {"start_step": 2}):
        assert not torch.allclose(Simulation(world_size, spec | other).run(), expected, rtol=1e-4), other


@ranks(3, init=False)
def test_local_sgd_is_the_mean_of_the_parameters(world_size: int) -> None:
    spec = {"name": "local_sgd", "period": 5, "start_step": 0}
    expected = Simulation(world_size, spec).run()
    assert torch.allclose(everything(fit(spec).net), expected, rtol=1e-11, atol=1e-12)


@ranks(2, init=False)
def test_several_optimizers_of_a_batch_are_one_step(world_size: int) -> None:
    for spec in (DILOCO, LATE):
        for strategy in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            expected = Simulation(world_size, spec).run()
            found = everything(fit(spec, TwoOptimizers(), strategy).net)
            assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12), (spec, strategy)


@ranks(3, init=False)
def test_statistics_of_batch_norm_are_averaged_with_the_parameters(world_size: int) -> None:
    sgd = torch.optim.SGD  # the bias before the layer has no gradient but noise, which Adam would blow up
    for spec in (DILOCO, LATE, LATE | {"start_step": 1}):
        expected = Simulation(world_size, spec, with_batch_norm=True, kind=sgd).run()
        module = fit(spec, Regression(with_batch_norm=True, kind=sgd))
        assert torch.allclose(everything(module.net), expected, rtol=1e-11, atol=1e-12)
        assert are_equal(everyones(everything(module.net)))
    own = fit(DILOCO, Regression(with_batch_norm=True), {"broadcast_buffers": False})
    assert not are_equal(everyones(own.net[1].running_mean))
    assert are_equal(everyones(flat(own.net)))


@ranks(2, init=False)
def test_every_step_with_plain_sgd_is_data_parallel_training(world_size: int) -> None:
    class PlainSGD(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    expected = everything(fit(None, PlainSGD()).net)
    found = everything(fit({"name": "local_sgd", "period": 1, "start_step": 0}, PlainSGD()).net)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-13)


@ranks(1, init=False)
def test_one_process_with_local_sgd_trains_as_if_there_were_no_hook() -> None:
    expected = everything(fit(None, Regression(with_batch_norm=True)).net)
    for start_step in (0, 3):
        spec = {"name": "local_sgd", "start_step": start_step}
        assert torch.equal(everything(fit(spec, Regression(with_batch_norm=True)).net), expected)


class PlainLBFGS(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4, line_search_fn="strong_wolfe")


EXACT: dict[str, tuple[Callable[[], Regression], dict[str, Any]]] = {
    **{name: (partial(Regression, with_batch_norm=True), settings) for name, settings in SETTINGS.items()},
    "manual": (TwoOptimizers, {}),
    "manual in a static graph": (TwoOptimizers, {"strategy": {"static_graph": True}}),
    "lbfgs": (PlainLBFGS, {}),
    "clipping": (Regression, {"gradient_clip_val": 0.05}),
}


@ranks(3, init=False)
def test_until_start_step_a_run_has_the_bits_of_one_without_a_hook() -> None:
    for name, (make, settings) in EXACT.items():
        expected = everyones(everything(fit(None, make(), **settings).net))
        found = everyones(everything(fit("diloco", make(), **settings).net))
        assert all(map(torch.equal, found, expected)), name  # rank by rank: buffers are each rank's own
    alone = everyones(everything(fit({"name": "diloco", "start_step": NUM_MICRO - 1}, make(), **settings).net))
    assert not torch.equal(alone[0], expected[0])


class Watches(pl.Callback):
    """Compares, after each batch, which kinds differ with which kinds the strategy says may differ."""

    def __init__(self, period: int, start_step: int = 0) -> None:
        self.period, self.start_step, self.seen = period, start_step, 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        parted = trainer.strategy.parted  # type: ignore[attr-defined]
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        found = {
            PARAMETER: flat(module.net),
            BUFFER: torch.cat([buffer.double().reshape(-1) for buffer in module.net.buffers()]),
            OPTIMIZER_STATE: torch.cat([value.double().reshape(-1) for value in states]),
        }
        differ = {kind for kind, value in found.items() if not are_equal(everyones(value))}
        num_alone = trainer.global_step - self.start_step
        if num_alone < 0:  # buffers are each rank's own until the next forward, as without a hook
            assert (differ - {BUFFER}, parted) == (set(), set()), trainer.global_step
            return
        assert differ == parted, (trainer.global_step, differ, parted)
        assert (PARAMETER in parted) == (num_alone % self.period != 0)
        self.seen += len(differ)


@ranks(2, init=False)
def test_ranks_differ_inside_a_period_only_and_the_strategy_knows() -> None:
    for start_step in (0, 5):
        watches = Watches(4, start_step)
        spec = {"name": "local_sgd", "period": 4, "start_step": start_step}
        fit(spec, Regression(with_batch_norm=True), callbacks=[watches])
        assert watches.seen > NUM_MICRO
    strategy = CustomDDPStrategy()
    fit(None)
    assert strategy.parted == frozenset()


# ------------------------------------------------------------------------------------------------- between exchanges


class LetsOneRankGoFirst(pl.Callback):
    """The last rank begins a batch when the first one has ended it, which no message between them would allow."""

    def __init__(self, period: int, wait_s: float = 20, start_step: int = 0) -> None:
        self.period, self.wait_s, self.start_step, self.num_waits = period, wait_s, start_step, 0

    def key(self, trainer: pl.Trainer, batch_idx: int) -> str | None:
        num_micro = trainer.accumulate_grad_batches
        num_alone = batch_idx // num_micro + 1 - self.start_step
        ends_step = (batch_idx + 1) % num_micro == 0 or batch_idx + 1 == NUM_MICRO
        meets = num_alone <= 0 or (ends_step and num_alone % self.period == 0)
        return None if meets else f"batch {batch_idx} of the first rank"

    def wait(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1 and (key := self.key(trainer, batch_idx)):
            _store().wait([key], timedelta(seconds=self.wait_s))
            self.num_waits += 1

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:  # before the first batch of an epoch the ranks compare what is trainable
            self.wait(trainer, batch_idx)

    def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 0:
            self.wait(trainer, 0)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0 and (key := self.key(trainer, batch_idx)):
            _store().set(key, "done")


def _store() -> Any:
    return _compat.default_store()


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("buffers were broadcast")


class RefusesBroadcasts(pl.Callback):
    """No buffers are broadcast by DDP when the exact steps are over."""

    def __init__(self, start_step: int) -> None:
        self.start_step = start_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.start_step:
            DistributedDataParallel._sync_buffers = refuse  # type: ignore[method-assign]


@ranks(2, init=False)
@pytest.mark.parametrize("start_step", [0, 1])
@pytest.mark.parametrize("setting", ["plain", "static graph", "search for unused", "accumulation in a static graph"])
def test_no_message_passes_between_ranks_inside_a_period(setting: str, start_step: int, world_size: int) -> None:
    """Not even that by which DDP rebuilds its buckets after its first reduction."""
    callbacks = [first := LetsOneRankGoFirst(5, start_step=start_step), RefusesBroadcasts(start_step)]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, DistributedDataParallel, "_sync_buffers", DistributedDataParallel._sync_buffers)
        spec = {"name": "local_sgd", "period": 5, "start_step": start_step}
        fit(spec, Regression(with_batch_norm=True), callbacks=callbacks, **SETTINGS[setting])
    num_alone = NUM_MICRO - start_step * SETTINGS[setting].get("accumulate_grad_batches", 1)
    assert dist.get_rank() != world_size - 1 or first.num_waits >= num_alone * 4 // 5


def first_goes_first_with_gradients() -> None:
    fit(None, callbacks=[LetsOneRankGoFirst(5, wait_s=2)])


def test_with_gradients_the_first_rank_could_not_go_first() -> None:
    with pytest.raises(RankFailureError, match="wait timeout.*batch 0 of the first rank"):
        run_ranks(first_goes_first_with_gradients, 2, init=False)


@ranks(2)
@pytest.mark.parametrize("start_step", [0, 5])
def test_a_plain_loop(start_step: int, world_size: int) -> None:
    spec = DILOCO | {"start_step": start_step}
    expected = Simulation(world_size, spec).run()
    for within in (DistributedDataParallel.no_sync, contextlib.nullcontext):
        net = make_net()
        model = DistributedDataParallel(net)
        attached, optimizer = attach(spec, model), two_groups(net, torch.optim.AdamW)
        assert isinstance(attached, Averager)
        for micro in range(NUM_MICRO):
            optimizer.zero_grad()
            with within(model) if attached.trains_alone else contextlib.nullcontext():
                loss_of(model, batch_of(dist.get_rank(), micro)).backward()
            optimizer.step()
            before = flat(net)
            attached.after_step()
            num_alone = micro + 1 - start_step
            assert are_equal(everyones(flat(net))) == (num_alone <= 0 or num_alone % 3 == 0)
            if num_alone < 0:
                attached.average()
            if num_alone <= 0:
                assert torch.equal(flat(net), before)
        attached.average()
        attached.close()
        assert torch.allclose(everything(net), expected, rtol=1e-11, atol=1e-12)


@ranks(1, 2)
def test_a_loop_that_never_reduces_is_told_so_in_an_exact_step(world_size: int) -> None:
    net = make_net()
    model = DistributedDataParallel(net)
    attached = attach(LATE, model)
    attached.after_step()  # there is no gradient, so nothing was missed
    for micro, within in enumerate((contextlib.nullcontext, model.no_sync)):
        net.zero_grad()
        with within():
            loss_of(model, batch_of(dist.get_rank(), micro)).backward()
        is_missed = within == model.no_sync and world_size > 1
        with (
            pytest.raises(DDPPluginError, match=r"start_step of diloco.*none in step 3.*no_sync")
            if is_missed
            else (contextlib.nullcontext())
        ):
            attached.after_step()


@ranks(2)
def test_an_average_in_the_exact_steps_leaves_everything_as_it_is() -> None:
    """Buffers are each rank's own until DDP broadcasts those of the first, as without a hook."""
    net = make_net(with_batch_norm=True)
    model = DistributedDataParallel(net)
    attached = attach(LATE, model)
    loss_of(model, batch_of(dist.get_rank(), 0)).backward()
    attached.after_step()
    before = everything(net)
    attached.average()
    assert torch.equal(everything(net), before)
    assert not are_equal(everyones(before))


def test_a_run_that_is_too_short_says_what_it_has_not_done() -> None:
    run_ranks(say_idle, 1)


def say_idle() -> None:
    for start_step, num_steps in ((0, 3), (4, 7)):
        attached = attach(DILOCO | {"start_step": start_step}, DistributedDataParallel(make_net()))
        said = []
        for _ in range(num_steps):
            said.append(attached.idle())
            attached.after_step()
        assert all(line is not None and "after 3" in line and "(period)" in line for line in said), said
        assert all(("gradients for 4 steps (start_step)" in line) == (start_step > 0) for line in said)
        assert attached.idle() is None


@ranks(2)
def test_a_loop_for_any_hook_may_call_both_with_gradients_too() -> None:
    net = make_net()
    model = DistributedDataParallel(net)
    attached = attach("bf16", model)
    loss_of(model, batch_of(dist.get_rank(), 0)).backward()
    before = flat(net)
    attached.after_step()
    attached.average()
    assert torch.equal(flat(net), before)


@ranks(3)
@pytest.mark.parametrize(
    "between",
    [
        "bf16",
        "fp16",
        "int8",
        {"name": "powersgd", "matrix_rank": 1, "start_step": 0},
        {"name": "topk", "start_step": 0},
    ],
)
def test_a_lossy_exchange_is_within_the_bound_and_nothing_is_lost_for_good(between: Any, world_size: int) -> None:
    """Over several periods: what was applied, and what is still held back, is what the ranks did."""
    hook = resolve_hook({"name": "local_sgd", "period": 2, "start_step": 0, "between": between})
    net = make_net()
    attached = attach(hook, DistributedDataParallel(net))
    applied, wanted = torch.zeros(len(flat(net))).double(), torch.zeros(len(flat(net))).double()
    named = dict(net.named_parameters())
    contents = Contents(tuple(named), tuple(tuple(p.shape) for p in named.values()), torch.float64)
    for index in range(8):
        anchor = flat(net)
        for step in range(2):
            torch.manual_seed(100 * index + 10 * step + dist.get_rank())
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            own = flat(net)
            attached.after_step()
        gradients = torch.stack(everyones(anchor - own))
        applied, wanted = applied + (anchor - flat(net)), wanted + gradients.mean(dim=0)
        assert are_equal(everyones(flat(net)))
        if index == 0:
            bound = hook.error_bound(gradients, contents).amax(dim=0) + 1e-12
            assert ((applied - wanted).abs() <= bound).all()
            assert (applied - wanted).abs().max() > 1e-9  # it is lossy
    state = attached.state()
    assert state is not None
    held = state["parameter_residuals"]
    if attached.leaves_error:
        held_back = torch.cat([held[name].reshape(-1) for name in named])
        assert held_back.abs().max() > 1e-9
        assert torch.allclose(applied + held_back, wanted, rtol=0, atol=1e-11)
    else:
        assert held == {}
        assert torch.allclose(applied, wanted, rtol=0, atol=0.02)


@ranks(2)
def test_the_first_exchanges_are_exact_as_the_hook_between_says() -> None:
    between = {"name": "powersgd", "matrix_rank": 1, "start_step": 4}
    net = make_net()
    attached = attach(
        {"name": "local_sgd", "period": 2, "start_step": 0, "between": between}, DistributedDataParallel(net)
    )
    for step in range(6):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter) * (1 + dist.get_rank()))
        mean = torch.stack(everyones(flat(net))).mean(dim=0)
        attached.after_step()
        if step in (1, 3, 5):
            assert torch.allclose(flat(net), mean, rtol=1e-12) == (step < 5), step


@ranks(2)
def test_half_precision_parameters_keep_an_anchor_that_does_not_round() -> None:
    """Steps smaller than a parameter's spacing add up in the anchor, and arrive."""
    net = nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        net.weight.fill_(1.0)
    spec = {"name": "diloco", "period": 1, "learning_rate": 0.05, "momentum": 0.0, "nesterov": False}
    attached = attach(spec | {"start_step": 0}, DistributedDataParallel(net))
    for _ in range(5):
        with torch.no_grad():
            net.weight.fill_(1.0 + 0.03125)  # 0.05 of it is below the spacing at 1, 2**-7
        attached.after_step()
    state = attached.state()
    assert state is not None
    anchor, expected = state["anchor"]["weight"], 1.0
    for _ in range(5):
        expected += 0.05 * (1.03125 - expected)
    assert anchor.dtype == torch.float32
    assert torch.allclose(anchor, torch.full((4, 4), expected))
    assert torch.equal(net.weight.detach(), anchor.bfloat16())


# ------------------------------------------------------------------------------------- one model where it is looked at


class Validated(Regression):
    """Keeps the parameters with which each rank validated."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(flat(self.net))


@ranks(3, init=False)
def test_ranks_validate_one_model_and_go_on_from_it(world_size: int) -> None:
    simulation = Simulation(world_size, DILOCO)
    expected = []
    for micro in range(NUM_MICRO):
        simulation.step(range(micro, micro + 1))
        if (micro + 1) % 4 == 0:
            simulation.average()
            expected.append(flat(simulation.nets[0]))
    simulation.average()
    module = Validated()
    whole = trainer(
        strategy=CustomDDPStrategy(comm_hook=DILOCO), val_check_interval=4, limit_val_batches=1,
        use_distributed_sampler=False,
    )  # fmt: skip
    whole.fit(module, loader(), loader())
    _, *found = module.validated  # the first is the sanity check's
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)
        assert are_equal(everyones(one))
    assert torch.allclose(everything(module.net), everything(simulation.nets[0]), rtol=1e-11, atol=1e-12)


class SavesAt(pl.Callback):
    """Saves after some steps of the whole run."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def memory_of(whole: pl.Trainer) -> Tensor:
    states = [value for state in whole.optimizers[0].state.values() for value in state.values()]
    return torch.cat([value.double().reshape(-1) for value in states])


BETWEEN: dict[str, Any] = {
    "local_sgd": {"name": "local_sgd", "period": 4, "start_step": 0},
    "diloco": {"name": "diloco", "period": 4, "start_step": 0},
    "int8": {"name": "diloco", "period": 4, "start_step": 0, "between": {"name": "int8", "block_size": 8}},
    "powersgd": {
        "name": "local_sgd",
        "period": 2,
        "start_step": 0,
        "between": {"name": "powersgd", "matrix_rank": 1, "start_step": 0},
    },
}


BETWEEN |= {
    "across the border": BETWEEN["diloco"] | {"start_step": 7},
    "at the border": BETWEEN["int8"] | {"start_step": 8},
    "before the border": BETWEEN["powersgd"] | {"start_step": 26},
}


def finish(
    spec: Any, folder: Path, saves: tuple[int, ...] = (), resume: Path | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    module = Regression(with_batch_norm=True, **settings)
    whole = trainer(
        strategy=CustomDDPStrategy(comm_hook=spec), callbacks=[SamplerEpoch(), SavesAt(folder, saves)], max_epochs=2,
        use_distributed_sampler=False,
    )  # fmt: skip
    whole.fit(module, loader(), ckpt_path=resume)
    return everything(module.net), memory_of(whole)


@ranks(2, init=False)
@pytest.mark.parametrize("kind", BETWEEN)
def test_a_resumed_run_goes_on_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    """From the middle of a period, from its end, from the next epoch, and from exact steps."""
    saves = (6, 8, 25)
    expected = finish(BETWEEN[kind], tmp_path, saves)
    undisturbed = finish(BETWEEN[kind], tmp_path)
    for step in saves:
        path = tmp_path / f"{step}.ckpt"
        saved = torch.load(path, weights_only=True)["ddp_plugin"]["comm_hook"]
        assert saved["num_steps"] == step
        assert bool(saved["anchor"]) == (step >= BETWEEN[kind]["start_step"])
        found = finish(BETWEEN[kind], tmp_path, tuple(s for s in saves if s > step), path)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), step
    is_disturbed = kind != "before the border"
    assert (
        torch.equal(undisturbed[0], expected[0]) != is_disturbed
    )  # a checkpoint averages in the run that writes it, too


@ranks(3, init=False)
def test_exact_steps_are_resumed_with_the_same_buckets(tmp_path: Path) -> None:
    """On three ranks their layout decides in which order gradients add up."""
    spec = BETWEEN["across the border"]
    expected = finish(spec, tmp_path, (6,))
    found = finish(spec, tmp_path, (), tmp_path / "6.ckpt")
    assert all(map(torch.equal, found, expected))


def save_once(checkpoint: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()


@ranks(2, init=False)
def test_the_state_is_needed(tmp_path: Path) -> None:
    expected = finish(BETWEEN["diloco"], tmp_path, (6,))
    checkpoint = torch.load(tmp_path / "6.ckpt", weights_only=True)
    for key in ("anchor", "momentum", "num_steps"):
        state = copy.deepcopy(checkpoint["ddp_plugin"]["comm_hook"])
        state[key] = 7 if key == "num_steps" else {name: value + 0.01 for name, value in state[key].items()}
        changed = tmp_path / f"{key}.ckpt"
        save_once(checkpoint | {"ddp_plugin": checkpoint["ddp_plugin"] | {"comm_hook": state}}, changed)
        assert not torch.equal(finish(BETWEEN["diloco"], tmp_path, (), changed)[0], expected[0]), key


def save_at_seven(folder: Path, spec: dict[str, Any]) -> None:
    finish(spec, folder, (7,), kind=torch.optim.SGD)


def go_on(path: Path, spec: dict[str, Any]) -> bytes:
    module = Regression(with_batch_norm=True, kind=torch.optim.SGD)
    strategy = CustomDDPStrategy(comm_hook=spec)
    whole = trainer(strategy=strategy, use_distributed_sampler=False, max_steps=14, max_epochs=-1)
    whole.fit(module, loader(), ckpt_path=path)
    file = io.BytesIO()
    torch.save((everything(module.net), strategy._attached_hook.state()), file)  # type: ignore[union-attr]
    return file.getvalue()


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("start_step", [0, 9])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_moves_to_another_number_of_ranks(world_size: int, start_step: int, tmp_path: Path) -> None:
    spec, path = DILOCO | {"start_step": start_step}, tmp_path / "7.ckpt"
    run_ranks(save_at_seven, 2, init=False, folder=tmp_path, spec=spec)
    checkpoint = torch.load(path, weights_only=True)
    found, state = torch.load(io.BytesIO(run_ranks(go_on, world_size, init=False, path=path, spec=spec)[0]))
    simulation = Simulation(world_size, spec, with_batch_norm=True, kind=torch.optim.SGD)
    saved = checkpoint["ddp_plugin"]["comm_hook"]
    values = {name.removeprefix("net."): value for name, value in checkpoint["state_dict"].items()}
    for net, optimizer in zip(simulation.nets, simulation.optimizers, strict=True):
        net.load_state_dict(values)
        optimizer.load_state_dict(copy.deepcopy(checkpoint["optimizer_states"][0]))
    assert bool(saved["anchor"]) == bool(saved["momentum"]) == (start_step <= 7)
    with torch.no_grad():
        for name, parameter in simulation.anchor.named_parameters() if saved["anchor"] else ():
            parameter.copy_(saved["anchor"][f"net.{name}"])
            simulation.outer.state[parameter]["momentum_buffer"] = saved["momentum"][f"net.{name}"].clone()
    simulation.num_steps = 7
    for micro in range(7):  # no callback keeps the place in the data
        simulation.step(range(micro, micro + 1))
    simulation.average()
    assert torch.allclose(found, everything(simulation.nets[0]), rtol=1e-11, atol=1e-12)
    assert state["num_steps"] == 14


@ranks(2, init=False)
def test_a_run_may_go_on_with_another_start_step(tmp_path: Path) -> None:
    """With a later one it reduces again, and what the periods had gathered is dropped; with an earlier one it parts."""
    spec = BETWEEN["int8"] | {"start_step": 3}
    finish(spec, tmp_path, (9, 2), kind=torch.optim.SGD)
    words = "what it had left out of the parameters for later and the outer momentum is dropped, because start_step=60"
    with pytest.warns(UserWarning, match=words) if dist.get_rank() == 0 else contextlib.nullcontext():
        late = finish(spec | {"start_step": 60}, tmp_path, (29,), tmp_path / "9.ckpt", kind=torch.optim.SGD)
    checkpoint = torch.load(tmp_path / "9.ckpt", weights_only=True)
    del checkpoint["ddp_plugin"]["comm_hook"]
    save_once(checkpoint, bare := tmp_path / "bare.ckpt")
    assert torch.equal(late[0], finish(None, tmp_path, (), bare, kind=torch.optim.SGD)[0])
    finish(spec | {"start_step": 0}, tmp_path, (30,), tmp_path / "2.ckpt", kind=torch.optim.SGD)
    for step in (29, 30):
        state = torch.load(tmp_path / f"{step}.ckpt", weights_only=True)["ddp_plugin"]["comm_hook"]
        assert bool(state["anchor"]) == bool(state["momentum"]) == (step == 30)


@ranks(2, init=False)
def test_a_state_of_gradients_and_one_of_parameters_are_not_mixed_up(tmp_path: Path) -> None:
    gradients = {"name": "int8", "block_size": 8}
    finish(gradients, tmp_path, (6,))
    with pytest.warns(UserWarning, match="exchanges parameters") if dist.get_rank() == 0 else contextlib.nullcontext():
        finish(BETWEEN["int8"], tmp_path, (25,), tmp_path / "6.ckpt")
    state = torch.load(tmp_path / "25.ckpt", weights_only=True)["ddp_plugin"]["comm_hook"]
    assert any(value.any() for value in state["parameter_residuals"].values())
    attached = attach(gradients, DistributedDataParallel(make_net()))
    assert "what it had left out of the parameters for later and the outer momentum is dropped" in attached.load(state)  # type: ignore[operator]
    assert attached.state()["residuals"] == {}  # type: ignore[index]
    with pytest.warns(UserWarning, match="exchanges gradients") if dist.get_rank() == 0 else contextlib.nullcontext():
        finish(gradients, tmp_path, (), tmp_path / "25.ckpt")
    with pytest.warns(UserWarning, match="no error feedback") if dist.get_rank() == 0 else contextlib.nullcontext():
        finish(BETWEEN["diloco"], tmp_path, (), tmp_path / "25.ckpt")


# ------------------------------------------------------------------------------------------------------- beside others


class Unfreezes(Regression):
    SCHEDULE = {4: {"0": True}, 8: {"3": False}, 13: {"3": True}}

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, trainable in self.SCHEDULE.get(batch_idx, {}).items():
            self.net.get_submodule(name).requires_grad_(trainable)


@ranks(2, init=False)
def test_parameters_are_unfrozen_and_frozen_inside_a_period(world_size: int) -> None:
    simulation = Simulation(world_size, {"name": "local_sgd", "period": 3, "start_step": 0})
    for net in simulation.nets:
        net[0].requires_grad_(False)
    for micro in range(NUM_MICRO):
        if micro in Unfreezes.SCHEDULE:
            simulation.average()
            for name, trainable in Unfreezes.SCHEDULE[micro].items():
                for net in simulation.nets:
                    net.get_submodule(name).requires_grad_(trainable)
        for net, optimizer in zip(simulation.nets, simulation.optimizers, strict=True):
            optimizer.zero_grad()
            for parameter in net.parameters():
                parameter.grad = None
        simulation.step(range(micro, micro + 1))
    simulation.average()
    module = fit({"name": "local_sgd", "period": 3, "start_step": 0}, Unfreezes())
    assert torch.allclose(everything(module.net), everything(simulation.nets[0]), rtol=1e-11, atol=1e-12)
    assert not torch.equal(module.net[0].weight, make_net()[0].weight)
    diloco = fit(DILOCO, Unfreezes())
    assert are_equal(everyones(everything(diloco.net)))


class Spoils(pl.Callback):
    """One bit of one rank's parameters changes, right after an exchange."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.global_rank == 1:
            with torch.no_grad():
                module.net[0].bias[0] += 1e-12


@ranks(2, init=False)
def test_replica_consistency_checks_after_exchanges_and_is_quiet_inside_a_period() -> None:
    spec = {"name": "local_sgd", "period": 4, "start_step": 0}
    for every in (1, 3, 6):
        checks = ReplicaConsistency(every)
        fit(spec, Regression(with_batch_norm=True), callbacks=[checks])
        with pytest.raises(DDPPluginError, match=r"after 8 steps.*parameter net\.0\.bias"):
            fit(spec, Regression(with_batch_norm=True), callbacks=[Spoils(), ReplicaConsistency(every)])


@ranks(2, init=False)
@pytest.mark.parametrize("callback", [GlobalMeanLoss, GradientNoiseScale])
def test_what_needs_reduced_gradients_refuses_in_words(callback: Any) -> None:
    with pytest.raises(ValueError, match="averages weights in place of gradients"):
        fit("local_sgd", callbacks=[callback()])


def test_nobody_can_watch_buckets_that_are_not_reduced() -> None:
    with pytest.raises(ValueError, match="exchanges parameters instead"):
        CustomDDPStrategy(comm_hook="diloco").add_bucket_observer(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"name": "local_sgd", "period": 0}, "period"),
        ({"name": "local_sgd", "period": True}, "period"),
        ({"name": "local_sgd", "start_step": -1}, "start_step"),
        ({"name": "diloco", "start_step": 1.5}, "start_step"),
        ({"name": "diloco", "learning_rate": 0.0}, "learning_rate"),
        ({"name": "diloco", "learning_rate": float("inf")}, "learning_rate"),
        ({"name": "diloco", "momentum": 1.0}, "momentum"),
        ({"name": "diloco", "momentum": 0.0}, "nesterov"),
        ({"name": "diloco", "between": "local_sgd"}, "exchanges parameters every few steps"),
        ({"name": "local_sgd", "between": "noop"}, "keeps the ranks' models equal"),
        ({"name": "local_sgd", "between": "nothing"}, "one of"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(settings: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CustomDDPStrategy(comm_hook=settings)


@pytest.mark.parametrize("name", ["process_group", "device_mesh", "delay_all_reduce_named_params"])
def test_settings_of_ddp_that_could_not_be_honoured_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CustomDDPStrategy(comm_hook="local_sgd", **{name: [("x", object())]})


class Divided(Regression):
    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns at its import

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=0.1)


@ranks(2, init=False)
def test_an_optimizer_that_is_divided_among_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer, which is divided"):
        fit("local_sgd", Divided())


class SkipsOne(TwoOptimizers):
    """The last rank leaves out a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 3 or self.global_rank == 0:
            super().training_step(batch, batch_idx)


@ranks(2, init=False)
def test_ranks_that_have_stepped_unequally_often_are_told_in_words_at_the_next_mean() -> None:
    expected = (
        f"the end of the training, after {NUM_MICRO} optimizer steps on rank 0; .*after {NUM_MICRO - 1}.* on rank 1"
    )
    with pytest.raises(DDPPluginError, match=rf"same number of optimizer steps.*{expected}"):
        fit({"name": "local_sgd", "period": 50, "start_step": 0}, SkipsOne())


def skip_one() -> None:
    matching.PATIENCE = timedelta(seconds=1)
    fit({"name": "local_sgd", "period": 5, "start_step": 0}, SkipsOne())


def test_a_rank_that_waits_for_an_exchange_says_so() -> None:
    with pytest.raises(
        RankFailureError, match="waits for the other ranks.*: an exchange of parameters after 5 optimizer"
    ):
        run_ranks(skip_one, 2, init=False)


class LeavesOutAStep(TwoOptimizers):
    """The last rank reduces its gradients with the others, and leaves out a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3 and self.global_rank:
            self.manual_backward(loss_of(self.net, batch))
        else:
            super().training_step(batch, batch_idx)


def leave_out_a_step() -> None:
    matching.PATIENCE = timedelta(seconds=1)
    fit({"name": "local_sgd", "start_step": 5}, LeavesOutAStep())


def test_ranks_that_come_to_the_first_period_unequally_are_told_in_words() -> None:
    expected = r"waits for the other ranks.*: the beginning of the first period \(start_step\) after 5 optimizer"
    with pytest.raises(RankFailureError, match=expected):
        run_ranks(leave_out_a_step, 2, init=False)


class WithLBFGS(Regression):
    def configure_optimizers(self) -> Any:
        rate = 1.0 if self.global_rank == 0 else 1e-3
        return torch.optim.LBFGS(self.parameters(), lr=rate, max_iter=4 + 3 * self.global_rank)


@ranks(2, init=False)
def test_lbfgs_searches_on_each_rank_alone() -> None:
    """As many closures as a rank wants, and one memory in the end."""
    strategy = CustomDDPStrategy(comm_hook={"name": "local_sgd", "period": 2, "start_step": 0})
    whole = trainer(strategy=strategy, limit_train_batches=5, use_distributed_sampler=False)
    module = WithLBFGS()
    whole.fit(module, loader())
    assert are_equal(everyones(flat(module.net)))
    (state,) = whole.optimizers[0].state.values()
    assert len({len(directions) for directions in everyones(state["old_dirs"])}) == 1
    assert are_equal(everyones(torch.stack(state["old_dirs"])))


# --------------------------------------------------------------------------------------------------------- the means


def test_chunks_keep_kinds_apart_and_stay_small() -> None:
    tensors = [
        torch.zeros(3),
        torch.zeros(3).double(),
        torch.zeros(0),
        torch.zeros(2),
        torch.zeros(2**23),
        torch.ones(1),
    ]
    assert chunks(tensors) == [[0, 3], [1], [4], [5]]


@ranks(1, 2, 3, 5)
def test_averages_are_means_in_full_precision(world_size: int) -> None:
    rank = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        for shape in ((), (1,), (7,), (4, 3)):
            every = [
                torch.randn(shape, generator=torch.Generator().manual_seed(r), dtype=torch.float64).to(dtype)
                for r in range(world_size)
            ]
            wide = torch.complex128 if dtype.is_complex else torch.float64
            expected = torch.stack([value.to(wide) for value in every]).mean(dim=0)
            found = every[rank].clone()
            average([found], dist.group.WORLD)
            num_roundings = 1 if dtype.itemsize == 2 else world_size
            largest = torch.stack([value.abs().double().amax() for value in every]).max()
            allowance = num_roundings * torch.finfo(dtype).eps * largest
            assert ((found.to(wide) - expected).abs() <= allowance).all(), (dtype, shape)
    count, columns = torch.tensor(7919.0), torch.arange(6.0).view(2, 3).T + rank
    average([count, columns], dist.group.WORLD)
    assert count.item() == 7919.0
    assert torch.allclose(columns, torch.arange(6.0).view(2, 3).T + (world_size - 1) / 2)
    mine = [torch.tensor([rank, 5 + rank]), torch.tensor(rank == 0)]
    take_from_first_rank(mine, dist.group.WORLD)
    assert mine[0].tolist() == [0, 5]
    assert mine[1].item() is True


@ranks(7)
def test_counts_that_are_equal_everywhere_stay_so_also_where_their_sum_needs_more_bits() -> None:
    counts = torch.arange(2**24 - 40, 2**24).float().unbind()
    found = [count.clone() for count in counts]
    average(found, dist.group.WORLD)
    assert torch.equal(torch.stack(found), torch.stack(counts))
    in_fp32 = torch.stack(counts)
    dist.all_reduce(in_fp32)
    assert not torch.equal(in_fp32 / 7, torch.stack(counts))


def stepped(kind: Callable[[list[nn.Parameter]], torch.optim.Optimizer], rank: int) -> torch.optim.Optimizer:
    """Three parameters, of which each rank has stepped others: the first on all, the last on rank 1 alone."""
    torch.manual_seed(rank)
    parameters = [nn.Parameter(torch.randn(3, 2, dtype=torch.float64)) for _ in range(3)]
    optimizer = kind(parameters)
    for _ in range(4):
        for index, parameter in enumerate(parameters):
            is_used = index == 0 or (index == 1 and rank != 0) or (index == 2 and rank == 1)
            parameter.grad = torch.randn_like(parameter) if is_used else None
        optimizer.step()
    return optimizer


@ranks(3)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop])
def test_optimizers_become_one_also_where_ranks_stepped_other_parameters(kind: Any, world_size: int) -> None:
    optimizers = [stepped(kind, rank) for rank in range(world_size)]
    own = optimizers[dist.get_rank()]
    expected: list[dict[str, Tensor]] = []
    for parameters in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers), strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)]
        held = [state for state in states if state]
        keys = held[0] if held else {}
        expected.append({key: torch.stack([state[key].double() for state in held]).mean(dim=0) for key in keys})
    copied = copy.deepcopy(own)
    average_optimizer(copied, dist.group.WORLD, dist.group.WORLD)
    for parameter, state in zip(copied.param_groups[0]["params"], expected, strict=True):
        found = copied.state[parameter]
        assert found.keys() == state.keys()
        for key, value in state.items():
            eps = torch.finfo(found[key].dtype).eps
            assert torch.allclose(found[key].double(), value, rtol=8 * eps, atol=8 * eps), key
            assert are_equal(everyones(found[key])), key
            if key == "step" and kind is not torch.optim.Adagrad:  # which counts what it has not stepped as well
                assert found[key].item() == 4


@ranks(2)
def test_what_is_no_mean_is_taken_from_the_first_rank_that_has_it() -> None:
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {
        "count": 3 + rank,
        "momentum_buffer": torch.ones(2) if rank else None,
        "shape": torch.full((2 + rank,), float(rank)),
        "list": [torch.tensor([1 + rank])],
        **({"late": "yes"} if rank else {}),
    }
    average_optimizer(optimizer, dist.group.WORLD, dist.group.WORLD)
    state = optimizer.state[parameter]
    assert (state["count"], state["momentum_buffer"], state["late"]) == (3, None, "yes")
    assert state["shape"].tolist() == [0.0, 0.0]
    assert state["list"] == [torch.tensor([1])]


def test_the_record_says_what_it_is() -> None:
    hook = resolve_hook({"name": "diloco", "period": 30, "between": "bf16"})
    assert (hook.period, hook.is_direct, hook.start_step) == (30, False, 200)
    assert resolve_hook({"name": "local_sgd", "between": "powersgd", "start_step": 7}).start_step == 7
    assert hook.outer == OuterStep(30, 0.7, 0.9, True)
    contents = Contents(("w",), ((100,),), torch.bfloat16)
    exact = resolve_hook({"name": "local_sgd"})
    assert exact.wire_bytes(contents, 2, 0) == 400  # differences travel in fp32
    assert hook.wire_bytes(contents, 2, 0) == 200
