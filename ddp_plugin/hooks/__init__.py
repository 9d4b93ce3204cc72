"""Communication hooks: how the ranks' gradients become their mean.

:data:`HOOKS` is the table of all there are, by name. Without a hook DDP's own reducer runs, and that is the default.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.errors import explain
from ddp_plugin.hooks._attached import AttachedHook, dropped, run_hook
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import DirectExchange, Exchange
from ddp_plugin.hooks._record import CommHook, OuterStep
from ddp_plugin.hooks._resolve import HOOKS, HookSpec, resolve_hook
from ddp_plugin.hooks.algorithms import butterfly, parameter_server, ring, tree
from ddp_plugin.hooks.cast import bf16, fp16
from ddp_plugin.hooks.exact import allreduce
from ddp_plugin.hooks.hierarchical import bytes_between_nodes, hierarchical
from ddp_plugin.hooks.noop import noop
from ddp_plugin.hooks.periodic import Averager, diloco, local_sgd
from ddp_plugin.hooks.powersgd import powersgd
from ddp_plugin.hooks.quantised import fp8, int4, int8
from ddp_plugin.hooks.topk import topk

__all__ = [
    "HOOKS",
    "AttachedHook",
    "Averager",
    "CommHook",
    "Contents",
    "DirectExchange",
    "Exchange",
    "HookSpec",
    "OuterStep",
    "attach",
    "bytes_between_nodes",
    "dropped",
    "put_to_work",
    "resolve_hook",
    "run_hook",
]

HOOKS.update(
    {
        "allreduce": allreduce,
        "fp16": fp16,
        "bf16": bf16,
        "noop": noop,
        "int8": int8,
        "int4": int4,
        "fp8": fp8,
        "powersgd": powersgd,
        "topk": topk,
        "hierarchical": hierarchical,
        "local_sgd": local_sgd,
        "diloco": diloco,
        "ring": ring,
        "tree": tree,
        "butterfly": butterfly,
        "parameter_server": parameter_server,
    }
)


def attach(
    spec: HookSpec,
    model: DistributedDataParallel,
    loss_scale: Callable[[], torch.Tensor | None] = lambda: None,
) -> AttachedHook:
    """Lets a hook exchange a model's gradients, in a plain torch loop; a Trainer's strategy does so by itself.

    With a hook that exchanges parameters instead, run forward and backward within ``model.no_sync()`` while its
    ``trains_alone`` is true, call ``after_step()`` once after each optimizer step, and ``average()`` before an
    evaluation or a checkpoint.

    Args:
        spec: as for :func:`resolve_hook`.
        model: a wrap that has no hook yet.
        loss_scale: returns by what the loss of the running step is multiplied, shape ``()``: with a gradient scaler
            ``lambda: torch.tensor(scaler.get_scale())``.

    Returns:
        The hook at work: save its ``state()``, and ``close()`` it at the end.

    Raises:
        ValueError: the wrap has a hook already, or the hook must not train.

    Collectives:
        Those of :class:`AttachedHook`, on all ranks.
    """
    attached = put_to_work(resolve_hook(spec), model, loss_scale=loss_scale)
    try:
        model.register_comm_hook(attached, run_hook)
    except RuntimeError as error:  # DDP takes one, once
        raise ValueError(
            explain("a wrap without a communication hook", "one that has had a hook already", "Wrap the module again")
        ) from error
    return attached


def put_to_work(
    hook: CommHook,
    model: DistributedDataParallel,
    pg_options: Any = None,
    loss_scale: Callable[[], torch.Tensor | None] = lambda: None,
) -> AttachedHook:
    """Returns an :class:`AttachedHook`, or an :class:`Averager` for a hook that exchanges parameters.

    Args:
        hook: the record.
        model: the wrap.
        pg_options: as for :class:`AttachedHook`.
        loss_scale: as for :class:`AttachedHook`.

    Collectives:
        Those of :class:`AttachedHook`, on all ranks.
    """
    return (AttachedHook if hook.outer is None else Averager)(hook, model, pg_options, loss_scale)
