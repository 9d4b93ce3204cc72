"""A program as a person writes it, for launchers: trains slowly, and writes down what each rank does.

``stopping_job.py FOLDER DEVICES NUM_WORKERS [STRATEGY]``; in FOLDER, ``<rank>.log`` gets one line per training step.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

import ddp_plugin


class Data(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Model(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        return self.net(batch / 1e5).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with open(self.folder / f"{self.global_rank}.log", "a") as log:
            print(self.global_step, os.getpid(), file=log)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    folder, devices, num_workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    strategy: Any = sys.argv[4] if len(sys.argv) > 4 else ddp_plugin.CustomDDPStrategy(checkpoint_on_stop=True)
    slow_down = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=ddp_plugin.default_callbacks() if len(sys.argv) <= 4 else [],
        max_epochs=1,
        enable_checkpointing=False,
        default_root_dir=folder,
        **slow_down,
    )
    trainer.fit(Model(folder), DataLoader(Data(), batch_size=2, num_workers=num_workers))


if __name__ == "__main__":
    main()
