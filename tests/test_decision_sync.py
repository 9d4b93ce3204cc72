"""All ranks decide alike, and stop together; each cure beside the failure that it cures."""

import contextlib
import math
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from ddp_plugin import DecisionSync, ExactEvaluation
from ddp_plugin.agreement import Agreement
from ddp_plugin.errors import DDPPluginError
from tests.harness import RankFailureError, ranks, run_ranks, trainer

NUM_BATCHES = 6  # of each rank


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def loader(num_batches: int = NUM_BATCHES) -> DataLoader[Any]:
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(2 * num_batches * world_size, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(data), batch_size=2)


class Model(pl.LightningModule):
    """Each rank logs its own values: those of rank 0 get better, those of the others do not."""

    def __init__(self, plateau: dict[str, Any] | None = None, sync_dist: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1, dtype=torch.float64)
        self.plateau = plateau
        self.sync_dist = sync_dist
        self.steps: list[tuple[int, int]] = []  # (epoch, batch)
        self.validated_after: list[int] = []  # global steps

    def own_value(self) -> float:
        return 1.0 / (1 + self.global_step) if rank() == 0 else 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append((self.current_epoch, batch_idx))
        self.log("step_loss", self.own_value(), sync_dist=self.sync_dist)
        self.log("epoch_loss", self.own_value(), on_step=False, on_epoch=True, sync_dist=self.sync_dist)
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated_after.append(self.global_step)
        self.log("val_loss", self.own_value(), sync_dist=self.sync_dist)

    def on_train_epoch_end(self) -> None:
        self.log("late_loss", self.own_value(), sync_dist=self.sync_dist)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.plateau is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.plateau}}

    def outcome(self) -> tuple[list[float], float]:
        return self.net.weight.flatten().tolist(), self.trainer.optimizers[0].param_groups[0]["lr"]


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """Collects what DecisionSync warns of, on rank 0; the others stay silent."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(item.message) for item in caught if "DecisionSync" in str(item.message)]
    assert rank() == 0 or not messages


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_equal(value: Any) -> bool:
    values = everywhere(value)
    return all(other == values[0] for other in values)


# ------------------------------------------------------------------------------------------------------------ agreement


@ranks(1, 2, 3)
def test_a_post_is_agreed_on_at_the_next_one_and_a_settlement_at_once(world_size: int) -> None:
    for wisher in range(world_size):
        agreement = Agreement(dist.new_group(backend="gloo"))
        seen = []
        for step in range(4):
            if (step, rank()) == (1, wisher):
                agreement.wish()
            agreement.post()
            seen.append(agreement.is_agreed())
        assert seen == [False, False, True, True]
        assert agreement.wishers() == (1, wisher)
        agreement.drop()
        agreement.settle()
        assert not agreement.is_agreed()
        agreement.wish()
        agreement.settle()
        assert agreement.wishers() == (world_size, world_size * (world_size - 1) // 2)


def test_one_process_agrees_with_itself() -> None:
    agreement = Agreement(None)
    agreement.wish()
    agreement.drop()  # not agreed upon yet: nothing to take back
    assert not agreement.is_agreed()
    agreement.post()
    assert agreement.is_agreed()


# ------------------------------------------------------------------------------------------------------------- monitors


def fit_with_plateau(plateau: dict[str, Any], callbacks: list[Any], **settings: Any) -> tuple[Model, Any]:
    model = Model(plateau)
    run = trainer(callbacks=callbacks, **({"max_epochs": 6} | settings))
    run.fit(model, loader(2), loader(1))
    return model, run


PLATEAUS = {
    "epoch": {"monitor": "val_loss"},
    "epoch, logged late": {"monitor": "late_loss"},
    "step": {"monitor": "step_loss", "interval": "step"},
    "every second step": {"monitor": "step_loss", "interval": "step", "frequency": 2},
}


def reference_learning_rate(plateau: dict[str, Any], world_size: int) -> float:
    """One process, plain torch: the scheduler that is fed the mean over ranks of what each rank logs."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    mean = [(1 / (1 + step) + world_size - 1) / world_size for step in range(13)]
    optimizer.step()
    if plateau.get("interval") == "step":
        positions = [(step, step % 2) for step in range(12)]
        for step, batch_idx in positions:
            if (batch_idx + 1) % plateau.get("frequency", 1) == 0:
                scheduler.step(mean[step])
    else:
        for epoch in range(6):
            scheduler.step(mean[2 * (epoch + 1)])
    return optimizer.param_groups[0]["lr"]


