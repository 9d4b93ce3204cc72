"""``tune()``: it finds the known best, keeps the default in doubt, and leaves everything as it was."""

import json
import logging
import math
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from omegaconf import OmegaConf
from settings import CONF, load_settings
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import ddp_plugin.tuning.trials as trials
import ddp_plugin.tuning.tuner as tuner
from ddp_plugin import (
    CommunicationMonitor,
    CustomDDPStrategy,
    GlobalMeanLoss,
    StragglerMonitor,
    StrategyConfig,
    Tuning,
    tune,
)
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.hooks import HOOKS, CommHook, Contents
from ddp_plugin.hooks.exact import AllReduce, allreduce
from ddp_plugin.tuning.choice import is_faster
from ddp_plugin.tuning.trials import StepClock, TrialRun, borrowed, fresh_datamodule, fresh_loaders, untouched_process
from tests.harness import ROOT, RankFailureError, ranks, run_ranks, trainer

PAUSE_S = 0.1  # of the slow hook; a step of the model takes some milliseconds
SMALL_MB = 0.001  # below one layer of the model


class Model(pl.LightningModule):
    """Four layers of 64 x 64, dropout and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Dropout(0.2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def data(num_samples: int = 48) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 64, generator=torch.Generator().manual_seed(1)))


SETTINGS: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
SHORT: dict[str, Any] = {"num_steps": 2, "num_warmup_steps": 3, "num_rounds": 3}

VIRTUAL_S: list[float] = []  # the time, where a test makes its own, so that no other program can change a result


def virtual_time() -> None:
    """From now on nothing takes time in this process but pauses, and a trace for each step."""
    VIRTUAL_S[:] = [0.0]

    def now_s(_: Any) -> float:
        VIRTUAL_S[0] += 0.001
        return VIRTUAL_S[0]

    trials._now_s = now_s


def pause(seconds: float) -> None:
    if VIRTUAL_S:
        VIRTUAL_S[0] += seconds
    else:
        time.sleep(seconds)


class Slow(AllReduce):
    """Exact, and slow for buckets of some sizes."""

    def __init__(self, group: dist.ProcessGroup, fewest: int, most: float) -> None:
        super().__init__(group)
        self.fewest, self.most = fewest, most

    def start(self, values: Tensor, contents: Contents) -> Any:
        if self.fewest <= values.numel() <= self.most:
            pause(PAUSE_S)
        return super().start(values, contents)


class Refusing(AllReduce):
    def start(self, values: Tensor, contents: Contents) -> Any:
        raise TypeError("not with me")


def slow(fewest: int = 0, most: float = math.inf, broken: bool = False) -> CommHook:
    """A hook that is slow for buckets of ``fewest`` to ``most`` elements."""
    exchange = Refusing if broken else partial(Slow, fewest=fewest, most=most)
    return CommHook("slow", exchange, allreduce().wire_bytes, allreduce().error_bound, is_direct=True)


LAYER = 64 * 65  # parameters; SMALL_MB puts no more into a bucket


def quick_tune(model: pl.LightningModule | None = None, **settings: Any) -> Tuning:
    return tune(model or Model(), DataLoader(data(), 4, shuffle=True), **(SETTINGS | SHORT | settings))


def same_everywhere(value: Any) -> bool:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


# ----------------------------------------------------------------------------------------------------------- the choice


@ranks(2, init=False)
def test_the_known_best_is_chosen_on_all_ranks_and_written_for_the_strategy_and_the_recipes(tmp_path: Path) -> None:
    HOOKS["slow"] = partial(slow, fewest=LAYER + 1)  # large buckets
    folder = tmp_path / "conf"
    if os.environ["RANK"] == "0":
        folder.mkdir()
        (folder / "llm.yaml").write_text((CONF / "llm.yaml").read_text())
    while not (folder / "llm.yaml").exists():
        time.sleep(0.01)
    tuning = quick_tune(
        strategy={"comm_hook": "slow"}, bucket_caps_mb=[SMALL_MB], path=folder / "llm_tuned.yaml", section="strategy"
    )
    assert tuning.chosen.name == f"bucket_cap_mb={SMALL_MB}"
    assert tuning.config == StrategyConfig(comm_hook="slow", bucket_cap_mb=SMALL_MB)
    assert all(taken_s > PAUSE_S for taken_s in tuning.rows[0].times_s)  # the pause is a lower bound
    assert is_faster(tuning.rows[1].ratios)
    assert len(tuning.confirmation) == SHORT["num_rounds"]
    assert f"Chosen: {tuning.chosen.name}" in tuning.reason
    assert same_everywhere((tuning.config, [row.times_s for row in tuning.rows], tuning.confirmation, tuning.reason))
    text = (folder / "llm_tuned.yaml").read_text()
    assert sorted(file.name for file in folder.iterdir()) == ["llm.yaml", "llm_tuned.yaml"]  # nothing half-written
    assert torch.__version__ in text
    assert "2 processes" in text
    settings = load_settings("llm", ["config=tuned"], folder)
    strategy = CustomDDPStrategy.from_config(settings.strategy)
    assert strategy.comm_hook is not None
    assert strategy.comm_hook.name == "slow"
    assert settings.strategy.bucket_cap_mb == SMALL_MB


@ranks(2, init=False)
def test_buckets_cost_what_their_number_says_and_the_default_is_kept_where_it_is_best() -> None:
    virtual_time()
    HOOKS["slow"] = slow
    tuning = quick_tune(strategy={"comm_hook": "slow"}, bucket_caps_mb=[SMALL_MB])
    for row, num_buckets in zip(tuning.rows, (1, 4), strict=True):  # a layer exceeds the small size
        assert row.times_s == pytest.approx([num_buckets * PAUSE_S] * SHORT["num_rounds"], abs=0.002)
    assert tuning.is_default
    assert tuning.config == StrategyConfig(comm_hook="slow")
    assert tuning.reason.startswith("The default is kept")
    assert tuning.rows[1].verdict == "not faster"
    assert same_everywhere(tuning.config)


class Pretended(TrialRun):
    """A run that takes the seconds that it is told to: ``rank, bucket size, how often it ran -> seconds``."""

    taken_s: Any

    def seconds_per_step(self, strategy: Any, num_warmup_steps: int, num_steps: int) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        cap_mb = vars(strategy)["_ddp_kwargs"].get("bucket_cap_mb")
        counts = self.__dict__.setdefault("counts", {})
        counts[cap_mb] = counts.get(cap_mb, 0) + 1
        seconds = type(self).taken_s(dist.get_rank(), cap_mb, counts[cap_mb])
        if isinstance(seconds, Exception):
            raise seconds
        return seconds


def pretend(taken_s: Any) -> Tuning:
    run = type("Run", (Pretended,), {"taken_s": staticmethod(taken_s)})
    tuner.TrialRun = run  # type: ignore[misc,assignment]
    tuning = quick_tune(bucket_caps_mb=[1, 2])
    assert same_everywhere((tuning.config, [(row.times_s, row.failure) for row in tuning.rows], tuning.reason))
    return tuning


@ranks(2, init=False)
def test_the_slowest_rank_decides() -> None:
    tuning = pretend(lambda rank, cap_mb, count: {None: 1.0, 1: (0.1, 1.2)[rank], 2: (0.9, 0.8)[rank]}[cap_mb])
    assert [row.times_s[0] for row in tuning.rows] == [1.0, 1.2, 0.9]
    assert tuning.chosen.name == "bucket_cap_mb=2"


@ranks(2, init=False)
def test_the_rehearsal_does_not_count() -> None:
    tuning = pretend(lambda rank, cap_mb, count: 100.0 if count == 1 else 1.0)
    assert {taken_s for row in tuning.rows for taken_s in row.times_s} == {1.0}


@ranks(2, init=False)
def test_what_was_fast_by_chance_is_found_out_in_fresh_rounds() -> None:
    tuning = pretend(lambda rank, cap_mb, count: 0.5 if cap_mb == 2 and count <= 1 + SHORT["num_rounds"] else 1.0)
    assert tuning.rows[2].verdict == "faster"
    assert tuning.confirmation == (1.0, 1.0, 1.0)
    assert tuning.is_default
    assert "bucket_cap_mb=2 was the fastest, and not faster when it was measured again" in tuning.reason


# ------------------------------------------------------------------------------------------------------------- failures


@ranks(2, init=False)
def test_a_candidate_that_fails_is_left_out_with_its_reason() -> None:
    HOOKS["slow"] = partial(slow, fewest=10 * LAYER)
    tuning = quick_tune(bucket_caps_mb=[], comm_hooks=[{"name": "slow", "broken": True}])
    failed = {row.candidate.name: row.failure for row in tuning.rows if row.failure is not None}
    assert set(failed) == {"comm_hook=slow(broken=True)"}
    assert all("not with me" in reason for reason in failed.values())
    assert "left out: " in str(tuning)
    assert [len(row.times_s) for row in tuning.rows] == [3, 0]
    assert same_everywhere(failed)


@ranks(2, init=False)
def test_a_failure_on_one_rank_is_one_on_all() -> None:
    tuning = pretend(
        lambda rank, cap_mb, count: MemoryError("full") if (rank, cap_mb, count) == (1, 1, 3) else 1.0 / (cap_mb or 1)
    )
    assert tuning.rows[1].failure == "MemoryError: full"
    assert tuning.rows[1].times_s == ()
    assert tuning.chosen.name == "bucket_cap_mb=2"


@ranks(2, init=False)
def test_a_winner_that_fails_when_measured_again_is_not_chosen() -> None:
    tuning = pretend(
        lambda rank, cap_mb, count: MemoryError("full") if (rank, cap_mb, count) == (0, 2, 5) else 1.0 / (cap_mb or 1)
    )
    assert tuning.is_default
    assert "failed when it was measured again" in tuning.reason
    assert tuning.rows[2].failure == "MemoryError: full"


@ranks(2, init=False)
def test_a_default_that_fails_is_the_users_error() -> None:
    rank = int(os.environ["RANK"])
    with pytest.raises(ZeroDivisionError if rank == 1 else DDPPluginError, match="by nobody"):
        pretend(lambda rank, cap_mb, count: ZeroDivisionError("by nobody") if rank == 1 else 1.0)


class Broken(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise ZeroDivisionError("in my own step")


@ranks(2, init=False)
def test_a_model_that_fails_shows_its_own_traceback() -> None:
    levels = [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")]
    with pytest.raises(ZeroDivisionError, match="in my own step") as caught:
        quick_tune(Broken())
    assert any(entry.path.name == Path(__file__).name for entry in caught.traceback[1:])
    assert [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")] == levels


class HangsOnOne(Model):
    """Its first candidate after the default fails on rank 0 while rank 1 waits in the all-reduce."""

    num_runs = 0

    def on_train_start(self) -> None:
        HangsOnOne.num_runs += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if HangsOnOne.num_runs == 2 and self.global_rank == 0:
            raise MemoryError("full here")
        return super().training_step(batch, batch_idx)


def hang_on_one() -> None:
    tuner._GRACE_S = 0.5
    quick_tune(HangsOnOne())


def test_a_failure_that_others_wait_for_ends_in_words() -> None:
    with pytest.raises(RankFailureError, match="full here, while other ranks wait for this one in a collective"):
        run_ranks(hang_on_one, 2, init=False)


# ------------------------------------------------------------------------------------------------- as it was before


class Counting(pl.Callback):
    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1


class Uncopyable(Model):
    """No deep copy, so the module itself runs, and is put back."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.register_buffer("num_seen", torch.zeros(()))
        self.num_batches = 0
        self.noises = [torch.Generator().manual_seed(4)]
        self.net[0].weight.requires_grad = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_seen += 1
        self.num_batches += 1
        return super().training_step(batch, batch_idx) * torch.rand((), generator=self.noises[0])


