"""What the monitors cost: a step with and without them, and their own CPU time in a step.

The second is the sharper one, because a step's time varies by more than the monitors take. It is an upper bound: all
that Lightning does to call their hooks is in it, and all of the Python hook through which they watch the buckets, also
the start of the all-reduce, with its scaling of the gradient, for which DDP's own reducer has to pay as well.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, StragglerMonitor
from ddp_plugin._compat import GradBucket
from ddp_plugin.errors import counted
from ddp_plugin.hooks.exact import AllReduce
from ddp_plugin.strategy import wrapping
from ddp_plugin.timeline.recorder import StepRecorder
from tests.benchmarks.models import WORKLOADS, Workload
from tests.benchmarks.replicas import LanguageModel
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row
from tests.benchmarks.training import NUM_SKIPPED, fit, samples
from tests.harness import trainer

__all__ = [
    "LANGUAGE_MODEL",
    "LIMIT_RATIO",
    "OwnTime",
    "rows",
    "time_monitored_language_model",
    "time_monitored_steps",
    "time_own",
]

LANGUAGE_MODEL = "language-model recipe"
WITHOUT, WATCHED, WITH = "without", "an observer that does nothing", "both monitors"
PARTS = ("callbacks", "hook", "hook: start of the all-reduce", "end of the all-reduce")
HOOK, START, END = PARTS[1:]
LIMIT_RATIO = 0.01  # what the monitors may take of a step
EVERY_N_STEPS = 50  # the monitors' default
SHORT_WINDOW = 10  # where steps are long: exchanges are five times as frequent, and so is what they cost
WIDTH = 64
IN_A_STEP = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
)


class _Blind:
    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass


class _Starts(pl.Callback):
    """Notes when each step starts."""

    def __init__(self) -> None:
        self.started_s: list[float] = []

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.started_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """Mean seconds of the steps that count."""
        counted = self.started_s[NUM_SKIPPED:]
        return (counted[-1] - counted[0]) / (len(counted) - 1)


def _monitors(every_n_steps: int) -> list[pl.Callback]:
    return [StragglerMonitor(every_n_steps), CommunicationMonitor(every_n_steps)]


def time_monitored_steps(workload_name: str, num_steps: int, num_rounds: int) -> Times:
    """Times a step without monitors, with an empty observer, and with both monitors, on this rank.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    workload = WORKLOADS[workload_name]
    data = samples(workload, num_steps)

    def watched() -> float:
        strategy = CustomDDPStrategy()
        strategy.add_bucket_observer(_Blind())
        return fit(workload, data, strategy=strategy)[0]

    variants = {
        WITHOUT: lambda: fit(workload, data, strategy=CustomDDPStrategy())[0],
        WATCHED: watched,
        WITH: lambda: fit(workload, data, strategy=CustomDDPStrategy(), callbacks=_monitors(EVERY_N_STEPS))[0],
    }
    return interleaved(variants, num_rounds)


def time_monitored_language_model(num_steps: int, num_rounds: int, batch_size: int | None = None) -> Times:
    """Times a step of the language-model recipe's network without monitors and with both, on this rank.

    Args:
        num_steps: steps that count in each training; with monitors one exchange falls into :data:`SHORT_WINDOW` steps.
        num_rounds: rounds.
        batch_size: samples per rank and step; the recipe's own when ``None``.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    variants = {
        WITHOUT: lambda: _fit_language_model(num_steps, [], batch_size),
        WITH: lambda: _fit_language_model(num_steps, _monitors(SHORT_WINDOW), batch_size),
    }
    return interleaved(variants, num_rounds)


def _fit_language_model(num_steps: int, callbacks: list[pl.Callback], batch_size: int | None) -> float:
    """Trains; returns the mean seconds of the steps that count."""
    module, starts = LanguageModel(), _Starts()
    module.batch_size = batch_size or module.batch_size
    run = trainer(strategy=CustomDDPStrategy(), callbacks=[*callbacks, starts])
    run.fit(module, module.loader(num_steps + NUM_SKIPPED + 1))
    return starts.step_s


# ---------------------------------------------------------------------------------------------------------- own time


class OwnTime:
    """CPU seconds of this thread and of the communication threads that go to the monitors, for each step.

    Attributes:
        by_part: of :data:`PARTS`: the seconds of each step, the step that runs now last.
    """

    def __init__(self) -> None:
        self.by_part: dict[str, list[float]] = {part: [0.0] for part in PARTS}
        self._began_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Times the Python hook, and what the monitors do when a bucket is reduced, of all trainings inside."""
        with (
            mock.patch.object(wrapping, "observed", self._timed_hook(wrapping.observed)),
            mock.patch.object(AllReduce, "start", self._timed(START, AllReduce.start)),
            mock.patch.object(StepRecorder, "after_reduction", self._timed(END, StepRecorder.after_reduction)),
        ):
            yield

    def around(self, monitors: list[pl.Callback]) -> list[pl.Callback]:
        """Returns the monitors between two callbacks that time them and all that Lightning does to call them."""

        def begin(*arguments: Any) -> None:
            self._began_s = time.thread_time()

        def end(*arguments: Any) -> None:
            self.by_part["callbacks"][-1] += time.thread_time() - self._began_s

        def end_step(*arguments: Any) -> None:
            end()
            for seconds in self.by_part.values():
                seconds.append(0.0)

        ends = dict.fromkeys(IN_A_STEP, end) | {"on_train_batch_end": end_step}
        first = type("Begin", (pl.Callback,), {name: staticmethod(begin) for name in IN_A_STEP})
        last = type("End", (pl.Callback,), {name: staticmethod(function) for name, function in ends.items()})
        return [first(), *monitors, last()]

    def seconds(self, every_n_steps: int) -> dict[str, float]:
        """Returns the seconds of a step: those of the median step, and a share of what an exchange takes longer.

        The start of the all-reduce is in the hook's time too, and no addition to it.

        Args:
            every_n_steps: of the monitors; of the ``callbacks`` every so many steps one exchanges.
        """
        found = {}
        for part, each in self.by_part.items():
            exchanges = each[every_n_steps - 1 : -1 : every_n_steps]
            others = [s for number, s in enumerate(each[:-1], 1) if number > NUM_SKIPPED and number % every_n_steps]
            found[part] = statistics.median(others)
            if part == "callbacks":
                found[part] += max(0.0, statistics.median(exchanges) - found[part]) / every_n_steps
        return found

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.thread_time()
            result = function(*arguments)
            self.by_part[part][-1] += time.thread_time() - began_s
            return result

        return timed

    def _timed_hook(self, observed: Callable[..., Any]) -> Callable[..., Any]:
        def timed_observed(*arguments: Any) -> Callable[..., Any]:
            hook = self._timed(HOOK, observed(*arguments))

            # DDP looks at the names and annotations of a hook.
            def timed_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
                return hook(state, bucket)  # type: ignore[no-any-return]

            return timed_hook

        return timed_observed


