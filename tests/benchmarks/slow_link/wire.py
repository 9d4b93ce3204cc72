"""What really crosses the link: the kernel's counters, and how fast the link is without any of our code on it."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.slow_link.hosts import INTERFACE

__all__ = ["Sampler", "bytes_sent", "bytes_shaped", "link_use", "measure_all_reduce", "measure_raw", "use_while_busy"]

PERIOD_S = 0.05
BUSY_RATIO = 0.05  # of the link; below are acknowledgements and messages of a few bytes
RAW_PORT = 29_400
CHUNK_BYTES = 2**18


def bytes_sent() -> int:
    """Returns the bytes that this host's device has sent since it exists: payload, headers and acknowledgements.

    Packets that the kernel hands over in one piece to be cut later count one header together, so this is between the
    payload and what a wire would carry.
    """
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def bytes_shaped() -> int:
    """Returns the bytes that the rate limit has counted since it was set: what it lets pass is just its rate."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return int(shown[0]["bytes"])


class Sampler:
    """Notes :func:`bytes_sent` every 50 ms in a thread, from :meth:`start` to :meth:`stop`."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, with a last sample."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.samples.append((time.perf_counter(), bytes_sent()))
            if self._ended.wait(PERIOD_S):
                break
        self.samples.append((time.perf_counter(), bytes_sent()))


def link_use(num_bytes: float, seconds: float, rate_mbit: float) -> float:
    """Returns the part of what the link could have carried in that time."""
    return num_bytes * 8 / (seconds * rate_mbit * 1e6)


def use_while_busy(samples: Sequence[tuple[float, int]], rate_mbit: float) -> float | None:
    """Returns the part of the link that is used while it is busy.

    A stretch of windows that carry more than a few acknowledgements is busy; its first and its last window are left
    out, because it began and ended somewhere inside them.

    Args:
        samples: ``(seconds, bytes sent so far)``.
        rate_mbit: the link's rate.

    Returns:
        The ratio, or ``None`` where no stretch is three windows long.
    """
    windows = [(t1 - t0, b1 - b0) for (t0, b0), (t1, b1) in zip(samples, samples[1:], strict=False) if t1 > t0]
    is_busy = [link_use(count, seconds, rate_mbit) > BUSY_RATIO for seconds, count in windows]
    inner = [window for i, window in enumerate(windows) if 0 < i < len(windows) - 1 and all(is_busy[i - 1 : i + 2])]
    if not inner:
        return None
    return link_use(sum(count for _, count in inner), sum(seconds for seconds, _ in inner), rate_mbit)


def measure_raw(rank: int, address: str, num_bytes: int, both_ways: bool) -> float:
    """Sends bytes from rank 1 to rank 0 by a plain TCP socket; returns payload in Mbit/s as the receiver saw it.

    Args:
        rank: 0 or 1.
        address: rank 0's.
        num_bytes: how many.
        both_ways: whether rank 0 sends as many at the same time.
    """
    if rank == 0:
        with socket.create_server((address, RAW_PORT)) as server:
            connection, _ = server.accept()
    else:
        connection = _connect(address)
    block = bytes(CHUNK_BYTES)

    def send() -> None:
        left = num_bytes
        while left:
            left -= connection.send(block[:left])

    with connection:
        sender = threading.Thread(target=send)
        started_s = time.perf_counter()
        if rank == 1 or both_ways:
            sender.start()
        if rank == 0 or both_ways:
            buffer, left = bytearray(CHUNK_BYTES), num_bytes
            while left:
                left -= connection.recv_into(buffer, min(left, CHUNK_BYTES))
        elapsed_s = time.perf_counter() - started_s
        if sender.ident is not None:
            sender.join()
    return num_bytes * 8 / elapsed_s / 1e6


def _connect(address: str, patience_s: float = 10.0) -> socket.socket:
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection((address, RAW_PORT))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def measure_all_reduce(num_elements: int, rate_mbit: float, num_rounds: int) -> dict[str, Any]:
    """Times exact all-reduces of fp32 values over the limited link, one behind the other.

    Returns:
        Seconds of one; the part of the link that its payload takes, and that all its packets take.

    Collectives:
        ``num_rounds + 1`` all-reduces and two barriers, on all ranks.
    """
    values, world_size = torch.zeros(num_elements), dist.get_world_size()
    dist.all_reduce(values[: num_elements // 20 + 1])  # connections open and at their pace
    dist.barrier()
    before, started_s = bytes_shaped(), time.perf_counter()
    for _ in range(num_rounds):
        dist.all_reduce(values)
    dist.barrier()
    elapsed_s = time.perf_counter() - started_s
    num_payload = num_rounds * 2 * (world_size - 1) / world_size * num_elements * values.element_size()
    return {
        "all_reduce_s": elapsed_s / num_rounds,
        "payload_use": link_use(num_payload, elapsed_s, rate_mbit),
        "packet_use": link_use(bytes_shaped() - before, elapsed_s, rate_mbit),
    }
