"""DistributedDataParallel's errors about parameters without a gradient, in names and with the cheapest cure."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ddp_plugin.errors import DDPPluginError, explain

__all__ = ["named_parameter_errors", "reworded"]

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
_GRAPH_CHANGED = "Your training graph has changed in this iteration"
_MARKED_TWICE = "has been marked as ready twice"
_UNUSED_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_UNUSED_NAMES = re.compile(r"Parameters which did not receive grad for rank \d+: (.+)")  # TORCH_DISTRIBUTED_DEBUG
_TWICE_INDEX = re.compile(r"Parameter at index (\d+)")


@contextmanager
def named_parameter_errors(
    names: Sequence[str],
    *,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    unused_at_first: Sequence[str] = (),
    several_backwards: bool = False,
) -> Iterator[None]:
    """Turns DDP's errors about parameters without a gradient, or with two, into ones that name them.

    Args:
        names: the trainable parameters in the order of the module at the wrap, which is what DDP's indices count.
        static_graph: a setting in force.
        find_unused_parameters: a setting in force.
        unused_at_first: those that a static graph left without a gradient in its first step.
        several_backwards: whether a step may make several, as manual optimization does.

    Raises:
        DDPPluginError: in place of DDP's error, with that one as its cause. Any other error passes.

    Collectives:
        None.
    """
    try:
        yield
    except RuntimeError as error:
        text = reworded(
            str(error),
            names,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
            unused_at_first=unused_at_first,
            several_backwards=several_backwards,
        )
        if text is None or isinstance(error, DDPPluginError):
            raise
        raise DDPPluginError(text) from error


def reworded(
    message: str,
    names: Sequence[str],
    *,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
    unused_at_first: Sequence[str] = (),
    several_backwards: bool = False,
) -> str | None:
    """Rewords one of DDP's messages, or returns ``None`` where it is about something else.

    Args:
        message: what DDP says.
        names: as in :func:`named_parameter_errors`.
        static_graph: as there.
        find_unused_parameters: as there.
        unused_at_first: as there.
        several_backwards: as there.
    """
    if _GRAPH_CHANGED in message:
        return explain(
            "the same parameters to be used in every step, because static_graph=True says so",
            f"a gradient for some of those that the first step did not use: {_listed(unused_at_first)}",
            "Set find_unused_parameters=True instead of static_graph=True",
        )
    if _MARKED_TWICE in message:
        found = _TWICE_INDEX.search(message)
        twice = _named([int(found.group(1))] if found else [], names)
        return explain(
            "one gradient for each parameter in a backward",
            f"two for {twice}",
            "If torch.utils.checkpoint runs there, pass use_reentrant=False to it; otherwise, and where the same "
            "happens in every step, set static_graph=True",
        )
    if _UNFINISHED not in message:
        return None
    if by_name := _UNUSED_NAMES.search(message):
        unused = _listed(by_name.group(1).split(", "))
    else:
        by_index = _UNUSED_INDICES.search(message)
        unused = _named([int(index) for index in by_index.group(1).split()] if by_index else [], names)
    if static_graph:
        cure = (
            "static_graph=True promises that the used parameters never change: set find_unused_parameters=True instead"
        )
    elif find_unused_parameters:
        cure = (
            "find_unused_parameters=True looks at all that training_step returns: detach what it returns beside the "
            "loss and does not enter it"
        )
    elif several_backwards:
        cure = (
            "Where a step makes several backwards, each with parameters of its own (a GAN, several optimizers), set "
            "find_unused_parameters=True. Parameters that are never used: freeze them with requires_grad_(False)"
        )
    else:
        cure = (
            "It looks like your LightningModule has parameters that were not used in producing the loss returned by "
            "training_step. If they never are, freeze them with requires_grad_(False); if the same ones are unused in "
            "every step, set static_graph=True; if they change from step to step, set find_unused_parameters=True"
        )
    return explain("a gradient for every trainable parameter in every backward", f"none for {unused}", cure)


def _named(indices: Sequence[int], names: Sequence[str]) -> str:
    return _listed([names[index] if index < len(names) else f"parameter {index}" for index in indices])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "parameters that DDP does not tell"
