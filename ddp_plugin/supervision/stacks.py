"""Where the main thread of this process is: its stack as data, and what that means in words."""

import linecache
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_plugin import _compat

__all__ = ["Frame", "Standing", "main_thread_stack", "standing"]

_MAX_FRAMES = 60
_OWN = str(Path(__file__).parent.parent) + os.sep
_OF_OTHERS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics", "omegaconf", "jsonargparse")
_HOOK_CALLERS = {
    "_call_callback_hooks": "callback",
    "_call_callbacks_on_save_checkpoint": "callback",
    "_call_callbacks_state_dict": "callback",
    "_call_lightning_module_hook": "module",
    "_call_lightning_datamodule_hook": "datamodule",
}
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pydevd", "_pydevd_bundle", "debugpy", "IPython.core.debugger")
_CALLERS = ("lightning.pytorch.loops", "lightning.pytorch.callbacks")


class Frame(NamedTuple):
    """One call of a stack.

    Attributes:
        file: path as Python knows it.
        line: in that file.
        function: its name.
        module: the name of the module that it is defined in.
        owner: class of the object whose method it is, else empty.
        code: the source line, where it can be read.
        note: what the call is about, where this package or torch can tell: what is compared, which worker is awaited.
        is_users: whether the code belongs to the user, neither to a library nor to this package.
    """

    file: str
    line: int
    function: str
    module: str = ""
    owner: str = ""
    code: str = ""
    note: str = ""
    is_users: bool = False

    @property
    def name(self) -> str:
        """``Class.method``, or the name of the function."""
        return f"{self.owner}.{self.function}" if self.owner else self.function

    @property
    def place(self) -> str:
        """``file.py:12: the code``, with the folder left out."""
        where = f"{Path(self.file).name}:{self.line}"
        return f"{where}: {self.code}" if self.code else where


class Standing(NamedTuple):
    """What a stack means.

    Attributes:
        kind: ``"collective"``, ``"comparison"`` (of what ranks bring to a collective), ``"backward"``, ``"data"``,
            ``"save"``, ``"callback"``, ``"hook"`` (of the module), ``"debugger"``, ``"outside"`` (of a Trainer's run)
            or ``"other"``.
        what: the collective, what is compared, the awaited worker, …; in words.
        hook: the hook of a callback or module in which that happens, ``"Class.hook"``, or empty.
        is_callbacks: whether that hook is a callback's.
        users: the innermost call of the user's own code, as far as that is inside what Lightning called last, or
            outside of any run; else ``None``.
        in_save: whether a checkpoint is being saved.
        in_logging: whether a logged value is being reduced.
    """

    kind: str
    what: str = ""
    hook: str = ""
    is_callbacks: bool = False
    users: Frame | None = None
    in_save: bool = False
    in_logging: bool = False


def main_thread_stack() -> list[Frame]:
    """Returns what the main thread is executing, the innermost call first; at most 60 calls.

    It may be called from any thread, whatever the main thread is stuck in, as long as that does not hold the
    interpreter lock.

    Collectives:
        None.
    """
    frames: list[Frame] = []
    frame = _compat.main_thread_frame()
    while frame is not None and len(frames) < _MAX_FRAMES:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        frames.append(
            Frame(
                file=code.co_filename,
                line=frame.f_lineno or code.co_firstlineno,
                function=code.co_name,
                module=module,
                owner=_owner(frame),
                code=linecache.getline(code.co_filename, frame.f_lineno or 0).strip()[:120],
                note=_note(frame, module, code.co_name),
                is_users=_is_users(code.co_filename, module),
            )
        )
        frame = frame.f_back
    return frames


