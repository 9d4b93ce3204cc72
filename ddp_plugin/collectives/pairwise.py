"""All-to-all and all-gather of equal parts, in which every pair of ranks sends both ways at once.

gloo's own send before they listen. Where messages are longer than what sockets hold, one direction then waits for the
other: over a link of 20 Mbit/s, two ranks took twice as long as the link needs for an all-to-all, and one and a half
times for an all-gather. Here each rank says first where it will receive, from everyone, and then sends. NCCL's own
have no such trouble, and are used for tensors on other devices.
"""

import torch.distributed as dist
from torch import Tensor

from ddp_plugin import _compat
from ddp_plugin.collectives.traffic import note_segment

__all__ = ["all_gather", "all_to_all"]

_TAG = 7393  # apart from messages of the user's own in the same group, where a backend looks at tags


def all_to_all(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    """Sends a part to each rank, and receives one from each.

    Args:
        received: shape ``(world size, ...)``, contiguous; part ``r`` becomes what rank ``r`` has for this one.
        sent: of the same shape and dtype; part ``r`` is for rank ``r``.
        group: the ranks.

    Collectives:
        One all-to-all on the group, on all its ranks: messages between each two of them on CPU.
    """
    if received.device.type != "cpu":
        dist.all_to_all_single(received, sent, group=group)
        return
    rank = dist.get_rank(group)
    _exchange(list(received), list(sent), group)
    received[rank].copy_(sent[rank])


def all_gather(gathered: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Gathers one part of each rank.

    Args:
        gathered: shape ``(world size, ...)``, contiguous; part ``r`` becomes what rank ``r`` has.
        own: of as many elements as a part, contiguous, of the same dtype.
        group: the ranks.

    Collectives:
        One all-gather on the group, on all its ranks: messages between each two of them on CPU.
    """
    if gathered.device.type != "cpu":
        _compat.all_gather_flat(gathered, own, group)
        return
    own = own.view_as(gathered[0])
    _exchange(list(gathered), [own] * len(gathered), group)
    gathered[dist.get_rank(group)].copy_(own)


def _exchange(received: list[Tensor], sent: list[Tensor], group: dist.ProcessGroup) -> None:
    rank, world_size = dist.get_rank(group), len(received)
    works = []
    for distance in range(1, world_size):
        source = (rank - distance) % world_size
        works.append(dist.irecv(received[source], dist.get_global_rank(group, source), group, _TAG))
        note_segment(received[source].nbytes, is_sent=False)
    for distance in range(1, world_size):
        target = (rank + distance) % world_size
        works.append(dist.isend(sent[target], dist.get_global_rank(group, target), group, _TAG))
        note_segment(sent[target].nbytes, is_sent=True)
    for work in works:
        assert work is not None, "only a rank outside of the group has nothing to wait for"
        work.wait()