@ranks(2, 3, init=False)
@pytest.mark.parametrize("name", PLATEAUS)
def test_plateau_schedulers_follow_one_value(world_size: int, name: str) -> None:
    with said() as messages:
        model, run = fit_with_plateau(PLATEAUS[name], [DecisionSync()])
    key = PLATEAUS[name]["monitor"]
    if rank() == 0:
        assert len(messages) == 1
        assert f"'{key}'" in messages[0]
        assert f"1 on rank {world_size - 1}" in messages[0]
        assert f"Log '{key}' with sync_dist=True" in messages[0]
    assert all_equal(model.outcome())
    if key != "step_loss":  # of the last comparison; of a step's value, nothing is left at the end of an epoch
        assert all_equal(float(run.callback_metrics[key]))
    assert model.outcome()[1] == pytest.approx(reference_learning_rate(PLATEAUS[name], world_size), rel=1e-12)


@ranks(2, init=False)
def test_without_it_the_replicas_part_in_silence() -> None:
    """The negative control, and what `warn` leaves as it is."""
    for callbacks in ([], [DecisionSync("warn")]):
        with said() as messages:
            model, _ = fit_with_plateau(PLATEAUS["epoch"], callbacks)
        if rank() == 0:
            assert len(messages) == len(callbacks)
            assert all("each rank decides by its own, and the weights may part" in message for message in messages)
        (weights_0, rate_0), (weights_1, rate_1) = everywhere(model.outcome())
        assert rate_0 == 0.1
        assert rate_1 == pytest.approx(1e-6)
        assert weights_0 != weights_1


@ranks(2, init=False)
def test_raise_raises_on_all_ranks() -> None:
    with pytest.raises(
        DDPPluginError, match=r"'val_loss' to be equal on all ranks. Got 0.333333 on rank 0, 1 on rank 1"
    ):
        fit_with_plateau(PLATEAUS["epoch"], [DecisionSync("raise")])


@ranks(2, init=False)
@pytest.mark.filterwarnings("error:DecisionSync")
def test_values_that_are_equal_are_left_alone() -> None:
    for callbacks, sync_dist in (([DecisionSync("raise")], True), ([DecisionSync("raise"), ExactEvaluation()], False)):
        model = Model({"monitor": "val_loss"}, sync_dist=sync_dist)
        run = trainer(callbacks=[*callbacks, EarlyStopping("val_loss", patience=99)], max_epochs=3)
        run.fit(model, loader(2), loader(1))
        assert float(run.callback_metrics["val_loss"]) == pytest.approx((1 / 7 + 1) / 2, rel=1e-6)


