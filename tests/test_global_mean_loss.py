"""GlobalMeanLoss: every step's gradient against the mean over all units in one process, in float64."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.utils.data import DataLoader, Dataset

from ddp_plugin import CustomDDPStrategy, GlobalMeanLoss, log_weight, normalize_gradients
from ddp_plugin.callbacks import global_mean_loss
from ddp_plugin.hooks import HOOKS, Contents
from tests.harness import ranks, run_ranks, trainer

WIDTH = 4
REDUCING = sorted(name for name in HOOKS if HOOKS[name]().synchronises == "gradients" and not HOOKS[name]().refusal)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_batch(step: int, of_rank: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Between 1 and 7 samples; what they are depends on the step and the rank alone."""
    generator = torch.Generator().manual_seed(1000 * step + of_rank)
    num_samples = int(torch.randint(1, 8, (), generator=generator))
    x = torch.randn(num_samples, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :2]) + of_rank
    return x.to(dtype), y.to(dtype)


class Batches(Dataset[Any]):
    """Ready batches; the loader hands them out one by one."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


def loader(batches: list[Any]) -> DataLoader[Any]:
    return DataLoader(Batches(batches), batch_size=None, collate_fn=lambda batch: batch)


def fit(module: pl.LightningModule, batches: list[Any], **settings: Any) -> pl.Trainer:
    settings.setdefault("callbacks", [GlobalMeanLoss()])
    run = trainer(use_distributed_sampler=False, **settings)
    run.fit(module, loader(batches))
    return run  # type: ignore[no-any-return]


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.seen: list[Tensor] = []  # the gradient of each optimizer step, before clipping

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(flat_gradient(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


def flat_gradient(module: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return torch.cat([gradient.to_dense().reshape(-1) for gradient in gradients]).clone()


def one_process(
    num_ranks: int,
    num_steps: int,
    accumulate: int | tuple[int, ...] = 1,
    epochs: int = 1,
    clip: dict[str, Any] | None = None,
) -> Tensor:
    """Plain torch: each optimizer step takes all samples of its window as one batch; windows may differ by epoch."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for size in accumulate if isinstance(accumulate, tuple) else [accumulate] * epochs:
        for first in range(0, num_steps, size):
            window = range(first, min(first + size, num_steps))
            parts = [make_batch(step, of_rank) for step in window for of_rank in range(num_ranks)]
            x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            if clip and clip.get("gradient_clip_algorithm") == "value":
                nn.utils.clip_grad_value_(net.parameters(), clip["gradient_clip_val"])
            elif clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip["gradient_clip_val"])
            optimizer.step()
    return flat(net)


NUM_STEPS = 6  # with 4 accumulated: a window of 4 and a short one of 2
CLIPS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.4},
    {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
]


def my_batches() -> list[Any]:
    return [make_batch(step, rank()) for step in range(NUM_STEPS)]


# --------------------------------------------------------------------------------------------------------- the numbers


TEN, ONES = torch.full((1,), 10.0, dtype=torch.float64), torch.ones(9, dtype=torch.float64)


