"""Two levels: nodes of two ranks on one machine, against the mean in one process, in float64."""

import io
import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.hooks import HOOKS, CommHook, Contents, attach, resolve_hook
from ddp_plugin.hooks.hierarchical import TwoLevel, bytes_between_nodes, shard_bounds
from tests.harness import ranks, run_ranks
from tests.traffic import counted_calls

SIZES = (1, 2, 3, 7, 250, 4099)
LOSSY: list[dict[str, Any]] = [
    {"name": "int8"},
    {"name": "int4", "block_size": 8},
    {"name": "fp8"},
    {"name": "topk", "density": 0.1, "start_step": 0},
    {"name": "powersgd", "matrix_rank": 2, "start_step": 0},
]


def two_level(between: Any = "allreduce", ranks_per_node: int | None = 2) -> CommHook:
    return resolve_hook({"name": "hierarchical", "between": between, "ranks_per_node": ranks_per_node})


def contents_of(num_elements: int, dtype: torch.dtype) -> Contents:
    """Matrices, where there is room for them, and a vector."""
    rows = num_elements // 3 // 40
    matrices: list[tuple[int, ...]] = [(rows, 40), (rows, 40)] if rows else []
    shapes: list[tuple[int, ...]] = [*matrices, (num_elements - 80 * rows,)]
    return Contents(tuple(f"layer.{i}" for i in range(len(shapes))), tuple(shapes), dtype)


