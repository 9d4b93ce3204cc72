"""The wrap: what DistributedDataParallel is given, checked before any process starts, and who watches its buckets."""

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin._compat import GradBucket
from ddp_plugin.errors import explain

__all__ = ["BucketObserver", "check_ddp_arguments", "no_sync", "observed", "refuse_contradictions"]

_SET_BY_THE_STRATEGY = ("self", "module", "device_ids")


def check_ddp_arguments(arguments: Mapping[str, Any], also_known: Iterable[str] = ()) -> None:
    """Refuses arguments of DistributedDataParallel that this torch lacks or that contradict one another.

    Args:
        arguments: what the user gave, by torch's own names; nothing that was left at ``None``.
        also_known: further names that may have been meant where one is unknown.

    Raises:
        TypeError: a name that the installed torch's DDP does not have.
        ValueError: a value out of range, or two that exclude each other.

    Collectives:
        None.
    """
    known = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in _SET_BY_THE_STRATEGY]
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *also_known], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else "Remove it, or upgrade torch if it is newer than yours"
            raise TypeError(
                explain(
                    f"a keyword of DDPStrategy or of torch {torch.__version__}'s DistributedDataParallel",
                    repr(name),
                    hint,
                )
            )
    for name in ("bucket_cap_mb", "bucket_cap_mb_list"):
        caps_mb = arguments.get(name, [])
        if any(not 0 < cap_mb < math.inf for cap_mb in (caps_mb if isinstance(caps_mb, (list, tuple)) else [caps_mb])):
            raise ValueError(
                explain(f"{name} above 0 MiB and finite", repr(caps_mb), "Leave it out for torch's own bucket sizes")
            )
    _refuse_both(arguments, "bucket_cap_mb", "bucket_cap_mb_list")
    _refuse_both(arguments, "broadcast_buffers", "forward_sync_buffers")
    if arguments.get("static_graph") and arguments.get("find_unused_parameters"):
        raise ValueError(
            explain(
                "static_graph=True or find_unused_parameters=True",
                "both",
                "Keep static_graph=True alone: it finds unused parameters itself, in the first step",
            )
        )


def refuse_contradictions(
    arguments: Mapping[str, Any],
    comm_hook: object | None,
    lightning_hook: Mapping[str, Any],
    model_averaging_period: int | None,
) -> None:
    """Refuses ways to ask for a communication hook that exclude each other, or that would be ignored.

    Args:
        arguments: what the user gave for DistributedDataParallel.
        comm_hook: the strategy's own hook.
        lightning_hook: Lightning's ``ddp_comm_hook``, ``ddp_comm_state`` and ``ddp_comm_wrapper``.
        model_averaging_period: steps between averages of post-local SGD.

    Raises:
        ValueError: a contradiction.

    Collectives:
        None.
    """
    given = [name for name, value in lightning_hook.items() if value is not None]
    if comm_hook is not None and given:
        raise ValueError(
            explain("comm_hook or Lightning's ddp_comm_*", f"comm_hook and {given}", "Keep one of the two")
        )
    if given and "ddp_comm_hook" not in given:
        raise ValueError(
            explain("ddp_comm_hook beside its state or wrapper", f"only {given}", "Give ddp_comm_hook too")
        )
    if "mixed_precision" in arguments and (comm_hook is not None or given):
        remedy = "Keep one: DDP's mixed precision uses the model's only place for a hook"
        raise ValueError(explain("mixed_precision or a communication hook", "both", remedy))
    if model_averaging_period is not None and not isinstance(lightning_hook["ddp_comm_state"], PostLocalSGDState):
        raise ValueError(
            explain(
                "ddp_comm_state=PostLocalSGDState(...) beside model_averaging_period, which is its period",
                f"{lightning_hook['ddp_comm_state']!r} beside model_averaging_period={model_averaging_period}",
                "Give the state and post_localSGD_hook, or leave the period out",
            )
        )


def _refuse_both(arguments: Mapping[str, Any], first: str, second: str) -> None:
    if first in arguments and second in arguments:
        got = f"both, {arguments[first]!r} and {arguments[second]!r}"
        raise ValueError(explain(f"{first} or {second}", got, "Keep one of them"))


class BucketObserver(Protocol):
    """Something that watches gradient buckets; see ``CustomDDPStrategy.add_bucket_observer``.

    Both methods must return at once and must not start a collective: the second one runs on a communication thread
    under gloo, and inside the backward pass under NCCL.
    """

    def before_reduction(self, bucket_index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Sees a bucket when its last local gradient is ready.

        Args:
            bucket_index: position in DDP's order of reduction, the same on all ranks.
            gradient: flat local gradient, shape ``(num_elements,)``; read-only, valid during the call only.
            parameters: the parameters whose gradients it holds.
        """

    def after_reduction(self, bucket_index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
        """Sees the same bucket once it holds the mean over ranks.

        Args:
            bucket_index: as above.
            gradient: flat mean gradient, shape ``(num_elements,)``; read-only, valid during the call only.
            parameters: as above.
        """


def observed(hook: Callable[..., Any], observers: list[BucketObserver]) -> Callable[..., Any]:
    """Puts observers around a communication hook; with an empty list it only forwards.

    The list is read at each bucket, so an observer that is added later is seen from the next bucket on.

    Args:
        hook: ``hook(state, bucket) -> Future``, left as it is.
        observers: called in order, before and after.

    Collectives:
        Those of ``hook``.
    """

    # The name matters: DDP refuses torch's bf16 hook on gloo by its function's name alone, although gloo reduces bf16.
    def observed_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not observers:
            return hook(state, bucket)  # type: ignore[no-any-return]
        index, parameters = bucket.index(), bucket.parameters()
        for observer in observers:
            observer.before_reduction(index, bucket.buffer(), parameters)

        def tell(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            gradient = future.value()
            for observer in observers:
                observer.after_reduction(index, gradient, parameters)
            return gradient

        return hook(state, bucket).then(tell)  # type: ignore[no-any-return]

    return observed_hook


@contextmanager
def no_sync(model: DistributedDataParallel, *, first_backward_done: bool) -> Iterator[None]:
    """Skips the gradient reduction of the enclosed forward and backward, where that is safe.

    A static graph is recorded in the first backward of the run, and DDP's recording does not survive ``no_sync``: that
    one backward has to synchronise, also in the middle of an accumulation window. What it reduces is reduced again with
    the window's last micro-batch, and the mean of equal gradients is that gradient, so the result differs from plain
    accumulation by a rounding at most.

    Args:
        model: the wrapped model.
        first_backward_done: whether this wrap has completed a backward before.

    Collectives:
        None where it skips; DDP's own where it does not.
    """
    if model.static_graph and not first_backward_done:
        yield
        return
    with model.no_sync():
        yield
