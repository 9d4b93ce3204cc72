"""The resolved plan of a run: what the settings amount to, before anything is started.

All numbers are computed from sizes alone; the model may live on the meta device.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from ddp_plugin.errors import explain
from ddp_plugin.learning_rate import EffectiveBatch, num_accumulated_for
from ddp_plugin.planning.described import DescribedRun
from ddp_plugin.planning.memory import PRECISIONS, activation_bytes, memory_bytes

__all__ = [
    "Plan",
    "activation_bytes",
    "compute_dtype",
    "count_parameters",
    "effective_batch",
    "memory_bytes",
    "num_processes",
    "process_layout",
    "resolve_precision",
    "stored_dtype",
    "table",
]


@dataclass(frozen=True)
class Plan:
    """What a run will do.

    Attributes:
        name: the recipe and its model, in words.
        batch: samples of an optimizer step, over all processes.
        learning_rate: peak learning rate, after any scaling.
        num_steps: optimizer steps.
        num_warmup_steps: of these, steps with a rising learning rate.
        num_parameters: trainable and frozen parameters, shared ones once.
        precision: as Lightning names it.
        memory: bytes per process by what they hold, see :func:`memory_bytes`.
        units_per_sample: tokens or images in one sample.
        unit: what is counted, in the plural.
    """

    name: str
    batch: EffectiveBatch
    learning_rate: float
    num_steps: int
    num_warmup_steps: int
    num_parameters: int
    precision: str
    memory: dict[str, int]
    units_per_sample: int = 1
    unit: str = "samples"

    @property
    def units_per_step(self) -> int:
        """Tokens or images per optimizer step, over all processes."""
        return self.batch.total * self.units_per_sample

    @property
    def num_units(self) -> int:
        """Tokens or images of the whole run."""
        return self.units_per_step * self.num_steps

    @property
    def memory_total_bytes(self) -> int:
        """Bytes per process of everything in :attr:`memory`."""
        return sum(self.memory.values())

    def described(
        self,
        settings: DictConfig,
        make_network: Callable[[], nn.Module],
        make_loss: Callable[[nn.Module, torch.device], Callable[[], Tensor]],
        optimizer: str,
    ) -> DescribedRun:
        """Returns the same in the words of ``ddp-plugin plan``; see :class:`DescribedRun` for the arguments."""
        chosen, strategy = settings.trainer, settings.strategy
        ranks_per_node, num_nodes = process_layout(chosen.accelerator, chosen.devices, chosen.num_nodes)
        return DescribedRun(
            name=self.name,
            make_network=make_network,
            make_loss=make_loss,
            precision=self.precision,
            optimizer=optimizer,
            batch=self.batch,
            device_type="cpu" if chosen.accelerator == "cpu" else "cuda",
            ranks_per_node=ranks_per_node,
            num_nodes=num_nodes,
            activations_bytes=self.memory["activations"],
            comm_hook=OmegaConf.to_object(strategy.comm_hook)
            if OmegaConf.is_config(strategy.comm_hook)
            else strategy.comm_hook,
            bucket_cap_mb=strategy.bucket_cap_mb,
            gradient_as_bucket_view=bool(strategy.gradient_as_bucket_view),
        )

    def __str__(self) -> str:
        per_step = f" = {self.units_per_step:,} {self.unit}" if self.units_per_sample > 1 else ""
        parts = ", ".join(f"{name} {_mib(size)}" for name, size in self.memory.items() if size)
        rows = [
            ("model", f"{self.name}, {self.num_parameters:,} parameters, precision {self.precision}"),
            (
                "effective batch",
                f"{self.batch.batch_size} per process x {self.batch.num_processes} processes x "
                f"{self.batch.num_accumulated} accumulated = {self.batch.total:,} samples{per_step}",
            ),
            ("learning rate", f"{self.learning_rate:g} at its peak, after {self.num_warmup_steps:,} steps of warm-up"),
            ("length", f"{self.num_steps:,} steps, {self.num_units:,} {self.unit}"),
            ("memory per process", f"{_mib(self.memory_total_bytes)} at least ({parts})"),
        ]
        return table(rows)


def table(rows: list[tuple[str, str]]) -> str:
    """Puts labels and texts below each other."""
    return "\n".join(f"  {label:<20}{text}" for label, text in rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def count_parameters(module: nn.Module) -> int:
    """Returns the number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def process_layout(accelerator: str, devices: int | str, num_nodes: int) -> tuple[int, int]:
    """Returns how many processes run on each node, and on how many nodes.

    Args:
        accelerator: ``"cpu"``, ``"cuda"``, ``"gpu"`` or ``"auto"``.
        devices: processes per node; ``"auto"`` or ``-1`` means as many as torchrun has started here, and without it
            each GPU of this machine, or one process without GPUs.
        num_nodes: machines; ``-1`` means those of torchrun, and this one without it.

    Raises:
        ValueError: a count below one, or torchrun has started unequal numbers of processes on its nodes.

    Collectives:
        None.
    """
    is_launched = torch.distributed.is_available() and torch.distributed.is_torchelastic_launched()
    num_started = int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched else 0
    if devices in ("auto", -1, "-1"):
        devices = num_started or (max(1, torch.cuda.device_count()) if accelerator != "cpu" else 1)
    if num_nodes == -1:
        world_size = int(os.environ["WORLD_SIZE"]) if is_launched else num_started
        if is_launched and world_size % num_started:
            raise ValueError(
                explain(
                    "as many processes on each node, which Lightning asks for",
                    f"{num_started} of {world_size} on this one",
                    "Give torchrun the same --nproc-per-node everywhere",
                )
            )
        num_nodes = world_size // num_started if is_launched else 1
    if not isinstance(devices, int) or devices < 1 or num_nodes < 1:
        raise ValueError(
            explain(
                "trainer.devices and trainer.num_nodes to be at least 1, or -1",
                f"devices={devices!r}, num_nodes={num_nodes!r}",
                "Give the number of processes per node and of nodes",
            )
        )
    return devices, num_nodes


