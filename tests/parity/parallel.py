"""The same runs through Lightning and the package, on the ranks that are running; each feature can be left out."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, GlobalMeanLoss, SamplerEpoch, log_weight
from tests.harness import trainer
from tests.parity.models import CLIP_NORM, MODELS, SEED, data_of, net_of, values_of
from tests.parity.table import BATCH_SIZE, NUM_STEPS, Cell


class Module(pl.LightningModule):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.net, self.model = net_of(cell), MODELS[cell.model]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        total, num_units = self.model.errors(self.net(x, self.trainer.global_step), target)
        log_weight(self, num_units)
        return total / max(num_units, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.model.optimizer(self.parameters())


GRAPHS: dict[str, dict[str, bool]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


def train(cell: Cell, without: str | None = None) -> dict[str, Tensor]:
    """Returns this rank's weights and buffers after :data:`NUM_STEPS` steps.

    Args:
        cell: the run; its number of ranks is the number that are running.
        without: a feature to leave out; see ``tests/test_parity.py``.
    """
    pl.seed_everything(SEED, verbose=False)
    callbacks = [SamplerEpoch("pad" if without == "exact last batch" else "exact")]
    if without != "global mean":
        callbacks.append(GlobalMeanLoss())
    elif cell.num_ranks > 1:
        callbacks = [SamplerEpoch("pad")]
    if cell.model == "convnet" and without != "synchronised BatchNorm":
        callbacks.append(ConvertSyncBatchNorm())
    if without == "sampler":
        callbacks = callbacks[1:]
    strategy: Any = CustomDDPStrategy(**({} if without == "graph" else GRAPHS[cell.graph]))
    if without == "reduction":
        strategy = CustomDDPStrategy(ddp_comm_hook=_reduces_nothing, **GRAPHS[cell.graph])
    if without == "strategy":
        strategy = pl.strategies.DDPStrategy(**GRAPHS[cell.graph])
        callbacks = []
    module = Module(cell)
    loader = DataLoader(data_of(cell), batch_size=BATCH_SIZE, shuffle=True)
    trainer(
        max_epochs=-1,
        max_steps=NUM_STEPS,
        accumulate_grad_batches=cell.accumulate,
        gradient_clip_val=CLIP_NORM if cell.clipping and without != "clipping" else None,
        callbacks=callbacks,
        strategy=strategy,
    ).fit(module, loader)
    return values_of(module.net)


def _reduces_nothing(state: Any, bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
