"""Is it the same on every rank, bit for bit: a checksum per tensor, a digest per kind, the first that differs.

The checksum of a tensor is a polynomial in its words, ``sum(word[i] * BASE**i) mod 2**64``, with words of at most 32
bits taken from the tensor's own bytes. Because ``BASE`` is odd, every power of it is invertible, so one changed word
always changes the sum. Because ``BASE % 8 == 5``, ``BASE**j - BASE**i`` holds the factor 2 exactly ``2 + v`` times
(``v``: how often ``j - i`` does), and two swapped words of 32 bits are always seen within ``2**31`` words. Any other
pair of unequal tensors agrees by chance alone, at most about once in ``2**32``: this finds faults, not forgeries.

Reference:
    M. Dietzfelbinger, J. Gil, Y. Matias and N. Pippenger, Polynomial hash functions are reliable, 1992.
"""

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Difference", "Entry", "Fingerprint", "checksum", "differences", "digests", "take_fingerprints"]

BASE = 0x9E3779B97F4A7C15  # odd, and 5 modulo 8; the golden ratio's bits otherwise
_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}  # by bytes of an element
_CHUNK_WORDS_CPU = 2**16  # the products fit into a core's second cache
_CHUNK_WORDS = 2**20  # enough to fill an accelerator
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


# ---------------------------------------------------------------------------------------------------------- checksums


