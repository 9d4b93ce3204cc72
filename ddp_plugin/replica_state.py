"""What has to be the same on all replicas of a training: parameters, buffers, optimizers, as a list of entries."""

import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ddp_plugin import _compat
from ddp_plugin.batchnorm.layers import SharesGroup
from ddp_plugin.fingerprint import Entry
from ddp_plugin.ghost import metrics_of

__all__ = [
    "BUFFER",
    "HYPERPARAMETER",
    "KINDS",
    "OPTIMIZER_STATE",
    "PARAMETER",
    "PROGRESS",
    "TRAINABLE",
    "replica_state",
]

PROGRESS = "progress"
TRAINABLE = "trainable set"
HYPERPARAMETER = "hyperparameter"
PARAMETER = "parameter"
BUFFER = "buffer"
OPTIMIZER_STATE = "optimizer state"
KINDS = (PROGRESS, TRAINABLE, HYPERPARAMETER, PARAMETER, BUFFER, OPTIMIZER_STATE)
"""Causes before effects: a learning rate that differs makes parameters differ, not the other way round."""


def replica_state(
    module: nn.Module, optimizers: Sequence[Optimizer], progress: dict[str, int], ignore: Sequence[str] = ()
) -> list[Entry]:
    """Lists what has to be the same on all ranks; parameters and buffers in the order of the module.

    Left out are the statistics of layers that normalise by their own rank's batch (BatchNorm and InstanceNorm unless
    synchronised), everything inside torchmetrics objects, the states of a ``ZeroRedundancyOptimizer``, which each rank
    holds a part of, and the loss that ``LBFGS`` remembers, which is the rank's own.

    Args:
        module: the model, not its DDP wrapper.
        optimizers: its optimizers.
        progress: counters such as the global step.
        ignore: patterns as in :mod:`fnmatch`, against the names of parameters, buffers, optimizer states (such as
            ``"exp_avg"``), hyperparameters and counters; with a parameter go its optimizer states and whether it is
            trainable.
    """

    def kept(name: str) -> bool:
        return not any(fnmatchcase(name, pattern) for pattern in ignore)

    entries = [Entry(PROGRESS, name, value) for name, value in progress.items() if kept(name)]
    parameters = {name: value for name, value in module.named_parameters() if kept(name)}
    entries += [Entry(TRAINABLE, name, value.requires_grad) for name, value in parameters.items()]
    entries += [Entry(PARAMETER, name, value) for name, value in parameters.items()]
    entries += [Entry(BUFFER, name, value) for name, value in _buffers(module) if kept(name)]
    names = {id(value): name for name, value in module.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        entries += _optimizer_entries(optimizer, f"{type(optimizer).__name__} {index}", names, kept)
    return entries


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    local = {id(child) for metric in metrics_of(module) for child in metric.modules()}
    local |= {
        id(child)
        for child in module.modules()
        if _compat.keeps_batch_statistics(child) and not isinstance(child, (nn.SyncBatchNorm, SharesGroup))
    }
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        if id(child) in local:
            continue
        for name, value in child.named_buffers(recurse=False):
            if id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix}.{name}" if prefix else name, value


def _optimizer_entries(
    optimizer: Optimizer, label: str, names: dict[int, str], kept: Callable[[str], bool]
) -> Iterator[Entry]:
    is_sharded = _is_sharded(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        where = f"of group {number} of {label}"
        for key in sorted(group.keys() - {"params"}):
            if kept(key):
                yield from _leaves(HYPERPARAMETER, key, where, group, key)
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"parameter {index} of group {number}")
            if not kept(name) or is_sharded or parameter not in optimizer.state:
                continue
            state = optimizer.state[parameter]
            for key in sorted(state, key=str):
                if kept(str(key)) and not (isinstance(optimizer, LBFGS) and key == "prev_loss"):
                    yield from _leaves(OPTIMIZER_STATE, str(key), f"of {name} in {label}", state, key)


def _is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank holds a part of the states; torch's class is not imported for this, because that warns."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def _leaves(kind: str, path: str, where: str, owner: Any, key: Any) -> Iterator[Entry]:
    """Walks dicts and lists down to tensors and plain values; a tuple is one value unless it holds tensors."""
    value = owner[key]
    if isinstance(value, dict):
        for inner in sorted(value, key=str):
            yield from _leaves(kind, f"{path}.{inner}", where, value, inner)
    elif isinstance(value, list) or (isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value)):
        for index in range(len(value)):
            yield from _leaves(kind, f"{path}[{index}]", where, value, index)
    else:
        yield Entry(kind, f"{path} {where}", value, owner, key)
