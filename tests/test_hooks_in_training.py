"""Every hook under a Trainer: one model in the end, resumes with the same bits, layers unfrozen on the way."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ddp_plugin import CustomDDPStrategy, GlobalMeanLoss, PerRankSeed, SamplerEpoch
from ddp_plugin.hooks import HOOKS
from tests.harness import ranks, run_ranks, trainer

TRAINING = sorted(name for name in HOOKS if HOOKS[name]().refusal is None)
REDUCING = [name for name in TRAINING if HOOKS[name]().synchronises == "gradients"]


class Model(pl.LightningModule):
    """Large enough matrices to compress, an embedding that some batches use little, and a head that may be frozen."""

    def __init__(self, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 40), nn.Dropout(0.1))
        self.head = nn.Linear(40, 4)
        if is_frozen:
            self.backbone[0].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loader(batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(96, 16, generator=generator)
    return DataLoader(TensorDataset(x, torch.sin(x[:, :4])), batch_size=batch_size, shuffle=True)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in module.state_dict().values()])


def spec(name: str) -> dict[str, Any]:
    """Short periods and few exact steps, for hooks that have them, so that a short run sees what they do."""
    options = HOOKS[name]().options
    return {"name": name, **{key: value for key, value in {"start_step": 2, "period": 3}.items() if key in options}}


def is_same_everywhere(values: Tensor) -> bool:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return all(torch.equal(part, values) for part in parts)


class Unfreeze(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 5:
            pl_module.backbone[0].requires_grad_(True)


class SaveAt(Callback):
    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def train(name: str | None, callbacks: list[Callback], ckpt_path: str | None = None, **settings: Any) -> Model:
    module, batch_size = Model(settings.pop("is_frozen", False)), settings.pop("batch_size", 4)
    strategy = CustomDDPStrategy(comm_hook=name and spec(name), bucket_cap_mb=4e-3, **settings.pop("strategy", {}))
    run = trainer(
        strategy=strategy, callbacks=[SamplerEpoch(), PerRankSeed(seed=3), *callbacks], max_epochs=2, **settings
    )
    run.fit(module, loader(batch_size), ckpt_path=ckpt_path)
    return module


@ranks(2, init=False)
@pytest.mark.parametrize("name", TRAINING)
def test_one_model_in_the_end_also_with_a_layer_that_is_unfrozen_on_the_way(name: str) -> None:
    module = train(name, [Unfreeze()], is_frozen=True, accumulate_grad_batches=2)
    assert is_same_everywhere(flat(module))
    assert not torch.equal(module.backbone[0].weight, Model().backbone[0].weight), "the layer did not train"


@ranks(2, init=False)
@pytest.mark.parametrize("name", TRAINING)
def test_a_resumed_run_ends_with_the_bits_of_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "step.ckpt")
    uninterrupted = flat(train(name, [SaveAt(7, path)]))
    dist.barrier()
    resumed = train(name, [], ckpt_path=path)
    assert torch.equal(flat(resumed), uninterrupted)
    assert is_same_everywhere(uninterrupted)
    torch.load(path, weights_only=True)


def resumed_from(name: str, checkpoint: bytes) -> bytes:
    path = f"/tmp/resumed-{os.environ['MASTER_PORT']}.ckpt"
    is_first = os.environ["RANK"] == "0"  # who alone reads it
    if is_first:
        Path(path).write_bytes(checkpoint)
    try:
        module = train(name, [], ckpt_path=path)
    finally:
        if is_first:
            Path(path).unlink()
    assert is_same_everywhere(flat(module))
    file = io.BytesIO()
    torch.save(flat(module), file)
    return file.getvalue()


def saved(name: str, folder: str) -> None:
    train(name, [SaveAt(7, f"{folder}/step.ckpt")], batch_size=6)  # as many samples a step as 3 x 4


@pytest.mark.parametrize("name", TRAINING)
def test_a_checkpoint_of_two_ranks_is_resumed_on_three(name: str, tmp_path: Path) -> None:
    run_ranks(saved, 2, init=False, name=name, folder=str(tmp_path))
    ends = run_ranks(resumed_from, 3, init=False, name=name, checkpoint=(tmp_path / "step.ckpt").read_bytes())
    assert torch.load(io.BytesIO(ends[0]), weights_only=True).isfinite().all()


@ranks(2, init=False)
def test_what_a_hook_without_error_feedback_cannot_take_over_is_said(tmp_path: Path) -> None:
    path = str(tmp_path / "step.ckpt")
    train("int8", [SaveAt(7, path)])
    dist.barrier()
    for hook_name in ("bf16", None):
        said = f"comm_hook='int8'; the gradient that it had left out .* because .*comm_hook={hook_name!r}"
        with pytest.warns(UserWarning, match=said) if dist.get_rank() == 0 else contextlib.nullcontext():
            train(hook_name, [], ckpt_path=path)
    torch.load(path, weights_only=True)
    train("int4", [], ckpt_path=path)  # another one with error feedback sends what int8 had left out


@ranks(2, init=False)
@pytest.mark.parametrize("name", REDUCING)
def test_every_hook_goes_with_the_global_mean(name: str) -> None:
    assert is_same_everywhere(flat(train(name, [GlobalMeanLoss()], accumulate_grad_batches=3)))
