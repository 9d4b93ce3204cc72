"""PowerSGD against the power method on the mean matrix, computed in one process in float64 by other means."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.hooks import HOOKS, Contents, attach
from ddp_plugin.hooks._feedback import exchange_with_feedback
from ddp_plugin.hooks._low_rank import Packing, orthonormal_rows, starting_rows
from tests.harness import ranks, run_ranks

SHAPES = {"first": (30, 24), "bias": (30,), "conv": (16, 3, 3, 5), "scalar": (), "twin": (30, 24), "small": (3, 4)}
MATRICES = ("first", "conv", "twin")
RANK = 2


def contents_of(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> Contents:
    return Contents(tuple(shapes), tuple(shapes.values()), dtype)


def gradient(rank: int, step: int = 0, contents: Contents | None = None, scale: float = 1.0) -> Tensor:
    contents = contents or contents_of()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randn(contents.num_elements, generator=generator, dtype=torch.float64)
    return (scale * drawn).to(contents.dtype)


def mean_of(num_ranks: int, step: int = 0) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(num_ranks)]).mean(dim=0)


def make(**options: Any) -> Any:
    return HOOKS["powersgd"](**{"matrix_rank": RANK, **options}).make_exchange(dist.group.WORLD)


def exchanged(exchange: Any, values: Tensor, contents: Contents | None = None) -> tuple[Tensor, Tensor]:
    error = torch.full_like(values, torch.nan)
    exchange.mean_(values, contents or contents_of(), error)
    return values, error


def mean_over_ranks(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def assert_same_bits_everywhere(values: Tensor) -> None:
    of_rank_0 = values.clone()
    dist.broadcast(of_rank_0, 0)
    assert torch.equal(values.view(torch.uint8), of_rank_0.view(torch.uint8))


class PowerMethod:
    """What error feedback and low rank come to on the mean alone: projections by singular vectors, no factors."""

    def __init__(self, start: dict[str, Tensor]) -> None:
        self.right = {name: rows.T for name, rows in start.items()}
        self.left_out: dict[str, Tensor] = {}

    def step(self, flat: Tensor, contents: Contents | None = None) -> Tensor:
        parts = []
        for name, value in (contents or contents_of()).split(flat):
            if name not in self.right:
                parts.append(value.flatten())
                continue
            matrix = value.flatten(1) + self.left_out.get(name, 0.0)
            columns = torch.linalg.svd(matrix @ self.right[name], full_matrices=False).U
            result = columns @ (columns.T @ matrix)
            self.left_out[name], self.right[name] = matrix - result, matrix.T @ columns
            parts.append(result.flatten())
        return torch.cat(parts)


def starts(seed: int = 0, rank: int = RANK, draw: int = 0) -> dict[str, Tensor]:
    return {name: starting_rows(f"{name} {draw}", rank, math.prod(SHAPES[name][1:]), seed) for name in MATRICES}


# ------------------------------------------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", ["smallest", "one", "largest"])
@pytest.mark.parametrize("kind", ["full", "dependent", "zero", "one element"])
def test_rows_are_orthonormal_and_keep_the_span_whatever_the_matrix(dtype: torch.dtype, scale: str, kind: str) -> None:
    info = torch.finfo(dtype)
    factor = {"smallest": info.smallest_normal, "one": 1.0, "largest": info.max / 16}[scale]
    rows = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).clamp(-4, 4)
    if kind == "dependent":
        rows[:, 2:] = rows[:, :2]
    if kind == "zero":
        rows[1] = 0
    if kind == "one element":
        rows[:] = 0
        rows[:, 1, 7] = 1
    found = orthonormal_rows((rows * factor).to(dtype))
    assert found.dtype == dtype
    assert found.is_contiguous()
    torch.testing.assert_close(found @ found.mT, torch.eye(4, dtype=dtype).expand(3, 4, 4), rtol=0, atol=50 * info.eps)
    found = found.double()
    torch.testing.assert_close(rows @ found.mT @ found, rows, rtol=0, atol=500 * info.eps)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_matrix_that_is_not_finite_leaves_the_others_of_its_batch_alone(bad: float) -> None:
    rows = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0))
    expected = orthonormal_rows(rows)
    rows[1, 0, 3] = bad
    found = orthonormal_rows(rows)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_the_first_rows_depend_on_name_and_seed_alone() -> None:
    rows = starting_rows("a", 2, 9, seed=0)
    torch.manual_seed(5)
    assert torch.equal(rows, starting_rows("a", 2, 9, seed=0))
    assert not torch.allclose(rows, starting_rows("b", 2, 9, seed=0))
    assert not torch.allclose(rows, starting_rows("a", 2, 9, seed=1))


def test_what_would_not_become_small_enough_stays_as_it_is() -> None:
    packing = Packing.of(list(SHAPES), list(SHAPES.values()), RANK, 2.0)
    assert [[matrix.name for matrix in group] for group in packing.groups] == [["first", "twin"], ["conv"]]
    assert packing.dense == ((720, 750), (1470, 1471), (2191, 2203))  # bias, scalar, small
    assert (packing.num_left, packing.num_right) == (2 * (30 + 30 + 16), 2 * (24 + 24 + 45))
    exactly_half = (16, 16)  # 256 elements, and 4 x (16 + 16) = 128 in two factors of rank 4
    assert Packing.of(["m"], [exactly_half], 4, 2.0).groups
    assert not Packing.of(["m"], [exactly_half], 4, 2.01).groups
    assert not Packing.of(["m"], [(1, 10_000)], 1, 1.0).groups
    assert not Packing.of(["m"], [(0, 4)], 1, 1.0).groups


@pytest.mark.parametrize(
    "options",
    [
        {"matrix_rank": 0},
        {"matrix_rank": 1.5},
        {"matrix_rank": True},
        {"start_step": -1},
        {"seed": "0"},
        {"min_compression_ratio": 0.5},
        {"min_compression_ratio": math.nan},
    ],
)
def test_options_out_of_range_are_refused_in_words(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        HOOKS["powersgd"](**options)


# ------------------------------------------------------------------------------------------------------------ exchange


@ranks(2, 3)
def test_it_is_the_power_method_on_the_mean_with_what_was_left_out(world_size: int) -> None:
    exchange, contents = make(), contents_of()
    reference = PowerMethod(starts())
    residual = torch.zeros(contents.num_elements, dtype=torch.float64)
    for step in range(5):
        values = gradient(dist.get_rank(), step)
        exchange_with_feedback(exchange, values, contents, residual)
        assert_same_bits_everywhere(values)
        torch.testing.assert_close(values, reference.step(mean_of(world_size, step)), rtol=1e-9, atol=1e-9)
    for name, mean in contents.split(mean_over_ranks(residual)):
        expected = reference.left_out[name] if name in MATRICES else torch.zeros(mean.numel())
        torch.testing.assert_close(mean.flatten(), expected.flatten().double(), rtol=1e-9, atol=1e-9)


@ranks(2, 3)
def test_without_warm_start_each_exchange_begins_with_other_rows(world_size: int) -> None:
    exchange = make(warm_start=False, seed=3)
    for draw in range(3):
        values, _ = exchanged(exchange, gradient(dist.get_rank()))
        assert_same_bits_everywhere(values)
        reference = PowerMethod(starts(seed=3, draw=draw))  # which begins anew, too
        torch.testing.assert_close(values, reference.step(mean_of(world_size)), rtol=1e-9, atol=1e-9)
    after = make(warm_start=False, seed=3)
    after.load(exchange.state())
    assert torch.equal(
        exchanged(after, gradient(dist.get_rank()))[0], exchanged(exchange, gradient(dist.get_rank()))[0]
    )


@ranks(2, 3)
@pytest.mark.parametrize("true_rank", [1, RANK])
@pytest.mark.parametrize("warm_start", [True, False])
def test_a_mean_of_that_rank_arrives_whole_in_every_exchange(world_size: int, true_rank: int, warm_start: bool) -> None:
    """Also when the row space has nothing to do with that of the exchange before, and the rank was lower there."""
    exchange, contents = make(warm_start=warm_start), contents_of({"m": (30, 24)})
    for step, rank in enumerate((true_rank, 1, true_rank, true_rank)):
        generator = torch.Generator().manual_seed(step)
        left, right = (torch.randn(size, generator=generator).double() for size in ((30, rank), (rank, 24)))
        mean = (left @ right).flatten()
        noise = gradient(0, step, contents)  # of full rank, and cancels in the mean
        sign = {0: 1.0, 1: -1.0}.get(dist.get_rank(), 0.0)
        values, _ = exchanged(exchange, mean + sign * noise, contents)
        torch.testing.assert_close(values, mean, rtol=1e-9, atol=1e-9)


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_result_and_error_add_up_to_the_mean(world_size: int, dtype: torch.dtype) -> None:
    contents = contents_of(dtype=dtype)
    exchange = make()
    for step in range(2):
        own = gradient(dist.get_rank(), step, contents)
        values, error = exchanged(exchange, own.clone(), contents)
        mean = mean_over_ranks(own.double())
        if world_size == 1:
            assert torch.equal(values, own)
            assert not error.any()
        torch.testing.assert_close(
            values.double() + mean_over_ranks(error.double()), mean, rtol=0, atol=100 * torch.finfo(dtype).eps
        )


@ranks(2, 3)
def test_what_a_rank_leaves_out_is_never_longer_than_what_it_had(world_size: int) -> None:
    """Even where the mean points the other way: the rest of the mean's own projection would be twice as long there."""
    contents = contents_of({"m": (30, 24)})
    common = gradient(99, 0, contents)
    own = common if dist.get_rank() == 0 else -3.0 * common
    _, error = exchanged(make(), own.clone(), contents)
    assert error.norm() <= own.norm() * (1 + 1e-12)
    of_columns, before = error.view(30, 24).norm(dim=0), own.view(30, 24).norm(dim=0)
    assert (of_columns <= before * (1 + 1e-12)).all()


