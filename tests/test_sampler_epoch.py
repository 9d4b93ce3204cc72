"""Who hears which epoch, when; and that the order of a resumed run is the uninterrupted run's."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
)

from ddp_plugin import SamplerEpoch
from ddp_plugin.data.epochs import share_epoch, tell_epoch
from ddp_plugin.data.loaders import replaced
from ddp_plugin.forwarding import Forwarder
from tests.harness import ranks, run_ranks, trainer

LENGTH = 8


class Hears:
    """Keeps every epoch that it is told."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.heard.append(epoch)

    @property
    def epoch(self) -> int:
        return self.heard[-1] if self.heard else -1


class Order(Hears):
    """A sampler over a source, shuffled by the epoch it was told; everything random here is its own."""

    def __init__(self, sampler: Any) -> None:
        super().__init__()
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        indices = list(self.sampler)
        random.Random(self.epoch).shuffle(indices)
        return iter(indices)

    def __len__(self) -> int:
        return len(self.sampler)


class Batches(Hears):
    """A batch sampler whose sampler has a name that Lightning does not look at."""

    def __init__(self, base_sampler: Any) -> None:
        super().__init__()
        self.base_sampler = base_sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[index] for index in self.base_sampler])

    def __len__(self) -> int:
        return len(self.base_sampler)


class Numbers(Hears, Dataset[torch.Tensor]):
    """Items are (index, the epoch that the copy which fetched them knows)."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.epoch])


class NumbersInBatches(Numbers):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(Hears, IterableDataset[torch.Tensor]):
    """Three samples, others on each rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        epoch, first = self.epoch, 3 * int(os.environ.get("RANK", "0"))
        return iter([torch.tensor([index, epoch]) for index in range(first, first + 3)])


