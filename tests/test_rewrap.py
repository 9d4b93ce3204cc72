"""Parameters unfrozen and frozen while training: the wrap follows, equals one process, or names ranks that differ."""

import gc
import os
import re
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.wrapping.rewrap import (
    TrainableParameters,
    differences,
    forget_buckets,
    in_words,
    meet,
    refuse_what_holds_on,
)
from tests.harness import RankFailureError, ranks, run_ranks, trainer

GLOBAL_BATCH = 6
NUM_MICRO = 12
# What happens before a micro-batch; 4 and 7 lie inside windows of three, and 7 freezes what holds gradients already.
SCHEDULE = {4: {"net.0": True}, 7: {"net.4": False}, 9: {"net.4": True, "net.0": False}}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    net[0].requires_grad_(False)
    return net


def make_data() -> TensorDataset:
    x = torch.randn(GLOBAL_BATCH * NUM_MICRO, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return TensorDataset(x, torch.sin(x[:, :3]))


def loader() -> DataLoader[Any]:
    world_size = int(os.environ["WORLD_SIZE"])
    sampler = DistributedSampler(make_data(), world_size, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(make_data(), batch_size=GLOBAL_BATCH // world_size, sampler=sampler)


class Regression(pl.LightningModule):
    def __init__(self, schedule: dict[int, dict[str, bool]] | None = None) -> None:
        super().__init__()
        self.net = make_net()
        self.schedule = SCHEDULE if schedule is None else schedule

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for name, trainable in self.schedule.get(batch_idx, {}).items():
            self.get_submodule(name).requires_grad_(trainable)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def one_process(num_accumulated: int) -> Tensor:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = make_data().tensors
    for micro in range(NUM_MICRO):
        for name, trainable in SCHEDULE.get(micro, {}).items():
            net.get_submodule(name.removeprefix("net.")).requires_grad_(trainable)
        if micro % num_accumulated == 0:
            optimizer.zero_grad()
        part = slice(micro * GLOBAL_BATCH, (micro + 1) * GLOBAL_BATCH)
        (nn.functional.mse_loss(net(x[part]), y[part]) / num_accumulated).backward()
        if (micro + 1) % num_accumulated == 0:
            optimizer.step()
    return flat(net)


def fit(accumulate: int = 1, module: Regression | None = None, **strategy: Any) -> Tensor:
    module = module or Regression()
    trainer(strategy=CustomDDPStrategy(**strategy), accumulate_grad_batches=accumulate).fit(module, loader())
    return flat(module)


def equal_on_all_ranks(value: Tensor) -> bool:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value)
    return all(torch.equal(part, parts[0]) for part in parts)


# --------------------------------------------------------------------------------------------------------- the numbers

SETTINGS: list[dict[str, Any]] = [
    {},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"comm_hook": "allreduce"},
    {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1e-4},
]


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_unfreezing_and_freezing_equal_one_process(world_size: int, accumulate: int) -> None:
    for settings in SETTINGS:
        found = fit(accumulate, **settings)
        assert torch.allclose(found, one_process(accumulate), rtol=0, atol=1e-12), settings
        assert equal_on_all_ranks(found), settings


@ranks(2, init=False)
def test_without_following_the_ranks_drift_apart() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CustomDDPStrategy, "_follow_trainable", lambda *_: None)
        patch.setattr(TrainableParameters, "unfrozen", lambda _: [])
        found = fit(module=Regression({4: {"net.0": True}}))
    assert not equal_on_all_ranks(found)


@ranks(2, init=False)
def test_without_averaging_what_was_accumulated_a_frozen_parameter_drifts_apart() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.strategy.wrapping.average_gradients", lambda *_: None)
        found = fit(3, module=Regression({7: {"net.4": False}}))
    assert not equal_on_all_ranks(found)


