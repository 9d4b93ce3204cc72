"""Seeded faults are found within k steps and named on all ranks; healthy runs are never accused."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, Metric

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, PerRankSeed, ReplicaConsistency, default_callbacks
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.hooks import HOOKS
from tests.harness import ranks, trainer

NUM_BATCHES = 8  # of each rank
EVERY = 2


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def loader() -> DataLoader[Any]:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return DataLoader(TensorDataset(torch.randn(2 * NUM_BATCHES * world_size, 3)), batch_size=2)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Fault(pl.Callback):
    """Does something wrong after one training batch, on one rank."""

    def __init__(self, do: Callable[[Any, Any], None], step: int, on_rank: int) -> None:
        self.do, self.step, self.on_rank = do, step, on_rank

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.step and rank() == self.on_rank:
            with torch.no_grad():
                self.do(trainer, pl_module)


def state_of(trainer: Any, parameter: Tensor) -> dict[str, Any]:
    return trainer.optimizers[0].state[parameter]


def one_ulp(tensor: Tensor) -> None:
    flat = tensor.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))


# What is done on one rank, and what is said of it.
FAULTS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "one element, one ulp": (lambda _, m: one_ulp(m.second.weight), "parameter second.weight: one value on"),
    "first of two": (lambda _, m: (one_ulp(m.second.weight), one_ulp(m.first.bias)), "parameter first.bias: one value"),
    "buffer": (lambda _, m: one_ulp(m.scale), "buffer scale: one value on"),
    "NaN in a buffer": (lambda _, m: m.scale.fill_(torch.nan), "buffer scale: one value on"),
    "moment": (
        lambda t, m: one_ulp(state_of(t, m.first.weight)["exp_avg_sq"]),
        "optimizer state exp_avg_sq of first.weight in Adam 0: one value on",
    ),
    "step count": (
        lambda t, m: state_of(t, m.first.weight)["step"].add_(1),
        "optimizer state step of first.weight in Adam 0: one value on",
    ),
    "lost state": (
        lambda t, m: state_of(t, m.second.bias).clear(),
        "optimizer state exp_avg of second.bias in Adam 0: float32 [1] on",
    ),
    "learning rate": (
        lambda t, _: t.optimizers[0].param_groups[0].update(lr=0.02),
        "hyperparameter lr of group 0 of Adam 0: 0.01 on",
    ),
    "weight decay": (
        lambda t, _: t.optimizers[0].param_groups[0].update(weight_decay=0.5),
        "hyperparameter weight_decay of group 0 of Adam 0: 0 on",
    ),
    "frozen": (lambda _, m: m.scale_up.requires_grad_(False), "trainable set scale_up: True on"),
    "skipped step": (
        lambda t, _: t.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.reset(),
        "progress global_step: 4 on",
    ),
}


def tolerant() -> CustomDDPStrategy:
    return CustomDDPStrategy(find_unused_parameters=True)


class WithSpare(Model):
    """A parameter that takes no part, so that freezing it on one rank changes nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_up = nn.Parameter(torch.zeros(1))


@ranks(2, 3, init=False)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named_on_all_ranks(world_size: int, name: str) -> None:
    do, text = FAULTS[name]
    guilty = world_size - 1
    run = trainer(callbacks=[Fault(do, 2 * EVERY - 1, guilty), ReplicaConsistency(EVERY)], strategy=tolerant())
    with pytest.raises(DDPPluginError) as caught:
        run.fit(WithSpare(), loader())
    message = str(caught.value)
    assert f"Got {text}" in message
    assert "all replicas to be equal after 4 steps of this run" in message
    others = "rank 0" if world_size == 2 else "ranks 0, 1"
    assert f" on {others}, " in message
    assert f" on rank {guilty}" in message
    assert f"on rank {rank()} of {world_size}" in message


LASTING = ["one element, one ulp", "first of two", "step count", "learning rate", "weight decay", "skipped step"]


