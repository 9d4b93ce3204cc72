"""``tune()``: settings of the strategy, chosen by short measured runs of the user's own training."""

import inspect
import itertools
import json
import math
import numbers
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch.callbacks import Checkpoint
from omegaconf import DictConfig, OmegaConf

from ddp_plugin import _compat, process_group
from ddp_plugin.callbacks._recording import StepRecording
from ddp_plugin.config import StrategyConfig
from ddp_plugin.doctor.loaders import workers_per_rank
from ddp_plugin.doctor.machine import look_at_machine
from ddp_plugin.errors import DDPPluginError, counted, explain
from ddp_plugin.gather import gather_objects
from ddp_plugin.hooks import HOOKS, CommHook, Contents, resolve_hook
from ddp_plugin.strategy import CustomDDPStrategy
from ddp_plugin.tuning.choice import MIN_ROUNDS, Candidate, Row, Spread, Tuning, candidates, fastest, is_faster, slowest
from ddp_plugin.tuning.interrupting import held_back, interruptible, let_through
from ddp_plugin.tuning.layouts import check_layout
from ddp_plugin.tuning.trials import (
    PREFETCHED_PER_WORKER,
    SET_BY_TRIALS,
    TrialRun,
    kept_settings,
    untouched_process,
    with_workers,
)

__all__ = ["MIN_WARMUP_STEPS", "tune"]

MIN_WARMUP_STEPS = 3  # DDP rebuilds its buckets in the second step, with static_graph=True in the third
_GRACE_S = 60.0  # what a rank that failed gives the others to finish or to fail as well
_meetings = itertools.count()  # the same on all ranks