def standing(stack: Sequence[Frame]) -> Standing:
    """Returns what a stack means.

    Args:
        stack: the innermost call first, as from :func:`main_thread_stack`.

    Collectives:
        None.
    """
    kind, what = _kind(stack)
    hook, is_callbacks = _hook(stack)
    if kind == "other" and hook:
        kind, what = ("callback" if is_callbacks else "hook"), hook
    return Standing(
        kind=kind,
        what=what,
        hook=hook,
        is_callbacks=is_callbacks,
        users=_users(stack),
        in_save=any(frame.function == "save_checkpoint" and _is_of(frame.module, "lightning") for frame in stack),
        in_logging=any(frame.function in ("reduce_logged", "reduce_epoch") and not frame.is_users for frame in stack),
    )


def _kind(stack: Sequence[Frame]) -> tuple[str, str]:
    if not stack:
        return "other", ""
    if any(_is_of(frame.module, *_DEBUGGERS) for frame in stack):
        return "debugger", ""
    compared = next((frame for frame in stack if frame.module == "ddp_plugin.matching" and frame.note), None)
    if compared is not None:
        return "comparison", compared.note
    innermost = stack[0]
    if _is_of(innermost.module, "torch.distributed"):
        return "collective", _collective(stack)
    if innermost.module == "torch.nn.parallel.distributed":
        in_forward = any(frame.function == "forward" and frame.module == innermost.module for frame in stack)
        return "collective", "DDP's broadcast of buffers" if in_forward else "DDP's start"
    if innermost.function == "_engine_run_backward" or innermost.module == "torch.autograd":
        return "backward", ""
    for frame in stack:
        if frame.module == "torch.utils.data.dataloader" and frame.function == "__next__":
            return "data", next((inner.note for inner in stack if inner.note), "")
        if frame.module == "lightning.pytorch.loops.fetchers":
            return "data", ""
        if frame.function == "save_checkpoint" and _is_of(frame.module, "lightning"):
            return "save", ""
    if not any(_is_of(frame.module, "lightning") for frame in stack):
        return "outside", ""
    return "other", ""


def _collective(stack: Sequence[Frame]) -> str:
    """Returns the function of torch.distributed that was called: the outermost of the innermost calls in there.

    Where it was not the user who called it, it is also said who did.
    """
    name = ""
    for frame in stack:
        if _is_of(frame.module, "torch.distributed"):
            name = name if frame.function == "wrapper" else frame.function  # torch's own log of exceptions
        elif not _is_of(frame.module, "ddp_plugin.gather"):
            return f"`{name}`" if frame.is_users else f"`{name}` for `{frame.name}`"
    return f"`{name}`"


def _hook(stack: Sequence[Frame]) -> tuple[str, bool]:
    """Returns the innermost hook of a callback, module or datamodule that Lightning called."""
    for inner, outer in zip(stack, stack[1:], strict=False):
        if outer.module == "lightning.pytorch.trainer.call" and outer.function in _HOOK_CALLERS:
            if _is_of(inner.module, "lightning") or inner.module == "contextlib":
                continue  # Lightning's own bookkeeping
            return inner.name, _HOOK_CALLERS[outer.function] == "callback"
    return "", False


def _users(stack: Sequence[Frame]) -> Frame | None:
    for frame in stack:
        if frame.is_users:
            return frame
        if _is_of(frame.module, "lightning.pytorch.trainer.call", *_CALLERS):
            return None
    return None


def _owner(frame: Any) -> str:
    if not frame.f_code.co_argcount:
        return ""
    first = frame.f_code.co_varnames[0]
    if first not in ("self", "cls"):
        return ""
    instance = frame.f_locals.get(first)
    if instance is None:
        return ""
    return instance.__name__ if isinstance(instance, type) else type(instance).__name__


def _note(frame: Any, module: str, function: str) -> str:
    if module == "ddp_plugin.matching" and function == "match":
        return str(frame.f_locals.get("text", ""))
    if module == "torch.utils.data.dataloader" and function == "_next_data":
        return _compat.awaited_worker(frame.f_locals.get("self")) or ""
    return ""


def _is_users(file: str, module: str) -> bool:
    if file.startswith((_OWN, *_OF_OTHERS, "<frozen")):
        return False
    return not _is_of(module, *_PACKAGES)


def _is_of(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