class OnOneRank(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if rank() == 1:
            self.log("val_loss", 1.0)


@ranks(3, init=False)
def test_a_key_that_some_ranks_lack_is_refused() -> None:
    with pytest.raises(DDPPluginError, match=r"'val_loss' to be logged on all ranks. Got none on rank 0, 2 of 3"):
        trainer(callbacks=[EarlyStopping("val_loss"), DecisionSync()]).fit(OnOneRank(), loader(), loader(1))


class NotANumber(Model):
    def own_value(self) -> float:
        return math.nan


@ranks(2, init=False)
def test_nan_equals_nan() -> None:
    stops = EarlyStopping("val_loss", check_finite=True)
    run = trainer(callbacks=[stops, DecisionSync("raise")], max_epochs=3)
    model = NotANumber()
    run.fit(model, loader(), loader(1))
    assert stops.stopped_epoch == 0
    assert len(model.steps) == NUM_BATCHES


class NanOnOneRank(Model):
    def own_value(self) -> float:
        return math.nan if rank() == 1 else 1.0


@ranks(2, init=False)
def test_nan_on_one_rank_is_nan_for_all() -> None:
    stops = EarlyStopping("val_loss", check_finite=True)
    run, model = trainer(callbacks=[stops, DecisionSync()], max_epochs=3), NanOnOneRank()
    with said() as messages:
        run.fit(model, loader(), loader(1))
    assert len(model.steps) == NUM_BATCHES
    assert math.isnan(run.callback_metrics["val_loss"])
    if rank() == 0:
        assert "1 on rank 0, nan on rank 1; all ranks decide by the mean, nan" in messages[0]


class WithMetric(Model):
    """Logs a torchmetrics object, whose ranks' parts meet when it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.update(float(rank()))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


@ranks(2, init=False)
def test_a_monitored_metric_object_is_equal_already() -> None:
    saves = EarlyStopping("mean", patience=9, check_on_train_epoch_end=True)
    trainer(callbacks=[saves, DecisionSync("raise")], max_epochs=2).fit(WithMetric(), loader())
    assert float(saves.best_score) == 0.5


class FirstDecision(pl.Callback):
    """Reads monitors like Lightning's, but is an ordinary callback, and an early one; and what nobody compared."""

    monitor = "val_loss"

    def __init__(self) -> None:
        self.read: list[float] = []
        self.own: list[float] = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.read.append(float(trainer.callback_metrics["val_loss"]))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % 2:
            self.own.append(float(trainer.callback_metrics["step_loss"]))


class EarlyDecision(pl.Callback):
    """Reads its monitor at the end of a training epoch, before the module's own hook."""

    monitor = "epoch_loss"

    def __init__(self) -> None:
        self.read: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.read.append(float(trainer.callback_metrics["epoch_loss"]))


@ranks(2, init=False)
def test_checkpoints_and_early_stopping_decide_alike_wherever_the_callback_stands(tmp_path: Path) -> None:
    first, early = FirstDecision(), EarlyDecision()
    by_epoch = ModelCheckpoint(tmp_path / "epoch", monitor="val_loss", save_top_k=2)
    by_step = ModelCheckpoint(tmp_path / "step", monitor="step_loss", save_top_k=2, every_n_train_steps=2)
    late = ModelCheckpoint(tmp_path / "late", monitor="late_loss", save_on_train_epoch_end=True)
    stops = EarlyStopping("late_loss", patience=3, mode="max", check_on_train_epoch_end=True)
    callbacks = [first, early, stops, by_epoch, by_step, late, DecisionSync()]
    run, model = trainer(callbacks=callbacks, max_epochs=6, enable_checkpointing=True), Model()
    with said():
        run.fit(model, loader(2), loader(1))
    mean = [(1 / (1 + step) + 1) / 2 for step in range(13)]
    assert stops.stopped_epoch == 3  # the mean only falls; the wish of the three epochs after the first
    assert len(model.steps) == 8
    assert first.read == pytest.approx([mean[step] for step in (2, 4, 6, 8)], rel=1e-6)
    assert early.read == pytest.approx([(mean[step - 2] + mean[step - 1]) / 2 for step in (2, 4, 6, 8)], rel=1e-6)
    assert first.own == pytest.approx([1 / (1 + step) if rank() == 0 else 1.0 for step in (0, 2, 4, 6)], rel=1e-6)
    assert float(by_epoch.best_model_score) == pytest.approx(mean[8], rel=1e-6)
    assert sorted(map(float, by_step.best_k_models.values())) == pytest.approx(sorted(mean[step] for step in (5, 7)))
    assert float(late.best_model_score) == pytest.approx(mean[8], rel=1e-6)
    for checkpoint in (by_epoch, by_step, late):
        assert all_equal({path: float(score) for path, score in checkpoint.best_k_models.items()})
        assert Path(checkpoint.best_model_path).exists()


@ranks(2, init=False)
def test_without_it_the_best_checkpoint_is_skipped(tmp_path: Path) -> None:
    by_epoch = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1)
    trainer(callbacks=[by_epoch], max_epochs=3, enable_checkpointing=True).fit(Model(), loader(2), loader(1))
    assert float(by_epoch.best_model_score) in (pytest.approx(1 / 3), 1.0)  # of the first epoch, ever after


# ------------------------------------------------------------------------------------------------------------- stopping


class Stop(pl.Callback):
    """Sets ``should_stop`` on some ranks, in one hook of one step of one epoch."""

    def __init__(self, hook: str, epoch: int, batch_idx: int | None, on_ranks: tuple[int, ...]) -> None:
        self.on_ranks = on_ranks

        def wish(trainer: pl.Trainer, *arguments: Any) -> None:
            is_there = batch_idx is None or trainer.fit_loop.epoch_loop.batch_idx == batch_idx
            if trainer.current_epoch == epoch and is_there and rank() in on_ranks and not trainer.sanity_checking:
                trainer.should_stop = True

        setattr(self, hook, wish)