def tune(
    model: pl.LightningModule,
    train_dataloaders: Any = None,
    datamodule: pl.LightningDataModule | None = None,
    *,
    strategy: StrategyConfig | Mapping[str, Any] | DictConfig | None = None,
    bucket_caps_mb: Sequence[float | None] = (None, 1, 5, 25, 50, 100),
    comm_hooks: Sequence[str | Mapping[str, Any] | None] = (),
    static_graph: Sequence[bool] = (),
    gradient_as_bucket_view: Sequence[bool] = (),
    num_workers: Sequence[int] | str = (),
    keep_workers: bool | None = None,
    num_steps: int = 20,
    num_warmup_steps: int = 5,
    num_rounds: int = 7,
    callbacks: Sequence[pl.Callback] = (),
    path: str | os.PathLike[str] | None = None,
    section: str | None = None,
    layout: str = "strategy",
    overwrite: bool = False,
    **trainer_settings: Any,
) -> Tuning:
    """Measures real training steps of a model with several settings of the strategy, and chooses the fastest.

    ::

        tuning = tune(Model(), loader, devices=2, accelerator="cpu")
        print(tuning)
        trainer = L.Trainer(devices=2, accelerator="cpu", strategy=CustomDDPStrategy.from_config(tuning.config))

    Each measurement is a short run of a Trainer with the model's own optimizers, precision, accumulation and data. All
    combinations are measured in turn, ``num_rounds`` times, after one rehearsal that does not count; the time is that
    of the slowest rank. The rule is that of :mod:`ddp_plugin.tuning.choice`: a candidate has to be faster than the
    default in the upper quartile of its rounds, and again in fresh rounds; otherwise the default, the given settings,
    is kept. A candidate that fails on all ranks is left out with its reason.

    Numbers of data workers compete afterwards, by the same rule and with the settings that were chosen, because they
    have nothing to do with gradients: also on one process. Those runs are long enough that what workers have prepared
    before the clock starts counts little, and the starts of epochs count.

    Trial runs write nothing and leave nothing behind: each trains copies of the module, of the loaders and of the
    callbacks; random streams, determinism and benchmarking are put back. So are generators, samplers and loaders that a
    datamodule holds in its attributes. Not so a dataset that changes as it is read, a generator inside another object
    of a datamodule, and whatever the module itself does to the world outside. ``configure_callbacks`` of the module and
    evaluation are left out.

    It runs under every launcher of Lightning: in processes that exist (torchrun), in a script that Lightning starts
    again on each rank (then the processes stay for the training that follows), and in spawned or forked ones, by
    ``strategy={"start_method": "spawn"}``.

    Args:
        model: the module to be trained; its weights stay as they are.
        train_dataloaders: as for ``Trainer.fit``; ``None`` where the module or a datamodule has them.
        datamodule: as for ``Trainer.fit``; trial runs see a shallow copy with generators, samplers and loaders of
            its own, and ``setup`` runs in each.
        strategy: the settings that all candidates share, as for ``CustomDDPStrategy.from_config``: the default.
        bucket_caps_mb: bucket sizes to try, in MiB; ``None`` is torch's own.
        comm_hooks: communication hooks to try besides the default's, by name or as a mapping with options. None by
            default, because most of them change the numbers; the table says which.
        static_graph: values to try; ``True`` is a promise about the model.
        gradient_as_bucket_view: values to try.
        num_workers: numbers of data workers of each rank to try, besides the loaders as they are; ``"auto"``: 0 and
            powers of two up to what this machine's cores and memory allow. Loaders keep their order; random numbers
            drawn inside workers become others.
        keep_workers: whether the workers of those trials live on over epochs; ``None``: as the loaders have it.
        num_steps: optimizer steps that count in each measurement; for hooks that exchange every few steps, rounded up
            to whole periods.
        num_warmup_steps: steps before those, at least 3, because DDP rebuilds its buckets in them. A hook whose first
            steps are exact begins to compress in them.
        num_rounds: measurements of each candidate, at least 3.
        callbacks: callbacks that belong to a training step, such as ``GlobalMeanLoss()``; each run has copies. Not
            monitors and checkpoints, which write files.
        path: a YAML file to write: what ``CustomDDPStrategy.from_config(OmegaConf.load(path))`` takes, below comments
            with the table. Rank 0 writes it, in one piece; every rank of its node looks first whether that can be.
        section: put the settings under this key.
        layout: for whom the file is: ``"strategy"``; ``"recipe"``, a variant of a recipe's configuration;
            ``"lightning"``, what LightningCLI reads on top of a configuration; or ``"lightning_fixed"``, the same for a
            ``LightningCLI(Model, Data)``. All but the first hold the number of workers too, where one was chosen (for
            LightningCLI, where the datamodule's constructor takes ``num_workers``).
        overwrite: whether an existing file may be replaced.
        **trainer_settings: arguments of the Trainer: ``devices``, ``accelerator``, ``precision``,
            ``accumulate_grad_batches``, ``gradient_clip_val``, ….

    Returns:
        What was measured and chosen, the same on all ranks; ``.config`` is the
        :class:`~ddp_plugin.StrategyConfig` to train with and ``.num_workers`` the number of data workers. One process
        reduces nothing: it gets the default settings, unmeasured.

    Raises:
        TypeError: an argument of another type.
        ValueError: a setting out of range or that contradicts another, before anything is started; a file that exists
            or a folder that cannot be written.
        DDPPluginError: on the other ranks, where the default fails on one, or where processes that have met before are
            refused ``path`` on one; or where a candidate fails on one rank while others wait for it in a collective,
            which nothing can undo.
        Exception: whatever the training raises with the default settings.
        KeyboardInterrupt: at the first Ctrl+C, once the other processes that this one started have ended.

    Collectives:
        Those of the trial runs, on all ranks; between them the ranks exchange times through the store, and meet in a
        gather on the control group.
    """
    if isinstance(train_dataloaders, pl.LightningDataModule):
        train_dataloaders, datamodule = None, train_dataloaders
    base = _as_config(strategy)
    _check_numbers(num_steps=(num_steps, 1), num_warmup_steps=(num_warmup_steps, MIN_WARMUP_STEPS))
    _check_numbers(num_rounds=(num_rounds, MIN_ROUNDS))
    _check_training(model, train_dataloaders, datamodule, trainer_settings)
    _check_callbacks(callbacks)
    _check_workers(num_workers)
    check_layout(layout, section)
    values = {
        "comm_hook": _plain_hooks(comm_hooks),
        "bucket_cap_mb": _sizes("bucket_caps_mb", bucket_caps_mb),
        "static_graph": _switches("static_graph", static_graph),
        "gradient_as_bucket_view": _switches("gradient_as_bucket_view", gradient_as_bucket_view),
    }
    training = (model, train_dataloaders, datamodule, callbacks, trainer_settings)
    run = TrialRun(*training)
    competing = [_described(candidate) for candidate in candidates(base, values)]
    if len(competing) == 1 and not num_workers:
        raise ValueError(
            explain(
                "settings to compare with the default",
                "none besides it",
                "Give other bucket sizes, hooks, static_graph, gradient_as_bucket_view or numbers of data workers",
            )
        )
    contest = _Contest(run, base, competing, (num_warmup_steps, num_steps, num_rounds))
    with kept_settings():  # until the processes are started, which inherit them
        trainer = run.make_trainer(CustomDDPStrategy.from_config(base))
    if path is not None:
        _check_path(Path(path), overwrite, trainer)
    if trainer.world_size == 1:
        reason = "Nothing was measured: one process has no gradients to exchange. The default is kept."
        tuning = Tuning(base, competing[0], reason, made_with=_made_with())
    elif len(competing) == 1:
        tuning = Tuning(base, competing[0], "Only data workers were to be compared.", made_with=_made_with())
    else:
        tuning = _contested(contest, trainer)
    tuning = replace(tuning, data_class=_class_that_takes_workers(datamodule))
    rank_zero_info(f"ddp_plugin.tune: {tuning.reason}")
    if num_workers:
        if trainer.world_size > 1 and len(competing) == 1 and contest.base.start_method == "popen":
            _launched(contest, contest.rehearse, trainer)  # starts what has to be started, so that the ranks can agree
        counts = _common(_worker_counts(num_workers, trainer.num_devices))
        lengths = _lengths_for_workers(counts, num_warmup_steps, num_steps, trainer.accumulate_grad_batches)
        rows = [Candidate({}, "default"), *(Candidate({}, f"num_workers={n}", num_workers=n) for n in counts)]
        run = TrialRun(*training, counts_epoch_starts=True)
        contest = _Contest(run, tuning.config, rows, (*lengths, num_rounds), keep_workers)
        with kept_settings():
            trainer = run.make_trainer(CustomDDPStrategy.from_config(tuning.config))
        loaders = _contested(contest, trainer)
        tuning = replace(tuning, loaders=replace(loaders, reason=f"Data workers. {loaders.reason}"))
        rank_zero_info(f"ddp_plugin.tune: Data workers. {loaders.reason}")
    if path is not None:
        _write_once(tuning.to_yaml(section, layout), Path(path) if trainer.global_rank == 0 else None)
    return tuning