@ranks(2, init=False)
@pytest.mark.parametrize("name", LASTING)
def test_a_fault_that_lasts_is_found_within_k_steps(name: str) -> None:
    for step in range(3):
        run = trainer(callbacks=[Fault(FAULTS[name][0], step, 0), ReplicaConsistency(3)], strategy=tolerant())
        with pytest.raises(DDPPluginError, match="all replicas to be equal after 3 steps of this run"):
            run.fit(WithSpare(), loader())


@ranks(2, init=False)
@pytest.mark.parametrize("name", ["one element, one ulp", "learning rate"])
def test_without_it_nobody_notices(name: str) -> None:
    run = trainer(callbacks=[Fault(FAULTS[name][0], 2, 1)], strategy=tolerant())
    run.fit(model := WithSpare(), loader())
    weights: list[Any] = [None, None]
    dist.all_gather_object(weights, [value.tolist() for value in model.parameters()])
    assert weights[0] != weights[1]


@ranks(2, init=False)
def test_the_message_says_how_far_apart_the_values_are() -> None:
    def do(_: Any, module: Any) -> None:
        module.second.weight[0, 1] += 0.25
        module.second.weight[0, 2] -= 0.5

    with pytest.raises(DDPPluginError) as caught:
        trainer(callbacks=[Fault(do, 0, 0), ReplicaConsistency(1)]).fit(Model(), loader())
    assert "(largest |difference| 0.5, in 2 of 4 elements)" in str(caught.value)

    def flip(_: Any, module: Any) -> None:
        module.scale.copy_(torch.tensor([-0.0, 1.0]))

    model = Model()
    model.scale.zero_()[1] = 1
    with pytest.raises(DDPPluginError, match=r"buffer scale: .* \(in bits that a value does not show"):
        trainer(callbacks=[Fault(flip, 0, 1), ReplicaConsistency(1)]).fit(model, loader())


@ranks(2, init=False)
def test_further_differences_are_counted() -> None:
    def do(trainer: Any, module: Any) -> None:
        for parameter in module.parameters():
            one_ulp(parameter)
        one_ulp(module.scale)
        trainer.optimizers[0].param_groups[0].update(lr=0.5, eps=1.0)

    with pytest.raises(DDPPluginError) as caught:
        trainer(callbacks=[Fault(do, 0, 1), ReplicaConsistency(1)]).fit(Model(), loader())
    message = str(caught.value)
    assert "Got hyperparameter eps of group 0 of Adam 0: 1e-08 on rank 0, 1.0 on rank 1" in message
    assert "; 1 more hyperparameter, the first: lr of group 0 of Adam 0" in message
    assert "; 4 parameters, the first: first.weight; 1 buffer, the first: scale" in message


# ----------------------------------------------------------------------------------------- faults in how a model trains


class Manual(Model):
    """Manual optimization as it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.backward_of(self(batch[0]).square().mean())
        optimizer.step()

    def backward_of(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class RawBackward(Manual):
    """``loss.backward()`` instead of ``manual_backward``: DDP is not told to expect it, and reduces nothing."""

    def backward_of(self, loss: Tensor) -> None:
        loss.backward()


@ranks(2, init=False)
def test_gradients_that_were_never_reduced_are_found() -> None:
    with pytest.raises(
        DDPPluginError, match=r"after 2 steps of this run. Got parameter first.weight: one value on rank 0"
    ):
        trainer(callbacks=[ReplicaConsistency(EVERY)]).fit(RawBackward(), loader())
    trainer(callbacks=[ReplicaConsistency(1)]).fit(Manual(), loader())


class UnequalSteps(Model):
    """One rank steps its optimizer every second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        if rank() == 0 or batch_idx % 2 == 0:
            optimizer.step()


@ranks(2, init=False)
def test_unequal_numbers_of_steps_do_not_hang_the_check() -> None:
    with pytest.raises(
        DDPPluginError, match="after 3 steps of this run. Got progress global_step: 3 on rank 0, 2 on rank 1"
    ):
        trainer(callbacks=[ReplicaConsistency(3)]).fit(UnequalSteps(), loader())


