"""Eight or four bits on the wire both ways: a quantised all-to-all, a sum in full precision, and its all-gather.

Each rank owns one part of the bucket. It receives all ranks' bytes for its part, adds them up in full precision, and
sends the sum to all, in as few bits again. Integers are never added on the wire, where they would wrap. Everyone,
the owner included, goes on with the decoded bytes, so that the result has the same bits on all ranks.

Both roundings leave an error, and one tensor holds them: a rank's own values for its own part cross no wire and are not
rounded, so there is room, in its part, for what the sum was rounded by.

Reference:
    G. Wang et al., ZeRO++: extremely efficient collective communication for giant model training, 2023 (the exchange);
    T. Dettmers, 8-bit approximations for parallelism in deep learning, ICLR 2016.
"""

from functools import partial

import torch
import torch.distributed as dist

from ddp_plugin.collectives.pairwise import all_gather, all_to_all
from ddp_plugin.errors import check_count, explain
from ddp_plugin.hooks._blocks import CODECS, BlockCodec
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange
from ddp_plugin.hooks._feedback import working_dtype
from ddp_plugin.hooks._record import CommHook, all_gather_bytes, largest_magnitude

__all__ = ["TwoShot", "fp8", "int4", "int8"]


class TwoShot(Exchange):
    """The exchange; see the module.

    Args:
        group: the ranks.
        codec: how blocks become bytes.
        block_size: numbers that share a scale, at most; even.
        error_feedback: whether roundings are left for later.
    """

    def __init__(self, group: dist.ProcessGroup, codec: BlockCodec, block_size: int, error_feedback: bool) -> None:
        super().__init__(group)
        self.leaves_error = error_feedback
        self._codec = codec
        self._block_size = block_size

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`.

        Collectives:
            One all-to-all and one all-gather of bytes, on every rank; none for one rank.
        """
        if self.world_size == 1:
            if error is not None:
                error.zero_()
            return
        codec, rank, num_elements = self._codec, self.rank, values.numel()
        if not num_elements:
            return
        own, values = values, values.to(working_dtype(values.dtype))
        num_blocks, block_size = _blocks(num_elements, self.world_size, self._block_size)
        parts = values.new_zeros(self.world_size, num_blocks, block_size)
        parts.view(-1)[:num_elements] = values

        sent = codec.encode(parts)
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.group)
        decoded = codec.decode(received, values.dtype)
        decoded[rank] = parts[rank]
        mean = decoded.sum(dim=0).mul_(1.0 / self.world_size)

        sums = codec.encode(mean[None])
        gathered = torch.empty_like(sent)
        all_gather(gathered, sums, self.group)
        result = codec.decode(gathered, values.dtype)
        own.copy_(result.view(-1)[:num_elements])
        if error is not None:
            left = parts.sub_(codec.decode(sent, values.dtype))
            left[rank] = mean.sub_(result[rank]).mul_(self.world_size)
            error.copy_(left.view(-1)[:num_elements])


def _blocks(num_elements: int, world_size: int, block_size: int) -> tuple[int, int]:
    """Returns how many blocks each rank owns, and how many numbers a block has: fewer where there are few numbers."""
    of_rank = -(-num_elements // world_size)
    block_size = min(block_size, of_rank + of_rank % 2)
    return -(-of_rank // block_size), block_size


def _wire_bytes(contents: Contents, world_size: int, rank: int, codec: BlockCodec, block_size: int) -> int:
    num_blocks, block_size = _blocks(contents.num_elements, world_size, block_size)
    part_bytes = num_blocks * codec.num_bytes(block_size)
    return (world_size - 1) * part_bytes + all_gather_bytes(part_bytes, world_size)


def _error_bound(gradients: torch.Tensor, contents: Contents, codec: BlockCodec, block_size: int) -> torch.Tensor:
    num_blocks, block_size = _blocks(gradients.shape[1], gradients.shape[0], block_size)
    padded = largest_magnitude(gradients).new_zeros(gradients.shape[0] * num_blocks * block_size)
    padded[: gradients.shape[1]] = largest_magnitude(gradients)[0]
    largest = padded.view(-1, block_size).amax(dim=1, keepdim=True)
    first = codec.bound(largest)
    bounds = first + codec.bound(largest + first)
    return bounds.expand(-1, block_size).reshape(1, -1)[:, : gradients.shape[1]]


def _record(name: str, block_size: int, error_feedback: bool) -> CommHook:
    check_count("block_size", block_size, 2)
    if block_size % 2:
        raise ValueError(
            explain(f"block_size of comm_hook={name!r} to be an even number of at least 2", repr(block_size), "Use 256")
        )
    codec = CODECS[name]
    return CommHook(
        name,
        partial(TwoShot, codec=codec, block_size=block_size, error_feedback=error_feedback),
        partial(_wire_bytes, codec=codec, block_size=block_size),
        partial(_error_bound, codec=codec, block_size=block_size),
        options={"block_size": block_size, "error_feedback": error_feedback},
    )


def int8(block_size: int = 256, error_feedback: bool = True) -> CommHook:
    """Eight-bit integers with a scale per block: a quarter of fp32's bytes.

    Args:
        block_size: gradient elements that share a scale; even.
        error_feedback: whether roundings are added to the next step's gradient; costs 4 bytes per parameter.

    Raises:
        ValueError: an odd block size.

    Collectives:
        One all-to-all and one all-gather per bucket on a group of their own, in the lane, on all ranks.
    """
    return _record("int8", block_size, error_feedback)


def int4(block_size: int = 64, error_feedback: bool = True) -> CommHook:
    """Four-bit integers with a scale per block: 13 % of fp32's bytes; see :func:`int8`.

    Args:
        block_size: gradient elements that share a scale; even.
        error_feedback: whether roundings are added to the next step's gradient; costs 4 bytes per parameter.

    Raises:
        ValueError: an odd block size.

    Collectives:
        As :func:`int8`.
    """
    return _record("int4", block_size, error_feedback)


def fp8(block_size: int = 256, error_feedback: bool = True) -> CommHook:
    """Eight-bit floating point (e4m3) with a scale per block: for gradients with heavy tails; see :func:`int8`.

    Args:
        block_size: gradient elements that share a scale; even.
        error_feedback: whether roundings are added to the next step's gradient; costs 4 bytes per parameter.

    Raises:
        ValueError: an odd block size.

    Collectives:
        As :func:`int8`.
    """
    return _record("fp8", block_size, error_feedback)
