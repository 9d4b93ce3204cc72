"""A sampler that the loader never gets shares nothing out.

Said: the template builds a `DistributedSampler`, calls its `set_epoch`, and makes a `DataLoader(data, batch_size)`.

True: without `sampler=sampler` every rank trains on everything, in the same order each epoch, and nothing says so.
Counted here: what two ranks see of ten samples.

Instead: `SamplerEpoch()` shares out whatever sampler the loader has, and tells it the epoch.
"""

from collections import Counter

from _start import run
from torch.utils.data import DataLoader, DistributedSampler

NUM_RANKS = 1
DATA = list(range(10))


def times_seen(loader_of):
    """Returns how many times each sample is seen in an epoch, by two ranks together: the least and the most."""
    seen = Counter()
    for rank in range(2):
        sampler = DistributedSampler(DATA, 2, rank)
        sampler.set_epoch(0)
        seen.update(sample for batch in loader_of(sampler) for sample in batch.tolist())
    return [min(seen[sample] for sample in DATA), max(seen[sample] for sample in DATA)]


def left_out():
    """the sampler left out."""
    return times_seen(lambda sampler: DataLoader(DATA, batch_size=5))


def given():
    """sampler=sampler."""
    return times_seen(lambda sampler: DataLoader(DATA, batch_size=5, sampler=sampler))


def check(left_out, given):
    assert left_out == [2, 2]
    assert given == [1, 1]


VARIANTS = (left_out, given)

if __name__ == "__main__":
    run(__file__)
