"""Another model, optimizer or run than the checkpoint's: what differs is named, and nothing has been changed."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.checkpoints.mismatch import OptimizerRecord, model_differences, optimizer_differences
from ddp_plugin.errors import DDPPluginError
from tests.harness import ranks, trainer


def record(kind: str, options: str, *groups: dict[str, tuple[int, ...]]) -> OptimizerRecord:
    return OptimizerRecord(kind, tuple(options.split()), tuple(tuple(group.items()) for group in groups))


def state(options: str, *sizes: int) -> dict[str, Any]:
    indices, begin = [], 0
    for size in sizes:
        indices.append(list(range(begin, begin + size)))
        begin += size
    return {"state": {}, "param_groups": [dict.fromkeys(options.split(), 0) | {"params": each} for each in indices]}


def test_tensors_are_named_by_what_is_wrong_with_them() -> None:
    assert model_differences({"a": (2,), "b": ()}, {"a": (2,), "b": ()}) == []
    saved, own = {"a": (2,), "gone": (3,)}, {"a": (2, 1), "new": (3,)}
    assert model_differences(saved, own) == [
        "it lacks new",
        "this model lacks gone",
        "it holds a of shape (2,), here (2, 1)",
    ]
    assert model_differences(saved, own, strict=False) == ["it holds a of shape (2,), here (2, 1)"]
    assert model_differences({"a": None}, {"a": (1,)}) == []  # one that has no shape yet
    assert model_differences({}, {str(i): () for i in range(8)}) == ["it lacks 0, 1, 2, 3, 4 and 3 more"]


@pytest.mark.parametrize(
    ("saved", "theirs", "own", "words"),
    [
        (
            state("lr", 2),
            record("SGD", "lr", {"a": (1,), "b": (2,)}),
            record("SGD", "lr", {"a": (1,), "b": (2,)}),
            None,
        ),
        # renamed, or with options that another torch has: no difference
        (
            state("lr", 2),
            record("SGD", "lr", {"a": (1,), "b": (2,)}),
            record("SGD", "lr", {"A": (1,), "b": (2,)}),
            None,
        ),
        (state("lr", 1), record("SGD", "lr", {"a": (1,)}), record("SGD", "lr fused", {"a": (1,)}), None),
        (state("lr fused", 1), None, record("SGD", "lr", {"a": (1,)}), None),
        (state("lr", 1), None, record("SGD", "lr fused", {"a": (1,)}), None),
        (state("lr initial_lr", 1), None, record("SGD", "lr fused", {"a": (1,)}), None),
        (state("lr betas", 1), record("Adam", "lr betas", {"a": (1,)}), record("AdamW", "lr betas", {"a": (1,)}), None),
        ({"own": 1}, record("Own", "lr", {"a": (1,)}), record("Own", "lr", {"a": (1,)}), None),
        # differences
        (
            state("lr", 2),
            record("SGD", "lr", {"a": (1,), "b": (1,)}),
            record("SGD", "lr", {"a": (1,), "c": (1,), "d": (1,)}),
            "parameter groups of 2 parameters, here of 3; b not here; c, d not in the checkpoint",
        ),
        (state("lr", 1, 1), None, record("SGD", "lr", {"a": (), "b": ()}), "groups of 1, 1 parameters, here of 2"),
        (
            state("lr momentum", 1),
            record("SGD", "lr momentum", {"a": (1,)}),
            record("Adam", "lr betas", {"a": (1,)}),
            "the state of SGD, here Adam, whose options betas it does not have",
        ),
        (state("lr momentum", 1), None, record("Adam", "lr betas", {"a": (1,)}), "another kind, here Adam"),
        (
            state("lr", 2),
            record("SGD", "lr", {"a": (1,), "b": (1,)}),
            record("SGD", "lr", {"b": (1,), "a": (1,)}),
            "state for a in the place where this run has b; their order differs",
        ),
        (
            state("lr", 1),
            record("SGD", "lr", {"a": (1,)}),
            record("SGD", "lr", {"a": (2,)}),
            r"state for a of shape \(1,\) where this run has a of shape \(2,\)",
        ),
    ],
)
def test_optimizers_are_compared_by_place_name_and_options(
    saved: dict[str, Any], theirs: OptimizerRecord | None, own: OptimizerRecord, words: str | None
) -> None:
    theirs = theirs and OptimizerRecord.from_state(theirs.state())  # as it travels
    found = optimizer_differences([saved], None if theirs is None else [theirs], [own])
    if words is None:
        assert found == []
    else:
        with pytest.raises(ValueError, match=words):
            raise ValueError(*found)


class Model(pl.LightningModule):
    """A net whose parts and optimizer are chosen by name."""

    def __init__(self, width: int = 3, order: str = "first second", optimizer: str = "adam", seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = {"first": torch.nn.Linear(2, width), "second": torch.nn.Linear(2, width), "third": torch.nn.Linear(2, 1)}
        self.net = torch.nn.ModuleDict({name: made[name] for name in order.split()})
        self.optimizer = optimizer

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([layer(batch).square().mean() for layer in self.net.values()]).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if self.optimizer == "two groups":
            return torch.optim.Adam([{"params": parameters[:2]}, {"params": parameters[2:]}])
        return torch.optim.Adam(parameters)


def data() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(16.0).view(8, 2) / 16, batch_size=2)  # type: ignore[arg-type]


def fit(model: Model, path: Path | None = None, epochs: int = 2, **settings: Any) -> pl.Trainer:
    run: pl.Trainer = trainer(max_epochs=epochs, **settings)
    run.fit(model, data(), ckpt_path=path)
    return run


@ranks(1, 2, init=False)
def test_a_model_that_does_not_fit_is_named_and_stays_what_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    fit(Model(), epochs=1).save_checkpoint(path)
    for other, words in (
        (Model(width=5), r"net\.first\.weight of shape \(3, 2\), here \(5, 2\)"),
        (Model(order="first third"), r"it lacks net\.third\.weight, net\.third\.bias; this model lacks net\.second"),
    ):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(DDPPluginError, match=words):
            fit(other, path)
        assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
        with pytest.raises(DDPPluginError, match=words):
            trainer().validate(other, data(), ckpt_path=path)
        with pytest.raises(RuntimeError, match="size mismatch|Missing key"):  # torch alone has changed what does fit
            other.load_state_dict(torch.load(path)["state_dict"])
        if "third" in other.net:
            assert not all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    loose = Model(order="first third")
    loose.strict_loading = False
    trainer().validate(loose, data(), ckpt_path=path)
    assert torch.equal(loose.net["first"].weight, torch.load(path)["state_dict"]["net.first.weight"])


class Renames(Model):
    """Takes the checkpoint of another version of itself."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        for name in list(weights):
            if "third" in name:
                weights[name.replace("third", "second")] = weights.pop(name)


