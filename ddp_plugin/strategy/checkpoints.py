"""What a checkpoint says of its run, and how a run that loads it differs, in names."""

from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

import ddp_plugin
from ddp_plugin.checkpoints.mismatch import (
    OptimizerRecord,
    RunRecord,
    model_differences,
    optimizer_differences,
    run_differences,
)
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.strategy.checkpoint_io import AgreedFiles
from ddp_plugin.strategy.logical import LogicalShards

__all__ = ["ExplainedCheckpoints"]


class ExplainedCheckpoints(LogicalShards, AgreedFiles):
    """A checkpoint knows its run; where model or optimizers do not fit it, the error names what differs.

    Nothing is changed then: the model has the values that it had, and no optimizer has taken any state.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint; one of a training run also says what run it was.

        Collectives:
            See :class:`~ddp_plugin.strategy.wrapping.FollowingWrap` and
            :class:`~ddp_plugin.strategy.checkpoint_io.AgreedFiles`.
        """
        if "optimizer_states" in checkpoint:
            checkpoint.setdefault("ddp_plugin", {})["run"] = self._run_record().state()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads a checkpoint, and says in what this run goes on otherwise than the one that wrote it.

        Collectives:
            See :class:`~ddp_plugin.strategy.checkpoint_io.AgreedFiles`.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module, saved = self.lightning_module, _saved_run(checkpoint)
        continues = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if continues and saved is not None and (differences := run_differences(saved, self._run_record())):
            rank_zero_info(f"CustomDDPStrategy: the checkpoint's run had {'; '.join(differences)}.")
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loads the model's weights, all or none, in the precision in which they will be trained.

        Lightning converts the module later, so that half of the digits of a double would be lost on the way.

        Raises:
            DDPPluginError: they do not fit; names and shapes are in the message, and the model is as it was.

        Collectives:
            None.
        """
        module = self.lightning_module
        assert module is not None
        self.precision_plugin.convert_module(module)
        before = module.state_dict()
        differences = model_differences(_shapes(checkpoint["state_dict"]), _shapes(before), strict=strict)
        if not differences:
            super().load_model_state_dict(checkpoint, strict)
            return
        kept = {name: value.detach().clone() for name, value in before.items() if _has_shape(value)}
        try:
            super().load_model_state_dict(checkpoint, strict)  # a module may know how to take other names
        except RuntimeError as error:
            now = module.state_dict()
            with torch.no_grad():
                for name, value in kept.items():
                    now[name].copy_(value)
            raise DDPPluginError(
                explain(
                    f"a checkpoint of the model that is loaded, {type(module).__name__}",
                    f"one that differs: {'; '.join(differences)}",
                    "Build the model that wrote it, rename its tensors in on_load_checkpoint, or set "
                    "strict_loading=False in the module if missing and unexpected tensors are meant",
                )
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states, all or none.

        Raises:
            DDPPluginError: the checkpoint's are others; what differs is named, and no optimizer has changed.

        Collectives:
            None.
        """
        saved, states = _saved_run(checkpoint), checkpoint["optimizer_states"]
        records = None if saved is None else saved.optimizers
        own = self._optimizer_records()
        if differences := optimizer_differences(states, records, own):
            raise DDPPluginError(
                explain(
                    f"a checkpoint of the optimizers that are loaded, {', '.join(one.kind for one in own) or 'none'}",
                    f"one with {'; '.join(differences)}",
                    "Configure the optimizers that wrote it, or load its weights alone and begin a new run: "
                    "module.load_state_dict(torch.load(path)['state_dict'])",
                )
            )
        super().load_optimizer_state_dict(checkpoint)

    def _run_record(self) -> RunRecord:
        hook = self._ddp_comm_hook
        own_hook = None if hook is None else f"ddp_comm_hook={getattr(hook, '__qualname__', type(hook).__name__)}"
        return RunRecord(
            world_size=self.world_size,
            comm_hook=own_hook if self.comm_hook is None else str(self.comm_hook),
            logical_shards=self.logical_shards,
            optimizers=self._optimizer_records(),
            versions={
                "ddp_plugin": ddp_plugin.__version__,
                "torch": str(torch.__version__),
                "lightning": metadata.version("lightning"),
            },
        )

    def _optimizer_records(self) -> tuple[OptimizerRecord, ...]:
        module = self.lightning_module
        named: Iterable[tuple[str, Tensor]] = () if module is None else module.named_parameters()
        names = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in named}  # compiled or not
        return tuple(_record(_bare(optimizer), names) for optimizer in self.optimizers)


def _bare(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _record(optimizer: Optimizer, names: Mapping[int, str]) -> OptimizerRecord:
    groups = tuple(
        tuple(
            (names.get(id(parameter), "a tensor beside the model"), tuple(parameter.shape))
            for parameter in group["params"]
        )
        for group in optimizer.param_groups
    )
    return OptimizerRecord(type(optimizer).__name__, tuple(optimizer.defaults), groups)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    return {name: tuple(value.shape) if _has_shape(value) else None for name, value in state.items()}


def _has_shape(value: object) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def _saved_run(checkpoint: Mapping[str, Any]) -> RunRecord | None:
    state = checkpoint.get("ddp_plugin", {}).get("run")
    return None if state is None else RunRecord.from_state(state)
