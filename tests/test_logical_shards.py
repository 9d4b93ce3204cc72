"""Logical shards: the bytes of the weights on 1, 2 and 4 processes, one process's numbers, and what is refused."""

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import IterableDataset

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.logical_shards import TreeSum, check_num_shards, num_micro_batches
from ddp_plugin.tree_exchange import ShardedGradient, sum_in_tree_order
from tests.harness import ranks, run_ranks, trainer

NUM_SHARDS, NUM_STEPS, SHARD_SIZE = 4, 50, 3


def samples_of(step: int, shard: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + shard)
    x = torch.randn(SHARD_SIZE, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x[:, :3]).to(dtype)


class Shards(IterableDataset[Any]):
    """This rank's shards of each step, one after another; made by hand, of no one else's arithmetic."""

    def __init__(self, num_steps: int = NUM_STEPS, dtype: torch.dtype = torch.float32) -> None:
        self.num_steps, self.dtype = num_steps, dtype

    def __iter__(self) -> Iterator[Any]:
        rank, num_own = int(os.environ["RANK"]), NUM_SHARDS // int(os.environ["WORLD_SIZE"])
        for step in range(self.num_steps):
            for shard in range(rank * num_own, (rank + 1) * num_own):
                yield step, shard, *samples_of(step, shard, self.dtype)


class Net(pl.LightningModule):
    """Dropout is drawn from (step, shard)."""

    def __init__(self, dropout: float = 0.3, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers = (nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.net = nn.Sequential(*layers).to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step, shard, x, y = batch
        torch.manual_seed(1000 * step + shard)
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def in_bytes(module: nn.Module) -> bytes:
    return b"".join(values.detach().contiguous().numpy().tobytes() for values in module.state_dict().values())


def weights_after(
    strategy: dict[str, Any] | None, accumulate: int = 1, precision: str | None = None, clip: float | None = None
) -> bytes:
    """Runs on each rank; the ranks' weights are compared here, the worlds' by the test."""
    module = Net(seed=int(os.environ["RANK"]))
    settings: dict[str, Any] = {"precision": precision} if precision == "bf16-mixed" else {}
    if precision == "16-mixed":
        settings["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler(device="cpu", growth_interval=9))]
    run = trainer(
        strategy=CustomDDPStrategy(**(strategy if strategy is not None else {"logical_shards": NUM_SHARDS})),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        **settings,
    )
    run.fit(module, torch.utils.data.DataLoader(Shards(), batch_size=None))
    assert run.global_step == NUM_STEPS
    weights = in_bytes(module)
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, weights)
    assert all(each == weights for each in everybodys)
    return weights


def worlds(*world_sizes: int, **arguments: Any) -> set[bytes]:
    return {weights for size in world_sizes for weights in run_ranks(weights_after, size, init=False, **arguments)}


# ----------------------------------------------------------------------------------------------------------- the bytes


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}, {"precision": "16-mixed", "clip": 0.05}])
def test_the_weights_are_the_same_bytes_on_1_2_and_4_processes(settings: dict[str, Any]) -> None:
    assert len(worlds(1, 2, 4, strategy=None, **settings)) == 1


def test_plain_ddp_gives_other_bytes_for_each_number_of_processes() -> None:
    found = [worlds(size, strategy={}, accumulate=NUM_SHARDS // size) for size in (1, 2, 4)]
    assert len(set.union(*found)) == 3


def sums_in_sequence() -> bytes:
    def add(self: TreeSum, tensors: Any) -> None:
        tensors = list(tensors)
        self.num_added += 1
        if not self._partial_sums:
            self._partial_sums.append(tensors)
        else:
            for total, tensor in zip(self._partial_sums[0], tensors, strict=True):  # type: ignore[arg-type]
                total.add_(tensor)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(TreeSum, "add", add)
        return weights_after(None)


def test_sums_in_sequence_inside_a_rank_give_other_bytes() -> None:
    assert run_ranks(sums_in_sequence, 1, init=False)[0] not in worlds(4, strategy=None)


def resumed(path: str, save_on: int) -> bytes:
    """Two epochs in two fits, of which the second one goes on from the first one's checkpoint."""
    module, world_size = Net(), int(os.environ["WORLD_SIZE"])
    loader = torch.utils.data.DataLoader(Shards(num_steps=5), batch_size=None)
    if world_size == save_on:
        run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS))
        run.fit(module, loader)
        run.save_checkpoint(path)
        dist.barrier()
    module = Net(seed=7)
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS), max_epochs=2)
    run.fit(module, loader, ckpt_path=path, weights_only=False)
    assert run.global_step == 10
    return in_bytes(module)


