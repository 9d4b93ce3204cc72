"""The lane: in order, beside the caller, with errors in words, and with nothing let go too early."""

import gc
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin._compat import GradBucket
from ddp_plugin.collectives.lane import Lane, shared_lane
from tests.harness import RankFailureError, ranks, run_ranks


@pytest.fixture
def lane():
    lane = Lane()
    yield lane
    lane.close(timeout_s=10)


def fail() -> None:
    raise ValueError("the first one")


def test_functions_run_in_order_in_one_thread_that_is_not_the_callers(lane: Lane) -> None:
    order: list[int] = []

    def note(i: int) -> str:
        time.sleep(0.002 * (5 - i))  # a pool of threads would finish the last ones first
        order.append(i)
        return threading.current_thread().name

    futures = [lane.submit(lambda i=i: note(i)) for i in range(6)]
    names = [future.wait() for future in reversed(futures)]
    assert order == list(range(6))
    assert set(names) == {"ddp_plugin-lane"}


def test_submitting_does_not_wait(lane: Lane) -> None:
    gate = threading.Event()
    future = lane.submit(gate.wait)
    assert not future.done()
    gate.set()
    assert future.wait() is True


def test_the_thread_has_one_thread_and_no_gradients_and_others_keep_theirs(lane: Lane) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        weight = torch.ones(2, requires_grad=True)
        num_threads, needs_gradient = lane.submit(lambda: (torch.get_num_threads(), (weight * 2).requires_grad)).wait()
        assert (num_threads, needs_gradient) == (1, False)
        assert torch.get_num_threads() == before + 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [before + 2]  # and not the lane's 1, which is the process's default for a moment
    finally:
        torch.set_num_threads(before)


def test_after_an_error_nothing_runs_and_everything_fails_with_it(lane: Lane) -> None:
    gate, ran = threading.Event(), []

    def wait_and_fail() -> None:
        gate.wait()
        fail()

    first = lane.submit(wait_and_fail)
    queued = lane.submit(lambda: ran.append("queued"))
    gate.set()
    for future in (first, queued):
        with pytest.raises(RuntimeError, match="ValueError: the first one"):
            future.wait()
    with pytest.raises(ValueError, match="the first one"):
        lane.drain()
    later = lane.submit(lambda: ran.append("later"))
    assert later.done()  # at once, without the thread
    with pytest.raises(RuntimeError, match="ValueError: the first one"):
        later.wait()
    assert ran == []


def test_drain_waits_for_everything_and_may_not_be_called_inside(lane: Lane) -> None:
    done: list[int] = []
    lane.drain()  # nothing was submitted
    for i in range(3):
        lane.submit(lambda i=i: (time.sleep(0.01), done.append(i)))
    lane.drain()
    assert done == [0, 1, 2]
    with pytest.raises(RuntimeError, match="outside the lane"):
        lane.submit(lane.drain).wait()


def test_close_finishes_what_was_submitted_and_refuses_more(lane: Lane) -> None:
    future = lane.submit(lambda: time.sleep(0.05) or "done")
    lane.close()
    assert future.done()
    assert future.value() == "done"
    lane.close()
    with pytest.raises(RuntimeError, match="Make a new Lane"):
        lane.submit(fail)
    Lane().close()  # one that never started


def test_what_a_function_refers_to_lives_until_it_is_done_and_no_longer(lane: Lane) -> None:
    gate, tensor = threading.Event(), torch.ones(3)
    argument = weakref.ref(tensor)
    future = lane.submit(lambda tensor=tensor: (gate.wait(), tensor + 1)[1])
    del tensor
    gc.collect()
    assert argument() is not None
    gate.set()
    result = weakref.ref(future.wait())
    lane.drain()
    gc.collect()
    assert argument() is None  # although the future is still there
    assert result() is not None
    del future
    gc.collect()
    assert result() is None  # although nothing else was submitted


def test_the_shared_lane_is_one_until_it_is_closed() -> None:
    first = shared_lane("cpu")
    assert shared_lane(torch.device("cpu")) is first
    first.close()
    second = shared_lane()
    assert second is not first
    assert second.submit(lambda: 5).wait() == 5
    second.close()


def lane_hook(state: tuple[Lane, dist.ProcessGroup], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    lane, group = state
    values = bucket.buffer()

    def exchange() -> torch.Tensor:
        for _ in range(2):  # two collectives in a row: what callbacks of futures cannot do
            dist.all_reduce(values, group=group)
            values.div_(group.size())
        return values

    return lane.submit(exchange)


def wide_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64, dtype=torch.float64) for _ in range(6)))


@ranks(2, 3)
def test_ddp_takes_the_futures_of_several_buckets(world_size: int) -> None:
    model = wide_model()
    reference = wide_model()
    lane, group = Lane(), dist.new_group(backend="gloo")
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.05)
    wrapped.register_comm_hook((lane, group), lane_hook)
    for step in range(3):
        inputs = torch.randn(world_size, 4, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for one in (model, reference):
            one.zero_grad()
        wrapped(inputs[dist.get_rank()]).square().mean().backward()
        reference(inputs).square().mean().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    lane.close()


def failing_hook(lane: Lane, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return lane.submit(fail)


def one_backward_with_failing_hook() -> None:
    wrapped = DistributedDataParallel(wide_model())
    wrapped.register_comm_hook(Lane(), failing_hook)
    wrapped(torch.ones(2, 64, dtype=torch.float64)).sum().backward()


def test_an_error_in_the_lane_reaches_whoever_called_backward() -> None:
    with pytest.raises(RankFailureError, match="ValueError: the first one"):
        run_ranks(one_backward_with_failing_hook, 1)
