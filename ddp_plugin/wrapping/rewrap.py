"""When the set of trainable parameters changes: noticing it, agreeing on it, and leaving the old wrap behind.

DistributedDataParallel reduces the gradients of those parameters that were trainable when it was built. One that is
unfrozen later is trained by every rank alone, without a word.
"""

import itertools
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin import _compat
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import gather_objects
from ddp_plugin.matching import PATIENCE, fingerprint

__all__ = [
    "TrainableParameters",
    "agree_on_trainable",
    "average_gradients",
    "differences",
    "forget_buckets",
    "in_words",
    "meet",
    "refuse_what_holds_on",
    "release",
]

_NUM_NAMES_SHOWN = 10


class TrainableParameters:
    """Which parameters of a module are trainable, remembered so that a change is cheap to see.

    Args:
        module: the module.
        ignored: names that no wrap looks after.

    Attributes:
        names: the trainable ones' names, in the module's order; a shared parameter counts once, by its first name.
    """

    def __init__(self, module: torch.nn.Module, ignored: Sequence[str] | set[str] = ()) -> None:
        named = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        self._parameters = [parameter for _, parameter in named]
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._trainable = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.names = tuple(self._trainable)

    def changed(self) -> bool:
        """Whether any of these parameters is trainable that was not, or the other way round; sees no new ones."""
        return [parameter.requires_grad for parameter in self._parameters] != self._flags

    def unfrozen(self) -> list[str]:
        """Returns the names of those that are trainable now and were not."""
        return [name for name, parameter in self._frozen if parameter.requires_grad]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Returns the trainable ones, in the order of :attr:`names`."""
        return list(self._trainable.values())

    def without_gradient(self) -> list[str]:
        """Returns the names of the trainable ones that hold no gradient now."""
        return [name for name, parameter in self._trainable.items() if parameter.grad is None]

    def added_since(self, before: "TrainableParameters") -> list[str]:
        """Returns the names of trainable parameters that ``before`` does not have, replaced ones included."""
        known = dict(zip(before.names, before.parameters(), strict=True))
        return [name for name, parameter in self._trainable.items() if known.get(name) is not parameter]


def in_words(names: Sequence[str]) -> str:
    """Names parameters, the first ten of them."""
    shown = ", ".join(names[:_NUM_NAMES_SHOWN])
    return shown if len(names) <= _NUM_NAMES_SHOWN else f"{shown} and {len(names) - _NUM_NAMES_SHOWN} more"


def differences(names_by_rank: Sequence[Sequence[str]]) -> str:
    """Says which parameters are trainable on some ranks only: ``"head.bias on rank 1 alone"``.

    Args:
        names_by_rank: the trainable parameters of each rank.
    """
    sets = [set(names) for names in names_by_rank]
    unequal = [
        name
        for name in dict.fromkeys(itertools.chain.from_iterable(names_by_rank))
        if not all(name in names for names in sets)
    ]
    by_ranks: dict[str, list[str]] = {}
    for name in unequal:
        who = [str(rank) for rank, names in enumerate(sets) if name in names]
        where = f"rank {who[0]} alone" if len(who) == 1 else f"ranks {', '.join(who)} alone"
        by_ranks.setdefault(where, []).append(name)
    if not by_ranks:
        return "the same parameters in another order"
    return "; ".join(f"{in_words(names)} on {where}" for where, names in by_ranks.items())


def agree_on_trainable(trainable: TrainableParameters, group: dist.ProcessGroup | None) -> None:
    """Compares the trainable parameters of all ranks.

    Args:
        trainable: this rank's.
        group: the control group; ``None`` for one process.

    Raises:
        DDPPluginError: on all ranks, when they differ; it names parameters and ranks.

    Collectives:
        One object gather on every rank of the group; another one where the ranks differ.
    """
    marks = gather_objects(fingerprint("\n".join(trainable.names)), group)
    if any(mark != marks[0] for mark in marks):
        raise DDPPluginError(
            explain(
                "the same trainable parameters on every rank",
                differences(gather_objects(trainable.names, group)),
                "Freeze and unfreeze the same parameters on every rank, at the same step",
            )
        )


_num_meetings = itertools.count()


def meet(world_size: int, timeout: timedelta, reason: str) -> None:
    """Waits until every rank has come to this point, at most for ``timeout``.

    Unlike a collective that a rank never joins, it leaves nothing behind when it fails.

    Args:
        world_size: number of ranks.
        timeout: after this it raises.
        reason: why this rank waits, in words.

    Raises:
        DDPPluginError: not all ranks came.

    Collectives:
        None; all ranks must call it equally often. It uses the store of the default process group.
    """
    store, key = _compat.default_store(), f"ddp_plugin/meeting/{next(_num_meetings)}"
    if store.add(key, 1) == world_size:
        store.set(f"{key}/all", "1")
        return
    waits = (PATIENCE, timeout - PATIENCE) if timeout > PATIENCE else (timeout,)
    for index, wait in enumerate(waits):
        try:
            store.wait([f"{key}/all"], wait)
            return
        except RuntimeError:  # the store's way to say that the time is up
            if index < len(waits) - 1:
                warnings.warn(f"Rank {dist.get_rank()} waits for the other ranks: {reason}.", stacklevel=2)
    raise DDPPluginError(
        explain(
            "the same trainable parameters on every rank, changed at the same step",
            f"{reason}; within {timeout.total_seconds():g} s only {store.add(key, 0)} of {world_size} ranks saw a "
            "change",
            "Freeze and unfreeze on every rank, at the same step",
        )
    )


def average_gradients(
    parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup, control_group: dist.ProcessGroup
) -> None:
    """Replaces gradients by their means over ranks: those that were accumulated and that no wrap will reduce any more.

    Args:
        parameters: the same ones on all ranks; a gradient that only some ranks have counts as zero on the others.
        group: carries the gradients.
        control_group: a gloo group.

    Raises:
        DDPPluginError: a sparse gradient.

    Collectives:
        One object gather on ``control_group``, and one all-reduce for each parameter with a gradient.
    """
    kinds = gather_objects(
        [None if p.grad is None else "sparse" if p.grad.is_sparse else "dense" for p in parameters], control_group
    )
    for parameter, of_ranks in zip(parameters, zip(*kinds, strict=True), strict=True):
        if "sparse" in of_ranks:
            raise DDPPluginError(
                explain(
                    "parameters with sparse gradients to be frozen when they hold no gradient",
                    "an accumulated one",
                    "Freeze them at the first micro-batch of an accumulation window, after optimizer.zero_grad()",
                )
            )
        if "dense" in of_ranks:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = gradient.contiguous().clone()
            dist.all_reduce(total, group=group)
            parameter.grad = gradient.copy_(total / group.size())


def refuse_what_holds_on(model: DistributedDataParallel) -> None:
    """Refuses to leave a wrap whose hooks on the module cannot be taken back.

    Raises:
        DDPPluginError: DDP's mixed precision, or parameters whose reduction is delayed.

    Collectives:
        None.
    """
    held = "mixed_precision" if getattr(model, "mixed_precision", None) is not None else None
    if _compat.delays_reductions(model):
        held = "delay_all_reduce_named_params"
    if held is not None:
        raise DDPPluginError(
            explain(
                f"the trainable parameters to stay as they are, because {held}= cannot be wrapped again",
                "a change of them",
                f"Leave {held} out (precision='bf16-mixed' of the Trainer does mixed precision)",
            )
        )


def release(model: DistributedDataParallel) -> torch.nn.Module:
    """Takes a wrap off its module: its hooks on the parameters end and its buckets are freed, whoever still holds it.

    Args:
        model: the wrap; it cannot be used again.

    Returns:
        The module.

    Collectives:
        None.
    """
    module: torch.nn.Module = model.module
    model.logger = None  # it holds the reducer too, and the reducer's end takes the hooks off
    del model.reducer
    return module


def forget_buckets(state: object) -> None:
    """Takes out of a hook's state what belongs to the buckets of a wrap that is gone: PowerSGD's memories.

    PowerSGD then starts with its plain iterations again, as its ``start_powerSGD_iter`` says.

    Collectives:
        None.
    """
    if isinstance(state, PowerSGDState):
        memories: list[dict[int, Any]] = [state.error_dict, state.p_memory_dict, state.q_memory_dict]
        for memory in memories:
            memory.clear()
        state.iter = 0
