"""The language-model recipe, with a note of what each process trains on: appended at once, so that a kill loses none.

    PYTHONPATH=.:recipes python tests/chaos/program.py NOTES STEP_S SAVE_S [settings of the recipe]

``STEP_S`` seconds are added to each optimizer step and ``SAVE_S`` to each flush of a file, so that a killer can aim.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import llm
from run import run


class Notes(pl.Callback):
    """Appends to one file per rank: where a start begins, then for each micro-batch its step, samples and loss."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self.folder = folder
        self.step_s = step_s
        self._samples: dict[tuple[int, ...], int] = {}

    def _append(self, trainer: pl.Trainer, **note: Any) -> None:
        with open(self.folder / f"rank-{trainer.global_rank}.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(note).encode() + b"\n")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        blocks = [datamodule.train[index][0] for index in range(len(datamodule.train))]
        self._samples = {tuple(block.tolist()): index for index, block in enumerate(blocks)}
        assert len(self._samples) == len(blocks), "blocks of this text are not told apart by what they hold"
        self._append(
            trainer,
            pid=os.getpid(),
            start=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",  # the ranks' meeting place, new each time
            begins_at=trainer.global_step,
            world_size=trainer.world_size,
            num_samples=len(blocks),
            time_s=time.time(),
        )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch[0]

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        # Before the gradients are reduced: a rank that is killed behind that has its part in the weights of the others.
        self._append(
            trainer,
            step=trainer.global_step + 1,
            epoch=trainer.current_epoch,
            samples=[self._samples[tuple(block.tolist())] for block in self._batch],
            loss=float(loss.detach()) * trainer.accumulate_grad_batches,  # Lightning has divided it
        )

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.step_s)


def slow_down_saves(by_s: float) -> None:
    """Makes each flush to the disk take longer, as a slow disk would."""
    flush = os.fsync

    def slow(file: Any) -> None:
        time.sleep(by_s)
        flush(file)

    os.fsync = slow


def main() -> None:
    folder, step_s, save_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    sys.argv[1:4] = []
    slow_down_saves(save_s)
    original = llm.make_trainer

    def with_notes(settings: Any, plan: Any, strategy: Any, callbacks: list[Any]) -> pl.Trainer:
        return original(settings, plan, strategy, [*callbacks, Notes(folder, step_s)])

    llm.make_trainer = with_notes
    run(llm.main)


if __name__ == "__main__":
    main()