def steps_until_stop(
    stop: pl.Callback, val_check_interval: int | None = None, **settings: Any
) -> tuple[int, list[int]]:
    """Returns the number of steps, and after which of them there was a validation; both equal on all ranks."""
    run = trainer(
        callbacks=[stop, DecisionSync()],
        **({"max_epochs": 3, "val_check_interval": val_check_interval} | settings),
    )
    model = Model()
    run.fit(model, loader(), loader(1))
    assert run.should_stop is True
    assert type(run) is pl.Trainer
    assert all_equal((model.steps, model.validated_after, model.outcome()))
    return len(model.steps), model.validated_after


@ranks(2, 3, init=False)
@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_end"]
)
def test_a_wish_in_a_step_stops_all_ranks_one_step_later(world_size: int, hook: str) -> None:
    for wisher in (0, world_size - 1):
        steps, validated_after = steps_until_stop(Stop(hook, 0, 2, (wisher,)))
        assert steps == 4  # batches 0, 1, 2 and the one beside which the wish travelled
        assert validated_after == [4]  # Lightning validates before it stops early


@ranks(2, init=False)
def test_a_wish_in_the_last_steps_of_an_epoch() -> None:
    assert steps_until_stop(Stop("on_train_batch_end", 1, NUM_BATCHES - 2, (1,)))[0] == 2 * NUM_BATCHES
    assert steps_until_stop(Stop("on_train_batch_end", 1, NUM_BATCHES - 1, (1,)))[0] == 2 * NUM_BATCHES
    assert steps_until_stop(Stop("on_train_epoch_end", 1, None, (1,)))[0] == 2 * NUM_BATCHES
    assert steps_until_stop(Stop("on_validation_end", 1, NUM_BATCHES - 1, (1,)))[0] == 2 * NUM_BATCHES


@ranks(2, init=False)
def test_a_wish_in_a_validation_inside_the_epoch_stops_at_once() -> None:
    for hook in ("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"):
        assert steps_until_stop(Stop(hook, 1, 1, (1,)), val_check_interval=2) == (NUM_BATCHES + 2, [2, 4, 6, 8])


@ranks(2, init=False)
def test_a_wish_before_the_first_step_prevents_it() -> None:
    for hook in ("on_fit_start", "on_train_start"):
        run, model = trainer(callbacks=[Stop(hook, 0, None, (1,)), DecisionSync()]), Model()
        run.fit(model, loader(), loader(1))
        assert model.steps == []
        assert run.should_stop


@ranks(2, init=False)
def test_a_wish_at_the_start_of_an_epoch() -> None:
    assert steps_until_stop(Stop("on_train_epoch_start", 1, None, (1,)))[0] == NUM_BATCHES + 2


@ranks(1, init=False)
def test_one_process_stops_where_lightning_stops() -> None:
    for callbacks in ([], [DecisionSync()]):
        run, model = trainer(callbacks=[*callbacks, Stop("on_train_batch_end", 0, 2, (0,))]), Model()
        run.fit(model, loader())
        assert len(model.steps) == 3


@ranks(2, init=False)
def test_min_epochs_and_min_steps_are_lightnings() -> None:
    stop = Stop("on_train_batch_end", 0, 1, (1,))
    assert steps_until_stop(stop, min_epochs=2)[0] == 2 * NUM_BATCHES
    stop = Stop("on_train_batch_end", 0, 1, (1,))
    assert steps_until_stop(stop, min_steps=NUM_BATCHES + 2)[0] == NUM_BATCHES + 2


@ranks(2, init=False)
def test_the_strategy_alone_stops_all_ranks() -> None:
    run, model = trainer(callbacks=[Stop("on_train_batch_end", 0, 2, (1,))]), Model()
    run.fit(model, loader())
    assert len(model.steps) == 4
    assert run.strategy.stop_reason == "should_stop"


def stop_alone() -> None:
    trainer(callbacks=[Stop("on_train_batch_end", 0, 2, (1,))], strategy=DDPStrategy()).fit(Model(), loader())
    time.sleep(60)  # a rank that has finished, and whose process is still there


def test_under_lightnings_strategy_the_others_hang() -> None:
    with pytest.raises(RankFailureError, match=r"rank 0 of 2: did not finish in time(.|\n)*training_epoch_loop.py"):
        run_ranks(stop_alone, 2, init=False, timeout_s=6)


