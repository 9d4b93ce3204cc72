"""What can go wrong, in words: one form for every message this package raises.

Each message answers four questions in the same order: what was expected, what came instead, on which rank, and what
to change. A person who reads only the last line of a traceback should know what to do next.
"""

import torch.distributed as dist

__all__ = ["DDPPluginError", "EvaluationMismatchError", "check_count", "counted", "explain", "is_explained"]

_EXPECTED = "Expected "


class DDPPluginError(RuntimeError):
    """A promise of this package could not be kept; raised on every rank that took part, never on one alone."""


class EvaluationMismatchError(DDPPluginError):
    """The numbers of samples or batches evaluated are not those that should have been."""


def explain(expected: str, got: str, change: str) -> str:
    """Puts an error into the package's one form.

    Args:
        expected: what a correct call or state looks like, as a sentence without its full stop.
        got: what was found instead; interpolate the value itself.
        change: what the reader should do about it.

    Returns:
        ``"Expected …. Got …, on rank r of n. …"``; the rank is left out while no process group exists.

    Collectives:
        None.
    """
    where = ""
    if dist.is_available() and dist.is_initialized():
        where = f", on rank {dist.get_rank()} of {dist.get_world_size()}"
    end = "" if change.endswith("?") else "."
    return f"{_EXPECTED}{expected}. Got {got}{where}. {change.rstrip('.')}{end}"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: ``"1 batch"``, ``"3 batches"``, ``"2 samples"``."""
    plural = noun + ("es" if noun.endswith(("s", "ch", "sh", "x")) else "s")
    return f"{number} {noun if number == 1 else plural}"


def is_explained(error: BaseException) -> bool:
    """Whether an error's message is a sentence of :func:`explain`, so that nobody needs its traceback."""
    return str(error).startswith(_EXPECTED)


def check_count(name: str, value: object, least: int, most: int | None = None) -> None:
    """Refuses what is no whole number in a range; ``True`` is none.

    Raises:
        ValueError: it is not.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(explain(f"{name} to be an integer {wanted}", repr(value), f"Correct {name}"))
