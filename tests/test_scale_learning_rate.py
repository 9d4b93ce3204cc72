"""ScaleLearningRate: the rates that the optimizer really used, against golden values and plain runs."""

import csv
import math
import os

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, AdamW, lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_plugin import ScaleLearningRate
from ddp_plugin.callbacks import scale_learning_rate
from tests.harness import ranks, trainer

NUM_SAMPLES = 32


class Model(pl.LightningModule):
    """Two parameter groups, and a diary of the rates in each optimizer step."""

    def __init__(self, scheduler=None, interval="step", optimizer=SGD):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        self.make_scheduler, self.interval, self.make_optimizer = scheduler, interval, optimizer
        self.used = []
        self.events = []

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch[0])).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.used.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        optimizer = self.make_optimizer(
            [{"params": self.first.parameters(), "lr": 0.1}, {"params": self.second.parameters(), "lr": 0.01}]
        )
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Save(pl.Callback):
    """Writes a checkpoint after given optimizer steps, and at the end of given epochs."""

    def __init__(self, folder, step=None, epoch=None):
        self.path, self.step, self.epoch = os.path.join(folder, "saved.ckpt"), step, epoch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def loader(batch_size=2, **settings):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(NUM_SAMPLES, 2, generator=generator)), batch_size=batch_size, **settings
    )


def fit(callback, model=None, *, batch_size=2, ckpt_path=None, callbacks=(), **settings):
    model = model if model is not None else Model()
    settings = {"accumulate_grad_batches": 2, "max_epochs": 2} | settings
    trainer(callbacks=[callback, *callbacks], **settings).fit(model, loader(batch_size), ckpt_path=ckpt_path)
    return model


def rates(model):
    return torch.tensor(model.used, dtype=torch.float64)


def assert_rates(model, wanted, **tolerance):
    torch.testing.assert_close(rates(model), wanted, **({"rtol": 1e-12, "atol": 1e-15} | tolerance))


@ranks(1, 2, init=False)
def test_the_rates_in_use_have_their_golden_values(world_size):
    """2 x world size x 2 from base 2; 16 / world size steps, 2 of them warm-up."""
    model = fit(ScaleLearningRate(2, warmup_steps=2, schedule="cosine", final_ratio=0.5))
    k, total = 2 * world_size, 16 // world_size
    ratios = [0, 0.5] + [0.75 + 0.25 * math.cos(math.pi * step / (total - 2)) for step in range(total - 2)]
    assert len(model.used) == total
    assert_rates(model, k * torch.tensor([[0.1 * ratio, 0.01 * ratio] for ratio in ratios], dtype=torch.float64))


@ranks(2, init=False)
def test_warm_up_from_the_base_rate():
    """Goyal et al.: from the rate of the base batch up to k times it, here k = 4 over 4 steps."""
    model = fit(ScaleLearningRate(2, warmup_steps=4, warmup_from="base"))
    ratios = [1, 1.75, 2.5, 3.25, 4, 4, 4, 4]
    assert_rates(model, torch.tensor([[0.1 * ratio, 0.01 * ratio] for ratio in ratios], dtype=torch.float64))


@pytest.mark.parametrize(("rule", "ratio"), [("linear", 4), ("sqrt", 2), ("none", 1)])
@ranks(2, init=False)
def test_rules_reach_all_groups(rule, ratio):
    model = fit(ScaleLearningRate(2, rule=rule))
    assert_rates(model, torch.tensor([[0.1 * ratio, 0.01 * ratio]] * 8, dtype=torch.float64))


@ranks(2, init=False)
def test_without_arguments_nothing_changes_and_the_batch_is_said():
    callback, said = ScaleLearningRate(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_learning_rate, "rank_zero_info", said.append)
        model = fit(callback)
    assert_rates(model, torch.tensor([[0.1, 0.01]] * 8, dtype=torch.float64))
    assert said == ["Effective batch: 2 per process x 2 processes x 2 accumulation = 8"]
    assert callback.effective_batch.total == 8


