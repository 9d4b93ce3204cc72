"""What every communication hook promises, tested for all in the table, none by name.

The sharpest test is a sum: what the ranks were given over some steps, plus the mean of what they still hold back, is
the sum of the mean gradients. It holds in every setting of DDP, over a change of buckets, and over a restart on another
number of ranks; whatever a hook loses, counts twice or mixes up between buckets breaks it.
"""

import dataclasses
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.hooks import HOOKS, AttachedHook, CommHook, Contents, attach, resolve_hook, run_hook
from ddp_plugin.hooks._feedback import exchange_with_feedback
from tests.harness import ranks, run_ranks
from tests.traffic import counted_calls

TRAINING = sorted(name for name in HOOKS if HOOKS[name]().refusal is None)
REDUCING = [name for name in TRAINING if HOOKS[name]().outer is None]


def record(name: str, start_step: int = 0) -> CommHook:
    """Four ranks are two nodes of two; fewer are nodes of one, so that no hook takes all of them for a single node."""
    if dist.is_initialized():
        os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_world_size() == 4 else "1"
    return dataclasses.replace(HOOKS[name](), start_step=start_step)


def contents_of(num_elements: int, dtype: torch.dtype) -> Contents:
    """A bucket with a matrix in it, where there is room for one."""
    rows = num_elements // 3 // 40
    shapes: list[tuple[int, ...]] = [(rows, 40), (num_elements - rows * 40,)] if rows else [(num_elements,)]
    return Contents(tuple(f"layer.{i}" for i in range(len(shapes))), tuple(shapes), dtype)


def everyone(values: Tensor) -> Tensor:
    """Returns the values of all ranks, shape ``(world_size, num_elements)``."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.stack(parts)


def assert_same_bits_everywhere(values: Tensor, what: object) -> None:
    assert all(torch.equal(part.nan_to_num(7.0), values.nan_to_num(7.0)) for part in everyone(values)), what


def adversarial(num_elements: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    normal = torch.randn(num_elements, generator=generator, dtype=dtype)
    yield "normal", normal
    yield "all zero", torch.zeros_like(normal)
    yield "tiny", normal * 1e-30
    yield "below the normal numbers", normal * torch.finfo(dtype).smallest_normal * 0.3
    yield "large", normal * 1e4
    huge = normal.clone()
    huge[num_elements // 2] = 3e4
    yield "one huge element", huge
    one = torch.zeros_like(normal)
    one[-1] = dist.get_rank() + 1.0
    yield "one element that is not zero", one
    yield "on one rank only", normal if dist.get_rank() == dist.get_world_size() - 1 else torch.zeros_like(normal)
    yield "heavy tails", normal / torch.rand(num_elements, generator=generator, dtype=dtype).clamp(min=1e-3)
    yield "opposite signs that cancel", torch.ones_like(normal) * (-1.0) ** dist.get_rank()


# ------------------------------------------------------------------------------------------------------ one exchange


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", TRAINING)
def test_the_mean_within_the_declared_bound_and_nothing_lost(name: str, world_size: int) -> None:
    hook = record(name)
    for dtype in (torch.float32, torch.float64):
        exchange = hook.make_exchange(dist.group.WORLD)
        for num_elements in (1, 2, 7, 250, 4099):
            contents = contents_of(num_elements, dtype)
            for what, values in adversarial(num_elements, dtype):
                case = (name, world_size, dtype, num_elements, what)
                given = everyone(values)
                error = torch.full_like(values, torch.nan) if exchange.leaves_error else None
                exchange.mean_(values, contents, error)
                assert_same_bits_everywhere(values, case)
                mean = given.double().mean(dim=0)
                bound = hook.error_bound(given, contents)
                rounding = (world_size + 4) * torch.finfo(dtype).eps * given.double().abs().amax(dim=0)
                assert bound.shape in ((1, num_elements), given.shape), case
                assert ((values.double() - mean).abs() <= bound.amax(dim=0) + rounding).all(), case
                if error is not None:
                    kept = everyone(error).double().mean(dim=0)
                    allowance = 64 * torch.finfo(dtype).eps * (given.double().abs().max() + kept.abs().max())
                    allowance += 64 * torch.finfo(dtype).smallest_normal
                    assert ((values.double() + kept - mean).abs() <= allowance).all(), case
                if what == "all zero":
                    assert not values.any(), case


@ranks(1, 3)
@pytest.mark.parametrize("name", TRAINING)
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_does_not_stay(name: str, world_size: int) -> None:
    contents = contents_of(999, torch.float32)
    for bad in (torch.nan, torch.inf, -torch.inf):
        exchange = record(name).make_exchange(dist.group.WORLD)
        residual = torch.zeros(999)
        for step in range(4):
            values = torch.randn(999, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            if step == 1 and dist.get_rank() == world_size - 1:
                values[500] = bad
            if exchange.leaves_error:
                exchange_with_feedback(exchange, values, contents, residual)
            else:
                exchange.mean_(values, contents)
            assert_same_bits_everywhere(values, (name, bad, step))
            assert values[500].isfinite() == (step != 1), (name, bad, step)
            assert step == 1 or values.isfinite().all(), (name, bad, step)
            assert residual.isfinite().all(), (name, bad, step)


@ranks(3)
@pytest.mark.parametrize("name", TRAINING)
def test_error_feedback_makes_the_running_mean_converge(name: str) -> None:
    hook, contents = record(name), contents_of(2400, torch.float64)
    gradient = torch.randn(2400, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    mean = everyone(gradient).mean(dim=0)
    exchange = hook.make_exchange(dist.group.WORLD)
    if not exchange.leaves_error:
        return
    num_steps = 400

    def distance(feeds_back: bool) -> float:
        residual, total = torch.zeros_like(gradient), torch.zeros_like(gradient)
        for _ in range(num_steps):
            values = gradient.clone()
            exchange_with_feedback(exchange, values, contents, residual)
            total += values
            if not feeds_back:
                residual.zero_()
        return float((total / num_steps - mean).norm())

    without = distance(feeds_back=False)
    assert without > 1e-6 * float(mean.norm()), name  # else there would be nothing to feed back
    assert distance(feeds_back=True) < 0.3 * without, name


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", sorted(HOOKS))
def test_the_bytes_that_are_sent_are_the_declared_ones(name: str, world_size: int) -> None:
    hook = record(name)
    for num_elements in (40, 4099, 60_000):
        contents = contents_of(num_elements, torch.float32)
        exchange = hook.make_exchange(dist.group.WORLD)
        values = torch.randn(num_elements, generator=torch.Generator().manual_seed(dist.get_rank()))
        with counted_calls() as calls:
            exchange.mean_(values, contents, torch.empty_like(values) if exchange.leaves_error else None)
        declared = hook.wire_bytes(contents, world_size, dist.get_rank())
        assert calls.sent_bytes == pytest.approx(declared, rel=0.05, abs=8), (name, num_elements)
        assert (declared == 0) == (world_size == 1 or hook.refusal is not None), (name, num_elements)


# ------------------------------------------------------------------------------------------------------- a model in DDP


class Net(nn.Module):
    """Matrices that are worth compressing, a convolution, vectors, a number, and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 36)
        self.convolution = nn.Conv1d(1, 8, 5, padding=2)
        self.sometimes = nn.Linear(36, 36)
        self.last = nn.Linear(36, 24)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, leaves_out: bool = False) -> Tensor:
        x = self.convolution(torch.tanh(self.first(x))[:, None]).mean(dim=1)
        if not leaves_out:
            x = x + torch.tanh(self.sometimes(x))
        return self.last(x) * self.scale


