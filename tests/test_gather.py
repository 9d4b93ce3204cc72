"""Gathers of unequal things, each against what the ranks are known to hold."""

import pytest
import torch
import torch.distributed as dist

from ddp_plugin.gather import broadcast_object, gather_objects, gather_objects_to, gather_tensors
from tests.harness import ranks

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.bool,
    torch.complex64,
)


def parts_of(rank: int) -> list[torch.Tensor]:
    """What a rank holds: rank tensors of unequal shapes and mixed dtypes; rank 0 holds none."""
    generator = torch.Generator().manual_seed(rank)
    tensors = []
    for index in range(rank * 3):
        shape = (index + rank, 3)[: index % 3]
        tensors.append((torch.randn(shape, generator=generator) * 9).to(DTYPES[(index + rank) % len(DTYPES)]))
    return tensors


@ranks(1, 2, 3)
def test_tensors_of_unequal_number_shape_and_dtype(world_size: int) -> None:
    group = dist.new_group(backend="gloo")
    received = gather_tensors(parts_of(dist.get_rank()), dist.group.WORLD, group)  # type: ignore[arg-type]
    assert len(received) == world_size
    for rank, tensors in enumerate(received):
        for found, expected in zip(tensors, parts_of(rank), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


@ranks(2)
def test_not_a_bit_is_lost() -> None:
    group = dist.group.WORLD
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    transposed = torch.arange(6.0).reshape(2, 3).t()
    received = gather_tensors([odd, transposed, torch.empty(0, 4)], group, group)  # type: ignore[arg-type]
    for tensors in received:
        assert torch.equal(tensors[0].view(torch.int32), odd.view(torch.int32))
        assert torch.equal(tensors[1], transposed)
        assert tensors[2].shape == (0, 4)


@ranks(1, 3)
def test_objects(world_size: int) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    everyone = [{"rank": r, "text": "x" * r} for r in range(world_size)]
    assert gather_objects(everyone[rank], group) == everyone
    assert gather_objects_to(everyone[rank], group, None) == everyone
    last = world_size - 1
    assert gather_objects_to(everyone[rank], group, last) == (everyone if rank == last else [])
    assert broadcast_object(everyone[rank], group) == everyone[0]
    assert broadcast_object(everyone[rank], group, source=last) == everyone[last]


def test_the_list_of_dtypes_is_not_empty() -> None:
    assert len({tensor.dtype for tensor in parts_of(3)}) > 4
    with pytest.raises(ValueError, match="at least 1"):
        ranks(0)
