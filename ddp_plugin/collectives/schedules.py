"""All-reduce algorithms as data: who sends which piece of the message to whom, round by round.

A schedule divides the message into pieces of (nearly) equal size. In a round every rank sends from what it held before
the round; what it receives it either adds to its own piece or takes in its place. Nothing here communicates:
:mod:`ddp_plugin.collectives.simulation` runs a schedule on symbols, :mod:`ddp_plugin.collectives.execution` on tensors.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from ddp_plugin.errors import check_count, explain

__all__ = [
    "ALGORITHMS",
    "RankRound",
    "Schedule",
    "Transfer",
    "butterfly",
    "make_schedule",
    "parameter_server",
    "piece_bounds",
    "rank_rounds",
    "recursive_doubling",
    "ring",
    "span",
    "tree",
]


class Transfer(NamedTuple):
    """One message of a round.

    Attributes:
        source: rank that sends.
        target: rank that receives.
        pieces: indices of the pieces, which follow each other in the message.
        action: whether the target adds what it receives to its own, or takes it in place of its own.
    """

    source: int
    target: int
    pieces: range
    action: Literal["add", "copy"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """An all-reduce: after its rounds every rank holds the sum of all ranks' messages.

    A rank adds what it receives in the order in which the transfers are listed, so the result has the same bits in
    every run.

    Attributes:
        algorithm: key in :data:`ALGORITHMS`.
        world_size: number of ranks.
        num_pieces: pieces that a message is divided into.
        rounds: the transfers of each round; first those that add, then those that copy.
    """

    algorithm: str
    world_size: int
    num_pieces: int
    rounds: tuple[tuple[Transfer, ...], ...]

    @property
    def num_reducing_rounds(self) -> int:
        """How many rounds add; when they are over, every piece is complete somewhere."""
        return sum(any(transfer.action == "add" for transfer in transfers) for transfers in self.rounds)


class RankRound(NamedTuple):
    """A round as one rank sees it.

    Attributes:
        sends: what the rank sends, in the order of the schedule.
        receives: what it receives.
    """

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


@lru_cache(maxsize=256)
def rank_rounds(schedule: Schedule, rank: int) -> tuple[RankRound, ...]:
    """Returns the rounds in which a rank has something to do; kept, because it is asked for at every step."""
    rounds = (
        RankRound(
            tuple(transfer for transfer in transfers if transfer.source == rank),
            tuple(transfer for transfer in transfers if transfer.target == rank),
        )
        for transfers in schedule.rounds
    )
    return tuple(seen for seen in rounds if seen.sends or seen.receives)


def piece_bounds(num_elements: int, num_pieces: int) -> tuple[int, ...]:
    """Divides a message evenly.

    Args:
        num_elements: elements in the message; may be fewer than the pieces, some of which are empty then.
        num_pieces: number of pieces.

    Returns:
        ``num_pieces + 1`` offsets; piece ``i`` is ``[bounds[i], bounds[i + 1])``. Sizes differ by at most one element.
    """
    return tuple(num_elements * i // num_pieces for i in range(num_pieces + 1))


def span(pieces: range, bounds: tuple[int, ...]) -> tuple[int, int]:
    """Returns the first element of a run of pieces, and the one after the last."""
    return bounds[pieces.start], bounds[pieces.stop]


def ring(world_size: int) -> Schedule:
    """Every rank talks to its right neighbour only: a reduce-scatter around the ring, then an all-gather.

    In round ``t`` of the first ``n - 1``, rank ``r`` sends piece ``r - t`` and the receiver adds it; rank ``r`` then
    owns the sum of piece ``r + 1``, and in another ``n - 1`` rounds the sums travel on (all modulo ``n``). A rank sends
    ``2 (n - 1) / n`` of the message, less than twice of it whatever ``n``; the number of rounds grows with ``n``.

    Reference:
        P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    n = world_size

    def around(t: int, offset: int, action: Literal["add", "copy"]) -> tuple[Transfer, ...]:
        return tuple(Transfer(r, (r + 1) % n, _one((r + offset - t) % n), action) for r in range(n))

    rounds = [around(t, 0, "add") for t in range(n - 1)] + [around(t, 1, "copy") for t in range(n - 1)]
    return Schedule("ring", n, n, tuple(rounds))


