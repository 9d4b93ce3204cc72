"""What the monitors cost: their own CPU time is really measured, and below 1 % of the language-model recipe's step."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ddp_plugin import CommunicationMonitor, CustomDDPStrategy, StragglerMonitor
from tests.benchmarks.models import Workload
from tests.benchmarks.monitors import (
    END,
    HOOK,
    LANGUAGE_MODEL,
    LIMIT_RATIO,
    NUM_SKIPPED,
    START,
    WATCHED,
    WITH,
    WITHOUT,
    OwnTime,
    rows,
    time_own,
)
from tests.benchmarks.training import fit, samples
from tests.harness import ranks

NUM_STEPS = 25
BURNT_S = 0.004


def test_a_step_pays_for_its_share_of_an_exchange_and_for_the_all_reduce_once() -> None:
    own = OwnTime()
    steps = range(1, 41)
    own.by_part["callbacks"] = [9.0 if n <= NUM_SKIPPED else 6.0 if n % 10 == 0 else 1.0 for n in steps] + [0.5]
    own.by_part[HOOK] = [7.0 if n == 12 else 3.0 for n in steps] + [0.0]
    own.by_part[START] = [2.0] * 40 + [0.0]
    own.by_part[END] = [0.25] * 40 + [0.0]
    found = own.seconds(every_n_steps=10)
    assert found == {"callbacks": 1.0 + (6.0 - 1.0) / 10, HOOK: 3.0, START: 2.0, END: 0.25}
    measured = {"seconds": [found, found], "step_s": [500.0, 1000.0], "num_buckets": 3}
    slower = measured | {"seconds": [found, found | {HOOK: 4.0}]}
    times = {WITHOUT: [1.0, 2.0], WATCHED: [2.0, 2.0], WITH: [2.0, 3.0]}
    report = rows({"x": times}, {LANGUAGE_MODEL: [measured, slower]})

    def spread(section: str) -> tuple[float, float]:
        (row,) = (row for row in report if row.section.startswith(section))
        assert "3 buckets" in row.name
        return row.lowest, row.highest

    assert spread("CPU time of both monitors in a step") == pytest.approx((1e6 * 4.75, 1e6 * 5.75))
    assert spread("length of a step of which that is 1%") == pytest.approx((475e6, 575e6))
    assert spread("CPU time of both monitors / 1%") == pytest.approx((0.575, 0.95))
    ratios = [row.value for row in report if row.section.startswith("training step")]
    assert ratios == pytest.approx([1.75, 1.25])  # over a step without, and over one with an empty observer


def start_group() -> None:
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))  # the strategies' own default


def burn() -> None:
    until_s = time.thread_time() + BURNT_S
    while time.thread_time() < until_s:
        pass


class Burning(CommunicationMonitor):
    """Takes CPU time in one place: ``"callbacks"``, the hook, the end of an all-reduce, or every exchange."""

    def __init__(self, where: str, every_n_steps: int) -> None:
        super().__init__(every_n_steps)
        self.where = where
        if where == HOOK:
            self._recorder.before_reduction = self._burning(self._recorder.before_reduction)  # type: ignore[method-assign]

    def _burning(self, function: Any) -> Any:
        def burning(*arguments: Any) -> None:
            burn()
            function(*arguments)

        return burning

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self.where == "callbacks":
            burn()
        super().on_before_backward(trainer, pl_module, loss)

    def _exchange(self, *arguments: Any) -> None:
        if self.where == "exchange":
            burn()
        super()._exchange(*arguments)


@ranks(2, init=False)
@pytest.mark.parametrize(
    ("where", "part", "share"),
    [(None, None, 0.0), ("callbacks", "callbacks", 1.0), (HOOK, HOOK, 1.0), ("exchange", "callbacks", 0.1)],
)
def test_what_a_monitor_burns_is_found_where_it_burns_it(where: str | None, part: str | None, share: float) -> None:
    start_group()
    own, workload = OwnTime(), Workload("mlp", (16,), 4, sizes=(16, 1))
    monitor = Burning(where or "nowhere", every_n_steps=10)
    with own.watching():
        callbacks = own.around([StragglerMonitor(10, num_late_windows=4), monitor])  # three windows: names nobody
        fit(workload, samples(workload, NUM_STEPS), strategy=CustomDDPStrategy(), callbacks=callbacks)
    assert monitor.last_report is not None
    assert len(monitor.last_report.buckets) == 1
    found = own.seconds(every_n_steps=10)
    for name, seconds in found.items():
        assert seconds > 0, name
        if name == part:
            assert seconds > share * BURNT_S
        elif part is None:
            assert seconds < BURNT_S


@ranks(2, init=False, timeout_s=180)
def test_both_monitors_take_less_than_a_hundredth_of_the_language_models_step() -> None:
    """CPU time of the monitors, start of the all-reduce included, with five times as many exchanges as by default."""
    start_group()
    found = time_own(None, num_steps=12, num_rounds=1)
    (own,), (step_s,) = found["seconds"], found["step_s"]
    assert sum(own.values()) - own[START] < LIMIT_RATIO * step_s
