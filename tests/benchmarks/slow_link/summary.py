"""From records to rows and verdicts: pure arithmetic."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.benchmarks.slow_link.costs import Prediction, fitted_link, predictions
from tests.benchmarks.slow_link.variants import BASELINE, REFERENCE

__all__ = ["Bar", "Losses", "RateResult", "Row", "bars", "judged_s", "losses_of", "rate_result"]

# Rate in Mbit/s: how many times as long as a step without communication the best lossy hook's may take.
LOSSY_LIMITS = {100.0: 1.15, 20.0: 1.4}
LINK_USE_LIMIT = 0.9
COST_ERROR_LIMIT = 0.15
COST_RATE_MBIT = 100.0


@dataclass(frozen=True)
class Row:
    """One variant at one rate.

    Attributes:
        variant: its name.
        kind: see :func:`~tests.benchmarks.slow_link.variants.kind_of`.
        step_s: seconds of a step: the median; the mean over whole periods where exchanges are that far apart.
        lowest_s: of the steps.
        highest_s: of the steps.
        num_steps: how many were timed.
        ratio: ``step_s`` over that of the baseline in the same run.
        sent_bytes: that rank 0's device really sent in a step, headers and acknowledgements included.
        declared_bytes: that the hook says rank 0 sends in a step; ``None`` where nobody says.
        use_while_busy: part of the link that was used while it was busy in these steps; ``None`` where it never was.
    """

    variant: str
    kind: str
    step_s: float
    lowest_s: float
    highest_s: float
    num_steps: int
    ratio: float
    sent_bytes: float
    declared_bytes: float | None
    use_while_busy: float | None


@dataclass(frozen=True)
class RateResult:
    """All that was measured at one rate.

    Attributes:
        rate_mbit: of the link.
        link: what it carries: raw TCP and exact all-reduces; empty where that could not be measured.
        baseline_s: median of each run of the baseline; their spread is the drift of the machine.
        rows: the variants, fastest first.
        costs: the cost model's predictions; empty where none were asked for.
        fitted: the link as the cost model sees it; empty where that was not asked for.
        trace: one rank's forward and backward, and when each gradient is ready, in seconds; empty where it failed.
        failures: why variants have no row.
    """

    rate_mbit: float
    link: Mapping[str, float]
    baseline_s: Sequence[float]
    rows: Sequence[Row]
    costs: Sequence[Prediction]
    failures: Mapping[str, str]
    fitted: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Losses:
    """Losses on the held-out batch after equally many steps, in nats per token.

    Attributes:
        num_steps: how many.
        reference: of the exact run, by seed; every other one has the first seed.
        by_variant: of each variant.
        failures: why variants have none.
    """

    num_steps: int
    reference: Mapping[int, float]
    by_variant: Mapping[str, float]
    failures: Mapping[str, str]

    @property
    def spread_nats(self) -> float:
        """Largest minus smallest loss of the exact run over the seeds."""
        return max(self.reference.values()) - min(self.reference.values())

    def gap_nats(self, variant: str) -> float | None:
        """Returns by how much a variant ended above the exact run with the same seed; ``None`` where it has no loss."""
        if variant not in self.by_variant or not self.reference:
            return None
        return self.by_variant[variant] - self.reference[min(self.reference)]


@dataclass(frozen=True)
class Bar:
    """Something that is asked for.

    Attributes:
        name: what, in words.
        value: what was found; ``None`` where it was not measured.
        limit: the value asked for.
        at_least: whether larger is better.
        remark: what belongs beside it.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    remark: str = ""

    @property
    def verdict(self) -> str:
        """``"met"``, ``"not met"`` or ``"not measured"``."""
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "not met"


def judged_s(step_s: Sequence[float], period: int) -> float:
    """Returns what a step costs: the median, or the mean where a median would hide that few steps pay for all."""
    return statistics.median(step_s) if period == 1 else statistics.fmean(step_s)


