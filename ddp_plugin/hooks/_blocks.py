"""Eight or four bits for a number: blocks of numbers that share a scale, packed into bytes.

A scale for each block keeps one huge element from rounding all others to zero. Scales travel as bf16, which has fp32's
range, inside the same bytes as the numbers, so a block is one message. A block that holds a NaN or an infinity has a
scale that is none, and decodes to NaN: no integer could say so.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

__all__ = ["CODECS", "BlockCodec", "Float8", "Int4", "Int8"]

_SCALE_BYTES = 2
# Below this a bf16 scale has too few bits of its own: such a block is rounded to zero.
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal


class BlockCodec(ABC):
    """Turns blocks of numbers into bytes and back.

    Attributes:
        largest: the largest magnitude that a number may have in units of its block's scale.
        half_step: bound on the rounding of one number, relative to the largest of its block.
    """

    largest: ClassVar[float]
    half_step: ClassVar[float]

    @abstractmethod
    def num_bytes(self, block_size: int) -> int:
        """Bytes of a block, with its scale.

        Args:
            block_size: numbers in a block; even.
        """

    @abstractmethod
    def _pack(self, scaled: torch.Tensor) -> torch.Tensor:
        """Rounds numbers in units of the scale, and returns their bytes, the last dimension packed."""

    @abstractmethod
    def _unpack(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns numbers in units of the scale."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Rounds and packs.

        Args:
            values: shape ``(..., block_size)``, floating; one block in the last dimension, whose size is even.

        Returns:
            uint8, shape ``(..., num_bytes(block_size))``.
        """
        low, high = values.aminmax(dim=-1, keepdim=True)
        scale = torch.maximum(-low, high).mul_(1.0 / self.largest).to(torch.bfloat16)
        scale.masked_fill_(scale < _SMALLEST_SCALE, 0.0)
        inverse = torch.where(scale == 0, 0.0, scale.to(values.dtype).reciprocal())
        return torch.cat((self._pack(values * inverse), scale.view(torch.uint8)), dim=-1)

    def decode(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Unpacks.

        Args:
            payload: what :meth:`encode` returned.
            dtype: dtype of the numbers.

        Returns:
            Shape ``(..., block_size)``; all NaN for a block that was not finite.
        """
        scale = payload[..., -_SCALE_BYTES:].clone().view(torch.bfloat16).to(dtype)
        return self._unpack(payload[..., :-_SCALE_BYTES], dtype).mul_(scale)

    def bound(self, largest_of_block: torch.Tensor) -> torch.Tensor:
        """Returns the bound on the rounding of any number of a block, from the block's largest magnitude."""
        return (largest_of_block * self.half_step).clamp(min=_SMALLEST_SCALE * self.largest * 1.01)


class Int8(BlockCodec):
    """Whole numbers from -127 to 127."""

    largest = 127.0
    half_step = 0.5 / 127.0 * (1 + 2.0**-8)  # the scale itself is rounded to bf16

    def num_bytes(self, block_size: int) -> int:
        """See :meth:`BlockCodec.num_bytes`."""
        return block_size + _SCALE_BYTES

    def _pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round_().to(torch.int8).view(torch.uint8)

    def _unpack(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return payload.view(torch.int8).to(dtype)


class Int4(BlockCodec):
    """Whole numbers from -7 to 7, two in a byte."""

    largest = 7.0
    half_step = 0.5 / 7.0 * (1 + 2.0**-8)

    def num_bytes(self, block_size: int) -> int:
        """See :meth:`BlockCodec.num_bytes`."""
        return block_size // 2 + _SCALE_BYTES

    def _pack(self, scaled: torch.Tensor) -> torch.Tensor:
        whole = scaled.round_().to(torch.int8).view(torch.uint8)
        first, second = whole.chunk(2, dim=-1)
        return (first << 4) | (second & 0xF)

    def _unpack(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        signed = payload.view(torch.int8)  # shifting it right keeps the sign
        return torch.cat((signed >> 4, (payload << 4).view(torch.int8) >> 4), dim=-1).to(dtype)


class Float8(BlockCodec):
    """Floating-point numbers, e4m3: 4 bits of exponent, 3 of mantissa; finer where a block has small numbers."""

    largest = 448.0
    half_step = 2.0**-4

    def num_bytes(self, block_size: int) -> int:
        """See :meth:`BlockCodec.num_bytes`."""
        return block_size + _SCALE_BYTES

    def _pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8)

    def _unpack(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return payload.contiguous().view(torch.float8_e4m3fn).to(dtype)


CODECS: dict[str, BlockCodec] = {"int8": Int8(), "int4": Int4(), "fp8": Float8()}
"""The codecs by name."""
