"""Two gloo ranks that share one card: real reductions between processes, of tensors on the device."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_plugin import ConvertSyncBatchNorm, CustomDDPStrategy, GatherPredictions
from ddp_plugin.batchnorm import convert_batchnorm
from tests.gpu.bodies import (
    REDUCING,
    check_cpu_tensors,
    check_evaluation,
    check_global_mean,
    check_hook,
    check_random_streams,
    check_training,
    evaluation_data,
    fit,
)
from tests.gpu.device import (
    DEVICE,
    ON_CUDA,
    Regression,
    device_trainer,
    make_data,
    make_net,
    train_loader,
    train_plainly,
)
from tests.harness import ranks

pytestmark = pytest.mark.gpu
GLOO = {"process_group_backend": "gloo"}
FUSED = [False, pytest.param(True, marks=pytest.mark.skipif(not ON_CUDA, reason="the fused kernels are CUDA's"))]


@ranks(2, init=False)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True, "trainer": {"accumulate_grad_batches": 3}},
        {"comm_hook": "allreduce"},
    ],
    ids=str,
)
def test_training_equals_one_process(settings: dict[str, Any]) -> None:
    check_training(**settings, **GLOO)


@ranks(2, init=False)
@pytest.mark.parametrize("name", REDUCING)
def test_hook_is_as_exact_as_declared(name: str) -> None:
    check_hook(name, **GLOO)


@ranks(2, init=False)
def test_batchnorm_of_the_whole_batch_by_the_callback() -> None:
    whole, mine = make_net(norm=True), make_net(norm=True)
    expected, _ = train_plainly(whole, make_data())
    convert = ConvertSyncBatchNorm()
    found = fit(mine, make_data(), callbacks=[convert], **GLOO)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(mine[1], name).to(DEVICE), getattr(whole[1], name), rtol=1e-10, atol=1e-10)
    assert type(mine[1]) is nn.BatchNorm1d  # given back
    alone = fit(make_net(norm=True), make_data(), **GLOO)
    assert (alone - expected).abs().max() > 1e-4  # without the callback the comparison would have failed


@ranks(2, init=False)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("num_own", [(4, 4), (6, 2)], ids=str)
def test_batchnorm_layer_on_the_device(fused: bool, num_own: tuple[int, int]) -> None:
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64).to(DEVICE)
    slopes = torch.randn(8, 3, 5, 5, generator=generator, dtype=torch.float64).to(DEVICE)
    part = slice(0, num_own[0]) if dist.get_rank() == 0 else slice(num_own[0], 8)

    plain = nn.BatchNorm2d(3, device=DEVICE, dtype=torch.float64)
    whole = images.clone().requires_grad_()
    expected = plain(whole)
    (expected * slopes).sum().backward()

    layer = nn.BatchNorm2d(3, device=DEVICE, dtype=torch.float64)
    convert_batchnorm(layer, fused=fused)
    mine = images[part].clone().requires_grad_()
    output = layer(mine)
    (output * slopes[part]).sum().backward()

    def equal(found: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    equal(output, expected[part])
    equal(mine.grad, whole.grad[part])
    for name in ("weight", "bias"):
        gradient = getattr(layer, name).grad.cpu()
        dist.all_reduce(gradient)
        equal(gradient, getattr(plain, name).grad.cpu())
    equal(layer.running_mean, plain.running_mean)
    equal(layer.running_var, plain.running_var)


@ranks(2, init=False)
@pytest.mark.parametrize(("num_samples", "batch_size"), [(16, 4), (13, 4), (3, 8)])
def test_evaluation_is_exact(num_samples: int, batch_size: int) -> None:
    check_evaluation(num_samples, batch_size, **GLOO)


class Predicts(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        indices, values, _ = batch
        assert values.device == DEVICE
        return {"index": indices, "square": values.square()}


@ranks(2, init=False)
@pytest.mark.parametrize("num_samples", [13, 3])
def test_predictions_come_in_order(num_samples: int) -> None:
    data, gather = evaluation_data(num_samples), GatherPredictions("all")
    run = device_trainer(strategy=CustomDDPStrategy(**GLOO), callbacks=[gather])
    returned = run.predict(Predicts(), DataLoader(data, 4))
    assert torch.cat([batch["index"].cpu() for batch in returned]).tolist() == list(range(num_samples))
    squares = torch.cat([batch["square"].cpu() for batch in returned])
    torch.testing.assert_close(squares, data.tensors[1].square(), rtol=1e-12, atol=0)


@ranks(2, init=False)
def test_random_streams_differ_between_ranks() -> None:
    mine = check_random_streams(**GLOO)
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert not any(torch.equal(first, second) for first, second in zip(*both, strict=True))


@ranks(2, init=False)
def test_reduce_of_device_tensors() -> None:
    strategy = CustomDDPStrategy(**GLOO)
    run = device_trainer(strategy=strategy, max_steps=1)
    seen: dict[str, Tensor] = {}

    class Reduces(pl.Callback):
        def on_train_end(self, *arguments: Any) -> None:
            rank = dist.get_rank()
            seen["mean"] = strategy.reduce(torch.tensor([rank + 1], device=DEVICE), reduce_op="mean")
            seen["sum"] = strategy.reduce(torch.tensor([rank + 1.0], device=DEVICE), reduce_op="sum")

    run.callbacks.append(Reduces())
    run.fit(Regression(make_net()), train_loader(make_data()))
    assert seen["mean"].tolist() == [1.5]
    assert seen["sum"].tolist() == [3.0]
    assert all(tensor.device == DEVICE for tensor in seen.values())


@ranks(2, init=False)
def test_a_mean_weighted_on_the_device() -> None:
    check_global_mean(**GLOO)


@ranks(2, init=False)
def test_tensors_of_the_cpu_travel() -> None:
    check_cpu_tensors(**GLOO)
