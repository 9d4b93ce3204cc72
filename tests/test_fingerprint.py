"""The checksum against big integers in plain Python, and what it promises to see; differences between ranks' lists."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from ddp_plugin.fingerprint import BASE, Entry, checksum, differences, digests, take_fingerprints
from ddp_plugin.replica_state import HYPERPARAMETER, KINDS, OPTIMIZER_STATE, PARAMETER, replica_state

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
COMPLEX = [torch.complex64, torch.complex128]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (3, 5), (2, 3, 4)]


def by_definition(tensor: Tensor) -> int:
    """The module's formula, word by word, from the bytes of the elements in order."""
    size = tensor.element_size()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = min(size, 4)
    raw = bytes(flat.tolist())
    words = [int.from_bytes(raw[i : i + width], "little", signed=size > 1) for i in range(0, len(raw), width)]
    total = sum(word * BASE**index for index, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def some(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.complex(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "ri")).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_checksum_is_the_polynomial_of_its_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = some(shape, dtype)
    result = checksum(tensor)
    assert result.dtype is torch.int64
    assert result.shape == ()
    assert int(result) == by_definition(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128], ids=str)
def test_chunks_join_without_a_seam(dtype: torch.dtype) -> None:
    num_elements = 2 * 2**16 + 3  # three chunks of one word an element, more of the wider ones
    tensor = some((num_elements,), dtype)
    words = tensor.view(torch.uint8).numpy()
    width = min(tensor.element_size(), 4)
    values = words.view({2: "<i2", 4: "<i4"}[width]).tolist()
    total, power = 0, 1
    for value in values:
        total, power = (total + value * power) % 2**64, power * BASE % 2**64
    assert int(checksum(tensor)) % 2**64 == total


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX], ids=str)
def test_every_changed_bit_is_seen(dtype: torch.dtype) -> None:
    tensor = some((5,), dtype)
    before = int(checksum(tensor))
    seen = set()
    for index, bit in itertools.product(range(5 * tensor.element_size()), range(8)):
        if dtype is torch.bool and bit > 0:
            continue
        changed = tensor.clone()
        changed.view(torch.uint8)[index] ^= 1 << bit
        seen.add(int(checksum(changed)))
    assert before not in seen


def test_no_two_powers_are_closer_than_claimed() -> None:
    """``2 + v`` factors of 2 in ``BASE**j - 1``, so the product with a difference below ``2**32`` is never 0."""
    for exponent in (2**v * odd for v in range(32) for odd in (1, 3, 5, 2**20 + 7)):
        difference = (pow(BASE, exponent, 2**64) - 1) % 2**64
        assert difference & -difference == 4 * (exponent & -exponent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8], ids=str)
def test_every_swap_is_seen(dtype: torch.dtype) -> None:
    """Values whose difference is a power of two, far apart: the worst case for sums modulo a power of two."""
    tensor = torch.ones(2**13, dtype=dtype)
    tensor[0] = 2
    before = int(checksum(tensor))
    for other in [1, 2, 3, *(2**k for k in range(2, 13)), 2**13 - 1]:
        swapped = tensor.clone()
        swapped[0], swapped[other] = 1, 2
        assert int(checksum(swapped)) != before, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signs_of_many_elements_are_seen(dtype: torch.dtype) -> None:
    """All words change by the same power of two, in numbers that are powers of two."""
    for count in (2**k for k in range(15)):
        zeros = torch.zeros(2**14, dtype=dtype)
        changed = zeros.clone()
        changed[:count] = -0.0
        assert int(checksum(zeros)) != int(checksum(changed))


def test_one_nan_is_itself_and_no_other() -> None:
    nan = torch.tensor([1.0, math.nan])
    other = nan.clone()
    other.view(torch.int32)[1] += 1
    assert other[1].isnan()
    assert int(checksum(nan)) == int(checksum(nan.clone()))
    assert int(checksum(nan)) != int(checksum(other))
    assert int(checksum(torch.tensor(0.0))) != int(checksum(torch.tensor(-0.0)))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[:, 3:],
        lambda t: t[:, 1].expand(5, -1),
        lambda t: t.reshape(30, 10, 5, 200).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "every second", "columns", "expanded", "channels last"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_strides_do_not_matter(view: object, dtype: torch.dtype) -> None:
    tensor = view(some((300, 1000), dtype))  # type: ignore[operator]
    assert not tensor.is_contiguous()
    assert int(checksum(tensor)) == int(checksum(tensor.clone(memory_format=torch.contiguous_format)))


@pytest.mark.filterwarnings("ignore:Sparse CSC tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_what_has_no_plain_values() -> None:
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    for sparse in (dense.to_sparse(), dense.to_sparse_csc(), dense.to_sparse_coo().requires_grad_()):
        changed = sparse.detach().clone()
        changed.values()[0] += 1
        moved = torch.tensor([[2.0, 0.0], [3.0, 0.0]])
        moved = moved.to_sparse_csc() if sparse.layout is torch.sparse_csc else moved.to_sparse()
        assert len({int(checksum(each)) for each in (sparse, changed, moved)}) == 3
    uncoalesced = torch.sparse_coo_tensor(torch.tensor([[1, 0]]), torch.tensor([5.0, 4.0]), (2,))
    ordered = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([4.0, 5.0]), (2,))
    assert int(checksum(uncoalesced)) == int(checksum(ordered))
    assert int(checksum(torch.empty(3, device="meta"))) == 0
    assert int(checksum(nn.LazyLinear(3).weight)) == 0
    conjugate = some((4,), torch.complex64).conj()
    assert int(checksum(conjugate)) == int(checksum(conjugate.resolve_conj()))


