"""``python -m tests.benchmarks.slow_link``: steps over a slow link, of everything that there is, in one run.

It needs root rights, ``ip`` and ``tc``. The whole takes about twenty-five minutes; ``--quick`` shows that it runs.
"""

import argparse
import datetime
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.report import machine
from tests.benchmarks.slow_link import report
from tests.benchmarks.slow_link.campaign import loss_tasks, run_job, time_tasks
from tests.benchmarks.slow_link.hosts import Host, HostsError, ended_by_signals, require_namespaces, two_hosts
from tests.benchmarks.slow_link.job import Job
from tests.benchmarks.slow_link.measured import write_measured
from tests.benchmarks.slow_link.summary import COST_RATE_MBIT, Losses, RateResult, bars, losses_of, rate_result
from tests.benchmarks.slow_link.variants import Variant, choose, kind_of
from tests.benchmarks.slow_link.workload import FULL, SHORT, TINY

NUM_SEEDS = 3


def parse(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.slow_link", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", metavar="MBIT", help="default: 20 100 1000; --quick: 1000")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="default: all; a step without communication too")
    parser.add_argument("--steps", type=int, metavar="N", help="timed steps of a variant at most (default 40)")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of timed steps for a variant (default 5)")
    parser.add_argument("--loss-steps", type=int, metavar="N", help="steps before losses are compared (96); 0: none")
    parser.add_argument("--no-costs", action="store_true", help="leave the cost model out")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps: shows that it runs, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument(
        "--measured", type=Path, metavar="FILE", help="write there what `ddp-plugin plan` is judged by: measured.json"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there too, as Markdown")
    chosen = parser.parse_args(arguments)
    defaults = {"rates": [1000.0], "steps": 3, "budget": 0.5, "loss_steps": 4} if chosen.quick else {}
    for name, value in (
        {"rates": [20.0, 100.0, 1000.0], "steps": 40, "budget": 5.0, "loss_steps": 96} | defaults
    ).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, value)
    if chosen.measured is not None and chosen.no_costs:
        parser.error("--measured needs the cost model's link: leave out --no-costs")
    if min(chosen.rates) <= 0 or chosen.steps < 1 or chosen.budget <= 0 or chosen.loss_steps < 0:
        parser.error("rates, --steps and --budget have to be above 0, --loss-steps at least 0")
    return chosen


def measure(
    hosts: tuple[Host, Host], chosen: argparse.Namespace, variants: dict[str, Variant]
) -> tuple[list[RateResult], Losses | None]:
    """Runs everything; a variant that fails is not tried again."""
    failures = {name: variant.not_run for name, variant in variants.items() if variant.not_run is not None}
    workload = TINY if chosen.quick else FULL
    job = Job((), workload, None, chosen.budget, chosen.steps, chosen.loss_steps, "")
    losses: Losses | None = None
    started_s = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started_s:6.1f} s] {line}", file=sys.stderr, flush=True)

    if chosen.loss_steps:
        tasks = loss_tasks(variants.values(), NUM_SEEDS)
        training = replace(job, tasks=tuple(tasks), workload=TINY if chosen.quick else SHORT)
        records, found = run_job(hosts, training, say)
        losses = losses_of(chosen.loss_steps, records, found)
        failures |= found
    results = []
    num_gradient_bytes = 4 * sum(p.numel() for p in workload.network(0).parameters())
    for rate in chosen.rates:
        say(f"{rate:g} Mbit/s")
        with_costs = (rate == COST_RATE_MBIT or chosen.measured is not None) and not chosen.no_costs
        tasks = time_tasks([variant for name, variant in variants.items() if name not in failures], with_costs)
        records, found = run_job(hosts, replace(job, tasks=tuple(tasks), rate_mbit=rate), say)
        failures |= found
        kinds = {name: kind_of(variant) for name, variant in variants.items() if variant.not_run is None}
        results.append(rate_result(rate, records, dict(failures), kinds, num_gradient_bytes))
    return results, losses


def main(arguments: list[str]) -> int:
    """Measures, prints the tables, and writes the files that are asked for; returns the exit status."""
    chosen = parse(arguments)
    try:
        require_namespaces()
        variants = choose(chosen.variants)
        facts = machine(world_size=2) | {
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", "-m", "tests.benchmarks.slow_link", *arguments]),
        }
        with ended_by_signals(), two_hosts() as hosts:
            results, losses = measure(hosts, chosen, variants)
    except (HostsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    facts["num_parameters"] = (TINY if chosen.quick else FULL).config.num_parameters
    facts["load_1min_after"] = machine(world_size=2)["load_1min"]
    asked = bars(results, losses)
    print(report.text(facts, results, losses, asked))
    if chosen.json is not None:
        report.write_json(chosen.json, facts, results, losses, asked)
    if chosen.measured is not None:
        write_measured(chosen.measured, facts, results, variants, TINY if chosen.quick else FULL)
    if chosen.markdown is not None:
        chosen.markdown.write_text(report.markdown(facts, results, losses, asked))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
