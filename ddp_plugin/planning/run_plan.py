"""The whole plan of a run, and how it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_plugin.collectives.cost import COSTS, Link
from ddp_plugin.hooks import HOOKS, HookSpec
from ddp_plugin.learning_rate import EffectiveBatch
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.memory import state_bytes
from ddp_plugin.planning.overlap import Bucket, Gradient, Overlap, best_bucket_cap, latest_gradient
from ddp_plugin.planning.predicting import Prediction, Shapes, predict_algorithms, predict_hooks, scaling
from ddp_plugin.planning.traced import Trace

__all__ = ["RunPlan", "make_plan", "render_plan"]

_NOTABLE_RATIO = 0.1  # of a step
_NUMS_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class RunPlan:
    """What a run will cost.

    Attributes:
        model: what it is, in words.
        num_parameters: all of them trainable.
        cluster: where it runs.
        memory: bytes of one process by what they hold.
        device_bytes: memory of one device; ``None`` where nobody said.
        batch: samples of an optimizer step; ``None`` where nobody said.
        rate_ratios: by how much the learning rate may grow from the base batch, by rule; empty without a base batch.
        trace: one process's forward and backward; of no length where nobody knows it, so that nothing is hidden.
        bucket_cap_mb: the best size of a bucket, in mebibytes; ``None`` is torch's default.
        bucket_costs: what each size costs without a hook.
        late: where a backward was traced: the gradient that is so large and so late that it costs a notable part of a
            step, and the seconds that it exposes; ``None`` where there is none.
        algorithms: a step with each exact all-reduce.
        hooks: a step with each communication hook.
        efficiency_ratios: the part of the ideal throughput that is left without a hook, by number of processes.
    """

    model: str
    num_parameters: int
    cluster: Cluster
    memory: Mapping[str, int]
    device_bytes: float | None
    batch: EffectiveBatch | None
    rate_ratios: Mapping[str, float]
    trace: Trace
    bucket_cap_mb: float | None
    bucket_costs: Mapping[float | None, Overlap]
    late: tuple[Gradient, float] | None
    algorithms: Sequence[Prediction]
    hooks: Sequence[Prediction]
    efficiency_ratios: Mapping[int, float]

    @property
    def total_bytes(self) -> int:
        """Bytes of one process, as far as they are known."""
        return sum(self.memory.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer, which every process of DDP holds whole."""
        return state_bytes(self.memory)

    @property
    def is_timed(self) -> bool:
        """Whether the length of a step without communication is known."""
        return self.trace.forward_s + self.trace.backward_s > 0


def make_plan(
    model: str,
    shapes: Shapes,
    trace: Trace,
    cluster: Cluster,
    memory: Mapping[str, int],
    *,
    device_bytes: float | None = None,
    batch: EffectiveBatch | None = None,
    rate_ratios: Mapping[str, float] | None = None,
    bucket_cap_mb: float | None = None,
    hooks: Sequence[HookSpec] | None = None,
) -> RunPlan:
    """Puts a plan together.

    Args:
        model: what it is, in words.
        shapes: of each parameter by name.
        trace: of one process.
        cluster: where it runs.
        memory: see :func:`~ddp_plugin.planning.memory.memory_bytes`.
        device_bytes: memory of one device.
        batch: samples of an optimizer step.
        rate_ratios: see :class:`RunPlan`.
        bucket_cap_mb: the size of a bucket that was asked for; the best one when ``None``.
        hooks: as for :func:`~ddp_plugin.planning.predicting.predict_hooks`; when ``None`` all but those that are an
            algorithm of the table.

    Raises:
        ValueError: a size of a bucket that is not above 0, or an unknown hook.

    Collectives:
        None.
    """

    def cost_s(bucket: Bucket) -> float:
        return cluster.exact_s(bucket.num_bytes)

    best, bucket_costs = best_bucket_cap(trace.gradients, cost_s, trace.backward_s)
    cap_mb = best if bucket_cap_mb is None else bucket_cap_mb
    late = latest_gradient(trace.gradients, cost_s, trace.backward_s, cap_mb) if trace.is_measured else None
    if late is not None and late[1] < _NOTABLE_RATIO * (trace.forward_s + trace.backward_s):
        late = None
    return RunPlan(
        model=model,
        num_parameters=sum(gradient.num_elements for gradient in trace.gradients),
        cluster=cluster,
        memory=memory,
        device_bytes=device_bytes,
        batch=batch,
        rate_ratios=rate_ratios or {},
        trace=trace,
        bucket_cap_mb=cap_mb,
        bucket_costs=bucket_costs,
        late=late,
        algorithms=predict_algorithms(trace, cluster, cap_mb),
        hooks=predict_hooks(
            trace, cluster, cap_mb, shapes, [name for name in HOOKS if name not in COSTS] if hooks is None else hooks
        ),
        efficiency_ratios=scaling(trace, cluster, cap_mb, _NUMS_NODES),
    )