class Keeps(pl.LightningModule):
    """Keeps, by epoch, what the batches held; trains a parameter so that a Trainer accepts it."""

    def __init__(self, asks_for_steps: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.asks_for_steps = asks_for_steps
        self.seen: dict[int, list[int]] = {}
        self.epochs_in_items: dict[int, set[int]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = batch if isinstance(batch, (list, tuple)) else [batch]
        for items in batches:
            self.seen.setdefault(self.current_epoch, []).extend(items[..., 0].flatten().tolist())
            self.epochs_in_items.setdefault(self.current_epoch, set()).update(items[..., 1].flatten().tolist())
        return self.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks_for_steps:
            assert self.trainer.estimated_stepping_batches > 0  # makes Lightning build the loaders here and now
        return torch.optim.SGD([self.weight], lr=0.0)


def _fit(loader: Any, epochs: int = 3, callback: bool = True, **settings: Any) -> Keeps:
    module = Keeps(settings.pop("asks_for_steps", False))
    ckpt_path = settings.pop("ckpt_path", None)
    callbacks = [*settings.pop("callbacks", []), *([SamplerEpoch()] if callback else [])]
    trainer(max_epochs=epochs, callbacks=callbacks, **settings).fit(module, loader, ckpt_path=ckpt_path)
    return module


def _plain(**settings: Any) -> Any:
    return DataLoader(Numbers(), batch_size=2, **settings)


# ------------------------------------------------------------------------------------------------ who hears it, plain


def test_every_place_hears_the_epoch_once() -> None:
    inner, outer, dataset = Order(range(LENGTH)), None, Numbers()
    outer = Order(inner)
    batches = Batches(outer)
    loader = DataLoader(Subset(ConcatDataset([dataset, Stream()][:1]), range(LENGTH)), batch_sampler=batches)
    tell_epoch(loader, 4)
    assert [thing.heard for thing in (batches, outer, inner, dataset)] == [[4]] * 4


def test_an_object_met_twice_hears_it_once() -> None:
    dataset, order = Numbers(), Order(range(LENGTH))
    loader = DataLoader(ConcatDataset([dataset, Subset(dataset, [0])]), batch_sampler=Batches(order))
    loader.batch_sampler.sampler = order  # type: ignore[union-attr]
    tell_epoch(loader, 1)
    assert dataset.heard == order.heard == [1]


def test_an_object_behind_a_forwarder_hears_it_once() -> None:
    batches, dataset = Batches(Order(range(LENGTH))), Numbers()
    loader = replaced(DataLoader(Forwarder(dataset), batch_sampler=batches), batch_sampler=Forwarder(batches))
    tell_epoch(loader, 3)
    assert batches.heard == batches.base_sampler.heard == dataset.heard == [3]


class Refuses(Order):
    def set_epoch(self, epoch: int) -> None:
        raise KeyError("no such epoch")


def test_a_set_epoch_that_raises_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"test_sampler_epoch\.Refuses.*no such epoch"):
        tell_epoch(_plain(sampler=Refuses(range(LENGTH))), 2)
    with pytest.raises(RuntimeError, match=r"set_epoch\(0\) of .*Refuses"):
        _fit(_plain(sampler=Refuses(range(LENGTH))), strategy="auto", devices=1)


def test_only_persistent_workers_with_a_dataset_that_hears_get_a_shared_epoch() -> None:
    for loader in (
        _plain(),
        _plain(num_workers=1),
        DataLoader(range(8), num_workers=1, persistent_workers=True),  # type: ignore[arg-type]
        [1, 2],
    ):
        assert share_epoch(loader) is loader
    loader = _plain(num_workers=1, persistent_workers=True)
    shared = share_epoch(loader)
    assert shared is not loader
    assert share_epoch(shared) is shared  # once
    assert isinstance(shared.dataset, Numbers)
    assert len(shared.dataset) == LENGTH
    assert not hasattr(shared.dataset, "__getitems__")
    shared.dataset.scale = 3
    assert loader.dataset.scale == 3  # type: ignore[attr-defined]  # attributes are the user's dataset's
    stream = share_epoch(DataLoader(Stream(), num_workers=1, persistent_workers=True))
    assert isinstance(stream.dataset, IterableDataset)
    with pytest.raises(TypeError, match="len"):
        len(stream.dataset)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_persistent_workers_hear_through_shared_memory(start_method: str) -> None:
    loader = _plain(num_workers=1, persistent_workers=True, multiprocessing_context=start_method)
    shared, plain = share_epoch(loader), []
    seen = []
    for epoch in range(3):
        tell_epoch(shared, epoch)
        seen.append({int(item[1]) for batch in shared for item in batch})
    assert seen == [{0}, {1}, {2}]
    assert loader.dataset.heard == [0, 1, 2]  # type: ignore[attr-defined]  # and the main process's copy, once each
    if start_method == "fork":  # without it they keep the first; what torch does itself
        for epoch in range(2):
            tell_epoch(loader, epoch + 5)
            plain.append({int(item[1]) for batch in loader for item in batch})
        assert plain == [{5}, {5}]
        loader._iterator._shutdown_workers()  # type: ignore[union-attr]
    shared._iterator._shutdown_workers()


# -------------------------------------------------------------------------------------------------- within a Trainer


@ranks(1, 2, init=False)
def test_each_place_hears_each_epoch_once_in_a_fit() -> None:
    inner, dataset = Order(range(LENGTH)), Numbers()
    batches = Batches(Order(inner))
    _fit(DataLoader(ConcatDataset([dataset]), batch_sampler=batches))
    assert batches.heard == inner.heard == batches.base_sampler.heard == dataset.heard == [0, 1, 2]


@ranks(1, init=False)
def test_without_the_callback_they_hear_nothing() -> None:
    inner, dataset = Order(range(LENGTH)), Numbers()
    batches = Batches(Order(inner))
    _fit(DataLoader(ConcatDataset([dataset]), batch_sampler=batches), callback=False, use_distributed_sampler=False)
    assert batches.heard == inner.heard == batches.base_sampler.heard == dataset.heard == []


@ranks(2, init=False)
def test_a_sampler_inside_the_wrapper_that_lightning_injects_hears_it() -> None:
    inner = Order(range(LENGTH))
    outer = Order(inner)
    module = _fit(DataLoader(Numbers(), batch_size=2, sampler=outer))
    assert inner.heard == [0, 1, 2]
    assert set(outer.heard) == {0, 1, 2}
    assert outer.heard == sorted(outer.heard)  # Lightning tells this one too
    assert all(len(module.seen[epoch]) == LENGTH // 2 for epoch in range(3))


@ranks(1, 2, init=False)
def test_all_leaves_of_a_combined_loader_hear_it() -> None:
    first, second = Numbers(), Stream()
    loader = CombinedLoader([DataLoader(first, batch_size=2), DataLoader(second)], "min_size")
    module = _fit(loader)
    assert first.heard == second.heard == [0, 1, 2]
    assert module.epochs_in_items == {0: {0}, 1: {1}, 2: {2}}


@pytest.mark.parametrize("kind", ["map", "map in batches", "nested", "iterable"])
@ranks(2, init=False)
def test_items_from_persistent_workers_know_their_epoch(kind: str) -> None:
    for epochs_known, callback in (({0: {0}, 1: {1}, 2: {2}}, True), ({0: {-1}, 1: {-1}, 2: {-1}}, False)):
        dataset: Any = {
            "map": Numbers(),
            "map in batches": NumbersInBatches(),
            "nested": Subset(ConcatDataset([Numbers(), Numbers()]), range(3, 12)),
            "iterable": Stream(),
        }[kind]
        module = _fit(DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True), callback=callback)
        assert module.epochs_in_items == epochs_known


@pytest.mark.parametrize("num_workers", [0, 1])
@ranks(2, init=False)
def test_items_know_their_epoch_without_persistent_workers(num_workers: int) -> None:
    module = _fit(DataLoader(Numbers(), batch_size=2, num_workers=num_workers))
    assert module.epochs_in_items == {0: {0}, 1: {1}, 2: {2}}


def _deep_order(callback: bool) -> dict[int, list[int]]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deep = Batches(DistributedSampler(range(LENGTH), world_size, rank, shuffle=True))  # type: ignore[arg-type]
    return _fit(DataLoader(Numbers(), batch_sampler=deep), callback=callback, use_distributed_sampler=False).seen


def test_a_distributed_sampler_one_level_deeper_shuffles_anew_each_epoch() -> None:
    for callback in (True, False):
        orders = run_ranks(_deep_order, 2, init=False, callback=callback)
        for epoch in range(3):
            generator = torch.Generator().manual_seed(epoch if callback else 0)  # DistributedSampler's documented order
            whole = torch.randperm(LENGTH, generator=generator).tolist()
            assert [orders[rank][epoch] for rank in range(2)] == [whole[0::2], whole[1::2]]


@ranks(2, init=False)
def test_reloaded_loaders_hear_it_in_time() -> None:
    class Reloads(Keeps):
        def train_dataloader(self) -> Any:
            self.made = [*getattr(self, "made", []), Order(range(LENGTH))]
            return DataLoader(Numbers(), batch_sampler=Batches(self.made[-1]), num_workers=1)

    module = Reloads()
    trainer(max_epochs=3, callbacks=[SamplerEpoch()], reload_dataloaders_every_n_epochs=1).fit(module)
    assert [order.heard for order in module.made] == [[0], [1], [2]]
    assert module.epochs_in_items == {0: {0}, 1: {1}, 2: {2}}


@ranks(2, init=False)
def test_another_strategy_on_several_processes_is_refused() -> None:
    with pytest.raises(TypeError, match="CustomDDPStrategy"):
        _fit(_plain(), strategy="ddp")


def test_one_process_needs_no_particular_strategy() -> None:
    batches = Batches(range(LENGTH))
    module = _fit(DataLoader(Numbers(), batch_sampler=batches), strategy="auto", devices=1)
    assert batches.heard == [0, 1, 2]
    assert module.epochs_in_items == {0: {0}, 1: {1}, 2: {2}}


# ------------------------------------------------------------------------------------------------------------- resume


def _orders(
    folder: str, num_workers: int, asks_for_steps: bool, callback: bool, own_order: bool, persistent: bool = False
) -> tuple[Any, Any, Any]:
    def loader() -> Any:
        workers = {"num_workers": num_workers, "persistent_workers": persistent}
        if own_order:
            return DataLoader(Numbers(), batch_sampler=Batches(Order(range(LENGTH))), **workers)  # type: ignore[arg-type]
        return DataLoader(Numbers(), batch_size=2, shuffle=True, **workers)  # type: ignore[arg-type]

    settings: dict[str, Any] = {
        "callback": callback,
        "asks_for_steps": asks_for_steps,
        "enable_checkpointing": True,
    }
    whole = _fit(loader(), 3, callbacks=[ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}")], **settings)
    resumed = _fit(
        loader(),
        3,
        ckpt_path=str(Path(folder, "epoch=0.ckpt")),
        callbacks=[ModelCheckpoint(folder, save_top_k=0)],
        **settings,
    )
    return whole.seen, resumed.seen, resumed.epochs_in_items


@pytest.mark.parametrize("asks_for_steps", [False, True])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("own_order", [False, True])
def test_a_resumed_run_has_the_order_of_the_uninterrupted_one(
    tmp_path: Path, num_workers: int, asks_for_steps: bool, own_order: bool
) -> None:
    results = run_ranks(
        _orders,
        2,
        init=False,
        folder=str(tmp_path),
        num_workers=num_workers,
        asks_for_steps=asks_for_steps,
        callback=True,
        own_order=own_order,
    )
    for whole, resumed, epochs_in_items in results:
        assert resumed == {epoch: whole[epoch] for epoch in (1, 2)}
        assert len({tuple(order) for order in whole.values()}) == 3
        assert epochs_in_items == {1: {1}, 2: {2}}


def test_a_resumed_run_with_persistent_workers_and_an_early_loader_knows_its_epoch(tmp_path: Path) -> None:
    settings = {"num_workers": 1, "asks_for_steps": True, "callback": True, "own_order": True, "persistent": True}
    for whole, resumed, epochs_in_items in run_ranks(_orders, 2, init=False, folder=str(tmp_path), **settings):
        assert resumed == {epoch: whole[epoch] for epoch in (1, 2)}
        assert epochs_in_items == {1: {1}, 2: {2}}


def test_without_the_callback_a_resumed_run_replays_the_first_order(tmp_path: Path) -> None:
    settings = {"num_workers": 1, "asks_for_steps": False, "callback": False, "own_order": False}
    for whole, resumed, _ in run_ranks(_orders, 2, init=False, folder=str(tmp_path), **settings):
        assert resumed[1] == whole[0] != whole[1]