def make_step(optimizer):
    return lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def make_cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=0.005)


def make_lambda(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def make_one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 0.2], total_steps=8, cycle_momentum=False)


def make_sequence(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warm, make_cosine(optimizer)], milestones=[3])


USERS = [make_step, make_cosine, make_lambda, make_one_cycle, make_sequence]


@pytest.mark.parametrize("scheduler", USERS)
@ranks(2, init=False)
def test_the_users_schedulers_follow_the_scaled_curve(scheduler):
    plain = fit(ScaleLearningRate(), Model(scheduler))
    assert (rates(plain).diff(dim=0) != 0).any()
    assert_rates(fit(ScaleLearningRate(2), Model(scheduler)), 4 * rates(plain))


@ranks(1, init=False)
def test_a_scheduler_of_epochs_follows_the_scaled_curve():
    def run(callback):
        return rates(fit(callback, Model(make_step, interval="epoch"), max_epochs=5))

    torch.testing.assert_close(run(ScaleLearningRate(1)), 4 * run(ScaleLearningRate()), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "moment", [{"step": 2}, {"epoch": 0}, {"step": 5}], ids=lambda value: getattr(value, "__name__", str(value))
)
@pytest.mark.parametrize(
    "kind", ["own", "constant", "bare", *USERS], ids=lambda value: getattr(value, "__name__", str(value))
)
@ranks(1, init=False)
def test_a_resumed_run_uses_the_rates_of_an_uninterrupted_one(tmp_path, kind, moment):
    assert_resumes(tmp_path, kind, moment)


@pytest.mark.parametrize(
    "moment", [{"step": 2}, {"epoch": 0}], ids=lambda value: getattr(value, "__name__", str(value))
)
@ranks(2, init=False)
def test_a_resumed_run_of_two_ranks(tmp_path, moment):
    assert_resumes(tmp_path, "own", moment)


def assert_resumes(tmp_path, kind, moment):
    callback = {
        "own": lambda: ScaleLearningRate(1, warmup_steps=3, schedule="cosine", final_ratio=0.1),
        "constant": lambda: ScaleLearningRate(1, warmup_steps=4),
    }.get(kind, lambda: ScaleLearningRate(1))
    scheduler = kind if callable(kind) else None
    settings = {"max_epochs": 2} if kind in USERS else {"max_epochs": 3}
    settings |= {"accumulate_grad_batches": 4 // int(os.environ["WORLD_SIZE"])}  # 4 steps an epoch
    save = Save(tmp_path, **moment)
    whole = fit(callback(), Model(scheduler), callbacks=[save], **settings)
    resumed = fit(callback(), Model(scheduler), ckpt_path=save.path, **settings)
    done = moment.get("step", 4)
    assert len(resumed.used) == len(whole.used) - done
    assert_rates(resumed, rates(whole)[done:], rtol=0, atol=0)


@ranks(1, init=False)
def test_the_scaling_would_show_if_it_were_applied_again(tmp_path):
    """The guard of the tests above: a callback that forgets its state scales the checkpoint's rates once more."""
    save = Save(tmp_path, step=2)
    fit(ScaleLearningRate(1), callbacks=[save])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScaleLearningRate, "load_state_dict", lambda self, state: None)
        patch.setattr(scale_learning_rate, "rank_zero_warn", lambda text: None)
        resumed = fit(ScaleLearningRate(1), ckpt_path=save.path)
    assert resumed.used[0][0] == pytest.approx(0.1 * 4 * 4)


@ranks(1, init=False)
def test_a_second_fit_scales_new_optimizers_and_no_old_ones():
    callback, model = ScaleLearningRate(1), Model()
    for _ in range(2):
        model.used.clear()
        fit(callback, model)
        assert model.used[0] == pytest.approx([0.4, 0.04])
    kept = Model()
    optimizer = kept.configure_optimizers()
    kept.configure_optimizers = lambda: optimizer
    for callback in (ScaleLearningRate(1), ScaleLearningRate(1)):
        kept.used.clear()
        fit(callback, kept)
        assert kept.used[0] == pytest.approx([0.4, 0.04])


