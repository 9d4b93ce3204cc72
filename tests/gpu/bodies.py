"""What is checked both over NCCL with one rank and over gloo with two ranks on one card; each runs on every rank."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from ddp_plugin import CustomDDPStrategy, ExactEvaluation, GlobalMeanLoss, PerRankSeed, log_weight
from ddp_plugin.hooks import HOOKS, Contents
from tests.gpu.device import (
    DEVICE,
    LEARNING_RATE,
    NUM_SAMPLES,
    Regression,
    batches,
    device_trainer,
    flat,
    flat_gradient,
    make_data,
    make_net,
    make_optimizer,
    rank_and_world_size,
    train_loader,
    train_plainly,
)

REDUCING = sorted(name for name in HOOKS if HOOKS[name]().synchronises == "gradients" and not HOOKS[name]().refusal)


def fit(net: nn.Module, data: TensorDataset, *, callbacks: list[Any] | None = None, **settings: Any) -> Tensor:
    """Trains one epoch, returns the parameters; ``trainer=`` holds the Trainer's settings, the rest the strategy's."""
    of_trainer = settings.pop("trainer", {})
    run = device_trainer(strategy=CustomDDPStrategy(**settings), callbacks=callbacks or [], **of_trainer)
    module = Regression(net)
    run.fit(module, train_loader(data))
    assert dist.get_backend() == (
        settings.get("process_group_backend") or ("nccl" if DEVICE.type == "cuda" else "gloo")
    )
    return flat(net).to(DEVICE)


def check_training(**settings: Any) -> None:
    """Trained parameters are those of one process on the same global batches."""
    accumulate = settings.get("trainer", {}).get("accumulate_grad_batches", 1)
    expected, _ = train_plainly(make_net(), make_data(), accumulate)
    torch.testing.assert_close(fit(make_net(), make_data(), **settings), expected, rtol=0, atol=1e-12)


def check_hook(name: str, **settings: Any) -> None:
    """The first step is off by no more than the hook declares, and by something where it rounds."""
    _, world_size = rank_and_world_size()
    named = dict(make_net().named_parameters())
    start = flat(make_net()).to(DEVICE)
    _, mean = train_plainly(make_net(), make_data())
    gradients = torch.stack([gradient_of_rank(rank, world_size) for rank in range(world_size)])
    hook = replace(HOOKS[name](), start_step=0)
    stepped = fit(make_net(), make_data(), comm_hook=hook, trainer={"max_steps": 1}, **settings)
    error = ((start - stepped) / LEARNING_RATE - mean).abs()
    contents = Contents.of(list(named.values()), {id(p): key for key, p in named.items()})
    bound = hook.error_bound(gradients, contents).max() + 1e-12  # of all, because DDP fills buckets in its own order
    assert error.max() <= bound, f"{name}: off by {error.max().item()}, declared {bound.item()}"


def gradient_of_rank(rank: int, world_size: int) -> Tensor:
    """What a rank has before the first reduction: the gradient of its own samples."""
    net = make_net().to(DEVICE)
    inputs, targets = next(batches(make_data()))
    nn.functional.mse_loss(net(inputs[rank::world_size]), targets[rank::world_size]).backward()
    return flat_gradient(net)


# ---------------------------------------------------------------------------------------------------------- the mean


class Weighted(Regression):
    """The mean over the targets that are positive: each batch has its own number of them, known on the device only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        counts = targets > 0
        log_weight(self, counts.sum())
        return ((self.net(inputs) - targets).square() * counts).sum() / counts.sum().clamp(min=1)


