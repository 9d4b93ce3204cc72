"""The process group, started with the options that were asked for, and the small group beside it."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.strategies import DDPStrategy

from ddp_plugin import _compat, process_group
from ddp_plugin.config import NcclOptions
from ddp_plugin.errors import explain

__all__ = ["OwnGroup"]


class OwnGroup(DDPStrategy):
    """Starts the process group with its options, and the control group beside it."""

    _nccl: NcclOptions | None = None
    _timeout: timedelta | None
    _store: Any = None  # through which the processes find each other; torch makes one where there is none

    @property
    def is_interrupted(self) -> bool:
        """Whether this rank has left the run by an exception, of which the others may know nothing."""
        module = self.lightning_module
        try:
            return module is not None and module.trainer.interrupted
        except RuntimeError:  # a run that was refused before the module had its Trainer
            return False

    @property
    def control_group(self) -> dist.ProcessGroup:
        """The gloo group for small control messages, never on the gradient's path; made by ``setup_environment``."""
        return process_group.control_group(self._timeout)

    def setup_distributed(self) -> None:
        """Starts the process group with the options asked for, and the control group beside it.

        Raises:
            ValueError: ``nccl`` was given and the backend turned out to be another one.

        Collectives:
            Group creation, on all ranks.
        """
        _compat.reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend = self._get_process_group_backend()
        options: dict[str, Any] = {"timeout": self._timeout}
        if self.root_device.type != "cpu":
            options["device_id"] = self.root_device
        if self._nccl is not None:
            if "nccl" not in backend:
                raise ValueError(
                    explain(
                        "the NCCL backend, because nccl=NcclOptions(...) was given",
                        f"backend {backend!r} for {self.root_device.type} devices",
                        "Remove nccl= here",
                    )
                )
            options["pg_options"] = self._nccl_group_options()
        if self._store is not None:
            options["store"] = self._store
        existed = dist.is_initialized()
        _compat.init_process_group(self.cluster_environment, backend, **options)
        process_group.destroy_at_exit()
        differences = process_group.settings_in_force(backend, self._timeout)
        if existed and self._nccl is not None:
            differences.append(f"{self._nccl} was asked for, the group keeps the options it was made with")
        for difference in differences:
            whose = (
                "A process group existed before this Trainer started" if existed else "The new process group differs"
            )
            rank_zero_warn(f"{whose}: {difference}.")
        process_group.control_group(self._timeout)

    def _nccl_group_options(self) -> Any:
        """Returns the options for another NCCL group, or ``None`` where none were asked for."""
        return None if self._nccl is None else process_group.nccl_process_group_options(self._nccl, self._timeout)
