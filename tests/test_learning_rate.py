"""Rules, curves and the objects that carry them, against golden values and torch's own unscaled curves."""

import math

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

from ddp_plugin.learning_rate import (
    EffectiveBatch,
    RateSchedule,
    check_scheduler,
    num_accumulated_for,
    scale_adam,
    scale_optimizer,
    scale_ratio,
    scale_scheduler,
)


@pytest.mark.parametrize(("factors", "total"), [((4, 8, 8), 256), ((4, 8), 32), ((4,), 4), ((1, 1, 1), 1)])
def test_effective_batch(factors, total):
    assert EffectiveBatch(*factors).total == total


def test_effective_batch_is_said_in_one_line():
    assert str(EffectiveBatch(8, 4, 8)) == "8 per process x 4 processes x 8 accumulation = 256"


@pytest.mark.parametrize(("factors", "error"), [((0, 1, 1), ValueError), ((1, 2, -1), ValueError), ((1.5,), TypeError)])
def test_effective_batch_refuses_what_is_no_count(factors, error):
    with pytest.raises(error):
        EffectiveBatch(*factors)


def test_the_missing_factor():
    assert num_accumulated_for(256, 4, 8) == 8
    assert num_accumulated_for(32, 4, 8) == 1
    with pytest.raises(ValueError, match="Choose 224 or 256"):
        num_accumulated_for(250, 4, 8)
    with pytest.raises(ValueError, match=r"Choose 32\."):
        num_accumulated_for(16, 4, 8)


@pytest.mark.parametrize(
    ("rule", "batch_ratio", "wanted"),
    [("linear", 8, 8), ("linear", 0.5, 0.5), ("sqrt", 16, 4), ("sqrt", 0.25, 0.5), ("none", 8, 1), ("sqrt", 1, 1)],
)
def test_rules(rule, batch_ratio, wanted):
    assert scale_ratio(rule, batch_ratio) == wanted


def test_rules_refuse_nonsense():
    with pytest.raises(ValueError, match="rule to be one of"):
        scale_ratio("quadratic", 2)
    for ratio in (0, -1, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            scale_ratio("linear", ratio)


def test_adam_rule():
    """By hand for k = 4: 1 - 4 x 0.1, 1 - 4 x 0.001, 1e-8 / 2."""
    betas, eps = scale_adam((0.9, 0.999), 1e-8, 4)
    assert betas == pytest.approx((0.6, 0.996), abs=1e-15)
    assert eps == 5e-9
    betas, _ = scale_adam((0.9, 0.999), 1e-8, 0.5)
    assert betas == pytest.approx((0.95, 0.9995), abs=1e-15)


@pytest.mark.parametrize("batch_ratio", [10.001, 100])
def test_adam_rule_refuses_a_beta_below_zero(batch_ratio):
    with pytest.raises(ValueError, match="Keep the ratio below 10"):
        scale_adam((0.9, 0.999), 1e-8, batch_ratio)


def test_gradient_noise_falls_with_the_batch_as_the_rules_assume():
    """The variance of a mean over k times more samples is 1/k of it: the reason for both rules."""
    samples = torch.randn(4096, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k in (4, 16):
        variance = samples[:, :k].mean(1).var()
        assert variance == pytest.approx(1 / k, rel=5 / math.sqrt(4096 / 2))


@pytest.mark.parametrize(
    ("curve", "golden"),
    [
        (RateSchedule("cosine", 10, 110), {0: 0, 5: 0.5, 9: 0.9, 10: 1, 60: 0.5, 110: 0, 111: 0, 10**6: 0}),
        (RateSchedule("cosine", 10, 110, final_ratio=0.1), {10: 1, 60: 0.55, 110: 0.1, 500: 0.1}),
        (RateSchedule("cosine", 10, 110), {35: 0.5 + math.sqrt(0.5) / 2, 85: 0.5 - math.sqrt(0.5) / 2}),
        (RateSchedule("cosine", 0, 4), {0: 1, 1: 0.5 + math.sqrt(0.5) / 2, 2: 0.5, 4: 0}),
        (RateSchedule("constant", 10), {0: 0, 5: 0.5, 10: 1, 11: 1, 10**6: 1}),
        (RateSchedule("constant", 8, start_ratio=0.25), {0: 0.25, 4: 0.625, 8: 1}),
        (RateSchedule(), {0: 1, 100: 1}),
    ],
    ids=str,
)
def test_curves_have_their_golden_values(curve, golden):
    for step, wanted in golden.items():
        assert curve(step) == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "triangle"},
        {"schedule": "cosine"},
        {"schedule": "cosine", "warmup_steps": 5, "total_steps": 5},
        {"warmup_steps": -1},
        {"schedule": "cosine", "total_steps": 5, "final_ratio": 1.5},
        {"start_ratio": -0.1},
    ],
    ids=str,
)
def test_curves_refuse_nonsense(settings):
    with pytest.raises(ValueError):
        RateSchedule(**settings)


