"""A script under torchrun is one rank already.

Said: the template calls `mp.spawn(train, nprocs=N)` with `MASTER_ADDR=localhost` and counts ranks from 0; start it with
`torchrun --nproc_per_node=N`, and set RANK by hand on several nodes.

True: torchrun starts N processes and gives each its RANK, LOCAL_RANK and WORLD_SIZE. Each then starts N more, and
every rank is there N times over. Either start processes or read what the launcher says.

Instead: one script for both; the check before the first step says what contradicts the launcher.
"""

import os
import subprocess
import sys

from _start import run

NUM_RANKS = 2  # started as torchrun does it: RANK and WORLD_SIZE are in the environment


def spawns():
    """the script spawns."""
    started = [
        subprocess.run([sys.executable, "-Sc", f"print({rank})"], check=True, capture_output=True, text=True)
        for rank in range(int(os.environ["WORLD_SIZE"]))
    ]
    return [int(process.stdout) for process in started]


def reads():
    """the script reads RANK."""
    return [int(os.environ["RANK"])]


def check(spawns, reads):
    assert sorted(sum(spawns, [])) == [0, 0, 1, 1]
    assert sorted(sum(reads, [])) == [0, 1]


VARIANTS = (spawns, reads)

if __name__ == "__main__":
    run(__file__)
