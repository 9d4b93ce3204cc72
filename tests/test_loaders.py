"""Exchanging parts of a loader, and finding everything in reach of one."""

from typing import Any

import pytest
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, SequentialSampler, Subset

from ddp_plugin.data.loaders import replaced, walk


class Own(DataLoader[Any]):
    """A class with a constructor that nobody else can call."""

    def __init__(self, *, secret: str) -> None:
        super().__init__(range(6), batch_size=2)  # type: ignore[arg-type]
        self.secret = secret


def test_a_replaced_part_leaves_the_class_the_state_and_the_original() -> None:
    loader = Own(secret="x")
    clone = replaced(loader, batch_sampler=BatchSampler(SequentialSampler(range(3)), 3, False))
    assert (type(clone), clone.secret) == (Own, "x")  # type: ignore[attr-defined]
    assert [batch.tolist() for batch in clone] == [[0, 1, 2]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


class Holds(Dataset[int]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return 4


def test_walk_reaches_nested_things_once_and_leaves_data_alone() -> None:
    inner = Holds(list(range(300_000)))
    subset = Subset(inner, [0, 1])
    loader = DataLoader(ConcatDataset([subset, inner]), batch_size=2)
    found = list(walk(loader))
    assert sum(item is inner for item in found) == 1
    assert any(item is subset for item in found)
    assert any(item is loader.batch_sampler for item in found)
    assert len(found) < 20  # not the 300,000 samples


class Refuses(Holds):
    @property
    def sampler(self) -> Any:
        raise RuntimeError("not open yet")


class AnswersAll:
    def __getattr__(self, name: str) -> "AnswersAll":
        if name.startswith("__"):
            raise AttributeError(name)
        return AnswersAll()


def test_walk_ends_and_survives_objects_that_cannot_answer() -> None:
    assert list(walk(DataLoader(Refuses(None))))
    assert len(list(walk(AnswersAll()))) <= 10_000
    cycle = Holds(None)
    cycle.dataset = cycle
    assert sum(1 for _ in walk(cycle)) == 1


def test_the_original_refuses_what_replaced_does_consistently() -> None:
    with pytest.raises(ValueError, match="should not be set"):
        Own(secret="x").batch_sampler = None  # type: ignore[assignment]