class TakesBoth(Model):
    """The same below load_state_dict, where a comparison of names cannot know of it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register_load_state_dict_pre_hook(
            lambda module, weights, *_: Renames.on_load_checkpoint(module, {"state_dict": weights})
        )


@pytest.mark.parametrize("kind", [Renames, TakesBoth])
@ranks(1, init=False)
def test_a_module_that_knows_what_to_do_is_let(tmp_path: Path, kind: type[Model]) -> None:
    path = tmp_path / "a.ckpt"
    old = Model(width=1, order="first third")
    fit(old, epochs=1).save_checkpoint(path)
    new = kind(width=1, seed=1)
    trainer().validate(new, data(), ckpt_path=path)
    assert torch.equal(new.net["second"].weight, old.net["third"].weight)


@ranks(1, 2, init=False)
def test_optimizers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    saved = Model()
    fit(saved, epochs=1).save_checkpoint(path)
    for other, words in (
        (Model(optimizer="sgd"), "the state of Adam, here SGD, whose options dampening, momentum, nesterov"),
        (Model(optimizer="two groups"), "parameter groups of 4 parameters, here of 2, 2"),
        (
            Model(order="second first"),
            r"state for net\.first\.weight in the place where this run has net\.second\.weight",
        ),
    ):
        with pytest.raises(DDPPluginError, match=words):
            fit(other, path)
    fit(Model(), path)


@ranks(1, init=False)
def test_what_differs_without_harm_is_said(tmp_path: Path, world_size: int) -> None:
    path, said = tmp_path / "a.ckpt", []
    fit(Model(), epochs=1, strategy=CustomDDPStrategy(comm_hook="bf16")).save_checkpoint(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddp_plugin.strategy.checkpoints.rank_zero_info", said.append)
        fit(Model(), path, epochs=2, strategy=CustomDDPStrategy(comm_hook="bf16"))
        assert said == []
        changed = torch.load(path)
        changed["ddp_plugin"]["run"]["world_size"] = 4
        changed["ddp_plugin"]["run"]["versions"]["torch"] = "2.6.0"
        torch.save(changed, tmp_path / "b.ckpt")
        fit(Model(), tmp_path / "b.ckpt", epochs=2)
    assert said == [
        "CustomDDPStrategy: the checkpoint's run had world_size=4, now 1; comm_hook=bf16(), now None; "
        f"torch=2.6.0, now {torch.__version__}."
    ]


@ranks(1, 2, init=False)
def test_what_is_no_checkpoint_of_a_trainer_is_said(tmp_path: Path) -> None:
    run = fit(Model(), epochs=1)
    if run.is_global_zero:
        torch.save(Model().state_dict(), tmp_path / "weights.pt")
        torch.save([1, 2], tmp_path / "list.pt")
    run.strategy.barrier()
    for name, words in (("weights.pt", r"names \['net\.first\.weight'"), ("list.pt", "with list")):
        with pytest.raises(DDPPluginError, match=words):
            fit(Model(), tmp_path / name)


class Fine(pl.LightningModule):
    """A weight that float32 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, dtype=torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch.double()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-12)


@ranks(1, init=False)
def test_a_double_is_resumed_with_all_its_digits(tmp_path: Path) -> None:
    loader = DataLoader(torch.ones(8, 1), batch_size=1)
    run = trainer(precision="64-true", max_steps=3)
    run.fit(first := Fine(), loader)
    weight = first.layer.weight.detach().clone()
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, weight.float().double())
    run.save_checkpoint(path := tmp_path / "double.ckpt")
    trainer(precision="64-true", max_steps=3).fit(second := Fine(), loader, ckpt_path=path)
    assert torch.equal(second.layer.weight, weight)
