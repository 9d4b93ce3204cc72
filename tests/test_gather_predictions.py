"""GatherPredictions against a plain loop over the loader in one process."""

from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_plugin import GatherPredictions
from ddp_plugin.errors import EvaluationMismatchError
from ddp_plugin.predictions import Predictions, PredictionWriter, read_predictions, split_batch
from tests.harness import ranks, trainer
from tests.test_exact_evaluation import EndsEarly, EveryThird, Numbers, Stream, _loader


class Pair(NamedTuple):
    value: Tensor
    name: list[str]


def predict(batch: Any) -> dict[str, Any]:
    indices, values = batch
    names = [f"sample {int(index)}" for index in indices]
    return {
        "square": values.square(),
        "matrix": values[:, None, None].expand(-1, 2, 3).clone(),
        "pair": Pair(values + 1, names),
        "number": [float(value) for value in values],
        "rare": [None if int(index) % 2 else int(index) for index in indices],
    }


class Predicts(pl.LightningModule):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return predict(batch)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return type(left) is type(right) and left == right


@ranks(1, 2, 3, 4, init=False, timeout_s=240)
@pytest.mark.parametrize("destination", ["rank_zero", "all"])
def test_equals_one_process_for_every_length(destination: str) -> None:
    for length in (1, 2, 5, 9, 20):
        for batch_size in (1, 2, 3, 64):
            loader = DataLoader(Numbers(length), batch_size=batch_size)
            gather = GatherPredictions(destination, chunk_size=2)
            returned = trainer(callbacks=[gather]).predict(Predicts(), loader)
            if destination == "rank_zero" and dist.get_rank() != 0:
                assert returned == []
                continue
            assert same(returned, [predict(batch) for batch in loader])
            samples = gather.predictions[0].samples()
            assert [sample["pair"].name for sample in samples] == [f"sample {index}" for index in range(length)]
            assert same([sample["square"] for sample in samples], [Numbers(length)[i][1] ** 2 for i in range(length)])


@ranks(2, init=False)
def test_without_the_callback_a_rank_returns_its_own_part_only() -> None:
    returned = trainer().predict(Predicts(), DataLoader(Numbers(5), batch_size=1))
    assert len(returned) < 5


@ranks(1, 2, 3, init=False)
@pytest.mark.parametrize("kind", ["shuffled", "custom batch sampler", "subset dataset"])
def test_any_order_comes_back_in_dataset_order(kind: str) -> None:
    gather = GatherPredictions("all")
    returned = trainer(callbacks=[gather]).predict(Predicts(), _loader(kind))
    batches = list(_loader(kind))
    assert same(returned, [predict(batch) for batch in batches])
    expected = sorted(int(index) for batch in batches for index in batch[0]) if kind != "subset dataset" else [7, 2, 5]
    assert [sample["pair"].name for sample in gather.predictions[0].samples()] == [f"sample {i}" for i in expected]


@ranks(2, 3, init=False)
def test_several_loaders_with_workers() -> None:
    loaders = [DataLoader(Numbers(5), batch_size=2, num_workers=1), DataLoader(Numbers(1), batch_size=4)]
    returned = trainer(callbacks=[GatherPredictions("all")]).predict(Predicts(), loaders)
    assert same(returned, [[predict(batch) for batch in loader] for loader in loaders])


@ranks(2, 3, init=False)
def test_a_stream_of_unequal_parts() -> None:
    lengths = [3, 0, 5][: int(__import__("os").environ["WORLD_SIZE"])]
    returned = trainer(callbacks=[GatherPredictions("all")]).predict(
        Predicts(), DataLoader(Stream(lengths), batch_size=2)
    )
    names = [name for output in returned for name in output["pair"].name]
    assert names == [f"sample {index}" for index in range(sum(lengths))]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[list[int]] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *rest: Any) -> None:
        self.indices.append(list(batch_indices))
        assert prediction["pair"].name == [f"sample {index}" for index in batch_indices]


@ranks(2, init=False)
def test_lightnings_prediction_writers_see_the_indices() -> None:
    writer = Writer()
    loader = DataLoader(Numbers(11), batch_sampler=EveryThird(11, flavour="x"))
    trainer(callbacks=[GatherPredictions(), writer]).predict(Predicts(), loader)
    expected = [[[0, 3, 6, 9], [1, 4, 7, 10]], [[2, 5, 8], [2, 5, 8]]]  # the last one is a ghost
    assert writer.indices == expected[dist.get_rank()]


@ranks(1, 2, 3, init=False)
def test_streaming_to_disk(tmp_path: Path) -> None:
    class Plain(Predicts):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {key: value for key, value in predict(batch).items() if key != "pair"}

    loader = DataLoader(Numbers(11), batch_size=2)
    folder = str(tmp_path / "out")
    returned = trainer(callbacks=[GatherPredictions(output_dir=folder, chunk_size=2)]).predict(Plain(), loader)
    assert not returned
    read = list(read_predictions(folder))
    assert [indices for indices, _ in read] == [batch[0].tolist() for batch in loader]
    plain = Plain()
    assert same([output for _, output in read], [plain.predict_step(batch, 0) for batch in loader])
    assert len(list(Path(folder).glob("*.pt"))) > 1
    with pytest.raises(FileExistsError, match="no predictions in"):
        trainer(callbacks=[GatherPredictions(output_dir=folder)]).predict(Plain(), loader)
    assert same([output for _, output in read], [output for _, output in read_predictions(folder)])


