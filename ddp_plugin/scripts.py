"""What a person names on the command line: a class or a function by its import path, or a training script.

A script is not run: it is imported, and asked by a function that it has for that.
"""

import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ddp_plugin.errors import explain

__all__ = ["ask_script", "build_by_name", "class_by_name", "make_importable"]

T = TypeVar("T")


def ask_script(path: Path, function: str, arguments: Sequence[str], kind: type[T]) -> T:
    """Imports a script by its own name and calls one of its functions.

    Args:
        path: of the script; modules beside it can be imported by it, as when it is run.
        function: name of the function, which takes a list of arguments.
        arguments: the script's command line, without the program's name.
        kind: what has to come out.

    Raises:
        ValueError: there is no such script or no such function, it refuses the arguments, or it gives something else;
            or another module has the script's name.

    Collectives:
        None.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(explain("--recipe to be a training script, such as recipes/llm.py", str(path), "Correct it"))
    make_importable(path.resolve().parent)
    module = importlib.import_module(path.stem)
    if (other := getattr(module, "__file__", None)) is None or Path(other).resolve() != path.resolve():
        raise ValueError(
            explain(f"{path} to have a name of its own", f"another module {path.stem} ({other})", "Rename the script")
        )
    ask = getattr(module, function, None)
    if not callable(ask):
        raise ValueError(
            explain(f"a function {function}(arguments) in the script", f"none in {path}", "Write one, or give --model")
        )
    answer = ask(list(arguments))
    if not isinstance(answer, kind):
        got = type(answer).__name__
        raise ValueError(explain(f"a {kind.__name__} from {function}(arguments) in {path}", got, "Correct it"))
    return answer


def make_importable(folder: Path) -> None:
    """Puts a folder before those from which modules are imported, unless it is among them; for later processes too."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def build_by_name(option: str, path: str, kind: type[T]) -> T:
    """Imports a class or function, and calls it.

    Args:
        option: of the command line, for errors.
        path: ``"package.module:Name"``; modules in the current folder can be imported.
        kind: what has to come out.

    Raises:
        ValueError: there is none, it takes arguments, or it gives something else.

    Collectives:
        None.
    """
    make = _imported(option, path)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(
            explain(f"{path} to be called without arguments", str(error), "Name a class or function that needs none")
        ) from error
    built = make()
    if not isinstance(built, kind):
        raise ValueError(explain(f"a {kind.__name__} from {option}", type(built).__name__, "Name another one"))
    return built


def class_by_name(option: str, path: str, kind: type[T]) -> type[T]:
    """Imports a class; see :func:`build_by_name`.

    Raises:
        ValueError: there is none, or it is another one's.

    Collectives:
        None.
    """
    found = _imported(option, path)
    if not (inspect.isclass(found) and issubclass(found, kind)):
        raise ValueError(explain(f"a class of {kind.__name__} for {option}", repr(found), "Name another one"))
    return found


def _imported(option: str, path: str) -> Any:
    module_name, _, name = path.partition(":")
    if not name:
        raise ValueError(explain(f"{option} PACKAGE.MODULE:NAME", repr(path), "Put a colon before the class"))
    make_importable(Path.cwd())
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            explain(f"{name!r} in the module {module_name!r}", f"{type(error).__name__}: {error}", "Correct the name")
        ) from error
