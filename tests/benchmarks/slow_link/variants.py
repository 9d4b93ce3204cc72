"""Everything that is compared: no communication, DDP as it comes, torch's own hooks, and every hook in the table."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.hooks import HOOKS, CommHook, Contents, resolve_hook

__all__ = ["BASELINE", "REFERENCE", "Variant", "choose", "kind_of", "variants"]

BASELINE, REFERENCE = "noop", "CustomDDPStrategy"
LOCAL_PERIOD = 16

# What a hook is given here; by default, nothing. Real runs take longer periods: these show some exchanges in few steps.
HOOK_OPTIONS: dict[str, dict[str, Any]] = {
    "noop": {"for_measuring": True},
    "powersgd": {"start_step": 2},  # when it is timed; see Variant.for_losses
    "topk": {"density": 0.01, "start_step": 2},
    "hierarchical": {"ranks_per_node": 1, "between": "int8"},
    "local_sgd": {"period": LOCAL_PERIOD, "start_step": 2},
    "diloco": {"period": LOCAL_PERIOD, "start_step": 2},
}
SMALL_BUCKETS = ("powersgd", "topk")


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: in the table and on the command line.
        loop: ``"plain"`` for a loop in plain torch, ``"lightning"`` for Lightning's ``DDPStrategy``, ``"custom"`` for
            ours.
        comm_hook: what ours is given.
        register: gives a torch hook to the wrap, and returns the optimizer to step with.
        ddp: settings of the wrap.
        period: steps between exchanges.
        start_step: exchanges before its own way begins.
        not_run: why it is left out, in words; ``None`` where it runs.
    """

    name: str
    loop: str
    comm_hook: Mapping[str, Any] | None = None
    register: Callable[[DistributedDataParallel, torch.optim.Optimizer], Any] | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    period: int = 1
    start_step: int = 0
    not_run: str | None = None

    def for_losses(self, num_steps: int) -> "Variant":
        """Returns the variant as it is judged by its loss: exact for half of the steps, if it begins so at all."""
        if self.comm_hook is None or "start_step" not in self.comm_hook:
            return self
        start_step = num_steps // 2
        return replace(self, comm_hook={**self.comm_hook, "start_step": start_step}, start_step=start_step)

    @property
    def hook(self) -> CommHook | None:
        """The record that its declared bytes come from; DDP without a hook sends what ``allreduce`` does."""
        if self.loop == "custom" and self.comm_hook is not None:
            return resolve_hook(self.comm_hook)
        return HOOKS["allreduce"]() if self.register is None else None


def kind_of(variant: Variant) -> str:
    """Returns ``"none"``, ``"exact"``, ``"lossy"``, ``"periodic"`` or ``"torch"``.

    A hook is exact where its own bound allows a few roundings of fp32 and no more.
    """
    if variant.name == BASELINE:
        return "none"
    if variant.register is not None:
        return "torch"
    hook = variant.hook
    if hook is None or hook.period > 1:
        return "periodic"
    contents = Contents(("weight",), ((32, 32),), torch.float32)
    bound = hook.error_bound(torch.ones(2, contents.num_elements), contents)
    return "exact" if float(bound.max()) < 100 * torch.finfo(torch.float32).eps and not hook.start_step else "lossy"


def _bf16_by_another_name(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(state, bucket)


def _stateless(hook: Any) -> Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]:
    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
        model.register_comm_hook(None, hook)
        return optimizer

    return register


def _powersgd(hook: Any) -> Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]:
    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=4, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
        )
        model.register_comm_hook(state, hook)
        return optimizer

    return register


def _quantized(hook: Any) -> Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]:
    def register(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
        model.register_comm_hook(model.process_group, hook)
        return optimizer

    return register


def _post_local_sgd(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer  # warns about torch itself when imported

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(LOCAL_PERIOD, warmup_steps=2))


ONE_BUCKET = {"bucket_cap_mb": 1024}  # torch's PowerSGD takes no second one on gloo
TORCH_VARIANTS = (
    Variant("torch fp16", "plain", register=_stateless(default_hooks.fp16_compress_hook)),
    Variant("torch bf16", "plain", register=_stateless(default_hooks.bf16_compress_hook)),
    Variant("torch bf16, renamed", "plain", register=_stateless(_bf16_by_another_name)),
    Variant(
        "torch PowerSGD, one bucket",
        "plain",
        register=_powersgd(powerSGD_hook.powerSGD_hook),
        ddp=ONE_BUCKET,
        start_step=2,
    ),
    Variant(
        "torch PowerSGD",
        "plain",
        not_run="left out: with two or more buckets on gloo it hangs, or aborts when the ranks' collectives meet in "
        "another order, because it starts collectives inside of callbacks",
    ),
    Variant(
        "torch batched PowerSGD",
        "plain",
        register=_powersgd(powerSGD_hook.batched_powerSGD_hook),
        ddp=ONE_BUCKET,
        start_step=2,
    ),
    Variant("torch int8, per tensor", "plain", register=_quantized(quantization_hooks.quantization_pertensor_hook)),
    Variant("torch int8, per channel", "plain", register=_quantized(quantization_hooks.quantization_perchannel_hook)),
    Variant("torch post-local SGD", "plain", register=_post_local_sgd, period=LOCAL_PERIOD, start_step=2),
)


def _of_hook(name: str) -> Variant:
    spec = {"name": name, **HOOK_OPTIONS.get(name, {})}
    try:
        hook = resolve_hook(spec)
    except (ValueError, TypeError) as error:
        return Variant(name, "custom", not_run=f"refused: {error}")
    return Variant(name, "custom", comm_hook=spec, period=hook.period, start_step=hook.start_step)


def variants() -> dict[str, Variant]:
    """Returns all variants by name, the baseline first."""
    listed = [
        _of_hook(BASELINE),
        Variant("torch DDP", "plain"),
        Variant("Lightning DDPStrategy", "lightning"),
        Variant(REFERENCE, "custom"),
        *(_of_hook(name) for name in HOOKS if name != BASELINE),
        # More and smaller buckets than DDP's: the last of them, which no backward hides any more, is small as well.
        *(replace(_of_hook(name), name=f"{name}, 4 MiB buckets", ddp={"bucket_cap_mb": 4}) for name in SMALL_BUCKETS),
        *TORCH_VARIANTS,
    ]
    return {variant.name: variant for variant in listed}


def choose(names: Iterable[str] | None) -> dict[str, Variant]:
    """Returns the variants of these names, with the baseline; all of them for ``None``.

    Raises:
        ValueError: there is no variant of that name.
    """
    known = variants()
    if names is None:
        return known
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no variant {unknown[0]!r}; there are: {', '.join(known)}")
    return {name: known[name] for name in names}
