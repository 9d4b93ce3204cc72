"""BatchNorm over all ranks during ``fit``; afterwards the model is what it was."""

from collections.abc import Callable, Mapping

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from ddp_plugin.batchnorm import Conversion, convert_batchnorm
from ddp_plugin.errors import DDPPluginError, explain

__all__ = ["ConvertSyncBatchNorm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ConvertSyncBatchNorm(Callback):
    """Computes BatchNorm statistics over the global batch in training, on CPU/gloo as on CUDA/NCCL.

    The layers are converted for ``fit`` and given back at its end, also after an exception: the same objects with the
    same class, hooks, attributes and flags, and the statistics of the training. Checkpoints taken in between load into
    the plain model. In evaluation the running statistics are used, as always, so nothing is converted for it.

    Layers of a class derived from BatchNorm are skipped with a warning, because a conversion would lose what the class
    does beside; see ``factories``.

    With gradient accumulation the statistics are those of one micro-batch over all ranks, which is not the batch of the
    optimizer step; a warning says so.

    Args:
        num_ranks: how many consecutive ranks share statistics, such as the processes of a node; all when ``None``.
        factories: how layers of further classes are synchronised; see
            :func:`~ddp_plugin.batchnorm.convert_batchnorm`.

    Raises:
        ValueError: at construction, ``num_ranks`` below 1; at the start of ``fit``, a ``LazyBatchNorm`` that has not
            seen an input, or a world size that ``num_ranks`` does not divide.

    Collectives:
        The creation of groups where ``num_ranks`` is given, on all ranks; then in each training forward one all-gather
        and in each backward one all-reduce per layer.
    """

    def __init__(
        self,
        num_ranks: int | None = None,
        factories: Mapping[type[nn.Module], Callable[[nn.Module], nn.Module]] | None = None,
    ) -> None:
        if num_ranks is not None and num_ranks < 1:
            raise ValueError(explain("num_ranks to be at least 1", repr(num_ranks), "Leave it out for all ranks"))
        self.num_ranks = num_ranks
        self.factories = dict(factories or {})
        self._conversions: list[Conversion] = []
        self._group: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None  # (world it belongs to, group)
        self._warned_of_accumulation = False

    @property
    def converted(self) -> list[str]:
        """Qualified names of the layers that are converted now; empty outside of ``fit``."""
        return [name for conversion in self._conversions for name in conversion.converted]

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Converts what the model has so far, before it is wrapped."""
        if stage != "fit":
            return
        self._revert()
        self._warned_of_accumulation = False
        if trainer.world_size == 1:
            rank_zero_info("ConvertSyncBatchNorm: one process, so BatchNorm sees the whole batch already.")
            return
        if not (dist.is_available() and dist.is_initialized()):
            raise DDPPluginError(
                explain(
                    "a strategy that uses torch.distributed",
                    f"{type(trainer.strategy).__name__} with {trainer.world_size} processes",
                    "Use CustomDDPStrategy, or remove ConvertSyncBatchNorm",
                )
            )
        self._convert(trainer, pl_module, self.factories)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Converts layers that ``configure_model`` made after ``setup``, and reports."""
        if trainer.world_size == 1:
            return
        for conversion in self._conversions:
            self._refuse_other_conversions(pl_module, conversion)
        # A factory makes new parameters, and it is too late for those: optimizer and wrap hold the old ones.
        late = [name for name, module in pl_module.named_modules() if type(module) in self.factories]
        if late:
            raise DDPPluginError(
                explain(
                    "layers with a factory to exist before configure_model",
                    f"{late}, made in configure_model",
                    "Make them in __init__ or setup, or call the factory yourself",
                )
            )
        self._convert(trainer, pl_module, {})
        self._report()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warns once where gradients are accumulated."""
        if trainer.accumulate_grad_batches > 1 and not self._warned_of_accumulation:
            if any(isinstance(module, _BATCH_NORMS) for module in pl_module.modules()):
                rank_zero_warn(
                    f"ConvertSyncBatchNorm: gradients are accumulated over {trainer.accumulate_grad_batches} "
                    "micro-batches, and BatchNorm statistics are those of one micro-batch over all ranks, not of the "
                    "optimizer step's whole batch. Use more processes or larger micro-batches, freeze the statistics, "
                    "or use GroupNorm, if that matters."
                )
            self._warned_of_accumulation = True

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Gives the layers back."""
        self._revert()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Gives the layers back; Lightning calls no ``teardown`` after an exception."""
        self._revert()

    def _convert(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        factories: Mapping[type[nn.Module], Callable[[nn.Module], nn.Module]],
    ) -> None:
        self._conversions.append(
            convert_batchnorm(
                pl_module,
                process_group=self._process_group(trainer.world_size),
                factories=factories,
                fused=trainer.strategy.root_device.type == "cuda",
            )
        )

    def _process_group(self, world_size: int) -> dist.ProcessGroup | None:
        if self.num_ranks is None or self.num_ranks == world_size:
            return None
        if world_size % self.num_ranks:
            raise ValueError(
                explain(
                    "num_ranks to divide the world size",
                    f"num_ranks={self.num_ranks} and {world_size} processes",
                    "Choose a divisor, or leave num_ranks out",
                )
            )
        world = dist.group.WORLD
        if self._group is None or self._group[0] is not world:
            group, _ = dist.new_subgroups(self.num_ranks)  # type: ignore[no-untyped-call]
            self._group = (world, group)
        return self._group[1]

    def _refuse_other_conversions(self, pl_module: pl.LightningModule, conversion: Conversion) -> None:
        present = {id(module) for module in pl_module.modules()}
        replacements = {id(original): replacement for _, _, original, replacement in conversion.replaced}
        for name, module in conversion.converted.items():
            if id(replacements.get(id(module), module)) not in present:
                raise DDPPluginError(
                    explain(
                        f"layer {name!r} to be the one that ConvertSyncBatchNorm converted",
                        "another object in its place",
                        "Remove Trainer(sync_batchnorm=True), or whatever else replaces layers in configure_model",
                    )
                )

    def _report(self) -> None:
        already = [name for conversion in self._conversions[:1] for name in conversion.already]
        skipped = {name: reason for conversion in self._conversions for name, reason in conversion.skipped.items()}
        for name, reason in skipped.items():
            rank_zero_warn(
                f"ConvertSyncBatchNorm: layer {name!r} was skipped and keeps the statistics of its own rank: {reason}."
            )
        if self.converted:
            names = self.converted if len(self.converted) <= 6 else [*self.converted[:3], "…", self.converted[-1]]
            scope = "all" if self.num_ranks is None else f"every {self.num_ranks}"
            rank_zero_info(
                f"ConvertSyncBatchNorm: {len(self.converted)} BatchNorm layers use the statistics of {scope} "
                f"processes: {', '.join(names)}."
            )
        elif not skipped and not already:
            rank_zero_warn("ConvertSyncBatchNorm: the model has no BatchNorm layer, so nothing was converted.")

    def _revert(self) -> None:
        for conversion in reversed(self._conversions):
            conversion.revert()
        self._conversions.clear()
