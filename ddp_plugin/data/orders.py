"""The order of an epoch: drawn the same on every rank, and the same again when a run is resumed.

A sampler may draw from anything. What it draws from the global generators is made to depend on (seed, epoch) alone;
generators that it holds itself are found and their states kept; whatever else it does, ranks compare what they drew.
"""

import hashlib
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_plugin.data.loaders import walk
from ddp_plugin.data.sampling import length_of
from ddp_plugin.errors import explain
from ddp_plugin.forwarding import Forwarder
from ddp_plugin.gather import broadcast_object, gather_objects
from ddp_plugin.streams import StreamStates, seed_streams, stream_seed

__all__ = [
    "agree_on_order",
    "draw_lazily",
    "draw_order",
    "generator_states",
    "is_function_of_epoch",
    "order_hash",
    "restore_generators",
]


# ------------------------------------------------------------------------------------------------------------- drawing


def is_function_of_epoch(sampler: object) -> bool:
    """Whether :func:`draw_order` gives an order that depends on its arguments alone, whatever the process."""
    return type(sampler) is SequentialSampler or type(sampler) is DistributedSampler or _is_plain_shuffle(sampler)


def _is_plain_shuffle(sampler: object) -> bool:
    return (
        type(sampler) is RandomSampler
        and sampler.generator is None
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def draw_order(sampler: Any, seed: int, epoch: int, num_passes: int = 0) -> Sequence[Any]:
    """Draws a whole epoch of a sampler or batch sampler.

    A plain shuffle is the permutation of torch's ``DistributedSampler`` with the same seed and epoch. Any other sampler
    is asked with the global generators (python, numpy, torch) at a stream of (seed, epoch); afterwards they are where
    they were.

    Args:
        sampler: any iterable; at most its length is drawn where it has one.
        seed: the seed of orders, the same on all ranks.
        epoch: epoch, from 0.
        num_passes: complete passes over the loader in this epoch before, for loaders that are cycled.

    Returns:
        The items; as a ``range`` or an array rather than a list where they are known to be numbers, maybe millions.

    Collectives:
        None.
    """
    if _is_plain_shuffle(sampler):
        start = seed + epoch if num_passes == 0 else stream_seed(seed, None, "shuffle", epoch, num_passes)
        generator = torch.Generator().manual_seed(start % 2**63)
        return array("q", torch.randperm(len(sampler.data_source), generator=generator).numpy().tobytes())
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    before = StreamStates.capture()
    seed_streams(stream_seed(seed, None, "order", epoch, num_passes))
    try:
        return list(islice(iter(sampler), length_of(sampler)))
    finally:
        before.restore()


def draw_lazily(sampler: Iterable[Any], seed: int, epoch: int, num_passes: int, block_size: int) -> Iterator[list[Any]]:
    """Draws a sampler that does not say how long it is, block by block, each at a stream of its own.

    Args:
        sampler: any iterable, endless ones included.
        seed: the seed of orders, the same on all ranks.
        epoch: epoch, from 0.
        num_passes: complete passes in this epoch before.
        block_size: items in a block; the last one may hold fewer.

    Collectives:
        None.
    """
    items: Iterator[Any] | None = None
    block_number = 0
    while True:
        before = StreamStates.capture()
        seed_streams(stream_seed(seed, None, f"order/{num_passes}", epoch, block_number))
        try:
            items = iter(sampler) if items is None else items
            block = list(islice(items, block_size))
        finally:
            before.restore()
        if not block:
            return
        yield block
        block_number += 1


# ---------------------------------------------------------------------------------------------------------- generators


def generator_states(sampler: object) -> list[Any]:
    """Returns the states of the generators that a sampler, or a sampler in it, holds: plain numbers and tensors."""
    return [_state(generator) for generator in _generators(sampler)]


def restore_generators(sampler: object, states: Sequence[Any]) -> None:
    """Sets what :func:`generator_states` returned; with another number of generators nothing is changed."""
    generators = list(_generators(sampler))
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)


def _generators(sampler: object) -> Iterator[Any]:
    seen: set[int] = set()
    for item in walk(sampler):
        if isinstance(item, Dataset):  # its generators move with what is fetched, not with the order
            continue
        for value in list(getattr(item, "__dict__", {}).values()):
            if isinstance(value, (torch.Generator, np.random.Generator, random.Random)) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return _without_arrays(generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    else:
        generator.bit_generator.state = state


def _without_arrays(value: Any) -> Any:
    """A checkpoint that is loaded without running code from it holds no arrays of numpy's."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


# ----------------------------------------------------------------------------------------------------------- agreement


def order_hash(order: Sequence[Any]) -> int:
    """Hashes an order to 63 bits; equal orders give equal hashes in different processes."""
    data = order.tobytes() if isinstance(order, array) else repr(order).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


_SHARED_OUT_BY_NOBODY = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


_Order = TypeVar("_Order", bound=Sequence[Any])


def agree_on_order(
    drawn: _Order, sampler: object, group: dist.ProcessGroup | None, purpose: str, *, is_whole: bool = True
) -> _Order:
    """Returns one order on every rank: the one that all drew, else rank 0's.

    Args:
        drawn: this rank's list of indices, or of batches of indices.
        sampler: the sampler it came from.
        group: the control group, ``None`` for one process.
        purpose: what the loader is for, such as ``"training"``; for the message.
        is_whole: whether it is a whole epoch's order; a part of it does not show who delivers what.

    Raises:
        ValueError: on all ranks, if a sampler of the user's own delivers mostly different samples on different ranks:
            then it is shared out by rank already.

    Collectives:
        One object gather of a hash; where the hashes differ, a broadcast and one more gather. All ranks alike.
    """
    if group is None or len(set(gather_objects(order_hash(drawn), group))) == 1:
        return drawn
    agreed: _Order = broadcast_object(drawn, group)
    while isinstance(sampler, Forwarder):
        sampler = sampler.forwards_to
    source = getattr(sampler, "sampler", sampler) if type(sampler) is BatchSampler else sampler
    differs = False
    if is_whole and not isinstance(source, _SHARED_OUT_BY_NOBODY):
        own, first = ({repr(i) for batch in part for i in _members(batch)} for part in (drawn, agreed))
        differs = 2 * len(own & first) < min(len(own), len(first))
    if any(gather_objects(differs, group)):
        raise ValueError(
            explain(
                f"a loader for {purpose} that delivers the whole dataset on every rank",
                f"{type(source).__name__}, which delivers different samples on different ranks",
                "Let the sampler deliver the whole order; or, if it is shared out by rank on purpose, pass "
                "Trainer(use_distributed_sampler=False)",
            )
        )
    return agreed


def _members(batch: Any) -> list[Any]:
    return batch if isinstance(batch, list) else [batch]