class Backbone(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double()
        self.head = nn.Linear(8, 3).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


@ranks(1, 2, 3, init=False)
def test_lightnings_backbone_finetuning_equals_one_process(world_size: int) -> None:
    module = Backbone()
    finetuning = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05, should_align=False, lambda_func=_constant, verbose=False
    )
    run = trainer(max_epochs=3, callbacks=[finetuning])
    run.fit(module, loader())
    assert len(run.optimizers[0].param_groups) == 2  # the callback's doing; the strategy left the optimizer alone

    reference, (x, y) = Backbone(), make_data().tensors
    rates = {"head": 0.1, "backbone": 0.05}
    for epoch in range(3):
        for micro in range(NUM_MICRO):
            part = slice(micro * GLOBAL_BATCH, (micro + 1) * GLOBAL_BATCH)
            loss = nn.functional.mse_loss(reference.head(reference.backbone(x[part])), y[part])
            reference.zero_grad()
            loss.backward()
            with torch.no_grad():
                for name, parameter in reference.named_parameters():
                    if name.startswith("head") or epoch > 0:
                        assert parameter.grad is not None
                        parameter -= rates[name.split(".")[0]] * parameter.grad
    assert torch.allclose(flat(module), flat(reference), rtol=0, atol=1e-12)


def _constant(epoch: int) -> float:
    return 1.0


# ------------------------------------------------------------------------------------------------ what a re-wrap leaves


class Counts:
    def __init__(self) -> None:
        self.num_parameters: list[int] = []

    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.num_parameters.append(len(parameters))

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass


class NotesWraps(pl.Callback):
    def __init__(self) -> None:
        self.wraps: list[weakref.ref[Any]] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        wrap = trainer.strategy.model
        if not self.wraps or self.wraps[-1]() is not wrap:
            self.wraps.append(weakref.ref(wrap))


@ranks(2, init=False)
def test_each_bucket_is_reduced_once_and_the_old_wrap_is_gone() -> None:
    counts, notes = Counts(), NotesWraps()
    strategy = CustomDDPStrategy()
    strategy.add_bucket_observer(counts)
    module = Regression({4: {"net.0": True}, 8: {"net.4": False}})
    trainer(strategy=strategy, callbacks=[notes]).fit(module, loader())
    assert counts.num_parameters == [4] * 4 + [6] * 4 + [4] * 4
    assert len(notes.wraps) == 3
    gc.collect()
    assert [reference() is None for reference in notes.wraps[:2]] == [True, True]