def rate_result(
    rate_mbit: float,
    records: Sequence[Mapping[str, Any]],
    failures: Mapping[str, str],
    kinds: Mapping[str, str],
    num_gradient_bytes: int,
) -> RateResult:
    """Makes one rate's rows.

    Args:
        rate_mbit: of the link.
        records: what was reported, see :mod:`~tests.benchmarks.slow_link.job`.
        failures: why there is no record of something.
        kinds: kind of each variant by name.
        num_gradient_bytes: of the whole gradient in fp32.

    Raises:
        RuntimeError: the baseline was not measured, and nothing means anything without it.
    """
    by_kind = {kind: [r for r in records if r["task"].kind == kind] for kind in ("link", "trace", "time", "costs")}
    baseline = [r["step_s"] for r in by_kind["time"] if r["task"].variant == BASELINE]
    if not baseline:
        raise RuntimeError(f"no step without communication was timed at {rate_mbit:g} Mbit/s: {dict(failures)}")
    baseline_s = judged_s([s for steps in baseline for s in steps], period=1)
    rows = [
        _row([r for r in by_kind["time"] if r["task"].variant == name], kinds[name], baseline_s)
        for name in dict.fromkeys(r["task"].variant for r in by_kind["time"])
    ]
    link, trace = (
        {key: value for r in by_kind[kind] for key, value in r.items() if key not in ("task", "event")}
        for kind in ("link", "trace")
    )
    gradient = (num_gradient_bytes, link["all_reduce_s"]) if "all_reduce_s" in link else None
    costs = [one for r in by_kind["costs"] for one in predictions(r["measured"], gradient)]
    fitted = {key: value for r in by_kind["costs"] for key, value in asdict(fitted_link(r["measured"])).items()}
    medians = [statistics.median(steps) for steps in baseline]
    rows.sort(key=lambda row: row.step_s)
    return RateResult(rate_mbit, link, medians, rows, costs, failures, fitted, trace)


def _row(records: Sequence[Mapping[str, Any]], kind: str, baseline_s: float) -> Row:
    steps = [s for record in records for s in record["step_s"]]
    first = records[0]
    step_s = judged_s(steps, first["period"])
    return Row(
        variant=first["task"].variant,
        kind=kind,
        step_s=step_s,
        lowest_s=min(steps),
        highest_s=max(steps),
        num_steps=len(steps),
        ratio=step_s / baseline_s,
        sent_bytes=statistics.fmean(record["sent_bytes_per_step"] for record in records),
        declared_bytes=first["declared_bytes_per_step"],
        use_while_busy=first["use_while_busy"],
    )


def losses_of(num_steps: int, records: Sequence[Mapping[str, Any]], failures: Mapping[str, str]) -> Losses:
    """Makes the losses of the records."""
    found = {(r["task"].variant, r["task"].number): r["loss_nats"] for r in records}
    reference = {seed: loss for (name, seed), loss in found.items() if name == REFERENCE}
    by_variant = {name: loss for (name, seed), loss in found.items() if seed == 0}
    return Losses(num_steps, reference, by_variant, failures)


def bars(results: Sequence[RateResult], losses: Losses | None) -> list[Bar]:
    """Returns what is asked for, with what was found; a rate that was not run is not measured."""
    by_rate = {result.rate_mbit: result for result in results}
    found = [_lossy_bar(rate, limit, by_rate.get(rate), losses) for rate, limit in LOSSY_LIMITS.items()]
    for rate, result in sorted(by_rate.items()):
        found.append(_use_bar(rate, result))
    result = by_rate.get(COST_RATE_MBIT)
    unseen = [one for one in result.costs if not one.is_fitted] if result is not None else []
    worst = max(unseen, key=lambda one: abs(one.error_ratio), default=None)
    found.append(
        Bar(
            f"largest error of the cost model at {COST_RATE_MBIT:g} Mbit/s, in what it has not seen",
            None if worst is None else abs(worst.error_ratio),
            COST_ERROR_LIMIT,
            remark="" if worst is None else f"{worst.algorithm}, {worst.num_bytes} bytes",
        )
    )
    return found


def _lossy_bar(rate_mbit: float, limit: float, result: RateResult | None, losses: Losses | None) -> Bar:
    name = f"step of the best lossy hook at {rate_mbit:g} Mbit/s, over a step without communication"
    lossy = [row for row in result.rows if row.kind == "lossy"] if result is not None else []
    if not lossy:
        return Bar(name, None, limit)
    best = min(lossy, key=lambda row: row.ratio)
    gap = losses.gap_nats(best.variant) if losses is not None else None
    remark = best.variant
    if gap is not None and losses is not None:
        remark += f"; its loss is {gap:+.3f} from the exact run's, seeds differ by {losses.spread_nats:.3f}"
    return Bar(name, best.ratio, limit, remark=remark)


def _use_bar(rate_mbit: float, result: RateResult) -> Bar:
    payload = result.link.get("payload_use")
    return Bar(
        f"part of the link that exact all-reduces use at {rate_mbit:g} Mbit/s, packet headers included",
        result.link.get("packet_use"),
        LINK_USE_LIMIT,
        at_least=True,
        remark="" if payload is None else f"{payload:.3f} without headers",
    )