def test_a_curve_survives_the_state_of_its_scheduler():
    optimizer = two_groups()
    source = lr_scheduler.LambdaLR(optimizer, [RateSchedule("cosine", 2, 9)] * 2)
    target = lr_scheduler.LambdaLR(two_groups(), [RateSchedule(), RateSchedule()])
    target.load_state_dict(source.state_dict())
    assert [target.lr_lambdas[1](step) for step in range(12)] == [source.lr_lambdas[1](step) for step in range(12)]


# ---------------------------------------------------------------------------------------------------- torch's objects


def two_groups(cls=SGD, **settings):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.02}]
    return cls(groups, **settings)


def test_groups_keep_their_proportions():
    optimizer = two_groups()
    scale_optimizer(optimizer, 3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.3, 0.06])


def test_tensor_rates_stay_the_same_tensors_and_are_scaled_once():
    rate = torch.tensor(0.1)
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate})
    before = [group["lr"] for group in optimizer.param_groups]
    scale_optimizer(optimizer, 2.0)
    for group, tensor in zip(optimizer.param_groups, before, strict=True):
        assert group["lr"] is tensor
        torch.testing.assert_close(tensor, torch.tensor(0.2))


def test_an_optimizer_without_rates_is_refused():
    optimizer = two_groups()
    del optimizer.param_groups[1]["lr"]
    with pytest.raises(ValueError, match="a group without 'lr'"):
        scale_optimizer(optimizer, 2)
    assert optimizer.param_groups[0]["lr"] == 0.1


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.3),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.3, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.005),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, eta_min=0.004),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.5, 0.2], total_steps=14),
    "OneCycleLR_three_phase": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=14, three_phase=True),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=3, mode="triangular2"),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.3, patience=0, min_lr=[0.003, 0.001]),
    "ReduceLROnPlateau_eps": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, eps=0.008),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.002)],
        milestones=[3],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
}


def rates_over(optimizer, scheduler, num_steps=12):
    rates = []
    for _ in range(num_steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        told = scheduler.get_last_lr()
        assert told == pytest.approx(rates[-1], rel=1e-12)
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return torch.tensor(rates, dtype=torch.float64)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_curve_of_a_scheduler_is_scaled_as_a_whole(name):
    plain, scaled = two_groups(momentum=0.9), two_groups(momentum=0.9)
    plain_scheduler, scheduler = SCHEDULERS[name](plain), SCHEDULERS[name](scaled)
    scale_optimizer(scaled, 2.5)
    scale_scheduler(scheduler, 2.5)
    wanted = rates_over(plain, plain_scheduler)
    assert (wanted.diff(dim=0) != 0).any()
    torch.testing.assert_close(rates_over(scaled, scheduler), 2.5 * wanted, rtol=1e-12, atol=0)


def test_every_scheduler_of_torch_is_known_or_refused():
    """A new scheduler class in torch is refused until somebody says what its rates are called."""
    known = {type(make(two_groups(momentum=0.9))) for make in SCHEDULERS.values()}
    public = {getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
    assert public - known == {lr_scheduler.LRScheduler}


class Custom(lr_scheduler.LRScheduler):
    def get_lr(self):
        return [0.1 for _ in self.optimizer.param_groups]


def test_an_unknown_scheduler_is_refused_also_inside_another():
    optimizer = two_groups()
    inner = Custom(optimizer)
    outer = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer), inner], milestones=[2])
    for scheduler in (inner, outer):
        with pytest.raises(ValueError, match="Custom"):
            check_scheduler(scheduler)
        with pytest.raises(ValueError, match="Custom"):
            scale_scheduler(scheduler, 2)