def num_processes(accelerator: str, devices: int | str, num_nodes: int) -> int:
    """Returns how many processes the Trainer will run; see :func:`process_layout`."""
    devices, num_nodes = process_layout(accelerator, devices, num_nodes)
    return devices * num_nodes


def effective_batch(settings: DictConfig) -> EffectiveBatch:
    """Returns the samples of an optimizer step; ``trainer.global_batch_size`` decides how much is accumulated for it.

    Raises:
        ValueError: ``trainer.accumulate`` is given too, the batch cannot be made up, or a count is below one.

    Collectives:
        None.
    """
    chosen = settings.trainer
    processes = num_processes(chosen.accelerator, chosen.devices, chosen.num_nodes)
    if chosen.global_batch_size is None:
        return EffectiveBatch(chosen.batch_size, processes, chosen.accumulate)
    if chosen.accumulate != 1:
        raise ValueError(
            explain(
                "trainer.accumulate=1 beside trainer.global_batch_size, which decides it",
                f"trainer.accumulate={chosen.accumulate} and trainer.global_batch_size={chosen.global_batch_size}",
                "Give one of the two",
            )
        )
    accumulated = num_accumulated_for(chosen.global_batch_size, chosen.batch_size, processes)
    return EffectiveBatch(chosen.batch_size, processes, accumulated)


def resolve_precision(precision: str, accelerator: str) -> str:
    """Returns the precision by Lightning's name; ``"auto"`` is bf16 on a GPU that has it and fp32 elsewhere.

    Raises:
        ValueError: a precision that the plan does not know.

    Collectives:
        None.
    """
    if precision == "auto":
        on_gpu = accelerator != "cpu" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        precision = "bf16-mixed" if on_gpu else "32-true"
    if precision not in PRECISIONS:
        known = ["auto", *PRECISIONS]
        raise ValueError(explain(f"trainer.precision to be one of {known}", repr(precision), "Choose one of these"))
    return precision


def compute_dtype(precision: str) -> torch.dtype:
    """Returns the type of activations and matrix products in a resolved precision.

    Raises:
        KeyError: a precision that :func:`resolve_precision` would refuse.

    Collectives:
        None.
    """
    return PRECISIONS[precision][1]


def stored_dtype(precision: str) -> torch.dtype:
    """Returns the type that weights have from the beginning of a run in a resolved precision.

    Lightning converts a module only after it has loaded a checkpoint: what is float64 there would pass through a module
    in float32, and lose half its digits.

    Raises:
        KeyError: a precision that :func:`resolve_precision` would refuse.

    Collectives:
        None.
    """
    return PRECISIONS[precision][0]
