"""One training run on 1, 2 and 4 processes, with all the callbacks: the same bytes, also when it moves between them."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddp_plugin import CustomDDPStrategy, GlobalMeanLoss, SamplerEpoch, default_callbacks, log_weight
from tests.harness import run_ranks, trainer

NUM_SHARDS, NUM_STEPS, LENGTH = 4, 50, 102  # 102 = 8 global batches of 12, and 6


class Augmented(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.x = torch.randn(LENGTH, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + 0.1 * torch.randn(6)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["RANK"]))  # rank 0's weights are everyone's
        layers = (nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.net = nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        log_weight(self, len(batch))
        return nn.functional.mse_loss(self.net(batch), batch[:, :3].sin())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Saves(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.path, self.saved = Path(folder, "step.ckpt"), False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 13 and not self.saved:  # in the second epoch
            self.saved = True
            trainer.save_checkpoint(self.path)


def train(logical: bool, num_workers: int, exact: bool, folder: str = "", resume: bool = False) -> bytes:
    pl.seed_everything(5, verbose=False)
    callbacks = default_callbacks()
    if exact:
        callbacks = default_callbacks(SamplerEpoch("exact"), GlobalMeanLoss())
    if folder and not resume:
        callbacks.append(Saves(folder))
    module = Net()
    loader = DataLoader(Augmented(), batch_size=3, shuffle=True, num_workers=num_workers)
    trainer(
        max_epochs=-1,
        max_steps=NUM_STEPS,
        callbacks=callbacks,
        gradient_clip_val=0.5,
        accumulate_grad_batches=1 if logical else NUM_SHARDS // int(os.environ["WORLD_SIZE"]),
        strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS if logical else None),
    ).fit(module, loader, ckpt_path=Path(folder, "step.ckpt") if resume else None)
    assert module.trainer.global_step == NUM_STEPS
    return b"".join(value.numpy().tobytes() for value in module.state_dict().values())


def results(num_ranks: int, **settings: Any) -> bytes:
    everyone = run_ranks(train, num_ranks, init=False, **settings)
    assert len(set(everyone)) == 1
    return everyone[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("num_workers", "exact"), [(0, False), (1, False), (0, True)])
def test_the_bytes_are_the_same_on_1_2_and_4_processes(num_workers: int, exact: bool) -> None:
    settings = {"logical": True, "num_workers": num_workers, "exact": exact}
    assert len({results(num_ranks, **settings) for num_ranks in (1, 2, 4)}) == 1


def test_without_logical_shards_they_are_not() -> None:
    assert len({results(num_ranks, logical=False, num_workers=0, exact=False) for num_ranks in (1, 2, 4)}) == 3


def test_a_run_that_moves_to_other_processes_in_the_middle_of_an_epoch_keeps_its_bytes(tmp_path: Path) -> None:
    settings = {"logical": True, "num_workers": 0, "exact": False, "folder": str(tmp_path)}
    whole = results(2, **settings)
    for num_ranks in (1, 4):
        assert results(num_ranks, **settings, resume=True) == whole


def _stream() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Any:
            return iter(torch.randn(8, 6))

    trainer(strategy=CustomDDPStrategy(logical_shards=2), callbacks=[SamplerEpoch()]).fit(Net(), DataLoader(Stream()))


def test_a_stream_cannot_be_dealt_out_to_shards() -> None:
    with pytest.raises(AssertionError, match="a map-style training loader to deal out to logical shards"):
        run_ranks(_stream, 1, init=False)