class Unreduced(Model):
    """A parameter that DDP does not reduce is trained by each rank's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Linear(3, 1).requires_grad_(False)  # as DDP found it

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.late.weight -= 0.1 * batch[0].mean(0)


@ranks(2, init=False)
def test_a_parameter_that_is_not_reduced_is_found() -> None:
    with pytest.raises(DDPPluginError, match="Got parameter late.weight: one value on rank 0, another on rank 1"):
        trainer(callbacks=[ReplicaConsistency(EVERY)]).fit(Unreduced(), loader())


# -------------------------------------------------------------------------------------------------------- start and end


@ranks(2, init=False)
def test_what_differs_at_the_start_is_found_there() -> None:
    class Edit(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            if rank() == 1:
                one_ulp(pl_module.second.weight.data)

    model = Model()
    with pytest.raises(DDPPluginError, match="equal at the start of fit. Got parameter second.weight"):
        trainer(callbacks=[Edit(), ReplicaConsistency()]).fit(model, loader())


@ranks(2, init=False)
def test_what_differs_in_the_last_steps_is_found_at_the_end() -> None:
    fault = Fault(FAULTS["buffer"][0], NUM_BATCHES - 1, 1)
    with pytest.raises(DDPPluginError, match="equal at the end of fit. Got buffer scale"):
        trainer(callbacks=[ReplicaConsistency(), fault]).fit(Model(), loader())


@ranks(2, init=False)
def test_steps_are_optimizer_steps() -> None:
    counted = Counting(every_n_steps=2)
    trainer(callbacks=[counted], accumulate_grad_batches=3, max_epochs=2).fit(Model(), loader())
    # 8 batches by threes are 3 steps an epoch, the last of them short.
    assert counted.whens == [
        "at the start of fit",
        *(f"after {n} steps of this run" for n in (2, 4, 6)),
        "at the end of fit",
    ]


class Counting(ReplicaConsistency):
    """Notes when it checks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.whens: list[str] = []

    def _check(self, trainer: pl.Trainer, when: str) -> None:
        self.whens.append(when)
        super()._check(trainer, when)


# ------------------------------------------------------------------------------------------------------- no false alarm


class Rich(Model):
    """Dropout, BatchNorm, an EMA of the weights, a metric of the rank's own, several optimizers, schedulers."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(4)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.drop = nn.Dropout(0.3)
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.counts = CountsInABuffer()
        self.register_buffer("ema", torch.zeros(1, 4))
        if kind == "manual":
            self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(self.drop(x)))
        hidden = self.instance(hidden.view(-1, 2, 2)).flatten(1)
        return self.second(hidden.tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.mean.update(loss.detach())
        self.counts.update(batch[0])
        self.log("loss", loss.detach(), sync_dist=True)
        if self.kind != "manual":
            return loss
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(optimizers, self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
        return None

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.lerp_(self.second.weight.detach(), 0.1)

    def configure_optimizers(self) -> Any:
        if self.kind == "manual":
            pairs = [torch.optim.AdamW(self.first.parameters()), torch.optim.SGD(self.second.parameters(), 0.1, 0.9)]
            return pairs, [torch.optim.lr_scheduler.CosineAnnealingLR(each, 9) for each in pairs]
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=2)
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01) if self.kind == "tensor lr" else 0.01)
        if self.kind == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step"},
            }
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100), "interval": "step"}
        ]


class CountsInABuffer(Metric):
    """A metric that keeps what this rank saw in a buffer and in a persistent state."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), persistent=True, dist_reduce_fx="sum")
        self.register_buffer("last", torch.zeros(()))

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        self.last.copy_(x.sum())

    def compute(self) -> Tensor:
        return self.total