def test_a_run_that_is_resumed_between_epochs_on_another_number_of_processes(tmp_path: Any) -> None:
    path = str(tmp_path / "epoch.ckpt")
    weights = {each for size in (2, 1, 4) for each in run_ranks(resumed, size, init=False, path=path, save_on=2)}
    assert len(weights) == 1
    assert weights == set(run_ranks(uninterrupted, 1, init=False))


def uninterrupted() -> bytes:
    module = Net()
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS), max_epochs=2)
    run.fit(module, torch.utils.data.DataLoader(Shards(num_steps=5), batch_size=None))
    return in_bytes(module)


# --------------------------------------------------------------------------------------------------------- the numbers


@ranks(1, 2, 4, init=False)
def test_they_are_one_processs_on_the_whole_batch(world_size: int) -> None:
    num_steps, dtype = 20, torch.float64
    module = Net(dropout=0.0, dtype=dtype)
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS))
    for _ in range(2):  # the second fit begins where a new Trainer would
        module = Net(dropout=0.0, dtype=dtype)
        run.fit(module, torch.utils.data.DataLoader(Shards(num_steps, dtype), batch_size=None))
        assert run.accumulate_grad_batches == 1
        run.fit_loop.epoch_progress.reset()
        run.fit_loop.epoch_loop.batch_progress.reset()

    reference = Net(dropout=0.0, dtype=dtype)
    optimizer = reference.configure_optimizers()
    for step in range(num_steps):
        parts = [samples_of(step, shard, dtype) for shard in range(NUM_SHARDS)]
        x, y = (torch.cat(values) for values in zip(*parts, strict=True))
        optimizer.zero_grad()
        nn.functional.mse_loss(reference.net(x), y).backward()
        optimizer.step()
    for (name, found), expected in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-12), name


class SometimesUsed(Net):
    """One parameter is used in shard 2 alone, one in none."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rare, self.never = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.rare * batch[2].sum()).sum() if batch[1] == 2 else loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        assert self.never.grad is None
        assert self.rare.grad is not None
        self.rare_gradient = self.rare.grad.clone()


class NeverCleared(SometimesUsed):
    """Leaves the gradients of the step before where they are."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        pass


def rarely_used(cleared: bool) -> bytes:
    module = SometimesUsed() if cleared else NeverCleared()
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS))
    run.fit(module, torch.utils.data.DataLoader(Shards(6), batch_size=None))
    assert torch.equal(module.never, torch.ones(3))  # not even decayed
    expected = samples_of(5, 2)[0].sum() / NUM_SHARDS
    assert torch.allclose(module.rare_gradient, expected.expand(3))
    return in_bytes(module)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_parameter_without_gradient_in_a_shard_counts_as_zero(cleared: bool) -> None:
    weights = {each for size in (1, 2, 4) for each in run_ranks(rarely_used, size, init=False, cleared=cleared)}
    assert len(weights) == 1


# ------------------------------------------------------------------------------------------------------------ the tree


def leaves(num_leaves: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1001, generator=generator) * 10.0**index for index in range(num_leaves)]


def tree(parts: list[Tensor]) -> Tensor:
    half = len(parts) // 2
    return parts[0] if not half else tree(parts[:half]) + tree(parts[half:])


