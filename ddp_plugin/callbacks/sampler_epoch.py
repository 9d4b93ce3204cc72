"""Every ``set_epoch`` in reach of a train loader hears the epoch, before the iterator that it is for exists."""

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage

from ddp_plugin import _compat
from ddp_plugin.callbacks._shell import transform_loaders
from ddp_plugin.epochs import share_epoch, tell_epoch

__all__ = ["SamplerEpoch"]


class SamplerEpoch(pl.Callback):
    """Tells samplers, batch samplers, whatever they wrap, and datasets the epoch in time.

    Lightning tells two places only (``loader.sampler`` and ``loader.batch_sampler.sampler``), and after a resume it
    tells them when the workers have their indices already. This callback reaches every object that
    :func:`ddp_plugin.loaders.walk` finds, in all leaves of a ``CombinedLoader``, once per epoch and object, and

    - before the first iterator is made, also after a resume;
    - anew, with new iterators, where Lightning made the loaders before it had restored the progress
      (``trainer.estimated_stepping_batches`` in ``configure_optimizers``). A stream that can be read only once loses
      what its iterator had fetched ahead by then;
    - in persistent workers, through shared memory, before they fetch an epoch's first sample.

    Raises:
        TypeError: at setup, several processes under another strategy than ``CustomDDPStrategy``.
        RuntimeError: when a ``set_epoch`` raises; the message names the object.

    Collectives:
        None.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._told_epoch: int | None = None  # what all leaves heard last; they are loaded, and told, together

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Asks to see the loaders."""
        if stage != "fit":
            return
        self._trainer = trainer
        self._told_epoch = None
        transform_loaders(self, trainer, self._prepare)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Lets go of the Trainer."""
        self._trainer = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Makes the iterators anew if they were made for an epoch that turned out to be another one."""
        if self._tell_all(trainer):
            _compat.recreate_train_iterator(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tells the epoch; Lightning makes the iterators of all but the first epoch after this."""
        self._tell_all(trainer)

    def _prepare(self, loader: object, stage: RunningStage) -> object:
        if stage is not RunningStage.TRAINING or self._trainer is None:
            return loader
        loader = share_epoch(loader)
        self._told_epoch = _compat.train_epoch(self._trainer)
        tell_epoch(loader, self._told_epoch)
        return loader

    def _tell_all(self, trainer: pl.Trainer) -> bool:
        """Tells all leaves the epoch unless they know it; returns whether they did not."""
        epoch = _compat.train_epoch(trainer)
        if epoch == self._told_epoch:
            return False
        self._told_epoch = epoch
        for leaf in _compat.loaders_of(trainer.fit_loop)[0]:
            tell_epoch(leaf, epoch)
        return True