# -------------------------------------------------------------------------------------------------------- what is asked


def _as_config(strategy: Any) -> StrategyConfig:
    if isinstance(strategy, (str, pl.strategies.Strategy)):
        raise TypeError(
            explain(
                "strategy to be settings: a StrategyConfig, a dict or a DictConfig",
                repr(strategy),
                "Every trial run needs a strategy of its own, made from the settings",
            )
        )
    given = StrategyConfig() if strategy is None else strategy
    CustomDDPStrategy.from_config(given)  # refuses what it cannot be made from
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(StrategyConfig), given))
    assert isinstance(config, StrategyConfig)
    if config.logical_shards is not None:
        raise ValueError(
            explain(
                "settings with buckets to tune", "logical_shards, which replaces DDP's buckets", "Leave one of them out"
            )
        )
    return config


def _check_numbers(**given: tuple[Any, int]) -> None:
    for name, (value, least) in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(explain(f"{name} to be an integer", repr(value), "Correct it"))
        if value < least:
            raise ValueError(explain(f"{name} to be at least {least}", repr(value), "Raise it"))


def _check_training(model: Any, train_dataloaders: Any, datamodule: Any, trainer_settings: Mapping[str, Any]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(explain("a LightningModule", repr(model), "Pass the module itself"))
    if train_dataloaders is not None and datamodule is not None:
        raise ValueError(explain("train_dataloaders or datamodule", "both", "Keep one of them"))
    if own := [name for name in trainer_settings if name in SET_BY_TRIALS]:
        raise ValueError(
            explain(
                "arguments of the Trainer that belong to a training step",
                f"{own}, which trial runs set themselves",
                "Leave them out here: trial runs are short, write nothing and evaluate nothing",
            )
        )
    accumulated = trainer_settings.get("accumulate_grad_batches", 1)
    _check_numbers(accumulate_grad_batches=(accumulated, 1))


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
        raise TypeError(explain(f"{name} to be a list", repr(values), f"Write {name}=[{values!r}]"))
    return list(values)


def _sizes(name: str, values: Any) -> list[float | None]:
    sizes = _listed(name, values)
    for value in sizes:
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(explain(f"{name} of numbers, in MiB, or None", repr(value), "Write it as a number"))
    return [None if value is None else float(value) for value in sizes]


def _switches(name: str, values: Any) -> list[bool]:
    switches = _listed(name, values)
    for value in switches:
        if not isinstance(value, bool):
            raise TypeError(explain(f"{name} of True and False", repr(value), "Write it as one of them"))
    return switches


def _check_workers(num_workers: Any) -> None:
    if num_workers != "auto":
        for count in _listed("num_workers", num_workers):
            _check_numbers(num_workers=(count, 0))


def _worker_counts(num_workers: Sequence[int] | str, num_local_ranks: int) -> list[int]:
    """Returns the numbers of workers to try, each once."""
    if not isinstance(num_workers, str):
        return list(dict.fromkeys(num_workers))
    most = max(1, workers_per_rank(look_at_machine(), num_local_ranks))
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def _common(counts: list[int]) -> list[int]:
    """Returns the numbers that all ranks would try: their machines may differ, or what else runs on them.

    Collectives:
        Where a process group exists, what :class:`_Meeting` needs.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return counts
    meeting = _Meeting(counts)
    everyones: list[list[int]] = meeting.outcomes()
    meeting.leave()
    return [count for count in everyones[0] if all(count in of_rank for of_rank in everyones)]


def _lengths_for_workers(
    counts: Sequence[int], num_warmup_steps: int, num_steps: int, num_accumulated: int
) -> tuple[int, int]:
    """Returns warm-up and counted steps so long that batches prepared ahead of the clock cannot decide.

    The warm-up uses up twice what workers can prepare ahead; of the counted batches, a quarter at most can have been.
    """
    num_ahead = PREFETCHED_PER_WORKER * max(counts)
    least_warmup, least = (math.ceil(factor * num_ahead / num_accumulated) for factor in (2, 4))
    return max(num_warmup_steps, least_warmup), max(num_steps, least)


def _class_that_takes_workers(datamodule: pl.LightningDataModule | None) -> str | None:
    """Returns the import path of a datamodule whose constructor has an argument ``num_workers``."""
    if datamodule is None or "num_workers" not in inspect.signature(type(datamodule)).parameters:
        return None
    return f"{type(datamodule).__module__}.{type(datamodule).__qualname__}"


def _check_callbacks(callbacks: Any) -> None:
    for callback in _listed("callbacks", callbacks):
        name = type(callback).__name__
        if not isinstance(callback, pl.Callback):
            raise TypeError(explain("callbacks of Lightning", repr(callback), "Pass an instance of each"))
        if isinstance(callback, StepRecording | Checkpoint):
            raise ValueError(
                explain(
                    "callbacks that belong to a training step, because trial runs write nothing",
                    f"{name}, which writes files or watches a whole run",
                    "Leave it out here, and give it to the Trainer that follows",
                )
            )


def _plain_hooks(comm_hooks: Any) -> list[Any]:
    """Refuses what a configuration cannot hold, and makes plain dicts of mappings."""
    plain: list[Any] = []
    for spec in _listed("comm_hooks", comm_hooks):
        if isinstance(spec, CommHook):
            raise TypeError(
                explain(
                    "comm_hooks by name, or as mappings with a name and options, because a configuration is chosen",
                    repr(spec.name),
                    "Put your own hook into ddp_plugin.hooks.HOOKS under a name",
                )
            )
        plain.append(dict(spec) if isinstance(spec, Mapping) else spec)
    return plain


def _described(candidate: Candidate) -> Candidate:
    """Adds what a reader has to know of a candidate's hook."""
    spec = candidate.settings.get("comm_hook")
    if spec is None or candidate.name == "default":
        return candidate
    hook = resolve_hook(spec)
    if hook.options.get("for_measuring"):
        return replace(candidate, note="no communication: the bound for all others", may_win=False)
    if hook.outer is not None:
        return replace(candidate, note="changes the algorithm: parameters meet every few steps")
    shape = (256, 256)  # a matrix, because some hooks leave vectors alone
    probe = torch.randn(2, shape[0] * shape[1], generator=torch.Generator().manual_seed(0))
    contents = Contents(("probe",), (shape,), probe.dtype)
    exact = HOOKS["allreduce"]().error_bound(probe, contents)
    lossy = bool((hook.error_bound(probe, contents) > 2 * exact).any())
    return replace(candidate, note="changes the numbers: lossy" if lossy else "")


def _check_path(file: Path, overwrite: bool, trainer: pl.Trainer) -> None:
    """Refuses a file that rank 0 could not write, on all ranks of its node, before any waits for another.

    Raises:
        ValueError: there is no such folder, nothing can be written there, or there is a file.
        DDPPluginError: another rank was refused, where a process group exists to say so.

    Collectives:
        Where a process group exists, what :class:`_Meeting` needs.
    """
    refusal = _refusal(file, overwrite) if trainer.node_rank == 0 else None
    refusals = _told_to_all([] if refusal is None else [refusal])
    if refusal is not None:
        raise ValueError(refusal)
    if refusals:
        raise DDPPluginError(refusals[0])


def _refusal(file: Path, overwrite: bool) -> str | None:
    if not file.parent.is_dir():
        return explain("a file in a folder that exists, for the settings", f"{file}", "Make the folder, or correct it")
    if file.is_dir() or (file.exists() and not overwrite):
        return explain(
            "a new file for the settings", f"{file}, which exists", "Choose another, or overwrite=True (--overwrite)"
        )
    try:
        with tempfile.TemporaryFile(dir=file.parent):
            return None
    except OSError as error:
        return explain("a file in a folder that can be written, for the settings", f"{file}: {error}", "Choose another")


# --------------------------------------------------------------------------------------------------- what is measured


class _Contest:
    """The candidates and how they are measured; it travels to the processes that measure."""

    def __init__(
        self,
        run: TrialRun,
        base: StrategyConfig,
        competing: list[Candidate],
        lengths: tuple[int, int, int],
        keep_workers: bool | None = None,
    ) -> None:
        self.run, self.base, self.candidates = run, base, competing
        self.num_warmup_steps, self.num_steps, self.num_rounds = lengths
        self.keep_workers = keep_workers
        for candidate in competing:  # before any process is started
            self.strategy(candidate)

    def config(self, candidate: Candidate) -> StrategyConfig:
        """Returns the settings that a person would train with."""
        return replace(self.base, **candidate.settings)

    def strategy(self, candidate: Candidate) -> CustomDDPStrategy:
        """Makes a strategy for processes that exist, whose hook compresses from the warm-up on."""
        config = replace(self.config(candidate), start_method="popen")
        if config.comm_hook is not None and resolve_hook(config.comm_hook).start_step >= self.num_warmup_steps:
            spec = {"name": config.comm_hook} if isinstance(config.comm_hook, str) else dict(config.comm_hook)
            config = replace(config, comm_hook=spec | {"start_step": self.num_warmup_steps - 1})
        strategy = CustomDDPStrategy.from_config(config)
        strategy.ends_all_on_failure = False  # a candidate may fail, and the ranks meet after it
        if candidate.num_workers is not None:
            strategy.add_dataloader_transform(with_workers(candidate.num_workers, self.keep_workers))
        return strategy

    def rehearse(self, device_type: str) -> None:
        """Runs the default for a step.

        Collectives:
            Those of the run, on all ranks.
        """
        with interruptible(), untouched_process(device_type):
            let_through()
            self._trial(0, 1, {})

    def measure(self, device_type: str) -> dict[str, Any]:
        """Runs the rehearsal, the rounds and the fresh rounds.

        Returns:
            ``times_s``, a list by candidate; ``failures``, words by candidate; ``winner``, a candidate or ``None``; and
            ``fresh_s``, pairs ``(default, winner)``. Candidates are positions.

        Collectives:
            Those of the trial runs, on all ranks.
        """
        failures: dict[int, str] = {}
        times_s: dict[int, list[float]] = {index: [] for index in range(len(self.candidates))}
        fresh_s: list[tuple[float, float]] = []
        with interruptible(), untouched_process(device_type):
            let_through()
            for index in times_s:
                self._trial(index, 1, failures)
            for number in range(self.num_rounds):
                for index in self._order(number, [index for index in times_s if index not in failures]):
                    if (elapsed_s := self._trial(index, self.num_steps, failures)) is not None:
                        times_s[index].append(elapsed_s)
            times_s = {index: [] if index in failures else times for index, times in times_s.items()}
            competing = [index for index in times_s if self.candidates[index].may_win and index and times_s[index]]
            winner = fastest({index: _ratios(times_s[index], times_s[0]) for index in competing})
            for number in range(self.num_rounds if winner is not None else 0):
                assert winner is not None
                taken_s = {i: self._trial(i, self.num_steps, failures) for i in self._order(number, [0, winner])}
                default_s, winner_s = taken_s[0], taken_s[winner]
                if default_s is None or winner_s is None:
                    break
                fresh_s.append((default_s, winner_s))
        return {"times_s": times_s, "failures": failures, "winner": winner, "fresh_s": fresh_s}

    @staticmethod
    def _order(number: int, indices: list[int]) -> list[int]:
        return indices if number % 2 else indices[::-1]  # so that none always follows the same one

    def _trial(self, index: int, num_steps: int, failures: dict[int, str]) -> float | None:
        """Measures a candidate on all ranks; returns the slowest one's seconds, or ``None`` if it failed on any."""
        candidate = self.candidates[index]
        spec = candidate.settings.get("comm_hook", self.base.comm_hook)
        period = resolve_hook(spec).period if spec is not None else 1
        elapsed_s: float | None = None
        error: Exception | None = None
        try:
            num_steps = -(-num_steps // period) * period
            elapsed_s = self.run.seconds_per_step(self.strategy(candidate), self.num_warmup_steps, num_steps)
        except Exception as caught:  # of the user's module, of a hook, of the device: a reason to leave this one out
            if not dist.is_initialized():
                raise
            error = caught
        failure = None if error is None else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        meeting = _Meeting([elapsed_s, failure])
        if error is not None and index == 0:
            raise error
        error = None  # and with it all that its traceback holds
        outcomes = meeting.outcomes() if failure is None else meeting.outcomes_of_failure(candidate.name, failure)
        if failed := [(rank, reason) for rank, (_, reason) in enumerate(outcomes) if reason is not None]:
            rank, failures[index] = failed[0]
            if index == 0:
                raise DDPPluginError(
                    explain(
                        "the given settings to train on all ranks",
                        f"{failures[index]} on rank {rank}",
                        "Correct them, or the model",
                    )
                )
        meeting.leave()
        return None if failed else slowest([seconds for seconds, _ in outcomes])


class _Meeting:
    """What every rank has to say after a run, through the store: another one may still wait in a collective.

    Args:
        value: this rank's, of lists, text and numbers.
    """

    def __init__(self, value: Any) -> None:
        self._store, number = _compat.default_store(), next(_meetings)
        self._keys = [f"ddp_plugin/tune/{number}/{rank}" for rank in range(dist.get_world_size())]
        self._store.set(self._keys[dist.get_rank()], json.dumps(value))

    def outcomes(self) -> list[Any]:
        """Returns the value of every rank, once all have come."""
        self._store.wait(self._keys)
        return [json.loads(self._store.get(key)) for key in self._keys]

    def leave(self) -> None:
        """Returns once all ranks have read: rank 0 may end after this, and the store with it.

        Collectives:
            A gather on the control group, on all ranks.
        """
        gather_objects(None, process_group.control_group())

    def outcomes_of_failure(self, name: str, failure: str) -> list[Any]:
        """Returns the same on a rank that has failed.

        Raises:
            DDPPluginError: the others have not come in time: they wait for what this rank will never send.
        """
        try:
            self._store.wait(self._keys, timedelta(seconds=_GRACE_S))
        except RuntimeError as error:  # the store's way to say that the time is up
            raise DDPPluginError(
                explain(
                    f"the candidate {name!r} to fail on all ranks, as it failed here",
                    f"{failure}, while other ranks wait for this one in a collective",
                    "Leave this candidate out",
                )
            ) from error
        return self.outcomes()


def _ratios(times_s: Sequence[float], default_s: Sequence[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(times_s, default_s, strict=True)]


def _contested(contest: _Contest, trainer: pl.Trainer) -> Tuning:
    """Measures on all ranks, and judges."""
    num_runs = len(contest.candidates) * contest.num_rounds
    rank_zero_info(
        f"ddp_plugin.tune: {counted(len(contest.candidates), 'candidate')} in {counted(contest.num_rounds, 'round')} "
        f"on {counted(trainer.world_size, 'process')}: {counted(num_runs, 'trial run')}, and a few more."
    )
    port = os.environ.get("MASTER_PORT")
    found = _launched(contest, contest.measure, trainer)
    if contest.base.start_method != "popen":  # those processes have ended, and the next ones find a port of their own
        os.environ.pop("MASTER_PORT", None)
        if port is not None:
            os.environ["MASTER_PORT"] = port
    return _judged(contest, found, trainer.world_size)


def _launched(contest: _Contest, function: Callable[[str], Any], trainer: pl.Trainer) -> Any:
    """Lets the Trainer's launcher start the processes, if they have to be started, and runs the contest in them.

    Args:
        contest: what it is about.
        function: its method to call, with the type of the ranks' devices.
        trainer: of which nothing but the launcher and the device is used.
    """
    launcher, device_type = trainer.strategy.launcher, trainer.strategy.root_device.type
    starts_scripts = contest.base.start_method == "popen"
    with interruptible(launcher), held_back() if starts_scripts else nullcontext():
        return function(device_type) if launcher is None else launcher.launch(function, device_type)


def _judged(contest: _Contest, found: Mapping[str, Any], world_size: int) -> Tuning:
    times_s, failures, winner = found["times_s"], found["failures"], found["winner"]
    rows = []
    for index, candidate in enumerate(contest.candidates):
        if index in failures:
            rows.append(Row(candidate, failure=failures[index]))
        else:
            ratios = _ratios(times_s[index], times_s[0])
            rows.append(Row(candidate, tuple(times_s[index]), tuple(ratios)))
    confirmation = tuple(winner_s / default_s for default_s, winner_s in found["fresh_s"])
    chosen, reason = _chosen(contest.candidates, winner, confirmation, failures)
    return Tuning(
        contest.config(chosen), chosen, reason, tuple(rows), confirmation, contest.num_steps, world_size, _made_with()
    )


def _chosen(
    competing: Sequence[Candidate], winner: int | None, confirmation: tuple[float, ...], failures: Mapping[int, str]
) -> tuple[Candidate, str]:
    if winner is None:
        return competing[0], "The default is kept: no candidate was faster by more than the spread of its rounds."
    name = competing[winner].name
    if winner in failures:
        return competing[0], f"The default is kept: {name} was the fastest, and failed when it was measured again."
    spread = Spread.of(confirmation)
    measured = f"{spread.median:.3f} ({spread.lower:.3f} to {spread.upper:.3f})"
    if not is_faster(confirmation):
        return competing[0], (
            f"The default is kept: {name} was the fastest, and not faster when it was measured again, at {measured} of "
            "the default's time."
        )
    return competing[
        winner
    ], f"Chosen: {name}, at {measured} of the default's time in {len(confirmation)} fresh rounds."


# ------------------------------------------------------------------------------------------------------ what is written


def _made_with() -> tuple[str, ...]:
    import ddp_plugin

    devices = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_device_name()
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    versions = {"torch": torch.__version__, "lightning": lightning.__version__, "python": platform.python_version()}
    return (
        f"{when} on {platform.node()} ({platform.machine()}, {devices})",
        ", ".join(f"{name} {version}" for name, version in ({"ddp_plugin": ddp_plugin.__version__} | versions).items()),
    )


def _write_once(text: str, file: Path | None) -> None:
    """Writes the file in one piece on the rank that has its path; all ranks learn if that failed."""
    error: OSError | None = None
    if file is not None:
        try:
            with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", delete=False) as unfinished:
                unfinished.write(text)
            os.chmod(unfinished.name, 0o644)
            os.replace(unfinished.name, file)
        except OSError as caught:
            error = caught
    failures = _told_to_all([str(error)] if error is not None else [])
    if error is not None:
        raise error
    if failures:
        raise DDPPluginError(explain("the configuration to be written", failures[0], "Correct the path"))


def _told_to_all(words: list[str]) -> list[str]:
    """Returns what all ranks say, where a process group exists; else this one's words."""
    if not (dist.is_available() and dist.is_initialized()):
        return words
    meeting = _Meeting(words)
    everyones = [word for words_of_rank in meeting.outcomes() for word in words_of_rank]
    meeting.leave()
    return everyones