@pytest.mark.parametrize("num_leaves", [1, 2, 4, 8, 16])
def test_leaves_are_added_in_the_order_of_the_tree(num_leaves: int) -> None:
    expected, accumulator, most = tree(leaves(num_leaves)), TreeSum(), 0
    for leaf in leaves(num_leaves):
        accumulator.add([leaf])
        most = max(most, sum(part is not None for part in accumulator._partial_sums))
    assert most <= max(1, num_leaves.bit_length() - 1)  # one more is the leaf itself
    assert torch.equal(accumulator.take()[0], expected)
    assert accumulator.num_added == 0


def test_a_sum_in_sequence_is_another_one() -> None:
    assert not torch.equal(tree(leaves(8)), sum(leaves(8)[1:], start=leaves(8)[0]))


@ranks(1, 2, 4, 8)
@pytest.mark.parametrize("chunk_bytes", [1, 5000, 2**25])
def test_between_ranks_the_tree_goes_on(world_size: int, chunk_bytes: int) -> None:
    rank, parts = dist.get_rank(), leaves(world_size)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("ddp_plugin.averaging._CHUNK_BYTES", chunk_bytes)
        own = parts[rank]
        tensors = [own.clone(), torch.empty(0), own[:1000].reshape(10, 100).T.clone().T, own.double(), own.bfloat16()]
        tensors += [
            torch.complex(own, 2 * own),
            own[:7].clone(),
            own[:1000].view(10, 10, 2, 5).clone().permute(3, 1, 2, 0),
        ]
        sum_in_tree_order(tensors)
    expected = tree(parts)
    assert torch.equal(tensors[0], expected)
    assert torch.equal(tensors[2], expected[:1000].reshape(10, 100))
    assert torch.equal(tensors[3], tree([part.double() for part in parts]))
    assert torch.equal(tensors[4], tree([part.bfloat16() for part in parts]))
    assert torch.equal(tensors[5], torch.complex(expected, 2 * expected))
    assert torch.equal(tensors[6], expected[:7])
    assert torch.equal(tensors[7], expected[:1000].view(10, 10, 2, 5).permute(3, 1, 2, 0))


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (3, ValueError), (-4, ValueError), (4.0, TypeError)])
def test_shards_are_a_power_of_two(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="logical_shards"):
        CustomDDPStrategy(logical_shards=value)


def test_one_shard_is_allowed() -> None:
    check_num_shards(1)
    assert CustomDDPStrategy().logical_shards is None
    assert CustomDDPStrategy.from_config({"logical_shards": 8}).logical_shards == 8


@pytest.mark.parametrize("world_size", [3, 6, 8])
def test_processes_are_a_power_of_two_of_at_most_the_shards(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} processes"):
        num_micro_batches(4, world_size)


@ranks(3, init=False)
def test_three_processes_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="3 processes"):
        weights_after(None)


@pytest.mark.parametrize(
    "settings",
    [
        {"comm_hook": "bf16"},
        {"ddp_comm_hook": default_hooks.allreduce_hook},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 10},
        {"gradient_as_bucket_view": True},
    ],
)
def test_another_way_to_reduce_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        CustomDDPStrategy(logical_shards=4, **settings)


def test_there_are_no_buckets_to_observe() -> None:
    with pytest.raises(ValueError, match="buckets"):
        CustomDDPStrategy(logical_shards=4).add_bucket_observer(object())  # type: ignore[arg-type]


def fit(module: pl.LightningModule, num_steps: int = 3, num_shards: int = NUM_SHARDS, **settings: Any) -> None:
    run = trainer(strategy=CustomDDPStrategy(logical_shards=num_shards), **settings)
    run.fit(module, torch.utils.data.DataLoader(Shards(num_steps), batch_size=None))


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@ranks(1, 2, init=False)
def test_other_accumulation_and_manual_optimization_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="accumulate_grad_batches=1"):
        fit(Net(), accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="GradientAccumulationScheduler"):
        fit(Net(), num_shards=world_size, callbacks=[GradientAccumulationScheduler({0: 2})])
    with pytest.raises(ValueError, match="manual optimization"):
        fit(Manual())


