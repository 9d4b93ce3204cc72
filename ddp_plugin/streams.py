"""Random streams by key: who draws, for what, in which epoch, at which batch; nothing is saved, nothing can shift them.

A stream that runs on from step to step depends on everything that ever drew from it: one more validation, one more
worker, a resume, and all that follows differs. Here the seed of each step's stream is a hash of where the run stands,
so two runs that reach the same step draw the same numbers there, whatever lay between. It is the counter-based idea of
Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for the generators that people draw from.

Two kinds of key: with a rank (dropout, augmentation: ranks must differ) and without (the order of samples: ranks must
agree, or their shards overlap).
"""

import hashlib
import random
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["StreamStates", "seed_streams", "stream_seed"]

_ALL_RANKS = -1
_UNSIGNED_64 = 2**64 - 1


def stream_seed(seed: int, rank: int | None, purpose: str, epoch: int = 0, batch: int = 0) -> int:
    """Hashes a key to the seed of its stream, with BLAKE2b (RFC 7693).

    Args:
        seed: the run's seed, 0 to 2**64 - 1; the same on all ranks.
        rank: whose stream, or ``None`` for one that all ranks share.
        purpose: what is drawn from it; any text.
        epoch: epoch, from 0.
        batch: batch in the epoch, from 0.

    Returns:
        64 bits, as a non-negative integer. Keys that differ anywhere give unrelated values.

    Collectives:
        None.
    """
    key = struct.pack("<QqQQ", seed & _UNSIGNED_64, _ALL_RANKS if rank is None else rank, epoch, batch)
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=8, key=key).digest(), "little")


def seed_streams(value: int) -> None:
    """Seeds this process's global generators: python, numpy's legacy one, torch's CPU and current CUDA device's.

    About 15 microseconds. ``torch.manual_seed`` would take seven times as long, and before CUDA is in use it queues a
    call with a stack trace each time; a device that is not in use yet is left alone here.

    Args:
        value: 64 bits, from :func:`stream_seed`.

    Collectives:
        None.
    """
    random.seed(value)
    # Python and numpy share algorithm and key schedule: the same words would give both the same numbers.
    np.random.seed([value >> 32, value & 0xFFFFFFFF, 1])
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(value)


class StreamStates(NamedTuple):
    """Where this process's global generators stand, to go back there."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def capture(cls) -> "StreamStates":
        """Reads the states of the generators that :func:`seed_streams` seeds."""
        cuda = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda = torch.cuda.default_generators[torch.cuda.current_device()].get_state()
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda)

    def restore(self) -> None:
        """Sets them again."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)
        if self.cuda is not None:
            torch.cuda.default_generators[torch.cuda.current_device()].set_state(self.cuda)