def time_own(num_layers: int | None, num_steps: int, num_rounds: int, batch_size: int | None = None) -> dict[str, Any]:
    """Measures the monitors' own CPU time per step on this rank.

    Args:
        num_layers: of a small network, with a bucket for almost each; ``None`` for the language-model recipe's network
            as it is, with one exchange in :data:`SHORT_WINDOW` steps instead of :data:`EVERY_N_STEPS`.
        num_steps: steps of a round; at least one exchange has to fall into them.
        num_rounds: rounds.
        batch_size: samples per rank and step of the language model; the recipe's own when ``None``.

    Returns:
        ``"seconds"``: for each round, those of :data:`PARTS`; ``"step_s"``: for each round, seconds of the whole step;
        ``"num_buckets"``: how many buckets a step reduces.

    Collectives:
        Those of the trainings, on all ranks.
    """
    every_n_steps = SHORT_WINDOW if num_layers is None else EVERY_N_STEPS
    seconds, steps_s, num_buckets = [], [], 0
    for _ in range(num_rounds):
        own, watch = OwnTime(), CommunicationMonitor(every_n_steps)
        callbacks = own.around([StragglerMonitor(every_n_steps), watch])
        with own.watching():
            if num_layers is None:
                steps_s.append(_fit_language_model(num_steps, callbacks, batch_size))
            else:
                workload = Workload("mlp", (WIDTH,), 4, sizes=(WIDTH, num_layers - 1))
                strategy = CustomDDPStrategy(bucket_cap_mb=4 * WIDTH**2 / 2**20)  # a layer and its bias are larger
                steps_s.append(fit(workload, samples(workload, num_steps), strategy=strategy, callbacks=callbacks)[0])
        seconds.append(own.seconds(every_n_steps))
        assert watch.last_report is not None, "no exchange in so few steps"
        num_buckets = len(watch.last_report.buckets)
    return {"seconds": seconds, "step_s": steps_s, "num_buckets": num_buckets}


def rows(steps: dict[str, Times], own: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Returns the report.

    Args:
        steps: of :func:`time_monitored_steps` and :func:`time_monitored_language_model`, the slowest rank's, by what
            was trained.
        own: of :func:`time_own` on each rank, by what was trained.
    """
    found = []
    for baseline in (WITHOUT, WATCHED):
        section = f"training step with both monitors / {baseline}"
        found += [ratio_row(section, name, times, WITH, baseline) for name, times in steps.items() if baseline in times]
    totals, parts, lengths, shares = [], [], [], []
    for name, by_rank in own.items():
        title = f"{name}, {counted(by_rank[0]['num_buckets'], 'bucket')}"
        rounds = list(zip(*(rank["seconds"] for rank in by_rank), strict=True))
        total_us = [1e6 * max(sum(rank.values()) - rank[START] for rank in round_) for round_ in rounds]
        totals.append(_spread("CPU time of both monitors in a step, microseconds", title, "us", total_us))
        for part in PARTS:
            part_us = [1e6 * max(rank[part] for rank in round_) for round_ in rounds]
            parts.append(_spread("of that, microseconds", f"{title}: {part}", "us", part_us))
        section = f"length of a step of which that is {LIMIT_RATIO:.0%}, microseconds"
        lengths.append(_spread(section, title, "us", [us / LIMIT_RATIO for us in total_us]))
        if name == LANGUAGE_MODEL:
            steps_us = [1e6 * max(round_) for round_ in zip(*(rank["step_s"] for rank in by_rank), strict=True)]
            shares_ratio = [us / (LIMIT_RATIO * step_us) for us, step_us in zip(total_us, steps_us, strict=True)]
            step_ms = statistics.median(steps_us) / 1e3
            section = f"CPU time of both monitors / {LIMIT_RATIO:.0%} of a step of {step_ms:.0f} ms"
            shares.append(_spread(section, title, "ratio", shares_ratio))
    return found + totals + parts + lengths + shares


def _spread(section: str, name: str, unit: str, values: list[float]) -> Row:
    return Row(section, name, unit, statistics.median(values), min(values), max(values))
