"""Before the first step: the ranks say how they were started and set up, and do not start where they differ."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.trainer.states import TrainerFn
from omegaconf import DictConfig, OmegaConf

from ddp_plugin import _compat
from ddp_plugin.errors import DDPPluginError, explain
from ddp_plugin.gather import broadcast_object, gather_objects
from ddp_plugin.preflight import comparison, environment, facts
from ddp_plugin.preflight.addresses import is_port_free, is_this_machine
from ddp_plugin.preflight.comparison import Finding
from ddp_plugin.preflight.roll_call import Meeting, raise_errors, roll_call
from ddp_plugin.strategy.group import OwnGroup

__all__ = ["Preflight"]

_COMMUNICATING = (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
)
_SHOWING = (ModelSummary, ProgressBar)  # for the user's eyes; often rank 0's alone
_MEASURES_BATCHES = ("GlobalMeanLoss", "ScaleLearningRate")  # they serve, or refuse, unequal batches themselves
_TRAINER_SETTINGS = (
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
)
_MOST_MODELS = 4  # that are sent in full, where the ranks have as many different ones


class Preflight(OwnGroup):
    """Refuses a run that would wait for ever, or compute what no rank meant, before its first step.

    Before processes are started: what the launcher has set, against ``devices`` and ``num_nodes``. Before there is a
    process group: who is there, versions, devices, settings and callbacks. Before the wrap: the model. Before the first
    step: the optimizers. What is an error and what a warning: :mod:`ddp_plugin.preflight.comparison`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._said_before_training: set[str] = set()

    # ---------------------------------------------------------------------------------------- before any process waits

    def refuse_contradictions(self) -> None:
        """Compares what the launcher has set with what the Trainer was given, in the process that begins a run.

        Raises:
            ValueError: they cannot go together; or the processes would meet at a name that nobody knows, or Lightning
                is about to start some that would meet at a port which is taken.
            RuntimeError: this process has used its GPU and is about to be forked: its copies could not use theirs.

        Collectives:
            None.
        """
        is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self._start_method == "fork" and self.root_device.type == "cuda" and is_used:
            raise RuntimeError(
                explain(
                    "a process that has not touched CUDA, because forked processes cannot use a GPU that it has used",
                    "one in which CUDA is initialised",
                    "Restart the notebook's kernel, and keep .cuda(), .to('cuda') and torch.cuda's functions out of it "
                    "before the Trainer has run, or leave the fork out: start_method='popen' in a script",
                )
            )
        origin = self.cluster_environment
        assert origin is not None
        request = environment.Request(
            num_devices=self.num_processes,
            num_nodes=self.num_nodes,
            launcher=_launcher_of(origin),
            starts_processes=not origin.creates_processes_externally,
        )
        found = environment.contradictions(os.environ, request)
        address = os.environ.get("MASTER_ADDR")
        if not found and address and self.num_nodes == 1 and is_this_machine(address) is None:
            found = [f"MASTER_ADDR is {address}, a name that this machine does not know: correct it, or unset it"]
        if not found and request.starts_processes and origin.node_rank() == 0 and not dist.is_initialized():
            port = os.environ.get("MASTER_PORT")
            if port is not None and not is_port_free(int(port)):
                found = [f"MASTER_PORT is {port}, and another run or program uses it: choose another port, or unset it"]
        if found:
            raise ValueError(
                explain(
                    f"a launcher that goes with {request}",
                    "what does not",
                    ". ".join(found),
                )
            )

    # ------------------------------------------------------------------------------------------ before a process group

    def setup_distributed(self) -> None:
        """Calls the roll, then starts the process group; see :class:`OwnGroup`.

        Raises:
            DDPPluginError: on all ranks, where they do not fit together; it says which rank has what. Or the group that
                somebody else has made has another size.
            ValueError: see :class:`OwnGroup`.

        Collectives:
            Group creation, on all ranks; see :func:`~ddp_plugin.preflight.roll_call.roll_call`. Where somebody else has
            made the group, one object gather on the control group instead.
        """
        self.set_world_ranks()
        backend = self._get_process_group_backend()
        origin = self.cluster_environment
        assert origin is not None
        if dist.is_initialized() or backend == "mpi":  # MPI has no store, and numbers the processes itself
            super().setup_distributed()
            _refuse_other_size(dist.get_world_size(), origin.world_size())
            self._agree(gather_objects(self._facts(backend), self.control_group))
            return
        meeting = Meeting(origin.main_address, origin.main_port, origin.world_size(), self._timeout)
        with roll_call(meeting, self._facts(backend), comparison.compare) as complete:
            if meeting.is_hosted_by_agent:  # what processes before these wrote there is not for this run
                self._store = complete.store
            try:
                super().setup_distributed()
            finally:
                self._store = None
        self._warn(complete.findings)

    def _facts(self, backend: str) -> facts.Facts:
        origin = self.cluster_environment
        assert origin is not None
        place, kind = facts.device_facts(self.root_device)
        world = {
            "world_size": str(origin.world_size()),
            "num_nodes": str(self.num_nodes),
            "devices": str(self.num_processes),
            "backend": backend,
            "device type": kind.pop("device type"),
            "launcher": type(origin).__name__,
        }
        values = {
            facts.PLACE: place | {"local_rank": str(self.local_rank), "node_rank": str(self.node_rank)},
            facts.WORLD: world,
            facts.DEVICE: kind,
            facts.SETTING: self._strategy_settings(),
            facts.CALLBACK: {},
            facts.OPTION: {
                "float32 matmul precision": torch.get_float32_matmul_precision(),
                "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
            },
        }
        module = self.lightning_module
        trainer = None if module is None else _trainer_of(module)
        if module is not None and trainer is not None:
            values[facts.SETTING] |= _trainer_settings(trainer, module)
            values[facts.CALLBACK] |= _communicating(trainer.callbacks)
            values[facts.OPTION] |= dict(_options(trainer, module))
        return facts.take_facts(origin.global_rank(), values)

    def _strategy_settings(self) -> dict[str, str]:
        hook = getattr(self, "comm_hook", None)
        settings = {
            "strategy": type(self),
            "logical_shards": getattr(self, "logical_shards", None),
            "ddp_comm_hook": self._ddp_comm_hook,
            "ddp_comm_wrapper": self._ddp_comm_wrapper,
            "ddp_comm_state": self._ddp_comm_state if self._ddp_comm_state is None else type(self._ddp_comm_state),
            "model_averaging_period": self._model_averaging_period,
            "precision plugin": type(self.precision_plugin),
            "sync_batchnorm": self._layer_sync is not None,
            "timeout": self._timeout,
            "nccl": self._nccl,
            **self._ddp_kwargs,
        }
        words = {name: facts.shown(value) for name, value in settings.items()}
        return words | {"comm_hook": "None" if hook is None else f"{hook.name}{facts.shown(hook.options)}"}

    # ------------------------------------------------------------------------------- before the wrap and the first step

    def setup(self, trainer: Any) -> None:
        """Compares the ranks' models, then sets up a run.

        Raises:
            DDPPluginError: on all ranks, where models differ; it says which rank has what.

        Collectives:
            One object gather on the control group, on every rank; where models differ, a broadcast more for each of the
            first four.
        """
        if self._one_model_on_all_ranks:
            assert self.model is not None
            self._compare_models(self.model)
        super().setup(trainer)

    def _compare_models(self, module: torch.nn.Module) -> None:
        entries = facts.model_entries(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        groups: dict[str, list[int]] = {}
        mark = facts.digest(f"{name} {description}" for name, description in entries)
        for rank, other in enumerate(gather_objects(mark, self.control_group)):
            groups.setdefault(other, []).append(rank)
        if len(groups) == 1:
            return
        models = [
            (ranks, broadcast_object(entries, self.control_group, ranks[0]))
            for ranks in list(groups.values())[:_MOST_MODELS]
        ]
        findings = comparison.compare_models(models)
        if len(groups) > _MOST_MODELS:
            others = [rank for ranks in list(groups.values())[_MOST_MODELS:] for rank in ranks]
            findings.append(Finding(f"{comparison.in_ranks(others)} have yet other models", is_error=True))
        raise_errors(findings, self.world_size)

    def setup_optimizers(self, trainer: Any) -> None:
        """Makes the optimizers and schedulers, and compares them; their settings not where the ranks train alone.

        Raises:
            DDPPluginError: on all ranks, where they differ; it says which rank has what.

        Collectives:
            One object gather on the control group, on every rank.
        """
        super().setup_optimizers(trainer)
        module = self.lightning_module
        if not self._one_model_on_all_ranks or module is None:
            return
        train_alone = getattr(self, "_averages_parameters", False)
        found = facts.optimizer_facts(self.optimizers, module, with_settings=not train_alone)
        for index, config in enumerate(self.lr_scheduler_configs):
            found[f"learning rate scheduler {index}"] = facts.shown(
                [type(config.scheduler).__qualname__, config.interval, config.frequency, config.monitor]
            )
        own = facts.Facts(self.global_rank, "", os.getpid(), {facts.OPTIMIZER: found})
        self._agree(gather_objects(own, self.control_group))

    @property
    def _one_model_on_all_ranks(self) -> bool:
        """Whether all ranks hold the same parameters; not so where the user's own group or mesh divides a model."""
        return self.world_size > 1 and not {"process_group", "device_mesh"} & set(self._ddp_kwargs)

    def _agree(self, of_ranks: Sequence[facts.Facts]) -> None:
        findings = comparison.compare(of_ranks)
        raise_errors(findings, len(of_ranks))
        self._warn(findings)

    def _warn(self, findings: Sequence[Finding]) -> None:
        for sentence in [finding.sentence for finding in findings]:
            if sentence not in self._said_before_training:
                self._said_before_training.add(sentence)
                rank_zero_warn(f"The ranks are not set up alike: {sentence}.")


def _refuse_other_size(actual: int, expected: int) -> None:
    if actual != expected:
        raise DDPPluginError(
            explain(
                f"a process group of {expected}, which the Trainer's devices and num_nodes make",
                f"one of {actual}, which existed before",
                "Call torch.distributed.destroy_process_group() before, or give the Trainer as many devices",
            )
        )


def _launcher_of(origin: object) -> str:
    kinds = (
        (TorchElasticEnvironment, environment.TORCHRUN),
        (SLURMEnvironment, environment.SLURM),
        (LightningEnvironment, environment.LIGHTNING),
    )
    return next((name for kind, name in kinds if type(origin) is kind), environment.OTHER)


def _trainer_of(module: LightningModule) -> Any:
    try:
        return module.trainer
    except RuntimeError:  # a strategy that somebody drives without a Trainer
        return None


def _trainer_settings(trainer: Any, module: LightningModule) -> dict[str, str]:
    settings = {name: getattr(trainer, name) for name in _TRAINER_SETTINGS}
    settings |= {
        "what runs": str(trainer.state.fn.value) if trainer.state.fn is not None else None,
        "model": type(module),
        "automatic_optimization": module.automatic_optimization,
        "use_distributed_sampler": _compat.uses_distributed_sampler(trainer),
        "a checkpoint to begin with": trainer.ckpt_path is not None,
    }
    return {name: facts.shown(value) for name, value in settings.items()}


def _communicates(callback: Callback) -> bool:
    return isinstance(callback, _COMMUNICATING) or any(
        base.__module__.split(".")[0] == "ddp_plugin" for base in type(callback).__mro__
    )


def _communicating(callbacks: Sequence[Callback]) -> dict[str, str]:
    names = [type(callback).__qualname__ for callback in callbacks if _communicates(callback)]
    found = {
        f"callback {name}": "there" if names.count(name) == 1 else f"there {names.count(name)} times" for name in names
    }
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):  # as accumulate_grad_batches of the Trainer
            found[f"callback {type(callback).__qualname__}"] += f" with {facts.shown(callback.scheduling)}"
    return found | {comparison.CALLBACK_ORDER: facts.shown(names)}