class Tokens(pl.LightningModule):
    """One weight, times the mean of the batch's values: the gradient is that mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight * batch.mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.weight.grad is not None
        self.seen.append(self.weight.grad.item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@ranks(2, init=False)
@pytest.mark.parametrize(("active", "expected"), [(True, 1.9), (False, 5.5)])
def test_ten_tokens_on_two_ranks(active: bool, expected: float) -> None:
    module = Tokens()
    fit(module, [TEN if rank() == 0 else ONES], callbacks=[GlobalMeanLoss()] if active else [])
    assert module.seen == [pytest.approx(expected, abs=1e-12)]


@ranks(1, 2, init=False)
@pytest.mark.parametrize(("num_batches", "without"), [(6, [1.0, 0.5]), (2, [0.5])])
def test_a_short_last_window_counts_fully(num_batches: int, without: list[float]) -> None:
    for callbacks, expected in (([GlobalMeanLoss()], [1.0] * len(without)), ([], without)):
        module = Tokens()
        batches = [torch.ones(3, dtype=torch.float64)] * num_batches
        fit(module, batches, accumulate_grad_batches=4, callbacks=callbacks)
        assert module.seen == pytest.approx(expected, abs=1e-12)


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_training_equals_one_process(world_size: int, accumulate: int) -> None:
    for clip in CLIPS:
        expected = one_process(world_size, NUM_STEPS, accumulate, epochs=2, clip=clip)
        module = Regression()
        fit(module, my_batches(), accumulate_grad_batches=accumulate, max_epochs=2, **clip)
        assert torch.allclose(flat(module), expected, rtol=0, atol=1e-10), clip
        if world_size == 1 and accumulate == 1:
            continue  # nothing to put right
        plain = Regression()
        fit(plain, my_batches(), accumulate_grad_batches=accumulate, max_epochs=2, callbacks=[], **clip)
        assert (flat(plain) - expected).abs().max() > 1e-4, clip


@ranks(1, init=False)
def test_one_process_under_any_strategy() -> None:
    module = Regression()
    fit(module, my_batches(), accumulate_grad_batches=4, strategy="auto")
    assert torch.allclose(flat(module), one_process(1, NUM_STEPS, 4), rtol=0, atol=1e-10)


class ZeroesInPlace(Regression):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@ranks(1, 2, init=False)
def test_gradients_that_are_zeroed_in_place(world_size: int) -> None:
    module = ZeroesInPlace()
    fit(module, my_batches(), accumulate_grad_batches=4, max_epochs=2)
    assert torch.allclose(flat(module), one_process(world_size, NUM_STEPS, 4, epochs=2), rtol=0, atol=1e-10)


@ranks(2, init=False)
def test_windows_that_grow() -> None:
    module = Regression()
    scheduling = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
    fit(module, my_batches(), callbacks=[GlobalMeanLoss(), scheduling], max_epochs=2)
    assert torch.allclose(flat(module), one_process(2, NUM_STEPS, (1, 4)), rtol=0, atol=1e-10)


def sharded_bytes() -> tuple[bytes, float]:
    world_size = int(os.environ["WORLD_SIZE"])
    own = range(rank() * 4 // world_size, (rank() + 1) * 4 // world_size)
    module = Regression()
    batches = [make_batch(step, shard) for step in range(3) for shard in own]
    fit(module, batches, strategy=CustomDDPStrategy(logical_shards=4))
    return flat(module).numpy().tobytes(), (flat(module) - one_process(4, 3)).abs().max().item()


def test_logical_shards_keep_their_bytes() -> None:
    results = [run_ranks(sharded_bytes, world_size, init=False)[0] for world_size in (1, 2, 4)]
    assert len({found for found, _ in results}) == 1
    assert max(difference for _, difference in results) < 1e-10


SETTINGS: list[dict[str, Any]] = [
    {"comm_hook": "allreduce"},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"ddp_comm_hook": allreduce_hook},
    {"bucket_cap_mb": 1e-4, "gradient_as_bucket_view": True, "comm_hook": "allreduce"},
]


@ranks(2, 3, init=False)
def test_every_exact_way_to_reduce(world_size: int) -> None:
    for settings in SETTINGS:
        for accumulate, clip in ((1, {}), (4, CLIPS[1])):
            module = Regression()
            strategy = CustomDDPStrategy(**settings)
            fit(module, my_batches(), accumulate_grad_batches=accumulate, strategy=strategy, **clip)
            expected = one_process(world_size, NUM_STEPS, accumulate, clip=clip)
            assert torch.allclose(flat(module), expected, rtol=0, atol=1e-10), settings


@ranks(2, 3, init=False)
@pytest.mark.parametrize("hook", REDUCING)
def test_every_hook_stays_within_its_own_bound(world_size: int, hook: str) -> None:
    """What travels are sums of weighted gradients, so the bound holds for those, and shrinks with the total."""
    record = dataclasses.replace(HOOKS[hook](), start_step=0)
    module = Regression()
    fit(module, my_batches()[:4], accumulate_grad_batches=4, strategy=CustomDDPStrategy(comm_hook=record))
    sums, total = [], 0
    for of_rank in range(world_size):
        net = make_net()
        for step in range(4):
            x, y = make_batch(step, of_rank)
            (nn.functional.mse_loss(net(x), y) * len(x)).backward()
            total += len(x)
        sums.append(flat_gradient(net))
    exact = torch.stack(sums).sum(0) / total
    bound = record.error_bound(torch.stack(sums), Contents(("all",), (tuple(exact.shape),), exact.dtype))
    assert ((module.seen[0] - exact).abs() <= bound.amax(dim=0) * world_size / total + 1e-12).all(), hook


# ------------------------------------------------------------------------------------------------------------- weights


class MaskedMean(Regression):
    """The mean over the tokens that a mask lets through; their number is known in the step only."""

    as_tensor = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = y[:, 0] > 0.9
        num_tokens = mask.sum()
        log_weight(self, num_tokens if self.as_tensor else int(num_tokens))
        return (nn.functional.mse_loss(self.net(x), y, reduction="none").mean(1) * mask).sum() / num_tokens


def masked_reference(num_ranks: int, accumulate: int) -> Tensor:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for first in range(0, NUM_STEPS, accumulate):
        window = range(first, min(first + accumulate, NUM_STEPS))
        parts = [make_batch(step, of_rank) for step in window for of_rank in range(num_ranks)]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        keep = y[:, 0] > 0.9
        optimizer.zero_grad()
        if keep.any():
            nn.functional.mse_loss(net(x[keep]), y[keep]).backward()
        else:
            (0 * net(x).sum()).backward()
        optimizer.step()
    return flat(net)


def test_some_of_these_batches_are_empty_for_the_mask() -> None:
    num_tokens = [[int((make_batch(step, r)[1][:, 0] > 0.9).sum()) for step in range(NUM_STEPS)] for r in range(2)]
    assert 0 in num_tokens[0]
    assert len({*num_tokens[0], *num_tokens[1]}) > 3


@contextlib.contextmanager
def weights_stay_tensors() -> Iterator[None]:
    """Weights are then treated as those on a device, which nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            global_mean_loss,
            "checked_weight",
            lambda weight: weight.reshape(()) if isinstance(weight, Tensor) else float(weight),
        )
        yield