class WithLayer(Net):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Counts(Net):
    """Changes a buffer in each micro-batch."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.in_place:
            self.count.add_(1)
        else:
            self.count = self.count + 1
        return super().training_step(batch, batch_idx)


class FunctionalEmbedding(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = nn.functional.embedding(torch.tensor([1]), self.table, sparse=True)
        return super().training_step(batch, batch_idx) + rows.sum()


class StepPlateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "interval": "step", "monitor": "loss"}}


@ranks(1, 2, init=False)
def test_what_one_shards_values_would_decide_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plateau scheduler with interval='step'"):
        fit(StepPlateau())


@ranks(1, init=False)
def test_a_fast_run_is_told_how_many_batches_it_takes() -> None:
    with pytest.raises(ValueError, match=r"Use fast_dev_run=4"):
        fit(Net(), fast_dev_run=True)
    fit(Net(), fast_dev_run=4)


@ranks(2, init=False)
def test_what_would_follow_the_number_of_processes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="layer"):
        fit(WithLayer(nn.BatchNorm1d(3)))
    with pytest.raises(ValueError, match="layer"):
        fit(WithLayer(nn.BatchNorm1d(3, track_running_stats=False).eval()))
    fit(WithLayer(nn.BatchNorm1d(3).eval()))
    with pytest.raises(ValueError, match="layer"):
        fit(WithLayer(nn.Embedding(3, 3, sparse=True)))
    with pytest.raises(ValueError, match="table"):
        fit(FunctionalEmbedding())
    for in_place in (True, False):
        with pytest.raises(ValueError, match="count"):
            fit(Counts(in_place))


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch[1] == 1 else super().training_step(batch, batch_idx)


class Unsized(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from list(Shards(3))[:-1]


class Sized(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return 0, 0, *samples_of(0, index)


@ranks(2, init=False)
def test_a_step_of_too_few_shards_raises_on_all_ranks() -> None:
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS))
    with pytest.raises(DDPPluginError, match="Got 1 here; it is another number than asked for on 2 ranks"):
        run.fit(Net(), torch.utils.data.DataLoader(Unsized(), batch_size=None))
    run = trainer(strategy=CustomDDPStrategy(logical_shards=NUM_SHARDS), use_distributed_sampler=False)
    with pytest.raises(ValueError, match="a multiple of 2 training batches"):
        run.fit(Net(), torch.utils.data.DataLoader(Sized(), batch_size=None))


@ranks(1, init=False)
def test_a_training_step_without_a_loss_leaves_a_step_of_too_few_shards() -> None:
    with pytest.raises(DDPPluginError, match="Got 3 here"):
        fit(Skips())


@ranks(2)
def test_too_few_shards_on_one_rank_raise_on_the_other_as_well() -> None:
    layer = nn.Linear(2, 1)
    gradient = ShardedGradient(layer, 2, dist.group.WORLD)
    for _ in range(1 + dist.get_rank()):
        gradient.begin_shard()
        layer(torch.ones(1, 2)).sum().backward()
        gradient.end_shard()
    with pytest.raises(
        DDPPluginError, match=f"Got {1 + dist.get_rank()} here; it is another number than asked for on 1 ranks"
    ):
        gradient.finish_step()


class Freezes(Net):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.when == "inside a step" and batch_idx == 1:
            self.net[0].bias.requires_grad_(False)
        if self.when == "on one rank" and self.global_rank == 1:
            self.net[0].bias.requires_grad_(False)
        if self.when == "between steps":
            self.net[0].bias.requires_grad_(batch[0] != 1)


@ranks(2, init=False)
def test_frozen_parameters() -> None:
    with pytest.raises(DDPPluginError, match=r"net\.0\.bias"):
        fit(Freezes("on one rank"))
    with pytest.raises(ValueError, match="between two micro-batches"):
        fit(Freezes("inside a step"))
    fit(Freezes("between steps"))


def test_one_process_needs_no_group() -> None:
    layer = nn.Linear(2, 1)
    gradient = ShardedGradient(layer, 2, None)
    for value in (1.0, 2.0):
        gradient.begin_shard()
        layer(torch.full((1, 2), value)).sum().backward()
        gradient.end_shard()
        assert layer.weight.grad is None
    gradient.finish_step()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3.0, 3.0]]
