"""What the monitors cost: a step with and without them, and what they do in a step, measured alone.

The second is the sharper one: a clock and an append per bucket are less than the time of a step varies by.
"""

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, StragglerMonitor
from ddp_plugin.gather import gather_objects
from ddp_plugin.process_group import control_group
from ddp_plugin.timeline.recorder import HostClock, StepRecorder
from ddp_plugin.timeline.steps import steady, summarize
from ddp_plugin.timeline.straggling import arrivals
from tests.benchmarks.models import WORKLOADS
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row
from tests.benchmarks.training import fit, samples

__all__ = ["rows", "time_monitored_steps", "time_recording"]

WITHOUT, WATCHED, WITH = "without", "an observer that does nothing", "both monitors"
EVERY_N_STEPS = 50  # the monitors' default


class _Blind:
    def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass

    def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
        pass


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

    def monitored() -> float:
        callbacks = [StragglerMonitor(), CommunicationMonitor()]
        return fit(workload, data, strategy=CustomDDPStrategy(), callbacks=callbacks)[0]

    variants = {
        WITHOUT: lambda: fit(workload, data, strategy=CustomDDPStrategy())[0],
        WATCHED: watched,
        WITH: monitored,
    }
    return interleaved(variants, num_rounds)


def time_recording(num_buckets: int, num_steps: int, num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds per step of one monitor on this rank, one number a round.

    Args:
        num_buckets: buckets of a step.
        num_steps: steps of a round.
        num_rounds: rounds.

    Returns:
        ``"in a step"``: five marks and two calls for each bucket. ``"exchange"``: turning 50 steps into means, and the
        exchange of them, divided by 50.

    Collectives:
        Two object gathers a round, on all ranks.
    """
    module = nn.ParameterList([torch.zeros(1) for _ in range(num_buckets)])
    buckets = [(index, torch.zeros(1), [parameter]) for index, parameter in enumerate(module)]
    found: dict[str, list[float]] = {"in a step": [], "exchange": []}
    group = control_group()
    for _ in range(num_rounds):
        recorder = StepRecorder()
        recorder.start(HostClock(), module.named_parameters)
        recorder.interrupt()
        begin_s = time.perf_counter()
        for _ in range(num_steps):
            _record_step(recorder, buckets)
        found["in a step"].append((time.perf_counter() - begin_s) / num_steps)
        recorder.take()
        for _ in range(EVERY_N_STEPS):
            _record_step(recorder, buckets)
        dist.barrier()
        begin_s = time.perf_counter()
        steps = recorder.take()
        gather_objects((summarize(steady(steps)), arrivals(steps)), group)
        found["exchange"].append((time.perf_counter() - begin_s) / EVERY_N_STEPS)
    return found


def _record_step(recorder: StepRecorder, buckets: list[tuple[int, Tensor, list[Any]]]) -> None:
    recorder.mark("data")
    recorder.mark("forward")
    for bucket in buckets:
        recorder.before_reduction(*bucket)
    for bucket in buckets:
        recorder.after_reduction(*bucket)
    recorder.mark("backward")
    recorder.mark("optimizer")
    recorder.end_step()


def rows(steps: dict[str, Times], recording: dict[int, list[dict[str, list[float]]]], baseline_s: float) -> list[Row]:
    """Returns the report.

    Args:
        steps: of :func:`time_monitored_steps`, by workload.
        recording: of :func:`time_recording` on each rank, by the number of buckets.
        baseline_s: seconds of the step that the recording is given as a part of.
    """
    found = []
    for subject, baseline in ((WITH, WITHOUT), (WITH, WATCHED)):
        section = f"training step with both monitors / {baseline}"
        found += [ratio_row(section, name, times, subject, baseline) for name, times in steps.items()]
    for num_buckets, by_rank in recording.items():
        each_s = [
            max(in_step) + max(exchange)
            for in_step, exchange in zip(
                zip(*(rank["in a step"] for rank in by_rank), strict=True),
                zip(*(rank["exchange"] for rank in by_rank), strict=True),
                strict=True,
            )
        ]
        name = f"one monitor, {num_buckets} buckets"
        middle, least, most = statistics.median(each_s), min(each_s), max(each_s)
        section = "recording of a step with its share of the exchange, microseconds"
        found.append(Row(section, name, "us", 1e6 * middle, 1e6 * least, 1e6 * most))
        section = f"the same as a part of a step of {1e3 * baseline_s:.1f} ms"
        found.append(Row(section, name, "ratio", *(seconds / baseline_s for seconds in (middle, least, most))))
    return found
