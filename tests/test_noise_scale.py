"""The estimator of the noise scale, on gradients whose mean and covariance are known."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddp_plugin.noise_scale import (
    MIN_STEPS,
    NoiseScale,
    describe,
    estimate_noise_scale,
    squared_norm,
    steps_ratio,
    unbiased_estimates,
)

DEVIATIONS = torch.linspace(0.5, 1.5, 10, dtype=torch.float64)  # of the ten elements of one sample's gradient
NUM_SEEDS = 200


def true_noise_scale(mean: float) -> float:
    return float(DEVIATIONS.square().sum()) / (DEVIATIONS.numel() * mean**2)


def norms(seed: int, world_size: int, rank_batch_size: int, num_steps: int, mean: float) -> tuple[Tensor, Tensor]:
    """Squared norms of the ranks' gradients (averaged) and of the mean gradient, from samples drawn one by one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_steps, world_size, rank_batch_size, DEVIATIONS.numel())
    samples = mean + DEVIATIONS * torch.randn(shape, generator=generator, dtype=torch.float64)
    local = samples.mean(2)
    return local.square().sum(2).mean(1), local.mean(1).square().sum(1)


def ours(local: Tensor, mean: Tensor, rank_batch_size: float, world_size: int) -> NoiseScale:
    sizes = torch.full_like(local, rank_batch_size)
    return estimate_noise_scale(*unbiased_estimates(local, mean, sizes, world_size))


def average_of_ratios(local: Tensor, mean: Tensor, rank_batch_size: float, world_size: int) -> NoiseScale:
    traces, signals = unbiased_estimates(local, mean, torch.full_like(local, rank_batch_size), world_size)
    ratios = traces / signals
    error = float(ratios.std()) / math.sqrt(len(ratios))
    return NoiseScale(0, 0, 0, float(ratios.mean()), error, len(ratios))


def sizes_swapped(local: Tensor, mean: Tensor, rank_batch_size: float, world_size: int) -> NoiseScale:
    return ours(local, mean, rank_batch_size * world_size, world_size)


def norms_swapped(local: Tensor, mean: Tensor, rank_batch_size: float, world_size: int) -> NoiseScale:
    return ours(mean, local, rank_batch_size, world_size)


def coverage(estimator: Callable[..., NoiseScale], world_size: int, mean: float, num_steps: int = 400) -> float:
    """Part of the seeds in which the true value lies within two of the estimate's own standard errors."""
    num_covered = 0
    for seed in range(NUM_SEEDS):
        found = estimator(*norms(seed, world_size, 4, num_steps, mean), 4.0, world_size)
        if found.noise_scale is not None and found.standard_error is not None:
            num_covered += abs(found.noise_scale - true_noise_scale(mean)) <= 2 * found.standard_error
    return num_covered / NUM_SEEDS


@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 400), (4, 400), (2, 110)])
def test_the_true_value_lies_within_two_standard_errors(world_size: int, num_steps: int) -> None:
    assert coverage(ours, world_size, mean=0.8, num_steps=num_steps) >= 0.9


@pytest.mark.parametrize("wrong", [average_of_ratios, sizes_swapped, norms_swapped])
def test_that_check_refuses_a_wrong_estimator(wrong: Callable[..., NoiseScale]) -> None:
    assert coverage(wrong, 2, mean=0.8) < 0.5


def test_the_stated_error_is_no_larger_than_it_has_to_be() -> None:
    """It is the spread that the estimates of many runs really have."""
    found = [ours(*norms(seed, 2, 4, 400, 0.4), 4.0, 2) for seed in range(NUM_SEEDS)]
    spread = torch.tensor([estimate.noise_scale for estimate in found], dtype=torch.float64).std()
    stated = torch.tensor([estimate.standard_error for estimate in found], dtype=torch.float64).mean()
    assert 0.85 < stated / spread < 1.15


@pytest.mark.parametrize("mean", [0.05, 0.1, 0.12, 0.14, 0.17])
def test_a_signal_that_is_hard_to_see_gives_few_wrong_claims(mean: float) -> None:
    num_wrong = 0
    for seed in range(NUM_SEEDS):
        found = ours(*norms(seed, 2, 4, 400, mean), 4.0, 2)
        if found.noise_scale is not None and found.standard_error is not None:
            num_wrong += abs(found.noise_scale - true_noise_scale(mean)) > 2 * found.standard_error
    assert num_wrong <= NUM_SEEDS * 0.1


def test_related_steps_are_covered_too() -> None:
    """Each step's norms are reported ten times; steps that count as independent would give a third of the error."""
    num_covered = num_naive = 0
    for seed in range(NUM_SEEDS):
        local, mean = (values.repeat_interleave(10) for values in norms(seed, 2, 4, 200, 0.4))
        found = ours(local, mean, 4.0, 2)
        assert found.noise_scale is not None
        assert found.standard_error is not None
        difference = abs(found.noise_scale - true_noise_scale(0.4))
        num_covered += difference <= 2 * found.standard_error
        num_naive += difference <= 2 * found.standard_error / math.sqrt(10)
    assert num_covered >= 0.9 * NUM_SEEDS > num_naive


