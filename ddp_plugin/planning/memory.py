"""How much memory one process needs, from the number of parameters alone."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ddp_plugin.errors import explain

__all__ = ["OPTIMIZERS", "PRECISIONS", "STATE", "activation_bytes", "memory_bytes", "state_bytes"]

PRECISIONS = {
    "64-true": (torch.float64, torch.float64),
    "32-true": (torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-true": (torch.float16, torch.float16),
}
"""Lightning's names: the dtype of a weight and its gradient, and the one that matrix products are computed in."""

OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd_momentum": 1, "sgd": 0}
"""Tensors of the weight's shape and dtype that an optimizer keeps for each parameter."""

STATE = ("weights", "gradients", "optimizer")
"""The parts of :func:`memory_bytes` that every process holds whatever its settings."""


def memory_bytes(
    num_parameters: int,
    precision: str,
    optimizer: str,
    *,
    distributed: bool = True,
    gradient_as_bucket_view: bool = False,
    activations: int = 0,
) -> dict[str, int]:
    """Estimates the memory of one process by what it holds; the allocator's slack and CUDA's context come on top.

    Args:
        num_parameters: parameters, all of them trainable.
        precision: key in :data:`PRECISIONS`.
        optimizer: key in :data:`OPTIMIZERS`.
        distributed: whether DDP wraps the model, and so keeps buckets of all gradients.
        gradient_as_bucket_view: whether gradients live in those buckets instead of beside them.
        activations: bytes saved for the backward.

    Returns:
        Bytes by name, in the order in which they come into being.

    Raises:
        ValueError: an unknown precision or optimizer.

    Collectives:
        None.
    """
    for name, value, known in (("precision", precision, [*PRECISIONS]), ("optimizer", optimizer, [*OPTIMIZERS])):
        if value not in known:
            raise ValueError(explain(f"{name} to be one of {known}", repr(value), "Choose one of these"))
    stored, computed = PRECISIONS[precision]
    has_copies, has_buckets = computed != stored, distributed and not gradient_as_bucket_view
    return {
        "weights": num_parameters * stored.itemsize,
        "autocast copies": num_parameters * computed.itemsize * has_copies,  # for the forward and the backward
        "activations": activations,
        "gradients": num_parameters * stored.itemsize,
        "DDP buckets": num_parameters * stored.itemsize * has_buckets,
        "optimizer": num_parameters * stored.itemsize * OPTIMIZERS[optimizer],
    }


def state_bytes(parts: Mapping[str, int]) -> int:
    """Returns what weights, gradients and optimizer take together.

    With Adam and 4-byte weights that is the well-known 16 bytes for each parameter: S. Rajbhandari et al., ZeRO:
    memory optimizations toward training trillion parameter models, 2020, section 3.1, counts them in another order.
    """
    return sum(parts[name] for name in STATE)


def activation_bytes(module: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Counts the bytes that one eager forward saves for its backward; on the meta device nothing is computed for that.

    Args:
        module: the model; its parameters are not counted. Cast it to a mixed precision's lower type to estimate that.
        loss: runs the model on tensors of the same device and returns the loss.

    Returns:
        Bytes of the distinct storages that autograd holds.

    Collectives:
        None.
    """
    own = {id(storage): storage for storage in (parameter.untyped_storage() for parameter in module.parameters())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            saved[id(storage)] = storage  # held, as those in own, so that no other storage can take the same id
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss()
    return sum(storage.nbytes() for storage in saved.values())