@ranks(2, 3)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_matrix_that_is_not_finite_is_so_everywhere_and_harms_nothing_else(world_size: int, bad: float) -> None:
    exchange, untouched, contents = make(), make(), contents_of()
    residual, clean_residual = (torch.zeros(contents.num_elements, dtype=torch.float64) for _ in range(2))
    for step in range(3):
        values, clean = (gradient(dist.get_rank(), step) for _ in range(2))
        if step == 1 and dist.get_rank() == world_size - 1:
            values[5] = bad  # in the matrix "first"
            values[725] = bad  # in the bias, which is not compressed
        exchange_with_feedback(exchange, values, contents, residual)
        exchange_with_feedback(untouched, clean, contents, clean_residual)
        assert_same_bits_everywhere(values)
        clean_parts = dict(contents.split(clean))
        for name, value in contents.split(values):
            if step == 1 and name == "first":
                assert value.isnan().all()
            elif step == 1 and name == "bias":
                assert value.isfinite().logical_not().nonzero().flatten().tolist() == [5]
            elif name == "first":
                assert value.isfinite().all()
            else:
                assert torch.equal(value, clean_parts[name])
        assert residual.isfinite().all()
    assert all(rows.isfinite().all() for rows in exchange.state()["right"].values())


@ranks(2)
def test_no_gradient_for_a_while_costs_nothing_of_what_was_found() -> None:
    exchange, contents = make(), contents_of({"m": (30, 24)})
    exchanged(exchange, gradient(dist.get_rank(), 0, contents), contents)
    before = exchange.state()["right"]["m"]
    values, error = exchanged(exchange, torch.zeros(720, dtype=torch.float64), contents)
    assert not values.any()
    assert not error.any()
    assert torch.equal(exchange.state()["right"]["m"], before)