@ranks(2, init=False)
def test_early_stopping_stops_exactly_where_lightning_does() -> None:
    counts = []
    for settings in ({"val_check_interval": 2}, {"check_val_every_n_epoch": 2}, {}):
        for on_train_epoch_end in (True, False):
            key = "late_loss" if on_train_epoch_end else "val_loss"
            steps = []
            for callbacks in ([], [DecisionSync("raise")]):
                stops = EarlyStopping(key, patience=1, mode="max", check_on_train_epoch_end=on_train_epoch_end)
                run = trainer(callbacks=[stops, *callbacks], max_epochs=9, **settings)
                model = Model(sync_dist=True)
                run.fit(model, loader(), loader(1))
                steps.append((model.steps, model.validated_after, stops.stopped_epoch))
            assert steps[0] == steps[1]
            counts.append(len(steps[0][0]))
    assert counts[1] == 4  # three validations, two batches apart, the third without patience: less than an epoch
    assert max(counts) < 9 * NUM_BATCHES


@ranks(2, init=False)
def test_a_timer_still_stops() -> None:
    class Slow(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    run, model = trainer(callbacks=[DecisionSync(), Timer({"seconds": 0.3})], max_epochs=50), Slow()
    run.fit(model, loader())
    assert 1 < len(model.steps) < 30
    assert all_equal(model.steps)


@ranks(2, init=False)
def test_a_fit_inside_the_fit_keeps_its_own_stop() -> None:
    class Tunable(Model):
        lr = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model = Tunable()
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1e6, num_training_steps=12, early_stop_threshold=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning, on the checkpoint that the finder writes for itself
        trainer(callbacks=[finder, DecisionSync()], max_epochs=2).fit(model, loader(12))
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) < 12  # it did stop early
    assert model.steps[-24:] == [(epoch, batch) for epoch in range(2) for batch in range(12)]
    assert all_equal(model.outcome())


@ranks(2, init=False)
def test_an_agreed_stop_can_be_taken_back_by_all() -> None:
    class TakeBack(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.should_stop:
                trainer.should_stop = False

    run = trainer(callbacks=[Stop("on_train_batch_end", 0, 1, (0,)), TakeBack(), DecisionSync()], max_epochs=1)
    model = Model()
    run.fit(model, loader(), loader(1))
    assert len(model.steps) == NUM_BATCHES
    assert run.should_stop is False


# --------------------------------------------------------------------------------------------------------- leaving well


class Failing(Model):
    def on_train_batch_end(self, *arguments: Any) -> None:
        raise RuntimeError("on purpose")


@ranks(2, init=False)
def test_the_trainer_is_given_back_after_an_exception_and_a_run() -> None:
    stops = EarlyStopping("val_loss")
    run = trainer(callbacks=[stops, DecisionSync()])
    before = [type(item) for item in (run, run.fit_loop, run.fit_loop.epoch_loop)]
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(Failing(), loader())
    with said() as messages:
        run.fit(model := Model(), loader(), loader(1))
    assert len(messages) == (rank() == 0)
    assert len(model.steps) == NUM_BATCHES
    assert [type(item) for item in (run, run.fit_loop, run.fit_loop.epoch_loop)] == before
    assert "on_train_epoch_end" not in vars(stops)
    run.should_stop = True
    assert run.should_stop is True


def one_rank_fails() -> None:
    class FailsAlone(Model):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if rank() == 1 and self.global_step == 2:
                raise RuntimeError("on purpose")

    trainer(callbacks=[DecisionSync()]).fit(FailsAlone(), loader())


def test_an_exception_on_one_rank_is_no_hang_of_its_own() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailureError, match="on purpose"):
        run_ranks(one_rank_fails, 2, init=False, timeout_s=60)
    assert time.monotonic() - begin < 30


@ranks(2, init=False)
def test_it_is_refused_under_another_strategy() -> None:
    with pytest.raises(TypeError, match="because DecisionSync runs on several processes"):
        trainer(callbacks=[DecisionSync()], strategy=DDPStrategy()).fit(Model(), loader())


@ranks(1, init=False)
def test_one_process_runs_under_any_strategy() -> None:
    model = Model()
    trainer(callbacks=[DecisionSync()], strategy="auto").fit(model, loader(), loader(1))
    assert len(model.steps) == NUM_BATCHES


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'mean', 'warn', 'raise'"):
        DecisionSync("median")