@ranks(1, init=False)
def test_a_second_fit_of_one_trainer_speaks_of_no_checkpoint():
    said = []
    run, model = trainer(callbacks=[ScaleLearningRate(1)], max_epochs=1), Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_learning_rate, "rank_zero_warn", said.append)
        for max_epochs in (1, 2):
            run.fit_loop.max_epochs = max_epochs
            model.used.clear()
            run.fit(model, loader(2))
            assert model.used[0] == pytest.approx([0.2, 0.02])
    assert run.global_step > 4
    assert said == []


def warned(callback, **settings):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_learning_rate, "rank_zero_warn", said.append)
        return fit(callback, **settings), said


@ranks(1, init=False)
def test_another_effective_batch_keeps_the_rates_of_the_checkpoint_and_says_so(tmp_path):
    save = Save(tmp_path, epoch=0)
    fit(ScaleLearningRate(1), callbacks=[save])
    resumed, said = warned(ScaleLearningRate(1), ckpt_path=save.path, accumulate_grad_batches=4)
    assert {tuple(row) for row in resumed.used} == {(0.4, 0.04)}
    assert len(said) == 1
    assert "effective batch of 4 (x 4) and are kept; this run's effective batch is 8 (x 8)" in said[0]
    again = Save(tmp_path, epoch=1)
    _, said = warned(
        ScaleLearningRate(1), ckpt_path=save.path, accumulate_grad_batches=4, max_epochs=3, callbacks=[again]
    )
    _, said = warned(ScaleLearningRate(1), ckpt_path=again.path, accumulate_grad_batches=2, max_epochs=3)
    assert said == []  # the checkpoint of the resumed run still tells what its rates are for


@ranks(1, init=False)
def test_a_longer_run_keeps_the_end_of_the_schedule_unless_told(tmp_path):
    save = Save(tmp_path, epoch=0)
    fit(ScaleLearningRate(schedule="cosine"), callbacks=[save])
    resumed, said = warned(ScaleLearningRate(schedule="cosine"), ckpt_path=save.path, max_epochs=4)
    assert "ends at step 16 and is kept; this run has 32 steps" in said[0]
    assert resumed.used[-1] == [0, 0]
    moved, said = warned(ScaleLearningRate(schedule="cosine", total_steps=32), ckpt_path=save.path, max_epochs=4)
    assert "follows total_steps=32" in said[0]
    wanted = [0.5 + 0.5 * math.cos(math.pi * step / 32) for step in range(8, 32)]
    assert_rates(moved, torch.tensor([[0.1 * ratio, 0.01 * ratio] for ratio in wanted], dtype=torch.float64))


@ranks(1, init=False)
def test_a_checkpoint_of_a_run_without_the_callback_is_scaled_once(tmp_path):
    save = Save(tmp_path, epoch=0)
    fit(save)
    resumed, said = warned(ScaleLearningRate(1, warmup_steps=10), ckpt_path=save.path)
    assert "written without ScaleLearningRate" in said[0]
    wanted = [0.8, 0.9] + [1] * 6  # the curve stands where the run stands, at step 8
    assert_rates(resumed, torch.tensor([[0.4 * ratio, 0.04 * ratio] for ratio in wanted], dtype=torch.float64))


@ranks(1, init=False)
def test_another_schedule_than_the_checkpoints_is_refused(tmp_path):
    save = Save(tmp_path, epoch=0)
    fit(ScaleLearningRate(1, warmup_steps=2), callbacks=[save])
    with pytest.raises(ValueError, match=r"schedule of the checkpoint, 'constant'\. Got None"):
        fit(ScaleLearningRate(1), ckpt_path=save.path)


