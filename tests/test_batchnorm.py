"""BatchNorm over ranks equals BatchNorm in one process on the whole batch; the conversion loses nothing."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from ddp_plugin.batchnorm import (
    SyncedBatchNorm,
    SyncedBatchNorm1d,
    SyncedBatchNorm2d,
    SyncedBatchNorm3d,
    combine_moments,
    convert_batchnorm,
    local_moments,
)
from ddp_plugin.batchnorm.layers import FusedBatchNorm2d
from tests.harness import RankFailureError, ranks, run_ranks

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
CLASSES = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
TRAILING = {2: (), 3: (5,), 4: (3, 2), 5: (2, 1, 3)}


def layer(num_dims, dtype=torch.float64, **settings):
    torch.manual_seed(1)
    module = CLASSES[num_dims](4, dtype=dtype, **settings)
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0)
    return module


def batches(num_dims, num_steps, num_samples, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    shape = (num_steps, num_samples, 4, *TRAILING[num_dims])
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + torch.arange(4.0).view(
        4, *[1] * (num_dims - 2)
    )
    dy = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.to(dtype), dy.to(dtype)


def shard(x, sizes):
    rank = dist.get_rank()
    return x[:, sum(sizes[:rank]) : sum(sizes[: rank + 1])]


def train(module, xs, dys):
    """Several steps; returns outputs, input gradients and the accumulated gradients of the parameters."""
    outputs, gradients = [], []
    for x, dy in zip(xs, dys, strict=True):
        x = x.clone().requires_grad_()
        y = module(x)
        y.backward(dy)
        outputs.append(y.detach())
        gradients.append(x.grad)
    return torch.stack(outputs), torch.stack(gradients), {n: p.grad for n, p in module.named_parameters()}


def compare_with_one_process(num_dims, sizes, tolerance, *, dtype=torch.float64, prepare=None, **settings):
    xs, dys = batches(num_dims, 3, sum(sizes), dtype)
    reference = layer(num_dims, dtype, **settings)
    module = layer(num_dims, dtype, **settings)
    if prepare is not None:
        prepare(reference)
        prepare(module)
    convert_batchnorm(module)
    wanted_y, wanted_dx, wanted_grads = train(reference, xs, dys)
    y, dx, grads = train(module, shard(xs, sizes), shard(dys, sizes))
    torch.testing.assert_close(y, shard(wanted_y, sizes), **tolerance)
    torch.testing.assert_close(dx, shard(wanted_dx, sizes), **tolerance)
    for name, gradient in grads.items():
        if gradient is not None:
            dist.all_reduce(gradient)
        if wanted_grads[name] is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, wanted_grads[name], **tolerance)
    assert module.state_dict().keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, **tolerance)
    module.eval()
    reference.eval()
    torch.testing.assert_close(module(xs[0]), reference(xs[0]), **tolerance)


def sizes_of(world_size, kind):
    return {
        "equal": [4] * world_size,
        "unequal": [5, 1, 3][:world_size],
        "empty": [4, 0, 2][:world_size],
        "one_each": [1] * (world_size - 1) + [2],
    }[kind]


@pytest.mark.parametrize("kind", ["equal", "unequal", "empty", "one_each"])
@ranks(1, 2, 3)
def test_equals_one_process(world_size, kind):
    for num_dims in CLASSES:
        compare_with_one_process(num_dims, sizes_of(world_size, kind), TOLERANCE)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": None},
        {"momentum": 0.0},
        {"track_running_stats": False},
        {"affine": False},
        {"eps": 0.5},
    ],
    ids=str,
)
@ranks(2)
def test_settings_equal_one_process(world_size, settings):
    for num_dims in (2, 4):
        compare_with_one_process(num_dims, [4, 2], TOLERANCE, **settings)


@pytest.mark.skipif("bias" not in nn.BatchNorm2d.__init__.__kwdefaults__, reason="this torch has no bias=False")
@ranks(2)
def test_a_scale_without_bias_equals_one_process():
    compare_with_one_process(4, [4, 2], TOLERANCE, bias=False)


@ranks(2)
def test_a_frozen_scale_gets_no_gradient():
    compare_with_one_process(4, [4, 2], TOLERANCE, prepare=require_nothing)


def require_nothing(module):
    module.weight.requires_grad_(False)
    module.bias.requires_grad_(False)


@ranks(2)
def test_a_frozen_layer_equals_one_process_and_communicates_nothing():
    with counted_collectives() as calls:
        compare_frozen()
    assert calls == []


def compare_frozen():
    xs, dys = batches(4, 2, 6)
    reference, module = layer(4).eval(), layer(4).eval()
    convert_batchnorm(module)
    for wanted, got in zip(train(reference, xs, dys)[:2], train(module, xs, dys)[:2], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@contextlib.contextmanager
def counted_collectives():
    """Notes the name of every collective that the layer starts."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "all_reduce"):
            original = getattr(dist, name)

            def counting(*args, _name=name, _original=original, **kwargs):
                calls.append(_name)
                return _original(*args, **kwargs)

            patch.setattr(dist, name, counting)
        yield calls


