"""A ring all-reduce that sends first deadlocks, and the blocks must be the right ones.

Said: in each step, `dist.send` the block to the right, then `dist.recv` from the left; send block r + i, add to block
r + i + 2; and that is the gradient.

True: all ranks wait in `send`, nobody receives. Without the blocking, sums are still wrong: what arrives is a part of
the block that the *left* neighbour sent, r - i - 1, and has to be added there. At the end a mean is divided by N.

Instead: `ddp_plugin.collectives.ring_all_reduce`, and `ddp-plugin ring` for a walk through it.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from _start import run

NUM_RANKS = 4


def all_reduce(tensor, sent, added, blocking=False, group=None):
    """Sums up over a ring; in step i this rank sends block ``sent(i)`` and adds to block ``added(i)``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    blocks, incoming = list(tensor.chunk(size)), torch.empty(len(tensor) // size)
    right, left = (rank + 1) % size, (rank - 1) % size
    for i in range(2 * size - 2):
        if blocking:
            dist.isend(blocks[sent(i) % size], right, group).wait(timedelta(seconds=1))  # dist.send waits for ever
            dist.recv(incoming, left, group)
        else:
            sending = dist.isend(blocks[sent(i) % size].clone(), right, group)
            dist.recv(incoming, left, group)
            sending.wait()
        block = blocks[added(i) % size]
        block.copy_(block + incoming if i < size - 1 else incoming)
    return tensor.tolist()


def mine():
    return torch.arange(8.0) + 10 * dist.get_rank()


def send_first():
    """send, then receive."""
    group = dist.new_group()  # what times out is of no use afterwards
    rank = dist.get_rank()
    try:
        all_reduce(mine(), lambda i: rank - i, lambda i: rank - i - 1, blocking=True, group=group)
    except RuntimeError:
        return "nobody receives"
    return "done"


def wrong_blocks():
    """blocks r + i and r + i + 2."""
    rank = dist.get_rank()
    return "right" if all_reduce(mine(), lambda i: rank + i, lambda i: rank + i + 2) == expected() else "wrong sums"


def right_blocks():
    """blocks r - i and r - i - 1."""
    rank = dist.get_rank()
    return "right" if all_reduce(mine(), lambda i: rank - i, lambda i: rank - i - 1) == expected() else "wrong sums"


def expected():
    return [4 * value + 10 * (0 + 1 + 2 + 3) for value in range(8)]


def check(send_first, wrong_blocks, right_blocks):
    assert send_first == ["nobody receives"] * NUM_RANKS
    assert wrong_blocks == ["wrong sums"] * NUM_RANKS
    assert right_blocks == ["right"] * NUM_RANKS


VARIANTS = (send_first, wrong_blocks, right_blocks)

if __name__ == "__main__":
    run(__file__)
