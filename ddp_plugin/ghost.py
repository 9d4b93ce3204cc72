"""A step that leaves no trace.

Where ranks have unequal numbers of evaluation batches, the shorter ones repeat a batch so that collectives inside a
step match. What such a *ghost step* does to the module is taken back afterwards: torchmetrics states, and the module's
own plain attributes (the list that collects outputs, a counter, a running tensor).
"""

from collections import deque
from typing import Any

import numpy as np
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

    Covered are all buffers; the states and plain attributes of all torchmetrics objects inside the module, its
    containers included; and of the module itself (not of its children) every attribute: what it is bound to, and the
    contents of tensors, arrays, lists, dicts, sets, deques and tuples of these, to any depth. What other objects hold
    inside is not.

    Args:
        module: the module.
        metrics: further metrics to cover.
        ignore: names of attributes that belong to the framework.
    """

    def __init__(self, module: nn.Module, metrics: list[Metric], ignore: frozenset[str] = frozenset()) -> None:
        self._ignore = ignore
        self._bindings: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._metrics: list[tuple[Metric, dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        self._bind(module)
        for value in (*metrics_of(module), *metrics, *module.buffers()):
            self._remember(value)

    def _bind(self, owner: nn.Module) -> None:
        kept = {name: value for name, value in vars(owner).items() if name not in self._ignore}
        self._bindings.append((vars(owner), kept))
        for value in kept.values():
            self._remember(value)

    def _remember(self, value: Any) -> None:
        if isinstance(value, _SCALARS) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Metric):
            self._metrics.append((value, _compat.metric_snapshot(value)))
            own = {name: item for name, item in vars(value).items() if isinstance(item, _SCALARS) and name[0] != "_"}
            self._bindings.append((vars(value), own))
        elif isinstance(value, torch.Tensor):
            self._tensors.append((value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.copy()))
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self._contents.append((value, value.copy()))
            for item in value.values() if isinstance(value, dict) else value:
                self._remember(item)

    def restore(self) -> None:
        """Puts everything back; an attribute of the module that is new since then is removed."""
        (attributes, kept), *_ = self._bindings
        for name in [name for name in attributes if name not in kept and name not in self._ignore]:
            del attributes[name]
        for bound, values in self._bindings:
            bound.update(values)
        for metric, snapshot in self._metrics:
            _compat.restore_metric(metric, snapshot)
        for container, contents in self._contents:
            container.clear()
            if isinstance(container, (list, deque)):
                container.extend(contents)
            else:
                container.update(contents)
        for array, copied in self._arrays:
            array[...] = copied
        for tensor, value in self._tensors:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(value)