@ranks(1, init=False)
def test_adam_hyperparameters_follow_the_square_root_rule(tmp_path):
    seen = []

    class Note(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.extend((group["lr"], *group["betas"], group["eps"]) for group in trainer.optimizers[0].param_groups)

    save = Save(tmp_path, epoch=0)
    settings = {"rule": "sqrt", "scale_adam_hyperparameters": True}
    fit(ScaleLearningRate(1, **settings), Model(optimizer=AdamW), callbacks=[Note(), save])
    fit(ScaleLearningRate(1, **settings), Model(optimizer=AdamW), callbacks=[Note()], ckpt_path=save.path)
    assert len(seen) == 2 * 16 * 2 + 16 * 2
    for lr, first, second, eps in seen:
        assert lr == pytest.approx(0.2) or lr == pytest.approx(0.02)
        assert (first, second) == pytest.approx((0.6, 0.996))
        assert eps == 5e-9
    with pytest.raises(ValueError, match="betas and eps"):
        fit(ScaleLearningRate(1, **settings), Model(optimizer=SGD))


def make_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)


class Strange(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [0.1 for _ in self.optimizer.param_groups]


class Manual(Model):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [SGD(self.first.parameters(), lr=0.1), SGD(self.second.parameters(), lr=0.01)]


@ranks(2, init=False)
def test_several_optimizers_under_manual_optimization():
    model = Manual()
    fit(ScaleLearningRate(1), model, accumulate_grad_batches=1, max_epochs=1)
    assert {tuple(row) for row in model.used} == {(0.4,), (0.04,)}
    with pytest.raises(ValueError, match="manual optimization"):
        fit(ScaleLearningRate(warmup_steps=3), Manual(), accumulate_grad_batches=1)


@ranks(1, init=False)
def test_contradictions_are_refused_before_the_first_step():
    accumulation = GradientAccumulationScheduler({0: 1, 1: 2})
    cases = [
        ("a scheduler of your own", ScaleLearningRate(schedule="cosine"), Model(make_step), {}),
        ("a scheduler of your own", ScaleLearningRate(warmup_steps=2), Model(make_step), {}),
        ("Strange", ScaleLearningRate(1), Model(Strange), {}),
        (
            "cycle_momentum=False",
            ScaleLearningRate(1, rule="sqrt", scale_adam_hyperparameters=True),
            Model(make_cycle, optimizer=AdamW),
            {},
        ),
        (
            "GradientAccumulationScheduler",
            ScaleLearningRate(1),
            Model(),
            {"callbacks": [accumulation], "accumulate_grad_batches": 1},
        ),
        (
            "a known number of optimizer steps",
            ScaleLearningRate(schedule="cosine"),
            Model(),
            {"max_epochs": -1, "max_steps": -1},
        ),
        ("more steps than its warm-up", ScaleLearningRate(warmup_steps=16, schedule="cosine"), Model(), {}),
        ("betas to stay above 0", sixteenfold(), Model(optimizer=AdamW), {"accumulate_grad_batches": 8}),
    ]
    for message, callback, model, settings in cases:
        with pytest.raises(ValueError, match=message):
            fit(callback, model, **settings)
        assert model.used == []


def sixteenfold():
    return ScaleLearningRate(1, rule="sqrt", scale_adam_hyperparameters=True)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(8, 2))


