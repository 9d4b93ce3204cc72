"""All-reduce over send and receive: any schedule on real tensors, in place.

A transfer is cut into segments. While one segment is added, the next one is on its way, and two of each transfer are in
flight at most, so the memory beside the message is two segments for each message that a rank adds in a round.
"""

import weakref
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_plugin.collectives.lane import shared_lane
from ddp_plugin.collectives.schedules import RankRound, Schedule, make_schedule, piece_bounds, rank_rounds, span
from ddp_plugin.collectives.traffic import note_round, note_segment
from ddp_plugin.errors import check_count, explain

__all__ = [
    "DEFAULT_SEGMENT_BYTES",
    "all_reduce",
    "butterfly_all_reduce",
    "parameter_server_all_reduce",
    "ring_all_reduce",
    "run",
    "tree_all_reduce",
]

DEFAULT_SEGMENT_BYTES = 1 << 20
"""One MiB, as in gloo's own ring: more than is ever under way on a fast link, and little beside a gradient bucket."""

_TAG = 7391  # apart from messages of the user's own in the same group, where a backend looks at tags
_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    algorithm: str = ...,
    *,
    op: str = ...,
    segment_bytes: int | None = ...,
    async_op: Literal[False] = ...,
    **options: Any,
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    algorithm: str = ...,
    *,
    op: str = ...,
    segment_bytes: int | None = ...,
    async_op: Literal[True],
    **options: Any,
) -> torch.futures.Future[Tensor]: ...


@overload
def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = ...,
    algorithm: str = ...,
    *,
    op: str = ...,
    segment_bytes: int | None = ...,
    async_op: bool,
    **options: Any,
) -> Tensor | torch.futures.Future[Tensor]: ...


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    algorithm: str = "ring",
    *,
    op: str = "sum",
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    async_op: bool = False,
    **options: Any,
) -> Tensor | torch.futures.Future[Tensor]:
    """Adds up the ranks' tensors, in place, by one of the algorithms of this package.

    The result has the same bits on every rank and in every run. It equals ``dist.all_reduce`` exactly for integers, and
    up to the order of additions for floating-point numbers, which are added in their own dtype.

    Args:
        tensor: any shape and strides, of the same number of elements and the same dtype on all ranks: float16,
            bfloat16, float32, float64, uint8, or a signed integer. Integers wrap around, as in torch.
        group: the ranks; the default group when ``None``. An asynchronous call needs a group on which nothing else
            sends tensors meanwhile.
        algorithm: key in :data:`~ddp_plugin.collectives.ALGORITHMS`.
        op: ``"sum"``, or ``"mean"`` for floating-point numbers, which are multiplied by ``1 / n`` first.
        segment_bytes: size of the segments that a message is cut into; ``None`` does not cut.
        async_op: whether to return at once and communicate in the process's one lane, in the order of the calls.
        options: those of the algorithm, such as ``num_servers``.

    Returns:
        ``tensor``; or, for an asynchronous call, a future of it. ``tensor`` must not be touched before that is done.

    Raises:
        ValueError: an unknown algorithm or option, a value out of range, a rank outside the group, or a tensor whose
            elements share memory.
        TypeError: a sparse or quantised tensor, or a dtype that is not named above.

    Collectives:
        Sends and receives between the ranks of the group, all of whom must call this in the same order; over NCCL an
        all-reduce of one element before a group's first use. Over gloo, tensors of an accelerator go through the host.
    """
    rank, world_size = _place_in(group)
    schedule = make_schedule(algorithm, world_size, **options)
    _check_tensor(tensor)
    _check_settings(op, tensor.dtype, segment_bytes)
    lane = shared_lane(tensor.device)
    in_inference = torch.is_inference_mode_enabled()  # the lane has a mode of its own, as every thread

    def exchange() -> Tensor:
        with torch.inference_mode(in_inference), torch.no_grad():
            return exchange_here()

    def exchange_here() -> Tensor:
        flat = tensor.detach().contiguous().view(-1)
        if op == "mean":
            flat.mul_(1.0 / world_size)
        _run(schedule, flat, group, rank, segment_bytes)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.shape))
        return tensor

    if async_op:
        return lane.submit(exchange)
    lane.drain()  # what was submitted before comes first on every rank
    return exchange()


