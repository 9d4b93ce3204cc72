"""Top-k against a full sort in one process, in float64."""

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_plugin.hooks import HOOKS, Contents
from ddp_plugin.hooks._feedback import exchange_with_feedback
from ddp_plugin.hooks.topk import LargestElements, largest_positions, num_sent
from tests.harness import ranks

STRIDE = 61  # of the sample that the selection takes on a CPU
MANY = 200_000  # enough for it to be taken
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def contents_of(num_elements: int, dtype: torch.dtype = torch.float64) -> Contents:
    return Contents(("w",), ((num_elements,),), dtype)


def normal(num_elements: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exchanged(values: Tensor, density: float) -> tuple[Tensor, Tensor]:
    error = torch.full_like(values, torch.nan)
    LargestElements(dist.group.WORLD, density).mean_(values, contents_of(len(values), values.dtype), error)
    return values, error


def sparse_mean(gradients: list[Tensor], num: int) -> Tensor:
    """The mean of what is left of each when all but the ``num`` largest are zero; no two may have one magnitude."""
    total = torch.zeros(len(gradients[0]), dtype=torch.float64)
    for gradient in gradients:
        by_size = sorted(range(len(gradient)), key=lambda i: -abs(float(gradient[i])))
        for position in by_size[:num]:
            total[position] += float(gradient[position])
    return total / len(gradients)


def assert_same_bits_everywhere(values: Tensor) -> None:
    of_rank_0 = values.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(values.view(torch.uint8), of_rank_0.view(torch.uint8))


# ----------------------------------------------------------------------------------------------------------- selection


def hidden_from_the_sample() -> Tensor:
    values = normal(MANY)
    values[::STRIDE] = 0  # the sample sees nothing
    return values


def seen_by_the_sample_alone() -> Tensor:
    values = 1e-3 * normal(MANY)
    values[::STRIDE] *= 1e6  # the sample thinks that everything is large
    return values


SELECTIONS = {
    "normal": normal(MANY),
    "fp32": normal(MANY, dtype=torch.float32),
    "heavy tails": normal(MANY) / normal(MANY, seed=1),
    "few": normal(300),
    "sorted": normal(MANY).sort().values,
    "hidden from the sample": hidden_from_the_sample(),
    "seen by the sample alone": seen_by_the_sample_alone(),
    "zero": torch.zeros(MANY),
    "one element": torch.zeros(MANY).index_fill_(0, torch.tensor(7), -3.0),
    "equal": torch.ones(MANY),
    "few magnitudes": normal(MANY).round(),
}


@pytest.mark.parametrize("num", [1, 2, 299, 2000, 25_000, 25_001, MANY])
@pytest.mark.parametrize("kind", SELECTIONS)
def test_the_selection_is_that_of_a_full_sort(kind: str, num: int) -> None:
    values = SELECTIONS[kind]
    num = min(num, len(values))
    positions = largest_positions(values, num)
    assert positions.shape == (num,)
    assert len(positions.unique()) == num
    expected = values.abs().sort(descending=True).values[:num]  # which of equal ones is taken is open
    assert torch.equal(values[positions].abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("num_elements", [300, MANY])
@pytest.mark.parametrize("num_bad", [1, 3, 200])
def test_what_is_not_finite_is_selected_first_and_nan_before_inf(num_elements: int, num_bad: int) -> None:
    values = normal(num_elements)
    bad = torch.randperm(num_elements, generator=torch.Generator().manual_seed(0))[:num_bad]
    values[bad] = torch.tensor([torch.nan, torch.inf, -torch.inf]).double()[torch.arange(num_bad) % 3]
    assert set(bad.tolist()) <= set(largest_positions(values, 200).tolist())
    num_nan = int(values.isnan().sum())
    assert values[largest_positions(values, num_nan)].isnan().all()


def test_a_selection_of_many_sorts_few(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    inner = Tensor.topk
    monkeypatch.setattr(Tensor, "topk", lambda self, *a, **k: (lengths.append(len(self)), inner(self, *a, **k))[1])
    largest_positions(normal(MANY), 2000)
    assert max(lengths) < 10_000


def test_the_number_that_is_sent_is_a_part_rounded_up_and_never_none() -> None:
    assert [num_sent(n, 0.01) for n in (1, 99, 100, 101, 1000)] == [1, 1, 1, 2, 10]
    assert num_sent(7, 1.0) == 7
    assert num_sent(2**40, 2.0**-30) == 1024


@pytest.mark.parametrize("options", [{"density": 0}, {"density": 1.1}, {"density": math.nan}, {"start_step": -1}])
def test_options_out_of_range_are_refused_in_words(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        HOOKS["topk"](**options)


# ------------------------------------------------------------------------------------------------------------ exchange


@ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_is_the_mean_of_what_each_rank_sends(world_size: int, dtype: torch.dtype) -> None:
    for num_elements, density in itertools.product((1, 7, 301), (0.01, 0.1, 0.9)):
        assert_mean_of_what_is_sent(world_size, dtype, num_elements, density)


def assert_mean_of_what_is_sent(world_size: int, dtype: torch.dtype, num_elements: int, density: float) -> None:
    gradients = [normal(num_elements, seed, dtype) for seed in range(world_size)]
    own = gradients[dist.get_rank()]
    values, error = exchanged(own.clone(), density)
    assert_same_bits_everywhere(values)
    num = math.ceil(density * num_elements)
    eps = torch.finfo(dtype).eps
    expected = sparse_mean(gradients, num)
    torch.testing.assert_close(values.double(), expected, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(
        error.double() + sparse_mean([own], num), own.double(), rtol=0, atol=0
    )  # what is left out is the rest, exactly
    assert int((error == 0).sum()) == num
    assert error.double().square().sum() <= (1 - num / num_elements) * own.double().square().sum() * (1 + 1e-6)


@ranks(1, 2, 3)
def test_everything_sent_is_an_all_reduce(world_size: int) -> None:
    gradients = [normal(101, seed) for seed in range(world_size)]
    values, error = exchanged(gradients[dist.get_rank()].clone(), 1.0)
    torch.testing.assert_close(values, torch.stack(gradients).mean(dim=0), rtol=1e-14, atol=1e-15)
    assert not error.any()


@ranks(1)
def test_one_rank_leaves_nothing_out() -> None:
    own = normal(300)
    values, error = exchanged(own.clone(), 0.01)
    assert torch.equal(values, own)
    assert not error.any()


@ranks(2, 3)
def test_of_equal_magnitudes_every_rank_takes_the_same_ones(world_size: int) -> None:
    own = torch.ones(1000, dtype=torch.float64)
    own[dist.get_rank()] = 2.0
    values, error = exchanged(own.clone(), 0.1)
    assert_same_bits_everywhere(values)
    total = error.clone()
    dist.all_reduce(total)
    mean = torch.ones(1000, dtype=torch.float64)
    mean[:world_size] += 1 / world_size
    torch.testing.assert_close(values + total / world_size, mean, rtol=1e-14, atol=0)


@ranks(2, 3)
def test_with_feedback_everything_arrives_in_the_end(world_size: int) -> None:
    num_elements, exchange = 400, LargestElements(dist.group.WORLD, 0.05)
    residual, arrived = (torch.zeros(num_elements, dtype=torch.float64) for _ in range(2))
    for step in range(60):
        values = normal(num_elements, 10 * step + dist.get_rank())
        exchange_with_feedback(exchange, values, contents_of(num_elements), residual)
        arrived += values
    true = sum(normal(num_elements, 10 * step + rank) for step in range(60) for rank in range(world_size))
    left = residual.clone()
    dist.all_reduce(left)
    torch.testing.assert_close(arrived + left / world_size, true / world_size, rtol=0, atol=1e-12)
    waiting = torch.stack([normal(num_elements, 10 * step + dist.get_rank()) for step in range(60)]).sum(dim=0)
    assert residual.norm() < waiting.norm()  # less than what it would have without sending


@ranks(2, 3)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible_and_stays_out_of_the_residual(world_size: int, bad: float) -> None:
    contents, residual = contents_of(300), torch.zeros(300, dtype=torch.float64)
    exchange = LargestElements(dist.group.WORLD, 0.02)  # six elements
    for step, num_bad in enumerate((0, 3, 0, 6, 7, 300, 0)):
        values, before = normal(300, 10 * step + dist.get_rank()), residual.clone()
        if dist.get_rank() == world_size - 1:
            values[300 - num_bad :] = bad
        exchange_with_feedback(exchange, values, contents, residual)
        assert_same_bits_everywhere(values)
        is_bad = values.isfinite().logical_not()
        if num_bad <= 3:
            assert is_bad.nonzero().flatten().tolist() == list(range(300 - num_bad, 300))
        else:
            assert is_bad.all()  # there may be more than could be sent
        assert residual.isfinite().all()
        if dist.get_rank() == world_size - 1 and num_bad:
            assert torch.equal(residual[300 - num_bad :], before[300 - num_bad :])


ADVERSARIAL = ("normal", "zero", "tiny", "one huge", "one huge on one rank", "largest", "equal")


def adversarial(kind: str, rank: int, dtype: torch.dtype) -> Tensor:
    info, values = torch.finfo(dtype), normal(301, rank, dtype)
    if kind == "zero":
        values.zero_()
    if kind == "tiny":
        values *= info.smallest_normal
    if kind == "one huge" or (kind == "one huge on one rank" and rank == 0):
        values[100] = info.max / 4
    if kind == "largest":
        values = values.sign() * info.max / 4
    if kind == "equal":
        values = values.sign()
    return values


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_stays_below_its_bound(world_size: int, dtype: torch.dtype) -> None:
    for kind, density in itertools.product(ADVERSARIAL, (0.01, 1.0)):
        assert_below_bound(world_size, kind, dtype, density)


def assert_below_bound(world_size: int, kind: str, dtype: torch.dtype, density: float) -> None:
    contents = contents_of(301, dtype)
    gradients = torch.stack([adversarial(kind, rank, dtype) for rank in range(world_size)])
    values = gradients[dist.get_rank()].clone()
    residual = torch.zeros(301, dtype=torch.promote_types(dtype, torch.float32))
    exchange_with_feedback(LargestElements(dist.group.WORLD, density), values, contents, residual)
    assert_same_bits_everywhere(values)
    if kind == "zero":
        assert not values.any()
    bound = HOOKS["topk"](density=density).error_bound(gradients, contents)
    assert bound.shape == (1, 301)
    mean = (gradients.double() / world_size).sum(dim=0)
    assert ((values.double() - mean).abs() - bound[0]).max() <= 0, (kind, density)


@ranks(2, 3)
def test_one_collective_carries_what_the_formula_says(world_size: int) -> None:
    received: list[int] = []
    topk_module = importlib.import_module("ddp_plugin.hooks.topk")  # a function has the same name
    inner = topk_module.all_gather

    def counting(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        received.append(out.nbytes - own.nbytes)  # in a ring as much is sent
        inner(out, own, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_module, "all_gather", counting)
        for dtype in DTYPES:
            received.clear()
            hook, contents = HOOKS["topk"](density=0.03), contents_of(301, dtype)
            values = normal(301, dist.get_rank(), torch.promote_types(dtype, torch.float32))
            hook.make_exchange(dist.group.WORLD).mean_(values, contents, torch.empty_like(values))
            assert received == [hook.wire_bytes(contents, world_size, dist.get_rank())]


def test_positions_take_eight_bytes_only_where_four_do_not_reach() -> None:
    hook = HOOKS["topk"](density=2.0**-31)
    assert hook.wire_bytes(contents_of(2**31, torch.float32), 2, 0) == 4 + 4
    assert hook.wire_bytes(contents_of(2**31 + 1, torch.float32), 2, 0) == 2 * (4 + 8)
