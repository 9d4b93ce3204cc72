"""A padded evaluation counts samples twice, a shortened one leaves them out.

Said: `DistributedSampler` repeats the tail to make ranks equal, and `drop_last=True` gives a strict evaluation. Also:
the length must be a multiple of the number of ranks, and `drop_last` keeps the last batch full.

True: it repeats the *head* of the order, whatever the length; `drop_last` leaves samples out, and has nothing to do
with batches (that flag is the DataLoader's). Neither is the mean over the seven samples 0, 1, .. 6, which is 3.

Instead: `ExactEvaluation()`: each sample once, whatever the length, with equal numbers of steps on all ranks.
"""

from _start import run
from torch.utils.data import DistributedSampler

from ddp_plugin.data.sampling import share_batches

NUM_RANKS = 1
SAMPLES = list(range(7))


def evaluate(shards):
    seen = [sample for shard in shards for sample in shard]
    return {"shards": shards, "mean": sum(seen) / len(seen)}


def padded():
    """DistributedSampler."""
    return evaluate([list(DistributedSampler(SAMPLES, 4, rank, shuffle=False)) for rank in range(4)])


def dropped():
    """the same, drop_last."""
    return evaluate([list(DistributedSampler(SAMPLES, 4, rank, shuffle=False, drop_last=True)) for rank in range(4)])


def exact():
    """ExactEvaluation's shares."""
    shares = [share_batches(len(SAMPLES), 4, rank) for rank in range(4)]
    return evaluate([SAMPLES[share.start : share.stop] for share in shares])


def check(padded, dropped, exact):
    assert padded == {"shards": [[0, 4], [1, 5], [2, 6], [3, 0]], "mean": 21 / 8}
    assert dropped == {"shards": [[0], [1], [2], [3]], "mean": 6 / 4}
    assert sum(exact["shards"], []) == SAMPLES
    assert exact["mean"] == 3.0


VARIANTS = (padded, dropped, exact)

if __name__ == "__main__":
    run(__file__)
