"""How a checkpoint and the run that loads it differ, in names: of tensors, optimizers, hooks. Plain comparisons."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_plugin.errors import counted

__all__ = ["OptimizerRecord", "RunRecord", "model_differences", "optimizer_differences", "run_differences"]

Shape = tuple[int, ...]
_NAMED = 5  # of many names, so many are written out
_OF_SCHEDULERS = {"initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr"}  # kept among the options


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer, as far as a checkpoint has to fit it.

    Attributes:
        kind: name of its class.
        options: names of a parameter group's options, in order.
        groups: the parameters of each group, in order: name and shape.
    """

    kind: str
    options: tuple[str, ...]
    groups: tuple[tuple[tuple[str, Shape], ...], ...]

    def state(self) -> dict[str, Any]:
        """Returns it as plain containers for a checkpoint."""
        groups = [[[name, list(shape)] for name, shape in group] for group in self.groups]
        return {"kind": self.kind, "options": list(self.options), "groups": groups}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "OptimizerRecord":
        """Takes it out of a checkpoint."""
        groups = tuple(tuple((name, tuple(shape)) for name, shape in group) for group in state["groups"])
        return cls(state["kind"], tuple(state["options"]), groups)


@dataclass(frozen=True)
class RunRecord:
    """A run, as far as the one that goes on from its checkpoint may differ from it.

    Attributes:
        world_size: number of ranks.
        comm_hook: its hook in words, ``None`` for DDP's own reducer.
        logical_shards: shards of an optimizer step, ``None`` where the ranks are the shards.
        optimizers: its optimizers, in order.
        versions: of the packages, by name.
    """

    world_size: int
    comm_hook: str | None
    logical_shards: int | None
    optimizers: tuple[OptimizerRecord, ...]
    versions: Mapping[str, str]

    def state(self) -> dict[str, Any]:
        """Returns it as plain containers for a checkpoint."""
        return {
            "world_size": self.world_size,
            "comm_hook": self.comm_hook,
            "logical_shards": self.logical_shards,
            "optimizers": [optimizer.state() for optimizer in self.optimizers],
            "versions": dict(self.versions),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RunRecord":
        """Takes it out of a checkpoint."""
        optimizers = tuple(OptimizerRecord.from_state(optimizer) for optimizer in state["optimizers"])
        return cls(
            state["world_size"], state["comm_hook"], state["logical_shards"], optimizers, dict(state["versions"])
        )


def in_words(names: Sequence[str]) -> str:
    """Returns names as a phrase; of many the first ones and how many more there are."""
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def model_differences(
    saved: Mapping[str, Shape | None], own: Mapping[str, Shape | None], *, strict: bool = True
) -> list[str]:
    """Compares the tensors of a checkpoint with those of a model.

    Args:
        saved: shape of each tensor in the checkpoint's ``state_dict``, by name; ``None`` for what has no shape (yet).
        own: the same of the model.
        strict: whether each must have all names of the other.

    Returns:
        One phrase for each kind of difference, empty where the checkpoint fits.
    """
    phrases = []
    if strict:
        missing = [name for name in own if name not in saved]
        unexpected = [name for name in saved if name not in own]
        phrases += [f"it lacks {in_words(missing)}"] if missing else []
        phrases += [f"this model lacks {in_words(unexpected)}"] if unexpected else []
    reshaped = [
        f"{name} of shape {saved[name]}, here {shape}"
        for name, shape in own.items()
        if None not in (shape, saved.get(name)) and saved[name] != shape
    ]
    return phrases + ([f"it holds {in_words(reshaped)}"] if reshaped else [])


def optimizer_differences(
    saved: Sequence[Mapping[str, Any]], records: Sequence[OptimizerRecord] | None, own: Sequence[OptimizerRecord]
) -> list[str]:
    """Compares a checkpoint's optimizers with those of a run; its state must reach the parameters that it belongs to.

    Parameters that are called otherwise but have the same shapes in the same places do not differ: somebody renamed
    them. The same names in other places do.

    Args:
        saved: the checkpoint's ``optimizer_states``.
        records: what it says of its optimizers; ``None`` where Lightning alone has written it.
        own: this run's.

    Returns:
        One phrase for each optimizer that differs, empty where all fit.
    """
    if len(saved) != len(own):
        return [f"{counted(len(saved), 'optimizer')}, here {counted(len(own), 'optimizer')}"]
    phrases = []
    for index, (state, mine) in enumerate(zip(saved, own, strict=True)):
        theirs = records[index] if records is not None and len(records) == len(own) else None
        if phrase := _optimizer_difference(state, theirs, mine):
            phrases.append(phrase if len(own) == 1 else f"optimizer {index}: {phrase}")
    return phrases


def _optimizer_difference(
    state: Mapping[str, Any], theirs: OptimizerRecord | None, mine: OptimizerRecord
) -> str | None:
    if "param_groups" not in state:  # an optimizer of the user's own making, which keeps its state in its own way
        return None
    groups: Sequence[Mapping[str, Any]] = state["param_groups"]
    sizes, own_sizes = [len(group["params"]) for group in groups], [len(group) for group in mine.groups]
    if sizes != own_sizes:
        phrase = f"parameter groups of {in_words([str(size) for size in sizes])} parameters, here of "
        phrase += in_words([str(size) for size in own_sizes])
        if theirs is not None:
            phrase += _exchanged_names(_flat(theirs), _flat(mine))
        return phrase
    # Another version of torch knows more options of an optimizer, or fewer; another optimizer has both.
    options = set().union(*groups) - {"params"} if groups else set(mine.options)
    lacking, extra = sorted(set(mine.options) - options), options - set(mine.options) - _OF_SCHEDULERS
    is_other = theirs.kind != mine.kind if theirs is not None else bool(extra)
    if lacking and is_other:
        was = theirs.kind if theirs is not None else "another kind"
        return f"the state of {was}, here {mine.kind}, whose options {in_words(lacking)} it does not have"
    if theirs is None:
        return None
    before, now = _flat(theirs), _flat(mine)
    for (name, shape), (own_name, own_shape) in zip(before, now, strict=True):
        if shape != own_shape:
            return f"state for {name} of shape {shape} where this run has {own_name} of shape {own_shape}"
    if {name for name, _ in before} == {name for name, _ in now}:
        for (name, _), (own_name, _) in zip(before, now, strict=True):
            if name != own_name:
                return f"state for {name} in the place where this run has {own_name}; their order differs"
    return None


def _flat(record: OptimizerRecord) -> list[tuple[str, Shape]]:
    return [entry for group in record.groups for entry in group]


def _exchanged_names(saved: Iterable[tuple[str, Shape]], own: Iterable[tuple[str, Shape]]) -> str:
    names, own_names = [name for name, _ in saved], [name for name, _ in own]
    phrase = ""
    if gone := [name for name in names if name not in set(own_names)]:
        phrase += f"; {in_words(gone)} not here"
    if new := [name for name in own_names if name not in set(names)]:
        phrase += f"; {in_words(new)} not in the checkpoint"
    return phrase


def run_differences(saved: RunRecord, own: RunRecord) -> list[str]:
    """Says in what a run goes on otherwise than the one before it; nothing of this keeps it from going on.

    Args:
        saved: what the checkpoint says.
        own: this run; its optimizers are not compared here.

    Returns:
        One phrase for each difference, such as ``"world_size=4, now 2"``.
    """
    pairs = [
        ("world_size", saved.world_size, own.world_size),
        ("comm_hook", saved.comm_hook, own.comm_hook),
        ("logical_shards", saved.logical_shards, own.logical_shards),
    ]
    names = sorted(saved.versions.keys() & own.versions.keys())
    pairs += [(name, saved.versions[name], own.versions[name]) for name in names]
    return [f"{name}={before}, now {now}" for name, before, now in pairs if before != now]