@ranks(1, init=False)
def test_where_the_batch_size_comes_from():
    def measure(train_loaders, callback):
        model, said = Model(), []
        model.training_step = lambda batch, batch_idx: None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scale_learning_rate, "rank_zero_info", said.append)
            # Not under DDP, where Lightning takes a plain BatchSampler apart.
            trainer(callbacks=[callback], max_steps=1, strategy="auto").fit(model, train_loaders)
        return callback.effective_batch, said

    data = TensorDataset(torch.randn(8, 2))
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 4, drop_last=False)
    assert measure(DataLoader(data, batch_size=4), ScaleLearningRate())[0].total == 4
    assert measure(DataLoader(data, batch_sampler=sampler), ScaleLearningRate())[0].total == 4
    assert measure(DataLoader(Stream(), batch_size=2), ScaleLearningRate())[0].total == 2
    assert measure({"one": DataLoader(data, batch_size=4)}, ScaleLearningRate())[0].total == 4
    several = {"one": DataLoader(data, batch_size=4), "two": DataLoader(data, batch_size=2)}
    whole = DataLoader(data, batch_size=None)
    for unclear in (several, whole):
        found, said = measure(unclear, ScaleLearningRate())
        assert found is None
        assert "unknown" in said[0]
        assert measure(unclear, ScaleLearningRate(batch_size=6))[0].total == 6
        with pytest.raises(ValueError, match="a train loader with a batch_size"):
            measure(unclear, ScaleLearningRate(3))


@ranks(2, init=False)
def test_unequal_batch_sizes_are_refused_on_all_ranks():
    with pytest.raises(ValueError, match=r"the same batch size on all ranks.*between 1 and 2"):
        fit(ScaleLearningRate(1), batch_size=1 + int(os.environ["RANK"]))


@ranks(2, init=False)
def test_loaders_are_not_built_early():
    """Reading the Trainer's number of steps builds the loaders; before on_train_start that is too early."""

    class Late(Model):
        def train_dataloader(self):
            self.events.append("loader")
            return loader()

        def on_fit_start(self):
            self.events.append("fit start")

    model = Late()
    trainer(callbacks=[ScaleLearningRate(1, schedule="cosine", warmup_steps=1)]).fit(model)
    assert model.events == ["fit start", "loader"]


@ranks(1, init=False)
def test_loggers_and_the_learning_rate_monitor_see_it(tmp_path):
    logger = CSVLogger(tmp_path)
    fit(
        ScaleLearningRate(1, warmup_steps=2),
        callbacks=[LearningRateMonitor(logging_interval="step")],
        logger=logger,
        log_every_n_steps=1,
    )
    with open(logger.experiment.metrics_file_path) as file:
        rows = list(csv.DictReader(file))
    values = {name: [float(row[name]) for row in rows if row.get(name)] for name in rows[0]}
    assert values["ddp/effective_batch_size"] == [4]
    assert values["ddp/lr_scale_ratio"] == [4]
    assert values["lr-SGD/pg1"][0] == 0
    assert values["lr-SGD/pg1"][-1] == pytest.approx(0.4)
    assert values["lr-SGD/pg2"][-1] == pytest.approx(0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"rule": "cubic"},
        {"schedule": "triangle"},
        {"warmup_from": "nowhere"},
        {"base_batch_size": 0},
        {"warmup_steps": -1},
        {"batch_size": 0},
        {"schedule": "cosine", "total_steps": 5, "warmup_steps": 5},
        {"schedule": "cosine", "total_steps": 5, "final_ratio": 2},
        {"total_steps": 5},
        {"schedule": "constant", "final_ratio": 0.1},
        {"rule": "sqrt"},
        {"base_batch_size": 4, "scale_adam_hyperparameters": True},
        {"base_batch_size": 4, "warmup_from": "base"},
        {"warmup_steps": 4, "warmup_from": "base"},
    ],
    ids=str,
)
def test_arguments_without_sense_or_effect_are_refused(settings):
    with pytest.raises(ValueError):
        ScaleLearningRate(**settings)


def test_the_command_line_reads_the_constructor():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ScaleLearningRate, "callback")
    arguments = parser.parse_args(["--callback.base_batch_size=256", "--callback.schedule=cosine"])
    assert arguments.callback.base_batch_size == 256
    assert arguments.callback.schedule == "cosine"
    assert ScaleLearningRate(**arguments.callback.as_dict()).base_batch_size == 256
