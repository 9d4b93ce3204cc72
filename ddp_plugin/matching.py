"""Do all ranks bring the same thing to a collective? Asked in the same small message that carries the value.

A collective does not know what it is for: where one rank reduces a loss and another an accuracy, both get half of each.
So every message here begins with a fingerprint of what it is about. Ranks that differ all see it at once, and say it in
words. The messages have one size, so that any two of them can meet.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import gather_objects

__all__ = [
    "PATIENCE",
    "Rule",
    "collective_device",
    "described_by_rank",
    "fingerprint",
    "match",
    "match_all",
    "reduce_matched",
]

PATIENCE = timedelta(seconds=10)
"""After this a rank says what it waits for; it goes on waiting until the group's own timeout."""

_FINGERPRINT_BITS = 52  # an integer that float64 holds exactly

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "avg": torch.mean,
    "sum": torch.sum,
    "min": torch.amin,
    "max": torch.amax,
}


class Rule(NamedTuple):
    """What an error says when ranks differ.

    Attributes:
        expected: what all ranks should do.
        change: what the user should do.
    """

    expected: str
    change: str


def fingerprint(text: str) -> int:
    """Returns a number for a text, the same in every process, from 1 to 2**52.

    Two given texts share it by chance once in ``2**52``.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return 1 + int.from_bytes(digest[:8], "big") % (1 << _FINGERPRINT_BITS)


def described_by_rank(texts: Sequence[str]) -> str:
    """Groups what ranks say: ``"a on ranks 0, 2; b on rank 1"``."""
    ranks: dict[str, list[str]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"{text} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for text, who in ranks.items())


def collective_device(device: torch.device, served: frozenset[str], root_device: torch.device) -> torch.device:
    """Returns the device on which a group can communicate what lies on ``device``.

    Args:
        device: where the tensor is.
        served: types of the devices that the group has a backend for; NCCL alone serves no CPU tensor.
        root_device: the device of this process.
    """
    return device if not served or device.type in served else root_device


def match(
    text: str,
    group: dist.ProcessGroup,
    rule: Rule,
    *,
    value: float = 0.0,
    device: torch.device | None = None,
) -> list[float]:
    """Exchanges one number, if all ranks mean the same by it.

    Args:
        text: what the number is, in words that a user understands; equal on all ranks.
        group: any group.
        rule: for the error.
        value: the number.
        device: of the message; the CPU, unless the group does not serve it.

    Returns:
        The numbers of all ranks, in rank order.

    Raises:
        DDPPluginError: on all ranks, when the texts differ; it says which rank has which.

    Collectives:
        One all-gather of two float64 on every rank of the group; an object gather more where texts differ.
    """
    message = torch.tensor([fingerprint(text), value], dtype=torch.float64, device=device)
    parts = [torch.empty_like(message) for _ in range(group.size())]
    _wait_aloud(dist.all_gather(parts, message, group=group, async_op=True), text)
    received: list[list[float]] = torch.stack(parts).tolist()
    if any(mark != received[0][0] for mark, _ in received):
        got = described_by_rank(gather_objects(text, group))
        raise DDPPluginError(explain(rule.expected, got, rule.change))
    return [number for _, number in received]


def match_all(texts: Sequence[str], values: Sequence[float], group: dist.ProcessGroup, rule: Rule) -> list[list[float]]:
    """Exchanges many numbers at once, if all ranks mean the same by them, in the same order.

    Args:
        texts: what the numbers are about; equal on all ranks, also in their order.
        values: the numbers; as many on every rank whose texts are equal.
        group: a group with a CPU backend.
        rule: for the error.

    Returns:
        The numbers of each rank, in rank order.

    Raises:
        DDPPluginError: on all ranks, when the texts differ.

    Collectives:
        One :func:`match`, and an all-gather of ``len(values)`` float64 where there are any, on every rank.
    """
    match(f"[{', '.join(texts)}]", group, rule)
    message = torch.tensor(values, dtype=torch.float64)
    parts = [torch.empty_like(message) for _ in range(group.size())]
    if values:
        dist.all_gather(parts, message, group=group)
    return [part.tolist() for part in parts]


def reduce_matched(text: str, tensor: Tensor, group: dist.ProcessGroup, reduce_op: str, rule: Rule) -> Tensor:
    """Reduces one number over the ranks, if all ranks mean the same by it; in float64 and in rank order.

    A NaN of any rank stays visible, also in a minimum or maximum.

    Args:
        text: what the number is, in words; equal on all ranks.
        tensor: one element, of any shape and real dtype; integers up to ``2**53``.
        group: a group with a CPU backend.
        reduce_op: ``"mean"``, ``"avg"``, ``"sum"``, ``"min"`` or ``"max"``.
        rule: for the error.

    Returns:
        A new tensor of the same shape and device; of the same dtype, but the mean of integers is float64.

    Raises:
        DDPPluginError: on all ranks, when the texts differ.

    Collectives:
        One :func:`match` on every rank of the group.
    """
    value = tensor.detach().to("cpu", torch.float64).item()
    numbers = torch.tensor(match(text, group, rule, value=value), dtype=torch.float64)
    reduced = _REDUCTIONS[reduce_op](numbers)
    is_mean_of_integers = reduce_op in ("mean", "avg") and not tensor.is_floating_point()
    dtype = torch.float64 if is_mean_of_integers else tensor.dtype
    return reduced.to(tensor.device, dtype).reshape(tensor.shape)


def _wait_aloud(work: Any, text: str) -> None:
    """Waits as long as the group does, but not in silence."""
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        if work.is_completed():
            raise
        warnings.warn(
            f"Rank {dist.get_rank()} waits for the other ranks to do the same: {text}. They may be slow, or busy with "
            "something else that waits for this rank.",
            stacklevel=2,
        )
        try:
            work.wait()
        except RuntimeError:
            raise DDPPluginError(
                explain(f"all ranks to do this together: {text}", "this rank alone", "Do it on every rank, or on none")
            ) from error
