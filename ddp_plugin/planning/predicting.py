"""How long a step takes with each way to make the ranks' gradients one, by the cost model."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddp_plugin.collectives.cost import COSTS
from ddp_plugin.hooks import HOOKS, CommHook, Contents, HookSpec, bytes_between_nodes, resolve_hook
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.overlap import Bucket, Overlap, fill_buckets, overlap
from ddp_plugin.planning.traced import Trace

__all__ = ["Prediction", "Shapes", "hook_seconds", "predict_algorithms", "predict_hooks", "scaling"]

Shapes = Mapping[str, Sequence[int]]
"""The shape of each parameter by name: how much some hooks send depends on them."""

_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}  # of gradients, by bytes of an element
_NUM_RANKS_ASKED = 64  # the busiest rank serves, is a root or stands at a border: it is among the first


@dataclass(frozen=True)
class Prediction:
    """One way to communicate.

    Attributes:
        name: key in :data:`~ddp_plugin.collectives.COSTS` or :data:`~ddp_plugin.hooks.HOOKS`.
        sent_bytes: bytes that the busiest rank sends in a step, on average over many steps.
        overlap: what is on the wire, and what of it the backward does not hide.
        step_s: seconds of a step: forward, backward and what is exposed; the optimizer is not in it.
    """

    name: str
    sent_bytes: float
    overlap: Overlap
    step_s: float


def predict_algorithms(trace: Trace, cluster: Cluster, bucket_cap_mb: float | None) -> list[Prediction]:
    """Predicts a step with each exact all-reduce in the table of costs.

    Args:
        trace: of one process.
        cluster: where the run takes place.
        bucket_cap_mb: see :func:`~ddp_plugin.planning.overlap.fill_buckets`.

    Collectives:
        None.
    """
    buckets = fill_buckets(trace.gradients, bucket_cap_mb)
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    return [
        _prediction(
            name,
            trace,
            buckets,
            cost(cluster.world_size).sent_ratio * num_bytes,
            lambda bucket, name=name: cluster.all_reduce_s(name, bucket.num_bytes),  # type: ignore[misc]
        )
        for name, cost in COSTS.items()
    ]


def predict_hooks(
    trace: Trace,
    cluster: Cluster,
    bucket_cap_mb: float | None,
    shapes: Shapes,
    hooks: Iterable[HookSpec] = tuple(HOOKS),
) -> list[Prediction]:
    """Predicts a step with each communication hook, from what it says that it sends.

    A hook's own arithmetic (quantising, orthogonalising) is left out: it is the device's, and no link can tell it. A
    hook that exchanges parameters once a period is counted with its share of a step, and hides nothing.

    Args:
        trace: of one process.
        cluster: where the run takes place.
        bucket_cap_mb: see :func:`~ddp_plugin.planning.overlap.fill_buckets`.
        shapes: of each parameter by name.
        hooks: names in :data:`~ddp_plugin.hooks.HOOKS`, or mappings with a name and options.

    Collectives:
        None.
    """
    buckets = fill_buckets(trace.gradients, bucket_cap_mb)
    predictions = []
    for spec in hooks:
        hook = _made(spec, cluster)
        periods = hook.outer.period if hook.outer is not None else 1
        parts = buckets
        if hook.outer is not None:  # all parameters at once, after the step
            parts = [
                Bucket(tuple(replace(g, ready_s=trace.backward_s) for bucket in buckets for g in bucket.gradients))
            ]

        def cost_s(bucket: Bucket, hook: CommHook = hook, periods: int = periods) -> float:
            return hook_seconds(hook, cluster, _contents(bucket, shapes)) / periods

        sent = _busiest(cluster, [_contents(bucket, shapes) for bucket in parts], hook.wire_bytes) / periods
        predictions.append(_prediction(hook.name, trace, parts, sent, cost_s))
    return predictions


def hook_seconds(hook: CommHook, cluster: Cluster, contents: Contents) -> float:
    """Returns how long one exchange takes on idle links, in seconds.

    A hook that has an algorithm's name takes that algorithm's time. Of any other, the busiest rank's bytes count, and
    the messages of a ring.

    Collectives:
        None.
    """
    if hook.exchanges_nothing or cluster.world_size == 1:
        return 0.0
    if hook.name == "allreduce":
        return cluster.exact_s(contents.num_elements * contents.element_size_bytes)
    if hook.name in COSTS:
        return cluster.all_reduce_s(hook.name, contents.num_elements * contents.element_size_bytes)
    sent, latency = _busiest(cluster, [contents], hook.wire_bytes), COSTS["ring"]
    inner = hook.between
    if inner is None or cluster.num_nodes == 1:
        num_messages = latency(cluster.world_size).num_messages
        return max(num_messages * link.alpha_s + sent * link.beta_s_per_byte for link in cluster.links)

    def crossing(one: Contents, world_size: int, rank: int) -> int:
        return bytes_between_nodes(one, world_size, rank, inner, cluster.ranks_per_node)

    # The ranks of a node share its way out; each sends what it has of the gradient to its peers on other nodes.
    outside = _busiest(cluster, [contents], crossing)
    inside_s = latency(cluster.ranks_per_node).num_messages * cluster.inside.alpha_s
    outside_s = latency(cluster.num_nodes).num_messages * cluster.between.alpha_s
    inside_s += (sent - outside) * cluster.inside.beta_s_per_byte
    return inside_s + outside_s + outside * cluster.ranks_per_node * cluster.between.beta_s_per_byte


def scaling(trace: Trace, cluster: Cluster, bucket_cap_mb: float | None, nums_nodes: Iterable[int]) -> dict[int, float]:
    """Returns for each number of processes the part of the ideal throughput that is left, with a fixed batch on each.

    Args:
        trace: of one process.
        cluster: of which the number of nodes is replaced.
        bucket_cap_mb: see :func:`~ddp_plugin.planning.overlap.fill_buckets`.
        nums_nodes: how many.

    Collectives:
        None.
    """
    buckets, alone_s = fill_buckets(trace.gradients, bucket_cap_mb), trace.forward_s + trace.backward_s

    def efficiency(grown: Cluster) -> float:
        costs = overlap(buckets, lambda bucket: grown.exact_s(bucket.num_bytes), trace.backward_s)
        return alone_s / (alone_s + costs.exposed_s) if alone_s > 0 else math.nan

    clusters = [replace(cluster, num_nodes=num_nodes) for num_nodes in nums_nodes]
    return {grown.world_size: efficiency(grown) for grown in clusters}


def _made(spec: HookSpec, cluster: Cluster) -> CommHook:
    if isinstance(spec, CommHook):
        return spec
    given: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    if given.get("name") == "noop":
        given.setdefault("for_measuring", True)
    if given.get("name") == "hierarchical" and given.get("ranks_per_node") is None:
        given["ranks_per_node"] = cluster.ranks_per_node
    return resolve_hook(given)


def _prediction(
    name: str, trace: Trace, buckets: Sequence[Bucket], sent_bytes: float, cost_s: Callable[[Bucket], float]
) -> Prediction:
    costs = overlap(buckets, cost_s, trace.backward_s)
    return Prediction(name, sent_bytes, costs, trace.forward_s + trace.backward_s + costs.exposed_s)


def _busiest(cluster: Cluster, parts: Sequence[Contents], sent_bytes: Callable[[Contents, int, int], int]) -> int:
    ranks = range(min(cluster.world_size, _NUM_RANKS_ASKED))
    return max(sum(sent_bytes(part, cluster.world_size, rank) for part in parts) for rank in ranks)


def _contents(bucket: Bucket, shapes: Shapes) -> Contents:
    names = tuple(gradient.name for gradient in bucket.gradients)
    first = bucket.gradients[0]
    dtype = _DTYPES[first.num_bytes // first.num_elements]
    return Contents(names, tuple(tuple(shapes[name]) for name in names), dtype)