def check_global_mean(**settings: Any) -> None:
    """Steps are those of the mean over all that counts, although only the device knows how much that is."""
    net = make_net().to(DEVICE)
    optimizer = make_optimizer(net)
    for inputs, targets in batches(make_data()):
        counts = targets > 0
        (((net(inputs) - targets).square() * counts).sum() / counts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    module = Weighted(make_net())
    run = device_trainer(strategy=CustomDDPStrategy(**settings), callbacks=[GlobalMeanLoss()])
    run.fit(module, train_loader(make_data()))
    torch.testing.assert_close(flat(module.net).to(DEVICE), flat(net), rtol=0, atol=1e-12)


class Reduces(Regression):
    """Brings tensors of the CPU to a group that may not serve it."""

    def on_train_start(self) -> None:
        rank, world_size = rank_and_world_size()
        strategy: Any = self.trainer.strategy
        mean = strategy.reduce(torch.tensor([rank, 1]))
        assert (mean.device.type, mean.tolist()) == ("cpu", [(world_size - 1) / 2, 1.0])
        gathered = self.all_gather(torch.full((2,), float(rank)))
        assert gathered.device.type == "cpu" or DEVICE.type == "cuda"
        assert gathered.reshape(world_size, 2)[:, 0].tolist() == list(range(world_size))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rank", float(rank_and_world_size()[0]), on_step=True, on_epoch=False, sync_dist=True)
        return super().training_step(batch, batch_idx)


def check_cpu_tensors(**settings: Any) -> None:
    """Tensors of the CPU are reduced and gathered whatever the backend, and logged values too."""
    run = device_trainer(strategy=CustomDDPStrategy(**settings), max_steps=1)
    run.fit(Reduces(make_net()), train_loader(make_data()))
    assert float(run.callback_metrics["rank"]) == (rank_and_world_size()[1] - 1) / 2


# ---------------------------------------------------------------------------------------------------------- evaluation


class Values(Metric):
    """A list state that is concatenated, in the values' own precision."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.seen.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.seen) if isinstance(self.seen, list) else self.seen


class Measured(pl.LightningModule):
    """Logs plain values and torchmetrics objects with sum and list states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.everything = Values()
        self.seen: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        indices, values, labels = batch
        assert values.device == DEVICE
        self.seen.extend(indices.tolist())
        for name in ("mean", "sum", "max", "min"):
            size = {"batch_size": len(values)} if name == "mean" else {}
            self.log(name, getattr(values, name)(), reduce_fx=name, sync_dist=True, **size)
        self.accuracy.update(predicted(values), labels)
        self.log("accuracy", self.accuracy)
        self.everything.update(values)

    def on_validation_epoch_end(self) -> None:
        found = self.everything.compute()
        assert found.device == DEVICE
        self.log("squares", found.square().sum())
        self.everything.reset()


def predicted(values: Tensor) -> Tensor:
    return (values * 10).long().abs() % 3


def evaluation_data(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(num_samples, generator=generator, dtype=torch.float64)
    return TensorDataset(torch.arange(num_samples), values, torch.randint(0, 3, (num_samples,), generator=generator))


def check_evaluation(num_samples: int, batch_size: int, **settings: Any) -> None:
    """Every sample once, and every number that of arithmetic over the whole dataset."""
    module, data = Measured(), evaluation_data(num_samples)
    run = device_trainer(strategy=CustomDDPStrategy(**settings), callbacks=[evaluation := ExactEvaluation()])
    result = run.validate(module, DataLoader(data, batch_size), verbose=False)[0]
    _, values, labels = data.tensors
    expected = {
        "mean": values.mean(),
        "sum": values.sum(),
        "max": values.max(),
        "min": values.min(),
        "accuracy": (predicted(values) == labels).double().mean(),
        "squares": values.square().sum(),
    }
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = 1e-6 if key == "accuracy" else 1e-12  # torchmetrics divides in float32
        assert abs(result[key] - value.item()) <= tolerance * max(1.0, abs(value.item())), key
    assert evaluation.records[0].num_samples == num_samples


# ------------------------------------------------------------------------------------------------------ random streams


class Dropped(Regression):
    """Keeps what dropout on the device let through in each step."""

    def __init__(self) -> None:
        super().__init__(make_net())
        self.masks: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.masks.append(nn.functional.dropout(torch.ones(64, device=self.device), 0.5).cpu())
        return super().training_step(batch, batch_idx)


class Draws(pl.Callback):
    """Draws numbers on the device between steps, as a validation or a logger may."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        torch.rand(5, device=DEVICE)


def masks(callbacks: list[pl.Callback], **settings: Any) -> Tensor:
    torch.manual_seed(99)  # of all devices
    module = Dropped()
    device_trainer(strategy=CustomDDPStrategy(**settings), callbacks=callbacks).fit(module, train_loader(make_data()))
    assert len(module.masks) == NUM_SAMPLES // 4
    return torch.stack(module.masks)


def check_random_streams(**settings: Any) -> Tensor:
    """Dropout on the device repeats whatever else draws from its generator, and differs with the seed and the step."""
    first = masks([PerRankSeed(seed=5)], **settings)
    assert torch.equal(first, masks([PerRankSeed(seed=5), Draws()], **settings))
    assert not torch.equal(first, masks([PerRankSeed(seed=6)], **settings))
    assert len({tuple(mask.tolist()) for mask in first}) == len(first)
    # Without the callback the other draws do change dropout: the comparison above can fail.
    assert not torch.equal(masks([], **settings), masks([Draws()], **settings))
    return first
