"""ExactEvaluation against plain arithmetic over the dataset: no Lightning and no process group in the reference."""

import math
import os
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC
from torchmetrics.regression import PearsonCorrCoef

from ddp_plugin import ExactEvaluation
from ddp_plugin.errors import DDPPluginError, EvaluationMismatchError
from tests.harness import ranks, run_ranks, trainer

LENGTHS = (0, 1, 2, 5, 7, 9, 64)
BATCH_SIZES = (1, 2, 3, 4, 64)
NUMBERS = torch.sin(torch.arange(100, dtype=torch.float64) * 1.7) * 3 + torch.arange(100, dtype=torch.float64) / 50


class Numbers(Dataset[tuple[int, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, NUMBERS[index]


class UnreducedList(Metric):
    """A list state without a reduction, as detection metrics have: one tensor of any length per update."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.seen.append(values)

    def compute(self) -> Tensor:
        return torch.cat(list(self.seen)).square().sum() if self.seen else torch.tensor(0.0, dtype=torch.float64)


class Cat(Metric):
    """A list state that is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", default=[], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.seen.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.seen) if isinstance(self.seen, list) else self.seen


class Mean(Metric):
    """Two summed float64 states."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.count += len(values)

    def compute(self) -> Tensor:
        return self.total / self.count


class Probe(pl.LightningModule):
    """Logs every kind of value from a dataset of numbers, and keeps which indices it evaluated."""

    def __init__(self, sync_dist: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, dtype=torch.float64)
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.mean_metric = Mean()
        self.cat_metric = Cat()
        self.list_metric = UnreducedList()
        self.sync_dist = sync_dist
        self.seen: list[int] = []
        self.num_steps = 0
        self.finished: dict[str, Any] = {}

    def evaluate(self, batch: Any, dataloader_idx: int) -> None:
        indices, values = batch
        self.norm(values[:, None])
        self.num_steps += 1
        self.seen.extend(1000 * dataloader_idx + int(index) for index in indices)
        one = torch.ones((), dtype=torch.float64)
        self.log("mean", values.mean(), batch_size=len(values), sync_dist=self.sync_dist)
        self.log("sum", values.sum(), reduce_fx="sum", sync_dist=self.sync_dist)
        self.log("max", values.mean(), reduce_fx="max", sync_dist=self.sync_dist)
        self.log("min", values.mean(), reduce_fx="min", sync_dist=self.sync_dist)
        self.log("count", one * len(values), reduce_fx="sum", on_step=True, on_epoch=True, sync_dist=self.sync_dist)
        if int(indices[0]) == 0:
            self.log("only_where_sample_0_is", values.sum(), reduce_fx="sum")
        self.mean_metric.update(values)
        self.cat_metric.update(values)
        self.list_metric.update(values)
        self.log("mean_metric", self.mean_metric)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch, dataloader_idx)

    test_step = validation_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.norm(batch[1][:, None]).mean() * self.weight.sum()

    def on_validation_epoch_end(self) -> None:
        self.finished = {
            "cat": torch.as_tensor(self.cat_metric.compute()).flatten().tolist(),
            "list": self.list_metric.compute().item(),
            "seen": list(self.seen),
            "num_steps": self.num_steps,
        }
        self.cat_metric.reset()
        self.list_metric.reset()
        self.seen, self.num_steps = [], 0

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches_of_one_process(length: int, batch_size: int) -> list[list[int]]:
    return [list(range(first, min(first + batch_size, length))) for first in range(0, length, batch_size)]


def expected_values(batches: list[list[int]]) -> dict[str, float]:
    means = [NUMBERS[batch].mean().item() for batch in batches]
    every = [index for batch in batches for index in batch]
    with_0 = [NUMBERS[batch].sum().item() for batch in batches if batch[0] == 0]
    values = {
        "mean": NUMBERS[every].mean().item(),
        "sum": NUMBERS[every].sum().item(),
        "max": max(means),
        "min": min(means),
        "count": float(len(every)),
        "count_epoch": float(len(every)),
        "mean_metric": NUMBERS[every].mean().item(),
    }
    return values | ({"only_where_sample_0_is": sum(with_0)} if with_0 else {})


def everything_seen(module: Probe) -> list[int]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, module.finished["seen"])
    return [index for part in parts for index in part]


def check(module: Probe, metrics: Any, batches: list[list[int]]) -> None:
    expected = expected_values(batches)
    assert set(expected) <= set(metrics), sorted(metrics)
    for key, value in expected.items():
        assert math.isclose(float(metrics[key]), value, rel_tol=1e-12, abs_tol=1e-12), (key, float(metrics[key]), value)
    every = [index for batch in batches for index in batch]
    assert everything_seen(module) == every  # each once, and joined in rank order the one order
    assert module.finished["cat"] == NUMBERS[every].tolist()
    assert math.isclose(module.finished["list"], NUMBERS[every].square().sum().item(), rel_tol=1e-12)


# ------------------------------------------------------------------------------------------- lengths x batches x ranks


@ranks(1, 2, 3, 4, init=False, timeout_s=240)
@pytest.mark.parametrize("sync_dist", [False, True])
def test_equals_one_process_for_every_length_and_batch_size(world_size: int, sync_dist: bool) -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    num_checked = 0
    for length in LENGTHS:
        for batch_size in BATCH_SIZES:
            module = Probe(sync_dist)
            results = run.validate(module, DataLoader(Numbers(length), batch_size=batch_size), verbose=False)
            if length == 0:
                assert results == []
                continue
            batches = batches_of_one_process(length, batch_size)
            check(module, run.callback_metrics, batches)
            assert run.callbacks[0].records[0].num_samples == length
            num_checked += 1
    assert num_checked == (len(LENGTHS) - 1) * len(BATCH_SIZES)


@ranks(1, 2, 3, 4, init=False, timeout_s=240)
def test_equals_one_process_for_every_length_and_batch_size_shuffled() -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    num_checked = 0
    for length in LENGTHS[1:]:
        for batch_size in BATCH_SIZES:
            loaders = [
                DataLoader(Numbers(length), batch_size, shuffle=True, generator=torch.Generator().manual_seed(length))
                for _ in range(2)
            ]
            module = Probe()
            run.validate(module, loaders[0], verbose=False)
            check(module, run.callback_metrics, [batch[0].tolist() for batch in loaders[1]])  # plain torch, one process
            num_checked += 1
    assert num_checked == (len(LENGTHS) - 1) * len(BATCH_SIZES)


@ranks(2, init=False)
def test_without_the_callback_the_numbers_are_wrong() -> None:
    module = Probe(sync_dist=True)
    run = trainer()
    run.validate(module, DataLoader(Numbers(5), batch_size=2), verbose=False)
    assert float(run.callback_metrics["count"]) != 5.0
    assert sorted(everything_seen(module)) != list(range(5))


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("test_stage", [False, True])
def test_with_workers_in_validate_and_test(num_workers: int, test_stage: bool) -> None:
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    loader = DataLoader(Numbers(9), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    for _ in range(2):
        (run.test if test_stage else run.validate)(module, loader, verbose=False)
        check(module, run.callback_metrics, batches_of_one_process(9, 2))


@ranks(1, 2, 3, init=False, timeout_s=240)
@pytest.mark.parametrize("num_sanity_val_steps", [0, 2, -1])
def test_inside_fit_with_a_sanity_check_and_batchnorm(num_sanity_val_steps: int) -> None:
    for length, batch_size in [(1, 1), (1, 4), (2, 1), (5, 2), (7, 3), (9, 4), (64, 64)]:
        module, evaluation = Probe(), ExactEvaluation()
        run = trainer(callbacks=[evaluation], max_epochs=2, num_sanity_val_steps=num_sanity_val_steps)
        train = DataLoader(Numbers(12), batch_size=2)
        run.fit(module, train, DataLoader(Numbers(length), batch_size=batch_size))
        check(module, run.callback_metrics, batches_of_one_process(length, batch_size))
        assert evaluation.records[0].stage == "validate"


# ------------------------------------------------------------------------------------------------- orders and samplers


class EveryThird(Sampler[list[int]]):
    """A batch sampler with a constructor of its own, batches of different sizes, and no torch base but Sampler."""

    def __init__(self, length: int, *, flavour: str) -> None:
        self.length, self.flavour, self.epochs = length, flavour, []

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(3):
            if batch := list(range(first, self.length, 3)):
                yield batch

    def __len__(self) -> int:
        return min(3, self.length)


class Backwards(Sampler[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


def _loader(kind: str) -> DataLoader[Any]:
    data, generator = Numbers(11), torch.Generator().manual_seed(5)
    makers: dict[str, Any] = {
        "shuffled": lambda: DataLoader(data, batch_size=2, shuffle=True, generator=generator),
        "with replacement": lambda: DataLoader(
            data, batch_size=3, sampler=RandomSampler(data, replacement=True, num_samples=20, generator=generator)
        ),
        "weighted": lambda: DataLoader(
            data, batch_size=3, sampler=WeightedRandomSampler(torch.arange(1.0, 12.0), 17, generator=generator)
        ),
        "subset": lambda: DataLoader(
            data, batch_size=2, sampler=SubsetRandomSampler([1, 4, 9, 3, 8], generator=generator)
        ),
        "subset dataset": lambda: DataLoader(Subset(data, [7, 2, 5]), batch_size=2),
        "backwards": lambda: DataLoader(data, batch_size=4, sampler=Backwards(11)),
        "custom batch sampler": lambda: DataLoader(data, batch_sampler=EveryThird(11, flavour="x")),
        "drop_last": lambda: DataLoader(data, batch_size=3, drop_last=True),
        "nested drop_last": lambda: DataLoader(data, batch_sampler=BatchSampler(Backwards(11), 4, drop_last=True)),
        "distributed": lambda: DataLoader(
            data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, num_replicas=2, rank=0)
        ),
    }
    return makers[kind]()


KINDS = (
    "shuffled",
    "with replacement",
    "weighted",
    "subset",
    "subset dataset",
    "backwards",
    "custom batch sampler",
    "drop_last",
    "nested drop_last",
)


@ranks(1, 2, 3, 4, init=False, timeout_s=240)
def test_any_sampler_is_shared_out_not_replaced() -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    for kind in KINDS:
        batches = [batch[0].tolist() for batch in _loader(kind)]  # plain torch, one process
        module = Probe()
        run.validate(module, _loader(kind), verbose=False)
        check(module, run.callback_metrics, batches)


@ranks(2, 3, init=False)
def test_a_distributed_sampler_is_made_whole_again() -> None:
    whole = DistributedSampler(Numbers(11), shuffle=True, num_replicas=1, rank=0)
    order = list(whole)
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, _loader("distributed"), verbose=False)
    check(module, run.callback_metrics, [order[first : first + 2] for first in range(0, 11, 2)])


@ranks(2, 3, init=False)
def test_an_order_drawn_from_different_random_streams_is_rank_0s() -> None:
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    module.on_validation_start = lambda: torch.manual_seed(100 + dist.get_rank())  # type: ignore[method-assign]
    run.validate(module, DataLoader(Numbers(11), batch_size=2, shuffle=True), verbose=False)
    assert sorted(everything_seen(module)) == list(range(11))


class ByRank(Backwards):
    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), self.length, dist.get_world_size()))


@ranks(2, init=False)
def test_a_sampler_that_is_shared_out_already_is_refused_on_all_ranks() -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    with pytest.raises(ValueError, match="ByRank, which delivers different samples on different ranks"):
        run.validate(Probe(), DataLoader(Numbers(10), sampler=ByRank(10), batch_size=2), verbose=False)


@ranks(2, 3, init=False)
def test_several_loaders() -> None:
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    sizes = [(5, 2), (1, 4), (8, 3)]
    run.validate(module, [DataLoader(Numbers(n), batch_size=b) for n, b in sizes], verbose=False)
    for index, (length, batch_size) in enumerate(sizes):
        expected = expected_values(batches_of_one_process(length, batch_size))
        for key in ("mean", "sum", "max", "min", "count_epoch"):
            found = float(run.callback_metrics[f"{key}/dataloader_idx_{index}"])
            assert math.isclose(found, expected[key], rel_tol=1e-12), (key, index)
    seen = Counter(everything_seen(module))
    assert seen == Counter(1000 * index + i for index, (length, _) in enumerate(sizes) for i in range(length))


class Paired(Probe):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(batch["a"], 0)
        assert batch["a"][0].tolist() == batch["b"][0].tolist()


@ranks(2, init=False)
def test_loaders_side_by_side_keep_their_pairing_or_are_refused() -> None:
    module, run = Paired(), trainer(callbacks=[ExactEvaluation()])
    loaders = {name: DataLoader(Numbers(5), batch_size=2) for name in "ab"}
    run.validate(module, CombinedLoader(loaders, "max_size"), verbose=False)
    check(module, run.callback_metrics, batches_of_one_process(5, 2))
    loaders["b"] = DataLoader(Numbers(9), batch_size=2)
    with pytest.raises(ValueError, match=r"\[3, 5\] batches"):
        run.validate(module, CombinedLoader(loaders, "min_size"), verbose=False)


def test_loaders_side_by_side_on_one_process_are_left_to_lightning() -> None:
    run = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[ExactEvaluation()], enable_progress_bar=False
    )

    class Steps(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.num_steps += 1

        def on_validation_epoch_end(self) -> None:
            self.finished = {"num_steps": self.num_steps}

    module = Steps()
    loaders = {"a": DataLoader(Numbers(5), batch_size=1), "b": DataLoader(Numbers(2), batch_size=1)}
    run.validate(module, CombinedLoader(loaders, "min_size"), verbose=False)
    assert module.finished["num_steps"] == 2


class Tuples(Sampler[Any]):
    """Indices that are tuples, for a loader without batching."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(0, 3), (1, 4), (2, 5)])

    def __len__(self) -> int:
        return 3


class ByTuple(Numbers):
    def __getitem__(self, index: Any) -> tuple[int, Tensor]:
        assert type(index) is tuple
        return index[1], NUMBERS[index[1]]


@ranks(1, 2, init=False)
def test_indices_of_any_kind_reach_the_dataset_as_they_are() -> None:
    class Single(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.evaluate((torch.tensor([batch[0]]), batch[1][None]), 0)

    evaluation = ExactEvaluation()
    module, run = Single(), trainer(callbacks=[evaluation])
    run.validate(module, DataLoader(ByTuple(9), sampler=Tuples(), batch_size=None), verbose=False)
    check(module, run.callback_metrics, [[3], [4], [5]])
    assert evaluation.records[0].num_samples == 3


@ranks(1, 2, init=False)
def test_batches_that_are_tensors_count_their_samples() -> None:
    batches = [torch.tensor([4, 2, 0]), torch.tensor([1, 3])]
    evaluation = ExactEvaluation()
    module, run = Probe(), trainer(callbacks=[evaluation])
    run.validate(module, DataLoader(Numbers(5), batch_sampler=batches), verbose=False)  # type: ignore[arg-type]
    check(module, run.callback_metrics, [batch.tolist() for batch in batches])
    assert evaluation.records[0].num_samples == 5


@ranks(2, init=False)
def test_a_distributed_sampler_of_the_users_own_class_is_the_users_business() -> None:
    class Own(DistributedSampler[Any]):
        pass

    world_size, rank_of_this = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
    sampler = Own(Numbers(8), world_size, rank_of_this, shuffle=False)
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()], use_distributed_sampler=False)
    run.validate(module, DataLoader(Numbers(8), batch_size=2, sampler=sampler), verbose=False)
    check(module, run.callback_metrics, [[0, 2], [4, 6], [1, 3], [5, 7]])


@ranks(1, 2, 3, init=False)
def test_a_loader_without_batching() -> None:
    class Single(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.evaluate((torch.tensor([batch[0]]), batch[1][None]), 0)

    module, run = Single(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Numbers(5), batch_size=None), verbose=False)
    check(module, run.callback_metrics, [[index] for index in range(5)])


# -------------------------------------------------------------------------------------------------- limits and records


@ranks(2, 3, init=False)
@pytest.mark.parametrize(("limit", "steps"), [(2, 2), (0.5, None), (100, None)])
def test_limits_count_steps_on_each_rank(world_size: int, limit: float, steps: int | None) -> None:
    batches = batches_of_one_process(20, 2)
    full_steps = math.ceil(len(batches) / world_size)
    steps = steps or (int(full_steps * limit) if isinstance(limit, float) else full_steps)
    evaluation = ExactEvaluation()
    module, run = Probe(), trainer(callbacks=[evaluation], limit_val_batches=limit)
    run.validate(module, DataLoader(Numbers(20), batch_size=2), verbose=False)
    kept = batches[: steps * world_size]
    check(module, run.callback_metrics, kept)
    assert evaluation.records[0].num_batches_left_out == len(batches) - len(kept)


@ranks(3, init=False)
def test_the_record_says_what_was_evaluated_and_what_was_left_out() -> None:
    evaluation = ExactEvaluation()
    run = trainer(callbacks=[evaluation])
    run.validate(Probe(), DataLoader(Numbers(11), batch_size=3, drop_last=True), verbose=False)
    (record,) = evaluation.records
    assert (record.num_samples, record.num_batches, record.num_steps, record.num_ghost_steps) == (9, 3, 1, 0)
    assert record.num_samples_dropped == 2
    assert "drop_last left out 2 samples" in record.describe(3)
    run.test(Probe(), DataLoader(Numbers(4), batch_size=1), verbose=False)
    (record,) = evaluation.records
    assert (record.stage, record.num_samples, record.num_steps, record.num_ghost_steps) == ("test", 4, 2, 2)


def _order_hash(shuffled: bool) -> int:
    evaluation = ExactEvaluation()
    run = trainer(callbacks=[evaluation])
    loader = DataLoader(Numbers(11), batch_size=2, shuffle=shuffled, generator=torch.Generator().manual_seed(1))
    run.validate(Probe(), loader, verbose=False)
    return evaluation.records[0].order_hash


def test_the_order_hash_depends_on_the_order_and_not_on_the_ranks() -> None:
    straight, shuffled = ([run_ranks(_order_hash, n, init=False, shuffled=s) for n in (1, 2, 3)] for s in (False, True))
    assert {value for run in straight for value in run} != {value for run in shuffled for value in run}
    assert len({value for run in straight for value in run}) == len({value for run in shuffled for value in run}) == 1


class EndsEarly(Numbers):
    """Says that it is over where the second batch of each of two ranks begins."""

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if index in (2, 6):
            raise StopIteration
        return super().__getitem__(index)


@ranks(2, init=False)
def test_an_evaluation_that_is_cut_short_is_not_reported_as_exact() -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    with pytest.raises(EvaluationMismatchError, match="8 samples in 4 batches"):
        run.validate(Probe(), DataLoader(EndsEarly(8), batch_size=2), verbose=False)


# ------------------------------------------------------------------------------------------------- metrics and ghosts


class Judged(Probe):
    """Metrics whose states torchmetrics cannot merge when a rank never updated."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = BinaryAUROC()
        self.pearson = PearsonCorrCoef()
        self.collection = MetricCollection({"a": MeanMetric(), "b": MeanMetric()})
        self.judged: dict[str, float] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        indices, values = batch
        self.auroc(torch.sigmoid(values), indices % 2)
        self.pearson(values.float(), indices.float())
        self.collection.update(values.float())
        self.log_dict(self.collection, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.judged = {"auroc": self.auroc.compute().item(), "pearson": self.pearson.compute().item()}
        self.auroc.reset()
        self.pearson.reset()


@ranks(1, 2, 3, 4, init=False)
@pytest.mark.parametrize("batch_size", [2, 5, 64])
def test_metrics_with_list_and_unreduced_states(batch_size: int) -> None:
    auroc, pearson = BinaryAUROC(sync_on_compute=False), PearsonCorrCoef(sync_on_compute=False)
    for batch in batches_of_one_process(9, batch_size):
        auroc.update(torch.sigmoid(NUMBERS[batch]), torch.tensor(batch) % 2)
        pearson.update(NUMBERS[batch].float(), torch.tensor(batch).float())
    module, run = Judged(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Numbers(9), batch_size=batch_size), verbose=False)
    assert module.judged["auroc"] == pytest.approx(auroc.compute().item(), abs=1e-7)
    assert module.judged["pearson"] == pytest.approx(pearson.compute().item(), abs=1e-6)
    assert float(run.callback_metrics["a"]) == pytest.approx(NUMBERS[:9].mean().item(), abs=1e-6)


class Collects(pl.LightningModule):
    """Keeps state in plain attributes of every kind, in place and by assignment."""

    def __init__(self, evaluation: ExactEvaluation) -> None:
        super().__init__()
        self.outputs: list[int] = []
        self.by_index: dict[int, float] = {}
        self.unique: set[int] = set()
        self.total, self.count, self.label = torch.zeros(()), 0, ""
        self.by_kind: defaultdict[str, list[Any]] = defaultdict(list)
        self.array, self.nested = np.zeros(2), ([], "x")
        self.register_buffer("running", torch.zeros(()))
        self.evaluation = evaluation
        self.ghosts: list[list[int]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        indices, values = batch
        if self.evaluation.is_ghost_step:
            print("ghost", flush=True)
        self.outputs.extend(indices.tolist())
        self.by_index.update(dict(zip(indices.tolist(), values.tolist(), strict=True)))
        self.unique.update(indices.tolist())
        self.total += values.sum()
        self.count += len(indices)
        self.label = f"after {indices.tolist()}"
        self.by_kind["all"].append([indices.tolist()])
        self.array += len(indices)
        self.nested[0].append(1)
        self.running += values.sum()
        self.log("loss", values.mean(), batch_size=len(values))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("late", torch.ones(()), reduce_fx="sum")


@ranks(3, init=False)
def test_a_ghost_step_leaves_no_trace_in_plain_attributes() -> None:
    evaluation = ExactEvaluation()
    module, run = Collects(evaluation), trainer(callbacks=[evaluation])
    run.validate(module, DataLoader(Numbers(7), batch_size=2), verbose=False)
    own = [[0, 1, 2, 3], [4, 5], [6]][dist.get_rank()]  # four batches on three ranks: two, one, one
    assert run.callbacks[0].records[0].num_ghost_steps == 2
    assert module.outputs == own
    assert set(module.by_index) == module.unique == set(own)
    assert module.count == len(own)
    assert [index for (batch,) in module.by_kind["all"] for index in batch] == own
    assert module.array.tolist() == [len(own)] * 2
    assert len(module.nested[0]) == -(-len(own) // 2)
    assert module.total.item() == module.running.item() == pytest.approx(NUMBERS[own].sum().item(), abs=1e-5)
    assert float(run.callback_metrics["late"]) == 4.0  # logged in a hook after the callback's own
    assert not evaluation.is_ghost_step


@ranks(2, init=False)
def test_collectives_inside_a_step_match_where_ranks_have_unequal_batches() -> None:
    class Reduces(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            dist.all_reduce(torch.ones(1))
            super().validation_step(batch, batch_idx, dataloader_idx)

    module, run = Reduces(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Numbers(1), batch_size=4), verbose=False)
    check(module, run.callback_metrics, [[0]])


@ranks(2, init=False)
def test_metric_objects_logged_on_one_rank_only_raise_on_all_ranks() -> None:
    class Uneven(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.mean_metric.update(batch[1])
            if dist.get_rank() == 0:
                self.log("mine", self.mean_metric)

    run = trainer(callbacks=[ExactEvaluation()])
    with pytest.raises(DDPPluginError, match=r"validation_step.mine'\] on rank 0; \[\] on rank 1"):
        run.validate(Uneven(), DataLoader(Numbers(8), batch_size=2), verbose=False)


class Clones(Probe):
    """Metrics that are copied while the evaluation runs, kept outside modules, and computed in between."""

    def on_validation_epoch_start(self) -> None:
        self.cloned = self.mean_metric.clone()
        self.hidden = {"in a dict": [Mean()]}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.cloned.update(batch[1])
        self.hidden["in a dict"][0].update(batch[1])
        self.cloned.compute()

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.finished["clone"] = self.cloned.compute().item()
        self.finished["hidden"] = self.hidden["in a dict"][0].compute().item()


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("length", [3, 7])
def test_metrics_that_are_cloned_hidden_or_computed_inside_a_step(length: int) -> None:
    module, run = Clones(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Numbers(length), batch_size=1), verbose=False)
    check(module, run.callback_metrics, batches_of_one_process(length, 1))
    mean = NUMBERS[:length].mean().item()
    assert module.finished["clone"] == pytest.approx(mean, rel=1e-12)
    assert module.finished["hidden"] == pytest.approx(mean, rel=1e-12)
    pickle.dumps(module.cloned)


class OwnSync(UnreducedList):
    """As torchmetrics' detection metrics: a synchronisation of its own around the usual one."""

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        super()._sync_dist(dist_sync_fn=dist_sync_fn, process_group=process_group)


@ranks(2, init=False)
def test_a_metric_with_a_synchronisation_of_its_own_or_a_group() -> None:
    class Uses(Probe):
        def __init__(self) -> None:
            super().__init__()
            self.list_metric = OwnSync()
            self.alone = Mean()

        def on_validation_start(self) -> None:
            groups = [dist.new_group([rank]) for rank in range(2)]
            self.alone.process_group = groups[dist.get_rank()]

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            self.alone.update(batch[1])

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            self.finished["alone"] = self.alone.compute().item()

    module, run = Uses(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Numbers(7), batch_size=3), verbose=False)
    check(module, run.callback_metrics, batches_of_one_process(7, 3))
    own = [range(6), [6]][dist.get_rank()]
    assert module.finished["alone"] == pytest.approx(NUMBERS[list(own)].mean().item(), rel=1e-12)


@ranks(1, 2, init=False)
def test_steps_that_take_the_iterator_are_refused_on_several_ranks(world_size: int) -> None:
    class Takes(Probe):
        def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
            (_, values), _, _ = next(dataloader_iter)
            self.log("sum", values.sum(), reduce_fx="sum", batch_size=len(values))

        def on_validation_epoch_end(self) -> None:
            pass

    run = trainer(callbacks=[ExactEvaluation()])
    if world_size > 1:
        with pytest.raises(ValueError, match="a step that takes its batch"):
            run.validate(Takes(), DataLoader(Numbers(7), batch_size=2), verbose=False)
        return
    run.validate(Takes(), DataLoader(Numbers(7), batch_size=2), verbose=False)
    assert float(run.callback_metrics["sum"]) == pytest.approx(NUMBERS[:7].sum().item(), rel=1e-12)


class OwnIteration(DataLoader[Any]):
    """Iterates without asking its batch sampler, as loaders that never end do."""

    def __iter__(self) -> Any:
        return iter([(torch.tensor([index]), NUMBERS[index][None]) for index in self.own])  # type: ignore[attr-defined]


@ranks(1, 2, init=False)
def test_a_loader_that_iterates_in_its_own_way_is_kept_in_step(world_size: int) -> None:
    loader = OwnIteration(Numbers(5), batch_size=1)
    own = list(range(5)) if world_size == 1 else [[0, 1, 2], [3, 4]][int(os.environ["RANK"])]
    object.__setattr__(loader, "own", own)
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, loader, verbose=False)
    check(module, run.callback_metrics, [[index] for index in range(5)])