def _options(trainer: Any, module: LightningModule) -> Iterator[tuple[str, str]]:
    """Gives what may well be meant to differ between ranks, but seldom is."""
    for callback in trainer.callbacks:
        name = type(callback).__qualname__
        if not _communicates(callback) and not isinstance(callback, _SHOWING):
            yield f"callback {name}", "there"
        for option in _constructor_arguments(type(callback)) if name != "PerRankSeed" else ():  # it asks itself
            value = vars(callback).get(option)
            if isinstance(value, (bool, int, float, str)) and not option.endswith(("dir", "path", "dirpath")):
                yield f"{option} of {name}", facts.shown(value)
    for owner in (module, getattr(trainer, "datamodule", None)):
        for name, value in _plain(getattr(owner, "hparams", {})).items():
            if not isinstance(value, PurePath):  # a machine's own
                yield f"hyperparameter {name}", facts.shown(value)
    names = {type(callback).__qualname__ for callback in trainer.callbacks}
    if trainer.state.fn == TrainerFn.FITTING and not names & set(_MEASURES_BATCHES):
        sizes = [getattr(loader, "batch_size", None) for loader in _compat.given_train_loaders(trainer)]
        if sizes:
            yield "batch size", facts.shown(sizes)
    if "PerRankSeed" not in names:
        yield "PL_GLOBAL_SEED", str(os.environ.get("PL_GLOBAL_SEED"))


def _plain(hyperparameters: Any) -> Mapping[str, Any]:
    """Returns hyperparameters as they are written; one of OmegaConf's may be missing, or stand for something unset."""
    if isinstance(hyperparameters, DictConfig):
        hyperparameters = OmegaConf.to_container(hyperparameters, resolve=False)
    return hyperparameters if isinstance(hyperparameters, Mapping) else {}


def _constructor_arguments(kind: type) -> list[str]:
    code = [getattr(vars(base).get("__init__"), "__code__", None) for base in kind.__mro__]
    return [
        name
        for each in code
        if each is not None
        for name in each.co_varnames[1 : each.co_argcount + each.co_kwonlyargcount]
    ]
