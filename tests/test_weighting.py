"""Weights, sums of weighted gradients and their normalisation, without processes and without Lightning."""

import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_plugin.weighting import (
    GradientWindow,
    batch_size_of,
    checked_weight,
    factor_of,
    nominal_weight,
    scale_gradients,
    without_weightless,
)

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(5),
        [torch.zeros(5, 2), torch.zeros(5)],
        (torch.zeros(5, 1), {"mask": torch.zeros(5, 7), "name": ["a"] * 3, "scale": torch.tensor(2.0)}),
        Pair(torch.zeros(5, 2), [torch.zeros(5)]),
    ],
)
def test_the_number_of_samples_is_the_first_dimension(batch: Any) -> None:
    assert batch_size_of(batch) == 5


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ([torch.zeros(5), torch.zeros(4)], r"first dimensions \[4, 5\]"),
        ({"text": ["a", "b"]}, "dict without a tensor"),
        (torch.tensor(1.0), "Tensor without a tensor"),
        (None, "NoneType without"),
    ],
)
def test_a_batch_that_does_not_tell_its_size_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        batch_size_of(batch)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([[3.0]])])
def test_weights_that_the_host_knows_become_floats(weight: Any) -> None:
    checked = checked_weight(weight)
    assert isinstance(checked, float)
    assert checked == 3.0


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, torch.tensor(-0.5), torch.tensor(math.nan)])
def test_weights_that_are_none_are_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        checked_weight(weight)


@pytest.mark.parametrize("weight", [None, "3", torch.zeros(2), [3], 1j])
def test_weights_that_are_no_number_are_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match="a weight that is one number"):
        checked_weight(weight)


def test_a_device_weight_is_not_looked_at() -> None:
    weight = checked_weight(torch.zeros(1, device="meta"))
    assert isinstance(weight, Tensor)
    assert weight.shape == ()


@pytest.mark.parametrize("largest", [1e-300, 0.3, 1, 1.5, 4095, 4096, 1e300, 1.7e308])
def test_the_nominal_weight_is_a_power_of_two_of_the_same_size(largest: float) -> None:
    nominal = nominal_weight(largest)
    assert math.frexp(nominal)[0] == 0.5
    assert 0.5 <= largest / nominal < 2
    assert nominal_weight(0) == 1


def test_factors_are_rounded_as_the_loss_will_round_them() -> None:
    assert factor_of(1001.0, 1024.0, torch.zeros(())) == 1001 / 1024
    half = factor_of(1001.0, 1024.0, torch.zeros((), dtype=torch.bfloat16))
    assert half == torch.tensor(1001 / 1024, dtype=torch.bfloat16).item() != 1001 / 1024
    on_device = factor_of(torch.tensor(1001), 1024.0, torch.zeros((), dtype=torch.bfloat16))
    assert isinstance(on_device, Tensor)
    assert on_device.dtype == torch.bfloat16
    assert on_device.item() == half


NOT_FINITE = torch.tensor([math.nan, math.inf, 2.0])


@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0, dtype=torch.float64)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_weightless_gradient_is_zero_even_if_it_is_not_finite(zero: Any, sparse: bool) -> None:
    gradient = NOT_FINITE.to_sparse() if sparse else NOT_FINITE
    cleaned = without_weightless(gradient, zero)
    assert cleaned.is_sparse == sparse
    assert torch.equal(cleaned.to_dense(), torch.zeros(3))
    assert not (gradient.to_dense() * zero).isfinite().all()  # multiplying would not do


@pytest.mark.parametrize("one", [1.0, torch.tensor(0.5)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_gradient_with_a_weight_stays_as_it_is(one: Any, sparse: bool) -> None:
    gradient = NOT_FINITE.to_sparse() if sparse else NOT_FINITE
    assert torch.equal(without_weightless(gradient, one).to_dense().nan_to_num(9), NOT_FINITE.nan_to_num(9))


def test_gradients_of_all_kinds_are_scaled() -> None:
    uncoalesced = torch.sparse_coo_tensor([[0, 0, 2]], torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=False)
    gradients = [
        torch.full((2, 2), 3.0, dtype=torch.float64),
        torch.full((3,), 3.0),
        torch.full((3,), 3.0, dtype=torch.bfloat16),
        torch.full((3,), 3.0, dtype=torch.complex64),
        uncoalesced,
    ]
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    scale_gradients(gradients, factor)
    assert (gradients[0] == 3.0 * (1 / 3)).all()
    for gradient in gradients[1:4]:
        assert torch.allclose(gradient, torch.ones_like(gradient), atol=torch.finfo(gradient.dtype).eps)
    assert torch.allclose(uncoalesced.to_dense(), torch.tensor([1.0, 0.0, 1.0, 0.0]))


class ReadsNothing(TorchDispatchMode):
    """Fails where a value would travel from a device to the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("a device was waited for")
        return func(*args, **(kwargs or {}))


def test_tensor_weights_are_never_read() -> None:
    weights, gradient = [torch.tensor(3), torch.tensor(5.0)], torch.tensor([4.0])
    window = GradientWindow()
    with ReadsNothing():
        for weight in weights:
            factor = factor_of(weight, 4.0, gradient)
            without_weightless(gradient, factor)
            window.add(factor)
        total = window.total(torch.device("cpu"))
        window.close([gradient], total[0], 1)
    assert total.tolist() == [2.0, 2.0]
    assert gradient.item() == 2.0
    with pytest.raises(AssertionError, match="waited for"), ReadsNothing():
        total[0].item()


def test_a_window_is_what_happened_since_the_gradients_were_zero() -> None:
    device, window = torch.device("cpu"), GradientWindow()
    gradient = torch.tensor([6.0], dtype=torch.float64)
    window.look_for_zeroing([])
    window.add(1.0)
    window.remember([gradient])
    window.look_for_zeroing([gradient])
    assert window.total(device).tolist() == [1.0, 1.0]
    gradient.mul_(2)  # changed, but not zeroed
    window.look_for_zeroing([gradient])
    window.add(torch.tensor(2.0))
    assert window.total(device).tolist() == [3.0, 2.0]
    window.remember([gradient])
    gradient.zero_()
    window.look_for_zeroing([gradient])
    assert window.total(device).tolist() == [0.0, 0.0]
    window.add(4.0)
    window.remember([gradient])
    window.look_for_zeroing([])
    assert window.total(device).tolist() == [0.0, 0.0]


def test_gradients_that_were_used_and_later_ones_do_not_mix() -> None:
    window, gradient = GradientWindow(), torch.ones(2)
    window.add(1.0)
    window.close([gradient], torch.tensor(1.0), 1)
    assert window.is_normalized
    window.remember([gradient])
    window.look_for_zeroing([gradient])
    window.add(1.0)
    assert window.is_mixed
    window.look_for_zeroing([])
    assert not window.is_mixed


@pytest.mark.parametrize(("total", "expected"), [(0.0, 0.0), (2.0, 6.0), (math.nan, math.nan)])
def test_a_total_of_zero_gives_zeros_and_one_of_nan_stays_visible(total: float, expected: float) -> None:
    gradient = torch.tensor([0.0 if total == 0 else 2.0])
    GradientWindow().close([gradient], torch.tensor(total, dtype=torch.float64), 6)
    assert gradient.item() == pytest.approx(expected, nan_ok=True)
