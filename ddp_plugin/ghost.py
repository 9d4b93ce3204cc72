"""A step that leaves no trace.

Where ranks have unequal numbers of evaluation batches, the shorter ones repeat a batch so that collectives inside a
step match. What such a *ghost step* does to the module is taken back afterwards: torchmetrics states, and the module's
own plain attributes (the list that collects outputs, a counter, a running tensor).
"""

from collections import deque
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from ddp_plugin import _compat

__all__ = ["ModuleSnapshot", "metrics_of"]

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set, deque)


def metrics_of(module: nn.Module) -> list[Metric]:
    """Returns every torchmetrics object inside a module, each once."""
    return [child for child in module.modules() if isinstance(child, Metric)]


class ModuleSnapshot:
    """What a module and its metrics hold now; :meth:`restore` puts it back.

    Covered are the states of all torchmetrics objects inside the module, and of the module itself (not of its
    children): its buffers, and among its attributes numbers, strings, tensors, and lists, dicts, sets and deques of
    these to any depth.

    Args:
        module: the module.
        metrics: further metrics to cover.
        ignore: names of attributes that belong to the framework.
    """

    def __init__(self, module: nn.Module, metrics: list[Metric], ignore: frozenset[str] = frozenset()) -> None:
        self._module = module
        self._metrics = [(metric, _compat.metric_snapshot(metric)) for metric in {*metrics_of(module), *metrics}]
        self._attributes = {name: value for name, value in vars(module).items() if name not in ignore}
        self._ignore = ignore
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._seen: set[int] = set()
        for value in (*self._attributes.values(), *module.buffers(recurse=False)):
            self._remember(value)

    def _remember(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, _CONTAINERS):
            self._contents.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                if not isinstance(item, _SCALARS):
                    self._remember(item)

    def restore(self) -> None:
        """Puts everything back; an attribute that is new since then is removed."""
        for metric, snapshot in self._metrics:
            _compat.restore_metric(metric, snapshot)
        attributes = vars(self._module)
        for name in [name for name in attributes if name not in self._attributes and name not in self._ignore]:
            del attributes[name]
        covered = (*_SCALARS, *_CONTAINERS, torch.Tensor)
        attributes.update({name: value for name, value in self._attributes.items() if isinstance(value, covered)})
        for container, contents in self._contents:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(contents)
            else:
                container.update(contents)
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
