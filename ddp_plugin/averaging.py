"""Replicas that have parted become one again: means over the ranks of tensors, and of what an optimizer remembers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_plugin import _compat
from ddp_plugin.gather import broadcast_object, gather_objects

__all__ = ["average", "average_optimizer", "chunks", "flatten", "take_from_first_rank", "unflatten"]

_CHUNK_BYTES = 32 * 2**20  # communicated at a time: large enough for the wire, small beside a model


def chunks(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups tensors of one dtype and device, in their order, up to 32 MiB; a larger one stands alone.

    Args:
        tensors: dense, of any shapes; empty ones belong to no group.

    Returns:
        Positions in ``tensors``, group by group.
    """
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        key = (tensor.dtype, tensor.device)
        group, size_bytes = open_groups.get(key, ([], 0))
        if not group or size_bytes + tensor.nbytes > _CHUNK_BYTES:
            group, size_bytes = [], 0
            groups.append(group)
        group.append(position)
        open_groups[key] = (group, size_bytes + tensor.nbytes)
    return groups


def flatten(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Copies tensors into a flat one, shape ``(num_elements,)``; complex ones as pairs of real numbers.

    Args:
        tensors: of one dtype.
        dtype: of the flat one; their own when ``None``.
    """
    return torch.cat([_real(tensor.detach()).reshape(-1).to(dtype) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copies a flat tensor back into the tensors, in place."""
    reals = [_real(tensor.detach()) for tensor in tensors]
    for real, part in zip(reals, torch.split(flat, [real.numel() for real in reals]), strict=True):
        real.copy_(part.view(real.shape))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def average(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces each tensor by its mean over the ranks, in place, the same bits on all of them.

    Sums are in fp32 at least; those of single numbers are in fp64, so that a count that is equal everywhere stays it.

    Args:
        tensors: floating or complex, with the same shapes and dtypes on all ranks.
        group: a group that serves their device.

    Collectives:
        One all-reduce for each 32 MiB of a dtype, and one for the single numbers, on every rank of the group.
    """
    if group.size() == 1:
        return
    for is_number in (True, False):
        part = [tensor for tensor in tensors if (tensor.numel() == 1) == is_number]
        for positions in chunks(part):
            chunk = [part[position] for position in positions]
            dtype = torch.promote_types(_real(chunk[0]).dtype, torch.float64 if is_number else torch.float32)
            flat = flatten(chunk, dtype)
            dist.all_reduce(flat, group=group)
            unflatten(flat.div_(group.size()), chunk)


@torch.no_grad()
def take_from_first_rank(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Replaces each tensor by the one of the group's first rank, in place.

    Args:
        tensors: of any dtypes, with the same shapes on all ranks.
        group: a group that serves their device.

    Collectives:
        One broadcast for each 32 MiB of a dtype on every rank of the group.
    """
    if group.size() == 1:
        return
    source = dist.get_global_rank(group, 0)
    for positions in chunks(tensors):
        chunk = [tensors[position] for position in positions]
        flat = flatten(chunk)
        dist.broadcast(flat, source, group=group)
        unflatten(flat, chunk)


@torch.no_grad()
def average_optimizer(optimizer: Optimizer, group: dist.ProcessGroup, control_group: dist.ProcessGroup) -> None:
    """Makes what an optimizer remembers of its parameters the same on all ranks, in place.

    Floating tensors become their mean over the ranks that have them; everything else, such as counts in integers or
    lists of tensors, becomes that of the first rank that has it.

    Args:
        optimizer: the same on all ranks, with the same parameters in the same order; it may have stepped some of them
            on some ranks only.
        group: the ranks.
        control_group: the same ranks, a gloo group; carries what lies on the CPU.

    Collectives:
        On every rank: one object gather on ``control_group``, one object broadcast there for each rank that is the
        first to have something that is no mean, and those of :func:`average`.
    """
    parameters = [parameter for settings in optimizer.param_groups for parameter in settings["params"]]
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    of_ranks = gather_objects([{key: _kind(value) for key, value in state.items()} for state in states], control_group)
    means: list[Tensor] = []
    gaps: list[tuple[Tensor, float]] = []  # means in which some ranks had no share, and how much too small they are
    taken: dict[int, list[tuple[int, Any]]] = {}  # by rank: what all others take from it
    for index, parameter in enumerate(parameters):
        of_parameter = [kinds[index] for kinds in of_ranks]
        for key in dict.fromkeys(key for kinds in of_parameter for key in kinds):
            holders = [rank for rank, kinds in enumerate(of_parameter) if key in kinds]
            kind = of_parameter[holders[0]][key]
            if kind is None or any(of_parameter[rank][key] != kind for rank in holders):
                taken.setdefault(holders[0], []).append((index, key))
                continue
            state = optimizer.state[parameter]
            if key not in state:
                shape, dtype, is_on_cpu = kind
                state[key] = torch.zeros(shape, dtype=dtype, device="cpu" if is_on_cpu else parameter.device)
            means.append(state[key])
            if len(holders) < len(of_parameter):
                gaps.append((state[key], len(of_parameter) / len(holders)))
    served = _compat.served_device_types(group)
    average([mean for mean in means if mean.device.type in served], group)
    average([mean for mean in means if mean.device.type not in served], control_group)
    for mean, factor in gaps:
        mean.mul_(factor)
    for rank, entries in sorted(taken.items()):
        values = None
        if control_group.rank() == rank:
            values = [_packed(states[index][key]) for index, key in entries]
        values = broadcast_object(values, control_group, rank)
        if control_group.rank() != rank:
            for (index, key), value in zip(entries, values, strict=True):
                optimizer.state[parameters[index]][key] = _unpacked(value, parameters[index].device)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype, bool] | None:
    """Returns shape, dtype and whether it is on the CPU, of a floating tensor; ``None`` for everything else."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        return tuple(value.shape), value.dtype, value.device.type == "cpu"
    return None


@dataclass(frozen=True)
class _OnAccelerator:
    """A tensor that lay on the sender's accelerator, on the way to another."""

    value: Tensor


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.device.type == "cpu" else _OnAccelerator(value.cpu())
    if isinstance(value, (list, tuple)):
        return type(value)(_packed(item) for item in value)
    return value


def _unpacked(value: Any, device: torch.device) -> Any:
    if isinstance(value, _OnAccelerator):
        return value.value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_unpacked(item, device) for item in value)
    return value
