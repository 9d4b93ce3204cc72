"""Matrices of low rank, as rows: the kernels of PowerSGD.

A factor of rank ``r`` is kept as ``r`` long rows, shape ``(r, length)``, never as ``r`` thin columns: matrix products
with it then read the large matrix along its memory, which on a CPU is four to ten times as fast.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Matrix", "Packing", "orthonormal_rows", "starting_rows"]


@dataclass(frozen=True)
class Matrix:
    """A parameter in a flat tensor, seen as a matrix: its first dimension by all others.

    Attributes:
        name: the parameter's.
        start: where in the flat tensor it begins.
        num_rows: its first dimension; output features or channels.
        num_columns: the product of all other dimensions.
    """

    name: str
    start: int
    num_rows: int
    num_columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the view of shape ``(num_rows, num_columns)``."""
        stop = self.start + self.num_rows * self.num_columns
        return flat[self.start : stop].view(self.num_rows, self.num_columns)


@dataclass(frozen=True)
class Packing:
    """Which parts of a flat tensor travel as two factors, and which as they are.

    Attributes:
        matrix_rank: rows of each factor.
        groups: the matrices that are compressed; those of one shape stand together.
        dense: the other parts as ``(start, stop)``, neighbours joined.
    """

    matrix_rank: int
    groups: tuple[tuple[Matrix, ...], ...]
    dense: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, names: Sequence[str], shapes: Sequence[tuple[int, ...]], matrix_rank: int, min_compression_ratio: float
    ) -> "Packing":
        """Divides parameters that lie behind one another.

        Args:
            names: of the parameters.
            shapes: their shapes.
            matrix_rank: of the factors.
            min_compression_ratio: at least 1; a matrix stays as it is unless both its factors together have at least
                this many times fewer elements.
        """
        by_shape: dict[tuple[int, int], list[Matrix]] = {}
        dense: list[tuple[int, int]] = []
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            stop = start + math.prod(shape)
            num_rows, num_columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
            if num_rows * num_columns >= min_compression_ratio * matrix_rank * (num_rows + num_columns) > 0:
                by_shape.setdefault((num_rows, num_columns), []).append(Matrix(name, start, num_rows, num_columns))
            elif dense and dense[-1][1] == start:
                dense[-1] = (dense[-1][0], stop)
            else:
                dense.append((start, stop))
            start = stop
        return cls(matrix_rank, tuple(tuple(group) for group in by_shape.values()), tuple(dense))

    @property
    def num_dense(self) -> int:
        """Elements that travel as they are."""
        return sum(stop - start for start, stop in self.dense)

    @property
    def num_left(self) -> int:
        """Elements of all left factors, one entry per row of each matrix and rank."""
        return self.matrix_rank * sum(len(group) * group[0].num_rows for group in self.groups)

    @property
    def num_right(self) -> int:
        """Elements of all right factors, one entry per column of each matrix and rank."""
        return self.matrix_rank * sum(len(group) * group[0].num_columns for group in self.groups)

    def split_left(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each group the view ``(len(group), rank, num_rows)`` of a tensor of ``num_left`` elements."""
        return self._split(flat, [group[0].num_rows for group in self.groups])

    def split_right(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns for each group the view ``(len(group), rank, num_columns)`` of one of ``num_right`` elements."""
        return self._split(flat, [group[0].num_columns for group in self.groups])

    def _split(self, flat: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        sizes = [len(group) * self.matrix_rank * length for group, length in zip(self.groups, lengths, strict=True)]
        parts = torch.split(flat, sizes) if sizes else ()
        return [
            part.view(len(group), self.matrix_rank, length)
            for part, group, length in zip(parts, self.groups, lengths, strict=True)
        ]


def orthonormal_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns orthonormal rows whose span contains the given ones, for each matrix of a batch.

    Householder's reflections give them whatever the rank: where rows depend on others, or are zero, the missing
    directions are filled with some that are orthogonal to the rest. So no threshold is needed, nothing is divided by a
    norm that may be zero, and LAPACK takes any scale, from the smallest normal number to the largest.

    Args:
        rows: shape ``(batch, rank, length)`` with ``rank <= length``, fp32 or fp64.

    Returns:
        Contiguous, the same shape and dtype; all NaN for a matrix that was not finite, whatever LAPACK would do.

    Reference:
        A. S. Householder, Unitary triangularization of a nonsymmetric matrix, J. ACM 5, 1958.
    """
    is_finite = rows.abs().amax(dim=(1, 2), keepdim=True).isfinite()
    orthonormal = torch.linalg.qr(torch.where(is_finite, rows, 0.0).mT).Q.mT
    return torch.where(is_finite, orthonormal, torch.nan).contiguous()


def starting_rows(name: str, matrix_rank: int, length: int, seed: int) -> torch.Tensor:
    """Returns orthonormal random rows, the same ones wherever this is called with the same arguments.

    Args:
        name: of the parameter; each has a random stream of its own.
        matrix_rank: number of rows, at most ``length``.
        length: of a row.
        seed: of all streams.

    Returns:
        Shape ``(matrix_rank, length)``, float64, on the CPU.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return orthonormal_rows(torch.randn(1, matrix_rank, length, generator=generator, dtype=torch.float64))[0]