def test_both_estimates_are_without_bias() -> None:
    local, mean = norms(0, 3, 2, 40_000, 0.3)
    traces, signals = unbiased_estimates(local, mean, torch.full_like(local, 2.0), 3)
    for values, expected in ((traces, DEVIATIONS.square().sum()), (signals, torch.tensor(10 * 0.3**2))):
        assert abs(values.mean() - expected) < 3 * values.std() / math.sqrt(len(values))


def test_steps_of_different_sizes_can_be_averaged() -> None:
    parts = [(*norms(size, 2, size, 400, 0.4), torch.full((400,), float(size))) for size in (2, 8)]
    local, mean, sizes = (torch.cat(values) for values in zip(*parts, strict=True))
    found = estimate_noise_scale(*unbiased_estimates(local, mean, sizes, 2))
    assert found.noise_scale is not None
    assert found.standard_error is not None
    assert abs(found.noise_scale - true_noise_scale(0.4)) < 3 * found.standard_error


def test_without_noise_it_is_zero() -> None:
    ones = torch.ones(100, dtype=torch.float64)
    found = ours(ones, ones, 4.0, 2)
    assert (found.noise_scale, found.standard_error, found.signal) == (0.0, 0.0, 1.0)
    assert "far above it" in describe(found, 8)


def test_without_a_gradient_it_is_not_resolved_and_says_so() -> None:
    num_negative = 0
    for seed in range(NUM_SEEDS):
        found = ours(*norms(seed, 2, 4, 400, 0.0), 4.0, 2)
        num_negative += found.signal < 0
        if found.noise_scale is not None:
            assert found.noise_scale > 0
        else:
            assert "not resolved" in describe(found, 8)
            assert found.standard_error is None
    assert NUM_SEEDS / 3 < num_negative < NUM_SEEDS  # so the case is there


def test_an_unresolved_one_gives_a_bound_that_holds() -> None:
    found = [ours(*norms(seed, 2, 4, 400, 0.07), 4.0, 2) for seed in range(NUM_SEEDS)]
    unresolved = [estimate for estimate in found if estimate.noise_scale is None]
    bounds = [estimate.trace / (estimate.signal + 2 * estimate.signal_error) for estimate in unresolved]
    assert len(unresolved) > NUM_SEEDS / 2
    assert sum(not 0 < bound <= true_noise_scale(0.07) for bound in bounds) <= 0.1 * len(bounds)
    for bound, estimate in zip(bounds, unresolved, strict=True):
        assert (f"probably above {bound:.3g} samples" in describe(estimate, 8)) == (bound > 0)


def test_nothing_at_all_and_too_few_steps() -> None:
    assert estimate_noise_scale(torch.empty(0), torch.empty(0)).noise_scale is None
    assert ours(*norms(0, 2, 4, MIN_STEPS - 1, 2.0), 4.0, 2).noise_scale is None
    few = ours(*norms(0, 2, 4, MIN_STEPS - 1, 2.0), 4.0, 2)
    assert f"it takes {MIN_STEPS}" in describe(few, 8)
    assert ours(*norms(0, 2, 4, MIN_STEPS, 2.0), 4.0, 2).noise_scale is not None


def test_one_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 ranks"):
        unbiased_estimates(torch.ones(1), torch.ones(1), torch.ones(1), 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_elements", [0, 1, 4096, 3_000_001])
def test_squared_norms_are_exact_enough_to_subtract(dtype: torch.dtype, num_elements: int) -> None:
    gradient = torch.randn(num_elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, exact = squared_norm(gradient), gradient.double().square().sum()
    assert found.dtype == torch.float64
    assert abs(found - exact) <= 1e-6 * exact


def test_one_long_float32_sum_would_not_be() -> None:
    gradient = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().square().sum()
    assert abs(torch.linalg.vector_norm(gradient).double().square() - exact) > 1e-5 * exact


def test_what_a_larger_batch_saves() -> None:
    assert steps_ratio(0.0, 8, 2) == 1.0
    assert steps_ratio(8.0, 8, 2) == pytest.approx(1.5 / 2)
    assert steps_ratio(1e12, 8, 2) == pytest.approx(0.5)


@pytest.mark.parametrize(("batch_size", "words"), [(8, "far below it"), (64, "near it"), (4096, "far above it")])
def test_the_sentence_depends_on_the_batch(batch_size: int, words: str) -> None:
    sentence = describe(NoiseScale(64.0, 1.0, 0.01, 64.0, 3.0, 100), batch_size)
    assert words in sentence
    assert "64 +- 3 samples (100 steps" in sentence
    assert f"{batch_size / 64:.3g} of the noise scale" in sentence
    assert f"{1 - steps_ratio(64.0, batch_size, 2):.0%} fewer steps" in sentence