def train(kind: type[Model], tuned: bool, folder: Path) -> Any:
    """Trains, perhaps after a tuning; returns all that a tuning could have changed."""
    os.chdir(folder)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model, counting = kind(), Counting()
    order = torch.Generator().manual_seed(7)
    loader = DataLoader(data(), 4, shuffle=True, generator=order)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if tuned:
        tune(model, loader, bucket_caps_mb=[SMALL_MB], callbacks=[counting], **SETTINGS, **SHORT)
        assert list(folder.iterdir()) == []
        assert counting.num_batches == 0
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        with pytest.raises(RuntimeError, match="not attached"):
            model.trainer  # noqa: B018
    runner = trainer(max_epochs=2, callbacks=[counting])
    runner.fit(model, loader)
    return (
        {name: value.tolist() for name, value in model.state_dict().items()},
        counting.num_batches,
        order.get_state().tolist(),
        (torch.rand(()).item(), random.random(), np.random.rand()),
        {name: value for name, value in vars(model).items() if isinstance(value, int)},
    )


@pytest.mark.parametrize("kind", [Model, Uncopyable])
def test_a_training_after_it_is_bit_identical_to_one_without(kind: type[Model], tmp_path: Path) -> None:
    tuned, plain = (run_ranks(train, 2, init=False, kind=kind, tuned=tuned, folder=tmp_path) for tuned in (True, False))
    assert tuned == plain