def test_one_process_streams_to_its_end_under_any_strategy(tmp_path: Path) -> None:
    class Plain(Predicts):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {key: value for key, value in predict(batch).items() if key != "pair"}

    gather = GatherPredictions(output_dir=str(tmp_path / "out"), chunk_size=4)
    run = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[gather], enable_progress_bar=False)
    loader = DataLoader(Numbers(9), batch_size=2)
    run.predict(Plain(), loader)
    assert [indices for indices, _ in read_predictions(str(tmp_path / "out"))] == [b[0].tolist() for b in loader]
    in_memory = GatherPredictions()
    run = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[in_memory], enable_progress_bar=False)
    run.predict(Plain(), loader)
    assert len(in_memory.predictions[0].samples()) == 9


def test_what_could_not_be_read_back_is_refused_at_the_first_batch(tmp_path: Path) -> None:
    writer = PredictionWriter(str(tmp_path), 0, 8)
    for output in (Pair(torch.ones(1), ["a"]), np.ones(2), [{"x": np.float32(1)}], object()):
        with pytest.raises(TypeError, match="because they go to files"):
            writer.add(0, [0], output)
    writer.add(0, [0], {"a": [torch.ones(1), (1, "x", None, True, b"y", 2.5)]})


def test_incomplete_files_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="complete predictions"):
        next(read_predictions(str(tmp_path)))


def test_a_batch_is_split_by_structure() -> None:
    assert split_batch({"a": torch.arange(2), "b": ["x", "y"]}, 2) == [
        {"a": torch.tensor(0), "b": "x"},
        {"a": torch.tensor(1), "b": "y"},
    ]
    assert split_batch((torch.arange(2), [1.0, 2.0]), 2) == [(torch.tensor(0), 1.0), (torch.tensor(1), 2.0)]
    for unsplittable in (torch.tensor(3.0), 3.0, torch.arange(3), ["x"], "text"):
        with pytest.raises(ValueError, match="one entry for each of the batch's 2 samples"):
            split_batch(unsplittable, 2)


def test_a_list_of_one_entry_per_sample_is_not_transposed() -> None:
    entries = [{"box": torch.tensor([1.0, 2.0])}, {"box": torch.tensor([3.0, 4.0])}]
    assert same(split_batch(entries, 2), entries)
    ragged = [torch.ones(3), torch.ones(1)]
    assert same(split_batch(ragged, 2), ragged)
    members = [torch.arange(3), ["a", "b", "c"]]
    assert same(split_batch(members, 3), [[torch.tensor(i), name] for i, name in enumerate("abc")])
    with pytest.raises(ValueError, match="which could be both"):
        split_batch([torch.ones(2), torch.ones(2)], 2)


class EpochWriter(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.given: Any = None

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.given = (predictions, batch_indices)


@ranks(2, init=False)
def test_a_writer_at_the_epochs_end_is_given_all_or_is_refused_before() -> None:
    writer, loader = EpochWriter(), DataLoader(Numbers(5), batch_size=2)
    trainer(callbacks=[GatherPredictions("all"), writer]).predict(Predicts(), loader)
    outputs, indices = writer.given
    assert same(outputs, [predict(batch) for batch in loader])
    assert indices == [[[0, 1], [2, 3], [4]]]
    with pytest.raises(ValueError, match="Put GatherPredictions first"):
        trainer(callbacks=[EpochWriter(), GatherPredictions()]).predict(Predicts(), loader)


@ranks(3, init=False)
def test_a_ghost_step_leaves_no_trace_in_the_module() -> None:
    class Counts(Predicts):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            self.names += predict(batch)["pair"].name
            return predict(batch)

    module = Counts()
    trainer(callbacks=[GatherPredictions()]).predict(module, DataLoader(Numbers(7), batch_size=2))
    own = [[0, 1, 2, 3], [4, 5], [6]][dist.get_rank()]
    assert module.names == [f"sample {index}" for index in own]


@ranks(2, init=False)
def test_a_prediction_that_is_cut_short_raises_on_all_ranks() -> None:
    with pytest.raises(EvaluationMismatchError, match="predictions for 4 batches. Got 2"):
        trainer(callbacks=[GatherPredictions()]).predict(Predicts(), DataLoader(EndsEarly(8), batch_size=2))


def test_spawned_processes_would_lose_the_predictions() -> None:
    gather = GatherPredictions()
    run = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_plugin_spawn", logger=False, callbacks=[gather])
    with pytest.raises(ValueError, match="spawn and fork launchers"):
        gather._refuse_what_would_be_lost(run)


def test_a_sample_drawn_twice_is_there_twice() -> None:
    predictions = Predictions([[3, 1], [3]], [torch.tensor([30, 10]), torch.tensor([31])])
    assert [int(sample) for sample in predictions.samples()] == [10, 30, 31]


@pytest.mark.parametrize("arguments", [{"destination": "rank_one"}, {"chunk_size": 0}])
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        GatherPredictions(**arguments)


def test_one_process_under_lightnings_own_strategy() -> None:
    gather = GatherPredictions()
    run = pl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[gather], enable_progress_bar=False)
    loader = DataLoader(Numbers(5), batch_size=2)
    assert same(run.predict(Predicts(), loader), [predict(batch) for batch in loader])
