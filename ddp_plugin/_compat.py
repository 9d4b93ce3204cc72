"""The only file that touches private names of torch, Lightning and torchmetrics.

Each helper says why no public way exists; ``tests/test_compat.py`` notices when a name moves.
"""

from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    GradBucket as GradBucket,  # torch.distributed re-exports it, but hides it from type checkers
)

from ddp_plugin.evaluation import merge_states

# ------------------------------------------------------------------------------------------------- torch.distributed


def default_group() -> dist.ProcessGroup:
    """Returns the default process group as an object; the public API only ever stands for it by ``None``."""
    return dist.distributed_c10d._get_default_group()


def default_group_timeout() -> timedelta | None:
    """Returns the collectives' timeout of the default group, or ``None`` where its backend does not tell."""
    group = default_group()
    try:
        options = group._get_backend(group._device_types[0]).options
    except (RuntimeError, AttributeError, IndexError):
        return None
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout inside backend options; torch takes it from there once options are passed."""
    options._timeout = timeout


# --------------------------------------------------------------------------------------------------------- Lightning


def init_process_group(cluster_environment: Any, backend: str, **kwargs: Any) -> None:
    """Lightning's own start of the process group; ``DDPStrategy.setup_distributed`` has no place for group options."""
    from lightning.fabric.utilities.distributed import _init_dist_connection

    _init_dist_connection(cluster_environment, backend, **kwargs)


def reset_seed() -> None:
    """Seeds this process from ``PL_GLOBAL_SEED`` again, as Lightning does before it starts the process group."""
    from lightning.fabric.utilities.seed import reset_seed as lightning_reset_seed

    lightning_reset_seed()


def recreate_train_iterator(trainer: Any) -> None:
    """Makes the train loaders' iterators anew; Lightning made the first ones before a hook could set the epoch.

    Workers are started anew too, persistent ones included. States that a checkpoint holds for resumable loaders go to
    the loaders first: Lightning had none yet when it made iterators that early.
    """
    fit_loop = trainer.fit_loop
    fit_loop._data_fetcher.combined_loader.reset()
    fit_loop._load_combined_loader_states()
    iter(fit_loop._data_fetcher)


def train_epoch(trainer: Any) -> int:
    """Returns the epoch that runs or comes next.

    ``trainer.current_epoch`` lags behind after a resume of a run that is limited by steps.
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def inner_sampler(sampler: object) -> object | None:
    """Returns the sampler inside Lightning's ``DistributedSamplerWrapper``, which has no public way to it."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    if not isinstance(sampler, DistributedSamplerWrapper):
        return None
    inner: object = sampler.dataset._sampler  # type: ignore[attr-defined]
    return inner


def append_dataloader_transform(trainer: Any, transform: Callable[[Any, Any], Any]) -> None:
    """Gives a strategy of Lightning's own what ``CustomDDPStrategy.add_dataloader_transform`` offers.

    A Trainer has no seam for loaders but its strategy's method, so a function is put before the instance's own.

    Args:
        trainer: the Trainer; one process.
        transform: ``(loader, stage) -> loader``; adding an equal one again changes nothing.
    """
    strategy = trainer.strategy
    transforms: list[Callable[[Any, Any], Any]] | None = getattr(strategy.process_dataloader, "transforms", None)
    if transforms is None:
        process = strategy.process_dataloader

        def process_then_transform(dataloader: object) -> object:
            dataloader = process(dataloader)
            for change in process_then_transform.transforms:  # type: ignore[attr-defined]
                dataloader = change(dataloader, trainer.state.stage)
            return dataloader

        transforms = process_then_transform.transforms = []  # type: ignore[attr-defined]
        strategy.process_dataloader = process_then_transform
    if transform not in transforms:
        transforms.append(transform)


def keep_user_loaders(trainer: Any, stages: Iterable[Any]) -> None:
    """Makes Lightning leave the loaders of some stages as the user made them.

    ``use_distributed_sampler=False`` is the public way, but it is all stages or none, and for predict it changes
    nothing.

    Args:
        trainer: the Trainer.
        stages: ``RunningStage`` members; added to those that are kept already.
    """
    connector = trainer._data_connector
    if not isinstance(connector._prepare_dataloader, _UnlessKept):
        connector._prepare_dataloader = _UnlessKept(connector._prepare_dataloader)
    connector._prepare_dataloader.stages.update(stages)


