"""The settings: plain dataclasses that OmegaConf, Hydra and LightningCLI read as they stand.

Only ``str``, ``float`` seconds, ``bool``, ``int`` and containers of them appear here, because those are the types that
every supported OmegaConf version takes in a structured config. ``None`` always means "not given".
"""

from dataclasses import dataclass, fields
from typing import Any

from ddp_plugin.errors import explain

__all__ = ["START_METHODS", "NcclOptions", "StrategyConfig"]

START_METHODS = ("popen", "spawn", "fork", "forkserver")
"""How Lightning may start the other processes of a node, by name."""


@dataclass
class NcclOptions:
    """Options of the NCCL process group, one field for each that ``ProcessGroupNCCL.Options`` offers.

    A field left at ``None`` is not touched. A field that the installed torch or NCCL does not know raises when the
    process group is made; nothing is dropped silently. None of these has been run on this project's hardware yet.

    Attributes:
        high_priority_stream: run the all-reduce kernels on a high-priority CUDA stream, ahead of queued backward
            kernels. The first thing to try on A100s.
        blocking: ``1`` for blocking communicators, ``0`` for non-blocking ones; affects start-up and abort only.
        min_ctas: least number of thread blocks a collective may use (each occupies one SM).
        max_ctas: most thread blocks a collective may use; fewer leave more SMs to the model.
        cga_cluster_size: thread-block cluster size; Hopper and later.
        split_share: ``1`` shares resources with the group that a group was split from.
        net_name: name of the NCCL network plugin, such as ``"IB"`` or ``"Socket"``.
        comm_name: name of the communicator in NCCL's own logs.
        traffic_class: network traffic class, for RoCE or InfiniBand with quality of service.
        collnet_enable: ``1`` allows in-network reduction (SHARP).
        cta_policy: NCCL's policy for choosing thread blocks.
        shrink_share: ``1`` shares resources when a communicator is shrunk.
        nvls_ctas: thread blocks for NVLink SHARP; Hopper and later.
    """

    high_priority_stream: bool | None = None
    blocking: int | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    split_share: int | None = None
    net_name: str | None = None
    comm_name: str | None = None
    traffic_class: int | None = None
    collnet_enable: int | None = None
    cta_policy: int | None = None
    shrink_share: int | None = None
    nvls_ctas: int | None = None

    def __post_init__(self) -> None:
        for name in ("min_ctas", "max_ctas", "cga_cluster_size", "nvls_ctas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    explain(f"NcclOptions.{name} to be at least 1", repr(value), "Leave it out or raise it")
                )
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(
                explain(
                    "NcclOptions.min_ctas <= NcclOptions.max_ctas",
                    f"min_ctas={self.min_ctas} and max_ctas={self.max_ctas}",
                    "Lower min_ctas or raise max_ctas",
                )
            )

    def given(self) -> dict[str, Any]:
        """Returns the options that were set, by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


@dataclass
class StrategyConfig:
    """Every plain setting of :class:`~ddp_plugin.CustomDDPStrategy`, as an OmegaConf structured config.

    ``CustomDDPStrategy.from_config`` takes an instance, a dict or a ``DictConfig``. The meaning of each field is in the
    strategy's own docstring; only the timeout has another unit here.

    Attributes:
        timeout_s: timeout of the process group's collectives, in seconds.
    """

    comm_hook: Any = None
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: list[int] | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None
    gradient_as_bucket_view: bool | None = None
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool | None = None
    skip_all_reduce_unused_params: bool | None = None
    batched_grad_copy: bool | None = None
    logical_shards: int | None = None
    checkpoint_on_stop: bool = False
    process_group_backend: str | None = None
    timeout_s: float = 1800.0
    start_method: str = "popen"
    nccl: NcclOptions | None = None
