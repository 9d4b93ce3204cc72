"""How much of the communication hides behind the backward, for buckets that become ready one after another."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ddp_plugin.errors import explain

__all__ = [
    "CANDIDATE_CAPS_MB",
    "Bucket",
    "Gradient",
    "Overlap",
    "best_bucket_cap",
    "fill_buckets",
    "latest_gradient",
    "overlap",
]

CANDIDATE_CAPS_MB = (1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, 200.0)
_MEBIBYTE = 1 << 20
_NUM_SUSPECTS = 20  # large ones, that may be late
_FIRST_BUCKET_BYTES = _MEBIBYTE  # torch's own, as long as no cap is given


@dataclass(frozen=True)
class Gradient:
    """One parameter's gradient.

    Attributes:
        name: of the parameter.
        num_elements: its elements.
        num_bytes: its size.
        ready_s: seconds from the beginning of the backward until it is complete.
    """

    name: str
    num_elements: int
    num_bytes: int
    ready_s: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        gradients: in the order in which they become ready.
    """

    gradients: tuple[Gradient, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its gradients."""
        return sum(gradient.num_bytes for gradient in self.gradients)

    @property
    def ready_s(self) -> float:
        """Seconds from the beginning of the backward until the last of them is ready."""
        return max(gradient.ready_s for gradient in self.gradients)


@dataclass(frozen=True)
class Overlap:
    """What a step waits for.

    Attributes:
        communication_s: seconds in which something is on the wire.
        exposed_s: seconds from the end of the backward until the last bucket has arrived.
    """

    communication_s: float
    exposed_s: float


def fill_buckets(gradients: Iterable[Gradient], bucket_cap_mb: float | None = None) -> list[Bucket]:
    """Fills buckets in the order in which gradients become ready, as DistributedDataParallel does after its first step.

    Args:
        gradients: of one dtype and device, in any order.
        bucket_cap_mb: a bucket is closed as soon as it has this many mebibytes; ``None`` is torch's default, 25 with a
            first bucket of 1.

    Raises:
        ValueError: a cap that is not above 0.
    """
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ValueError(explain("bucket_cap_mb above 0", repr(bucket_cap_mb), "Give mebibytes"))
    cap_bytes = (25.0 if bucket_cap_mb is None else bucket_cap_mb) * _MEBIBYTE
    buckets: list[Bucket] = []
    filling: list[Gradient] = []
    for gradient in sorted(gradients, key=lambda gradient: gradient.ready_s):
        filling.append(gradient)
        is_first = not buckets and bucket_cap_mb is None
        if sum(each.num_bytes for each in filling) >= (_FIRST_BUCKET_BYTES if is_first else cap_bytes):
            buckets.append(Bucket(tuple(filling)))
            filling = []
    return buckets + ([Bucket(tuple(filling))] if filling else [])


def overlap(buckets: Sequence[Bucket], cost_s: Callable[[Bucket], float], backward_s: float) -> Overlap:
    """Sends buckets one after another, each as soon as it is ready and the one before has arrived.

    Args:
        buckets: in the order in which they become ready.
        cost_s: seconds that a bucket takes on an idle wire.
        backward_s: length of the backward.
    """
    free_s = busy_s = 0.0
    for bucket in buckets:
        seconds = cost_s(bucket)
        busy_s += seconds
        free_s = max(free_s, bucket.ready_s) + seconds
    return Overlap(busy_s, max(0.0, free_s - backward_s))


def best_bucket_cap(
    gradients: Sequence[Gradient],
    cost_s: Callable[[Bucket], float],
    backward_s: float,
    caps_mb: Sequence[float] = CANDIDATE_CAPS_MB,
) -> tuple[float | None, dict[float | None, Overlap]]:
    """Finds the bucket size with the shortest exposed communication.

    Returns:
        The best cap in mebibytes, and what each costs. ``None`` is torch's default, which is taken unless another is
        more than 1 % of the backward better: smaller differences are none that a measurement would show.
    """
    costs: dict[float | None, Overlap] = {
        cap_mb: overlap(fill_buckets(gradients, cap_mb), cost_s, backward_s) for cap_mb in (None, *caps_mb)
    }
    best = min(costs, key=lambda cap_mb: costs[cap_mb].exposed_s)
    is_better = costs[None].exposed_s - costs[best].exposed_s > 0.01 * backward_s
    return (best if is_better else None), costs


def latest_gradient(
    gradients: Sequence[Gradient],
    cost_s: Callable[[Bucket], float],
    backward_s: float,
    bucket_cap_mb: float | None = None,
) -> tuple[Gradient, float]:
    """Finds the one gradient whose being late exposes most.

    Every backward has a last gradient, which costs little where it is small, and nothing where the wire is busy anyway.
    One that is large and late, as that of a first layer or of a weight used at both ends of a model, may cost much.

    Returns:
        The gradient, and by how many seconds less would be exposed if it were ready as early as the first of all.
    """
    exposed_s = overlap(fill_buckets(gradients, bucket_cap_mb), cost_s, backward_s).exposed_s
    first_s = min(gradient.ready_s for gradient in gradients)
    saved_s: dict[Gradient, float] = {}
    for suspect in sorted(gradients, key=lambda gradient: -gradient.num_bytes)[:_NUM_SUSPECTS]:
        moved = [replace(each, ready_s=first_s) if each is suspect else each for each in gradients]
        saved_s[suspect] = exposed_s - overlap(fill_buckets(moved, bucket_cap_mb), cost_s, backward_s).exposed_s
    worst = max(saved_s, key=saved_s.__getitem__)
    return worst, saved_s[worst]