class Slow(Numbers):
    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        time.sleep(0.4 if index in (0, 6) else 0.0)
        return super().__getitem__(index)


@ranks(2, init=False)
def test_workers_that_deliver_out_of_order() -> None:
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    loader = DataLoader(Slow(10), batch_size=2, num_workers=3, in_order=False)
    run.validate(module, loader, verbose=False)
    check(module, run.callback_metrics, batches_of_one_process(10, 2))


@ranks(2, init=False)
def test_after_an_exception_everything_is_as_it_was() -> None:
    class Raises(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            super().validation_step(batch, batch_idx, dataloader_idx)
            if batch_idx == 1:
                raise KeyError("on purpose")

    usual, evaluation = Metric._sync_dist, ExactEvaluation()
    run, module = trainer(callbacks=[evaluation]), Raises()
    with pytest.raises(KeyError, match="on purpose"):
        run.validate(module, DataLoader(Numbers(5), batch_size=2), verbose=False)
    assert Metric._sync_dist is usual
    assert not evaluation.is_ghost_step
    assert "metrics" not in vars(run.validate_loop._results)
    assert module.seen == [[0, 1, 2, 3], [4]][dist.get_rank()]  # the ghost step on rank 1 is taken back
    module = Probe()
    run.validate(module, DataLoader(Numbers(5), batch_size=2), verbose=False)
    check(module, run.callback_metrics, batches_of_one_process(5, 2))


@ranks(2, init=False)
def test_values_logged_at_the_epochs_end_or_for_rank_zero_are_left_alone() -> None:
    class Ends(Probe):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("zero", torch.tensor(float(dist.get_rank())), rank_zero_only=True)

        def on_validation_epoch_end(self) -> None:
            self.log("end", torch.tensor(5.0), reduce_fx="sum")

    run = trainer(callbacks=[ExactEvaluation()])
    run.validate(Ends(), DataLoader(Numbers(8), batch_size=2), verbose=False)
    assert float(run.callback_metrics["end"]) == 5.0
    if dist.get_rank() == 0:
        assert float(run.callback_metrics["zero"]) == 0.0


# ----------------------------------------------------------------------------------- loaders that are not shared out


class Stream(IterableDataset[tuple[int, Tensor]]):
    """Rank r delivers its own part, of another length than the other ranks'."""

    def __init__(self, lengths: list[int], same: bool = False) -> None:
        self.lengths, self.same = lengths, same

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        rank = dist.get_rank()
        first = 0 if self.same else sum(self.lengths[:rank])
        return ((index, NUMBERS[index]) for index in range(first, first + self.lengths[rank]))


@ranks(3, init=False)
@pytest.mark.parametrize("lengths", [[5, 1, 3], [0, 7, 2], [4, 0, 0]])
def test_an_iterable_dataset_is_kept_in_step(lengths: list[int]) -> None:
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()])
    run.validate(module, DataLoader(Stream(lengths), batch_size=2), verbose=False)
    batches = []
    for rank, length in enumerate(lengths):
        first = sum(lengths[:rank])
        batches += [[first + i for i in batch] for batch in batches_of_one_process(length, 2)]
    check(module, run.callback_metrics, batches)


