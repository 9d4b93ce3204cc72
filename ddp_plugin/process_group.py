"""The process group: its options, the small group beside it, and leaving cleanly."""

import atexit
import contextlib
import signal
import threading
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin import _compat
from ddp_plugin.config import NcclOptions
from ddp_plugin.errors import DDPPluginError, explain

__all__ = [
    "HeldGroup",
    "control_group",
    "destroy_at_exit",
    "give_back_exchange_group",
    "nccl_process_group_options",
    "node_groups",
    "refuse_unusable_settings",
    "settings_in_force",
    "take_exchange_group",
]


def refuse_unusable_settings(nccl: NcclOptions | None, backend: str | None, timeout: timedelta | None) -> None:
    """Refuses settings of a process group that could not be honoured, before there is one.

    Raises:
        ValueError: NCCL options for another backend, or a timeout that is not above zero.

    Collectives:
        None.
    """
    if nccl is not None and backend is not None and "nccl" not in backend:
        raise ValueError(
            explain(
                "process_group_backend='nccl' beside nccl=NcclOptions(...)",
                f"process_group_backend={backend!r}",
                "Remove nccl=, or choose the NCCL backend",
            )
        )
    if timeout is not None and timeout <= timedelta(0):
        raise ValueError(explain("a timeout above zero", repr(timeout), "Give the timeout as a positive timedelta"))


def nccl_process_group_options(nccl: NcclOptions, timeout: timedelta | None) -> Any:
    """Builds ``ProcessGroupNCCL.Options`` from :class:`~ddp_plugin.NcclOptions`.

    Args:
        nccl: what was asked for.
        timeout: timeout of the group's collectives, kept beside the options.

    Returns:
        The object for ``init_process_group(pg_options=...)``.

    Raises:
        ValueError: this torch has no NCCL, or it does not know one of the options.

    Collectives:
        None.
    """
    if not hasattr(dist, "ProcessGroupNCCL"):
        raise ValueError(
            explain(
                "a torch with NCCL, because nccl=NcclOptions(...) was given",
                f"torch {torch.__version__} without it",
                "Remove nccl= on this machine, or install a CUDA build of torch",
            )
        )
    options = dist.ProcessGroupNCCL.Options()
    for name, value in nccl.given().items():
        holder = options if name == "high_priority_stream" else options.config
        attribute = "is_high_priority_stream" if name == "high_priority_stream" else name
        if not hasattr(holder, attribute):
            raise ValueError(
                explain(
                    f"an NCCL that knows the option {name!r}",
                    f"torch {torch.__version__}, which does not",
                    f"Remove {name} from NcclOptions, or upgrade torch",
                )
            )
        setattr(holder, attribute, value)
    if timeout is not None:
        _compat.set_options_timeout(options, timeout)
    return options


def settings_in_force(backend: str, timeout: timedelta | None) -> list[str]:
    """Compares the default group with what was asked; both may differ when somebody else created it first.

    Args:
        backend: the backend that was asked for, such as ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``.
        timeout: the timeout that was asked for; ``None`` means torch's default.

    Returns:
        One sentence for each difference; empty when what is in force is what was asked.

    Collectives:
        None.
    """
    differences = []
    actual_backend = dist.get_backend()
    if ":" not in backend and actual_backend != backend:
        differences.append(f"backend {backend!r} was asked for, {actual_backend!r} is in force")
    actual_timeout = _compat.default_group_timeout()
    if timeout is not None and actual_timeout is not None and actual_timeout != timeout:
        differences.append(f"timeout {timeout} was asked for, {actual_timeout} is in force")
    return differences


_control_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None  # (default group it belongs to, gloo group)


def control_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Returns the gloo group for small control messages, beside the one that carries gradients.

    It is made once for each default group; the first call is therefore collective. It serves messages
    between CPUs (plans, counts, decisions, predictions), so that none of them ever queues behind a gradient or
    synchronises a device.

    Args:
        timeout: timeout of its collectives; torch's default when ``None``.

    Collectives:
        ``new_group`` on every rank, at the first call only.
    """
    global _control_group
    world = _compat.default_group()
    if _control_group is None or _control_group[0] is not world:
        _control_group = (world, dist.new_group(backend="gloo", timeout=timeout))
    return _control_group[1]


class HeldGroup:
    """A process group that torch owns, held weakly: one that outlives its destruction may abort the process at its end.

    Args:
        group: alive until ``destroy_process_group``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._reference = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """Returns the group.

        Raises:
            DDPPluginError: it was destroyed.
        """
        group = self._reference()
        if group is None:
            raise DDPPluginError(
                explain(
                    "a process group that lives as long as what communicates in it",
                    "one that was destroyed",
                    "Call dist.destroy_process_group() last",
                )
            )
        return group


