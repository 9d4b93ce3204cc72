"""The only file that touches private names of torch, Lightning and torchmetrics.

Each helper says why no public way exists; ``tests/test_compat.py`` notices when a name moves.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it, but hides it from type checkers

__all__ = [
    "GradBucket",
    "default_group",
    "default_group_timeout",
    "init_process_group",
    "register_lightning_comm_hook",
    "reset_seed",
    "set_options_timeout",
]


# ------------------------------------------------------------------------------------------------- torch.distributed


def default_group() -> dist.ProcessGroup:
    """Returns the default process group as an object; the public API only ever stands for it by ``None``."""
    return dist.distributed_c10d._get_default_group()


def default_group_timeout() -> timedelta | None:
    """Returns the collectives' timeout of the default group, or ``None`` where its backend does not tell."""
    group = default_group()
    try:
        options = group._get_backend(group._device_types[0]).options
    except (RuntimeError, AttributeError, IndexError):
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout inside backend options; torch takes it from there once options are passed."""
    options._timeout = timeout


# --------------------------------------------------------------------------------------------------------- Lightning


def init_process_group(cluster_environment: Any, backend: str, **kwargs: Any) -> None:
    """Lightning's own start of the process group; ``DDPStrategy.setup_distributed`` has no place for group options."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    _init_dist_connection(cluster_environment, backend, **kwargs)


def reset_seed() -> None:
    """Seeds this process from ``PL_GLOBAL_SEED`` again, as Lightning does before it starts the process group."""
    from lightning.fabric.utilities.seed import reset_seed as lightning_reset_seed

    lightning_reset_seed()


def register_lightning_comm_hook(model: Any, state: object, hook: Callable[..., Any], wrapper: Any) -> None:
    """Lightning's registration of ``ddp_comm_hook``, which ``DDPStrategy`` only calls on CUDA devices."""
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook

    _register_ddp_comm_hook(model=model, ddp_comm_state=state, ddp_comm_hook=hook, ddp_comm_wrapper=wrapper)


def recreate_train_iterator(trainer: Any) -> None:
    """Makes the train loaders' iterators anew; Lightning made the first ones before a hook could set the epoch."""
    iter(trainer.fit_loop._data_fetcher)