@ranks(2)
def test_the_order_and_division_into_buckets_does_not_matter() -> None:
    whole, divided = make(), make()
    names = list(SHAPES)
    first, second = ({name: SHAPES[name] for name in part} for part in (names[3:], names[:3][::-1]))
    for step in range(3):
        values = gradient(dist.get_rank(), step)
        parts = dict(contents_of().split(values.clone()))
        results = {}
        for shapes in (first, second):
            contents = contents_of(shapes)
            flat = torch.cat([parts[name].flatten() for name in shapes])
            results.update(contents.split(exchanged(divided, flat, contents)[0]))
        for name, value in contents_of().split(exchanged(whole, values)[0]):
            torch.testing.assert_close(results[name], value, rtol=1e-10, atol=1e-10)


ADVERSARIAL = ("normal", "cancelling", "zero", "tiny", "one huge", "one huge on one rank", "largest")


def adversarial(kind: str, rank: int, contents: Contents) -> Tensor:
    values = gradient(rank, 0, contents)
    info = torch.finfo(contents.dtype)
    if kind == "cancelling":
        factor = (1e3 if contents.dtype == torch.float16 else 1e6) * {0: 1, 1: -1}.get(rank, 0)
        values = gradient(0, 0, contents) * factor + values
    if kind == "zero":
        values.zero_()
    if kind == "tiny":
        values *= info.smallest_normal
    if kind == "one huge" or (kind == "one huge on one rank" and rank == 0):
        values[100] = 1e4 if contents.dtype == torch.float16 else 1e30
    if kind == "largest":
        values = values.sign() * info.max / 128
    return values


@ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_error_stays_below_its_bound(world_size: int, dtype: torch.dtype) -> None:
    for kind in ADVERSARIAL:
        assert_below_bound(world_size, kind, dtype)


def assert_below_bound(world_size: int, kind: str, dtype: torch.dtype) -> None:
    contents = contents_of(dtype=dtype)
    gradients = torch.stack([adversarial(kind, rank, contents) for rank in range(world_size)])
    values = gradients[dist.get_rank()].clone()
    work = torch.promote_types(dtype, torch.float32)
    exchange_with_feedback(make(), values, contents, torch.zeros(contents.num_elements, dtype=work))
    assert_same_bits_everywhere(values)
    hook = HOOKS["powersgd"](matrix_rank=RANK)
    bound = hook.error_bound(gradients, contents)
    assert bound.shape == (1, contents.num_elements)
    excess = (values.double() - gradients.double().mean(dim=0)).abs() - bound[0]
    assert excess.max() <= 0, kind


@ranks(1, 2, 3)
def test_two_collectives_carry_what_the_formula_says(world_size: int) -> None:
    sent: list[int] = []
    inner = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return inner(tensor, *args, **kwargs)

    exchange, hook = make(), HOOKS["powersgd"](matrix_rank=RANK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counting)
        for dtype in (torch.bfloat16, torch.float64):
            contents = contents_of(dtype=dtype)
            work = torch.promote_types(dtype, torch.float32)
            sent.clear()
            exchanged(exchange, gradient(dist.get_rank(), 0, contents).to(work), contents)
            assert len(sent) == (0 if world_size == 1 else 2)
            on_the_wire = 2 * (world_size - 1) / world_size * sum(sent)  # by a ring
            assert hook.wire_bytes(contents, world_size, dist.get_rank()) == pytest.approx(on_the_wire, abs=2)
            sent.clear()
            vectors = contents_of({"a": (7,), "b": ()}, dtype)
            exchanged(exchange, gradient(dist.get_rank(), 0, vectors).to(work), vectors)
            assert len(sent) == min(world_size - 1, 1)


# --------------------------------------------------------------------------------------------------- state and training


def run_and_return_state(num_steps: int) -> dict[str, Any]:
    exchange = make()
    for step in range(num_steps):
        exchanged(exchange, mean_of(2, step))
    state: dict[str, Any] = exchange.state()
    return state


def go_on(state: dict[str, Any] | None, step: int) -> Tensor:
    exchange = make()
    if state is not None:
        exchange.load(state)
    return exchanged(exchange, mean_of(2, step))[0]


