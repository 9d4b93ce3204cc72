"""The counter of calls counts what the algorithms send."""

import torch
import torch.distributed as dist

from ddp_plugin.collectives import all_reduce, count_traffic
from tests.harness import ranks
from tests.traffic import counted_calls


@ranks(2, 3)
def test_each_collective_is_counted_by_its_algorithm(world_size: int) -> None:
    n, rank = world_size, dist.get_rank()
    group = dist.new_group()
    message = torch.ones(12 * n, dtype=torch.int16).to(torch.float16)  # 24 n bytes

    def sent_by(function, *arguments, **settings) -> float:
        with counted_calls() as calls:
            function(*arguments, **settings)
        assert sum(calls.num_calls.values()) == 1
        return calls.sent_bytes

    assert sent_by(lambda: dist.all_reduce(message, group=group)) == 2 * (n - 1) * 24
    assert sent_by(lambda: dist.all_gather_into_tensor(message.new_empty(12 * n * n), message)) == (n - 1) * 24 * n
    parts = [torch.empty_like(message) for _ in range(n)]
    assert sent_by(lambda: dist.all_gather(parts, message, group)) == (n - 1) * 24 * n
    assert sent_by(lambda: dist.reduce_scatter_tensor(message.new_empty(12), message)) == (n - 1) * 24
    assert sent_by(lambda: dist.all_to_all_single(torch.empty_like(message), message)) == (n - 1) * 24
    assert sent_by(lambda: dist.broadcast(message, 0)) == (n - 1) * 24
    # All to rank 0: what a rank keeps is not sent.
    splits_in, splits_out = [12 * n] + [0] * (n - 1), [12 * n if rank == 0 else 0] * n
    output = message.new_empty(sum(splits_out))
    expected = 0 if rank == 0 else 24 * n
    assert sent_by(lambda: dist.all_to_all_single(output, message, splits_out, splits_in)) == expected
    assert sent_by(lambda: dist.all_to_all_single(output, message, splits_out, input_split_sizes=splits_in)) == expected
    with counted_calls() as calls:
        work = dist.all_reduce(message, async_op=True)
        work.wait()
    assert calls.num_calls == {"all_reduce": 1}
    dist.all_reduce(message)  # after the block nothing is counted
    assert calls.num_calls == {"all_reduce": 1}


@ranks(3)
def test_both_counters_agree_on_sends(world_size: int) -> None:
    with counted_calls() as calls, count_traffic() as traffic:
        all_reduce(torch.ones(1001), algorithm="butterfly", async_op=True).wait()
        all_reduce(torch.ones(10), algorithm="tree")
    assert calls.sent_bytes == traffic.sent_bytes > 0
    assert calls.num_calls == {"isend": traffic.num_messages_sent}
