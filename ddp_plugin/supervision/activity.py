"""What this process is doing, and since when."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

__all__ = ["Activity", "place_of"]


class Activity:
    """What one process is doing, written by its main thread and read by any other.

    Writing costs about a microsecond: two list operations and a clock.

    Args:
        place: returns where in the run the process is, such as ``{"stage": "train", "step": 120}``; called by
            :meth:`snapshot` alone, in the thread of the reader.

    Attributes:
        num_changes: how often anything has begun; one that stands still means that nothing goes on.
        failed_in: what was going on, innermost, when an exception passed through here; ``None`` where none has since
            anything began, because then it was caught.
    """

    def __init__(self, place: Callable[[], Mapping[str, Any]] = dict) -> None:
        self.num_changes = 0
        self.failed_in: str | None = None
        self._place = place
        self._doing: list[str] = []
        self._since = time.monotonic()

    def doing(self, what: str) -> "_Doing":
        """Returns a context inside which this process does ``what``; contexts nest, the innermost counts.

        Args:
            what: in the words of a report, such as ``"training_step"`` or ``"the all-reduce of 'loss'"``.

        Collectives:
            None.
        """
        return _Doing(self, what)

    def snapshot(self) -> dict[str, Any]:
        """Returns what is going on, as JSON can hold it.

        Returns:
            ``doing``, outermost first; ``for_s``, seconds since anything began or ended; ``num_changes``; ``place``.

        Collectives:
            None.
        """
        return {
            "doing": list(self._doing),
            "for_s": time.monotonic() - self._since,
            "num_changes": self.num_changes,
            "place": dict(self._place()),
        }

    def begin(self, what: str) -> None:
        """Begins what :meth:`end` ends; :meth:`doing` pairs them."""
        self._doing.append(what)
        self.failed_in = None
        self.num_changes += 1
        self._since = time.monotonic()

    def end(self, has_failed: bool = False) -> None:
        """Ends what was begun last.

        Args:
            has_failed: whether an exception ended it.
        """
        what = self._doing.pop()
        if has_failed and self.failed_in is None:
            self.failed_in = what
        self._since = time.monotonic()


class _Doing:
    def __init__(self, activity: Activity, what: str) -> None:
        self._activity = activity
        self._what = what

    def __enter__(self) -> None:
        self._activity.begin(self._what)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._activity.end(kind is not None)


def place_of(trainer: Any) -> dict[str, Any]:
    """Returns where a Lightning Trainer is: its stage, epoch, optimizer step and batch, as far as it knows them.

    It only reads, and may be called from any thread.

    Collectives:
        None.
    """
    stage = getattr(trainer.state.stage, "value", None)
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = {
        "validate": trainer.validate_loop if trainer.state.fn == "validate" else epoch_loop.val_loop,
        "sanity_check": epoch_loop.val_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }
    loop = loops.get(str(stage), epoch_loop)
    started = loop.batch_progress.current.ready
    return {
        "stage": stage,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "batch": started - 1 if started else None,
    }
