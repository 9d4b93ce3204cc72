"""The effective batch, and learning rates that follow it."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddp_plugin.errors import explain
from ddp_plugin.learning_rate import (
    RULES,
    SCHEDULES,
    EffectiveBatch,
    RateSchedule,
    check_scheduler,
    refresh_last_rates,
    require_count,
    scale_adam,
    scale_optimizer,
    scale_ratio,
    scale_scheduler,
)

__all__ = ["ScaleLearningRate"]

WARMUP_ORIGINS = ("zero", "base")

_scaled: WeakSet[Optimizer] = WeakSet()  # so that an optimizer that outlives its fit is scaled once


class ScaleLearningRate(Callback):
    """Prints and logs the effective batch, and makes the learning rates of a base batch those of the effective one.

    The effective batch is per process x processes x accumulation: 4 x 8 x 8 = 256. Without arguments it is only printed
    and logged. With ``base_batch_size`` every learning rate that ``configure_optimizers`` gave is taken as right for
    that many samples in a step and is scaled by ``rule``: all parameter groups of all optimizers, and the schedulers of
    torch, whose curves become the scaled curves.

    Scaling happens once, at the start of training. A resumed run keeps the rates of its checkpoint, also where the
    effective batch is another one now; a warning then names both. A second ``fit`` with new optimizers scales those.

    Without a scheduler of your own, ``warmup_steps`` and ``schedule`` add one, stepped after each optimizer step. With
    ``w`` warm-up steps out of ``T``, the rate relative to the scaled one is 0 at step 0, 1/2 at ``w / 2``, 1 at ``w``
    and ``final_ratio`` at ``T``. With ``warmup_from="base"`` the warm-up starts at the unscaled rate, as Goyal et al.
    2017 (arXiv 1706.02677) do it: ``1 / k`` at step 0 for a rate that was scaled by ``k``.

    Args:
        base_batch_size: samples per optimizer step for which the configured learning rates are right; ``None`` scales
            nothing.
        rule: ``"linear"`` (SGD), ``"sqrt"`` (Adam and its kin) or ``"none"``; see
            :func:`~ddp_plugin.learning_rate.scale_ratio`.
        warmup_steps: optimizer steps of a linear warm-up.
        schedule: ``"constant"`` or ``"cosine"`` after the warm-up; ``None`` means constant where there is a warm-up,
            and else that the rates are left to you.
        total_steps: optimizer steps at whose end the cosine is down; ``None`` takes those of the Trainer.
        final_ratio: where the cosine ends, as a part of the scaled rate.
        batch_size: samples in the micro-batch of one process, where the loader does not tell.
        scale_adam_hyperparameters: with ``rule="sqrt"``, scale betas and eps as well; see
            :func:`~ddp_plugin.learning_rate.scale_adam`.
        warmup_from: ``"zero"`` or ``"base"``.

    Raises:
        ValueError: at construction, a name that does not exist, a number out of range, or an argument that would have
            no effect; at the start of ``fit``, settings that contradict the model's, such as a schedule beside a
            scheduler of your own.

    Collectives:
        One all-reduce of two numbers at the start of training, on all ranks.
    """

    def __init__(
        self,
        base_batch_size: int | None = None,
        rule: str = "linear",
        warmup_steps: int = 0,
        schedule: str | None = None,
        total_steps: int | None = None,
        final_ratio: float = 0.0,
        batch_size: int | None = None,
        scale_adam_hyperparameters: bool = False,
        warmup_from: str = "zero",
    ) -> None:
        for name, value, names in (("rule", rule, RULES), ("warmup_from", warmup_from, WARMUP_ORIGINS)):
            if value not in names:
                raise ValueError(explain(f"{name} to be one of {names}", repr(value), "Choose one of these"))
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(explain(f"schedule to be one of {SCHEDULES}", repr(schedule), "Choose one of these"))
        for name, count in (
            ("base_batch_size", base_batch_size),
            ("total_steps", total_steps),
            ("batch_size", batch_size),
        ):
            if count is not None:
                require_count(name, count)
        if warmup_steps != 0:
            require_count("warmup_steps", warmup_steps)
            schedule = schedule or "constant"
        without_effect = {
            f"rule={rule!r} without base_batch_size": rule == "sqrt" and base_batch_size is None,
            "scale_adam_hyperparameters without rule='sqrt'": scale_adam_hyperparameters and rule != "sqrt",
            "warmup_from='base' without base_batch_size and warmup_steps": warmup_from == "base"
            and not (base_batch_size and warmup_steps),
            "total_steps without schedule='cosine'": total_steps is not None and schedule != "cosine",
            "final_ratio without schedule='cosine'": final_ratio != 0 and schedule != "cosine",
        }
        for description, is_so in without_effect.items():
            if is_so:
                raise ValueError(
                    explain("arguments that have an effect", description, "Add what is missing, or remove it")
                )
        self.base_batch_size = base_batch_size
        self.rule = rule
        self.warmup_steps = warmup_steps
        self.schedule = schedule
        self.total_steps = total_steps
        self.final_ratio = final_ratio
        self.batch_size = batch_size
        self.scale_adam_hyperparameters = scale_adam_hyperparameters
        self.warmup_from = warmup_from
        if schedule is not None:
            self._curve(ratio=1.0, total_steps=total_steps or warmup_steps + 1)  # raises where it cannot be built
        self.effective_batch: EffectiveBatch | None = None
        self._applied: dict[str, Any] | None = None
        self._loaded: dict[str, Any] | None = None

    # -------------------------------------------------------------------------------------------------------- stages

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forgets the run before; a checkpoint is loaded after this."""
        if stage != "fit":
            return
        self.effective_batch = self._applied = self._loaded = None
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        changes_batch = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
        if changes_batch and (self.base_batch_size is not None or self.schedule is not None):
            raise ValueError(
                explain(
                    "one effective batch for the whole run, because the learning rate is scaled once",
                    "a GradientAccumulationScheduler, which changes it",
                    "Use Trainer(accumulate_grad_batches=...), or ScaleLearningRate() without arguments",
                )
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the schedule's place, so that a checkpoint finds it, and refuses what cannot be scaled."""
        if self.base_batch_size is not None and self.rule != "none":
            for config in trainer.lr_scheduler_configs:
                check_scheduler(config.scheduler)
                self._refuse_cycled_betas(config.scheduler)
        if self.schedule is None:
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                explain(
                    "automatic optimization beside warmup_steps or schedule",
                    f"{type(pl_module).__name__} with manual optimization, where Lightning steps no scheduler",
                    "Use ddp_plugin.learning_rate.RateSchedule in a LambdaLR of your own",
                )
            )
        if trainer.lr_scheduler_configs:
            raise ValueError(
                explain(
                    "warmup_steps and schedule, or a scheduler of your own",
                    f"both: {type(trainer.lr_scheduler_configs[0].scheduler).__name__} from configure_optimizers",
                    "Remove one of the two",
                )
            )
        for optimizer in trainer.optimizers:
            scheduler = LambdaLR(optimizer, [RateSchedule() for _ in optimizer.param_groups])
            trainer.strategy.lr_scheduler_configs.append(LRSchedulerConfig(scheduler, interval="step"))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measures the effective batch, and scales unless a checkpoint brought scaled rates."""
        self.effective_batch = self._measure(trainer)
        ratio = self._ratio()
        if self._loaded is not None:
            self._keep(trainer, self._loaded, ratio)
        else:
            self._apply(trainer, ratio)
        self._report(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns what was applied, as plain numbers and strings."""
        return dict(self._applied or {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remembers what was applied before the checkpoint."""
        self._loaded = dict(state_dict) or None

    # ------------------------------------------------------------------------------------------------------- measure

    def _measure(self, trainer: pl.Trainer) -> EffectiveBatch | None:
        loaders = _leaves(trainer.train_dataloader)
        sizes = [_batch_size(loader) for loader in loaders]
        size = self.batch_size
        if size is None and len(sizes) == 1:
            size = sizes[0]
        lowest, highest = _extremes(trainer, size or 0)
        if lowest != highest:
            raise ValueError(
                explain(
                    "the same batch size on all ranks",
                    f"between {lowest} and {highest}",
                    "Give the loaders equal batch sizes, or ScaleLearningRate the mean as batch_size",
                )
            )
        if size is None:
            if self.base_batch_size is not None:
                found = f"{len(loaders)} loaders" if len(loaders) != 1 else f"{type(loaders[0]).__name__} without one"
                raise ValueError(
                    explain(
                        "a train loader with a batch_size", found, "Give ScaleLearningRate(batch_size=...) per process"
                    )
                )
            return None
        return EffectiveBatch(size, trainer.world_size, trainer.accumulate_grad_batches)

    def _ratio(self) -> float:
        if self.base_batch_size is None or self.effective_batch is None:
            return 1.0
        return scale_ratio(self.rule, self.effective_batch.total / self.base_batch_size)

    def _report(self, trainer: pl.Trainer) -> None:
        assert self._applied is not None
        if self.effective_batch is None:
            rank_zero_info(
                "Effective batch: unknown, the train loader does not tell; give ScaleLearningRate(batch_size=...)."
            )
            return
        ratio = self._applied["ratio"]
        scaled = f"; learning rates x {ratio:g} ({self.rule}, base {self.base_batch_size})" if ratio != 1 else ""
        rank_zero_info(f"Effective batch: {self.effective_batch}{scaled}")
        for logger in trainer.loggers:
            metrics = {"ddp/effective_batch_size": self.effective_batch.total, "ddp/lr_scale_ratio": ratio}
            logger.log_metrics({key: float(value) for key, value in metrics.items()}, step=trainer.global_step)

    # --------------------------------------------------------------------------------------------------------- apply

    def _apply(self, trainer: pl.Trainer, ratio: float) -> None:
        total_steps = self._total_steps(trainer)
        fresh = [optimizer for optimizer in trainer.optimizers if optimizer not in _scaled]
        if ratio != 1:
            if trainer.ckpt_path is not None and trainer.global_step > 0:
                rank_zero_warn(
                    "The checkpoint was written without ScaleLearningRate: its learning rates are taken as unscaled, "
                    f"and multiplied by {ratio:g} now."
                )
            for optimizer in fresh:
                scale_optimizer(optimizer, ratio)
                if self.scale_adam_hyperparameters:
                    self._scale_adam(optimizer)
                _scaled.add(optimizer)
            for config in trainer.lr_scheduler_configs:
                if config.scheduler.optimizer in fresh:
                    scale_scheduler(config.scheduler, ratio)
        if self.schedule is not None:
            self._set_curve(trainer, self._curve(ratio, total_steps), step=trainer.global_step)
        self._applied = {
            "effective_batch_size": self.effective_batch.total if self.effective_batch is not None else None,
            "ratio": ratio,
            "schedule": self.schedule,
            "total_steps": total_steps,
        }

    def _keep(self, trainer: pl.Trainer, loaded: dict[str, Any], ratio: float) -> None:
        """Leaves rates and curve as the checkpoint brought them, and says what would be different now."""
        if loaded["schedule"] != self.schedule:
            raise ValueError(
                explain(
                    f"the schedule of the checkpoint, {loaded['schedule']!r}",
                    repr(self.schedule),
                    "Resume with the schedule of the run before, or start a run from its weights alone",
                )
            )
        self._applied = loaded
        total = self.effective_batch.total if self.effective_batch is not None else None
        if total != loaded["effective_batch_size"] or ratio != loaded["ratio"]:
            rank_zero_warn(
                f"The checkpoint's learning rates are for an effective batch of {loaded['effective_batch_size']} "
                f"(x {loaded['ratio']:g}) and are kept; this run's effective batch is {total} (x {ratio:g})."
            )
        total_steps = self._total_steps(trainer)
        if total_steps == loaded["total_steps"]:
            return
        if self.total_steps is None:
            rank_zero_warn(
                f"The checkpoint's schedule ends at step {loaded['total_steps']} and is kept; this run has "
                f"{total_steps} steps. Give ScaleLearningRate(total_steps=...) to move the end."
            )
        else:
            rank_zero_warn(
                f"The checkpoint's schedule ends at step {loaded['total_steps']}; from here on it follows "
                f"total_steps={total_steps}."
            )
            self._set_curve(trainer, self._curve(loaded["ratio"], total_steps), step=trainer.global_step)
            self._applied = {**loaded, "total_steps": total_steps}

    def _curve(self, ratio: float, total_steps: int | None) -> RateSchedule:
        assert self.schedule is not None
        start_ratio = min(1.0, 1 / ratio) if self.warmup_from == "base" else 0.0
        return RateSchedule(self.schedule, self.warmup_steps, total_steps, start_ratio, self.final_ratio)

    def _set_curve(self, trainer: pl.Trainer, curve: RateSchedule, step: int) -> None:
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            assert isinstance(scheduler, LambdaLR)  # ours: on_fit_start refuses others beside it
            scheduler.last_epoch = step
            groups = scheduler.optimizer.param_groups
            for group, base, function in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                vars(function).update(vars(curve))
                rate = base * curve(step)
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            refresh_last_rates(scheduler)

    def _total_steps(self, trainer: pl.Trainer) -> int | None:
        if self.schedule != "cosine":
            return None
        total_steps = self.total_steps or trainer.estimated_stepping_batches
        if not 0 < total_steps < float("inf"):
            raise ValueError(
                explain(
                    "a known number of optimizer steps for schedule='cosine'",
                    "a Trainer without an end, or a train loader without a length",
                    "Give ScaleLearningRate(total_steps=...) or Trainer(max_steps=...)",
                )
            )
        return int(total_steps)

    def _scale_adam(self, optimizer: Optimizer) -> None:
        assert self.effective_batch is not None
        assert self.base_batch_size is not None
        batch_ratio = self.effective_batch.total / self.base_batch_size
        for group in optimizer.param_groups:
            if "betas" not in group or "eps" not in group:
                raise ValueError(
                    explain(
                        "an optimizer with betas and eps, because scale_adam_hyperparameters=True",
                        type(optimizer).__name__,
                        "Use Adam or AdamW, or leave scale_adam_hyperparameters out",
                    )
                )
            group["betas"], group["eps"] = scale_adam(group["betas"], group["eps"], batch_ratio)

    def _refuse_cycled_betas(self, scheduler: object) -> None:
        if self.scale_adam_hyperparameters and getattr(scheduler, "cycle_momentum", False):
            raise ValueError(
                explain(
                    "betas that stay, because scale_adam_hyperparameters=True",
                    f"{type(scheduler).__name__} with cycle_momentum=True, which sets them at each step",
                    "Give the scheduler cycle_momentum=False",
                )
            )


def _leaves(loaders: object) -> list[object]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return [leaf for item in loaders for leaf in _leaves(item)]
    return [loaders]


def _batch_size(loader: object) -> int | None:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
    return None


def _extremes(trainer: pl.Trainer, value: int) -> tuple[int, int]:
    if trainer.world_size == 1:
        return value, value
    extremes = torch.tensor([-value, value], device=trainer.strategy.root_device)
    reduced = trainer.strategy.reduce(extremes, reduce_op="max")
    assert isinstance(reduced, torch.Tensor)
    return -int(reduced[0]), int(reduced[1])