def test_a_borrowed_module_is_put_back_whatever_happened_to_it() -> None:
    model = Uncopyable()
    linear, weight, buffer = model.net[0], model.net[0].weight, model.num_seen
    model.net[1].weight.grad = gradient = torch.ones(64, 64)
    values = [value.clone() for value in model.state_dict().values()]
    with suppress(ZeroDivisionError), borrowed(model) as lent:
        assert lent is model
        with torch.no_grad():
            for value in (*lent.parameters(), *lent.buffers()):
                value.add_(1)
        lent.net[1].weight.grad = None
        lent.net[0] = nn.Linear(1, 1)
        lent.num_seen = torch.ones(3)
        weight.requires_grad = True
        lent.eval()
        torch.rand((), generator=lent.noises[0])
        lent.extra = nn.Linear(2, 2)
        1 / 0  # noqa: B018
    assert model.net[0] is linear
    assert model.net[0].weight is weight
    assert not weight.requires_grad
    assert model.num_seen is buffer
    assert model.net[1].weight.grad is gradient
    assert model.training
    assert torch.equal(model.noises[0].get_state(), torch.Generator().manual_seed(4).get_state())
    assert not hasattr(model, "extra")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), values, strict=True))


def test_a_module_with_a_copy_is_not_touched() -> None:
    model = Model()
    model.trainer = trainer(strategy="auto", devices=1)
    with borrowed(model) as lent:
        assert lent is not model
        assert lent.net[0].weight is not model.net[0].weight
        with pytest.raises(RuntimeError, match="not attached"):
            lent.trainer  # noqa: B018  # a copy of a Trainer would be a copy of everything


