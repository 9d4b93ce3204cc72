"""``python -m tests.benchmarks [--quick] [--json FILE]``: all ratios in one run, on two gloo ranks of this machine."""

import argparse
from pathlib import Path

from tests.benchmarks.report import machine, table, write_json
from tests.benchmarks.suite import collect, measure
from tests.harness import run_ranks

WORLD_SIZE = 2


def main() -> None:
    """Measures, prints the table, and writes the file if one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds of few steps: shows that it runs, no more")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    arguments = parser.parse_args()
    facts = machine(WORLD_SIZE)
    rows = collect(run_ranks(measure, WORLD_SIZE, init=False, timeout_s=1200, quick=arguments.quick))
    print(table(facts, rows))
    if arguments.json is not None:
        write_json(arguments.json, facts, rows)


if __name__ == "__main__":
    main()
