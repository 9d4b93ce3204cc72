"""What a gradient bucket holds, by name: the key to everything that a hook remembers.

DDP builds its buckets again after the first step, after a change of what is trainable, and in a run with other bucket
sizes. Positions in a bucket mean nothing across that; the names of parameters do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

__all__ = ["Contents"]


@dataclass(frozen=True)
class Contents:
    """The parameters whose gradients lie behind one another in a flat tensor.

    Attributes:
        names: names of the parameters, in the order in which they lie there.
        shapes: their shapes; a complex parameter counts as a real one with a last dimension of 2.
        dtype: dtype of the flat tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(
        cls, parameters: Sequence[torch.Tensor], names: Mapping[int, str], dtype: torch.dtype | None = None
    ) -> "Contents":
        """Describes parameters.

        Args:
            parameters: in the order in which they lie in the flat tensor; at least one.
            names: name of each, by ``id``.
            dtype: dtype of the flat tensor; that of the parameters when ``None``.
        """
        shapes = tuple(
            (*parameter.shape, 2) if parameter.is_complex() else (*parameter.shape,) for parameter in parameters
        )
        if dtype is None:
            first = parameters[0]
            dtype = torch.view_as_real(first).dtype if first.is_complex() else first.dtype
        return cls(tuple(names[id(parameter)] for parameter in parameters), shapes, dtype)

    @cached_property
    def num_elements(self) -> int:
        """Number of elements of the flat tensor."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def element_size_bytes(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def split(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields ``(name, view)`` for each parameter, the views in the parameters' shapes.

        Args:
            flat: shape ``(num_elements,)``.
        """
        parts = torch.split(flat, [math.prod(shape) for shape in self.shapes])
        for name, shape, part in zip(self.names, self.shapes, parts, strict=True):
            yield name, part.view(shape)
