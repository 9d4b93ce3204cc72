"""Kills a run at random moments, twice: once on as many processes as before, once on others after a start by hand.

    python -m tests.chaos --seed 0 --kills 10

Ends with status 1 where the killed runs are not the uninterrupted one.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.killing import draw_kills
from tests.chaos.verdict import SAVE_EVERY, compare, run_whole, write_texts


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the moments, the kinds and the numbers of processes")
    parser.add_argument("--kills", type=int, default=10, help="in each of the two runs")
    chosen = parser.parse_args()
    steps = (SAVE_EVERY + 1, 2 * SAVE_EVERY)
    num_steps = SAVE_EVERY * 3 * (chosen.kills + 1)
    problems = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        base = Path(name)
        texts = write_texts(base / "texts")
        whole = run_whole(base / "whole", texts, 2, num_steps)
        for number, world_sizes in enumerate(([2], [2, 1, 3])):
            kills = draw_kills(chosen.seed + number, chosen.kills, world_sizes, steps)
            begun_s = time.monotonic()
            verdict = compare(whole, base / f"killed-{number}", texts, 2, num_steps, kills)
            hit = ", ".join(f"{kind} {count}" for kind, count in sorted(Counter(verdict.outcome.hit).items()))
            print(
                f"{len(verdict.outcome.hit)} of {chosen.kills} kills hit before the end ({hit}), "
                f"{verdict.outcome.in_save} with a half-written checkpoint left behind; "
                f"processes of each start: {[start.world_size for start in verdict.starts]}; "
                f"{num_steps} steps, {verdict.num_elsewhere} of those that count on 1 or 3; "
                f"{verdict.num_identical} of {verdict.num_compared} checkpoints with the same bits; "
                f"largest relative difference of a loss {verdict.worst_loss_ratio:.1e}, "
                f"of the first after a change {verdict.worst_after_change:.1e}; "
                f"{time.monotonic() - begun_s:.0f} s",
                flush=True,
            )
            if len(world_sizes) > 1 and not verdict.num_elsewhere:
                verdict.problems.append("nothing that counts was done on another number of processes")
            problems += [f"run {number}: {problem}" for problem in verdict.problems]
    for problem in problems:
        print(problem)
    print("The killed runs are the uninterrupted one." if not problems else f"{len(problems)} problems.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
