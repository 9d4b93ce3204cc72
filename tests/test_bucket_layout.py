"""The layout of gradient buckets survives a resume: a resumed run reduces bit for bit as an uninterrupted one."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_plugin import CustomDDPStrategy, _compat
from ddp_plugin.wrapping.buckets import BucketLayout, LayoutKeeper
from tests.harness import ranks, run_ranks, trainer

CAP_MB = 2e-4  # 209 bytes: one bucket for each layer of 224
NUM_LAYERS = 5


class Reversed(pl.LightningModule):
    """Layers that run in another order than they are registered in, so that DDP rebuilds its buckets."""

    def __init__(self, order: tuple[int, ...] = (2, 0, 4, 1, 3)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(NUM_LAYERS)])
        self.order = order
        self.layouts: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for index in self.order:
            hidden = torch.tanh(self.layers[index](hidden))
        return (hidden - batch[0].flip(1)).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.layouts.append(_compat.rebuilt_buckets(self.trainer.strategy.model, list(self.parameters())))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def loader() -> DataLoader[Any]:
    world_size = int(os.environ["WORLD_SIZE"])
    data = TensorDataset(torch.randn(12 * world_size, 7, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, world_size, int(os.environ["RANK"]), shuffle=False)
    return DataLoader(data, batch_size=4, sampler=sampler)


def run(
    max_epochs: int, module: Reversed | None = None, resume: Path | None = None, accumulate: int = 1, **settings: Any
) -> tuple[Reversed, Any]:
    module = module or Reversed()
    fit = trainer(
        strategy=CustomDDPStrategy(**({"bucket_cap_mb": CAP_MB} | settings)),
        max_epochs=max_epochs,
        accumulate_grad_batches=accumulate,
    )
    fit.fit(module, loader(), ckpt_path=resume)
    return module, fit


def flat(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).clone()


SETTINGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"comm_hook": "allreduce"},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"accumulate": 3},
]


@ranks(3, 4, init=False)
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(world_size: int, tmp_path: Path) -> None:
    for index, settings in enumerate(SETTINGS):
        whole, _ = run(4, **settings)
        _, first = run(2, **settings)
        first.save_checkpoint(path := tmp_path / f"{index}.ckpt")
        resumed, _ = run(4, resume=path, **settings)
        assert torch.equal(flat(resumed), flat(whole)), settings


def _resumes_without_the_layout(path: Path) -> bool:
    whole, _ = run(4)
    _, first = run(2)
    first.save_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutKeeper, "load", lambda self, checkpoint: None)
        resumed, _ = run(4, resume=path)
    assert torch.allclose(flat(resumed), flat(whole), atol=1e-4)
    return torch.equal(flat(resumed), flat(whole))


@pytest.mark.parametrize("world_size", [3, 4])
def test_without_the_layout_the_last_bits_differ(world_size: int, tmp_path: Path) -> None:
    assert not any(run_ranks(_resumes_without_the_layout, world_size, init=False, path=tmp_path / "x.ckpt"))


@ranks(3, init=False)
def test_a_checkpoint_of_the_very_first_step_has_the_layout_of_the_second(tmp_path: Path) -> None:
    class Saves(Reversed):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == 1:
                self.trainer.save_checkpoint(tmp_path / "first.ckpt")
            super().on_train_batch_end()

    module, _ = run(1, Saves())
    checkpoint = torch.load(tmp_path / "first.ckpt", weights_only=True)
    layout = BucketLayout.from_state(checkpoint["ddp_plugin"]["bucket_layout"])
    assert layout.buckets == module.layouts[1]
    assert len(layout.buckets) == NUM_LAYERS
    assert [index // 2 for bucket in layout.buckets for index in bucket] == [3, 3, 1, 1, 4, 4, 0, 0, 2, 2]


@ranks(3, init=False)
def test_the_first_reductions_after_a_resume_have_the_saved_layout(tmp_path: Path) -> None:
    class Watches:
        def __init__(self) -> None:
            self.seen: list[list[str]] = []
            self.names: dict[int, str] = {}

        def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
            self.seen.append([self.names[id(parameter)] for parameter in parameters])

        def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
            pass

    _, first = run(1)
    first.save_checkpoint(tmp_path / "x.ckpt")
    for resume, expected in ((None, [[0, 1, 2, 3, 4]]), (tmp_path / "x.ckpt", [[3], [1], [4], [0], [2]])):
        module, watches = Reversed(), Watches()
        watches.names = {id(parameter): name for name, parameter in module.named_parameters()}
        strategy = CustomDDPStrategy(bucket_cap_mb=CAP_MB)
        strategy.add_bucket_observer(watches)
        fit = trainer(strategy=strategy, max_epochs=2, limit_train_batches=1)
        fit.fit(module, loader(), ckpt_path=resume)
        layers = [sorted({int(name.split(".")[1]) for name in names}) for names in watches.seen[: len(expected)]]
        assert layers == expected


@ranks(3, init=False)
def test_another_model_is_told_and_trains_as_ever(tmp_path: Path) -> None:
    _, first = run(1)
    first.save_checkpoint(path := tmp_path / "x.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["ddp_plugin"]["bucket_layout"]["names"][0] = "another"
    dist.barrier()  # all have read it
    if dist.get_rank() == 0:
        torch.save(checkpoint, path)
    dist.barrier()
    assert _warnings(lambda: run(2, resume=path)) == ["the checkpoint's bucket layout is for other parameters"]


@ranks(3, init=False)
def test_what_differs_from_the_saved_run_is_said_once(tmp_path: Path) -> None:
    _, first = run(1)
    first.save_checkpoint(path := tmp_path / "x.ckpt")
    assert _warnings(lambda: run(3, resume=path)) == []
    assert _warnings(lambda: run(3, resume=path, bucket_cap_mb=1)) == [
        "the checkpoint's bucket layout is for another bucket size"
    ]
    assert _warnings(lambda: run(3, Reversed((0, 1, 2, 3, 4)), resume=path)) == [
        "the gradients arrived in another order than in the checkpoint's run"
    ]
    assert _warnings(lambda: run(3, resume=path, find_unused_parameters=True)) == []


def _warnings(function: Any) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.strategy.wrapping.rank_zero_warn", said.append)
        function()
    return [
        text.removeprefix("Results may differ from the uninterrupted run's in the last bit: ")[:-1] for text in said
    ]


def _saves(path: Path) -> None:
    _, first = run(1)
    first.save_checkpoint(path)


def _resumes(path: Path) -> None:
    module, fit = run(2, resume=path)
    assert fit.global_step == 6
    assert module.layouts[-1] is not None


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 3), (2, 1)])
def test_another_number_of_processes_resumes(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(_saves, before, init=False, path=tmp_path / "x.ckpt")
    run_ranks(_resumes, after, init=False, path=tmp_path / "x.ckpt")


@ranks(2, init=False)
def test_a_checkpoint_without_training_state_has_no_layout(tmp_path: Path) -> None:
    _, fit = run(1)
    fit.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "ddp_plugin" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


# ----------------------------------------------------------------------------------------------------------- the parts


def make_ddp(**settings: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **settings)


def test_a_layout_survives_a_checkpoint_and_knows_what_it_covers() -> None:
    layout = BucketLayout(("a", "b", "c"), ((2,), (0, 1)), (0, 100))
    assert BucketLayout.from_state(layout.state()) == layout
    assert layout.covers(["a", "b", "c"])
    assert not layout.covers(["a", "c", "b"])
    assert not BucketLayout(("a", "b"), ((0,), (0,)), (0,)).covers(["a", "b"])
    assert not BucketLayout(("a", "b"), ((1,),), (0,)).covers(["a", "b"])


@ranks(1)
def test_torch_begins_with_the_buckets_it_is_given_and_no_others_later() -> None:
    usual = dist._compute_bucket_assignment_by_size
    with _compat.first_buckets([[3], [0, 2], [1]]):
        model = make_ddp()
    assert dist._compute_bucket_assignment_by_size is usual
    parameters = list(model.parameters())
    positions = {id(parameter): index for index, parameter in enumerate(parameters)}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    assert [[positions[id(p)] for p in bucket.parameters()] for bucket in buckets] == [[3], [0, 2], [1]]


@ranks(1)
def test_both_ways_to_read_the_rebuilt_buckets_agree() -> None:
    model = make_ddp(bucket_cap_mb=1e-5)
    parameters = list(model.parameters())
    assert _compat.rebuilt_buckets(model, parameters) is None
    model(torch.ones(1, 2)).sum().backward()
    assert _compat.rebuilt_buckets(model, parameters) is None
    _compat.finish_rebuilding_buckets(model)
    assert _compat.rebuilt_buckets(model) is None  # DDP has not written it down yet
    at_once = _compat.rebuilt_buckets(model, parameters)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    assert at_once == _compat.rebuilt_buckets(model)
    assert at_once is not None
    assert sorted(index for bucket in at_once for index in bucket) == [0, 1, 2, 3]
    assert len(at_once) > 1


@ranks(1)
def test_sparse_gradients_have_no_layout_to_read_at_once() -> None:
    model = DistributedDataParallel(nn.Embedding(3, 2, sparse=True))
    model(torch.tensor([0])).sum().backward()
    _compat.finish_rebuilding_buckets(model)
    assert _compat.rebuilt_buckets(model, list(model.parameters())) is None