@ranks(2, init=False)
@pytest.mark.parametrize("as_view", [False, True])
def test_a_users_own_rewrap_changes_no_number_and_ends_a_wrap_that_is_held(as_view: bool) -> None:
    held: list[Any] = []

    class Rewraps(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx in (4, 6):
                held.append(trainer.strategy.model)
                trainer.strategy.rewrap()

    module = Regression({})
    strategy = CustomDDPStrategy(gradient_as_bucket_view=as_view)
    trainer(strategy=strategy, callbacks=[Rewraps()], accumulate_grad_batches=3).fit(module, loader())
    assert len({id(wrap) for wrap in held}) == 2
    assert all(isinstance(wrap, DistributedDataParallel) and not hasattr(wrap, "reducer") for wrap in held)
    assert torch.equal(fit(3, module=Regression({})), flat(module))


@ranks(2, init=False)
def test_buffers_of_each_rank_survive_where_ranks_keep_their_own() -> None:
    class WithBuffer(Regression):
        def __init__(self) -> None:
            super().__init__({4: {"net.0": True}})
            self.register_buffer("own", torch.zeros((), dtype=torch.float64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.own += int(os.environ["RANK"]) + 1
            return super().training_step(batch, batch_idx)

    own, common = WithBuffer(), WithBuffer()
    fit(module=own, forward_sync_buffers=False)
    assert own.own.item() == NUM_MICRO * (int(os.environ["RANK"]) + 1)
    fit(module=common)
    assert common.own.item() == NUM_MICRO - 1 + int(os.environ["RANK"]) + 1


@ranks(2, init=False)
def test_one_line_says_what_changed() -> None:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.strategy.wrapping.rank_zero_info", said.append)
        fit()
    assert said == [
        "CustomDDPStrategy: the model is wrapped again: unfrozen net.0.weight, net.0.bias.",
        "CustomDDPStrategy: the model is wrapped again: frozen net.4.weight, net.4.bias.",
        "CustomDDPStrategy: the model is wrapped again: "
        "unfrozen net.4.weight, net.4.bias; frozen net.0.weight, net.0.bias.",
    ]


@ranks(2, init=False)
def test_a_parameter_that_is_replaced_is_noticed_at_the_next_epoch() -> None:
    class Replaces(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[2] = nn.Linear(8, 7).double()  # other values on each rank
                self.trainer.optimizers[0].add_param_group({"params": self.net[2].parameters()})

    module = Replaces({})
    torch.manual_seed(int(os.environ["RANK"]))
    trainer(max_epochs=2).fit(module, loader())
    assert equal_on_all_ranks(flat(module))


# ------------------------------------------------------------------------------------------------- manual optimization


class Adversaries(pl.LightningModule):
    """Two players that take turns; each freezes the other while it moves, and one leaves it frozen."""

    def __init__(self, toggles: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
        self.toggles = toggles

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer, mine, other in zip(
            self.optimizers(), (self.first, self.second), (self.second, self.first), strict=True
        ):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            else:
                mine.requires_grad_(True)
                other.requires_grad_(False)
            loss = nn.functional.mse_loss(mine(batch[0]) + other(batch[0]).detach(), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(module.parameters(), lr=0.1) for module in (self.first, self.second)]


@ranks(2, init=False)
@pytest.mark.parametrize("toggles", [True, False])
def test_manual_optimization_may_freeze_inside_a_step(toggles: bool) -> None:
    rewraps: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CustomDDPStrategy, "rewrap", lambda _: rewraps.append(1))
        module = Adversaries(toggles)
        trainer(strategy=CustomDDPStrategy(find_unused_parameters=True), max_epochs=2).fit(module, loader())
    assert rewraps == []
    reference, (x, y) = Adversaries(toggles), make_data().tensors
    for micro in list(range(NUM_MICRO)) * 2:
        part = slice(micro * GLOBAL_BATCH, (micro + 1) * GLOBAL_BATCH)
        for mine, other in ((reference.first, reference.second), (reference.second, reference.first)):
            mine.zero_grad()
            mine.requires_grad_(True)
            nn.functional.mse_loss(mine(x[part]) + other(x[part]).detach(), y[part]).backward()
            with torch.no_grad():
                for parameter in mine.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
    assert torch.allclose(flat(module), flat(reference), rtol=0, atol=1e-12)


@ranks(2, init=False)
def test_manual_optimization_follows_what_is_unfrozen_before_the_step() -> None:
    class Manual(Regression):
        def __init__(self) -> None:
            super().__init__({4: {"net.0": True}})
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    for settings in ({}, {"static_graph": True}):
        automatic = fit(module=Regression({4: {"net.0": True}}))
        assert torch.allclose(fit(module=Manual(), **settings), automatic, rtol=0, atol=1e-14)


# --------------------------------------------------------------------------------------------------------- refusals


@ranks(2, 3, init=False)
def test_ranks_that_begin_with_other_trainable_parameters_all_raise_and_name_them(world_size: int) -> None:
    module = Regression({})
    if int(os.environ["RANK"]) == 1:
        module.net[0].requires_grad_(True)
    with pytest.raises(DDPPluginError, match=r"net\.0\.weight, net\.0\.bias on rank 1 alone"):
        trainer().fit(module, loader())


@ranks(2, 3, init=False)
def test_ranks_that_differ_at_an_epochs_start_all_raise_and_name_them(world_size: int) -> None:
    class Differs(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1 and int(os.environ["RANK"]) != 1:
                self.net[4].bias.requires_grad_(False)

    with pytest.raises(DDPPluginError, match=r"net\.4\.bias on rank 1 alone"):
        trainer(max_epochs=2).fit(Differs({}), loader())


def _differs_inside_an_epoch() -> None:
    class Differs(Regression):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3 and int(os.environ["RANK"]) == 1:
                self.net[0].requires_grad_(True)

    trainer(strategy=CustomDDPStrategy(timeout=timedelta(seconds=4))).fit(Differs({}), loader())


def test_a_rank_that_changes_alone_inside_an_epoch_does_not_wait_for_ever() -> None:
    with pytest.raises(RankFailureError) as failure:
        run_ranks(_differs_inside_an_epoch, 2, init=False)
    assert re.search(r"net\.0\.weight, net\.0\.bias changed here; within 4 s only 1 of 2 ranks", str(failure.value))


@ranks(2, init=False)
@pytest.mark.parametrize("manual", [False, True])
def test_unfreezing_inside_the_step_is_refused(manual: bool) -> None:
    class Late(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                self.net[0].requires_grad_(True)
            loss = super().training_step(batch, batch_idx)
            if manual:
                self.manual_backward(loss)
            return loss

    module = Late({})
    module.automatic_optimization = not manual
    with pytest.raises(DDPPluginError, match=r"net\.0\.weight, net\.0\.bias unfrozen inside it"):
        trainer().fit(module, loader())


@ranks(1)
def test_settings_that_hold_on_to_the_module_are_named() -> None:
    net = make_net()
    refuse_what_holds_on(DistributedDataParallel(net))
    delayed = {"delay_all_reduce_named_params": [("2.bias", net[2].bias)], "param_to_hook_all_reduce": net[4].bias}
    with pytest.raises(DDPPluginError, match="delay_all_reduce_named_params= cannot be wrapped again"):
        refuse_what_holds_on(DistributedDataParallel(net, **delayed))
    mixed: Any = SimpleNamespace(mixed_precision=object(), _delay_all_reduce_params=[])  # torch has it on GPUs alone
    with pytest.raises(DDPPluginError, match="mixed_precision= cannot be wrapped again"):
        refuse_what_holds_on(mixed)


@ranks(2)
def test_a_meeting_is_bounded_and_says_why_it_was_held() -> None:
    meet(2, timedelta(seconds=60), "both are here")
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ddp_plugin.wrapping.rewrap.PATIENCE", timedelta(seconds=0.1))
            said = pytest.warns(UserWarning, match="Rank 0 waits for the other ranks: a.b changed here")
            with said, pytest.raises(DDPPluginError, match="only 1 of 2 ranks"):
                meet(2, timedelta(seconds=0.2), "a.b changed here")
    dist.barrier()


# ----------------------------------------------------------------------------------------------------------- the words


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([["a", "b"], ["a"]], "b on rank 0 alone"),
        ([["a"], ["a", "b", "c"], ["a", "c"]], "b on rank 1 alone; c on ranks 1, 2 alone"),
        ([[], ["a"], ["a"]], "a on ranks 1, 2 alone"),
        ([["a", "b"], ["b", "a"]], "the same parameters in another order"),
    ],
)
def test_differences_name_parameters_and_ranks(names: list[list[str]], text: str) -> None:
    assert differences(names) == text


def test_long_lists_are_shortened() -> None:
    assert in_words([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert in_words([str(n) for n in range(13)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 more"


def test_trainable_parameters_see_flags_new_and_replaced_ones() -> None:
    net = make_net()
    known = TrainableParameters(net, {"4.bias"})
    assert known.names == ("2.weight", "2.bias", "4.weight")
    assert not known.changed()
    net[0].bias.requires_grad_(True)
    assert known.changed()
    assert known.unfrozen() == ["0.bias"]
    net[2] = nn.Linear(8, 7)
    now = TrainableParameters(net, {"4.bias"})
    assert now.added_since(known) == ["0.bias", "2.weight", "2.bias"]
    assert known.added_since(now) == ["2.weight", "2.bias"]
    shared = nn.Sequential(net[4], net[4])
    assert TrainableParameters(shared).names == ("0.weight", "0.bias")


@ranks(1)
def test_powersgds_memories_belong_to_the_old_buckets() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=5)
    state.error_dict[0], state.p_memory_dict[0], state.q_memory_dict[0], state.iter = *[torch.zeros(1)] * 3, 77
    forget_buckets(state)
    assert (state.error_dict, state.p_memory_dict, state.q_memory_dict, state.iter) == ({}, {}, {}, 0)
    forget_buckets(object())


# ------------------------------------------------------------------------------------------------------------- the cost


def test_looking_for_a_change_is_cheap_beside_any_step() -> None:
    """300 parameters are looked at in less time than the smallest of their products takes."""
    import timeit

    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(150)])
    known = TrainableParameters(net)
    look: Callable[[], Any] = known.changed
    product = torch.randn(64, 64)
    seconds = min(timeit.repeat(look, number=50, repeat=7)) / 50
    step = min(timeit.repeat(lambda: [product @ product for _ in range(150)], number=1, repeat=7))
    assert seconds < step / 5, (seconds, step)


@ranks(2, init=False)
def test_delayed_reductions_train_as_with_lightning() -> None:
    class Single(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.net(batch[0].float()), batch[1].float())

    def run(strategy: type[Any]) -> Tensor:
        module = Single({}).float()
        delayed = [("net.4.bias", module.net[4].bias), ("net.2.bias", module.net[2].bias)]
        settings = {"delay_all_reduce_named_params": delayed, "param_to_hook_all_reduce": module.net[2].weight}
        made = strategy(**settings)
        trainer(strategy=made).fit(module, loader())
        return flat(module)

    assert torch.equal(run(CustomDDPStrategy), run(DDPStrategy))
