"""Top-k: only the largest elements of a gradient travel, with their positions; the others wait in the error feedback.

The number that travels is fixed for each bucket, so that one all-gather takes them. Its volume grows with the number of
ranks: ``n`` ranks receive ``n - 1`` times what one sends, so this is a hook for few ranks.

Reference:
    A. F. Aji and K. Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; D. Alistarh et al.,
    The convergence of sparsified gradient methods, NeurIPS 2018.
"""

import math
from functools import partial

import torch
import torch.distributed as dist

from ddp_plugin.collectives.pairwise import all_gather
from ddp_plugin.errors import check_count, explain
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange
from ddp_plugin.hooks._feedback import working_dtype
from ddp_plugin.hooks._record import CommHook, all_gather_bytes
from ddp_plugin.hooks.exact import summation_error

__all__ = ["LargestElements", "largest_positions", "num_sent", "topk"]

_SAMPLE_STRIDE = 61  # a prime, so that samples do not all fall into a few columns of a matrix
_MIN_SAMPLED = 2**15  # below this many elements torch.topk is faster than looking for a threshold


def num_sent(num_elements: int, density: float) -> int:
    """Returns how many of a bucket's elements one rank sends: the given part, rounded up, and at least one."""
    return min(num_elements, max(1, math.ceil(density * num_elements)))


def largest_positions(values: torch.Tensor, num: int) -> torch.Tensor:
    """Returns the positions of the elements with the largest magnitudes, in no particular order; NaN is the largest.

    On a CPU, where a full selection is slow, a sample first gives a magnitude that somewhat more elements reach than
    are wanted, and the selection is made among those. Where the sample was wrong, it is made among all.

    Args:
        values: shape ``(num_elements,)``.
        num: how many, at least 1 and at most all.

    Returns:
        int64, shape ``(num,)``, each position once. Which one of equal magnitudes is taken depends on the values alone.
    """
    magnitudes = values.abs()
    if values.device.type == "cpu" and len(values) >= _MIN_SAMPLED and 8 * num <= len(values):
        sample = magnitudes[::_SAMPLE_STRIDE]
        expected = num / _SAMPLE_STRIDE
        rank = min(len(sample), math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4))
        threshold = sample.topk(rank, sorted=False).values.min()
        candidates = (magnitudes < threshold).logical_not_().nonzero().squeeze(1)  # so NaN is among them
        if len(candidates) >= num:
            return candidates[magnitudes[candidates].topk(num, sorted=False).indices]
    return magnitudes.topk(num, sorted=False).indices


class LargestElements(Exchange):
    """One all-gather of values and positions, added up in the order of the ranks.

    Args:
        group: the ranks.
        density: part of a bucket's elements that a rank sends.
    """

    leaves_error = True

    def __init__(self, group: dist.ProcessGroup, density: float) -> None:
        super().__init__(group)
        self.density = density

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`; where a rank sends nothing finite, there may be more of that: all becomes NaN.

        Collectives:
            One all-gather on every rank of the group.
        """
        assert error is not None
        if self.world_size == 1:
            error.zero_()
            return
        num = num_sent(len(values), self.density)
        positions = largest_positions(values, num)
        sent = values[positions] * (1.0 / self.world_size)
        error.copy_(values).index_fill_(0, positions, 0.0)

        position_dtype = _position_dtype(len(values))
        own = torch.cat([sent.view(torch.uint8), positions.to(position_dtype).view(torch.uint8)])
        by_rank = own.new_empty(self.world_size, len(own))
        all_gather(by_rank, own, self.group)
        num_value_bytes = num * sent.element_size()
        # Copied before they are seen as what they are: a view has to be aligned.
        all_sent = by_rank[:, :num_value_bytes].contiguous().view(values.dtype)
        all_positions = by_rank[:, num_value_bytes:].contiguous().view(position_dtype)

        has_more = all_sent.isfinite().any(dim=1).logical_not().any()
        values.copy_(torch.where(has_more, torch.nan, 0.0))
        for rank_positions, rank_sent in zip(all_positions, all_sent, strict=True):
            values.index_add_(0, rank_positions, rank_sent)  # each position once, so the order is that of the ranks


def _position_dtype(num_elements: int) -> torch.dtype:
    return torch.int32 if num_elements <= 2**31 else torch.int64


def _wire_bytes(contents: Contents, world_size: int, rank: int, density: float) -> int:
    num_elements = contents.num_elements
    size_bytes = working_dtype(contents.dtype).itemsize + _position_dtype(num_elements).itemsize
    return all_gather_bytes(num_sent(num_elements, density) * size_bytes, world_size)


def _error_bound(gradients: torch.Tensor, contents: Contents, density: float) -> torch.Tensor:
    """What a rank does not send is at most as large as the smallest that it sends; that is missing, and no more."""
    num_elements = contents.num_elements
    magnitudes = gradients.to(torch.float64).abs()
    num = num_sent(num_elements, density)
    bound = summation_error(gradients, contents)
    if num < num_elements:
        smallest = magnitudes.topk(num, dim=1).values[:, -1:]
        bound += torch.where(magnitudes <= smallest, magnitudes, 0.0).mean(dim=0, keepdim=True)
    return bound


def topk(density: float = 0.05, start_step: int = 200) -> CommHook:
    """The largest elements with error feedback: about ``2 n density`` of the bytes that ``n`` ranks send in fp32.

    Args:
        density: part of each bucket's elements that travels, above 0 and at most 1; at least one element does.
        start_step: number of first steps with the exact mean; see :func:`~ddp_plugin.hooks.powersgd.powersgd`.

    Raises:
        ValueError: an option out of its range.

    Collectives:
        One all-gather per bucket, in the lane, all ranks in the same order; until ``start_step`` one all-reduce of the
        whole gradient.
    """
    if not 0 < density <= 1:
        raise ValueError(explain("density above 0 and at most 1", repr(density), "Give a part, such as 0.01"))
    check_count("start_step", start_step, 0)
    return CommHook(
        "topk",
        partial(LargestElements, density=density),
        partial(_wire_bytes, density=density),
        partial(_error_bound, density=density),
        start_step=start_step,
        options={"density": density, "start_step": start_step},
    )
