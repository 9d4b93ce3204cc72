"""What one rank says about itself, as plain words that can be compared, sent and written down."""

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from ddp_plugin.preflight.addresses import gloo_address, machine_identity

__all__ = [
    "CALLBACK",
    "DEVICE",
    "ENVIRONMENT",
    "LAUNCHER",
    "OPTIMIZER",
    "OPTION",
    "PLACE",
    "SETTING",
    "VERSION",
    "WORLD",
    "Facts",
    "device_facts",
    "digest",
    "environment_settings",
    "launcher_variables",
    "model_entries",
    "optimizer_facts",
    "shown",
    "take_facts",
    "versions",
]

PLACE = "place"
WORLD = "world"
LAUNCHER = "launcher"
VERSION = "version"
DEVICE = "device"
ENVIRONMENT = "environment"
SETTING = "setting"
CALLBACK = "callback"
OPTION = "option"
OPTIMIZER = "optimizer"

_LAUNCHER_NAMES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
)
_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "SLURM_")
_ENVIRONMENT_NAMES = frozenset(("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONHASHSEED"))
_ENVIRONMENT_PREFIXES = ("NCCL_", "TORCH_", "GLOO_")
_OF_A_LOG = ("TORCH_TRACE", "TORCH_LOGS", "NCCL_DEBUG")
_OF_A_MACHINE = ("_IFNAME", "_HCA", "_FILE", "_DIR", "_PATH", "_HOME", "_PREFIX", "_ADDR", "_HOST_ID", "_HOSTID")
_PACKAGES = ("torch", "lightning", "ddp_plugin", "torchmetrics", "numpy")
_MOST_CHARACTERS = 160


@dataclass(frozen=True)
class Facts:
    """What a rank says about itself.

    Attributes:
        rank: the rank that it takes.
        hostname: of its machine.
        pid: of its process.
        values: names and values by kind; the kinds are constants of this module, and the words are made by
            :func:`shown`, so that equal things are equal words in every process.
    """

    rank: int
    hostname: str
    pid: int
    values: dict[str, dict[str, str]] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the facts as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        """Reads what :meth:`to_json` has written."""
        return cls(**json.loads(text))

    @property
    def process(self) -> str:
        """Which process it is, in words."""
        return f"process {self.pid} on {self.hostname}"


def take_facts(rank: int, values: Mapping[str, Mapping[str, str]]) -> Facts:
    """Returns this process's facts: what is given, its place, the launcher's variables, versions and settings.

    Args:
        rank: the rank that it takes.
        values: further names and values by kind.
    """
    address = gloo_address(os.environ)
    own = {
        PLACE: {"machine": machine_identity()} | ({} if address is None else {"address": address}),
        LAUNCHER: launcher_variables(os.environ),
        VERSION: versions(),
        ENVIRONMENT: environment_settings(os.environ),
    }
    merged = {kind: own.get(kind, {}) | dict(values.get(kind, {})) for kind in dict.fromkeys((*own, *values))}
    return Facts(rank, socket.gethostname(), os.getpid(), merged)


def launcher_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables by which launchers tell a process its place."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name in _LAUNCHER_NAMES or name.startswith(_LAUNCHER_PREFIXES)
    }


def environment_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that change what torch, NCCL and gloo do and say nothing about one machine alone.

    Interfaces, files and folders may well have other names on another machine, and one rank may tell more than the
    others: these are left out.
    """
    return {
        name: value
        for name, value in sorted(variables.items())
        if (name in _ENVIRONMENT_NAMES or name.startswith(_ENVIRONMENT_PREFIXES))
        and not name.endswith(_OF_A_MACHINE)
        and not name.startswith(_OF_A_LOG)
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python, of the packages that a training stands on, and of CUDA and NCCL."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = getattr(sys.modules.get(package), "__version__", None) or version(package)
        except PackageNotFoundError:  # run from a checkout, or another name of the distribution
            continue
    if torch.version.cuda is not None:
        found["CUDA"] = torch.version.cuda
        if torch.cuda.is_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def device_facts(device: torch.device) -> tuple[dict[str, str], dict[str, str]]:
    """Returns where a device is, which differs between ranks, and what it is, which should not.

    Args:
        device: this process's own.

    Returns:
        The values of :data:`PLACE` and those of :data:`DEVICE`.
    """
    place, kind = {"device": str(device)}, {"device type": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind["device"] = properties.name
        if (identity := getattr(properties, "uuid", None)) is not None:
            place["gpu"] = str(identity)
    return place, kind


def shown(value: Any) -> str:
    """Puts a value into words that are the same in every process: no addresses, functions and objects by name.

    A long text is cut, and ends in a digest of the whole.
    """
    try:
        text = _words(value)
    except Exception:  # a value of anybody's: it may ask for what is missing, or hold itself
        text = f"a {type(value).__qualname__} that cannot be shown"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({digest([text])[:8]})"


def _words(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, PurePath, timedelta)):
        return str(value)
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 and value.device.type == "cpu" else _tensor_words(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_words(key)}: {_words(inner)}' for key, inner in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_words, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(_words, value)))}}}"
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{f.name}={_words(getattr(value, f.name))}" for f in fields(value) if f.repr)
        return f"{type(value).__qualname__}({inner})"
    if callable(function := getattr(value, "func", None)) and hasattr(value, "keywords"):  # a partial
        return f"{_words(function)}{_words([value.args, value.keywords])}"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def digest(lines: Iterable[str]) -> str:
    """Returns 32 characters that stand for lines of text; unequal ones give unequal digests but for chance."""
    state = hashlib.blake2b(digest_size=16)
    for line in lines:
        state.update(line.encode() + b"\n")
    return state.hexdigest()


def model_entries(module: torch.nn.Module, ignored: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Lists what has to be the same in the models of all ranks, in the model's order.

    Args:
        module: the model, not its wrap.
        ignored: names of parameters and buffers that no wrap looks after.

    Returns:
        ``(name, description)`` of each parameter and buffer; a description has kind, dtype, shape and layout. Whether a
        parameter is trainable is compared elsewhere.
    """
    left_out = frozenset(ignored)
    parameters = [(name, "parameter", value) for name, value in module.named_parameters()]
    buffers = [(name, "buffer", value) for name, value in module.named_buffers()]
    return [
        (name, f"{kind} {_tensor_words(value)}") for name, kind, value in parameters + buffers if name not in left_out
    ]


def _tensor_words(value: Tensor) -> str:
    if torch.nn.parameter.is_lazy(value):
        return "without a shape yet"
    layout = "" if value.layout is torch.strided else f" {value.layout}"
    return f"{value.dtype} {list(value.shape)}{layout}".replace("torch.", "")


def optimizer_facts(
    optimizers: Sequence[torch.optim.Optimizer], module: torch.nn.Module, *, with_settings: bool = True
) -> dict[str, str]:
    """Returns the optimizers' kinds, their groups' settings and which parameters each group holds.

    Args:
        optimizers: those of the model.
        module: the model; gives parameters their names.
        with_settings: whether learning rates and the like have to be the same too.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found = {"optimizers": shown([type(optimizer).__qualname__ for optimizer in optimizers])}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            where = f"of group {number} of {type(optimizer).__qualname__} {index}"
            held = [names.get(id(parameter), "a parameter outside the model") for parameter in group["params"]]
            found[f"parameters {where}"] = shown(held)
            for key in sorted(group.keys() - {"params", "param_names"}) if with_settings else ():
                found[f"{key} {where}"] = shown(group[key])
    return found
