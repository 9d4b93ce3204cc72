"""How long all-reduces take between the ranks that are there: what the cost model is fitted to."""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin.collectives.cost import Measurement
from ddp_plugin.collectives.execution import DEFAULT_SEGMENT_BYTES, all_reduce
from ddp_plugin.collectives.schedules import ALGORITHMS
from ddp_plugin.errors import explain

__all__ = ["measure", "measure_gamma_s_per_byte"]


def measure(
    sizes_bytes: Sequence[int],
    group: dist.ProcessGroup | None = None,
    algorithms: Sequence[str] | Mapping[str, Mapping[str, Any]] = tuple(ALGORITHMS),
    *,
    num_repeats: int = 5,
    segment_bytes: int | None = DEFAULT_SEGMENT_BYTES,
    device: torch.device | str = "cpu",
) -> list[Measurement]:
    """Measures all-reduces of float32 between the ranks of a group, each from a common start to the last rank's end.

    Algorithms and sizes take turns, so that what disturbs the machine for a while disturbs all alike.

    Args:
        sizes_bytes: sizes of the messages, rounded down to whole elements.
        group: the ranks; the default group when ``None``.
        algorithms: names out of :data:`~ddp_plugin.collectives.ALGORITHMS`, or a mapping of names to their options.
        num_repeats: how often each is measured, after one time that is not counted.
        segment_bytes: see :func:`~ddp_plugin.collectives.all_reduce`.
        device: where the messages are.

    Returns:
        For each algorithm and size the median over the repeats; the same on all ranks.

    Raises:
        ValueError: no repeat, a size below one element, or what :func:`~ddp_plugin.collectives.all_reduce` refuses.

    Collectives:
        For each repeat a barrier, the all-reduce and an all-reduce of one number; all ranks must call this alike.
    """
    if num_repeats < 1 or any(size < 4 for size in sizes_bytes):
        raise ValueError(
            explain(
                "one repeat or more, and sizes of at least 4 bytes",
                f"num_repeats={num_repeats}, sizes_bytes={list(sizes_bytes)}",
                "Change these",
            )
        )
    options = algorithms if isinstance(algorithms, Mapping) else {name: {} for name in algorithms}
    cases = [(name, size // 4) for size in sizes_bytes for name in options]
    times_s: list[list[float]] = [[] for _ in cases]
    for _ in range(1 + num_repeats):
        for (name, num_elements), times in zip(cases, times_s, strict=True):
            message = torch.ones(num_elements, device=device)
            dist.barrier(group)
            _synchronize(message.device)
            start_s = time.perf_counter()
            all_reduce(message, group, name, segment_bytes=segment_bytes, **options[name])
            _synchronize(message.device)
            elapsed = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64, device=device)
            dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=group)
            times.append(float(elapsed))
    world_size = dist.get_world_size(group)
    return [
        Measurement(name, world_size, 4 * num_elements, statistics.median(times[1:]), tuple(options[name].items()))
        for (name, num_elements), times in zip(cases, times_s, strict=True)
    ]


def measure_gamma_s_per_byte(
    num_bytes: int = 1 << 24, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> float:
    """Measures how long this rank takes to add one byte of a message to another, in seconds; the median of five.

    Args:
        num_bytes: size of the message.
        dtype: of its elements; half precision may take longer on a CPU.
        device: where it is.

    Collectives:
        None.
    """
    total = torch.ones(max(1, num_bytes // dtype.itemsize), dtype=dtype, device=device)
    other = torch.ones_like(total)
    times_s = []
    for _ in range(6):
        _synchronize(total.device)
        start_s = time.perf_counter()
        total.add_(other)
        _synchronize(total.device)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:]) / (total.numel() * dtype.itemsize)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