def make_net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def batch(step: int, rank: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4, 24, generator=generator, dtype=torch.float64)


def loss_of(model: Callable[..., Tensor], step: int, rank: int, micro: int, leaves_out: bool) -> Tensor:
    return model(batch(step, rank, micro), leaves_out and rank == 0).square().sum()


def flat(gradients: Any) -> Tensor:
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def own_gradient(net: Net, step: int, rank: int, micros: range, leaves_out: bool) -> Tensor:
    """The gradient of one rank, by plain torch."""
    twin = make_net()
    twin.load_state_dict(net.state_dict())
    for micro in micros:
        loss_of(twin, step, rank, micro, leaves_out).backward()
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters())


def own_gradients(net: Net, step: int, micros: range = range(1), leaves_out: bool = False) -> Tensor:
    """Those of all ranks, shape ``(world_size, num_elements)``."""
    all_ranks = range(dist.get_world_size())
    return torch.stack([own_gradient(net, step, rank, micros, leaves_out) for rank in all_ranks])


def mean_gradient(net: Net, step: int) -> Tensor:
    return own_gradients(net, step).mean(dim=0)


def kept_back(attached: Any, net: Net) -> Tensor:
    """The mean of what the ranks have left out so far, in the order of the parameters."""
    residuals = (attached.state() or {"residuals": {}})["residuals"]
    return flat(residuals.get(name, torch.zeros_like(p)).double() for name, p in net.named_parameters())


SETTINGS: dict[str, dict[str, Any]] = {
    "one bucket": {"bucket_cap_mb": 25},
    "many buckets": {},
    "gradients are views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "accumulation": {"num_micro": 3},
    "accumulation in a static graph": {"num_micro": 3, "static_graph": True},
}


