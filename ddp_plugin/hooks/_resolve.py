"""From what a user writes to the hook: the table of hooks by name, and looking one up in it.

The table stands here, before the hooks that have another one inside; ``ddp_plugin.hooks`` fills it.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ddp_plugin.errors import explain
from ddp_plugin.hooks._record import CommHook

__all__ = ["HOOKS", "HookSpec", "resolve_hook", "resolve_inner"]

HOOKS: dict[str, Callable[..., CommHook]] = {}
"""Every hook by name; each value makes the :class:`CommHook`, from that hook's options."""

HookSpec = str | Mapping[str, Any] | CommHook
"""What a user may write for a hook."""


def resolve_hook(spec: HookSpec) -> CommHook:
    """Turns what a user may write for ``comm_hook`` into the hook itself.

    Args:
        spec: a name in :data:`HOOKS`; a mapping ``{"name": ..., **options}``; or a :class:`CommHook`.

    Raises:
        ValueError: no such name, or options that this hook does not have.
        TypeError: an option of another type, or something else entirely.
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
                "Call a value of HOOKS to make the CommHook; a bare hook function goes into ddp_comm_hook=, as with "
                "Lightning's DDPStrategy",
            )
        )
    options = {str(key): value for key, value in spec.items()}
    name = options.pop("name", None)
    if name not in HOOKS:
        raise ValueError(
            explain(
                f"comm_hook to be one of {sorted(HOOKS)}",
                f"{name!r} in {dict(spec)}" if len(spec) > 1 or name is None else repr(name),
                "Choose one of these names, or leave comm_hook out (None) for DDP's own reducer",
            )
        )
    known = list(inspect.signature(HOOKS[name]).parameters)
    if unknown := sorted(set(options) - set(known)):
        raise ValueError(
            explain(
                f"options that comm_hook={name!r} has: {', '.join(known) or 'it has none'}",
                ", ".join(unknown),
                "Remove the unknown ones",
            )
        )
    try:
        return HOOKS[name](**options)
    except TypeError as error:
        raise TypeError(
            explain(f"options of comm_hook={name!r} of the right types", f"{options} ({error})", "Correct them")
        ) from error


def resolve_inner(spec: HookSpec, outer_name: str, *refused: str) -> CommHook:
    """Resolves the hook that works inside of another one.

    Args:
        spec: what the user wrote for ``between``.
        outer_name: the hook around it, for the message.
        refused: names that cannot stand there, beside the hooks that exchange parameters.

    Raises:
        ValueError: a hook that cannot stand there, or one that there is not.
        TypeError: something else entirely.
    """
    inner = resolve_hook(spec)
    if inner.outer is not None or inner.name in refused:
        why = "exchanges parameters every few steps" if inner.outer is not None else "is divided by nodes itself"
        raise ValueError(
            explain(
                f"between= of {outer_name} to be a hook that makes a mean in one exchange",
                f"{inner.name!r}, which {why}",
                "Choose another hook for between=, such as 'bf16' or 'int8'",
            )
        )
    return inner
