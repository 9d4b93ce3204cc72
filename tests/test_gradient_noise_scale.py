"""GradientNoiseScale: the numbers of every step against per-sample gradients in one process, and the corners."""

import math
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ddp_plugin.callbacks.gradient_noise_scale as shell
from ddp_plugin import CustomDDPStrategy, GradientNoiseScale
from tests.harness import ranks, trainer

CENTRE = torch.tensor([1.0, -0.5, 0.25], dtype=torch.float64)
DEVIATIONS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
TRUE_NOISE_SCALE = float(DEVIATIONS.square().sum() / CENTRE.square().sum())


def make_samples(num_samples: int, seed: int = 0) -> Tensor:
    noise = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DEVIATIONS * noise - CENTRE


class Quadratic(pl.LightningModule):
    """The gradient of one sample is ``theta - x``; theta stays at zero."""

    def __init__(self, deviation: float = 1.0, lr: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(3, dtype=dtype))
        self.factor, self.lr = 1.0, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.factor * 0.5 * (self.theta - batch[0]).square().sum(1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Blocks:
    """Hands out given numbers of samples per batch, this rank's of each global batch, in order."""

    def __init__(self, sizes: list[list[int]]) -> None:
        self.sizes = sizes  # of each step, for each rank

    def __iter__(self) -> Any:
        rank, first = int(os.environ["RANK"]), 0
        for sizes in self.sizes:
            begin = first + sum(sizes[:rank])
            yield list(range(begin, begin + sizes[rank]))
            first += sum(sizes)

    def __len__(self) -> int:
        return len(self.sizes)


def fit(
    sizes: list[list[int]], module: pl.LightningModule | None = None, samples: Tensor | None = None, **settings: Any
) -> tuple[GradientNoiseScale, pl.Trainer]:
    samples = make_samples(sum(map(sum, sizes))) if samples is None else samples
    callback = settings.pop("callback", None) or GradientNoiseScale(every_n_steps=7)
    callbacks = [callback, *settings.pop("callbacks", [])]
    run = trainer(callbacks=callbacks, use_distributed_sampler=False, **settings)
    loader = DataLoader(TensorDataset(samples), batch_sampler=Blocks(sizes))  # type: ignore[arg-type]
    run.fit(module or Quadratic(), loader)
    return callback, run


def expected_steps(sizes: list[list[int]], accumulate: int = 1) -> list[tuple[float, float]]:
    """Each step's estimates from per-sample gradients: between-rank variance, and the mean's square without it."""
    samples, found, first = -make_samples(sum(map(sum, sizes))), [], 0
    for begin in range(0, len(sizes), accumulate):
        parts: list[list[Tensor]] = [[] for _ in sizes[0]]
        for micro in sizes[begin : begin + accumulate]:
            for rank, size in enumerate(micro):
                parts[rank].append(samples[first : first + size])
                first += size
        local = torch.stack([torch.cat(part).mean(0) for part in parts])
        num_own = sum(len(tensor) for tensor in parts[0])
        variance = local.var(0, unbiased=True).sum()  # of a rank's mean
        found.append((float(variance * num_own), float(local.mean(0).square().sum() - variance / len(parts))))
    return found


def found_steps(callback: GradientNoiseScale) -> list[tuple[float, float]]:
    return [tuple(pair) for pair in callback.state_dict()["steps"].tolist()]


def assert_close(
    found: list[tuple[float, float]], expected: list[tuple[float, float]], tolerance: float = 1e-12
) -> None:
    assert len(found) == len(expected) > 0
    assert torch.allclose(
        torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance
    )


# --------------------------------------------------------------------------------------------------------- the numbers


@ranks(2, 3, 4, init=False)
def test_each_step_equals_one_process_on_per_sample_gradients(world_size: int) -> None:
    sizes = [[3] * world_size] * 40
    callback, _ = fit(sizes)
    assert_close(found_steps(callback), expected_steps(sizes))
    assert callback.num_skipped_steps == 0


@ranks(2, 4, init=False)
def test_the_true_value_lies_within_the_stated_error(world_size: int) -> None:
    for seed in range(3):
        sizes = [[4] * world_size] * 200
        callback, run = fit(sizes, samples=make_samples(4 * world_size * 200, seed))
        estimate = callback.estimate
        assert estimate is not None
        assert estimate.noise_scale is not None
        assert estimate.standard_error is not None
        assert abs(estimate.noise_scale - TRUE_NOISE_SCALE) < 3 * estimate.standard_error
        assert estimate.standard_error < 0.5 * TRUE_NOISE_SCALE
        parts: list[Any] = [None] * world_size
        dist.all_gather_object(parts, estimate)
        assert all(part == estimate for part in parts)


@ranks(2, init=False)
@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_gradients_count_all_their_samples(accumulate: int) -> None:
    sizes = [[2, 2]] * 24
    callback, _ = fit(sizes, accumulate_grad_batches=accumulate)
    assert_close(found_steps(callback), expected_steps(sizes, accumulate))


@ranks(2, init=False)
def test_a_short_last_window_keeps_the_ratio() -> None:
    """Lightning divides by the full window, so both estimates shrink by the same factor."""
    sizes = [[2, 2]] * 5
    callback, _ = fit(sizes, accumulate_grad_batches=3)
    (full, last), expected = found_steps(callback), expected_steps(sizes, 3)
    assert_close([full], expected[:1])
    assert_close([last], [tuple(value * (2 / 3) ** 2 for value in expected[1])])  # type: ignore[misc]


@ranks(2, init=False)
def test_steps_with_unequal_sizes_are_left_out() -> None:
    sizes = [[3, 3], [3, 2], [3, 3], [1, 3], [2, 2]]
    callback, run = fit(sizes)
    expected = expected_steps(sizes)
    assert_close(found_steps(callback), [expected[0], expected[2], expected[4]])
    assert callback.num_skipped_steps == 2


@ranks(2, init=False)
def test_windows_with_unequal_micro_batches_are_left_out() -> None:
    sizes = [[3, 3], [3, 3], [3, 3], [2, 2]]
    callback, _ = fit(sizes, accumulate_grad_batches=2)
    assert_close(found_steps(callback), expected_steps(sizes, 2)[:1])
    assert callback.num_skipped_steps == 1


@ranks(2, init=False)
def test_a_static_graphs_first_window_is_left_out() -> None:
    sizes = [[2, 2]] * 9
    callback, _ = fit(sizes, strategy=CustomDDPStrategy(static_graph=True), accumulate_grad_batches=3)
    assert_close(found_steps(callback), expected_steps(sizes, 3)[1:])
    assert callback.num_skipped_steps == 1


class TwoParts(Quadratic):
    """The same gradient, twice: in one small and one large parameter, in buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.padding = nn.Parameter(torch.zeros(1_000, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wide = nn.functional.pad(batch[0], (0, 997))
        return super().training_step(batch, batch_idx) + 0.5 * ((self.padding - wide)[:, :3]).square().sum(1).mean()


@ranks(2, init=False)
@pytest.mark.parametrize("settings", [{"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}])
def test_the_norms_of_several_buckets_add_up(settings: dict[str, Any]) -> None:
    sizes = [[3, 3]] * 10
    callback, _ = fit(sizes, TwoParts(), strategy=CustomDDPStrategy(**settings))
    assert_close(found_steps(callback), [(2 * trace, 2 * signal) for trace, signal in expected_steps(sizes)])


# ------------------------------------------------------------------------------------------------------ mixed precision


class CpuScaler(torch.amp.GradScaler):
    """A scaler on the CPU that doubles its factor at every step."""

    def __init__(self) -> None:
        super().__init__(device="cpu", init_scale=4.0, growth_interval=1)


@ranks(2, init=False)
def test_a_gradient_scalers_factor_is_taken_out() -> None:
    sizes = [[3, 3]] * 12
    precision = MixedPrecision("16-mixed", "cpu", CpuScaler())
    module = Quadratic(dtype=torch.float32)
    samples = make_samples(72).float()
    callback, _ = fit(sizes, module, samples, plugins=[precision])
    assert precision.scaler is not None
    assert precision.scaler.get_scale() == 4.0 * 2**12
    assert_close(found_steps(callback), expected_steps(sizes), tolerance=1e-4)


class Overflows(Quadratic):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        factor = math.inf if batch_idx == 3 and self.global_rank == 1 else 1.0
        return factor * super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.zero_grad()  # so that the parameters stay finite


@ranks(2, init=False)
def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    sizes = [[3, 3]] * 12
    callback, _ = fit(sizes, Overflows())
    expected = expected_steps(sizes)
    assert_close(found_steps(callback), expected[:3] + expected[4:])
    assert callback.num_skipped_steps == 1


# --------------------------------------------------------------------------------------------------- what is said of it


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    sentences: list[str] = []
    monkeypatch.setattr(shell, "rank_zero_info", sentences.append)
    return sentences


@ranks(2, init=False)
def test_the_sentence_and_the_logged_values() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sentences = said(monkeypatch)
        callback, run = fit([[4, 4]] * 101, callback=GradientNoiseScale(every_n_steps=25))
    assert callback.estimate is not None
    assert callback.estimate.num_steps == 101
    assert f"{callback.estimate.noise_scale:.4g} +- {callback.estimate.standard_error:.2g} samples" in sentences[0]
    assert "(101 steps of 8 samples)" in sentences[0]
    logged = {name: value.item() for name, value in run.callback_metrics.items()}
    assert set(logged) == {"ddp/gradient_noise_scale", "ddp/gradient_noise_scale_standard_error"}
    assert abs(logged["ddp/gradient_noise_scale"] - TRUE_NOISE_SCALE) < (
        3 * logged["ddp/gradient_noise_scale_standard_error"]
    )


@ranks(2, init=False)
def test_without_a_gradient_nothing_is_logged_and_the_sentence_says_so() -> None:
    noise = torch.randn(800, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        sentences = said(monkeypatch)
        callback, run = fit([[4, 4]] * 100, samples=noise)
    assert callback.estimate is not None
    assert callback.estimate.num_steps == 100
    assert callback.estimate.noise_scale is None
    assert run.callback_metrics == {}
    assert "not resolved" in sentences[0]


@ranks(2, init=False)
def test_without_noise_the_scale_is_zero() -> None:
    callback, _ = fit([[4, 4]] * 30, samples=torch.ones(240, 3, dtype=torch.float64))
    assert callback.estimate is not None
    assert callback.estimate.noise_scale == 0.0
    assert callback.estimate.standard_error == 0.0


@ranks(2, init=False)
def test_left_out_steps_and_a_lossy_hook_are_named() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sentences = said(monkeypatch)
        fit([[4, 4]] * 30 + [[2, 4]], strategy=CustomDDPStrategy(comm_hook="bf16"))
        fit([[4, 2]])
    assert "1 steps were left out" in sentences[0]
    assert "comm_hook='bf16'" in sentences[0]
    assert "no step could be used" in sentences[1]


@ranks(2, init=False)
def test_only_the_window_is_averaged_and_a_checkpoint_keeps_it() -> None:
    sizes = [[3, 3]] * 40
    first, run = fit(sizes, callback=GradientNoiseScale(every_n_steps=9, window_steps=20))
    expected = expected_steps(sizes)[-20:]
    assert_close(found_steps(first), expected)
    second = GradientNoiseScale(window_steps=30)
    second.load_state_dict(first.state_dict())
    assert found_steps(second) == found_steps(first)
    run.fit_loop.epoch_progress.reset()
    run.fit_loop.epoch_loop.batch_progress.reset()
    run.fit(Quadratic(), DataLoader(TensorDataset(make_samples(240)), batch_sampler=Blocks(sizes)))  # type: ignore[arg-type]
    assert_close(found_steps(first), expected)  # a second fit begins anew


class Resumes(pl.Callback):
    """Stands for a checkpoint: states are restored after setup."""

    def __init__(self, callback: GradientNoiseScale, state: dict[str, Any]) -> None:
        self.callback, self.state = callback, state

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.callback.load_state_dict(self.state)


@ranks(2, init=False)
def test_a_resumed_run_goes_on_with_the_window() -> None:
    sizes = [[3, 3]] * 15
    state = fit(sizes)[0].state_dict()
    callback = GradientNoiseScale()
    fit(sizes, callback=callback, callbacks=[Resumes(callback, state)])
    assert_close(found_steps(callback), 2 * expected_steps(sizes))


# ------------------------------------------------------------------------------------------------------ where it cannot


@ranks(1, init=False)
@pytest.mark.parametrize("strategy", ["auto", "ddp_plugin"])
def test_one_process_has_nothing_to_compare_and_says_so_once(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sentences = said(monkeypatch)
        callback, run = fit([[4]] * 30, strategy=strategy)
    assert callback.estimate is None
    assert len(sentences) == 1
    assert "nothing to estimate on one process" in sentences[0]
    assert run.callback_metrics == {}


class Manual(Quadratic):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@ranks(2, init=False)
def test_manual_optimization_is_refused() -> None:
    with pytest.raises(ValueError, match="automatic optimization"):
        fit([[4, 4]], Manual())


@ranks(2, init=False)
def test_another_strategy_is_refused() -> None:
    with pytest.raises(TypeError, match="CustomDDPStrategy"):
        fit([[4, 4]], strategy=DDPStrategy())


class NoTensors:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, index: int) -> Tensor:
        return self.x


def wrap(items: list[tuple[Tensor]]) -> NoTensors:
    return NoTensors(torch.stack([item[0] for item in items]))


@ranks(2, init=False)
def test_a_batch_that_does_not_tell_its_size() -> None:
    samples, sizes = make_samples(6 * 10), [[3, 3]] * 10
    loader: Any = DataLoader(TensorDataset(samples), batch_sampler=Blocks(sizes), collate_fn=wrap)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size="):
        trainer(callbacks=[GradientNoiseScale()], use_distributed_sampler=False).fit(Quadratic(), loader)
    callback = GradientNoiseScale(batch_size=3)
    trainer(callbacks=[callback], use_distributed_sampler=False).fit(Quadratic(), loader)
    assert_close(found_steps(callback), expected_steps(sizes))


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_steps": 0},
        {"every_n_steps": 1.5},
        {"window_steps": 19},
        {"batch_size": 0},
        {"batch_size": True},
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        GradientNoiseScale(**settings)