def checksum(tensor: Tensor) -> Tensor:
    """Sums up the bits of a tensor, in the order of its elements, whatever its strides.

    One NaN equals the same NaN, and 0.0 differs from -0.0. Chunks are read one after another, so the memory needed does
    not depend on the tensor's size (a sparse COO tensor is coalesced first).

    Args:
        tensor: any shape and dtype, on any device. A tensor without values here (meta, quantised, a lazy module's) has
            the checksum 0; of a sparse one, indices and values count.

    Returns:
        An int64 tensor of shape ``()`` on the tensor's device; nothing is copied to the host.
    """
    with torch.no_grad():
        if not _has_bits(tensor):
            return torch.zeros((), dtype=torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        num_words = 0
        chunk = _CHUNK_WORDS_CPU if tensor.device.type == "cpu" else _CHUNK_WORDS
        powers = _powers(tensor.device, chunk)
        for part in _dense_parts(tensor.detach()):
            part = part.resolve_conj().resolve_neg()
            words_per_element = max(1, part.element_size() // 4)
            for piece in _flat_pieces(part, chunk // words_per_element):
                words = piece.view(_WORD[part.element_size()])
                shift = _signed(pow(BASE, num_words, 2**64))
                total += (words * powers[: words.numel()]).sum() * shift
                num_words += words.numel()
        return total


def _has_bits(tensor: Tensor) -> bool:
    return not (tensor.is_meta or tensor.is_quantized or torch.nn.parameter.is_lazy(tensor))


def _dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor if tensor.layout is torch.strided else tensor.to_dense(),)


def _flat_pieces(tensor: Tensor, num_elements: int) -> Iterator[Tensor]:
    """Cuts a tensor into flat contiguous pieces, in the order of its elements; only what is strided is copied."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        yield from torch.split(tensor.view(-1), num_elements)
    elif tensor.numel() <= num_elements:
        yield tensor.reshape(-1)
    else:
        num_rows = num_elements * len(tensor) // tensor.numel()
        for part in torch.split(tensor, num_rows) if num_rows else tensor.unbind():
            yield from _flat_pieces(part, num_elements)


@functools.lru_cache(maxsize=16)
def _powers(device: torch.device, count: int) -> Tensor:
    """Returns ``BASE**i mod 2**64`` for the first ``count`` exponents, as int64."""
    powers = torch.ones(count, dtype=torch.int64, device=device)
    done = 1
    while done < count:
        following = powers[done : 2 * done]
        following.copy_(powers[: len(following)] * _signed(pow(BASE, done, 2**64)))
        done *= 2
    return powers


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


# ----------------------------------------------------------------------------------------------- what is to be the same


@dataclass(frozen=True)
class Entry:
    """One thing that shall be the same on all ranks.

    Attributes:
        kind: what it is: ``"parameter"``, ``"optimizer state"``, …; entries are compared kind by kind.
        name: its name within the kind.
        value: a tensor, or a plain value.
        owner: the dict or list that holds the value, for a repair; ``None`` for a tensor, which is changed in place.
        key: where in ``owner``.
    """

    kind: str
    name: str
    value: Any
    owner: Any = None
    key: Any = None


@dataclass(frozen=True)
class Fingerprint:
    """What stands for an entry in a message: small, picklable, equal where and only where the entry is.

    Attributes:
        kind: of the entry.
        name: of the entry.
        shown: the value of a plain entry; dtype, shape and layout of a tensor.
        checksum: of a tensor's bits; 0 otherwise.
        is_tensor: whether it is a tensor.
    """

    kind: str
    name: str
    shown: str
    checksum: int = 0
    is_tensor: bool = False


def take_fingerprints(entries: Sequence[Entry]) -> list[Fingerprint]:
    """Fingerprints every entry; checksums are copied to the host once for each device.

    A value that is neither a tensor nor plain (a function, an object) is only compared by its type.
    """
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, entry in enumerate(entries):
        if isinstance(entry.value, Tensor):
            result = checksum(entry.value)
            by_device.setdefault(result.device, []).append((index, result))
    checksums = [0] * len(entries)
    for results in by_device.values():
        on_host = torch.stack([result for _, result in results]).tolist()
        for (index, _), value in zip(results, on_host, strict=True):
            checksums[index] = value
    return [
        Fingerprint(entry.kind, entry.name, _shown(entry.value), value, isinstance(entry.value, Tensor))
        for entry, value in zip(entries, checksums, strict=True)
    ]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        if torch.nn.parameter.is_lazy(value):
            return "uninitialised tensor"
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        place = " without values" if not _has_bits(value) else ""
        return f"{value.dtype} {list(value.shape)}{layout}{place}".replace("torch.", "")
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    return type(value).__name__


def digests(fingerprints: Sequence[Fingerprint], kinds: Sequence[str]) -> list[int]:
    """Returns one signed 64-bit number per kind; unequal fingerprints give unequal numbers but for chance."""
    hashes = {kind: hashlib.blake2b(digest_size=8) for kind in kinds}
    for item in fingerprints:
        hashes[item.kind].update(f"{item.name}\0{item.shown}\0{item.checksum}\1".encode())
    return [int.from_bytes(hashes[kind].digest(), "little", signed=True) for kind in kinds]


# ---------------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """One entry that is not the same on all ranks.

    Attributes:
        kind: of the entry.
        name: of the entry.
        groups: ``(fingerprint, ranks)`` for each of its values, in the order of the first rank that holds it; the
            fingerprint is ``None`` where the ranks have no such entry.
    """

    kind: str
    name: str
    groups: tuple[tuple[Fingerprint | None, tuple[int, ...]], ...]

    @property
    def is_in_bits(self) -> bool:
        """Whether all ranks hold a tensor of one dtype and shape, and only its values differ."""
        shown = {None if item is None or not item.is_tensor else item.shown for item, _ in self.groups}
        return len(shown) == 1 and None not in shown

    def describe(self) -> str:
        """Returns one clause: which ranks hold what."""
        parts = []
        for number, (item, ranks) in enumerate(self.groups):
            if item is None:
                value = "missing"
            elif self.is_in_bits:
                value = "one value" if number == 0 else "another"
            else:
                value = item.shown
            parts.append(f"{value} on {_ranks(ranks)}")
        return f"{self.kind} {self.name}: {', '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def differences(by_rank: Sequence[Sequence[Fingerprint]], kinds: Sequence[str]) -> list[Difference]:
    """Compares the ranks' fingerprints.

    Args:
        by_rank: the fingerprints of each rank; kind and name are unique on a rank.
        kinds: the kinds in the order of the answer.

    Returns:
        What differs: kind by kind, and in each kind in the order in which rank 0 lists its entries, then those that
        only other ranks have.
    """
    tables = [{(item.kind, item.name): item for item in items} for items in by_rank]
    found = []
    for kind, name in dict.fromkeys(key for table in tables for key in table):
        groups: dict[Fingerprint | None, list[int]] = {}
        for rank, table in enumerate(tables):
            groups.setdefault(table.get((kind, name)), []).append(rank)
        if len(groups) > 1:
            found.append(Difference(kind, name, tuple((item, tuple(ranks)) for item, ranks in groups.items())))
    return sorted(found, key=lambda difference: kinds.index(difference.kind))