@ranks(2)
def test_one_collective_forward_and_one_backward():
    module = layer(4)
    convert_batchnorm(module)
    x = torch.randn(2, 4, 3, 2, dtype=torch.float64)
    with counted_collectives() as calls:
        module(x).sum().backward()  # the input of the first layer needs no gradient
        assert calls == ["all_gather"]
        module(x.requires_grad_()).sum().backward()
        assert calls == ["all_gather", "all_gather", "all_reduce"]
        module.eval()(x)
    assert len(calls) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@ranks(2)
def test_low_precision_inputs_have_float32_statistics(dtype):
    """The reference is float64 on the same rounded inputs: only the rounding of the result itself may differ."""
    sizes, offset = [40, 24], 100.0  # far from zero, where statistics in half precision would be lost
    xs = (torch.randn(1, 64, 4, 3, 2, generator=torch.Generator().manual_seed(3)) + offset).to(dtype)
    dys = torch.randn(1, 64, 4, 3, 2, generator=torch.Generator().manual_seed(4)).to(dtype)
    reference, module = layer(4), layer(4, torch.float32)
    convert_batchnorm(module)
    wanted_y, wanted_dx, wanted_grads = train(reference, xs.double(), dys.double())
    y, dx, grads = train(module, shard(xs, sizes), shard(dys, sizes))
    assert y.dtype == dx.dtype == dtype
    spacing = torch.finfo(dtype).eps
    close = {"rtol": spacing, "atol": max(spacing, 1e-4)}
    torch.testing.assert_close(y.double(), shard(wanted_y, sizes), **close)
    torch.testing.assert_close(dx.double(), shard(wanted_dx, sizes), **close)
    for name, gradient in grads.items():
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient.double(), wanted_grads[name], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(module.running_mean.double(), reference.running_mean, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(module.running_var.double(), reference.running_var, rtol=1e-5, atol=1e-5)


@ranks(2)
def test_autocast_and_half_modules_keep_dtypes():
    x = torch.randn(4, 4, 3, 2)
    plain, module = layer(4, torch.float32), layer(4, torch.float32)
    convert_batchnorm(module)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).dtype == plain(x.bfloat16()).dtype == torch.bfloat16
        assert module(x).dtype == plain(x).dtype == torch.float32
    half = layer(4, torch.bfloat16)
    convert_batchnorm(half)
    y = half(x.bfloat16().requires_grad_())
    y.float().sum().backward()
    assert y.dtype == half.weight.grad.dtype == half.bias.grad.dtype == half.running_mean.dtype == torch.bfloat16


@ranks(2)
def test_memory_format_is_kept():
    module = layer(4)
    convert_batchnorm(module)
    x = torch.randn(4, 4, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    y = module(x)
    y.backward(torch.ones_like(y))
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, module(x.detach().contiguous()), **TOLERANCE)


