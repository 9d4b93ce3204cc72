"""What a run will cost before it is started, against sums done another way and against torch itself."""

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_plugin.collectives.cost import Link, predict
from ddp_plugin.hooks import HOOKS, resolve_hook
from ddp_plugin.planning.checking import check, read_measured, render_checked
from ddp_plugin.planning.cluster import Cluster
from ddp_plugin.planning.links import LINKS, find_link, write_link
from ddp_plugin.planning.memory import OPTIMIZERS, PRECISIONS, memory_bytes, state_bytes
from ddp_plugin.planning.overlap import Bucket, Gradient, best_bucket_cap, fill_buckets, latest_gradient, overlap
from ddp_plugin.planning.predicting import hook_seconds, predict_algorithms, predict_hooks, scaling
from ddp_plugin.planning.run_plan import make_plan, render_plan
from ddp_plugin.planning.traced import Trace, assume_trace, repeated, trace_step

MIB = 1 << 20
LAN = Link(alpha_s=1e-4, beta_s_per_byte=8e-9)
FAST = Link(alpha_s=1e-6, beta_s_per_byte=1e-11)


def gradients(*sizes_bytes: int) -> tuple[Gradient, ...]:
    return tuple(Gradient(f"p{i}", size // 4, size, float(i + 1)) for i, size in enumerate(sizes_bytes))


# ------------------------------------------------------------------------------------------------------------- memory


def test_adam_in_mixed_precision_takes_sixteen_bytes_for_a_parameter() -> None:
    parts = memory_bytes(7_000_000_000, "bf16-mixed", "adamw")
    assert state_bytes(parts) == 112_000_000_000


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "64-true"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_the_state_is_what_a_real_optimizer_holds(precision: str, optimizer: str) -> None:
    dtype = PRECISIONS[precision][0]
    module = nn.Linear(64, 32, bias=False, dtype=dtype)
    made = {
        "adamw": lambda: torch.optim.AdamW(module.parameters()),
        "adam": lambda: torch.optim.Adam(module.parameters()),
        "sgd": lambda: torch.optim.SGD(module.parameters(), lr=0.1),
        "sgd_momentum": lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    }[optimizer]()
    module(torch.ones(1, 64, dtype=dtype)).sum().backward()
    made.step()
    held = [module.weight, module.weight.grad, *made.state[module.weight].values()]
    num_bytes = sum(tensor.nbytes for tensor in held if isinstance(tensor, torch.Tensor) and tensor.dim() == 2)
    assert state_bytes(memory_bytes(64 * 32, precision, optimizer)) == num_bytes


def test_one_process_has_no_buckets_and_views_are_free() -> None:
    assert memory_bytes(10, "32-true", "sgd", distributed=False)["DDP buckets"] == 0
    assert memory_bytes(10, "32-true", "sgd", gradient_as_bucket_view=True)["DDP buckets"] == 0
    assert memory_bytes(10, "32-true", "sgd")["DDP buckets"] == 40


@pytest.mark.parametrize(("precision", "optimizer"), [("fp8", "sgd"), ("32-true", "lion")])
def test_what_is_unknown_is_refused(precision: str, optimizer: str) -> None:
    with pytest.raises(ValueError, match="to be one of"):
        memory_bytes(10, precision, optimizer)


# ------------------------------------------------------------------------------------------------------------ buckets


class Tied(nn.Module):
    """An embedding that is also the output layer: its gradient is complete at the very end."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 64)
        self.middle = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def loss(self) -> torch.Tensor:
        hidden = self.middle(self.embedding(torch.arange(2048) % len(self.embedding.weight)))
        return hidden.square().mean() + (hidden[-4:] @ self.embedding.weight.T).square().mean()


def test_a_late_gradient_is_found_and_named() -> None:
    """At one byte per nanosecond the embedding's megabyte takes a millisecond, as long as the backward."""
    trace = Trace(0.0, 1e-3, (Gradient("a", 4, 16, 1e-4), Gradient("big", MIB // 4, MIB, 1e-3)), is_measured=True)
    gradient, exposed_s = latest_gradient(trace.gradients, lambda bucket: 1e-9 * bucket.num_bytes, trace.backward_s)
    assert (gradient.name, exposed_s) == ("big", pytest.approx(0.9e-3, rel=0.01))
    busy = lambda bucket: 1e-6 * bucket.num_bytes  # noqa: E731  # a wire that is never idle
    assert latest_gradient(gradients(*[4000] * 10), busy, 10.0)[1] == pytest.approx(0.0, abs=1.0)


@pytest.mark.parametrize(("num_tokens", "is_late"), [(4096, True), (16, False)])
def test_a_plan_says_that_large_tied_embeddings_are_late(num_tokens: int, is_late: bool) -> None:
    model = Tied(num_tokens)
    trace = trace_step(model, model.loss)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    link = Link(alpha_s=1e-9, beta_s_per_byte=trace.backward_s / MIB)  # the embedding takes as long as the backward
    plan = make_plan("tied", shapes, trace, Cluster(1, 2, link, link), memory_bytes(1000, "32-true", "sgd"))
    assert (plan.late is not None) == is_late
    assert ("embedding.weight, 1.049 MB, is ready when" in render_plan(plan)) == is_late


@pytest.mark.parametrize("cap_mb", [None, 0.01, 1, 4.5, 25])
@pytest.mark.parametrize("seed", range(5))
def test_buckets_are_those_of_ddp(cap_mb: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [int(4 * n) for n in torch.randint(1, 2 * MIB, (40,), generator=generator)]
    tensors = [torch.empty(size // 4, device="meta") for size in sizes]
    limits = [MIB, 25 * MIB] if cap_mb is None else [int(cap_mb * MIB)]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
    ours = fill_buckets(gradients(*sizes), cap_mb)
    assert [[gradient.name for gradient in bucket.gradients] for bucket in ours] == [
        [f"p{index}" for index in indices] for indices in theirs
    ]


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb above 0"):
        fill_buckets(gradients(4), 0)


def test_overlap_is_what_a_clock_that_ticks_would_see() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        ready = sorted(torch.randint(0, 30, (6,), generator=generator).tolist())
        lengths = torch.randint(1, 12, (6,), generator=generator).tolist()
        buckets = [
            Bucket((Gradient(f"p{i}", 1, length, r),)) for i, (r, length) in enumerate(zip(ready, lengths, strict=True))
        ]
        waiting, left, busy, now = list(zip(ready, lengths, strict=True)), 0, 0, 0
        while waiting or left:  # one tick after another
            if not left and waiting and waiting[0][0] <= now:
                left = waiting.pop(0)[1]
            busy += left > 0
            left -= left > 0
            now += 1
        found = overlap(buckets, lambda bucket: bucket.num_bytes, backward_s=30)
        assert found.communication_s == busy == sum(lengths)
        assert found.exposed_s == max(0, now - 30)


def test_many_small_messages_want_larger_buckets_and_one_large_bucket_wants_smaller_ones() -> None:
    many = gradients(*[MIB] * 100)
    dear = Link(alpha_s=1.0, beta_s_per_byte=1e-9)
    cap_mb, costs = best_bucket_cap(many, lambda bucket: predict(dear, "ring", 2, bucket.num_bytes), backward_s=100.0)
    assert cap_mb is None or costs[cap_mb].exposed_s < 0.99 * costs[None].exposed_s
    slow = Link(alpha_s=1e-6, beta_s_per_byte=0.9 / MIB)
    cap_mb, costs = best_bucket_cap(many, lambda bucket: predict(slow, "ring", 2, bucket.num_bytes), backward_s=100.0)
    assert cap_mb == 1.0
    assert costs[1.0].exposed_s == pytest.approx(0.9, rel=0.01)  # the last bucket alone
    assert costs[None].exposed_s > 10


def test_a_difference_that_no_measurement_would_show_keeps_the_default() -> None:
    cap_mb, _ = best_bucket_cap(gradients(*[MIB] * 100), lambda bucket: 1e-9 * bucket.num_bytes, backward_s=100.0)
    assert cap_mb is None


# -------------------------------------------------------------------------------------------------------------- trace


def test_a_traced_backward_has_every_gradient_last_layer_first() -> None:
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(6)])
    data = torch.randn(512, 256)
    trace = trace_step(net, lambda: net(data).square().mean())
    assert trace.is_measured
    assert {g.name: g.num_bytes for g in trace.gradients} == {f"{i}.weight": 256 * 256 * 4 for i in range(6)}
    order = sorted(trace.gradients, key=lambda gradient: gradient.ready_s)
    assert [gradient.name for gradient in order] == [f"{i}.weight" for i in reversed(range(6))]
    assert 0 < order[0].ready_s < order[-1].ready_s <= 1.5 * trace.backward_s
    assert all(p.grad is None for p in net.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


def test_a_loss_without_gradients_is_refused() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="gives parameters gradients"):
        trace_step(net, lambda: torch.ones((), requires_grad=True) * 2)


def test_an_assumed_trace_spreads_the_backward_over_the_parameters() -> None:
    trace = assume_trace({"first": 10, "second": 30}, 4, 1.0, 2.0)
    assert {g.name: g.ready_s for g in trace.gradients} == {"second": 1.5, "first": 2.0}
    assert not trace.is_measured


# --------------------------------------------------------------------------------------------------------- prediction


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 2), (4, 8)])
def test_every_hook_and_algorithm_can_be_planned(nodes: int, gpus: int) -> None:
    cluster = Cluster(nodes, gpus, FAST, LAN)
    shapes = {"a": (256, 128), "b": (128,), "c": (64, 32, 3, 3)}
    trace = assume_trace({name: math.prod(shape) for name, shape in shapes.items()}, 4, 1e-3, 2e-3)
    found = {one.name: one for one in predict_hooks(trace, cluster, None, shapes)}
    assert set(found) == set(HOOKS)
    for one in [*found.values(), *predict_algorithms(trace, cluster, None)]:
        assert one.step_s == pytest.approx(3e-3 + one.overlap.exposed_s)
        assert (one.overlap.communication_s > 0) == (cluster.world_size > 1 and one.name != "noop"), one.name
    if cluster.world_size > 1:
        assert found["bf16"].sent_bytes == pytest.approx(found["allreduce"].sent_bytes / 2, rel=0.01)
        assert found["noop"].sent_bytes == 0


def test_only_the_slow_link_counts_between_nodes_and_hierarchical_spares_it() -> None:
    shapes = {"a": (1024, 1024)}
    trace = assume_trace({"a": 1 << 20}, 4, 0.0, 0.0)
    two = Cluster(2, 8, FAST, LAN)
    one = Cluster(1, 16, FAST, LAN)
    flat = {p.name: p.overlap.communication_s for p in predict_hooks(trace, two, None, shapes)}
    assert flat["allreduce"] > 100 * predict_hooks(trace, one, None, shapes, ["allreduce"])[0].overlap.communication_s
    contents_bytes = 4 << 20
    # Between two nodes 2 (2 - 1) / 2 of the gradient crosses each way, shared by the eight ranks of a node.
    assert flat["hierarchical"] == pytest.approx(contents_bytes * LAN.beta_s_per_byte, rel=0.05)


def test_what_goes_between_nodes_is_what_the_hook_between_them_sends() -> None:
    """As a recipe's settings have it: without the number of ranks on a node, which the cluster tells."""
    shapes, cluster = {"a": (1024, 1024)}, Cluster(2, 8, FAST, LAN)
    trace = assume_trace({"a": 1 << 20}, 4, 0.0, 0.0)
    specs = [{"name": "hierarchical"}, {"name": "hierarchical", "between": "int8", "ranks_per_node": None}]
    exact, int8 = (one.overlap.communication_s for one in predict_hooks(trace, cluster, None, shapes, specs))
    assert int8 / exact == pytest.approx(1 / 4, rel=0.05)


def test_gradients_of_two_bytes_are_sent_as_such() -> None:
    shapes, cluster = {"a": (1024, 1024)}, Cluster(1, 4, FAST, LAN)
    trace = assume_trace({"a": 1 << 20}, 2, 0.0, 0.0)
    (hook,) = predict_hooks(trace, cluster, None, shapes, ["allreduce"])
    ring = next(one for one in predict_algorithms(trace, cluster, None) if one.name == "ring")
    assert hook.sent_bytes == pytest.approx(ring.sent_bytes, rel=1e-3)
    assert hook.sent_bytes == pytest.approx(2 * 3 / 4 * (2 << 20), rel=1e-3)


def test_a_periodic_hook_counts_with_its_share_of_a_step() -> None:
    shapes = {"a": (1024, 1024)}
    trace = assume_trace({"a": 1 << 20}, 4, 1.0, 2.0)
    cluster = Cluster(2, 1, FAST, LAN)
    periodic = predict_hooks(trace, cluster, None, shapes, ["local_sgd"])[0]
    hook = resolve_hook("local_sgd")
    assert hook.outer is not None
    exact = predict_hooks(trace, cluster, None, shapes, ["ring"])[0]
    assert periodic.sent_bytes * hook.outer.period == pytest.approx(exact.sent_bytes, rel=0.01)
    assert periodic.overlap.exposed_s == pytest.approx(periodic.overlap.communication_s)


def test_efficiency_falls_with_processes_where_the_wire_is_exposed() -> None:
    trace = assume_trace({"a": 25 << 20, "b": 25 << 20}, 4, 0.01, 0.02)
    ratios = scaling(trace, Cluster(1, 1, FAST, LAN), None, (1, 2, 4, 8, 16))
    assert ratios[1] == 1.0
    assert all(later < earlier for earlier, later in itertools.pairwise(ratios.values()))


def test_nccl_may_choose_a_tree_where_a_ring_has_too_many_messages() -> None:
    cluster = Cluster(1024, 1, FAST, LAN)
    assert cluster.exact_s(1000) < 0.1 * cluster.all_reduce_s("ring", 1000)
    assert cluster.exact_s(1e12) == cluster.all_reduce_s("ring", 1e12)


def test_one_exchange_of_one_rank_costs_nothing() -> None:
    trace = assume_trace({"a": 100}, 4, 0.0, 0.0)
    assert all(one.overlap.communication_s == 0 for one in predict_algorithms(trace, Cluster(1, 1, FAST, LAN), None))


# --------------------------------------------------------------------------------------------------------------- plan


def plan_of(num_parameters: int, device_bytes: float | None, trace: Trace | None = None, **memory: bool) -> str:
    shapes = {"a": (num_parameters // 100, 100)}
    trace = trace or assume_trace({"a": num_parameters}, 4, 0.0, 0.0)
    parts = memory_bytes(num_parameters, "bf16-mixed", "adamw", **memory)
    return render_plan(make_plan("it", shapes, trace, Cluster(1, 8, FAST, LAN), parts, device_bytes=device_bytes))


def test_a_model_whose_state_does_not_fit_is_sent_to_fsdp() -> None:
    assert "does not fit 80 GB: use FSDP" in plan_of(7_000_000_000, 80e9)
    assert "All of it does not fit 20 GB: set gradient_as_bucket_view=True" in plan_of(1_000_000_000, 20e9)
    assert "It fits 80 GB, of which 58 GB are left" in plan_of(1_000_000_000, 80e9)
    assert "fit" not in plan_of(1_000_000_000, None)


def test_without_a_length_nothing_is_claimed_about_a_step() -> None:
    text = plan_of(1_000_000, None)
    assert "unknown: give --step-s, or a model with an example" in text
    assert "processes  " not in text
    assert "exposed <-" not in text


# -------------------------------------------------------------------------------------------------- how far off it is

MADE_WITH = {"cores": 2, "date": "2020-02-02"}


def measured_run(**steps_s: float) -> dict[str, Any]:
    """Two gradients of 4 MB, ready in the middle and at the end of a backward of 0.2 s, on a link of 100 MB/s."""
    run = {
        "rate_mbit": 800.0,
        "link": {"alpha_s": 0.0, "beta_s_per_byte": 1e-8, "gamma_s_per_byte": 0.0, "medium": "full_duplex"},
        "trace": {"forward_s": 0.1, "backward_s": 0.2, "ready_s": {"b": 0.2, "a": 0.1}},
        "alone_s": 0.5,
        "steps": [
            {"comm_hook": {"name": name} if name != "none" else None, "bucket_cap_mb": None}
            | {"is_exact": name == "none", "step_s": s}
            for name, s in steps_s.items()
        ],
    }
    return {"made_with": MADE_WITH, "shapes": {"a": [1000, 1000], "b": [1000, 1000]}, "runs": [run]}


def test_a_measured_step_is_predicted_from_what_a_planner_is_told() -> None:
    exact, half = check(measured_run(none=0.6, bf16=0.5))[::-1]
    assert (exact.name, exact.is_exact, half.name, half.is_exact) == ("allreduce", True, "bf16", False)
    # Each of two ranks sends all it has once, in 0.04 s; the second bucket starts with the backward's end.
    assert exact.predicted_s == pytest.approx(0.5 + 0.04)
    assert half.predicted_s == pytest.approx(0.5 + 0.02)
    assert exact.error_ratio == pytest.approx(-0.1)
    text = render_checked([exact, half], MADE_WITH)
    assert re.search(r"allreduce +default +600 ms +540 ms +-10.0%", text)
    assert "-10% to -10% off with exact all-reduces and +4% to +4% with the other hooks" in text


def test_the_run_that_comes_with_the_package_is_predicted() -> None:
    measured = read_measured()
    checked = check(measured)
    assert {one.name for one in checked} >= {"allreduce", "ring", "tree", "bf16", "int8", "powersgd", "topk", "diloco"}
    assert {one.rate_mbit for one in checked} == {100.0, 1000.0}
    exact = [one.error_ratio for one in checked if one.is_exact]
    assert max(map(abs, exact)) < 0.15, exact
    for run in measured["runs"]:  # and it would be noticed if the plan were another one
        run["link"]["beta_s_per_byte"] *= 1.5
    assert max(abs(one.error_ratio) for one in check(measured) if one.is_exact) > 0.3


# -------------------------------------------------------------------------------------------------------------- links


def test_a_measured_link_is_written_and_read(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "links" / "lan.json"
    link = replace(LAN, gamma_s_per_byte=1e-12, medium="shared")
    write_link(path, link, "two machines, Tuesday")
    assert find_link(str(path)) == link


def test_an_unknown_link_and_a_file_with_something_else_are_refused(tmp_path: object) -> None:
    from pathlib import Path

    with pytest.raises(ValueError, match="a link out of"):
        find_link("carrier_pigeon")
    for text in ("{", "[]", '{"speed": 3}'):
        path = Path(str(tmp_path)) / "other.json"
        path.write_text(text)
        with pytest.raises(ValueError, match="alpha_s"):
            find_link(str(path))
    assert find_link("ethernet_10g").beta_s_per_byte == 1 / 1.25e9
    assert all(link.alpha_s > 0 for link in LINKS.values())


def test_a_hook_in_seconds_is_its_bytes_over_the_link() -> None:
    from ddp_plugin.hooks import Contents

    contents, cluster = Contents(("a",), ((1000, 1000),), torch.float32), Cluster(2, 1, FAST, LAN)
    hook = resolve_hook("int8")
    expected = hook.wire_bytes(contents, 2, 0) * LAN.beta_s_per_byte + 2 * LAN.alpha_s
    assert hook_seconds(hook, cluster, contents) == pytest.approx(expected, rel=0.01)


def test_of_micro_batches_only_the_last_one_sends() -> None:
    trace = assume_trace({"a": 10_000_000}, 4, 1.0, 2.0)
    four = repeated(trace, 4)
    assert (four.forward_s, four.backward_s) == (3 * 3.0 + 1.0, 2.0)
    assert repeated(trace, 1) == trace
    for one, other in zip(*(predict_algorithms(t, Cluster(2, 1, FAST, LAN), None) for t in (trace, four)), strict=True):
        assert other.overlap == one.overlap
        assert other.step_s == pytest.approx(one.step_s + 9.0)


def test_an_exchange_waits_for_the_slowest_of_its_links() -> None:
    assert Cluster(2, 4, FAST, LAN).all_reduce_s("ring", 1e6) == predict(LAN, "ring", 8, 1e6)
    assert Cluster(2, 4, LAN, FAST).all_reduce_s("ring", 1e6) == predict(LAN, "ring", 8, 1e6), "inside the nodes"
    assert Cluster(2, 1, LAN, FAST).all_reduce_s("ring", 1e6) == predict(FAST, "ring", 2, 1e6), "a node of one has none"
    assert Cluster(1, 2, LAN, FAST).all_reduce_s("ring", 1e6) == predict(LAN, "ring", 2, 1e6)
