"""For how long a variant runs: warm-up on the open link, then as many timed steps as fit, in whole periods."""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["NUM_WARMUP", "EqualSteps", "StepPlan", "TimedSteps"]

NUM_WARMUP = 2  # DDP builds its buckets again in the second step
MIN_TIMED = 3


@dataclass(frozen=True)
class StepPlan:
    """How many steps of a variant are timed.

    Attributes:
        budget_s: seconds that they should take together.
        max_steps: how many there are at most, but a whole period at least.
        period: steps from one exchange of the variant to the next; only whole periods tell what a step costs.
        start_step: exchanges of the variant before its own way of exchanging begins; they are warm-up.
    """

    budget_s: float
    max_steps: int
    period: int = 1
    start_step: int = 0

    @property
    def num_warmup(self) -> int:
        """Steps that do not count: buckets are built again, memory is found, the variant's own way begins."""
        return max(NUM_WARMUP, self.start_step + 1)

    def num_timed(self, step_s: float) -> int:
        """Returns how many steps are timed, where one takes about ``step_s``: three at least, in whole periods."""
        wanted = min(self.max_steps, max(MIN_TIMED, int(self.budget_s / step_s)))
        return max(1, round(wanted / self.period)) * self.period if self.period > 1 else wanted


class TimedSteps:
    """Times the steps of one variant; the loop tells it of the end of each.

    Args:
        plan: how many.
        agree: returns rank 0's number on all ranks.
        begin: called when the warm-up has ended, on all ranks: limits the link and looks at its counters.
        end: called when the timed steps have ended.
    """

    def __init__(
        self, plan: StepPlan, agree: Callable[[int], int], begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self.plan = plan
        self.step_s: list[float] = []
        self._agree, self._begin, self._end = agree, begin, end
        self._num_warmup_left = plan.num_warmup
        self._num_timed: int | None = None
        self._last_s = 0.0

    def step_ended(self) -> bool:
        """Notes the end of a step; returns whether the loop ends here, the same on all ranks.

        Collectives:
            Those of ``begin``, ``end`` and ``agree``, each once in a variant.
        """
        if self._num_warmup_left:
            self._num_warmup_left -= 1
            if not self._num_warmup_left:
                self._begin()
                self._last_s = time.perf_counter()
            return False
        self.step_s.append(time.perf_counter() - self._last_s)
        if len(self.step_s) == self.plan.period:
            self._num_timed = self._agree(self.plan.num_timed(sum(self.step_s) / len(self.step_s)))
        if len(self.step_s) == self._num_timed:
            self._end()
            return True
        self._last_s = time.perf_counter()
        return False


class EqualSteps:
    """Ends a loop after a number of steps that is the same for all variants.

    Args:
        num_steps: how many.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_left = num_steps

    def step_ended(self) -> bool:
        """Notes the end of a step; returns whether the loop ends here."""
        self._num_left -= 1
        return self._num_left == 0
