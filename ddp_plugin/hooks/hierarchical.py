"""Two levels: full precision inside a node, where the links are fast, and any other hook between the nodes.

The ranks of a node share out the gradient. Each adds up its shard of all of them, exchanges that with the ranks that
hold the same shard on the other nodes, and gives the result to its neighbours. So every value leaves a node once, all
ranks of a node send at the same time, and only what leaves the node is compressed.

What the hook between the nodes leaves out is passed on. It belongs to a node's mean and lies with one of its ``L``
ranks, so it counts ``L`` times there, and the mean over all ranks is what is missing.

Reference:
    X. Jia et al., Highly scalable deep learning training system with mixed-precision: training ImageNet in four
    minutes, 2018 (hierarchical all-reduce).
"""

import itertools
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin import _compat
from ddp_plugin.collectives.schedules import piece_bounds
from ddp_plugin.errors import check_count, explain
from ddp_plugin.hooks._contents import Contents
from ddp_plugin.hooks._exchange import Exchange
from ddp_plugin.hooks._record import CommHook
from ddp_plugin.hooks._resolve import HookSpec, resolve_inner
from ddp_plugin.hooks.exact import AllReduce, all_reduce_bytes, summation_error
from ddp_plugin.matching import fingerprint
from ddp_plugin.process_group import HeldGroup, node_groups

__all__ = ["TwoLevel", "bytes_between_nodes", "hierarchical", "shard_bounds"]


class TwoLevel(Exchange):
    """The exchange; see the module. On one node it is an all-reduce, and with one rank a node it is ``between``.

    Args:
        group: the ranks, node after node.
        between: what makes a mean over the nodes.
        ranks_per_node: how many ranks follow one another on a node; as the launcher says when ``None``.

    Raises:
        ValueError: on all ranks, where the ranks do not lie like that.

    Collectives:
        One small all-gather, and making a group for each node and for each rank of a node, on every rank of the group;
        what ``between`` makes for itself.
    """

    def __init__(self, group: dist.ProcessGroup, between: CommHook, ranks_per_node: int | None) -> None:
        super().__init__(group)
        self.local_size = _local_size(ranks_per_node, self.world_size)
        _check_nodes(group, self.local_size)
        self._needs_matrices = between.needs_matrices
        self._shards: dict[Contents, tuple[list[int], Contents | None]] = {}
        self._node: HeldGroup | None = None
        self._between: Exchange
        if self.local_size == self.world_size:
            self._between = AllReduce(group)
        elif self.local_size == 1:
            self._between = between.make_exchange(group)
        else:
            node, peers = node_groups(group, self.local_size)
            self._node = HeldGroup(node)
            self._between = between.make_exchange(peers)
        self.leaves_error = self._between.leaves_error

    def mean_(self, values: torch.Tensor, contents: Contents, error: torch.Tensor | None = None) -> None:
        """See :meth:`Exchange.mean_`.

        Collectives:
            An all-to-all inside the node, those of ``between`` over the ranks that hold the same shard, and another
            all-to-all inside the node, by which each rank gives its shard to all.
        """
        if self._node is None:
            self._between.mean_(values, contents, error)
            return
        # All shards have their own sizes, so parameters can stay whole; an all-gather would want equal ones.
        sizes, shard = self._shard_of(contents)
        own = sizes[self.rank % self.local_size]
        start = sum(sizes[: self.rank % self.local_size])
        received = values.new_empty(self.local_size, own)
        scaled = values.mul(1.0 / self.local_size)
        dist.all_to_all_single(received.view(-1), scaled, [own] * self.local_size, sizes, group=self._node())
        mean = received.sum(dim=0)
        if error is not None:
            error.zero_()
        if shard is not None:
            left = torch.empty_like(mean) if error is not None else None
            self._between.mean_(mean, shard, left)
            if error is not None and left is not None:
                torch.mul(left, self.local_size, out=error[start : start + own])
        dist.all_to_all_single(values, mean.repeat(self.local_size), sizes, [own] * self.local_size, group=self._node())

    def _shard_of(self, contents: Contents) -> tuple[list[int], Contents | None]:
        """Returns the sizes of all shards, and what this rank's own is; ``None`` where it is empty."""
        if contents not in self._shards:
            local_rank = self.rank % self.local_size
            bounds = shard_bounds(contents, self.local_size, self._needs_matrices)
            shard = _shard_contents(contents, bounds[local_rank], bounds[local_rank + 1], self._needs_matrices)
            self._shards[contents] = ([stop - start for start, stop in itertools.pairwise(bounds)], shard)
        return self._shards[contents]

    def state(self) -> dict[str, Any]:
        """Returns what ``between`` remembers, of all shards; each is known to one rank of a node.

        Collectives:
            An object gather inside the node, on every rank.
        """
        own = self._between.state()
        if self._node is None:
            return own
        of_ranks: list[Any] = [None] * self.local_size
        dist.all_gather_object(of_ranks, own, group=self._node())
        united: dict[str, Any] = {}
        for state in of_ranks:
            _unite(united, state)
        return united

    def load(self, state: dict[str, Any]) -> None:
        """Takes it back; ``between`` finds its own shard's part by the parameters' names."""
        if state:
            self._between.load(state)


