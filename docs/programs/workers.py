"""Data workers share the cores that the ranks leave free.

Said: `num_workers` of two to four times the number of CPU cores.

True: each rank has workers of its own, and torch itself warns of more than there are cores. On 64 cores with 8 ranks,
four per core are 256 workers in each of 8 ranks. What is left is (64 - 8) / 8 = 7 each.

Instead: `ddp-plugin doctor` says it for the machine at hand, and looks at memory as well.
"""

import os
import warnings

from _start import run
from torch.utils.data import DataLoader

from ddp_plugin.doctor.loaders import workers_per_rank
from ddp_plugin.doctor.machine import Machine, available_cores

NUM_RANKS = 1
NUM_CORES, NUM_PROCESSES = 64, 8


def consequences(num_workers, num_workers_here):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DataLoader([0], num_workers=num_workers_here)
    return {
        "processes for a core": NUM_PROCESSES * (1 + num_workers) / NUM_CORES,
        "torch warns here": any("suggested max number of worker" in str(warning.message) for warning in caught),
    }


def as_told():
    """4 per core."""
    return consequences(4 * NUM_CORES, 4 * os.cpu_count())


def what_is_free():
    """what is free."""
    machine = Machine(NUM_CORES, None, None, None, NUM_PROCESSES)
    here = Machine(available_cores(), None, None, None, 0)
    return consequences(workers_per_rank(machine, NUM_PROCESSES), workers_per_rank(here, 1))


def check(as_told, what_is_free):
    assert as_told == {
        "processes for a core": NUM_PROCESSES * (1 + 4 * NUM_CORES) / NUM_CORES,
        "torch warns here": True,
    }
    assert what_is_free == {"processes for a core": 1.0, "torch warns here": False}


VARIANTS = (as_told, what_is_free)

if __name__ == "__main__":
    run(__file__)