def test_loaders_keep_their_generators_and_share_their_data() -> None:
    samples, generator = data(), torch.Generator().manual_seed(3)
    loaders = {"a": DataLoader(samples, 4, shuffle=True, generator=generator), "b": [torch.zeros(1)]}
    state = generator.get_state()
    copied = fresh_loaders(loaders)
    assert copied["a"].dataset is samples
    assert copied["b"][0] is loaders["b"][0]
    first = [batch[0] for batch in copied["a"]]
    assert torch.equal(generator.get_state(), state)
    assert all(
        torch.equal(x, y[0]) for x, y in zip(first, loaders["a"], strict=True)
    )  # it begins where the real one does


def numbers() -> Iterator[Tensor]:
    yield torch.zeros(4, 64)


def test_a_loader_that_can_be_read_once_only_is_refused() -> None:
    with pytest.raises(TypeError, match="iterated again"):
        fresh_loaders(numbers())


def test_the_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.get_rng_state(), random.getstate(), os.environ.copy()
    with suppress(ZeroDivisionError), untouched_process("cpu"):
        pl.seed_everything(9, workers=True, verbose=False)
        torch.use_deterministic_algorithms(True)
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        1 / 0  # noqa: B018
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert (random.getstate(), os.environ.copy()) == expected[1:]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("setting", ["deterministic", "benchmark"])
def test_what_trainers_set_in_a_process_ends_with_the_tuning(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)

    def settings() -> tuple[Any, ...]:
        found = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        return (*found, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    before, seen = settings(), []
    monkeypatch.setattr(tuner._Contest, "measure", lambda *_: pytest.fail("started"))
    made = TrialRun.make_trainer
    monkeypatch.setattr(TrialRun, "make_trainer", lambda *a, **k: (made(*a, **k), seen.append(settings()))[0])
    quick_tune(devices=1, **{setting: True})
    assert seen
    assert before not in seen  # the Trainer did set it
    assert settings() == before


# ------------------------------------------------------------------------------------------------------------ one run


class Paced(Model):
    """Sleeps as told in each batch, and before each epoch."""

    def __init__(self, pauses_s: list[float], before_epoch_s: float = 0.0) -> None:
        super().__init__()
        self.pauses_s, self.before_epoch_s, self.num_batches = pauses_s, before_epoch_s, 0

    def on_train_epoch_start(self) -> None:
        time.sleep(self.before_epoch_s)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(self.pauses_s[self.num_batches])
        self.num_batches += 1
        return super().training_step(batch, batch_idx)


def paced_s(model: Paced, num_samples: int, num_steps: int, **settings: Any) -> float:
    run = TrialRun(model, DataLoader(data(num_samples), 4), None, (), {"accelerator": "cpu", "devices": 1} | settings)
    with untouched_process("cpu"):
        return run.seconds_per_step(CustomDDPStrategy(), 3, num_steps)


@ranks(1, init=False)
def test_a_step_takes_what_the_counted_ones_take() -> None:
    taken_s = paced_s(Paced([1.0] * 3 + [0.05] * 4), 28, 4)
    assert 0.05 <= taken_s < 0.3  # a second of warm-up would make it a quarter of a second more


@ranks(1, init=False)
def test_a_step_is_an_optimizer_step_of_all_its_micro_batches() -> None:
    assert 0.1 <= paced_s(Paced([0.0] * 6 + [0.05] * 4), 40, 2, accumulate_grad_batches=2) < 0.2


@ranks(1, init=False)
def test_short_epochs_are_repeated_and_what_lies_between_them_does_not_count() -> None:
    taken_s = paced_s(Paced([0.0] * 3 + [0.05] * 6, before_epoch_s=0.6), 8, 6)  # two batches an epoch
    assert 0.05 <= taken_s < 0.2


class Endless(Model):
    """Asks for all that a short run does not have: a known number of steps, a metric of an evaluation, a logger."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("loss", 1.0, batch_idx)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [ModelCheckpoint(dirpath="checkpoints-of-trials", every_n_train_steps=1)]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        num_steps = int(self.trainer.estimated_stepping_batches)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "val_loss"},
            {"scheduler": one_cycle, "interval": "step"},
        ]


class Stream(torch.utils.data.IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield (torch.ones(64),)


@ranks(1, init=False)
@pytest.mark.parametrize("loader", [DataLoader(data(8), 4), DataLoader(Stream(), 4)])
def test_a_trial_lacks_nothing_that_a_real_run_has(loader: Any, tmp_path: Path) -> None:
    os.chdir(tmp_path)
    run = TrialRun(Endless(), loader, None, (), {"accelerator": "cpu", "devices": 1})
    with untouched_process("cpu"):
        assert run.seconds_per_step(CustomDDPStrategy(), 3, 4) > 0
    assert list(tmp_path.iterdir()) == []


class Module(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.samples = data()

    def train_dataloader(self) -> Any:
        return DataLoader(self.samples, 4)


class Splitting(Module):
    """Draws its training samples in ``setup``, and lends the loader that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(4)
        self.loader = DataLoader(data(), 4, shuffle=True, generator=self.generator)
        self.drawn: list[int] = []

    def setup(self, stage: str) -> None:
        self.drawn.append(int(torch.randint(1000, (), generator=self.generator)))

    def train_dataloader(self) -> Any:
        return self.loader


@ranks(1, init=False)
@pytest.mark.parametrize("kind", [Module, Splitting])
def test_a_datamodule_is_read_and_not_changed(kind: type[Module]) -> None:
    module = kind()
    before = vars(module).copy()
    run = TrialRun(Model(), None, module, (), {"accelerator": "cpu", "devices": 1, "use_distributed_sampler": False})
    with untouched_process("cpu"):
        assert run.seconds_per_step(CustomDDPStrategy(), 3, 1) > 0
    assert vars(module) == before
    if isinstance(module, Splitting):
        assert module.drawn == []
        assert torch.equal(module.generator.get_state(), torch.Generator().manual_seed(4).get_state())


class Old(NamedTuple):
    numpy: np.random.RandomState
    python: random.Random


def test_a_copied_datamodule_has_generators_of_its_own_wherever_they_lie() -> None:
    module: Any = Module()
    module.samples = data()
    module.torch = torch.Generator().manual_seed(1)
    module.nested = {"numpy": [np.random.default_rng(1)], "old": Old(np.random.RandomState(1), random.Random(1))}
    module.sampler = RandomSampler(module.samples, generator=module.torch)
    module.loaders = [DataLoader(module.samples, 4, sampler=module.sampler)]
    module.system = random.SystemRandom()

    def draw(of: Any) -> list[Any]:
        numpy, old = of.nested["numpy"][0], of.nested["old"]
        draws = [torch.rand((), generator=of.torch).item(), numpy.random(), old.numpy.rand(), old.python.random()]
        return [*draws, list(of.sampler), [batch[0].sum().item() for batch in of.loaders[0]]]

    copies = [fresh_datamodule(module) for _ in range(2)]
    assert copies[0].sampler.generator is copies[0].loaders[0].sampler.generator is copies[0].torch
    assert copies[0].samples is copies[0].sampler.data_source is copies[0].loaders[0].dataset is module.samples
    assert copies[0].system is module.system
    assert draw(copies[0]) == draw(copies[1]) == draw(module)


@ranks(1, init=False)
def test_no_data_is_said() -> None:
    run = TrialRun(Model(), DataLoader(data(0), 4), None, (), {"accelerator": "cpu", "devices": 1})
    with untouched_process("cpu"), pytest.raises(DDPPluginError, match="a run that ended before"):
        run.seconds_per_step(CustomDDPStrategy(), 3, 1)


def test_the_clock_has_no_time_before_the_end() -> None:
    assert StepClock(3, 1).elapsed_s is None


# -------------------------------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"bucket_caps_mb": [-1]}, ValueError, "bucket_cap_mb above 0"),
        ({"bucket_caps_mb": [float("nan")]}, ValueError, "bucket_cap_mb above 0"),
        ({"bucket_caps_mb": []}, ValueError, "settings to compare with the default"),
        ({"bucket_caps_mb": [None]}, ValueError, "settings to compare with the default"),
        ({"bucket_caps_mb": 25}, TypeError, "bucket_caps_mb to be a list"),
        ({"comm_hooks": "bf16"}, TypeError, r"Write comm_hooks=\['bf16'\]"),
        ({"comm_hooks": ["bf17"]}, ValueError, "bf17"),
        ({"comm_hooks": ["noop"]}, ValueError, "noop"),
        ({"comm_hooks": [allreduce()]}, TypeError, "by name"),
        ({"num_rounds": 2}, ValueError, "num_rounds to be at least 3"),
        ({"num_warmup_steps": 2}, ValueError, "num_warmup_steps to be at least 3"),
        ({"num_steps": 0}, ValueError, "num_steps to be at least 1"),
        ({"num_steps": 1.5}, TypeError, "num_steps to be an integer"),
        ({"strategy": "ddp_plugin"}, TypeError, "strategy to be settings"),
        ({"strategy": CustomDDPStrategy()}, TypeError, "strategy to be settings"),
        ({"strategy": {"logical_shards": 4}}, ValueError, "logical_shards"),
        ({"strategy": {"bucket_cap": 4}}, ValueError, "StrategyConfig"),
        ({"strategy": {"find_unused_parameters": True}, "static_graph": [True]}, ValueError, "static_graph"),
        ({"max_epochs": 3}, ValueError, "max_epochs"),
        ({"logger": True}, ValueError, "logger"),
        ({"accumulate_grad_batches": 0}, ValueError, "accumulate_grad_batches to be at least 1"),
        ({"datamodule": Module()}, ValueError, "train_dataloaders or datamodule"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
        ({"path": "no/such/folder/x.yaml"}, ValueError, "folder that exists"),
        ({"path": str(ROOT / "pyproject.toml")}, ValueError, "which exists"),
        ({"path": "/proc/tuned.yaml"}, ValueError, "folder that can be written"),
        ({"static_graph": ["yes"]}, TypeError, "static_graph of True and False"),
        ({"gradient_as_bucket_view": [1]}, TypeError, "gradient_as_bucket_view of True and False"),
        ({"bucket_caps_mb": ["big"]}, TypeError, "bucket_caps_mb of numbers"),
        ({"bucket_caps_mb": [True]}, TypeError, "bucket_caps_mb of numbers"),
        ({"callbacks": GlobalMeanLoss()}, TypeError, "callbacks to be a list"),
        ({"callbacks": [GlobalMeanLoss]}, TypeError, "callbacks of Lightning"),
        ({"callbacks": [CommunicationMonitor()]}, ValueError, "CommunicationMonitor, which writes"),
        ({"callbacks": [StragglerMonitor()]}, ValueError, "StragglerMonitor, which writes"),
        ({"callbacks": [ModelCheckpoint()]}, ValueError, "ModelCheckpoint, which writes"),
        ({"callbacks": [OnExceptionCheckpoint("here")]}, ValueError, "OnExceptionCheckpoint, which writes"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(
    settings: dict[str, Any], kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner._Contest, "measure", lambda *_: pytest.fail("started"))
    with pytest.raises(kind, match=message):
        quick_tune(**settings)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match="a LightningModule"):
        tune(Model, DataLoader(data()))  # type: ignore[arg-type]


def test_one_process_gets_the_default_and_is_told_so(tmp_path: Path) -> None:
    tuning = quick_tune(devices=1, strategy={"static_graph": True}, path=tmp_path / "tuned.yaml")
    assert tuning.is_default
    assert tuning.config == StrategyConfig(static_graph=True)
    assert tuning.rows == ()
    assert "one process" in str(tuning)
    assert OmegaConf.load(tmp_path / "tuned.yaml") == {"static_graph": True, "bucket_cap_mb": None}


def test_lossy_hooks_compete_only_where_they_are_named_and_say_so() -> None:
    def notes(**settings: Any) -> dict[str, str]:
        values = {"comm_hook": settings.get("comm_hooks", []), "bucket_cap_mb": [1.0]}
        return {c.name: tuner._described(c).note for c in tuner.candidates(StrategyConfig(), values)}

    assert notes() == {"default": "", "bucket_cap_mb=1": ""}
    told = notes(comm_hooks=["bf16", "allreduce"])
    assert told["comm_hook=bf16"] == "changes the numbers: lossy"
    assert told["comm_hook=allreduce"] == ""


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_hook_may_compete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    spec = {"name": name, "for_measuring": True} if name == "noop" else name
    (_, candidate) = tuner.candidates(StrategyConfig(), {"comm_hook": [spec]})
    exact = {"allreduce", "ring", "tree", "butterfly", "parameter_server", "hierarchical"}
    assert (tuner._described(candidate).note == "") == (name in exact)


@ranks(2, init=False)
def test_no_communication_is_measured_and_never_chosen() -> None:
    def seconds_per_step(self: Any, strategy: Any, *_: int) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return 0.5 if strategy.comm_hook is not None and strategy.comm_hook.name == "noop" else 1.0

    TrialRun.seconds_per_step = seconds_per_step  # type: ignore[method-assign]
    tuning = quick_tune(bucket_caps_mb=[], comm_hooks=[{"name": "noop", "for_measuring": True}])
    assert tuning.rows[1].ratios == (0.5, 0.5, 0.5)
    assert tuning.rows[1].verdict == "for comparison only"
    assert tuning.is_default


def test_a_hook_with_exact_first_steps_compresses_in_the_steps_that_count() -> None:
    late = {"name": "powersgd", "start_step": 100}
    (_, candidate) = tuner.candidates(StrategyConfig(), {"comm_hook": [late]})
    run = TrialRun(Model(), None, None, (), {})
    contest = tuner._Contest(run, StrategyConfig(), [candidate, candidate], (5, 20, 3))
    measured = contest.strategy(candidate).comm_hook
    assert measured is not None
    assert measured.start_step < 5
    assert contest.config(candidate).comm_hook == late  # what is trained with is what was asked for


@ranks(2, init=False)
def test_hooks_that_exchange_now_and_then_are_measured_over_whole_periods() -> None:
    seen: dict[str, set[int]] = {}

    def seconds_per_step(self: Any, strategy: Any, num_warmup_steps: int, num_steps: int) -> float:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        seen.setdefault(str(strategy.comm_hook), set()).add(num_steps)
        return 1.0

    TrialRun.seconds_per_step = seconds_per_step  # type: ignore[method-assign]
    hooks = [{"name": "local_sgd", "period": period} for period in (3, 8)]
    quick_tune(bucket_caps_mb=[], comm_hooks=hooks, num_steps=4)
    assert sorted(seen.values(), key=max) == [{1, 4}, {3, 6}, {8}]  # the rehearsal's and the rounds'


# ------------------------------------------------------------------------------------------------------ what is written


def test_an_existing_file_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text("static_graph: true\n")
    with pytest.raises(ValueError, match="overwrite=True"):
        quick_tune(devices=1, path=file)
    assert file.read_text() == "static_graph: true\n"
    quick_tune(devices=1, path=file, overwrite=True)
    assert OmegaConf.load(file) == {"bucket_cap_mb": None}


@ranks(2, init=False)
def test_a_path_that_exists_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match="which exists"):
        quick_tune(path=ROOT / "pyproject.toml")


@ranks(2)
def test_a_path_refused_on_one_rank_is_refused_on_all_that_have_met(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with pytest.raises((ValueError, DDPPluginError)[rank], match="which exists"):
        quick_tune(path=(ROOT / "pyproject.toml", tmp_path / "new.yaml")[rank])


# ----------------------------------------------------------------------------------------------------------- launchers

PROGRAM = """
    import json, sys
    from functools import partial
    import lightning as L
    import torch
    from torch.utils.data import DataLoader
    from ddp_plugin import CustomDDPStrategy, tune
    from ddp_plugin.hooks import HOOKS
    from omegaconf import OmegaConf
    from tests.test_tune import LAYER, SHORT, SMALL_MB, Model, data, slow, virtual_time

    virtual_time()
    HOOKS["slow"] = partial(slow, fewest=LAYER + 1)

    if __name__ == "__main__":
        start_method, path = sys.argv[1:]
        torch.manual_seed(3)
        model, loader = Model(), DataLoader(data(), 4, shuffle=True)
        settings = {"accelerator": "cpu", "devices": 2}
        config = {"comm_hook": "slow", "start_method": start_method}
        config = tune(
            model, loader, strategy=config, bucket_caps_mb=[SMALL_MB], path=path, **settings, **SHORT
        ).config
        assert CustomDDPStrategy.from_config(OmegaConf.load(path)).comm_hook.name == "slow"
        config.bucket_cap_mb = None
        strategy = CustomDDPStrategy.from_config(config)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(strategy=strategy, max_epochs=1, enable_model_summary=False, **settings, **quiet)
        trainer.fit(model, loader)
        if trainer.global_rank == 0:
            print("RESULT", json.dumps([value.double().sum().item() for value in model.parameters()]))
"""


def run_program(folder: Path, *arguments: str) -> list[Any]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(folder / "program.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]


def train_without_tuning() -> list[float]:
    """What the program trains, in processes that no tuning has seen."""
    torch.manual_seed(3)
    model, loader = Model(), DataLoader(data(), 4, shuffle=True)
    trainer(max_epochs=1).fit(model, loader)
    return [value.double().sum().item() for value in model.parameters()]


@pytest.mark.long
def test_a_script_that_lightning_starts_again_tunes_and_trains_as_if_it_had_not(tmp_path: Path) -> None:
    assert run_program(tmp_path, "popen", str(tmp_path / "tuned.yaml")) == [
        run_ranks(train_without_tuning, 2, init=False)[0]
    ]
    assert OmegaConf.load(tmp_path / "tuned.yaml").bucket_cap_mb == SMALL_MB
    assert sorted(file.name for file in tmp_path.iterdir()) == ["program.py", "tuned.yaml"]


@pytest.mark.long
def test_processes_that_end_with_the_tuning_bring_the_choice_home(tmp_path: Path) -> None:
    assert len(run_program(tmp_path, "spawn", str(tmp_path / "tuned.yaml"))) == 1
    assert OmegaConf.load(tmp_path / "tuned.yaml").bucket_cap_mb == SMALL_MB
    assert sorted(file.name for file in tmp_path.iterdir()) == ["program.py", "tuned.yaml"]
