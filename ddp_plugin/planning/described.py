"""What a training script says of its run before it starts, so that a plan need not be told the same again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_plugin.learning_rate import EffectiveBatch
from ddp_plugin.planning.memory import PRECISIONS
from ddp_plugin.planning.traced import Trace, trace_step
from ddp_plugin.scripts import ask_script

__all__ = ["DescribedRun", "describe_script"]


@dataclass(frozen=True)
class DescribedRun:
    """A run as its settings have it.

    Attributes:
        name: of the model, in words.
        make_network: builds what is trained, on torch's default device.
        make_loss: of a network and its device, returns what runs the forward of one micro-batch, of random data of the
            right shapes, and returns the loss.
        precision: key in :data:`~ddp_plugin.planning.memory.PRECISIONS`.
        optimizer: key in :data:`~ddp_plugin.planning.memory.OPTIMIZERS`.
        batch: samples of an optimizer step.
        device_type: where it trains: ``"cpu"`` or ``"cuda"``.
        ranks_per_node: processes on each node.
        num_nodes: nodes.
        activations_bytes: saved for the backward of one micro-batch.
        comm_hook: as for ``CustomDDPStrategy``; ``None`` for DDP's own all-reduce.
        bucket_cap_mb: size of a bucket in mebibytes; ``None`` is torch's default.
        gradient_as_bucket_view: whether gradients live in the buckets.
    """

    name: str
    make_network: Callable[[], nn.Module]
    make_loss: Callable[[nn.Module, torch.device], Callable[[], Tensor]]
    precision: str
    optimizer: str
    batch: EffectiveBatch
    device_type: str
    ranks_per_node: int
    num_nodes: int
    activations_bytes: int = 0
    comm_hook: Any = None
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each trainable parameter by name; nothing is allocated."""
        with torch.device("meta"):
            network = self.make_network()
        return {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}

    def trace(self) -> Trace | None:
        """Runs a micro-batch here; ``None`` where the run's device is not in this machine.

        Collectives:
            None.
        """
        if self.device_type == "cuda" and not torch.cuda.is_available():
            return None
        stored, computed = PRECISIONS[self.precision]
        device = torch.device(self.device_type)
        network = self.make_network().to(device, stored)
        loss = self.make_loss(network, device)

        def in_precision() -> Tensor:
            with torch.autocast(device.type, computed, enabled=computed != stored):
                return loss()

        return trace_step(network, in_precision)


def describe_script(path: Path, arguments: Sequence[str]) -> DescribedRun:
    """Imports a training script, without running it, and asks its ``describe_run``.

    Args:
        path: of the script; modules beside it can be imported, as when it is run.
        arguments: its command line, without the program's name.

    Raises:
        ValueError: there is no such script, it does not describe runs, or it refuses the arguments.

    Collectives:
        None.
    """
    return ask_script(path, "describe_run", arguments, DescribedRun)
