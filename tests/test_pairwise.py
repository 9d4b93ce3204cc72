"""Exchanges between each two ranks, against torch's own."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_plugin import _compat
from ddp_plugin.collectives import count_traffic
from ddp_plugin.collectives.pairwise import all_gather, all_to_all
from tests.harness import ranks


def parts_of(rank: int, world_size: int, num_elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 200, (world_size, num_elements), generator=generator).to(dtype)


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("num_elements", [1, 7, 300_001])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_parts_arrive_where_they_belong(world_size: int, num_elements: int, dtype: torch.dtype) -> None:
    group, rank = _compat.default_group(), dist.get_rank()
    sent = parts_of(rank, world_size, num_elements, dtype)
    for _ in range(2):  # one after another: nobody takes the next one's parts
        received, expected = torch.empty_like(sent), torch.empty_like(sent)
        with count_traffic() as traffic:
            all_to_all(received, sent, group)
        dist.all_to_all_single(expected, sent)
        assert torch.equal(received, expected)
        assert traffic.sent_bytes == traffic.received_bytes == (world_size - 1) * num_elements * dtype.itemsize
        gathered, listed = torch.empty_like(sent), list(torch.empty_like(sent))
        with count_traffic() as traffic:
            all_gather(gathered, sent[0], group)
        dist.all_gather(listed, sent[0])
        assert torch.equal(gathered, torch.stack(listed))
        assert traffic.sent_bytes == traffic.received_bytes == (world_size - 1) * num_elements * dtype.itemsize
        sent = sent + 1


@ranks(4)
def test_a_group_of_some_ranks_has_numbers_of_its_own() -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([3, 1]), dist.new_group([0, 2])]
    group = groups[0 if rank in (1, 3) else 1]
    received = torch.empty(2, 3)
    all_to_all(received, torch.tensor([[10.0 * rank] * 3, [10.0 * rank + 1] * 3]), group)
    members = dist.get_process_group_ranks(group)
    own = members.index(rank)
    assert torch.equal(received, torch.tensor([[10.0 * member + own] * 3 for member in members]))
