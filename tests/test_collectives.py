"""All-reduce over send and receive: the sums, their bits, what crosses, and what is refused."""

import itertools
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddp_plugin.collectives import execution
from ddp_plugin.collectives.execution import (
    all_reduce,
    butterfly_all_reduce,
    parameter_server_all_reduce,
    ring_all_reduce,
    run,
    tree_all_reduce,
)
from ddp_plugin.collectives.lane import shared_lane
from ddp_plugin.collectives.schedules import Schedule, Transfer, make_schedule
from ddp_plugin.collectives.simulation import loads
from ddp_plugin.collectives.traffic import count_traffic
from tests.harness import ranks

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("ring", {}),
    ("tree", {}),
    ("butterfly", {}),
    ("recursive_doubling", {}),
    ("parameter_server", {}),
    ("parameter_server", {"num_servers": -1}),  # all ranks; filled in when the world size is known
]
SIZES = (0, 1, 2, 3, 7, 1000, 100_003)


def variants(world_size: int) -> list[tuple[str, dict[str, Any]]]:
    return [(name, dict.fromkeys(options, world_size)) for name, options in VARIANTS]


def part(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank brings; every rank can tell what any other one brings."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-9 if dtype != torch.uint8 else 0, 9, (size,), generator=generator).to(dtype)


def true_sum(world_size: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([part(rank, size, dtype).double() for rank in range(world_size)]).sum(0)


def assert_equal_on_all_ranks(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    seen: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), group=group)
    assert len(set(seen)) == 1


@ranks(1, 2, 3, 4, 5)
def test_every_size_and_algorithm_gives_the_sum_with_the_same_bits(world_size: int) -> None:
    rank = dist.get_rank()
    for (algorithm, options), size in itertools.product(variants(world_size), SIZES):
        tensor = part(rank, size)
        result = all_reduce(tensor, algorithm=algorithm, segment_bytes=1 << 16, **options)
        assert result is tensor
        # At most n - 1 roundings, each of at most half an ulp of a partial sum.
        largest = torch.stack([part(r, size).double().abs() for r in range(world_size)]).sum(0)
        bound = (world_size - 1) * torch.finfo(torch.float32).eps / 2 * largest
        assert ((tensor.double() - true_sum(world_size, size)).abs() <= bound).all(), (algorithm, size)
        assert_equal_on_all_ranks(tensor)


@ranks(2, 3)
def test_every_dtype(world_size: int) -> None:
    rank = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        for algorithm, options in variants(world_size):
            tensor = part(rank, 1000, dtype)
            all_reduce(tensor, algorithm=algorithm, **options)
            largest = torch.stack([part(r, 1000, dtype).double().abs() for r in range(world_size)]).sum(0)
            bound = world_size * torch.finfo(dtype).eps / 2 * largest
            assert ((tensor.double() - true_sum(world_size, 1000, dtype)).abs() <= bound).all()
            assert_equal_on_all_ranks(tensor)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        for algorithm, options in variants(world_size):
            tensor = part(rank, 1000, dtype)
            all_reduce(tensor, algorithm=algorithm, **options)
            assert torch.equal(tensor.double(), true_sum(world_size, 1000, dtype))


@ranks(3, 4)
def test_integers_in_floats_equal_torchs_all_reduce_exactly(world_size: int) -> None:
    values = torch.arange(10_007, dtype=torch.float32) * (dist.get_rank() + 1)
    expected = values.clone()
    dist.all_reduce(expected)
    for algorithm, options in variants(world_size):
        assert torch.equal(all_reduce(values.clone(), algorithm=algorithm, **options), expected)


@ranks(1, 3)
def test_any_shape_and_strides(world_size: int) -> None:
    rank = dist.get_rank()
    flat, total = part(rank, 120, torch.float64), true_sum(world_size, 120, torch.float64)
    for view in (
        lambda t: t.view(2, 3, 4, 5),
        lambda t: t.view(10, 12).t(),
        lambda t: t.view(10, 12)[:, ::2],
        lambda t: t[7],
        lambda t: t.view(3, 40)[1:1],
    ):
        base, expected = flat.clone(), flat.clone()
        view(expected).copy_(view(total))
        all_reduce(view(base))
        torch.testing.assert_close(base, expected)  # and nothing beside the view has changed
    weight = torch.nn.Parameter(flat.clone())
    all_reduce(weight)
    torch.testing.assert_close(weight.detach(), total)
    assert weight.is_leaf


@ranks(3)
def test_the_mean_neither_overflows_nor_counts_anyone_twice(world_size: int) -> None:
    tensor = torch.full((9,), 60_000.0, dtype=torch.float16)
    all_reduce(tensor, op="mean")  # the sum would be inf
    torch.testing.assert_close(tensor.float(), torch.full((9,), 60_000.0), rtol=2e-3, atol=0)
    exact = all_reduce(part(dist.get_rank(), 50, torch.float64), algorithm="tree", op="mean")
    torch.testing.assert_close(exact, true_sum(world_size, 50, torch.float64) / world_size)


@ranks(4)
def test_the_named_functions_and_their_options(world_size: int) -> None:
    rank = dist.get_rank()
    for function in (ring_all_reduce, tree_all_reduce, butterfly_all_reduce, parameter_server_all_reduce):
        torch.testing.assert_close(
            function(part(rank, 33, torch.float64)), true_sum(4, 33, torch.float64), msg=function.__name__
        )
        future = function(part(rank, 33, torch.float64), op="mean", segment_bytes=8, async_op=True)
        torch.testing.assert_close(future.wait(), true_sum(4, 33, torch.float64) / 4)
    with count_traffic() as traffic:
        parameter_server_all_reduce(part(rank, 40), num_servers=2)
    # As a worker to the servers that it is not, 20 elements each; as a server, 20 elements back to three others.
    assert traffic.sent_bytes == 4 * 20 * ((1 if rank < 2 else 2) + (3 if rank < 2 else 0))


@ranks(4)
def test_a_group_of_some_ranks(world_size: int) -> None:
    rank = dist.get_rank()
    members = [3, 1, 2]  # not all, and a rank in the group is another one in the world
    group = dist.new_group(members)
    if rank == 0:
        with pytest.raises(ValueError, match="this rank is in"):
            all_reduce(torch.ones(3), group)
        return
    expected = torch.stack([part(r, 1001, torch.float64) for r in (1, 2, 3)]).sum(0)
    for algorithm, options in variants(3):
        torch.testing.assert_close(all_reduce(part(rank, 1001, torch.float64), group, algorithm, **options), expected)
        future = all_reduce(part(rank, 1001, torch.float64), group, algorithm, async_op=True, **options)
        torch.testing.assert_close(future.wait(), expected)


@ranks(2, 3)
def test_several_in_flight_are_done_in_order_and_waited_for_in_any(world_size: int) -> None:
    rank = dist.get_rank()
    sizes = [50_000, 3, 0, 7001, 20_000, 1]
    cycle = itertools.cycle(variants(world_size))
    futures = []
    for size in sizes:
        algorithm, options = next(cycle)
        futures.append(all_reduce(part(rank, size, torch.float64), None, algorithm, async_op=True, **options))
    last = all_reduce(part(rank, 11, torch.float64))  # not asynchronous: comes after all of them
    assert all(future.done() for future in futures)
    torch.testing.assert_close(last, true_sum(world_size, 11, torch.float64))
    for size, future in reversed(list(zip(sizes, futures, strict=True))):
        torch.testing.assert_close(future.wait(), true_sum(world_size, size, torch.float64))


@ranks(2)
def test_an_asynchronous_call_returns_before_the_others_have_called(world_size: int) -> None:
    rank = dist.get_rank()
    tensor = part(rank, 1000, torch.float64)
    if rank == 1:
        dist.barrier()  # rank 0 gets here only because its call has returned
    future = all_reduce(tensor, dist.group.WORLD, async_op=True)
    if rank == 0:
        assert not future.done()
        dist.barrier()
    torch.testing.assert_close(future.wait(), true_sum(2, 1000, torch.float64))


@ranks(1, 2, 3, 4, 5)
def test_what_was_counted_is_what_the_schedule_says(world_size: int) -> None:
    rank = dist.get_rank()
    for (algorithm, options), size in itertools.product(variants(world_size), (0, 2, 1001)):
        schedule = make_schedule(algorithm, world_size, **options)
        expected = loads(schedule, size, 8)[rank]
        for segment_bytes in (None, 1 << 20, 80):
            with count_traffic() as traffic:
                all_reduce(part(rank, size, torch.float64), algorithm=algorithm, segment_bytes=segment_bytes, **options)
            assert (traffic.sent_bytes, traffic.received_bytes) == (expected.sent_bytes, expected.received_bytes)
            assert traffic.num_rounds == expected.num_rounds
            if segment_bytes != 80:
                assert traffic.num_messages_sent == expected.num_messages_sent
                assert traffic.num_messages_received == expected.num_messages_received
            elif size == 1001 and expected.num_messages_sent:
                assert traffic.num_messages_sent >= expected.sent_bytes / 80


@ranks(2)
def test_segments_are_as_long_as_asked_and_two_are_in_flight(world_size: int) -> None:
    lengths: list[int] = []
    events: list[str] = []
    kinds: list[object] = []
    real, add = dist.batch_isend_irecv, torch.Tensor.add_

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        events.append("post")
        lengths.extend(operation.tensor.numel() for operation in operations)
        kinds.extend(operation.op for operation in operations)
        works = real(operations)
        return [Mock(wait=lambda work=work: (events.append("wait"), work.wait())) for work in works]

    def noted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        events.append("add")
        return add(self, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched)
        patch.setattr(torch.Tensor, "add_", noted)
        all_reduce(torch.ones(50, dtype=torch.float64), segment_bytes=87)  # 10 elements of 8 bytes fit
    assert lengths[:6] == [80, 80, 80, 80, 40, 40]
    # A word of readiness behind one's own data would make the two directions of a link take turns.
    assert kinds == [dist.irecv, dist.isend] * (len(kinds) // 2)
    # Both the receive and the send of a segment are over before something is added to it.
    reduction = ["post", "post", "wait", "wait", "add", "post", "wait", "wait", "add", "wait", "wait", "add"]
    assert events[: len(reduction)] == reduction
    assert "add" not in events[len(reduction) :]


@ranks(2)
def test_gloo_sends_an_accelerators_tensor_from_the_host(world_size: int) -> None:
    """Without an accelerator at hand, the device is made up: what counts is that the copy comes back."""
    rank = dist.get_rank()
    assert execution._backend(torch.device("cuda", 0), None) == execution._backend(torch.device("cpu"), None) == "gloo"
    assert execution._backend(torch.device("mps"), None) is None
    flat = part(rank, 100, torch.float64)
    copies: list[torch.Tensor] = []

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

        def cpu(self) -> torch.Tensor:
            copies.append(self.as_subclass(torch.Tensor).clone())
            return copies[-1]

    schedule = make_schedule("ring", world_size)
    execution._run(schedule, flat.as_subclass(Elsewhere), None, rank, 80)
    torch.testing.assert_close(flat, true_sum(2, 100, torch.float64))
    assert torch.equal(copies[0], flat)


@ranks(2)
def test_run_takes_a_schedule_of_ones_own(world_size: int) -> None:
    there_and_back = Schedule("mine", 2, 1, ((Transfer(1, 0, range(1), "add"),), (Transfer(0, 1, range(1), "copy"),)))
    flat = part(dist.get_rank(), 100, torch.float64)
    run(there_and_back, flat)
    torch.testing.assert_close(flat, true_sum(2, 100, torch.float64))
    with pytest.raises(ValueError, match="2 ranks of the group"):
        run(make_schedule("ring", 3), flat)
    with pytest.raises(ValueError, match="one dimension"):
        run(there_and_back, flat.view(10, 10))
    with pytest.raises(ValueError, match="contiguous"):
        run(there_and_back, flat[::2])
    with pytest.raises(ValueError, match="segment_bytes"):
        run(there_and_back, flat, segment_bytes=0)


@ranks(1)
def test_mistakes_are_refused_before_anything_is_sent(world_size: int) -> None:
    ones = torch.ones(4)
    for message, arguments in {
        "butterfly": {"algorithm": "rnig"},
        "num_servers to be an integer from 1": {"algorithm": "parameter_server", "num_servers": 2},
        "it has none": {"num_servers": 1},
        "segment_bytes to be an integer of at least 1": {"segment_bytes": 0},
        "op='sum' or op='mean'": {"op": "max"},
    }.items():
        for async_op in (False, True):
            with pytest.raises(ValueError, match=message):
                all_reduce(ones, async_op=async_op, **arguments)
    with pytest.raises(ValueError, match="whose mean is none"):
        all_reduce(torch.ones(4, dtype=torch.int64), op="mean")
    with pytest.raises(ValueError, match="clone"):
        all_reduce(torch.ones(1).expand(3))
    with pytest.raises(TypeError, match="dense"):
        all_reduce(torch.eye(2).to_sparse())
    for dtype in (torch.complex64, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="one of the dtypes float16"):
            all_reduce(torch.ones(4).to(dtype))
    assert torch.equal(all_reduce(ones, async_op=True).wait(), ones)  # the lane is none the worse for it
    shared_lane().close()


@ranks(2)
def test_what_is_started_in_inference_mode_runs_in_it() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
        future = all_reduce(tensor, async_op=True)
        assert future.wait().tolist() == [2.0] * 4
    outside = torch.ones(4)
    all_reduce(outside)
    assert outside.tolist() == [2.0] * 4