def test_a_large_tensor_is_not_copied() -> None:
    tensor = torch.zeros(2**22, dtype=torch.float32).view(2**11, 2**11).t()  # 16 MiB, and strided
    checksum(tensor)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        checksum(tensor)
    live_bytes = highest_bytes = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live_bytes += event.nbytes()
            highest_bytes = max(highest_bytes, live_bytes)
    assert 0 < highest_bytes < tensor.nbytes / 8


def test_the_host_waits_once_for_all_tensors() -> None:
    entries = [Entry(PARAMETER, str(index), torch.ones(index)) for index in range(20)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        take_fingerprints(entries)
    names = [event.name for event in profile.events()]
    assert names.count("aten::stack") == 1
    assert not {"aten::item", "aten::_local_scalar_dense"} & set(names)


# -------------------------------------------------------------------------------------------------------------- entries


def adam_after_a_step(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    module.register_buffer("ema", torch.ones(2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return module, optimizer


def names_of(module: nn.Module, optimizer: torch.optim.Optimizer, *ignore: str) -> dict[str, list[str]]:
    entries = replica_state(module, [optimizer], {"global_step": 1}, ignore)
    return {kind: [entry.name for entry in entries if entry.kind == kind] for kind in KINDS}


def test_everything_is_listed_once_and_in_order() -> None:
    module, optimizer = adam_after_a_step()
    names = names_of(module, optimizer)
    parameters = [name for name, _ in module.named_parameters()]
    assert names["parameter"] == names["trainable set"] == parameters
    assert names["buffer"] == ["ema"]
    assert names["progress"] == ["global_step"]
    assert names["optimizer state"] == [
        f"{state} of {name} in Adam 0" for name in parameters for state in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert {name.split()[0] for name in names["hyperparameter"]} == set(optimizer.param_groups[0]) - {"params"}


def test_ignored_names_are_gone_with_their_optimizer_state() -> None:
    module, optimizer = adam_after_a_step()
    names = names_of(module, optimizer, "0.*", "ema", "lr", "global_step", "exp_avg_s*")
    everything = [name for kind in names.values() for name in kind]
    assert not [name for name in everything if "0.weight" in name or "0.bias" in name]
    assert not [name for name in everything if "exp_avg_sq" in name]
    assert "exp_avg of 1.bias in Adam 0" in everything
    assert names["buffer"] == names["progress"] == []
    assert "lr of group 0 of Adam 0" not in everything
    assert "weight_decay of group 0 of Adam 0" in everything


def test_nested_states_are_walked() -> None:
    module = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    names = names_of(module, optimizer)["optimizer state"]
    assert "old_dirs[0] of weight in LBFGS 0" in names
    assert "func_evals of weight in LBFGS 0" in names
    assert "prev_loss" in optimizer.state[module.weight]
    assert not [name for name in names if "prev_loss" in name]


def test_plain_values_and_objects() -> None:
    values = [0.1, -0.0, math.nan, None, True, "x", (0.9, 0.95), [1, (2,)], lambda: None, torch.ones(2, 3)]
    entries = [Entry(HYPERPARAMETER, str(index), value) for index, value in enumerate(values)]
    shown = [item.shown for item in take_fingerprints(entries)]
    assert shown[:8] == ["0.1", "-0.0", "nan", "None", "True", "'x'", "(0.9, 0.95)", "(1, (2))"]
    assert shown[8] == "function"  # two ranks' functions have no address in common
    assert shown[9] == "float32 [2, 3]"


def test_digests_see_names_values_and_order() -> None:
    kinds = (PARAMETER, HYPERPARAMETER)
    base = [Entry(PARAMETER, "a", torch.ones(2)), Entry(PARAMETER, "b", torch.zeros(2))]
    variants = [
        base,
        base[::-1],
        base[:1],
        [Entry(PARAMETER, "a", torch.ones(1, 2)), base[1]],
        [Entry(PARAMETER, "a", torch.full((2,), 1.0, dtype=torch.float64)), base[1]],
        [Entry(PARAMETER, "c", torch.ones(2)), base[1]],
    ]
    results = [digests(take_fingerprints(entries), kinds) for entries in variants]
    assert len({result[0] for result in results}) == len(variants)
    assert len({result[1] for result in results}) == 1
    assert digests(take_fingerprints(base), kinds) == results[0]
    assert all(-(2**63) <= number < 2**63 for result in results for number in result)


def test_differences_name_ranks_by_value_in_order_of_kind() -> None:
    def rank(weight: float, rate: float, has_moment: bool = True) -> list[Entry]:
        entries = [Entry(PARAMETER, "w", torch.tensor([weight])), Entry(PARAMETER, "v", torch.tensor([weight]))]
        entries.append(Entry(HYPERPARAMETER, "lr", rate))
        return entries + [Entry(OPTIMIZER_STATE, "m", torch.zeros(1))] * has_moment

    ranks = [rank(1.0, 0.1), rank(2.0, 0.1, has_moment=False), rank(1.0, 0.2)]
    found = differences([take_fingerprints(entries) for entries in ranks], KINDS)
    assert [(item.kind, item.name, item.is_in_bits) for item in found] == [
        (HYPERPARAMETER, "lr", False),
        (PARAMETER, "w", True),
        (PARAMETER, "v", True),
        (OPTIMIZER_STATE, "m", False),
    ]
    assert [item.describe() for item in found] == [
        "hyperparameter lr: 0.1 on ranks 0, 1, 0.2 on rank 2",
        "parameter w: one value on ranks 0, 2, another on rank 1",
        "parameter v: one value on ranks 0, 2, another on rank 1",
        "optimizer state m: float32 [1] on ranks 0, 2, missing on rank 1",
    ]
    assert differences([take_fingerprints(rank(1.0, 0.1))] * 3, KINDS) == []