def ring_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: str = "sum",
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    async_op: bool = False,
) -> Tensor | torch.futures.Future[Tensor]:
    """Adds up around a ring; see :func:`all_reduce`, and :func:`~ddp_plugin.collectives.ring` for the algorithm.

    Collectives:
        Those of :func:`all_reduce`.
    """
    return all_reduce(tensor, group, "ring", op=op, segment_bytes=segment_bytes, async_op=async_op)


def tree_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: str = "sum",
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    async_op: bool = False,
) -> Tensor | torch.futures.Future[Tensor]:
    """Adds up along a tree; see :func:`all_reduce`, and :func:`~ddp_plugin.collectives.tree` for the algorithm.

    Collectives:
        Those of :func:`all_reduce`.
    """
    return all_reduce(tensor, group, "tree", op=op, segment_bytes=segment_bytes, async_op=async_op)


def butterfly_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    op: str = "sum",
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    async_op: bool = False,
) -> Tensor | torch.futures.Future[Tensor]:
    """Adds up by halving and doubling; see :func:`all_reduce`, and :func:`~ddp_plugin.collectives.butterfly`.

    Collectives:
        Those of :func:`all_reduce`.
    """
    return all_reduce(tensor, group, "butterfly", op=op, segment_bytes=segment_bytes, async_op=async_op)


def parameter_server_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    num_servers: int = 1,
    op: str = "sum",
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    async_op: bool = False,
) -> Tensor | torch.futures.Future[Tensor]:
    """Adds up at servers; see :func:`all_reduce`, and :func:`~ddp_plugin.collectives.parameter_server`.

    Args:
        tensor: see :func:`all_reduce`.
        group: the same.
        num_servers: how many ranks serve, the first ones of the group.
        op: see :func:`all_reduce`.
        segment_bytes: the same.
        async_op: the same.

    Collectives:
        Those of :func:`all_reduce`.
    """
    return all_reduce(
        tensor,
        group,
        "parameter_server",
        op=op,
        segment_bytes=segment_bytes,
        async_op=async_op,
        num_servers=num_servers,
    )


def run(
    schedule: Schedule,
    flat: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
) -> None:
    """Runs a schedule here and now: the sum over all ranks, in place. For code that is in a lane already.

    Args:
        schedule: an all-reduce for as many ranks as the group has.
        flat: contiguous, one dimension, without gradient; of the same length and dtype on all ranks.
        group: the ranks; the default group when ``None``.
        segment_bytes: size of the segments that a message is cut into; ``None`` does not cut.

    Raises:
        ValueError: another number of ranks, a rank outside the group, ``segment_bytes`` below 1, or another layout.
        TypeError: see :func:`all_reduce`.

    Collectives:
        Those of :func:`all_reduce`; returns when this rank has its result and all it sent is on its way.
    """
    rank, world_size = _place_in(group)
    if schedule.world_size != world_size:
        raise ValueError(
            explain(
                f"a schedule for the {world_size} ranks of the group",
                f"one for {schedule.world_size}",
                "Make the schedule from the group's size",
            )
        )
    _check_tensor(flat)
    _check_settings("sum", flat.dtype, segment_bytes)
    if flat.dim() != 1 or not flat.is_contiguous():
        raise ValueError(
            explain(
                "a contiguous tensor with one dimension",
                f"shape {tuple(flat.shape)} with strides {flat.stride()}",
                "Call tensor.contiguous().view(-1), or all_reduce(), which takes any layout",
            )
        )
    with torch.no_grad():
        _run(schedule, flat.detach(), group, rank, segment_bytes)


class _Link(NamedTuple):
    """One transfer of a round, with the part of the message that it carries."""

    peer: int
    values: Tensor
    kind: Literal["send", "add", "copy"]