@ranks(2)
def test_gradient_equals_finite_differences_over_all_ranks():
    """Moves each input value on each rank, and watches the loss summed over all ranks."""
    module = layer(2)
    convert_batchnorm(module)
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    x = torch.randn(2 + dist.get_rank(), 4, generator=generator, dtype=torch.float64)
    weights = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def loss(values):
        total = (module(values).square() * weights).sum()
        moved = total.detach().clone()
        dist.all_reduce(moved)
        return total, moved

    leaf = x.clone().requires_grad_()
    loss(leaf)[0].backward()
    step = 1e-5
    for rank, num_rows in enumerate((2, 3)):
        for row in range(num_rows):
            for column in range(4):
                ends = []
                for sign in (1, -1):
                    moved = x.clone()
                    if rank == dist.get_rank():
                        moved[row, column] += sign * step
                    ends.append(loss(moved)[1])
                if rank == dist.get_rank():
                    slope = (ends[0] - ends[1]) / (2 * step)
                    torch.testing.assert_close(leaf.grad[row, column], slope, rtol=1e-6, atol=1e-7)


@ranks(2)
def test_double_backward_is_refused():
    module = layer(2)
    convert_batchnorm(module)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@ranks(2, 3)
def test_one_value_per_channel_over_all_ranks_raises_on_all():
    module = layer(2)
    convert_batchnorm(module)
    x = torch.randn(1 if dist.get_rank() == 1 else 0, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"more than 1 value per channel over all ranks.*Got 1 "):
        module(x)
    assert module.num_batches_tracked == 0
    assert module(torch.randn(1, 4, dtype=torch.float64)).shape == (1, 4)  # 1 a rank are enough together


@ranks(2)
def test_a_batch_that_is_empty_everywhere_leaves_the_statistics_alone():
    plain, module = layer(2), layer(2)
    convert_batchnorm(module)
    x = torch.empty(0, 4, dtype=torch.float64, requires_grad=True)
    y = module(x)
    y.sum().backward()
    plain(x)
    assert y.shape == x.grad.shape == (0, 4)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=0, atol=0)


@ranks(2)
def test_wrong_number_of_dimensions_is_refused():
    for num_dims, cls in CLASSES.items():
        module = cls(4)
        convert_batchnorm(module)
        wrong = torch.randn(3, 4, *[1] * 4)
        with pytest.raises(ValueError, match="dimensions"):
            module(wrong)
        module(torch.randn(3, 4, *TRAILING[num_dims]))
    module = nn.SyncBatchNorm(4)
    convert_batchnorm(module)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        module(torch.randn(4))


@ranks(2)
def test_compiled_layer_gives_the_same():
    xs, _ = batches(2, 1, 6)
    module = layer(2)
    convert_batchnorm(module)
    twin = copy.deepcopy(module)
    wanted = module(shard(xs, [4, 2])[0])
    compiled = torch.compile(nn.Sequential(twin), backend="eager")
    torch.testing.assert_close(compiled(shard(xs, [4, 2])[0]), wanted, rtol=0, atol=0)
    torch.testing.assert_close(twin.running_var, module.running_var, rtol=0, atol=0)


