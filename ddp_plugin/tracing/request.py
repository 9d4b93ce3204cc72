"""What is asked of every rank, in one environment variable, which reaches them under any launcher.

The schedule is that of ``torch.profiler``: some steps are left alone, in some the profiler warms up, some are recorded.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_plugin.errors import check_count, explain

__all__ = ["VARIABLE", "TraceRequest", "Window", "request_in"]

VARIABLE = "DDP_PLUGIN_TRACE"
"""The environment variable that holds a :class:`TraceRequest`."""


@dataclass(frozen=True)
class Window:
    """Which optimizer steps of a run are recorded.

    Attributes:
        num_wait: steps that are left alone first.
        num_warmup: steps after them in which the profiler runs and what it sees is thrown away.
        num_active: steps after them that are recorded.

    Raises:
        ValueError: a number out of range.
    """

    num_wait: int = 5
    num_warmup: int = 2
    num_active: int = 10

    def __post_init__(self) -> None:
        check_count("wait", self.num_wait, 0)
        check_count("warmup", self.num_warmup, 1)
        check_count("active", self.num_active, 1)

    def fitted(self, num_steps: int | None) -> "Window":
        """Returns the window for a run of so many steps: what is too much is taken from the wait, then from the rest.

        Args:
            num_steps: steps of the run, ``None`` where nobody can tell.
        """
        if num_steps is None:
            return self
        num_warmup = min(self.num_warmup, max(1, num_steps - 1))
        num_active = max(1, min(self.num_active, num_steps - num_warmup))
        return Window(max(0, min(self.num_wait, num_steps - num_warmup - num_active)), num_warmup, num_active)


@dataclass(frozen=True)
class TraceRequest:
    """What every rank is to record, and where it goes.

    Attributes:
        folder: an absolute path, the same for all ranks.
        window: which steps.
        profiles: whether ``torch.profiler`` records operators too.
    """

    folder: str
    window: Window = Window()
    profiles: bool = True

    def to_variable(self) -> str:
        """Returns the text for :data:`VARIABLE`."""
        return json.dumps(dataclasses.asdict(self))


def request_in(environment: Mapping[str, str]) -> TraceRequest | None:
    """Returns what is asked for, or ``None``.

    Args:
        environment: such as ``os.environ``.

    Raises:
        ValueError: the variable holds something else.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        asked = json.loads(text)
        return TraceRequest(str(asked["folder"]), Window(**asked["window"]), bool(asked["profiles"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            explain(
                f"{VARIABLE} as `ddp-plugin trace` sets it", repr(text), "Start the run by it, or unset the variable"
            )
        ) from error