def _run(
    schedule: Schedule, flat: Tensor, group: dist.ProcessGroup | None, rank: int, segment_bytes: int | None
) -> None:
    # gloo sends from the host's memory, also where it takes tensors of an accelerator for its collectives.
    by_host = flat.device.type != "cpu" and _backend(flat.device, group) == "gloo"
    message = flat.cpu() if by_host else flat
    _prepare(message, group)
    bounds = piece_bounds(message.numel(), schedule.num_pieces)
    segment = message.numel() if segment_bytes is None else max(1, segment_bytes // message.element_size())
    scratch: list[Tensor] = []
    for seen in rank_rounds(schedule, rank):
        if links := _links(seen, message, bounds):
            note_round()
            _run_round(links, segment, group, scratch)
    if by_host:
        flat.copy_(message)


def _backend(device: torch.device, group: dist.ProcessGroup | None) -> str | None:
    """Returns the name of the backend that serves a device, or ``None`` where none does."""
    for part in dist.get_backend_config(group).split(","):
        device_type, name = part.split(":")
        if device_type == device.type:
            return name
    return None


def _links(seen: RankRound, flat: Tensor, bounds: tuple[int, ...]) -> list[_Link]:
    sends = [_Link(transfer.target, flat[slice(*span(transfer.pieces, bounds))], "send") for transfer in seen.sends]
    receives = [
        _Link(transfer.source, flat[slice(*span(transfer.pieces, bounds))], transfer.action)
        for transfer in seen.receives
    ]
    # Receives first. On gloo a rank sends once it has read that its peer is ready; that word must not queue behind this
    # rank's own data, or the two directions of a slow link take turns instead of working at the same time.
    return [link for link in receives + sends if link.values.numel()]


def _run_round(links: list[_Link], segment: int, group: dist.ProcessGroup | None, scratch: list[Tensor]) -> None:
    num_segments = max(-(-link.values.numel() // segment) for link in links)
    under_way = _post(links, 0, segment, group, scratch)
    for number in range(num_segments):
        works, additions = under_way
        if number + 1 < num_segments:  # the next one arrives while this one is added
            under_way = _post(links, number + 1, segment, group, scratch)
        for work in works:  # those that send too: what they read may be added to only then
            work.wait()
        for values, received in additions:
            values.add_(received)


def _post(
    links: list[_Link], number: int, segment: int, group: dist.ProcessGroup | None, scratch: list[Tensor]
) -> tuple[list[dist.Work], list[tuple[Tensor, Tensor]]]:
    """Posts one segment of each link; returns what to wait for, and what to add to what afterwards."""
    operations: list[dist.P2POp] = []
    additions: list[tuple[Tensor, Tensor]] = []
    for peer, whole, kind in links:
        values = whole[number * segment : (number + 1) * segment]
        if not values.numel():
            continue
        carrier = values
        if kind == "add":
            carrier = _buffer(scratch, 2 * len(additions) + number % 2, values)
            additions.append((values, carrier))
        # As bytes: backends differ in the dtypes that they know, and nothing is computed on the way.
        wire = carrier.view(torch.uint8)
        note_segment(wire.numel(), is_sent=kind == "send")
        operations.append(
            dist.P2POp(dist.isend if kind == "send" else dist.irecv, wire, _global_rank(group, peer), group, _TAG)
        )
    return dist.batch_isend_irecv(operations), additions


def _buffer(scratch: list[Tensor], index: int, like: Tensor) -> Tensor:
    """Returns one of the buffers that live as long as an all-reduce, with as many elements as asked for."""
    while len(scratch) <= index:
        scratch.append(like.new_empty(0))
    if scratch[index].numel() < like.numel():
        scratch[index] = torch.empty_like(like)
    return scratch[index][: like.numel()]


_prepared: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def _prepare(flat: Tensor, group: dist.ProcessGroup | None) -> None:
    """Lets all ranks of a group meet once before some of them exchange batches, as NCCL demands."""
    world = dist.group.WORLD if group is None else group
    if flat.device.type != "cpu" and world is not None and world not in _prepared:
        dist.all_reduce(flat.new_zeros(1), group=group)
        _prepared.add(world)


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            explain("a group that this rank is in", "a group of other ranks", "Call this on the group's ranks only")
        )
    return rank, dist.get_world_size(group)


def _check_tensor(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "a quantised one" if tensor.is_quantized else f"one with layout {tensor.layout}"
        raise TypeError(explain("a dense tensor", kind, "Call .to_dense() or .dequantize() first"))
    if tensor.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        change = "Reduce torch.view_as_real(tensor)" if tensor.is_complex() else "Convert the tensor first"
        raise TypeError(explain(f"one of the dtypes {names}", str(tensor.dtype), change))
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            explain("a tensor with memory for each element", "an expanded one", "Call .clone() on it, or .contiguous()")
        )


def _check_settings(op: str, dtype: torch.dtype, segment_bytes: int | None) -> None:
    if op not in ("sum", "mean"):
        raise ValueError(explain("op='sum' or op='mean'", repr(op), "Choose one of the two"))
    if op == "mean" and not dtype.is_floating_point:
        raise ValueError(
            explain("op='sum' for integers, whose mean is none", f"op='mean' for {dtype}", "Convert to a float first")
        )
    if segment_bytes is not None:
        check_count("segment_bytes", segment_bytes, 1)