@ranks(2, init=False)
def test_an_iterable_dataset_that_delivers_the_same_everywhere_is_noticed() -> None:
    run = trainer(callbacks=[ExactEvaluation()])
    if dist.is_initialized() or int(run.global_rank) != 0:
        run.validate(Probe(), DataLoader(Stream([4, 4], same=True), batch_size=2), verbose=False)
        return
    with pytest.warns(UserWarning, match="began with the same batch"):
        run.validate(Probe(), DataLoader(Stream([4, 4], same=True), batch_size=2), verbose=False)


@ranks(2, init=False)
def test_loaders_of_a_user_who_shares_out_alone_are_kept_in_step() -> None:
    rank_of_this = int(os.environ["RANK"])
    own = Subset(Numbers(7), [0, 1, 2, 3, 4] if rank_of_this == 0 else [5, 6])
    module, run = Probe(), trainer(callbacks=[ExactEvaluation()], use_distributed_sampler=False)
    run.validate(module, DataLoader(own, batch_size=2), verbose=False)
    check(module, run.callback_metrics, [[0, 1], [2, 3], [4], [5, 6]])


@ranks(2, init=False)
def test_another_strategy_on_several_processes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"CustomDDPStrategy\(\)\), because ExactEvaluation"):
        trainer(strategy="ddp", callbacks=[ExactEvaluation()]).validate(Probe(), DataLoader(Numbers(4)))


def test_one_process_without_any_strategy_of_ours() -> None:
    module = Probe()
    run = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[ExactEvaluation()], enable_progress_bar=False
    )
    (results,) = run.validate(module, DataLoader(Numbers(5), batch_size=2), verbose=False)
    assert results["sum"] == pytest.approx(NUMBERS[:5].sum().item(), rel=1e-12)
