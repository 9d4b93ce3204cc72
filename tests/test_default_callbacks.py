"""The callbacks together: one run with all the defaults, against one process and against its own interruption."""

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from ddp_plugin import ConvertSyncBatchNorm, GlobalMeanLoss, SamplerEpoch, ScaleLearningRate, default_callbacks
from tests.harness import ranks, trainer


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with an augmentation of their own, so that every random stream matters."""

    def __init__(self, num_samples: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return x + self.noise * torch.randn(5, dtype=torch.float64), x.sum(0, keepdim=True)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        ).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        errors = (self.net(batch[0]) - batch[1]).square().flatten()
        self.log("error", errors.mean(), batch_size=len(errors))
        self.log("largest", errors.max(), reduce_fx="max")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in model.state_dict().values()]).clone()


@ranks(1, 2, 3, init=False, timeout_s=240)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_validation_equals_plain_torch_and_a_resume_equals_no_interruption(
    world_size: int, num_workers: int, tmp_path: Path
) -> None:
    pl.seed_everything(11, verbose=False)
    warnings.filterwarnings("ignore", "ConvertSyncBatchNorm: gradients are accumulated")  # right, and known here
    sampler = WeightedRandomSampler(torch.arange(1.0, 38.0).tolist(), 30)
    train = DataLoader(Noisy(37), batch_size=4, sampler=sampler, num_workers=num_workers)
    validate = DataLoader(Noisy(13, noise=0.0), batch_size=3)

    def run(max_epochs: int, resume: Path | None = None) -> tuple[Model, Any]:
        model = Model()
        callbacks = [*default_callbacks(), ConvertSyncBatchNorm(), ScaleLearningRate(base_batch_size=4, warmup_steps=3)]
        saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        stops = EarlyStopping("error", patience=50)
        fit = trainer(
            max_epochs=max_epochs,
            callbacks=[*callbacks, saves, stops],
            enable_checkpointing=True,
            accumulate_grad_batches=2,
        )
        fit.fit(model, train, validate, ckpt_path=resume)
        return model, fit.callback_metrics

    model, metrics = run(3)
    with torch.no_grad():
        errors = [(model.eval().net(x) - y).square().flatten() for x, y in validate]
    assert float(metrics["error"]) == pytest.approx(torch.cat(errors).mean().item(), rel=1e-12)
    assert float(metrics["largest"]) == pytest.approx(torch.cat(errors).max().item(), rel=1e-12)

    resumed, _ = run(3, resume=tmp_path / "epoch=0.ckpt")
    if world_size <= 2:
        assert torch.equal(weights(model), weights(resumed))
    else:  # DDP's first step has another bucket layout, and a ring of three adds in an order that follows the layout
        torch.testing.assert_close(weights(model), weights(resumed), rtol=1e-12, atol=1e-12)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, weights(model))
    assert all(torch.equal(part, parts[0]) for part in parts)


def test_yours_take_the_place_of_the_defaults() -> None:
    exact, others = SamplerEpoch("exact"), GlobalMeanLoss()
    callbacks = default_callbacks(others, exact)
    assert callbacks[0] is exact
    assert callbacks[-1] is others
    names = [type(callback).__name__ for callback in default_callbacks()]
    assert [type(callback).__name__ for callback in callbacks] == [*names, "GlobalMeanLoss"]


@ranks(2, init=False)
def test_without_the_callbacks_the_same_comparison_fails() -> None:
    pl.seed_everything(11, verbose=False)
    validate = DataLoader(Noisy(13, noise=0.0), batch_size=3)
    model = Model()
    run = trainer()
    run.fit(model, DataLoader(Noisy(36), batch_size=4), validate)
    with torch.no_grad():
        errors = torch.cat([(model.eval().net(x) - y).square().flatten() for x, y in validate])
    assert float(run.callback_metrics["error"]) != pytest.approx(errors.mean().item(), rel=1e-6)
    assert "PL_GLOBAL_SEED" in os.environ