HEALTHY: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("plain", {}, {}),
    "plateau": ("plateau", {}, {}),
    "manual, two optimizers": ("manual", {}, {}),
    "lbfgs": ("lbfgs", {}, {}),
    "tensor lr": ("tensor lr", {}, {}),
    "accumulation": ("plain", {}, {"accumulate_grad_batches": 3}),
    "static graph, accumulation": ("plain", {"static_graph": True}, {"accumulate_grad_batches": 3}),
    "find unused": ("plain", {"find_unused_parameters": True}, {}),
    "bf16": ("plain", {}, {"precision": "bf16-mixed"}),
    "clipping": ("plain", {}, {"gradient_clip_val": 0.1}),
    "views": ("plain", {"gradient_as_bucket_view": True}, {}),
    "no broadcasts": ("plain", {"broadcast_buffers": False}, {}),
    **{f"hook {name}": ("plain", {"comm_hook": name}, {}) for name in HOOKS if not HOOKS[name]().refusal},
}


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("batchnorm", ["local", "synchronised"])
def test_healthy_runs_are_never_accused(world_size: int, batchnorm: str) -> None:
    torch.manual_seed(rank())
    warnings.filterwarnings("ignore", ".*(gradients are accumulated|broadcast_buffers|lr_scheduler.step|BatchNorm).*")
    for name, (kind, strategy, settings) in HEALTHY.items():
        if batchnorm == "synchronised" and kind == "lbfgs":
            continue
        callbacks = [PerRankSeed(seed=1), counted := Counting(every_n_steps=1)]
        if batchnorm == "synchronised":
            callbacks.append(ConvertSyncBatchNorm())
        run = trainer(callbacks=callbacks, strategy=CustomDDPStrategy(**strategy), **settings)
        run.fit(model := Rich(kind), loader())
        period = hook.period if (hook := run.strategy.comm_hook) is not None else 1
        assert len(counted.whens) >= 2 + NUM_BATCHES // 3 // period, name
        if world_size > 1 and batchnorm == "local" and not (hook and hook.outer):  # which averages buffers too
            parts: list[Any] = [None] * world_size
            dist.all_gather_object(parts, (model.norm.running_mean.tolist(), float(model.counts.last)))
            assert parts[0] != parts[1], name  # what is not compared did differ


@ranks(2, init=False)
def test_nothing_is_compared_where_the_ranks_never_meet() -> None:
    strategy = CustomDDPStrategy(comm_hook={"name": "noop", "for_measuring": True})
    trainer(callbacks=[ReplicaConsistency(1)], strategy=strategy).fit(model := Rich(), loader())
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, [p.tolist() for p in model.parameters()])
    assert parts[0] != parts[1]  # there was something to complain about


@ranks(2, init=False)
def test_synchronised_statistics_are_compared() -> None:
    def do(_: Any, module: Any) -> None:
        one_ulp(module.norm.running_var)

    callbacks = [ConvertSyncBatchNorm(), Fault(do, 0, 1), ReplicaConsistency(1)]
    with pytest.raises(DDPPluginError, match="Got buffer norm.running_var: one value"):
        trainer(callbacks=callbacks).fit(Rich(), loader())


@ranks(2, init=False)
def test_all_defaults_and_a_resume(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    callbacks = [callback for callback in default_callbacks() if not isinstance(callback, ReplicaConsistency)]
    trainer(callbacks=[*callbacks, ReplicaConsistency(1), saves], enable_checkpointing=True).fit(Rich(), loader())
    path = next(iter(tmp_path.glob("*step=5.ckpt")))
    resumed = trainer(callbacks=[*default_callbacks(), counted := Counting(every_n_steps=1)], max_epochs=2)
    resumed.fit(Rich(), loader(), ckpt_path=path)
    assert "at the start of fit" in counted.whens


# --------------------------------------------------------------------------------------------------- ignored on purpose


@ranks(2, init=False)
def test_ignored_names_may_differ() -> None:
    class Codebook(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.scale.copy_(batch[0][0, :2])  # of the rank's own batch
            return super().training_step(batch, batch_idx)

    for ignore in (["scale"], ["sc*"]):
        trainer(callbacks=[ReplicaConsistency(1, ignore=ignore)]).fit(Codebook(), loader())
    with pytest.raises(DDPPluginError, match="Got buffer scale"):
        trainer(callbacks=[ReplicaConsistency(1, ignore=["other"])]).fit(Codebook(), loader())


@ranks(2, init=False)
def test_what_ddp_ignores_is_not_compared() -> None:
    class Adapter(Model):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.full((3,), float(rank())))
            self._ddp_params_and_buffers_to_ignore = ["own"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) + (batch[0] * self.own).sum(1, keepdim=True)).square().mean()

    trainer(callbacks=[ReplicaConsistency(1)]).fit(model := Adapter(), loader())
    values: list[Any] = [None, None]
    dist.all_gather_object(values, model.own.tolist())
    assert values[0] != values[1]