@ranks(4)
def test_a_process_group_limits_who_shares_statistics():
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    xs, dys = batches(4, 3, 8)
    pair = slice(0, 4) if rank < 2 else slice(4, 8)
    reference, module = layer(4), layer(4)
    convert_batchnorm(module, process_group=groups[rank // 2])
    wanted = train(reference, xs[:, pair], dys[:, pair])[0]
    got = train(module, shard(xs, [2] * 4), shard(dys, [2] * 4))[0]
    torch.testing.assert_close(got, wanted[:, 2 * (rank % 2) : 2 * (rank % 2) + 2], **TOLERANCE)
    torch.testing.assert_close(module.running_var, reference.running_var, **TOLERANCE)


# ------------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize("sizes", [[5], [3, 4], [1, 0, 6], [0, 2, 1, 1]], ids=str)
def test_combined_moments_are_those_of_the_whole(sizes):
    x = torch.randn(sum(sizes), 3, 4, dtype=torch.float64)
    mean, variance, count = combine_moments(torch.stack([local_moments(part) for part in x.split(sizes)]))
    wanted_variance, wanted_mean = torch.var_mean(x, dim=(0, 2), correction=0)
    torch.testing.assert_close(mean, wanted_mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(variance, wanted_variance, rtol=1e-13, atol=1e-13)
    assert count == sum(sizes) * 4


def test_combined_variance_survives_a_large_mean():
    """A mean of 1e4 in float32: `E[x^2] - E[x]^2` has no correct digit there."""
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + 1e4
    _, variance, _ = combine_moments(torch.stack([local_moments(part) for part in x.split([10, 54])]))
    wanted = x.double().var(0, correction=0)
    torch.testing.assert_close(variance.double(), wanted, rtol=1e-4, atol=0)
    naive = x.square().mean(0) - x.mean(0).square()
    assert ((naive.double() - wanted).abs() > 0.1 * wanted).any()


# --------------------------------------------------------------------------------------------------------- conversion


class ActivatedBatchNorm(nn.BatchNorm2d):
    """In the style of timm: a BatchNorm with a forward and a child of its own."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.activation = nn.ReLU()

    def forward(self, x):
        return self.activation(super().forward(x))


class SyncedActivatedBatchNorm(nn.Module):
    """What a user's factory makes of it: new parameters, the same names."""

    def __init__(self, original):
        super().__init__()
        inner = copy.deepcopy(original)
        self.weight, self.bias = inner.weight, inner.bias
        for name, buffer in inner.named_buffers():
            self.register_buffer(name, buffer)
        self.activation = nn.ReLU()

    def forward(self, x):
        self.running_mean += 1
        return self.activation(x)


def model():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.BatchNorm2d(4)))


def test_the_layer_stays_the_same_object_with_all_it_carries():
    net = model().double()
    bn = net[1]
    bn.qconfig = bn.note = object()
    bn.eval()
    bn.weight.requires_grad_(False)
    seen = []
    bn.register_forward_hook(lambda *_: seen.append("hook"))
    bn.register_full_backward_hook(lambda *_: seen.append("backward"))
    before = dict(vars(bn))
    tensors = {name: id(value) for name, value in net.state_dict(keep_vars=True).items()}
    result = convert_batchnorm(net)
    assert list(result.converted) == ["1", "3.0"]
    assert result.skipped == {}
    assert result.already == []
    assert net[1] is bn
    assert type(bn) is SyncedBatchNorm2d
    assert isinstance(bn, nn.BatchNorm2d)
    assert vars(bn) == before
    assert {name: id(value) for name, value in net.state_dict(keep_vars=True).items()} == tensors
    assert not bn.training
    assert net[3][0].training
    net(torch.randn(2, 3, 1, 1, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert seen == ["hook", "backward"]
    result.revert()
    assert type(bn) is type(net[3][0]) is nn.BatchNorm2d
    assert vars(bn) == before
    result.revert()
    assert type(bn) is nn.BatchNorm2d


def test_every_exact_class_has_its_twin():
    twins = {nn.BatchNorm1d: SyncedBatchNorm1d, nn.BatchNorm2d: SyncedBatchNorm2d, nn.BatchNorm3d: SyncedBatchNorm3d}
    for cls, twin in twins.items():
        module = cls(2)  # itself the whole model
        result = convert_batchnorm(module)
        assert type(module) is twin
        assert isinstance(module, cls)
        assert not any(isinstance(module, other) for other in twins if other is not cls)
        result.revert()
        assert type(module) is cls


def test_a_shared_layer_stays_one():
    bn = nn.BatchNorm2d(4)
    net = nn.Sequential(bn, nn.ModuleDict({"again": bn}))
    result = convert_batchnorm(net)
    assert list(result.converted) == ["0"]
    assert net[0] is net[1]["again"] is bn


def test_converting_twice_changes_nothing_and_reverts_with_the_first():
    net = model()
    first = convert_batchnorm(net)
    second = convert_batchnorm(net)
    assert list(second.converted) == []
    assert second.already == ["1", "3.0"]
    second.revert()
    assert type(net[1]) is SyncedBatchNorm2d
    first.revert()
    assert type(net[1]) is nn.BatchNorm2d


@ranks(1)
def test_converting_twice_keeps_the_group():
    group, other = dist.new_group([0]), dist.new_group([0])
    net = model()
    result = convert_batchnorm(net, process_group=group)
    convert_batchnorm(net)
    convert_batchnorm(net, process_group=group)
    assert net[1].process_group is group
    with pytest.raises(ValueError, match="another group"):
        convert_batchnorm(net, process_group=other)
    clone = copy.deepcopy(net)
    assert clone[1].process_group is group
    assert clone[1].weight is not net[1].weight
    result.revert()
    assert "process_group" not in vars(net[1])


def test_copies_and_pickles_of_a_converted_layer():
    net = model()
    result = convert_batchnorm(net)
    net[1].weight.data.fill_(3)
    for clone in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(clone[1]) is SyncedBatchNorm2d
        assert clone[1].weight is not net[1].weight
        assert torch.equal(clone[1].weight, net[1].weight)
    shared = nn.ModuleList([net[1], net[1]])
    clone = copy.deepcopy(shared)
    assert clone[0] is clone[1]
    result.revert()
    assert type(net[1]) is nn.BatchNorm2d


def test_a_class_with_code_of_its_own_is_left_alone():
    net = nn.Sequential(nn.BatchNorm2d(4), ActivatedBatchNorm(4), nn.Sequential(nn.BatchNorm2d(4)))
    parametrize.register_parametrization(net[2][0], "weight", nn.Softplus())  # makes a class of its own, too
    patched = nn.BatchNorm2d(4)
    patched.forward = lambda x: x
    net.append(patched)
    result = convert_batchnorm(net)
    assert list(result.converted) == ["0"]
    assert list(result.skipped) == ["1", "2.0", "3"]
    assert "ActivatedBatchNorm is a class of its own" in result.skipped["1"]
    assert type(net[1]) is ActivatedBatchNorm
    assert (net[1](torch.randn(3, 4, 2, 2)) >= 0).all()
    assert "replaced on the object" in result.skipped["3"]


def test_a_factory_replaces_and_the_original_comes_back_with_new_statistics():
    bn = ActivatedBatchNorm(4)
    inner = nn.Sequential(nn.BatchNorm2d(4), bn)
    net = nn.Sequential(bn, inner)
    calls = []

    def factory(module):
        calls.append(module)
        return SyncedActivatedBatchNorm(module)

    result = convert_batchnorm(net, factories={ActivatedBatchNorm: factory})
    assert calls == [bn]  # a shared layer becomes one layer
    assert list(result.converted) == ["0", "1.0"]
    assert type(net[0]) is SyncedActivatedBatchNorm
    assert net[0] is inner[1]
    assert type(inner[0]) is SyncedBatchNorm2d
    net[0](torch.randn(2, 4, 1, 1))
    net[0].weight.data.fill_(7)
    net[0].eval()
    net[0].weight.requires_grad_(False)
    result.revert()
    assert net[0] is bn
    assert inner[1] is bn
    assert torch.equal(bn.running_mean, torch.ones(4))
    assert torch.equal(bn.weight, torch.full((4,), 7.0))
    assert not bn.training
    assert not bn.activation.training
    assert not bn.weight.requires_grad
    assert type(inner[0]) is nn.BatchNorm2d


class NestedBatchNorm(nn.BatchNorm2d):
    def __init__(self, num_features):
        super().__init__(num_features)
        self.inner = nn.BatchNorm2d(num_features)


def test_what_a_factory_handles_is_handled_as_a_whole():
    net = nn.Sequential(NestedBatchNorm(4), nn.BatchNorm2d(4))
    inner = net[0].inner
    result = convert_batchnorm(net, factories={NestedBatchNorm: lambda module: module})
    assert list(result.converted) == ["0", "1"]
    assert type(inner) is nn.BatchNorm2d
    result.revert()
    assert list(convert_batchnorm(net).converted) == ["0.inner", "1"]  # without a factory it is a layer like any other


def test_factories_that_would_break_checkpoints_are_refused():
    net = nn.Sequential(nn.BatchNorm2d(4), ActivatedBatchNorm(4))
    with pytest.raises(ValueError, match=r"names and shapes of the state_dict.*layer '1'"):
        convert_batchnorm(net, factories={ActivatedBatchNorm: lambda module: nn.Sequential(module)})
    with pytest.raises(TypeError, match="to return a module"):
        convert_batchnorm(net, factories={ActivatedBatchNorm: lambda module: None})
    with pytest.raises(ValueError, match="inside a model"):
        convert_batchnorm(ActivatedBatchNorm(4), factories={ActivatedBatchNorm: SyncedActivatedBatchNorm})
    assert type(net[0]) is nn.BatchNorm2d
    assert type(net[1]) is ActivatedBatchNorm


def test_an_uninitialised_lazy_layer_is_an_error_and_nothing_is_changed():
    net = nn.Sequential(nn.BatchNorm2d(4), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"layer '1', a LazyBatchNorm2d.*Run one batch"):
        convert_batchnorm(net)
    assert type(net[0]) is nn.BatchNorm2d
    net(torch.randn(2, 4, 1, 1))
    convert_batchnorm(net)
    assert type(net[1]) is SyncedBatchNorm2d
    assert net[1].num_features == 4


@ranks(2)
def test_the_users_sync_batch_norm_works_on_the_cpu_and_comes_back():
    group = dist.new_group([0, 1])
    xs, dys = batches(4, 3, 6)
    module = nn.SyncBatchNorm(4, process_group=group, dtype=torch.float64)
    module.load_state_dict(layer(4).state_dict())
    with pytest.raises(ValueError, match="GPU"):  # torch's own
        module(xs[0])
    module.num_batches_tracked.zero_()
    result = convert_batchnorm(module)
    assert type(module) is SyncedBatchNorm
    assert module.process_group is group
    wanted = train(layer(4), xs, dys)[0]
    got = train(module, shard(xs, [4, 2]), shard(dys, [4, 2]))[0]
    torch.testing.assert_close(got, shard(wanted, [4, 2]), **TOLERANCE)
    result.revert()
    assert type(module) is nn.SyncBatchNorm
    assert module.process_group is group


def test_fused_layers_run_torchs_own_forward_and_leave_sync_batch_norm_alone():
    own = nn.SyncBatchNorm(4)
    net = nn.Sequential(nn.BatchNorm2d(4), own)
    result = convert_batchnorm(net, fused=True)
    assert type(net[0]) is FusedBatchNorm2d
    assert isinstance(net[0], nn.BatchNorm2d)
    assert isinstance(net[0], nn.SyncBatchNorm)  # DDP and torch's tools know it by that
    assert type(net[0]).forward is nn.SyncBatchNorm.forward
    assert type(own) is nn.SyncBatchNorm
    assert result.already == ["1"]
    net(torch.randn(2, 4, 3, 3))  # without a process group torch's forward is BatchNorm's
    assert convert_batchnorm(net, fused=True).already == ["0", "1"]
    result.revert()
    assert type(net[0]) is nn.BatchNorm2d
    assert "process_group" not in vars(net[0])


def test_state_loads_into_the_plain_model():
    net, plain = model(), model()
    convert_batchnorm(net)
    plain.load_state_dict(net.state_dict(), strict=True)
    assert str(SyncedBatchNorm2d.__name__) not in repr(plain)
    assert "SyncedBatchNorm2d(4, eps=1e-05" in repr(net)


def broken_layer():
    """Normalises with its own rank's statistics, as a BatchNorm does that nobody converted."""
    xs, dys = batches(4, 3, 6)
    wanted = train(layer(4), xs, dys)[0]
    got = train(layer(4), shard(xs, [4, 2]), shard(dys, [4, 2]))[0]
    torch.testing.assert_close(got, shard(wanted, [4, 2]), **TOLERANCE)


def test_the_comparison_notices_statistics_of_one_rank():
    with pytest.raises(RankFailureError, match="Tensor-likes are not close"):
        run_ranks(broken_layer, 2)