def shard_bounds(contents: Contents, num_shards: int, whole_parameters: bool) -> list[int]:
    """Divides a flat gradient into consecutive shards, as equal as they can be.

    Args:
        contents: what it holds.
        num_shards: how many.
        whole_parameters: whether a shard ends only where a parameter ends; it may then be far larger than another.

    Returns:
        Where each shard begins, and the end of the last one: ``num_shards + 1`` positions.
    """
    even = list(piece_bounds(contents.num_elements, num_shards))
    if not whole_parameters:
        return even
    ends = [0, *itertools.accumulate(math.prod(shape) for shape in contents.shapes)]
    return [0, *(min(ends, key=lambda end: abs(end - ideal)) for ideal in even[1:-1]), contents.num_elements]


def _shard_contents(contents: Contents, start: int, stop: int, whole_parameters: bool) -> Contents | None:
    if start == stop:
        return None
    if not whole_parameters:
        name = f"{contents.names[0]}..{contents.names[-1]}[{start}:{stop}]"
        return Contents((name,), ((stop - start,),), contents.dtype)
    ends = list(itertools.accumulate(math.prod(shape) for shape in contents.shapes))
    inside = [index for index, end in enumerate(ends) if start < end <= stop]
    names, shapes = contents.names, contents.shapes
    return Contents(tuple(names[i] for i in inside), tuple(shapes[i] for i in inside), contents.dtype)


def _unite(united: dict[str, Any], state: Mapping[str, Any]) -> None:
    """Adds to a dictionary what another one has beside it, down to the innermost."""
    for key, value in state.items():
        if isinstance(value, dict):
            _unite(united.setdefault(key, {}), value)
        else:
            united.setdefault(key, value)


# --------------------------------------------------------------------------------------------------- who lies where


def _local_size(ranks_per_node: int | None, world_size: int) -> int:
    """Returns how many ranks a node has.

    Raises:
        ValueError: nobody says, or it does not divide the number of ranks.
    """
    if world_size == 1:
        return 1
    told = os.environ.get("LOCAL_WORLD_SIZE") if ranks_per_node is None else str(ranks_per_node)
    if told is None:
        raise ValueError(
            explain(
                "ranks_per_node=, because this launcher does not set LOCAL_WORLD_SIZE as torchrun does",
                "None",
                "Write {'name': 'hierarchical', 'ranks_per_node': ...}",
            )
        )
    if world_size % int(told):
        raise ValueError(
            explain(
                f"a number of ranks that {told} ranks per node divide, as many on each node",
                f"{world_size}",
                "Start as many processes on every node, or use another hook",
            )
        )
    return int(told)


def _check_nodes(group: dist.ProcessGroup, local_size: int) -> None:
    """Looks whether each ``local_size`` ranks that follow one another are on one node, on all ranks alike.

    Collectives:
        One all-gather of two integers on every rank of the group; none on one rank.
    """
    if group.size() == 1:
        return
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"  # torchrun's name for its agent on a node
    served = _compat.served_device_types(group)
    device = torch.device("cpu") if not served or "cpu" in served else torch.device(sorted(served)[0])
    message = torch.tensor([fingerprint(node), local_size], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(message) for _ in range(group.size())]
    dist.all_gather(gathered, message, group=group)
    rows = torch.stack(gathered).tolist()
    sizes = sorted({size for _, size in rows})
    if len(sizes) > 1:
        raise ValueError(
            explain("as many ranks on every node", f"nodes with {sizes} ranks", "Start as many processes on every node")
        )
    for first in range(0, group.size(), local_size):
        nodes = [rows[rank][0] for rank in range(first, first + local_size)]
        if len(set(nodes)) > 1:
            raise ValueError(
                explain(
                    f"ranks {first} to {first + local_size - 1} on one node, as ranks_per_node={local_size} says",
                    f"them on {len(set(nodes))} nodes",
                    "Number the ranks node by node, and give the number of processes on each as ranks_per_node",
                )
            )


