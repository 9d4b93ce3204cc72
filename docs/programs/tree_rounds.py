"""Trees are for many ranks and small messages, not for small clusters.

Said: a tree suits small clusters, a ring large ones.

True: a ring takes 2 (N-1) rounds, each as long as the link's latency at least; a tree takes 2 log2(N). At four ranks
that is no matter, at 1024 it decides, unless the message is so large that the tree's 2 log2(N) V count for more than
the ring's 2V. The size at which the two take equally long grows with N. (NCCL chooses by size, nodes and links; that
DDP "defaults to ring" is not so either.)

Instead: leave it to NCCL; `ddp_plugin.collectives.predict` and `crossover_bytes` for a link of your own.
"""

from _start import run

from ddp_plugin.collectives import Link, crossover_bytes, make_schedule

NUM_RANKS = 1
LINK = Link(alpha_s=10e-6, beta_s_per_byte=1e-10)  # 10 microseconds, 10 GB/s
SIZES = (4, 64, 1024)


def rounds(algorithm):
    return [len(make_schedule(algorithm, size).rounds) for size in SIZES]


def ring():
    """rounds of a ring of 4, 64, 1024 ranks."""
    return rounds("ring")


def tree():
    """rounds of a tree."""
    return rounds("tree")


def tree_is_faster_below():
    """the tree is faster below, in kB."""
    return [round(crossover_bytes("ring", "tree", size, LINK) / 1e3) for size in SIZES]


def check(ring, tree, tree_is_faster_below):
    assert ring == [2 * (size - 1) for size in SIZES]
    assert tree == [2 * 2, 2 * 6, 2 * 10]
    for size, rounds_of_ring, rounds_of_tree, kilobytes in zip(SIZES, ring, tree, tree_is_faster_below, strict=True):
        latency_s = (rounds_of_ring - rounds_of_tree) * LINK.alpha_s
        longer_s_per_byte = (rounds_of_tree - 2 * (size - 1) / size) * LINK.beta_s_per_byte
        assert kilobytes == round(latency_s / longer_s_per_byte / 1e3)


VARIANTS = (ring, tree, tree_is_faster_below)

if __name__ == "__main__":
    run(__file__)
