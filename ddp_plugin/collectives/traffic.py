"""What this process really sent and received, counted where the messages are posted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Traffic", "count_traffic", "note_round", "note_segment"]


@dataclass
class Traffic:
    """Counts of one process.

    Attributes:
        sent_bytes: bytes of the tensors that it sent, without what the transport adds.
        received_bytes: the same for what it received.
        num_messages_sent: messages; a transfer that was cut into segments counts once for each.
        num_messages_received: the same for what it received.
        num_rounds: rounds of schedules in which it sent or received something.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    num_messages_sent: int = 0
    num_messages_received: int = 0
    num_rounds: int = 0


_counting: list[Traffic] = []
_lock = threading.Lock()


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts what the all-reduces of this package send and receive in this process, in any of its threads.

    What is still under way when the block ends may be counted in part; wait for it inside. Blocks may be nested.
    """
    traffic = Traffic()
    with _lock:
        _counting.append(traffic)
    try:
        yield traffic
    finally:
        with _lock:
            _counting[:] = [other for other in _counting if other is not traffic]


def note_round() -> None:
    """Counts a round, on behalf of whoever communicates."""
    with _lock:
        for traffic in _counting:
            traffic.num_rounds += 1


def note_segment(num_bytes: int, is_sent: bool) -> None:
    """Counts a message, on behalf of whoever communicates."""
    with _lock:
        for traffic in _counting:
            if is_sent:
                traffic.sent_bytes += num_bytes
                traffic.num_messages_sent += 1
            else:
                traffic.received_bytes += num_bytes
                traffic.num_messages_received += 1