class _UnlessKept:
    """Lightning's preparation of a loader, skipped in some stages."""

    def __init__(self, prepare: Callable[..., object]) -> None:
        self.prepare = prepare
        self.stages: set[Any] = set()

    def __call__(self, dataloader: object, shuffle: bool, mode: Any) -> object:
        return dataloader if mode in self.stages else self.prepare(dataloader, shuffle=shuffle, mode=mode)


def uses_distributed_sampler(trainer: Any) -> bool:
    """Returns the Trainer's ``use_distributed_sampler``, which it keeps to itself."""
    return bool(trainer._accelerator_connector.use_distributed_sampler)


def evaluation_loop(trainer: Any) -> Any:
    """Returns the loop that validates or tests right now."""
    if trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return trainer.test_loop if trainer.testing else trainer.validate_loop


def loaders_of(loop: Any) -> tuple[list[Any], str]:
    """Returns a loop's loaders in order, and the mode in which they are combined."""
    return list(loop._combined_loader.flattened), loop._combined_loader._mode


def takes_iterator(loop: Any) -> bool:
    """Whether the loop hands its steps the loader's iterator (``dataloader_iter``) instead of a batch."""
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

    return isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher)


def index_tracking(batch_sampler: Any) -> Any:
    """Wraps a batch sampler so that Lightning's prediction writers find the indices of each batch."""
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper

    wrapper: Any = _IndexBatchSamplerWrapper(batch_sampler)
    wrapper.batch_sampler = batch_sampler  # where walk() finds it
    return wrapper


def set_predictions(trainer: Any, predictions: list[list[Any]], indices: list[list[list[Any]]]) -> None:
    """Sets what ``trainer.predict`` returns and what writers are given: outputs and indices, loaders x batches."""
    trainer.predict_loop._predictions = predictions
    trainer.predict_loop.epoch_batch_indices = indices


class LoggedValues:
    """Lightning's collection of what ``self.log`` was given in one evaluation loop, read and set by key."""

    def __init__(self, loop: Any) -> None:
        self._results = loop._results
        self._made: list[str] = []

    def on_epoch_metrics(self, function: Callable[[], None]) -> None:
        """Calls ``function`` each time before Lightning computes epoch-level values; :meth:`release` ends it."""
        results, metrics = self._results, type(self._results).metrics

        def metrics_after_function(on_step: bool) -> Any:
            if not on_step:
                function()
            return metrics(results, on_step)

        results.metrics = metrics_after_function

    def release(self) -> None:
        """Undoes :meth:`on_epoch_metrics`, and forgets the keys that this rank never logged itself."""
        self._results.__dict__.pop("metrics", None)
        for key in self._made:
            self._results.pop(key, None)

    def metric_objects(self) -> dict[str, Any]:
        """Returns the torchmetrics objects that were logged and are due now, by key."""
        return {key: item.value for key, item in self._due() if not item.is_tensor}

    def pending(self) -> dict[str, tuple[str, float, float, dict[str, Any]]]:
        """Returns each plain value that was logged per batch and is due now.

        Returns:
            ``{key: (reduction, value, weight, settings)}``; for a mean the value is the weighted sum. ``settings`` is
            what another rank needs to know the key as well.
        """
        return {
            key: (
                item.meta.reduce_fx.__name__,
                item.value.double().item(),
                item.cumulated_batch_size.double().item() if item.meta.is_mean_reduction else 0.0,
                {
                    "fx": item.meta.fx,
                    "name": item.meta.name,
                    "prog_bar": item.meta.prog_bar,
                    "logger": item.meta.logger,
                    "on_step": item.meta.on_step,
                    "on_epoch": item.meta.on_epoch,
                    "reduce_fx": item.meta.reduce_fx.__name__,
                    "add_dataloader_idx": item.meta.add_dataloader_idx,
                    "dataloader_idx": item.meta.dataloader_idx,
                    "dtype": item.value.dtype,
                },
            )
            for key, item in self._due()
            if item.is_tensor and _is_per_batch(item.meta.fx) and _is_for_all_ranks(item.meta.sync)
        }

    def resolve(self, key: str, value: float, settings: dict[str, Any], device: Any) -> None:
        """Sets the epoch-level value of a key, so that Lightning does not reduce it; makes it if needed."""
        from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

        settings = dict(settings)
        dtype = settings.pop("dtype")
        if key not in self._results:
            meta = _Metadata(**settings)
            meta.sync = _Sync()
            self._results[key] = _ResultMetric(meta, is_tensor=True).to(device)
            self._made.append(key)
        item = self._results[key]
        item.has_reset = False
        item._computed = torch.tensor(value, dtype=dtype, device=device)

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Remembers every value, before a step that shall leave no trace."""
        return {
            key: {name: item.__dict__[name] for name in _ITEM_STATE if name in item.__dict__}
            for key, item in self._results.items()
        }

    def restore(self, snapshot: dict[str, dict[str, Any]]) -> None:
        """Puts every plain value back; a key that is new since then holds nothing."""
        for key, item in self._results.items():
            if not item.is_tensor:
                continue  # a torchmetrics object: it keeps its own state, and has to be known where others compute it
            if key in snapshot:
                item.__dict__.update(snapshot[key])
            else:
                item.reset()  # not "due" then: the other ranks' gathered values make it known again

    def _due(self) -> list[tuple[str, Any]]:
        return [
            (key, item) for key, item in self._results.valid_items() if item.meta.on_epoch and item._computed is None
        ]


# Values are replaced at each update, never changed in place, so references are enough.
_ITEM_STATE = ("value", "cumulated_batch_size", "_update_count", "_computed", "_forward_cache", "has_reset")


def _is_for_all_ranks(sync: Any) -> bool:
    """Whether a value is one of all ranks; ``rank_zero_only`` and a group of the user's own say that it is not."""
    return not sync.rank_zero_only and sync.group is None