def render_plan(plan: RunPlan) -> str:
    """Prints a plan for people, section after section."""
    sections = [_head(plan), _memory(plan), _batch(plan), _steps(plan), _buckets(plan), _scaling(plan)]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(plan: RunPlan) -> list[str]:
    cluster = plan.cluster
    nodes = f"{cluster.num_nodes} nodes" if cluster.num_nodes > 1 else "one node"
    lines = [
        f"{plan.model}: {plan.num_parameters:,} parameters on {cluster.world_size} processes "
        f"({nodes} of {cluster.ranks_per_node})",
        f"  inside a node: {_link(cluster.inside)}",
    ]
    between = "between nodes" if cluster.num_nodes > 1 else "between nodes, for more of them"
    return [*lines, f"  {between}: {_link(cluster.between)}"]


def _memory(plan: RunPlan) -> list[str]:
    lines = ["memory of one process, at least"]
    lines += [f"  {name:<16}{_size(size):>10}" for name, size in plan.memory.items() if size]
    lines += [
        f"  {'together':<16}{_size(plan.total_bytes):>10}",
        f"  Weights, gradients and optimizer alone take {_size(plan.state_bytes)}, "
        f"{plan.state_bytes / plan.num_parameters:g} bytes for each parameter; DDP keeps them whole in every process.",
    ]
    if plan.device_bytes is not None:
        device = _size(plan.device_bytes)
        if plan.state_bytes > plan.device_bytes:
            lines.append(f"  That does not fit {device}: use FSDP, which divides them among the processes.")
        elif plan.total_bytes > plan.device_bytes:
            lines.append(
                f"  All of it does not fit {device}: set gradient_as_bucket_view=True, take smaller batches with "
                "accumulation or checkpoint activations; else use FSDP."
            )
        else:
            lines.append(f"  It fits {device}, of which {_size(plan.device_bytes - plan.total_bytes)} are left.")
    if not plan.memory.get("activations"):
        lines.append("  Activations are not counted: nobody ran the model here.")
    return lines


def _batch(plan: RunPlan) -> list[str]:
    if plan.batch is None:
        return []
    lines = [f"effective batch: {plan.batch} samples"]
    for rule, ratio in plan.rate_ratios.items():
        whose = "for SGD" if rule == "linear" else "for Adam"
        lines.append(f"  learning rate x {ratio:g} by the {rule} rule, {whose}")
    return lines


def _steps(plan: RunPlan) -> list[str]:
    trace = plan.trace
    if plan.is_timed:
        before = "forward" if trace.num_micro_batches == 1 else "all before its last backward"
        how = "measured here" if trace.is_measured else "as given"
        head = (
            f"a step: {before} {_time(trace.forward_s)}, backward {_time(trace.backward_s)} ({how}), "
            "without the optimizer; and with"
        )
    else:
        head = (
            "communication of a step (how much of it a backward hides is unknown: give --step-s, or a model with an "
            "example)"
        )
    lines = [head, f"  {'all-reduce':<20}{'sent':>10}{'on the wire':>14}{'exposed':>12}{'step':>12}"]
    lines += [_row(one, plan.is_timed) for one in plan.algorithms]
    lines += [f"  {'comm_hook':<20}"]
    lines += [_row(one, plan.is_timed) for one in plan.hooks]
    lines.append(
        "  A hook's own arithmetic is not in it; a hook that averages parameters counts with its share of a step."
    )
    return lines


def _row(one: Prediction, is_timed: bool) -> str:
    exposed = _time(one.overlap.exposed_s) if is_timed else "?"
    step = _time(one.step_s) if is_timed else "?"
    return f"  {one.name:<20}{_size(one.sent_bytes):>10}{_time(one.overlap.communication_s):>14}{exposed:>12}{step:>12}"


def _buckets(plan: RunPlan) -> list[str]:
    if not plan.is_timed:
        return []
    lines = ["size of a bucket, without a hook"]
    for cap_mb, costs in plan.bucket_costs.items():
        name = "torch's default" if cap_mb is None else f"bucket_cap_mb={cap_mb:g}"
        mark = "  <- in this plan" if cap_mb == plan.bucket_cap_mb else ""
        lines.append(f"  {name:<20}{_time(costs.exposed_s):>12} exposed{mark}")
    if plan.late is not None:
        gradient, exposed_s = plan.late
        passed = gradient.ready_s / plan.trace.backward_s
        lines += [
            f"  {gradient.name}, {_size(gradient.num_bytes)}, is ready when {passed:.0%} of the backward have passed; "
            f"{_time(exposed_s)} of a step come of that alone.",
            "  A first layer is so late, and a weight that is used at both ends, as tied embeddings are: untie those.",
        ]
    return lines


def _scaling(plan: RunPlan) -> list[str]:
    if not plan.is_timed:
        return []
    lines = ["more processes, the same batch on each, without a hook"]
    lines += [f"  {n:>6} processes  {100 * ratio:5.1f} % of {n} x one" for n, ratio in plan.efficiency_ratios.items()]
    return lines


def _link(link: Link) -> str:
    rate = f"{1 / link.beta_s_per_byte / 1e9:.4g} GB/s" if link.beta_s_per_byte else "unlimited"
    return f"{rate}, {link.alpha_s * 1e6:.4g} microseconds a message"


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
