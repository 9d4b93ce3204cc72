"""PowerSGD: a gradient's matrix travels as two thin factors, and what they cannot tell is sent later.

With ``M`` a rank's matrix and ``Q`` what the last exchange found, one exchange makes one step of the power method for
the mean of all ranks: ``P`` is the mean of ``M Q`` with its columns made orthonormal, ``Q`` becomes the mean of
``M^T P``, and the result is ``P Q^T``, the mean matrix projected onto the columns of ``P``. A rank has left out
``M - P (M^T P)^T``, the rest of its own projection: the mean over the ranks is the same as with the mean ``Q``, but it
is never longer than ``M``, however far the ranks are apart.

Reference:
    T. Vogels, S. P. Karimireddy and M. Jaggi, PowerSGD: practical low-rank gradient compression for distributed
    optimization, NeurIPS 2019.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin.errors import check_count, explain
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange
from ddp_plugin.hooks._feedback import working_dtype
from ddp_plugin.hooks._low_rank import Matrix, Packing, orthonormal_rows, starting_rows
from ddp_plugin.hooks._record import CommHook, ring_bytes
from ddp_plugin.hooks.exact import summation_error

__all__ = ["LowRank", "powersgd"]


class LowRank(Exchange):
    """Two all-reduces: of the left factors with all that is not compressed, then of the right factors.

    Args:
        group: the ranks.
        matrix_rank: rank of the factors.
        warm_start: whether an exchange begins with what the last one found; else with new random rows each time.
        seed: of the random rows.
        min_compression_ratio: see :meth:`Packing.of`.
    """

    leaves_error = True

    def __init__(
        self, group: dist.ProcessGroup, matrix_rank: int, warm_start: bool, seed: int, min_compression_ratio: float
    ) -> None:
        super().__init__(group)
        self.matrix_rank = matrix_rank
        self.warm_start = warm_start
        self.seed = seed
        self.min_compression_ratio = min_compression_ratio
        self._packings: dict[Contents, Packing] = {}
        self._right: dict[str, torch.Tensor] = {}  # by parameter: orthonormal rows, (matrix_rank, num_columns)
        self._num_draws: dict[str, int] = {}

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`; a matrix that is not finite on some rank becomes all NaN.

        Collectives:
            One all-reduce, and a second one where something is compressed, on every rank of the group.
        """
        assert error is not None
        if self.world_size == 1:
            error.zero_()
            return
        packing = self._packing_of(contents)
        right = [[self._right_of(matrix, values) for matrix in group] for group in packing.groups]

        message = values.new_empty(packing.num_dense + packing.num_left)
        dense, left_flat = message[: packing.num_dense], message[packing.num_dense :]
        if packing.dense:
            torch.cat([values[start:stop] for start, stop in packing.dense], out=dense)
        lefts = packing.split_left(left_flat)
        for group, left, rows in zip(packing.groups, lefts, right, strict=True):
            for matrix, out, row in zip(group, left, rows, strict=True):
                torch.mm(row, matrix.of(values).T, out=out)
        dist.all_reduce(message.mul_(1.0 / self.world_size), group=self.group)
        for start, stop in packing.dense:
            values[start:stop].copy_(dense[: stop - start])
            error[start:stop].zero_()
            dense = dense[stop - start :]
        if not packing.groups:
            return

        lefts = [orthonormal_rows(left) for left in lefts]
        own_flat = values.new_empty(packing.num_right)
        owns = packing.split_right(own_flat)
        for group, left, own in zip(packing.groups, lefts, owns, strict=True):
            for matrix, p, q in zip(group, left, own, strict=True):
                torch.mm(p, matrix.of(values), out=q)
                torch.addmm(matrix.of(values), p.T, q, alpha=-1.0, out=matrix.of(error))
        mean_flat = own_flat.mul_(1.0 / self.world_size)
        dist.all_reduce(mean_flat, group=self.group)
        means = packing.split_right(mean_flat)
        for group, left, mean, rows in zip(packing.groups, lefts, means, right, strict=True):
            for matrix, p, q in zip(group, left, mean, strict=True):
                torch.mm(p.T, q, out=matrix.of(values))
            if self.warm_start:
                self._keep(group, mean, torch.stack(rows))

    def _packing_of(self, contents: Contents) -> Packing:
        if contents not in self._packings:
            self._packings[contents] = Packing.of(
                contents.names, contents.shapes, self.matrix_rank, self.min_compression_ratio
            )
        return self._packings[contents]

    def _right_of(self, matrix: Matrix, like: torch.Tensor) -> torch.Tensor:
        """Returns the rows to begin with; the same on all ranks, as all that they come from is."""
        name, shape = matrix.name, (self.matrix_rank, matrix.num_columns)
        rows = self._right.get(name)
        if rows is not None and rows.shape == shape:  # else the parameter was replaced by another
            return rows.to(like)
        num_draws = self._num_draws.get(name, 0)
        stream = f"{name} {num_draws}"
        rows = starting_rows(stream, *shape, self.seed).to(like)
        if not self.warm_start:
            self._num_draws[name] = num_draws + 1
        return rows

    def _keep(self, group: tuple[Matrix, ...], mean: torch.Tensor, before: torch.Tensor) -> None:
        """Remembers the right factors, except where there was no gradient, or one that was not finite."""
        largest = mean.abs().amax(dim=(1, 2), keepdim=True)
        rows = torch.where((largest > 0) & largest.isfinite(), orthonormal_rows(mean), before)
        self._right.update(zip((matrix.name for matrix in group), rows, strict=True))

    def state(self) -> dict[str, Any]:
        """Returns the right factors by parameter, and how often random rows were drawn."""
        return {
            "right": {name: rows.cpu().clone() for name, rows in self._right.items()},
            "num_draws": dict(self._num_draws),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes them back; parameters that are new, or of another shape or rank, begin with random rows."""
        self._right = dict(state["right"])
        self._num_draws = dict(state["num_draws"])


def _wire_bytes(contents: Contents, world_size: int, rank: int, pack: partial[Packing]) -> int:
    packing, size_bytes = pack(contents.names, contents.shapes), working_dtype(contents.dtype).itemsize
    return ring_bytes(packing.num_dense + packing.num_left, size_bytes, world_size) + ring_bytes(
        packing.num_right, size_bytes, world_size
    )


def _error_bound(gradients: torch.Tensor, contents: Contents, pack: partial[Packing]) -> torch.Tensor:
    """The result is the mean matrix, projected: no column loses more than its own length, so no element does.

    Roundings come on top: those of products as long as a column, relative to the ranks' columns, which may cancel in
    the mean, and that of the result in the gradient's own dtype.
    """
    bound = summation_error(gradients, contents)
    packing = pack(contents.names, contents.shapes)
    gradients = gradients.to(torch.float64)
    work, own = torch.finfo(working_dtype(contents.dtype)), torch.finfo(contents.dtype)
    for matrix in (matrix for group in packing.groups for matrix in group):
        local = torch.stack([matrix.of(gradient) for gradient in gradients])
        scale = local.abs().amax().clamp(min=torch.finfo(torch.float64).smallest_normal)
        local = local / scale  # or the squares in a norm would leave float64's range
        lost = scale * local.mean(dim=0).norm(dim=0)
        rounded = (scale * local.norm(dim=1).mean(dim=0)).clamp(min=work.smallest_normal)
        num_roundings = 4 * (matrix.num_rows + packing.matrix_rank + len(gradients))
        column = lost + num_roundings * work.eps * rounded + own.eps * lost.clamp(min=own.smallest_normal)
        matrix.of(bound[0])[:] = column
    return bound


def powersgd(
    matrix_rank: int = 4,
    start_step: int = 200,
    warm_start: bool = True,
    seed: int = 0,
    min_compression_ratio: float = 2.0,
) -> CommHook:
    """PowerSGD with error feedback: about ``rank (rows + columns) / (rows columns)`` of a matrix's bytes.

    Parameters of two and more dimensions are matrices, first dimension by all others; what has one dimension, or is too
    small to gain, travels as it is. A mean gradient of at most that rank arrives whole, up to rounding.

    Args:
        matrix_rank: rank of the factors; bytes and, nearly, quality grow with it.
        start_step: number of first steps with the exact mean. What changes fast in the beginning suffers most from
            being sent late, under AdamW in particular; a tenth of the run, or the warm-up of the learning rate and as
            much again, is a good part.
        warm_start: whether each exchange begins with the factor that the last one found, which makes the exchanges of
            a slowly changing gradient steps of one power method.
        seed: of the factors to begin with.
        min_compression_ratio: a matrix is compressed where that makes it at least this many times smaller.

    Raises:
        ValueError: an option out of its range.

    Collectives:
        One all-reduce per bucket, and a second one where it has a matrix to compress, in the lane, all ranks in the
        same order; until ``start_step`` one all-reduce of the whole gradient.
    """
    check_count("matrix_rank", matrix_rank, 1)
    check_count("start_step", start_step, 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(explain("an integer as seed", repr(seed), "Give one"))
    if not min_compression_ratio >= 1:
        raise ValueError(
            explain("min_compression_ratio of at least 1", repr(min_compression_ratio), "Raise it; 2 is the default")
        )
    pack = partial(Packing.of, matrix_rank=matrix_rank, min_compression_ratio=min_compression_ratio)
    options: Mapping[str, Any] = {
        "matrix_rank": matrix_rank,
        "warm_start": warm_start,
        "seed": seed,
        "min_compression_ratio": min_compression_ratio,
    }
    return CommHook(
        "powersgd",
        partial(LowRank, **options),
        partial(_wire_bytes, pack=pack),
        partial(_error_bound, pack=pack),
        start_step=start_step,
        needs_matrices=True,
        options={**options, "start_step": start_step},
    )