def _is_per_batch(hook: str) -> bool:
    """Whether a value was logged in a step or in a hook around one; epoch hooks log what is complete already."""
    name = hook.split(".")[0]
    return name.endswith("_step") or "_batch_" in name


# ------------------------------------------------------------------------------------------------------ torchmetrics


def metric_snapshot(metric: Any) -> dict[str, Any]:
    """Copies a metric's states and counters; states are cloned because updates change them in place."""
    states = {name: _copied(getattr(metric, name)) for name in metric._defaults}
    # A cached result is dropped: this rank must take part where others, who did update, compute anew.
    counters = {name: metric.__dict__.get(name) for name in ("_update_count", "_forward_cache")}
    return states | counters | {"_computed": None}


def restore_metric(metric: Any, snapshot: dict[str, Any]) -> None:
    """Puts back what :func:`metric_snapshot` copied."""
    for name, value in snapshot.items():
        setattr(metric, name, value)


def _copied(state: Any) -> Any:
    return list(state) if isinstance(state, list) else state.clone()


def sync_metrics_exactly(gather: Callable[[list[Any]], list[list[Any]]]) -> Callable[[], None]:
    """Lets all metrics gather their states by ``gather``, which takes unequal numbers and shapes.

    torchmetrics gathers tensor by tensor in the order of updates, which hangs where one rank updated more often and a
    list state has no reduction, and mixes dtypes where a rank never updated. The class is changed, not the instances:
    metrics are cloned and copied while an evaluation runs. A metric with a process group or a ``dist_sync_fn`` of the
    user's own gathers as it always did.

    Returns:
        A function that undoes it.
    """
    from torchmetrics import Metric
    from torchmetrics.utilities.distributed import gather_all_tensors

    usual = Metric._sync_dist

    def sync(self: Any, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        if (process_group or self.process_group) is not None or self.dist_sync_fn is not None:
            usual(self, dist_sync_fn, process_group)
        elif self._reductions:
            _sync_states(self, gather)

    def undo() -> None:
        Metric._sync_dist = usual  # type: ignore[method-assign]

    Metric._sync_dist = sync  # type: ignore[method-assign]
    return undo


def forget_computed(metric: Any) -> None:
    """Drops a metric's cached result, so that all ranks take part where one has to compute it anew."""
    metric._computed = None


def leaves_processes(trainer: Any) -> bool:
    """Whether the Trainer's processes end with the run, as those of the spawn and fork launchers do."""
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def _sync_states(metric: Any, gather: Callable[[list[Any]], list[list[Any]]]) -> None:
    names = list(metric._reductions)
    own = {name: getattr(metric, name) for name in names}
    lists = {name: state if isinstance(state, list) else [state] for name, state in own.items()}
    counts = torch.tensor([metric._update_count, *(len(lists[name]) for name in names)], device=metric.device)
    parts: list[tuple[int, dict[str, Any]]] = []
    for num_tensors, *tensors in gather([counts, *(tensor for name in names for tensor in lists[name])]):
        num_updates, *sizes = num_tensors.tolist()
        remaining = iter(tensors)
        received = {name: list(islice(remaining, size)) for name, size in zip(names, sizes, strict=True)}
        states = {name: part if isinstance(own[name], list) else part[0] for name, part in received.items()}
        parts.append((num_updates, states))
    for name, state in merge_states(parts, metric._reductions).items():
        setattr(metric, name, state)
