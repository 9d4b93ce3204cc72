"""A ring sends less than 2V from each rank, however many there are.

Said: a ring moves 2 (N-1) V, a tree 2 log2(N) V, a butterfly log2(N) V; the ring makes O(N) into O(N-1).

True: in a ring each rank sends 2 (N-1)/N V; 2 (N-1) V is what all ranks send *together*, in each of these four. What
differs is the busiest rank. A parameter server receives and sends (N-1) V; a tree's inner rank receives up to
log2(N) V; a butterfly that halves the data sends as much as the ring, in fewer rounds. The busiest rank of a ring has
less than 2V at any N, and that is the point.

Instead: `ddp_plugin.collectives.cost_table()`, or `ddp-plugin plan` with your own link.
"""

import torch
import torch.distributed as dist
from _start import run

from ddp_plugin.collectives import all_reduce, count_traffic

NUM_RANKS = 4
NUM_ELEMENTS = 8


def sent(algorithm):
    """Returns what was really sent, in elements: by each rank, and by all of them together."""
    tensor = torch.full((NUM_ELEMENTS,), 1.0)
    with count_traffic() as traffic:
        all_reduce(tensor, algorithm=algorithm)
    assert tensor.tolist() == [NUM_RANKS] * NUM_ELEMENTS
    by_rank = [None] * NUM_RANKS
    dist.all_gather_object(by_rank, traffic.sent_bytes // tensor.element_size())
    return {"by rank": by_rank, "together": sum(by_rank)}


def ring():
    """ring."""
    return sent("ring")


def tree():
    """tree."""
    return sent("tree")


def butterfly():
    """butterfly."""
    return sent("butterfly")


def parameter_server():
    """parameter server."""
    return sent("parameter_server")


def check(ring, tree, butterfly, parameter_server):
    n, v = NUM_RANKS, NUM_ELEMENTS
    for result in ring + tree + butterfly + parameter_server:
        assert result["together"] == 2 * (n - 1) * v
    assert ring[0]["by rank"] == butterfly[0]["by rank"] == [2 * (n - 1) * v // n] * n
    assert max(tree[0]["by rank"]) == 2 * v
    assert max(parameter_server[0]["by rank"]) == (n - 1) * v


VARIANTS = (ring, tree, butterfly, parameter_server)

if __name__ == "__main__":
    run(__file__)