def test_the_state_goes_on_with_the_same_numbers_on_another_number_of_ranks(tmp_path: Any) -> None:
    states = run_ranks(run_and_return_state, 2, num_steps=3)
    for name, rows in states[0]["right"].items():
        assert torch.equal(rows, states[1]["right"][name])
    torch.save(states[0], tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    reference = PowerMethod(starts())
    for step in range(4):
        reference.left_out.clear()  # these exchanges had no feedback
        expected = reference.step(mean_of(2, step))
    torch.testing.assert_close(run_ranks(go_on, 3, state=state, step=3)[0], expected, rtol=1e-9, atol=1e-9)
    without = run_ranks(go_on, 3, state=None, step=3)[0]
    assert not torch.allclose(without, expected, rtol=1e-3, atol=1e-3)


@ranks(2)
def test_a_state_of_other_parameters_is_taken_as_far_as_it_fits() -> None:
    other = contents_of({"first": (30, 25), "new": (40, 9), "twin": (30, 24)})
    from_other, fresh = make(), make()
    exchanged(from_other, gradient(dist.get_rank(), 0, other), other)
    exchange = make()
    exchange.load(from_other.state())
    parts = dict(contents_of().split(exchanged(exchange, gradient(dist.get_rank()))[0]))
    expected = dict(contents_of().split(exchanged(fresh, gradient(dist.get_rank()))[0]))
    for name in ("first", "conv", "bias"):  # of another shape, and unknown: as if nothing had been loaded
        torch.testing.assert_close(parts[name], expected[name], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(parts["twin"], expected["twin"], rtol=1e-3, atol=1e-3)  # which is known
    higher = make(matrix_rank=3)
    higher.load(from_other.state())
    assert exchanged(higher, gradient(dist.get_rank()))[0].isfinite().all()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
        )
        self.unused = nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


NUM_STEPS, START_STEP = 6, 2


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(77 * step + rank)
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    return x, torch.stack((x.sum(1), x.pow(2).sum(1), x.prod(1)), dim=1)


def trained_alone(num_ranks: int) -> dict[str, Tensor]:
    """One process: the mean of all ranks' losses, and the power method on its gradients after the exact steps."""
    torch.manual_seed(0)
    network = Network().double()
    matrices = {n: p for n, p in network.layers.named_parameters() if p.shape in ((40, 40), (40, 20))}
    reference = PowerMethod({n: starting_rows(f"layers.{n} 0", 3, p.shape[1], 0) for n, p in matrices.items()})
    for step in range(NUM_STEPS):
        network.zero_grad()
        losses = [(network(x) - y).pow(2).mean() for x, y in (batch(rank, step) for rank in range(num_ranks))]
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for name, parameter in network.layers.named_parameters():
                found = parameter.grad
                if step >= START_STEP:
                    found = reference.step(found.flatten(), Contents((name,), (tuple(parameter.shape),), found.dtype))
                parameter -= 0.05 * found.view_as(parameter)
    return {name: parameter.detach() for name, parameter in network.layers.named_parameters()}


@ranks(2, 3)
@pytest.mark.parametrize(
    "wrap",
    [
        {"bucket_cap_mb": 100},
        {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.01, "static_graph": True},
        {"bucket_cap_mb": 0.01, "find_unused_parameters": True},
    ],
    ids=str,
)
def test_training_equals_one_process_with_any_buckets(world_size: int, wrap: dict[str, Any]) -> None:
    expected = trained_alone(world_size)
    torch.manual_seed(0)
    network = Network().double()
    if "find_unused_parameters" not in wrap:
        network.unused.requires_grad_(False)
    model = DistributedDataParallel(network, **wrap)
    attached = attach({"name": "powersgd", "matrix_rank": 3, "start_step": START_STEP}, model)
    try:
        for step in range(NUM_STEPS):
            model.zero_grad()
            x, y = batch(dist.get_rank(), step)
            (model(x) - y).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in network.layers.parameters():
                    parameter -= 0.05 * parameter.grad
    finally:
        attached.close()
    for name, parameter in network.layers.named_parameters():
        assert_same_bits_everywhere(parameter.detach())
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-8, atol=1e-8)
