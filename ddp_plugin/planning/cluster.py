"""Processes on nodes, with one link inside a node and another between nodes."""

from dataclasses import dataclass

from ddp_plugin.collectives.cost import Link, predict
from ddp_plugin.errors import check_count

__all__ = ["Cluster"]


@dataclass(frozen=True)
class Cluster:
    """Where a run takes place.

    Attributes:
        num_nodes: machines.
        ranks_per_node: processes on each, one for each GPU.
        inside: joins the ranks of a node.
        between: joins nodes; the ranks of a node share it.

    Raises:
        ValueError: a count below 1.
    """

    num_nodes: int
    ranks_per_node: int
    inside: Link
    between: Link

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes, 1)
        check_count("ranks_per_node", self.ranks_per_node, 1)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that an exchange among all ranks uses; it waits for the slowest.

        A ring that visits node after node crosses each node's border once, so the whole border serves it alone.
        """
        inside = (self.inside,) if self.ranks_per_node > 1 or self.num_nodes == 1 else ()
        return inside + ((self.between,) if self.num_nodes > 1 else ())

    def exact_s(self, num_bytes: float) -> float:
        """Returns how long an all-reduce takes with the better of a ring and a double tree, as NCCL chooses by size."""
        return min(self.all_reduce_s("ring", num_bytes), self.all_reduce_s("double_tree", num_bytes))

    def all_reduce_s(self, algorithm: str, num_bytes: float) -> float:
        """Returns how long an all-reduce among all ranks takes, in seconds; see :func:`~..collectives.cost.predict`."""
        return max(predict(link, algorithm, self.world_size, num_bytes) for link in self.links)