# -------------------------------------------------------------------------------------------------------- the record


def bytes_between_nodes(
    contents: Contents, world_size: int, rank: int, between: CommHook, ranks_per_node: int | None = None
) -> int:
    """Bytes that one rank sends to other nodes in one exchange.

    Args:
        contents: the flat gradient.
        world_size: number of ranks.
        rank: the rank.
        between: the hook between the nodes.
        ranks_per_node: as in :func:`hierarchical`.
    """
    local_size = _local_size(ranks_per_node, world_size)
    if local_size == world_size:
        return 0
    bounds = shard_bounds(contents, local_size, between.needs_matrices)
    start, stop = bounds[rank % local_size], bounds[rank % local_size + 1]
    shard = contents if local_size == 1 else _shard_contents(contents, start, stop, between.needs_matrices)
    return between.wire_bytes(shard, world_size // local_size, rank // local_size) if shard is not None else 0


def _wire_bytes(contents: Contents, world_size: int, rank: int, between: CommHook, ranks_per_node: int | None) -> int:
    """All bytes that a rank sends, inside its node as well."""
    local_size = _local_size(ranks_per_node, world_size)
    if local_size == world_size:
        return all_reduce_bytes(contents, world_size, rank)
    bounds = shard_bounds(contents, local_size, between.needs_matrices)
    own = bounds[rank % local_size + 1] - bounds[rank % local_size]
    num_inside = contents.num_elements - own + (local_size - 1) * own
    return num_inside * contents.element_size_bytes + bytes_between_nodes(
        contents, world_size, rank, between, ranks_per_node
    )


def _error_bound(
    gradients: torch.Tensor, contents: Contents, between: CommHook, ranks_per_node: int | None
) -> torch.Tensor:
    """The bound of ``between`` on the nodes' means, which are rounded, and that rounding."""
    world_size = gradients.shape[0]
    local_size = _local_size(ranks_per_node, world_size)
    rounding = summation_error(gradients, contents)
    if local_size == world_size:
        return rounding
    if local_size == 1:
        return between.error_bound(gradients, contents)
    means = gradients.to(torch.float64).view(world_size // local_size, local_size, -1).mean(dim=1)
    bound = torch.zeros_like(rounding)
    for start, stop in itertools.pairwise(shard_bounds(contents, local_size, between.needs_matrices)):
        shard = _shard_contents(contents, start, stop, between.needs_matrices)
        if shard is None:
            continue
        # Once for the means, and once for the largest that they may be after rounding.
        part, slack = means[:, start:stop], rounding[:, start:stop]
        of_part = between.error_bound(part, shard).amax(dim=0)
        of_largest = between.error_bound(part.abs() + slack, shard).amax(dim=0)
        bound[0, start:stop] = torch.maximum(of_part, of_largest)
    return bound + rounding


def hierarchical(between: HookSpec = "allreduce", ranks_per_node: int | None = None) -> CommHook:
    """Full precision inside a node, another hook between the nodes.

    Each rank sends ``2 (L - 1) / L`` of the gradient inside its node of ``L`` ranks, and what ``between`` sends of
    ``1 / L`` of it to other nodes; :func:`bytes_between_nodes` gives the latter alone. A hook that compresses matrices
    gets whole parameters as its share, so one parameter that is most of a bucket is most of one rank's share.

    Args:
        between: the hook between the nodes, as for ``comm_hook``; not one that exchanges parameters, nor this one.
        ranks_per_node: how many ranks a node has, or how many neighbours share a fast link; as ``LOCAL_WORLD_SIZE``,
            which torchrun sets, when ``None``.

    Raises:
        ValueError: an option out of its range; when the model is wrapped, on all ranks: ranks that do not lie node
            after node, or nodes with unequal numbers of them.

    Collectives:
        Two all-to-alls inside the node and those of ``between`` for each bucket, in the lane, all ranks in the same
        order; one all-reduce on a single node; until its ``start_step`` one all-reduce.
    """
    if ranks_per_node is not None:
        check_count("ranks_per_node", ranks_per_node, 1)
    inner = resolve_inner(between, "hierarchical", "hierarchical")
    levels: dict[str, Any] = {"between": inner, "ranks_per_node": ranks_per_node}
    return replace(
        inner,
        name="hierarchical",
        make_exchange=partial(TwoLevel, **levels),
        wire_bytes=partial(_wire_bytes, **levels),
        error_bound=partial(_error_bound, **levels),
        is_direct=False,
        between=inner,
        options={"between": str(inner), "ranks_per_node": ranks_per_node},
    )