@ranks(1, 2, 3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_gradient_is_lost_in_any_setting_of_ddp(setting: str, world_size: int) -> None:
    for name in REDUCING:
        options = {"bucket_cap_mb": 5e-3, **SETTINGS[setting]}
        num_micro = options.pop("num_micro", 1)
        leaves_out = bool(options.get("find_unused_parameters"))
        net = make_net()
        model = DistributedDataParallel(net, **options)
        # A static graph synchronises its very first micro-batch, and reduces it again with the last one.
        num_reductions_at_first = 2 if num_micro > 1 and model.static_graph else 1
        attached, indices = AttachedHook(record(name, start_step=num_reductions_at_first), model), set()

        def watched(attached: AttachedHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            indices.add(bucket.index())  # noqa: B023  # called in this turn of the loop only
            return run_hook(attached, bucket)

        model.register_comm_hook(attached, watched)
        given, expected = torch.zeros(1), torch.zeros(1)
        for step in range(6):
            model.zero_grad()
            for micro in range(num_micro):
                skips = micro < num_micro - 1 and not (model.static_graph and step == micro == 0)
                with model.no_sync() if skips else nullcontext():
                    loss_of(model, step, dist.get_rank(), micro, leaves_out).backward()
            found = flat(torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters())
            assert_same_bits_everywhere(found, (name, setting, step))
            locals_ = own_gradients(net, step, range(num_micro), leaves_out)
            mean = locals_.mean(dim=0)
            if step == 0:  # exact, by start_step, if a hook can make up for its losses; else within its bound
                largest = sum(own_gradients(net, step, range(i, i + 1), leaves_out).abs() for i in range(num_micro))
                assert isinstance(largest, Tensor)
                bound = attached.hook.error_bound(largest, contents_of(len(found), torch.float64)).amax(dim=0)
                bound = bound * num_reductions_at_first
                allowed = torch.zeros_like(bound) if attached.leaves_error else bound
                assert ((found - mean).abs() <= allowed + 1e-12 * mean.abs().max()).all(), (name, setting)
            given, expected = given + found, expected + mean
        if attached.leaves_error:
            assert torch.allclose(given + kept_back(attached, net), expected, rtol=0, atol=1e-9 * expected.abs().max())
        else:
            assert torch.allclose(given, expected, rtol=0.02, atol=0.02 * expected.abs().max())
        assert (len(indices) > 2) == (setting != "one bucket"), indices
        attached.close()


@ranks(3)
def test_the_backward_thread_never_waits_and_buckets_are_in_flight_together(world_size: int) -> None:
    delay_s = 0.6
    for name in REDUCING:
        net = make_net()
        model = DistributedDataParallel(net, bucket_cap_mb=5e-3)
        attached = AttachedHook(record(name), model)
        futures: list[torch.futures.Future[Tensor]] = []
        spent_s: list[float] = []

        def watched(attached: AttachedHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            begun_s = time.perf_counter()
            futures.append(run_hook(attached, bucket))  # noqa: B023
            spent_s.append(time.perf_counter() - begun_s)  # noqa: B023
            return futures[-1]  # noqa: B023

        model.register_comm_hook(attached, watched)
        for step in range(3):
            futures.clear()
            spent_s.clear()
            loss = loss_of(model, step, dist.get_rank(), 0, leaves_out=False)
            if step == 2:
                dist.barrier()
                if dist.get_rank() == world_size - 1:
                    time.sleep(delay_s)  # until then the others can complete nothing
                begun_s, num_open = time.perf_counter(), []
                net.first.weight.register_hook(lambda _: num_open.append(sum(not f.done() for f in futures)))  # noqa: B023
            loss.backward()
        assert len(futures) > 2, name
        if dist.get_rank() == 0:
            assert max(spent_s) < delay_s / 3, (name, spent_s)
            assert time.perf_counter() - begun_s > delay_s / 2, name  # it did have to wait for the late rank
            assert num_open[0] >= 2, (name, num_open)
        attached.close()


def steps_of(attached: Any, model: Any, net: Net, steps: range) -> tuple[Tensor, Tensor]:
    """Returns the sums of what the ranks were given, and of the true means."""
    given, expected = [], []
    for step in steps:
        model.zero_grad()
        loss_of(model, step, dist.get_rank(), 0, leaves_out=False).backward()
        given.append(flat(p.grad for p in net.parameters()))
        expected.append(mean_gradient(net, step))
    return torch.stack(given).sum(dim=0), torch.stack(expected).sum(dim=0)


def run_part(name: str, state: bytes | None, steps: tuple[int, int], bucket_cap_mb: float) -> bytes:
    """Returns the hook's state and both sums as one file's bytes."""
    net = make_net()
    model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
    attached = attach(record(name, start_step=2), model)
    if state is not None:
        assert attached.load(torch.load(io.BytesIO(state), weights_only=True)[0]) is None
    given, expected = steps_of(attached, model, net, range(*steps))
    file = io.BytesIO()
    torch.save((attached.state(), given, expected), file)
    attached.close()
    return file.getvalue()


@pytest.mark.parametrize("num_ranks", [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", REDUCING)
def test_a_restart_loses_nothing_also_on_another_number_of_ranks(name: str, num_ranks: tuple[int, int]) -> None:
    files = run_ranks(run_part, num_ranks[0], name=name, state=None, steps=(0, 7), bucket_cap_mb=5e-3)
    after = run_ranks(run_part, num_ranks[1], name=name, state=files[0], steps=(7, 12), bucket_cap_mb=25)
    parts = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    states = [state for state, _, _ in parts]
    final, given, expected = torch.load(io.BytesIO(after[0]), weights_only=True)
    given, expected = given + parts[0][1], expected + parts[0][2]
    if final is None or not final["residuals"]:
        assert torch.allclose(given, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))
        return
    assert final["num_steps"] == 12
    for other in states[1:]:
        assert all(torch.equal(other["residuals"][key], states[0]["residuals"][key]) for key in other["residuals"])
    if num_ranks[0] > 1:
        assert any(residual.any() for residual in states[0]["residuals"].values()), "nothing was held back"
    held = flat(final["residuals"][key].double() for key, _ in make_net().named_parameters())
    assert torch.allclose(given + held, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_a_resumed_hook_goes_on_with_the_same_bits(name: str) -> None:
    def make(state: Any) -> tuple[Any, Any, Net]:
        net = make_net()
        model = DistributedDataParallel(net, bucket_cap_mb=25)
        attached = attach(record(name, start_step=1), model)
        steps_of(attached, model, net, range(5))  # after them DDP's buckets are what they stay
        if state is not None:
            attached.load(state)
        return attached, model, net

    uninterrupted = make(None)
    steps_of(*uninterrupted, range(20, 24))
    resumed = make(uninterrupted[0].state())
    assert torch.equal(steps_of(*uninterrupted, range(5, 9))[0], steps_of(*resumed, range(5, 9))[0])


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_sparse_gradients_are_reduced_or_refused_in_words(name: str) -> None:
    net = nn.Embedding(6, 3, sparse=True)
    model = DistributedDataParallel(net)
    attach(record(name), model)
    tokens = torch.tensor([dist.get_rank(), 4])
    refusal = ""
    try:
        model(tokens).sum().backward()
    except TypeError as error:
        refusal = str(error)
    if refusal:
        assert f"dense gradients for comm_hook={name!r}" in refusal
        dist.barrier()  # the other rank may still connect
        return
    assert net.weight.grad is not None
    expected = torch.zeros(6, 3).index_fill(0, torch.tensor([0, 1]), 0.5).index_fill(0, torch.tensor([4]), 1.0)
    assert torch.equal(net.weight.grad.to_dense(), expected)


@ranks(2)
@pytest.mark.parametrize("name", REDUCING)
def test_what_is_left_out_follows_the_scale_of_the_loss(name: str) -> None:
    """Scaled gradients, whose scale changes between steps, are in the end the unscaled ones."""
    net, scale = make_net(), torch.tensor(1.0)
    model = DistributedDataParallel(net, bucket_cap_mb=5e-3)
    attached = AttachedHook(record(name, start_step=1), model, loss_scale=lambda: scale)
    model.register_comm_hook(attached, run_hook)
    given, expected = torch.zeros(1), torch.zeros(1)
    for step, value in enumerate([1.0, 64.0, 64.0, 1024.0, 8.0, 8.0]):
        scale.fill_(value)
        model.zero_grad()
        (loss_of(model, step, dist.get_rank(), 0, leaves_out=False) * value).backward()
        given = given + flat(p.grad / value for p in net.parameters() if p.grad is not None)
        expected = expected + mean_gradient(net, step)
    tolerance = 1e-9 if attached.leaves_error else 0.02
    assert torch.allclose(
        given + kept_back(attached, net), expected, rtol=0, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize("name", sorted(set(HOOKS) - set(TRAINING)))
def test_what_keeps_no_model_equal_does_not_train_unless_told(name: str) -> None:
    with pytest.raises(ValueError, match="write {"):
        CustomDDPStrategy(comm_hook=name)


@ranks(1)
@pytest.mark.parametrize("name", sorted(set(HOOKS) - set(TRAINING)))
def test_and_not_in_a_plain_loop_either(name: str) -> None:
    with pytest.raises(ValueError, match="write {"):
        attach(name, DistributedDataParallel(nn.Linear(1, 1)))


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_unknown_options_are_refused_with_the_hooks_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"comm_hook='{name}'"):
        resolve_hook({"name": name, "no_such_option": 1})