# ------------------------------------------------------------------------------------------------------- other policies


class Messages:
    """Collects what ReplicaConsistency warns of, on rank 0."""

    def __enter__(self) -> list[str]:
        self.manager = warnings.catch_warnings(record=True)
        self.caught = self.manager.__enter__()
        warnings.simplefilter("always")
        self.texts: list[str] = []
        return self.texts

    def __exit__(self, *error: Any) -> None:
        self.manager.__exit__(*error)
        self.texts += [str(item.message) for item in self.caught if "ReplicaConsistency" in str(item.message)]
        assert rank() == 0 or not self.texts


@ranks(2, init=False)
def test_warn_says_it_once_and_goes_on() -> None:
    with Messages() as texts:
        run = trainer(callbacks=[Fault(FAULTS["buffer"][0], 0, 1), ReplicaConsistency(1, "warn")])
        run.fit(Model(), loader())
    assert run.global_step == NUM_BATCHES
    if rank() == 0:
        assert len(texts) == 1
        assert "buffer scale: one value on rank 0, another on rank 1" in texts[0]


def everything_of(run: Any, model: Any) -> list[Any]:
    states = run.optimizers[0].state_dict()
    flat = [value for state in states["state"].values() for value in state.values()]
    return [
        [value.tolist() for value in (*model.parameters(), *model.buffers(), *flat)],
        [dict(group) for group in states["param_groups"]],
    ]


@ranks(2, 3, init=False)
def test_repair_gives_all_ranks_the_values_of_rank_0(world_size: int) -> None:
    def do(trainer: Any, module: Any) -> None:
        for name in ("one element, one ulp", "buffer", "moment", "step count", "learning rate", "weight decay"):
            FAULTS[name][0](trainer, module)

    def fit(*callbacks: Any) -> tuple[Any, Any]:
        torch.manual_seed(5)
        run, model = trainer(callbacks=list(callbacks)), Model()
        run.fit(model, loader())
        return run, model

    untouched = everything_of(*fit())
    with Messages() as texts:
        repaired = everything_of(*fit(Fault(do, 2, 1), ReplicaConsistency(1, "repair"), ReplicaConsistencyToo(1)))
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, repaired)
    assert all(part == parts[0] for part in parts)
    assert repaired == untouched  # the fault was on rank 1, and was mended before the next step
    if rank() == 0:
        assert len(texts) == 1
        for name in ("parameter second.weight", "buffer scale", "exp_avg_sq of first.weight", "hyperparameter lr"):
            assert name in texts[0]


class ReplicaConsistencyToo(ReplicaConsistency):
    """A second one, that raises."""


@ranks(2, init=False)
@pytest.mark.parametrize("name", ["frozen", "skipped step", "lost state"])
def test_what_cannot_be_repaired_raises(name: str) -> None:
    do, text = FAULTS[name]
    run = trainer(
        callbacks=[Fault(do, 2 * EVERY - 1, 1), ReplicaConsistency(EVERY, "repair")],
        strategy=tolerant(),
    )
    with pytest.raises(DDPPluginError, match="in what can be repaired") as caught:
        run.fit(WithSpare(), loader())
    assert text in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_unusable_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_steps of at least 1. Got 0"):
        ReplicaConsistency(0)
    with pytest.raises(ValueError, match="'raise', 'warn', 'repair'"):
        ReplicaConsistency(on_difference="ignore")


@ranks(2, init=False)
def test_it_is_refused_under_another_strategy() -> None:
    with pytest.raises(TypeError, match="because ReplicaConsistency runs on several processes"):
        trainer(callbacks=[ReplicaConsistency()], strategy=DDPStrategy()).fit(Model(), loader())


@ranks(1, init=False)
def test_one_process_runs_under_any_strategy() -> None:
    trainer(callbacks=[ReplicaConsistency(1)], strategy="auto").fit(Model(), loader())