_free_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, list[HeldGroup]] = weakref.WeakKeyDictionary()


def take_exchange_group(beside: dist.ProcessGroup, pg_options: Any = None) -> HeldGroup:
    """Returns a group for exchanges of gradients that take several collectives, beside the one that DDP uses.

    DDP's own small messages about unused parameters would otherwise fall between the collectives of an exchange, and so
    would those of another model's exchange: whoever takes a group has it alone until it is given back. It has the same
    ranks and backend as the group beside which it lies.

    Args:
        beside: DDP's group.
        pg_options: backend options for it, such as ``ProcessGroupNCCL.Options``; used when it is made.

    Collectives:
        ``new_group`` on every rank of ``beside``, where none is free. All ranks take and give back in the same order.
    """
    free = _free_groups.setdefault(beside, [])
    if free:
        return free.pop()
    ranks, timeout = dist.get_process_group_ranks(beside), _compat.default_group_timeout()
    is_part = len(ranks) < dist.get_world_size()  # the other ranks do not come here then
    made = dist.new_group(ranks, timeout=timeout, pg_options=pg_options, use_local_synchronization=is_part)
    return HeldGroup(made)


def give_back_exchange_group(beside: dist.ProcessGroup, group: HeldGroup) -> None:
    """Lets somebody else take a group in which nothing is under way any more.

    Collectives:
        None.
    """
    _free_groups.setdefault(beside, []).append(group)


_node_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[HeldGroup]]] = weakref.WeakKeyDictionary()


def node_groups(ranks: dist.ProcessGroup, ranks_per_node: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Returns the group of this rank's node, and that of the ranks with the same place on their nodes.

    They have the backend of the default group, and are made once for each group and division of it.

    Args:
        ranks: the group that is divided, node after node.
        ranks_per_node: how many ranks follow one another on a node; divides their number.

    Collectives:
        ``new_group``, in one order on every rank of the group, at the first call only.
    """
    of_ranks = _node_groups.setdefault(ranks, {})
    if ranks_per_node not in of_ranks:
        members, timeout = dist.get_process_group_ranks(ranks), _compat.default_group_timeout()
        nodes = [members[first : first + ranks_per_node] for first in range(0, len(members), ranks_per_node)]
        is_part = len(members) < dist.get_world_size()  # the other ranks do not come here then
        made: list[HeldGroup] = []
        for lists in (nodes, [list(peers) for peers in zip(*nodes, strict=True)]):
            for each in lists:
                is_own = dist.get_rank() in each
                if is_own or not is_part:  # a group is made by all ranks, or by its own ones alone
                    group = dist.new_group(each, timeout=timeout, use_local_synchronization=is_part)
                    made += [HeldGroup(group)] if is_own else []
        of_ranks[ranks_per_node] = made
    node, peers = of_ranks[ranks_per_node]
    return node(), peers()


_registered = threading.Event()


def destroy_at_exit() -> None:
    """Arranges that the process group is destroyed before the interpreter ends, whatever the backend.

    Lightning does so for NCCL only; a gloo group that is left to the interpreter's shutdown aborts the process now and
    then, and a launcher reports a failed run. Calling this again changes nothing.

    Collectives:
        None now; destruction itself is local.
    """
    if not _registered.is_set():
        _registered.set()
        atexit.register(_destroy)


def _destroy() -> None:
    global _control_group
    _control_group = None
    _free_groups.clear()
    _node_groups.clear()
    if not (dist.is_available() and dist.is_initialized()):
        return
    handler: Any = None
    with contextlib.suppress(ValueError):  # ValueError: not the main thread, where no signal arrives anyway
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C must not interrupt the teardown
    dist.destroy_process_group()
    if handler is not None:
        signal.signal(signal.SIGINT, handler)