def tree(world_size: int) -> Schedule:
    """A binomial tree: sums go up to rank 0, and the total comes down the same way.

    ``2 ceil(log2 n)`` rounds, each of which carries the whole message: few rounds, but all of it on the critical path.

    Reference:
        R. Thakur, R. Rabenseifner and W. Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    levels = [1 << k for k in range((world_size - 1).bit_length())]
    pairs = [[(r + d, r) for r in range(0, world_size - d, 2 * d)] for d in levels]
    up = [tuple(Transfer(child, parent, _one(0), "add") for child, parent in level) for level in pairs]
    down = [tuple(Transfer(parent, child, _one(0), "copy") for child, parent in level) for level in reversed(pairs)]
    return Schedule("tree", world_size, 1, tuple(up + down))


def butterfly(world_size: int) -> Schedule:
    """Recursive halving and doubling: partners exchange halves of halves, then put them together again.

    For powers of two ``2 log2(n)`` rounds and ``2 (n - 1) / n`` of the message: the ring's volume in a tree's number of
    rounds. Otherwise ``n - p`` ranks, where ``p`` is the largest power of two within ``n``, hand all they have to a
    neighbour first and receive the result at the end: two more rounds, of the whole message.

    Reference:
        R. Rabenseifner, Optimization of collective reduction operations, 2004.
    """
    core, fold, unfold = _folded(world_size)
    distances = [1 << k for k in reversed(range(len(core).bit_length() - 1))]  # n/2, ..., 2, 1

    def owned(i: int, size: int) -> range:
        return range(i // size * size, i // size * size + size)

    halving = [[Transfer(core[i], core[i ^ d], owned(i ^ d, d), "add") for i in range(len(core))] for d in distances]
    doubling = [
        [Transfer(core[i], core[i ^ d], owned(i, d), "copy") for i in range(len(core))] for d in reversed(distances)
    ]
    whole = range(len(core))
    return Schedule("butterfly", world_size, len(core), _rounds(fold(whole), *halving, *doubling, unfold(whole)))


def recursive_doubling(world_size: int) -> Schedule:
    """Partners at distance 1, 2, 4, … exchange everything and add: the fewest rounds there can be, for small messages.

    ``log2(n)`` rounds of the whole message for powers of two; otherwise two more, as for :func:`butterfly`.

    Reference:
        R. Thakur, R. Rabenseifner and W. Gropp, Optimization of collective communication operations in MPICH, 2005.
    """
    core, fold, unfold = _folded(world_size)
    distances = [1 << k for k in range(len(core).bit_length() - 1)]
    exchanges = [[Transfer(core[i], core[i ^ d], _one(0), "add") for i in range(len(core))] for d in distances]
    return Schedule("recursive_doubling", world_size, 1, _rounds(fold(_one(0)), *exchanges, unfold(_one(0))))


def parameter_server(world_size: int, num_servers: int = 1) -> Schedule:
    """Servers receive a share of everybody's message, add it up, and send the sum back; all ranks are workers too.

    With one server that is gathering at a master, who receives and sends ``n - 1`` messages. With ``num_servers = n``
    every rank serves ``1/n``: a direct reduce-scatter and all-gather, ``2 (n - 1) / n`` of the message in two rounds.

    Args:
        world_size: number of ranks.
        num_servers: how many ranks serve, the first ones; ``1`` to ``world_size``.

    Raises:
        ValueError: ``num_servers`` out of that range.

    Reference:
        M. Li et al., Scaling distributed machine learning with the parameter server, 2014.
    """
    check_count("num_servers", num_servers, 1, most=world_size)
    # Worker w + 1 first at server w: the servers are not all asked by rank 0 first, then all by rank 1, and so on.
    links = [((s + i) % world_size, s) for i in range(1, world_size) for s in range(num_servers)]
    push = tuple(Transfer(worker, server, _one(server), "add") for worker, server in links)
    pull = tuple(Transfer(server, worker, _one(server), "copy") for worker, server in links)
    return Schedule("parameter_server", world_size, num_servers, _rounds(push, pull))


ALGORITHMS: dict[str, Callable[..., Schedule]] = {
    "ring": ring,
    "tree": tree,
    "butterfly": butterfly,
    "recursive_doubling": recursive_doubling,
    "parameter_server": parameter_server,
}
"""Every algorithm by name; each value makes the :class:`Schedule` from the world size and that algorithm's options."""


def make_schedule(algorithm: str, world_size: int, **options: Any) -> Schedule:
    """Makes a schedule from its algorithm's name; the same one again for the same arguments.

    Args:
        algorithm: key in :data:`ALGORITHMS`.
        world_size: number of ranks, at least 1.
        options: those of the algorithm, such as ``num_servers``.

    Raises:
        ValueError: no such algorithm, options it does not have or values out of range, or a world size below 1.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            explain(f"an algorithm out of {sorted(ALGORITHMS)}", repr(algorithm), "Choose one of these names")
        )
    check_count("world_size", world_size, 1)
    known = set(inspect.signature(ALGORITHMS[algorithm]).parameters) - {"world_size"}
    if unknown := set(options) - known:
        raise ValueError(
            explain(
                f"options that the algorithm {algorithm!r} has ({', '.join(sorted(known)) or 'it has none'})",
                ", ".join(sorted(unknown)),
                "Remove the unknown ones",
            )
        )
    if all(type(value) is int for value in options.values()):
        return _make(algorithm, world_size, tuple(sorted(options.items())))
    return ALGORITHMS[algorithm](world_size, **options)  # which says in words what is wrong with them


@lru_cache(maxsize=64)
def _make(algorithm: str, world_size: int, options: tuple[tuple[str, int], ...]) -> Schedule:
    return ALGORITHMS[algorithm](world_size, **dict(options))


def _one(piece: int) -> range:
    return range(piece, piece + 1)


def _rounds(*rounds: Iterable[Transfer]) -> tuple[tuple[Transfer, ...], ...]:
    return tuple(filter(None, map(tuple, rounds)))


_Folding = Callable[[range], list[Transfer]]


def _folded(world_size: int) -> tuple[list[int], _Folding, _Folding]:
    """Returns as many ranks as the largest power of two, and how the others hand over and take back their pieces."""
    size = 1 << (world_size.bit_length() - 1)
    num_extra = world_size - size
    pairs = [(2 * i + 1, 2 * i) for i in range(num_extra)]  # neighbours, which are often on the same node
    core = [2 * i for i in range(num_extra)] + list(range(2 * num_extra, world_size))
    return (
        core,
        lambda pieces: [Transfer(extra, partner, pieces, "add") for extra, partner in pairs],
        lambda pieces: [Transfer(partner, extra, pieces, "copy") for extra, partner in pairs],
    )
