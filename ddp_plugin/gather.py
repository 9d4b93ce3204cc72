"""Everything from every rank, whatever its shape: gathers that do not ask for equal sizes.

``all_gather`` wants the same shape everywhere and, over gloo, answers unequal shapes with uninitialised memory. Here
sizes travel first, in one small message. ``group=None`` means that this process is alone.

That first message has the form of those of :mod:`ddp_plugin.matching`, two float64 of which the first is a mark, so
that a rank which is about to do something else there is told so in words, and does not bring the process down.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin.errors import DDPPluginError, explain

__all__ = ["broadcast_object", "gather_objects", "gather_objects_to", "gather_tensors"]

_MARK = 0.0  # of a gather; whatever ddp_plugin.matching exchanges has another
_ALIGNMENT_BYTES = 16  # of each tensor inside the payload: a view as complex128 needs it


def gather_objects(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns every rank's value, in rank order, on every rank.

    Args:
        value: anything that pickles.
        group: a group with a CPU backend, such as the control group.

    Raises:
        DDPPluginError: on all ranks, where some of them came for another purpose, which is named.

    Collectives:
        Two all-gathers (length, bytes) on every rank of the group.
    """
    if group is None:
        return [value]
    data = pickle.dumps(value)
    header = torch.tensor([_MARK, len(data)], dtype=torch.float64)
    headers = [torch.empty_like(header) for _ in range(group.size())]
    dist.all_gather(headers, header, group=group)
    if any(mark != _MARK for mark, _ in torch.stack(headers).tolist()):
        said = gather_objects("nothing of that kind", group)  # the others say what they came for
        raise DDPPluginError(
            explain(
                "all ranks to do the same at the same time",
                "; ".join(f"{text} on rank {rank}" for rank, text in enumerate(said)),
                "Log with sync_dist=True on every rank, outside `if rank == 0`, or on none",
            )
        )
    sizes_bytes = [int(size) for _, size in torch.stack(headers).tolist()]
    payload = torch.zeros(max(sizes_bytes), dtype=torch.uint8)
    payload[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(payload) for _ in sizes_bytes]
    dist.all_gather(parts, payload, group=group)
    return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes_bytes, strict=True)]


def gather_objects_to(value: Any, group: dist.ProcessGroup | None, destination: int | None) -> list[Any]:
    """Returns every rank's value, in rank order, on the destination alone; an empty list elsewhere.

    Args:
        value: anything that pickles.
        group: a group with a CPU backend.
        destination: the rank that receives; ``None`` means every rank.

    Collectives:
        An all-gather of lengths and a gather (or all-gather) of bytes on every rank of the group.
    """
    if destination is None or group is None:
        return gather_objects(value, group)
    receives = dist.get_rank(group) == destination
    values: list[Any] = [None] * group.size() if receives else []
    dist.gather_object(value, values if receives else None, dst=dist.get_global_rank(group, destination), group=group)
    return values


def broadcast_object(value: Any, group: dist.ProcessGroup | None, source: int = 0) -> Any:
    """Returns one rank's value on every rank.

    Args:
        value: anything that pickles; what other ranks pass is ignored.
        group: a group with a CPU backend.
        source: the rank in the group whose value it is.

    Collectives:
        Two broadcasts (length, bytes) on every rank of the group.
    """
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, source), group=group)
    return box[0]


def gather_tensors(
    tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, control_group: dist.ProcessGroup | None
) -> list[list[torch.Tensor]]:
    """Returns every rank's tensors, in rank order, on every rank; numbers, shapes and dtypes may all differ.

    Args:
        tensors: any number of dense tensors on one device, also none.
        group: carries the payload when it lies on an accelerator.
        control_group: a gloo group; carries shapes always and the payload when it lies on the CPU.

    Returns:
        ``[tensors of rank 0, tensors of rank 1, ...]``, on the device of ``tensors``. Bits are kept, NaN payloads too.

    Collectives:
        One object gather on ``control_group`` and one all-gather of bytes, on every rank.
    """
    if control_group is None:
        return [list(tensors)]
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    padded_bytes = [-(-part.numel() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for part in parts]
    layout = [(tuple(tensor.shape), tensor.dtype, part.numel()) for tensor, part in zip(tensors, parts, strict=True)]
    device = tensors[0].device if tensors else torch.device("cpu")
    layouts = gather_objects((layout, sum(padded_bytes), device.type), control_group)

    on_accelerator = any(device_type != "cpu" for _, _, device_type in layouts)
    if on_accelerator and device.type == "cpu":  # this rank has nothing to send, or has it on the CPU
        device = torch.device(next(str(device_type) for _, _, device_type in layouts if device_type != "cpu"))
    payload = torch.zeros(max(size for _, size, _ in layouts), dtype=torch.uint8, device=device)
    offset = 0
    for part, size in zip(parts, padded_bytes, strict=True):
        payload[offset : offset + part.numel()].copy_(part)
        offset += size
    received = [torch.empty_like(payload) for _ in layouts]
    if payload.numel():
        dist.all_gather(received, payload, group=group if on_accelerator else control_group)
    return [_unpack(buffer, rank_layout) for buffer, (rank_layout, _, _) in zip(received, layouts, strict=True)]


def _unpack(payload: torch.Tensor, layout: list[tuple[tuple[int, ...], torch.dtype, int]]) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for shape, dtype, size in layout:
        tensors.append(payload[offset : offset + size].clone().view(dtype).reshape(shape))
        offset += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return tensors