@ranks(1, 2, 3, init=False)
def test_logged_token_counts_and_empty_batches(world_size: int) -> None:
    for as_tensor, accumulate in ((False, 1), (True, 1), (True, 4)):
        module = MaskedMean()
        module.as_tensor = as_tensor
        with weights_stay_tensors() if as_tensor else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="GlobalMeanLoss: all batches")  # one rank: an empty step
            fit(module, my_batches(), accumulate_grad_batches=accumulate, detect_anomaly=False)
        assert torch.allclose(flat(module), masked_reference(world_size, accumulate), rtol=0, atol=1e-10)


@ranks(2, init=False)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_without_zeros_put_in_an_empty_batch_poisons_the_step(as_tensor: bool) -> None:
    module = MaskedMean()
    module.as_tensor = as_tensor
    with weights_stay_tensors() if as_tensor else contextlib.nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(global_mean_loss, "without_weightless", lambda gradient, weight: gradient)
        fit(module, my_batches())
    assert flat(module).isnan().any()


@ranks(2, init=False)
def test_a_function_of_the_batch() -> None:
    class Pops(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y, num_samples = batch.pop("x"), batch.pop("y"), batch.pop("num_samples")
            assert len(x) == num_samples
            return nn.functional.mse_loss(self.net(x), y)

    module = Pops()
    batches = [{"x": x, "y": y, "num_samples": len(x)} for x, y in my_batches()]
    callback = GlobalMeanLoss(weight=lambda batch: batch["num_samples"])
    fit(module, batches, accumulate_grad_batches=4, callbacks=[callback])
    assert torch.allclose(flat(module), one_process(2, NUM_STEPS, 4), rtol=0, atol=1e-10)


def test_several_logs_add_up_and_last_for_the_step() -> None:
    class Logs(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            log_weight(self, 1)
            log_weight(self, len(batch) - 1)
            return self.weight * batch.mean()

    module = Logs()
    fit(module, [TEN, ONES], strategy="auto", accumulate_grad_batches=2)
    assert module.seen == [pytest.approx(1.9, abs=1e-12)]


@pytest.mark.parametrize("first", [True, False])
def test_logging_in_some_steps_only_is_refused(first: bool) -> None:
    class Sometimes(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if (batch_idx == 0) == first:
                log_weight(self, 1)
            return self.weight * batch.mean()

    with pytest.raises(ValueError, match="log_weight for every batch or for none"):
        fit(Sometimes(), [torch.ones(2)] * 2, strategy="auto")


def test_log_weight_works_everywhere() -> None:
    module = Tokens()
    log_weight(module, 3)  # no Trainer
    log_weight(nn.Linear(1, 1), 3)  # type: ignore[arg-type]  # no LightningModule

    class Shared(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            log_weight(self, len(batch))
            return self.weight * batch.mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            log_weight(self, -1)  # would be refused in training

    shared = Shared()
    run = trainer(strategy="auto", callbacks=[GlobalMeanLoss()], accumulate_grad_batches=2, val_check_interval=1)
    run.fit(shared, loader([TEN, ONES]), loader([torch.ones(1)]))
    assert shared.seen == [pytest.approx(1.9, abs=1e-12)]
    run = trainer(strategy="auto")  # no callback
    run.fit(Shared(), loader([torch.ones(2)]), loader([torch.ones(1)]))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_weight_that_is_none_is_refused(weight: float, as_tensor: bool) -> None:
    callback = GlobalMeanLoss(weight=lambda batch: torch.tensor(weight) if as_tensor else weight)
    with pytest.raises(ValueError, match="finite and not negative"):
        fit(Tokens(), [torch.ones(2)], strategy="auto", callbacks=[callback])


@ranks(2, init=False)
def test_a_bad_device_weight_of_one_rank_is_refused_on_all() -> None:
    """In the first step before anything is multiplied; later when the total is looked at."""
    for bad_step in (0, 1):
        weights = [torch.tensor(-1.0 if rank() == 1 and step == bad_step else 0.5) for step in range(2)]
        module = Tokens()
        callback = GlobalMeanLoss(weight=lambda batch: weights.pop(0))  # noqa: B023
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(global_mean_loss, "checked_weight", _tensor_or_checked)
            with pytest.raises(ValueError, match="finite and not negative"):
                fit(module, [torch.ones(2, dtype=torch.float64)] * 2, callbacks=[callback])
        assert (module.weight.grad is None) == (bad_step == 0)
        assert len(module.seen) == bad_step


def _tensor_or_checked(weight: Any) -> Any:
    from ddp_plugin.weighting import checked_weight

    return weight if isinstance(weight, Tensor) and weight.dtype == torch.float32 else checked_weight(weight)


def test_a_batch_without_a_size_is_refused_unless_the_step_tells() -> None:
    class Tells(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            log_weight(self, 2)
            return self.weight * batch[0].mean()

    batches = [[torch.ones(2), torch.ones(3)]]
    fit(Tells(), batches, strategy="auto")

    class Silent(Tokens):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.weight * batch[0].mean()

    with pytest.raises(ValueError, match=r"first dimensions \[2, 3\]"):
        fit(Silent(), batches, strategy="auto")


class Takes(Tokens):
    tells = False

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        if self.tells:
            log_weight(self, len(batch))
        return self.weight * batch.mean()


@ranks(2, init=False)
def test_a_step_that_takes_the_iterator_has_to_tell() -> None:
    module = Takes()
    with pytest.raises(ValueError, match="one with dataloader_iter"):
        fit(module, [TEN if rank() == 0 else ONES])
    module.tells = True
    fit(module, [TEN if rank() == 0 else ONES])
    assert module.seen == [pytest.approx(1.9, abs=1e-12)]


def test_weight_has_to_be_a_function() -> None:
    with pytest.raises(TypeError, match="weight to be a function"):
        GlobalMeanLoss(weight=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- nothing and NaN


@ranks(1, 2, init=False)
def test_a_step_without_weight_has_zero_gradients_and_says_so_once() -> None:
    batches = [torch.ones(2, dtype=torch.float64) * (float("nan") if step < 3 else 3.0) for step in range(4)]
    module = Tokens()
    callback = GlobalMeanLoss(weight=lambda batch: 0 if batch.isnan().any() else len(batch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(module, batches, callbacks=[callback])
    assert module.seen == [0.0, 0.0, 0.0, pytest.approx(3.0)]
    assert sum("weight zero on all ranks" in str(item.message) for item in caught) == (rank() == 0)


class Arrival:
    """An event of a device that has not got that far."""

    has_arrived = False

    def query(self) -> bool:
        return self.has_arrived

    def synchronize(self) -> None:
        self.has_arrived = True


def test_a_total_that_is_still_on_its_way_is_not_waited_for_until_the_end() -> None:
    arrival = Arrival()

    class OnDevice(GlobalMeanLoss):
        def _keep_for_later(self, total: Tensor) -> None:
            self._unread.append((arrival, total))

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert len(self._unread) == 3
            assert not arrival.has_arrived
            super().on_train_end(trainer, pl_module)
            assert self._unread == []

    with pytest.warns(UserWarning, match="GlobalMeanLoss: all batches"):
        fit(Tokens(), [ONES] * 3, strategy="auto", callbacks=[OnDevice(weight=lambda batch: 0)])
    assert arrival.has_arrived


@ranks(2, init=False)
def test_a_nan_loss_with_a_weight_stays_nan_on_all_ranks() -> None:
    module = Tokens()
    fit(module, [torch.full((2,), float("nan") if rank() == 1 else 1.0, dtype=torch.float64)])
    assert torch.tensor(module.seen).isnan().all()


@ranks(2, init=False)
@pytest.mark.parametrize("knows", [True, False])
def test_a_ghost_batch_does_not_count(knows: bool) -> None:
    class Repeats(Batches):
        def is_ghost_train_batch(self, batch_idx: int) -> bool:
            return knows and rank() == 1 and batch_idx == 1

    own = [1.0, 2.0] if rank() == 0 else [3.0, 100.0]
    module = Tokens()
    run = trainer(use_distributed_sampler=False, callbacks=[GlobalMeanLoss()], max_epochs=2)
    data = Repeats([torch.full((1 + rank(),), value, dtype=torch.float64) for value in own])
    run.fit(module, DataLoader(data, batch_size=None, collate_fn=lambda batch: batch))
    second = 2.0 if knows else (2.0 + 2 * 100.0) / 3
    assert module.seen == pytest.approx([7 / 3, second, 7 / 3, second], abs=1e-12)


# ------------------------------------------------------------------------------------------------ other terms of a loss


class WithTerms(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        prediction = self.net(batch[0])
        penalty = sum((parameter**2).sum() for parameter in self.net.parameters())
        auxiliary = prediction.mean() ** 2  # one number of the whole batch
        return nn.functional.mse_loss(prediction, batch[1]) + 0.3 * penalty + 0.7 * auxiliary


@ranks(2, init=False)
def test_a_regulariser_comes_out_as_it_is_and_an_auxiliary_loss_as_the_weighted_mean() -> None:
    module = WithTerms()
    fit(module, my_batches()[:3], accumulate_grad_batches=3)
    net, parts = make_net(), [make_batch(step, of_rank) for step in range(3) for of_rank in range(2)]
    x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    penalty = sum((parameter**2).sum() for parameter in net.parameters())
    auxiliary = sum(len(part[0]) / len(x) * net(part[0]).mean() ** 2 for part in parts)
    (nn.functional.mse_loss(net(x), y) + 0.3 * penalty + 0.7 * auxiliary).backward()
    assert torch.allclose(module.seen[0], flat_gradient(net), rtol=0, atol=1e-10)


@ranks(2, init=False)
def test_equal_weights_give_the_plain_mean_also_in_a_short_window() -> None:
    module = WithTerms()
    fit(module, my_batches()[:3], accumulate_grad_batches=4, callbacks=[GlobalMeanLoss(weight=lambda batch: 1)])
    plain = WithTerms()
    for step in range(3):
        for of_rank in range(2):
            (plain.training_step(make_batch(step, of_rank), 0) / 6).backward()
    assert torch.allclose(module.seen[0], flat_gradient(plain), rtol=0, atol=1e-10)


# --------------------------------------------------------------------------------------------------- mixed precision


class Elementwise(pl.LightningModule):
    """Nothing that autocast changes, so only the scale and the order of things can be wrong."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.size = size
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.size * ((batch[0] * self.weight) ** 2).sum(1).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(flat_gradient(self))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def elementwise_reference(num_ranks: int, clip: float) -> Tensor:
    weight = torch.full((WIDTH,), 0.5, dtype=torch.float64)
    for window in (range(4), range(4, NUM_STEPS)):
        x = torch.cat([make_batch(step, of_rank)[0] for step in window for of_rank in range(num_ranks)])
        gradient = 2 * weight * (x**2).mean(0)
        weight = weight - 0.05 * gradient * min(1.0, clip / float(gradient.norm()))
    return weight


@ranks(1, 2, init=False)
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("clip", [0.6, 100.0])
def test_the_scale_goes_first_then_the_weights_then_the_clipping(world_size: int, precision: Any, clip: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if precision == "16-mixed" else None
    module = Elementwise().double()
    plugin = MixedPrecision(precision, "cpu", scaler)
    fit(module, my_batches(), accumulate_grad_batches=4, plugins=[plugin], gradient_clip_val=clip)
    assert torch.allclose(module.weight.detach(), elementwise_reference(world_size, clip), rtol=0, atol=1e-7)
    assert scaler is None or scaler.get_scale() == 2.0**12  # no step was skipped


@ranks(2, init=False)
@pytest.mark.parametrize(("nominal", "finite"), [(None, True), (1.0, False)])
def test_thousands_of_tokens_do_not_overflow_half_precision(nominal: float | None, finite: bool) -> None:
    """Without units of about one batch, 8192 times a gradient of 20 is more than fp16 holds on the wire."""
    with pytest.MonkeyPatch.context() as patch:
        if nominal is not None:
            patch.setattr(global_mean_loss, "nominal_weight", lambda largest: nominal)
        module = Elementwise(20.0)
        strategy = CustomDDPStrategy(comm_hook="fp16")
        callback = GlobalMeanLoss(weight=lambda batch: 8192 * (1 + rank()))
        fit(module, [(torch.ones(2, WIDTH),)], strategy=strategy, callbacks=[callback])
    assert bool(module.seen[0].isfinite().all()) == finite
    if finite:
        assert torch.allclose(module.seen[0], torch.full((WIDTH,), 20.0), rtol=2**-10)


@ranks(2, init=False)
def test_weights_that_start_at_zero_are_measured_when_they_come() -> None:
    """The unit is agreed on again until some rank has a weight."""
    counts = iter([0, 0, 8192 * (1 + rank())])
    module, strategy = Elementwise(20.0), CustomDDPStrategy(comm_hook="fp16")
    callback = GlobalMeanLoss(weight=lambda batch: next(counts))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="GlobalMeanLoss: all batches")
        fit(module, [(torch.ones(2, WIDTH),)] * 3, strategy=strategy, callbacks=[callback])
    assert torch.allclose(module.seen[2], torch.full((WIDTH,), 20.0), rtol=2**-10)


# ------------------------------------------------------------------------------------------------ manual optimization


class Manual(Regression):
    """Accumulates by hand: three backwards, then a step; the last window is short."""

    synchronises_always = False
    set_to_none = True
    clips = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        steps = batch_idx % 4 == 3 or batch_idx == NUM_STEPS - 1
        with optimizer.toggle_model(sync_grad=steps or self.synchronises_always):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
        if not steps:
            return
        if self.clips:
            normalize_gradients(self, optimizer)
            normalize_gradients(self, optimizer)  # changes nothing
            self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.set_to_none)


@ranks(1, 2, 3, init=False)
def test_manual_accumulation_equals_one_process(world_size: int) -> None:
    for always, set_to_none, clips in ((False, True, False), (True, True, True), (False, False, True)):
        module = Manual()
        module.synchronises_always, module.set_to_none, module.clips = always, set_to_none, clips
        strategy = CustomDDPStrategy(gradient_as_bucket_view=set_to_none)
        fit(module, my_batches(), max_epochs=2, strategy=strategy)
        expected = one_process(world_size, NUM_STEPS, 4, epochs=2, clip=CLIPS[1] if clips else {})
        assert torch.allclose(flat(module), expected, rtol=0, atol=1e-10), (always, set_to_none, clips)


class Steps(Tokens):
    """Runs a function as its only step."""

    def __init__(self, body: Callable[[Any, Any, Tensor], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = body

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.body(self, self.optimizers(), batch)


def test_a_backward_past_lightning_is_refused() -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        (self.weight * batch.mean()).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"go through self.manual_backward\(loss\)"):
        fit(Steps(body), [TEN], strategy="auto")


@pytest.mark.parametrize("zeroes", [True, False])
def test_gradients_that_were_used_must_be_zeroed(zeroes: bool) -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        self.manual_backward(self.weight * batch.mean())
        optimizer.step()
        if zeroes:
            optimizer.zero_grad(set_to_none=False)

    module = Steps(body)
    if zeroes:
        fit(module, [TEN, ONES], strategy="auto")
        assert module.seen == [10.0, 1.0]
    else:
        with pytest.raises(ValueError, match="gradients to be zero before the first backward after a step"):
            fit(module, [TEN, ONES], strategy="auto")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_backward_that_was_thrown_away_does_not_count(set_to_none: bool) -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        self.manual_backward(self.weight * batch.mean())
        if len(batch) == 9:
            optimizer.zero_grad(set_to_none=set_to_none)
            self.manual_backward(self.weight * 5 * batch.mean())
            optimizer.step()

    module = Steps(body)
    fit(module, [TEN, ONES], strategy="auto")
    assert module.seen == [pytest.approx(5.0, abs=1e-12)]


def test_gradients_changed_by_hand_between_two_backwards_keep_their_weight() -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        self.manual_backward(self.weight * batch.mean())
        if len(batch) == 9:
            optimizer.step()
        else:
            self.weight.grad.mul_(2)

    module = Steps(body)
    fit(module, [TEN, ONES], strategy="auto")
    assert module.seen == [pytest.approx((2 * 10 + 9) / 10, abs=1e-12)]


def test_a_closure_and_a_second_step_without_a_backward() -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.weight * batch.mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)
        optimizer.step()

    module = Steps(body)
    fit(module, [TEN, ONES], strategy="auto")
    assert module.seen == [10.0, 10.0, 1.0, 1.0]


def test_normalising_what_is_not_the_trainers_is_refused_and_without_the_callback_nothing_happens() -> None:
    def body(self: Any, optimizer: Any, batch: Tensor) -> None:
        self.manual_backward(self.weight * batch.mean())
        normalize_gradients(self, torch.optim.SGD(self.parameters(), lr=1.0))

    fit(Steps(body), [TEN], strategy="auto", callbacks=[])
    with pytest.raises(ValueError, match="an optimizer of the Trainer that fits now"):
        fit(Steps(body), [TEN], strategy="auto")


# ------------------------------------------------------------------------------------------------- several optimizers

ORDERS = ("alternating", "both, then both", "leaking")


class TwoPlayers(pl.LightningModule):
    """A generator and a critic, with batches of different weights."""

    def __init__(self, order: str = "alternating", set_to_none: bool = True) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.generator, self.critic = nn.Linear(WIDTH, 2).double(), nn.Linear(2, 1).double()
        self.order, self.set_to_none = order, set_to_none
        self.automatic_optimization = False

    def critic_loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.critic(y).tanh() - self.critic(self.generator(x).detach()).tanh()).mean()

    def generator_loss(self, x: Tensor) -> Tensor:
        return self.critic(self.generator(x)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x, y), (optimizer_g, optimizer_c) = batch, self.optimizers()  # type: ignore[misc,has-type]
        half = x[: 1 + len(x) // 2]  # the generator learns from fewer samples than the critic
        if self.order == "both, then both":
            optimizer_g.zero_grad(set_to_none=self.set_to_none)
            optimizer_c.zero_grad(set_to_none=self.set_to_none)
            log_weight(self, len(x))
            self.manual_backward(self.critic_loss(x, y))
            log_weight(self, len(half))
            self.toggle_optimizer(optimizer_g)
            self.manual_backward(self.generator_loss(half))
            self.untoggle_optimizer(optimizer_g)
            optimizer_c.step()
            optimizer_g.step()
            return
        if self.order == "alternating":
            self.toggle_optimizer(optimizer_g)
        log_weight(self, len(half))
        self.manual_backward(self.generator_loss(half))  # "leaking": reaches the critic as well
        optimizer_g.step()
        optimizer_g.zero_grad(set_to_none=self.set_to_none)
        if self.order == "alternating":
            self.untoggle_optimizer(optimizer_g)
        optimizer_c.zero_grad(set_to_none=self.set_to_none)
        log_weight(self, len(x))
        self.manual_backward(self.critic_loss(x, y))
        optimizer_c.step()
        optimizer_c.zero_grad(set_to_none=self.set_to_none)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]


def two_players_reference(order: str, num_ranks: int) -> Tensor:
    players = TwoPlayers()
    optimizer_g, optimizer_c = players.configure_optimizers()
    for step in range(NUM_STEPS):
        parts = [make_batch(step, of_rank) for of_rank in range(num_ranks)]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
        half = torch.cat([part[0][: 1 + len(part[0]) // 2] for part in parts])

        def critic_gradient(x: Tensor = x, y: Tensor = y) -> list[Tensor]:
            return list(torch.autograd.grad(players.critic_loss(x, y), list(players.critic.parameters())))

        def generator_gradient(half: Tensor = half) -> list[Tensor]:
            return list(torch.autograd.grad(players.generator_loss(half), list(players.generator.parameters())))

        def apply(optimizer: Any, player: nn.Module, gradients: list[Tensor]) -> None:
            for parameter, gradient in zip(player.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

        if order == "both, then both":
            gradients_c, gradients_g = critic_gradient(), generator_gradient()
            apply(optimizer_c, players.critic, gradients_c)
            apply(optimizer_g, players.generator, gradients_g)
        else:
            apply(optimizer_g, players.generator, generator_gradient())
            apply(optimizer_c, players.critic, critic_gradient())
    return flat(players)


@ranks(1, 2, 3, init=False)
def test_each_optimizer_has_its_own_total(world_size: int) -> None:
    for order in ORDERS:
        expected = two_players_reference(order, world_size)
        for set_to_none in (True, False):
            module = TwoPlayers(order, set_to_none)
            fit(module, my_batches(), strategy=CustomDDPStrategy(find_unused_parameters=True))
            assert torch.allclose(flat(module), expected, rtol=0, atol=1e-10), (order, set_to_none)
        if world_size > 1:
            plain = TwoPlayers(order)
            strategy = CustomDDPStrategy(find_unused_parameters=True)
            fit(plain, my_batches(), strategy=strategy, callbacks=[])
            assert (flat(plain) - expected).abs().max() > 1e-4, order


def test_hooks_on_parameters_are_taken_out_again() -> None:
    module = TwoPlayers("leaking")
    fit(module, my_batches(), strategy="auto")
    for parameter in module.parameters():
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks


# ------------------------------------------------------------------------------------------------------------- corners


@ranks(1, 2, init=False)
def test_an_optimizer_that_evaluates_several_times(world_size: int) -> None:
    class Lbfgs(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    module = Lbfgs()
    fit(module, my_batches()[:2])
    net = make_net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    for step in range(2):
        parts = [make_batch(step, of_rank) for of_rank in range(world_size)]
        x, y = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    assert torch.allclose(flat(module), flat(net), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="LBFGS works without accumulate_grad_batches only"):
        fit(Lbfgs(), my_batches(), accumulate_grad_batches=2)


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(9, 2, sparse=True)).double()
        self.net.load_state_dict(sparse_net().state_dict())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sparse_net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(9, 2)).double()


@ranks(1, 2, init=False)
def test_sparse_gradients(world_size: int) -> None:
    def batch(step: int, of_rank: int) -> tuple[Tensor, Tensor]:
        x, y = make_batch(step, of_rank)
        return (x[:, 0] * 100).long() % 9, y

    module, net = Sparse(), sparse_net()
    weight = nn.Parameter(torch.zeros(()))
    callback = GlobalMeanLoss(weight=lambda batch: 0 if rank() == 1 and len(batch[0]) < 3 else len(batch[0]))
    fit(module, [batch(step, rank()) for step in range(NUM_STEPS)], accumulate_grad_batches=2, callbacks=[callback])
    optimizer = torch.optim.SGD([*net.parameters(), weight], lr=0.1)
    for first in range(0, NUM_STEPS, 2):
        parts = [batch(step, of_rank) for step in (first, first + 1) for of_rank in range(world_size)]
        of_ranks = [of_rank for _ in (first, first + 1) for of_rank in range(world_size)]
        parts = [part for part, of_rank in zip(parts, of_ranks, strict=True) if of_rank == 0 or len(part[0]) >= 3]
        optimizer.zero_grad()
        nn.functional.mse_loss(
            net(torch.cat([part[0] for part in parts])), torch.cat([part[1] for part in parts])
        ).backward()
        optimizer.step()
    assert torch.allclose(flat(module), flat(net), rtol=0, atol=1e-10)


@ranks(2, init=False)
def test_a_hook_of_the_users_own_stays_and_works() -> None:
    plain, hooked = Regression(), Regression()
    calls: list[int] = []

    def doubles(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * 2

    for parameter in hooked.parameters():
        parameter.register_hook(doubles)
    for module in (plain, hooked):
        fit(module, my_batches()[:2], accumulate_grad_batches=2)
    assert torch.allclose(hooked.seen[0], 2 * plain.seen[0], rtol=0, atol=1e-12)
    assert len(calls) == 2 * 4
    assert all(len(parameter._backward_hooks or {}) == 1 for parameter in hooked.parameters())


@ranks(2, init=False)
def test_one_callback_fits_twice_also_after_an_exception() -> None:
    class Fails(Regression):
        def on_after_backward(self) -> None:
            raise RuntimeError("in the middle")

    callback = GlobalMeanLoss(weight=lambda batch: 0 if batch is None else len(batch[0]))
    failing = Fails()
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(failing, my_batches(), callbacks=[callback], accumulate_grad_batches=4)
    for _ in range(2):
        module = Regression()
        fit(module, my_batches(), callbacks=[callback], accumulate_grad_batches=4)
        assert torch.allclose(flat(module), one_process(2, NUM_STEPS, 4), rtol=0, atol=1e-10)


def test_an_exception_during_a_weightless_backward_leaves_no_hook() -> None:
    class Fails(Tokens):
        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            raise RuntimeError("in the middle")

    module = Fails()
    with pytest.raises(RuntimeError, match="in the middle"):
        fit(module, [TEN], strategy="auto", callbacks=[GlobalMeanLoss(weight=lambda batch: 0)])
    assert not module.weight._backward_hooks


@ranks(2, init=False)
def test_other_strategies_are_refused_for_several_processes() -> None:
    with pytest.raises(TypeError, match="because GlobalMeanLoss runs on several processes"):
        fit(Regression(), my_batches(), strategy=DDPStrategy())


@ranks(1, init=False)
def test_averaging_weights_in_place_of_gradients_is_refused() -> None:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=4)  # type: ignore[no-untyped-call]
    strategy = CustomDDPStrategy(ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2)
    with pytest.raises(ValueError, match="gradients that are means over all ranks"):
        fit(Regression(), my_batches(), strategy=strategy)


@pytest.mark.filterwarnings("ignore")  # jsonargparse speaks about itself
def test_lightning_cli_reads_it() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser()
    parser.add_class_arguments(GlobalMeanLoss, "callback")
    config = parser.parse_args(["--callback.weight=tests.test_global_mean_loss.num_samples"])
    assert parser.instantiate_classes(config).callback.weight is num_samples
    assert parser.instantiate_classes(parser.parse_args([])).callback.weight is None


def num_samples(batch: Any) -> int:
    return len(batch[0])


@ranks(2, init=False)
def test_one_small_message_a_step() -> None:
    """Beside DDP's own reduction: one all-reduce of 16 bytes per step, and one agreement per run."""
    sizes: list[int] = []

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel() * tensor.element_size())
        return dist.all_reduce(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        names = {"ReduceOp": dist.ReduceOp, "get_world_size": dist.get_world_size, "all_reduce": counting}
        patch.setattr(global_mean_loss, "dist", SimpleNamespace(**names))
        fit(Regression(), my_batches(), accumulate_grad_batches=4, max_epochs=2)
    assert sizes == [8, 16, 16, 16, 16]