def own_values(num_elements: int, dtype: torch.dtype, step: int = 0, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(num_elements, generator=generator, dtype=torch.float64).to(dtype)


def everyone(values: Tensor) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.stack(parts)


def exchange_with_error(hook: CommHook, values: Tensor, contents: Contents) -> Tensor:
    """Exchanges in place; returns what this rank left out."""
    exchange = hook.make_exchange(dist.group.WORLD)
    error = torch.full_like(values, torch.nan) if exchange.leaves_error else None
    exchange.mean_(values, contents, error)
    return torch.zeros_like(values) if error is None else error


# ------------------------------------------------------------------------------------------------------- the numbers


@ranks(1, 2, 4, 6)
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_it_is_the_mean_and_the_same_bits_everywhere(ranks_per_node: int, world_size: int) -> None:
    hook = two_level(ranks_per_node=ranks_per_node)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for num_elements in SIZES:
            values = own_values(num_elements, dtype)
            given = everyone(values)
            assert not exchange_with_error(hook, values, contents_of(num_elements, dtype)).any()
            mean = given.double().mean(dim=0)
            largest = given.double().abs().amax(dim=0)
            assert ((values.double() - mean).abs() <= (world_size + 2) * torch.finfo(dtype).eps * largest).all()
            assert ((values.double() - mean).abs() <= hook.error_bound(given, contents_of(num_elements, dtype))).all()
            assert all(torch.equal(part, values) for part in everyone(values))


@ranks(4)
def test_integers_come_out_as_from_one_all_reduce() -> None:
    values = torch.randint(-99, 99, (1001,), generator=torch.Generator().manual_seed(dist.get_rank())).float()
    flat = values.clone()
    dist.all_reduce(flat)
    exchange_with_error(two_level(), values, contents_of(1001, torch.float32))
    assert torch.equal(values, flat / 4)


@ranks(4)
def test_only_between_nodes_is_anything_rounded() -> None:
    """The bf16 mean of the nodes' means, by plain torch; not that of the ranks' own values."""
    values = own_values(1001, torch.float32)
    given = everyone(values)
    exchange_with_error(two_level("bf16"), values, contents_of(1001, torch.float32))
    nodes = [given[2 * node] * 0.5 + given[2 * node + 1] * 0.5 for node in range(2)]
    expected = ((nodes[0] * 0.5).bfloat16() + (nodes[1] * 0.5).bfloat16()).float()
    assert torch.equal(values, expected)
    assert not torch.equal(sum((part * 0.25).bfloat16() for part in given).float(), expected)  # type: ignore[union-attr]


@ranks(2, 4, 6)
@pytest.mark.parametrize("between", LOSSY, ids=lambda between: between["name"])
def test_what_is_left_out_between_nodes_is_passed_on(between: dict[str, Any], world_size: int) -> None:
    hook = two_level(between)
    for num_elements in SIZES:
        for what in ("normal", "one huge element", "opposite nodes", "zero", "tiny"):
            values = own_values(num_elements, torch.float64)
            if what == "one huge element":
                values[num_elements // 2] = 1e6 * (1 + dist.get_rank())
            elif what == "opposite nodes":
                values.add_(1e4 * (-1.0) ** (dist.get_rank() // 2))
            elif what in ("zero", "tiny"):
                values.mul_(0.0 if what == "zero" else 1e-30)
            given, case = everyone(values), (num_elements, what)
            left = everyone(exchange_with_error(hook, values, contents_of(num_elements, torch.float64)))
            mean, largest = given.mean(dim=0), given.abs().max() + left.abs().max()
            assert all(torch.equal(part, values) for part in everyone(values)), case
            assert ((values + left.mean(dim=0) - mean).abs() <= 1e-14 * largest).all(), case
            bound = hook.error_bound(given, contents_of(num_elements, torch.float64)).amax(dim=0)
            assert ((values - mean).abs() <= bound).all(), case
            assert what != "zero" or not values.any(), case
            is_lossy = num_elements == SIZES[-1] and what == "normal" and world_size > 2
            assert left.any() or not is_lossy, case


@ranks(4)
def test_any_hook_of_the_table_may_stand_between_nodes() -> None:
    others = [name for name in HOOKS if HOOKS[name]().outer is None and HOOKS[name]().refusal is None]
    for name in sorted(set(others) - {"hierarchical"}):
        hook = two_level(name)
        for num_elements in (1, 7, 4099):
            values = own_values(num_elements, torch.float32)
            given, contents = everyone(values), contents_of(num_elements, torch.float32)
            left = everyone(exchange_with_error(hook, values, contents)).double().mean(dim=0)
            mean = given.double().mean(dim=0)
            assert all(torch.equal(part, values) for part in everyone(values)), (name, num_elements)
            bound = hook.error_bound(given, contents).amax(dim=0)
            assert ((values.double() - mean).abs() <= bound).all(), (name, num_elements)
            if hook.make_exchange(dist.group.WORLD).leaves_error:
                assert ((values + left - mean).abs() <= 64 * torch.finfo(torch.float32).eps * given.abs().max()).all()


@ranks(4)
@pytest.mark.parametrize("between", [*LOSSY, {"name": "allreduce"}, {"name": "bf16"}], ids=lambda b: b["name"])
def test_what_is_not_finite_on_one_rank_is_so_on_all(between: dict[str, Any]) -> None:
    for bad in (torch.nan, torch.inf):
        values = own_values(999, torch.float32)
        if dist.get_rank() == 3:
            values[500] = bad
        exchange_with_error(two_level(between), values, contents_of(999, torch.float32))
        assert not values[500].isfinite()
        assert all(torch.equal(part.nan_to_num(7.0), values.nan_to_num(7.0)) for part in everyone(values))


@ranks(5)
def test_ranks_that_are_a_part_of_all_have_their_own_nodes() -> None:
    part = dist.new_group([1, 2, 3, 4])
    if dist.get_rank() == 0:
        return
    values = own_values(77, torch.float64)
    two_level().make_exchange(part).mean_(values, contents_of(77, torch.float64))
    expected = torch.stack([own_values(77, torch.float64, rank=rank) for rank in range(1, 5)]).mean(dim=0)
    assert torch.allclose(values, expected, rtol=1e-13)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 30), nn.Tanh(), nn.Linear(30, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def gradient_of(net: nn.Module, model: Any, step: int, rank: int) -> Tensor:
    net.zero_grad()
    model(own_values(4 * 24, torch.float64, step, rank).view(4, 24)).square().sum().backward()
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


def steps_of(hook: dict[str, Any], state: bytes | None, steps: tuple[int, int]) -> bytes:
    """Returns the hook's state and the sums of the gradients, of those that the ranks got and of the true means."""
    torch.manual_seed(1)
    net = Net().double()
    model = DistributedDataParallel(net, bucket_cap_mb=5e-3)
    attached = attach(hook, model)
    if state is not None:
        assert attached.load(torch.load(io.BytesIO(state), weights_only=True)[0]) is None
    given, expected = torch.zeros(1), torch.zeros(1)
    for step in range(*steps):
        means = torch.stack([gradient_of(net, net, step, rank) for rank in range(dist.get_world_size())]).mean(dim=0)
        expected = expected + means
        given = given + gradient_of(net, model, step, dist.get_rank())
    file = io.BytesIO()
    torch.save((attached.state(), given, expected), file)
    attached.close()
    return file.getvalue()


@pytest.mark.parametrize("between", LOSSY, ids=lambda between: between["name"])
def test_no_gradient_is_lost_over_buckets_and_a_restart_with_other_nodes(between: dict[str, Any]) -> None:
    before = {"name": "hierarchical", "between": between, "ranks_per_node": 2}
    files = run_ranks(steps_of, 4, hook=before, state=None, steps=(0, 6))
    after = {"name": "hierarchical", "between": between, "ranks_per_node": 1}
    states = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    if between["name"] == "powersgd":  # each rank of a node knows its own parameters' factors; a checkpoint has all
        names = {"layers.0.weight", "layers.2.weight", "layers.4.weight"}
        assert all(names == set(s["exchange"]["right"]) for s, *_ in states)
    last = run_ranks(steps_of, 2, hook=after, state=files[0], steps=(6, 9))
    final, given, expected = torch.load(io.BytesIO(last[0]), weights_only=True)
    held = torch.cat([final["residuals"][name].reshape(-1) for name, _ in Net().named_parameters()])
    given, expected = given + states[0][1], expected + states[0][2]
    assert held.abs().max() > 1e-6
    assert torch.allclose(given + held, expected, rtol=0, atol=1e-11 * float(expected.abs().max()))


@ranks(4)
def test_a_resumed_exchange_goes_on_with_the_same_bits() -> None:
    """PowerSGD between nodes begins with what it found last, which each rank of a node knows for its own share."""
    contents = contents_of(4099, torch.float64)
    hook = two_level({"name": "powersgd", "matrix_rank": 2})

    def run(exchange: Any, steps: range) -> Tensor:
        values = torch.empty(0)
        for step in steps:
            values = own_values(4099, torch.float64, step)
            exchange.mean_(values, contents, torch.empty_like(values))
        return values

    whole = hook.make_exchange(dist.group.WORLD)
    run(whole, range(3))
    resumed, anew = hook.make_exchange(dist.group.WORLD), hook.make_exchange(dist.group.WORLD)
    resumed.load(whole.state())
    expected = run(whole, range(3, 5))
    assert torch.equal(run(resumed, range(3, 5)), expected)
    assert not torch.equal(run(anew, range(3, 5)), expected)


# --------------------------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_shards_are_all_of_it_and_whole_parameters_where_needed(num_shards: int) -> None:
    for shapes in ([(5, 7), (3,), (11, 2), (1,)], [(2,)], [(100, 3), (1,), (1,)], [(0, 4), (6,)]):
        contents = Contents(tuple(map(str, range(len(shapes)))), tuple(shapes), torch.float32)  # type: ignore[arg-type]
        ends = {0, *itertools.accumulate(torch.Size(shape).numel() for shape in shapes)}
        for whole in (False, True):
            bounds = shard_bounds(contents, num_shards, whole)
            assert (bounds[0], bounds[-1], len(bounds)) == (0, contents.num_elements, num_shards + 1)
            assert bounds == sorted(bounds)
            assert not whole or set(bounds) <= ends
            assert whole or max(b - a for a, b in itertools.pairwise(bounds)) <= -(-contents.num_elements // num_shards)


@ranks(2, 4, 6)
def test_the_bytes_are_the_declared_ones_inside_nodes_and_between(world_size: int) -> None:
    contents, rank = contents_of(4099, torch.float32), dist.get_rank()
    sent = {}
    nothing = {"name": "noop", "for_measuring": True}
    named = {"nothing": nothing, "allreduce": "allreduce", **{each["name"]: each for each in LOSSY}}
    records = {name: two_level(between) for name, between in named.items()}
    exchanges = {name: hook.make_exchange(dist.group.WORLD) for name, hook in records.items()}
    with counted_calls() as traffic:
        for name, exchange in exchanges.items():
            before, values = traffic.sent_bytes, own_values(4099, torch.float32)
            exchange.mean_(values, contents, torch.empty_like(values) if exchange.leaves_error else None)
            sent[name] = traffic.sent_bytes - before
    for name, hook in records.items():
        assert sent[name] == pytest.approx(hook.wire_bytes(contents, world_size, rank), rel=0.05), name
        between = resolve_hook(named[name])
        leaving = bytes_between_nodes(contents, world_size, rank, between, 2)
        if name != "powersgd" and world_size > 2:  # its shares are others, so it sends other bytes inside
            assert sent[name] - sent["nothing"] == pytest.approx(leaving, rel=0.05, abs=1), name
        assert (leaving == 0) == (world_size == 2 or name == "nothing"), name
    if world_size > 2:
        assert sent["nothing"] == pytest.approx(4099 * 4, rel=0.01)  # half of it each way, in nodes of two
        nodes = world_size // 2
        leaving = bytes_between_nodes(contents, world_size, rank, resolve_hook("allreduce"), 2)
        assert leaving == pytest.approx(2 * (nodes - 1) / nodes * 4099 * 4 / 2, rel=0.01)


# ------------------------------------------------------------------------------------------------------------ refusals


@ranks(3)
def test_a_number_of_ranks_that_nodes_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks per node divide"):
        two_level().make_exchange(dist.group.WORLD)


@ranks(4)
def test_nodes_of_unequal_size_are_refused_on_all_ranks() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"
    with pytest.raises(ValueError, match=r"nodes with \[1, 2\] ranks"):
        two_level(ranks_per_node=None).make_exchange(dist.group.WORLD)


@ranks(4)
def test_ranks_that_do_not_lie_node_after_node_are_refused_on_all_ranks() -> None:
    os.environ["GROUP_RANK"] = str(dist.get_rank() % 2)
    with pytest.raises(ValueError, match="ranks 0 to 1 on one node"):
        two_level().make_exchange(dist.group.WORLD)
    os.environ["GROUP_RANK"] = str(dist.get_rank() // 2)
    assert isinstance(two_level().make_exchange(dist.group.WORLD), TwoLevel)


@ranks(2)
def test_the_launcher_says_how_many_ranks_a_node_has() -> None:
    exchange = two_level(ranks_per_node=None).make_exchange(dist.group.WORLD)
    assert isinstance(exchange, TwoLevel)
    assert exchange.local_size == 2
    del os.environ["LOCAL_WORLD_SIZE"]
    with pytest.raises(ValueError, match="does not set LOCAL_WORLD_SIZE"):
        two_level(ranks_per_node=None).make_exchange(dist.group.WORLD)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"ranks_per_node": True}, "ranks_per_node"),
        ({"between": "local_sgd"}, "exchanges parameters every few steps"),
        ({"between": {"name": "hierarchical"}}, "divided by nodes itself"),
        ({"between": "nothing"}, "one of"),
        ({"between": {"name": "int8", "no_such": 1}}, "comm_hook='int8'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        resolve_hook({"name": "hierarchical", **options})


def test_what_the_hook_between_declares_is_inherited() -> None:
    hook = two_level({"name": "powersgd", "start_step": 7})
    assert (hook.start_step, hook.is_direct, hook.needs_matrices) == (7, False, True)
    assert two_level("noop").refusal == HOOKS["noop"]().refusal is not None
    assert "powersgd" in str(hook)
