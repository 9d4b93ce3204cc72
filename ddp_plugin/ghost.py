"""A step that leaves no trace.

Where ranks have unequal numbers of evaluation batches, the shorter ones repeat a batch so that collectives inside a
step match. What such a *ghost step* does to the module is taken back afterwards: torchmetrics states, and the module's
own plain attributes (the list that collects outputs, a counter, a running tensor).
"""

from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from ddp_plugin import _compat

__all__ = ["ModuleSnapshot", "metrics_of"]


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns every torchmetrics object inside a module, each once."""
    return [child for child in module.modules() if isinstance(child, Metric)]


class ModuleSnapshot:
    """What a module and its metrics hold now; :meth:`restore` puts it back.

    Covered are the states of all torchmetrics objects inside the module, and of the module itself (not of its
    children): numbers, strings and tensors among its attributes, its buffers, and the contents of its lists, dicts and
    sets, one level deep.

    Args:
        module: the module.
        metrics: further metrics to cover.
        ignore: names of attributes that belong to the framework.
    """

    def __init__(self, module: nn.Module, metrics: list[Metric], ignore: frozenset[str] = frozenset()) -> None:
        self._module = module
        self._metrics = [(metric, _compat.metric_snapshot(metric)) for metric in {*metrics_of(module), *metrics}]
        self._names = {name for name in vars(module) if name not in ignore}
        self._ignore = ignore
        self._plain: dict[str, Any] = {}
        self._contents: list[tuple[Any, Any]] = []
        for name in self._names:
            value = vars(module)[name]
            if isinstance(value, (bool, int, float, str, type(None))):
                self._plain[name] = value
            elif isinstance(value, (list, dict, set)):
                self._contents.append((value, value.copy()))
            if isinstance(value, (torch.Tensor, list, dict, set)):
                self._plain[name] = value
        tensors = [value for value in self._plain.values() if isinstance(value, torch.Tensor)]
        buffers = list(module.buffers(recurse=False))
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*tensors, *buffers)]

    def restore(self) -> None:
        """Puts everything back; an attribute that is new since then is removed."""
        for metric, snapshot in self._metrics:
            _compat.restore_metric(metric, snapshot)
        attributes = vars(self._module)
        for name in [name for name in attributes if name not in self._names and name not in self._ignore]:
            del attributes[name]
        attributes.update(self._plain)
        for container, contents in self._contents:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
