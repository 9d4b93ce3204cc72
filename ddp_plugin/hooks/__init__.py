"""Communication hooks: how the ranks' gradients become their mean.

:data:`HOOKS` is the table of all there are, by name. Without a hook DDP's own reducer runs, and that is the default.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ddp_plugin.errors import explain
from ddp_plugin.hooks._record import CommHook, HookFunction, HookState, ring_bytes
from ddp_plugin.hooks.cast import bf16, fp16
from ddp_plugin.hooks.exact import allreduce

__all__ = ["HOOKS", "CommHook", "HookFunction", "HookState", "resolve_hook", "ring_bytes"]

HOOKS: dict[str, Callable[..., CommHook]] = {"allreduce": allreduce, "fp16": fp16, "bf16": bf16}
"""Every hook by name; each value makes the :class:`CommHook`, from that hook's options."""


def resolve_hook(spec: str | Mapping[str, Any] | CommHook) -> CommHook:
    """Turns what a user may write for ``comm_hook`` into the hook itself.

    Args:
        spec: a name in :data:`HOOKS`; a mapping ``{"name": ..., **options}``; or a :class:`CommHook`.

    Raises:
        ValueError: no such name, or options that this hook does not have.
        TypeError: something else entirely.
    """
    if isinstance(spec, CommHook):
        return spec
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping):
        raise TypeError(
            explain(
                "comm_hook to be a name, a mapping with a name and options, or a CommHook",
                repr(spec),
                "A bare hook function goes into ddp_comm_hook=, as with Lightning's DDPStrategy",
            )
        )
    options = {str(key): value for key, value in spec.items()}
    name = options.pop("name", None)
    if name not in HOOKS:
        raise ValueError(explain(f"comm_hook to be one of {sorted(HOOKS)}", repr(name), "Choose one of these names"))
    try:
        return HOOKS[name](**options)
    except TypeError as error:
        raise ValueError(
            explain(f"options that comm_hook={name!r} has", f"{sorted(options)} ({error})", "Remove the unknown ones")
        ) from error
