"""NCCL with one rank: the code paths of many GPUs, on one. Two ranks would need two cards."""

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_plugin import CustomDDPStrategy, NcclOptions, _compat
from ddp_plugin.batchnorm import convert_batchnorm
from ddp_plugin.hooks import HOOKS, Contents
from tests.gpu.bodies import (
    REDUCING,
    check_cpu_tensors,
    check_evaluation,
    check_global_mean,
    check_hook,
    check_random_streams,
    check_training,
    fit,
)
from tests.gpu.device import (
    DEVICE,
    ON_CUDA,
    Regression,
    device_trainer,
    flat,
    make_data,
    make_net,
    train_loader,
    train_plainly,
    wait_for_device,
)
from tests.harness import ranks

pytestmark = pytest.mark.gpu
nccl_only = pytest.mark.skipif(not ON_CUDA, reason="NCCL runs on CUDA devices only")


@ranks(1, init=False)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "trainer": {"accumulate_grad_batches": 3}},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_training_equals_plain_torch(settings: dict[str, Any]) -> None:
    check_training(**settings)


@ranks(1, init=False)
@pytest.mark.parametrize("name", REDUCING)
def test_hook_is_as_exact_as_declared(name: str) -> None:
    check_hook(name)


@ranks(1, init=False)
def test_bf16_mixed_equals_plain_autocast() -> None:
    data = make_data(torch.float32)
    expected, _ = train_plainly(make_net(torch.float32), data, autocast=torch.bfloat16)
    exact, _ = train_plainly(make_net(torch.float32), data)
    found = fit(make_net(torch.float32), data, trainer={"precision": "bf16-mixed"})
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    assert (expected - exact).abs().max() > 1e-5  # without autocast the comparison would have failed


OPTION_VALUES: dict[str, Any] = {
    "high_priority_stream": True,
    "blocking": 1,
    "min_ctas": 1,
    "max_ctas": 4,
    "cga_cluster_size": 1,
    "split_share": 1,
    "net_name": "Socket",
    "comm_name": "ddp_plugin_check",
    "traffic_class": 0,
    "collnet_enable": 0,
    "cta_policy": 0,
    "shrink_share": 1,
    "nvls_ctas": 1,
}


def test_every_option_is_checked() -> None:
    assert set(OPTION_VALUES) == {field.name for field in fields(NcclOptions)}


def option_holder(options: Any, name: str) -> tuple[Any, str]:
    return (options, "is_high_priority_stream") if name == "high_priority_stream" else (options.config, name)


@nccl_only
@ranks(1, init=False)
@pytest.mark.parametrize("name", OPTION_VALUES)
def test_nccl_option_is_in_force_and_changes_no_number(name: str) -> None:
    holder, attribute = option_holder(dist.ProcessGroupNCCL.Options(), name)
    if not hasattr(holder, attribute):
        with pytest.raises(ValueError, match=name):
            check_training(nccl=NcclOptions(**{name: OPTION_VALUES[name]}))
        return
    check_training(nccl=NcclOptions(**{name: OPTION_VALUES[name]}))
    options = _compat.default_group()._get_backend(DEVICE).options
    holder, attribute = option_holder(options, name)
    assert getattr(holder, attribute) == OPTION_VALUES[name]


class ViewRegression(Regression):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.storages = {parameter.grad.untyped_storage().data_ptr() for parameter in self.net.parameters()}


@ranks(1, init=False)
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_are_views_into_one_bucket(as_view: bool) -> None:
    module = ViewRegression(make_net())
    strategy = CustomDDPStrategy(gradient_as_bucket_view=as_view)
    device_trainer(strategy=strategy).fit(module, train_loader(make_data()))
    assert len(module.storages) == (1 if as_view else 4)


class Watches:
    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []

    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.before.append(gradient.clone())

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        self.after.append(gradient.clone())


@ranks(1, init=False)
@pytest.mark.parametrize("hook", [None, *REDUCING])
def test_observers_see_every_bucket_on_the_device(hook: str | None) -> None:
    strategy, watches = CustomDDPStrategy(comm_hook=hook), Watches()
    strategy.add_bucket_observer(watches)
    module = Regression(make_net())
    device_trainer(strategy=strategy, max_steps=1).fit(module, train_loader(make_data()))
    wait_for_device()
    _, gradient = train_plainly(make_net(), make_data())
    assert all(seen.device == DEVICE for seen in watches.before + watches.after)
    # DDP fills buckets in another order than that of the parameters; sorted values are the same ones.
    seen = torch.cat(watches.before)
    torch.testing.assert_close(seen.sort().values, gradient.sort().values, rtol=0, atol=1e-12)
    bound = 0.0
    if hook:
        contents = Contents(("all",), (tuple(gradient.shape),), gradient.dtype)
        bound = float(HOOKS[hook]().error_bound(gradient[None], contents).max())
    assert (torch.cat(watches.after) - seen).abs().max() <= bound + 1e-15


@ranks(1, init=False)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(10, 4), (3, 8)])
def test_evaluation_is_exact(num_samples: int, batch_size: int) -> None:
    check_evaluation(num_samples, batch_size)


@ranks(1, init=False)
def test_random_streams_reach_dropout_on_the_device() -> None:
    check_random_streams()


@ranks(1, init=False)
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=nccl_only)])
def test_converted_batchnorm_of_one_rank_is_batchnorm(fused: bool) -> None:
    dist.init_process_group("nccl" if ON_CUDA else "gloo", device_id=DEVICE if ON_CUDA else None)
    plain = nn.BatchNorm2d(3, device=DEVICE, dtype=torch.float64)
    converted = copy.deepcopy(plain)
    assert convert_batchnorm(converted, fused=fused).converted.keys() == {""}
    results = []
    for layer in (plain, converted):
        images = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        images = images.to(DEVICE).requires_grad_()
        output = layer(images)
        output.pow(3).sum().backward()
        results.append([output, images.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@ranks(1, init=False)
def test_a_checkpoint_of_the_device_is_plain(tmp_path: Any) -> None:
    net = make_net()
    run = device_trainer(strategy=CustomDDPStrategy(comm_hook="bf16"), max_steps=2)
    run.fit(Regression(net), train_loader(make_data()))
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = torch.load(tmp_path / "run.ckpt", map_location="cpu", weights_only=True)["state_dict"]
    assert list(loaded) == [f"net.{name}" for name in make_net().state_dict()]
    torch.testing.assert_close(torch.cat([value.reshape(-1) for value in loaded.values()]), flat(net).cpu())


@ranks(1, init=False)
def test_a_mean_weighted_on_the_device() -> None:
    check_global_mean()


@ranks(1, init=False)
def test_tensors_of_the_cpu_travel() -> None:
    check_cpu_tensors()
