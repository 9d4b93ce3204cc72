"""What an all-reduce costs: rounds, bytes and seconds, in closed form.

The model is that of latency and bandwidth: a message takes ``alpha`` seconds whatever its length and ``beta`` for each
byte, and each byte that is added takes ``gamma``. A rank sends one message and receives one at a time; in every round
all wait for the slowest. All volumes are multiples of the message ``V``: one unit for all algorithms.

What the model leaves out: messages that a rank posts together overlap their latencies, additions hide behind the next
segment, and ranks on one machine share its memory and cores. Fit a link to measurements of the ranks that will use it.

Reference:
    R. Thakur, R. Rabenseifner and W. Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_plugin.errors import check_count, explain

__all__ = [
    "COSTS",
    "MEDIA",
    "SEEDS",
    "Cost",
    "Link",
    "Measurement",
    "cost_of",
    "cost_table",
    "crossover_bytes",
    "fit",
    "predict",
    "relative_errors",
    "render_cost_table",
]

MEDIA = ("full_duplex", "half_duplex", "shared")
"""How bytes share a link: each direction of each rank alone; both directions of a rank together; those of all ranks."""


@dataclass(frozen=True)
class Link:
    """What joins the ranks.

    Attributes:
        alpha_s: seconds for a message, whatever its length.
        beta_s_per_byte: seconds for each byte; the inverse of the bandwidth.
        gamma_s_per_byte: seconds for each byte that is added to another one.
        medium: one of :data:`MEDIA`. A switched network is ``"full_duplex"``; processes on one machine, whose copies
            all go through the same memory, may be closer to ``"shared"``.

    Raises:
        ValueError: a negative or infinite number, or an unknown medium.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    medium: str = "full_duplex"

    def __post_init__(self) -> None:
        for name in ("alpha_s", "beta_s_per_byte", "gamma_s_per_byte"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(explain(f"{name} of at least 0", repr(value), "Give seconds"))
        if self.medium not in MEDIA:
            raise ValueError(explain(f"a medium out of {MEDIA}", repr(self.medium), "Choose one of these names"))


SEEDS = {
    "a100_nvswitch": Link(alpha_s=5e-6, beta_s_per_byte=1 / 230e9),
    "h100_nvswitch": Link(alpha_s=5e-6, beta_s_per_byte=1 / 370e9),
    "a100_4xhdr200": Link(alpha_s=5e-6, beta_s_per_byte=1 / 96e9),
}
"""Starting points before anything was measured, not figures to rely on.

Bandwidths are bus bandwidths of large NCCL all-reduces that were reported for 8 A100 or H100 behind NVSwitch
(NVIDIA/nccl-tests, issues 149 and 212) and for nodes of 8 A100 with four HDR200 adapters (issue 119). The latency is
what is left of 30 microseconds for 256 KB among 4 A100 (NVIDIA/nccl, issue 1094), shared by a ring's six rounds.
"""


@dataclass(frozen=True)
class Cost:
    """What an all-reduce of a message ``V`` costs. Ratios are multiples of ``V``, exact where its pieces are of a size.

    Attributes:
        algorithm: key in :data:`COSTS`.
        world_size: number of ranks.
        num_rounds: rounds.
        num_messages: messages on the critical path, one after another.
        sent_ratio: what the busiest rank sends.
        full_duplex_ratio: what the critical path carries, where a rank sends and receives at the same time.
        half_duplex_ratio: the same, where a rank either sends or receives.
        shared_ratio: what all ranks send together.
        added_ratio: what is added on the critical path.
        is_formula_only: whether this is the literature's formula, for an algorithm that this package does not run. Its
            ratios are those of a message so long that cutting it into many pieces costs nothing.
    """

    algorithm: str
    world_size: int
    num_rounds: int
    num_messages: int
    sent_ratio: float
    full_duplex_ratio: float
    half_duplex_ratio: float
    shared_ratio: float
    added_ratio: float
    is_formula_only: bool = False

    def medium_ratio(self, medium: str) -> float:
        """Returns what counts on a medium out of :data:`MEDIA`."""
        ratio: float = getattr(self, f"{medium}_ratio")
        return ratio


def _ring(n: int) -> Cost:
    volume = 2 * (n - 1) / n
    return Cost("ring", n, 2 * (n - 1), 2 * (n - 1), volume, volume, 2 * volume, 2 * (n - 1), (n - 1) / n)


def _tree(n: int) -> Cost:
    depth = _depth(n)
    return Cost("tree", n, 2 * depth, 2 * depth, depth, 2 * depth, 2 * depth, 2 * (n - 1), depth)


def _butterfly(n: int) -> Cost:
    core, depth, num_extra, fold = _fold(n)
    volume, rounds = 2 * (core - 1) / core, 2 * depth + 2 * fold
    both_ways, of_all = 2 * volume + 2 * fold, 2 * (core - 1) + 2 * num_extra
    return Cost("butterfly", n, rounds, rounds, volume + fold, volume + 2 * fold, both_ways, of_all, volume / 2 + fold)


def _recursive_doubling(n: int) -> Cost:
    core, depth, num_extra, fold = _fold(n)
    rounds, of_all = depth + 2 * fold, core * depth + 2 * num_extra
    return Cost(
        "recursive_doubling", n, rounds, rounds, depth + fold, rounds, 2 * depth + 2 * fold, of_all, depth + fold
    )


def _parameter_server(n: int, num_servers: int = 1) -> Cost:
    check_count("num_servers", num_servers, 1, most=n)
    if n == 1:
        return Cost("parameter_server", n, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
    gathered, server = (n - 1) / num_servers, (n + num_servers - 2) / num_servers
    return Cost("parameter_server", n, 2, 2 * (n - 1), server, 2 * gathered, 2 * server, 2 * (n - 1), gathered)


def _two_shot(n: int) -> Cost:
    return replace(_parameter_server(n, n), algorithm="two_shot")


def _double_tree(n: int) -> Cost:
    rounds, volume = 4 * _depth(n), 2.0 if n > 1 else 0.0
    return Cost("double_tree", n, rounds, rounds, volume, volume, 2 * volume, 2 * (n - 1), volume / 2, True)


COSTS: dict[str, Callable[..., Cost]] = {
    "ring": _ring,
    "tree": _tree,
    "butterfly": _butterfly,
    "recursive_doubling": _recursive_doubling,
    "parameter_server": _parameter_server,
    "two_shot": _two_shot,
    "double_tree": _double_tree,
}
"""Every algorithm of this package, ``two_shot`` (a parameter server on every rank), and, as a formula only,
``double_tree`` (P. Sanders, J. Speck and J. L. Träff, Two-tree algorithms for full bandwidth broadcast, reduction and
scan, 2009)."""


def cost_of(algorithm: str, world_size: int, **options: Any) -> Cost:
    """Returns what an algorithm costs, in closed form.

    Args:
        algorithm: key in :data:`COSTS`.
        world_size: number of ranks, at least 1.
        options: those of the algorithm, such as ``num_servers``.

    Raises:
        ValueError: no such algorithm or option, or a value out of range.
    """
    if algorithm not in COSTS:
        raise ValueError(explain(f"an algorithm out of {sorted(COSTS)}", repr(algorithm), "Choose one of these names"))
    check_count("world_size", world_size, 1)
    known = {"num_servers"} if algorithm == "parameter_server" else set()
    if unknown := set(options) - known:
        raise ValueError(
            explain(
                f"options that the algorithm {algorithm!r} has ({', '.join(known) or 'it has none'})",
                ", ".join(sorted(unknown)),
                "Remove the unknown ones",
            )
        )
    return COSTS[algorithm](world_size, **options)


def predict(link: Link, algorithm: str, world_size: int, num_bytes: float, **options: Any) -> float:
    """Predicts how long an all-reduce takes, in seconds.

    Args:
        link: what joins the ranks.
        algorithm: key in :data:`COSTS`. ``double_tree`` is cut into the number of pieces that is best for the link.
        world_size: number of ranks.
        num_bytes: size of the message on one rank.
        options: those of the algorithm.

    Raises:
        ValueError: see :func:`cost_of`.
    """
    estimate = cost_of(algorithm, world_size, **options)
    if algorithm == "double_tree" and world_size > 1:
        steps, whole_s = 2 * _depth(world_size), _per_byte_s(estimate, link) * num_bytes / 2
        if link.alpha_s == 0:
            return 2 * whole_s
        # The reduction and the broadcast take k + 2h steps of a k-th of V each; the best k balances the two terms.
        k = max(1.0, math.sqrt(steps * whole_s / link.alpha_s))
        return 2 * (k + steps) * (link.alpha_s + whole_s / k)
    return _seconds(estimate, link, num_bytes)


def crossover_bytes(first: str, second: str, world_size: int, link: Link) -> float | None:
    """Returns the size of the message at which two algorithms take equally long, in bytes.

    Args:
        first: key in :data:`COSTS`; a parameter server is one with one server.
        second: another one.
        world_size: number of ranks.
        link: what joins the ranks.

    Returns:
        The size; ``None`` where one of the two is never slower, whatever the size.

    Raises:
        ValueError: see :func:`cost_of`; or ``double_tree``, whose time is no straight line over the size.
    """
    if "double_tree" in (first, second):
        raise ValueError(
            explain("two algorithms whose time grows in a straight line", "double_tree", "Compare with predict()")
        )
    one, other = cost_of(first, world_size), cost_of(second, world_size)
    latency_s = link.alpha_s * (one.num_messages - other.num_messages)
    per_byte_s = _per_byte_s(other, link) - _per_byte_s(one, link)
    return latency_s / per_byte_s if latency_s * per_byte_s > 0 else None


def cost_table(world_sizes: Iterable[int] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)) -> list[Cost]:
    """Returns what every algorithm costs for each world size."""
    return [cost_of(algorithm, world_size) for world_size in world_sizes for algorithm in COSTS]


def render_cost_table(costs: Sequence[Cost]) -> str:
    """Prints costs in one unit: volumes are multiples of the message ``V`` of one rank."""
    header = ("ranks", "algorithm", "rounds", "messages", "sent by a rank", "critical path", "added", "all ranks")
    rows: list[tuple[str, ...]] = [header]
    for one in costs:
        volumes = (one.sent_ratio, one.full_duplex_ratio, one.added_ratio, one.shared_ratio)
        name = one.algorithm + (" *" if one.is_formula_only else "")
        counts = (str(one.num_rounds), str(one.num_messages))
        rows.append((str(one.world_size), name, *counts, *(f"{volume:.4g} V" for volume in volumes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if i == 1 else cell.rjust(width) for i, (cell, width) in enumerate(pairs)).rstrip()
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    lines.insert(1, "-" * max(map(len, lines)))
    if any(one.is_formula_only for one in costs):
        lines.append("* formula only: for a message in many pieces; this package does not run it")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Measurement:
    """How long an all-reduce took.

    Attributes:
        algorithm: key in :data:`COSTS`.
        world_size: number of ranks.
        num_bytes: size of the message on one rank.
        elapsed_s: seconds until the last rank was done.
        options: those of the algorithm, as pairs.
    """

    algorithm: str
    world_size: int
    num_bytes: int
    elapsed_s: float
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def cost(self) -> Cost:
        """What the model says about this all-reduce."""
        return cost_of(self.algorithm, self.world_size, **dict(self.options))


def fit(
    measurements: Sequence[Measurement], *, medium: str | None = "full_duplex", gamma_s_per_byte: float = 0.0
) -> Link:
    """Finds the link that explains measurements best: least squares of the relative errors, nothing below zero.

    Latency and bandwidth are fitted. What is added is half of what is carried in nearly every algorithm, so all-reduces
    alone hardly tell the two apart: ``gamma`` is taken as given, and if it is 0, ``beta`` holds the additions too.

    Args:
        measurements: of different sizes, at least two.
        medium: one of :data:`MEDIA`; ``None`` takes the one that fits best, which only measurements of several
            algorithms can tell.
        gamma_s_per_byte: seconds for each byte that is added.

    Raises:
        ValueError: measurements that do not tell latency from bandwidth, times that are not above 0, an unknown medium,
            or an algorithm known by its formula only.
    """
    if any(one.elapsed_s <= 0 or one.cost.is_formula_only or one.world_size < 2 for one in measurements):
        raise ValueError(
            explain(
                "times above 0 of all-reduces that were run, of 2 ranks or more",
                "others among them",
                "Use the measurements of measure()",
            )
        )
    fits = [_fit(measurements, one, gamma_s_per_byte) for one in (MEDIA if medium is None else (medium,))]
    return min(fits, key=lambda link: sum(error**2 for error in relative_errors(link, measurements)))


def relative_errors(link: Link, measurements: Iterable[Measurement]) -> list[float]:
    """Returns ``predicted / measured - 1`` for each measurement."""
    return [
        predict(link, one.algorithm, one.world_size, one.num_bytes, **dict(one.options)) / one.elapsed_s - 1
        for one in measurements
    ]


def _fit(measurements: Sequence[Measurement], medium: str, gamma_s_per_byte: float) -> Link:
    template = Link(0.0, 0.0, gamma_s_per_byte, medium)  # refuses an unknown medium
    rows = []  # latency, bandwidth and what remains to be explained, relative to the time
    for one in measurements:
        latency = one.cost.num_messages / one.elapsed_s
        bandwidth = one.cost.medium_ratio(medium) * one.num_bytes / one.elapsed_s
        rows.append((latency, bandwidth, 1 - _seconds(one.cost, template, one.num_bytes) / one.elapsed_s))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ar, br = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise ValueError(
            explain(
                "measurements of messages whose sizes differ, to tell latency from bandwidth",
                f"{len(measurements)} of one kind",
                "Measure small and large messages",
            )
        )
    alpha, beta = (ar * bb - br * ab) / determinant, (br * aa - ar * ab) / determinant
    if alpha < 0 or beta < 0:  # the best point that is allowed lies on an edge
        edges = [(max(0.0, ar / aa), 0.0), (0.0, max(0.0, br / bb))]
        alpha, beta = min(edges, key=lambda edge: sum((a * edge[0] + b * edge[1] - r) ** 2 for a, b, r in rows))
    return replace(template, alpha_s=alpha, beta_s_per_byte=beta)


def _seconds(estimate: Cost, link: Link, num_bytes: float) -> float:
    return link.alpha_s * estimate.num_messages + _per_byte_s(estimate, link) * num_bytes


def _per_byte_s(estimate: Cost, link: Link) -> float:
    carried_s = link.beta_s_per_byte * estimate.medium_ratio(link.medium)
    return carried_s + link.gamma_s_per_byte * estimate.added_ratio


def _depth(n: int) -> int:
    return (n - 1).bit_length()


def _fold(n: int) -> tuple[int, int, int, int]:
    """Returns the largest power of two within ``n``, its logarithm, how many ranks are left, and whether any are."""
    depth = n.bit_length() - 1
    num_extra = n - (1 << depth)
    return 1 << depth, depth, num_extra, int(num_extra > 0)
