"""The only file that touches private names of torch, Lightning and torchmetrics.

Each helper says why no public way exists; ``tests/test_compat.py`` notices when a name moves.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from traceback import walk_tb
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    GradBucket as GradBucket,  # torch.distributed re-exports it, but hides it from type checkers
)
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.errors import DDPPluginError
from ddp_plugin.evaluation import merge_states
from ddp_plugin.forwarding import note_original, original_of

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


def all_gather_flat(output: torch.Tensor, given: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gathers tensors of one size into one tensor; torch 2.13 renamed the function and warns about the old name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, given, group=group)


def set_options_timeout(options: Any, timeout: timedelta) -> None:
    """Sets the timeout inside backend options; torch takes it from there once options are passed."""
    options._timeout = timeout


def default_store() -> Any:
    """Returns the store through which the processes found each other; it has no public name."""
    return dist.distributed_c10d._get_default_store()


def served_device_types(group: dist.ProcessGroup) -> frozenset[str]:
    """Returns the types of the devices that a group has a backend for."""
    return frozenset(device.type for device in group._device_types)


# ----------------------------------------------------------------------------------------- DistributedDataParallel


def check_reduction_finished(model: DistributedDataParallel) -> None:
    """Raises DDP's own error if the last backward left gradients unreduced; by itself it comes a forward later."""
    if hasattr(model, "reducer"):  # not so where delay_all_reduce_named_params names all parameters
        model._check_reducer_finalized()  # type: ignore[no-untyped-call]


def delays_reductions(model: DistributedDataParallel) -> bool:
    """Whether some parameters' reduction hangs on another one (``delay_all_reduce_named_params``)."""
    return bool(model._delay_all_reduce_params)


def never_reduce(model: DistributedDataParallel) -> None:
    """Leaves out the messages that ``no_sync`` still sends in the first step: of buffers, and of a static graph."""
    model.require_forward_param_sync = False
    model._static_graph_delay_allreduce_enqueued = True


def finish_rebuilding_buckets(model: DistributedDataParallel) -> None:
    """Rebuilds the buckets now, if the next forward would do so first of all; every rank must call it."""
    if hasattr(model, "reducer") and model.reducer._rebuild_buckets():
        model._has_rebuilt_buckets = True


def rebuilt_buckets(
    model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter] | None = None
) -> tuple[tuple[int, ...], ...] | None:
    """Returns the positions of each bucket's parameters, in the order of reduction.

    DDP writes them down some steps after it has rebuilt its buckets. Before that they can be read from buckets of
    zeros, which take the memory of all gradients for a moment.

    Args:
        model: the wrap.
        parameters: those that it reduces, if the answer cannot wait.

    Returns:
        ``None`` until DDP has rebuilt its buckets, or cannot tell.
    """
    if not getattr(model, "_has_rebuilt_buckets", False):
        return None
    written: str | None = model._get_ddp_logging_data().get(  # type: ignore[no-untyped-call]
        "rebuilt_per_bucket_param_indices"
    )
    if written is not None:
        return tuple(tuple(int(index) for index in bucket.split()) for bucket in written.split(","))
    if parameters is None:
        return None
    positions = {id(parameter): index for index, parameter in enumerate(parameters)}
    try:
        buckets = model.reducer._get_zeros_like_grad_buckets()
    except RuntimeError:  # a sparse gradient, which has no buffer
        return None
    return tuple(tuple(positions[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets)


@contextmanager
def first_buckets(buckets: Sequence[Sequence[int]] | None) -> Iterator[None]:
    """Lets a DistributedDataParallel that is made inside begin with these buckets, in the order of reduction.

    Its constructor computes them by a function of its own and has no argument for them. ``None`` changes nothing.
    """
    if buckets is None:
        yield
        return
    namespace: Any = dist
    usual = namespace._compute_bucket_assignment_by_size

    def assign(parameters: list[torch.Tensor], *_: Any) -> tuple[list[list[int]], list[int]]:
        sizes = [sum(parameters[i].numel() * parameters[i].element_size() for i in bucket) for bucket in buckets]
        return [list(bucket) for bucket in reversed(buckets)], sizes[::-1]  # DDP reverses both

    namespace._compute_bucket_assignment_by_size = assign
    try:
        yield
    finally:
        namespace._compute_bucket_assignment_by_size = usual


def main_thread_frame() -> Any:
    """Returns what the main thread is executing, from any thread; ``sys`` has no public name for it."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def awaited_worker(iterator: Any) -> str | None:
    """Returns which process an iterator of a DataLoader waits for, in words; ``None`` where it loads by itself."""
    try:
        worker = iterator._task_info[iterator._rcvd_idx][0]
        return f"data worker {worker} (pid {iterator._workers[worker].pid})"
    except (AttributeError, KeyError, IndexError):
        return None


def flight_records() -> list[dict[str, Any]]:
    """Returns what torch's flight recorders hold: the latest collectives of every group, of NCCL and of the others.

    It waits for no collective, and may be called from any thread. A torch that records nothing, or for which
    ``TORCH_FR_BUFFER_SIZE`` is 0, gives none.
    """
    from torch._C import _distributed_c10d as c10d

    records = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            record = json.loads(dump(True, False))
            if record.get("entries"):
                records.append(record)
    return records


def bucket_bytes(model: DistributedDataParallel) -> tuple[int, ...] | None:
    """Returns the sizes of the buckets in the order of reduction; ``None`` until DDP, some steps on, tells them.

    Only between a backward and the next one: DDP holds a lock inside them for which this would wait for ever.
    """
    written: str | None = model._get_ddp_logging_data().get("rebuilt_bucket_sizes")  # type: ignore[no-untyped-call]
    return None if written is None else tuple(int(size) for size in written.split(","))


# ------------------------------------------------------------------------------------------------------------- torch


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` is at work in a module: around it, in it (``.compile()``), or in Lightning's way."""
    if getattr(model, "_compiler_ctx", None) is not None:
        return True
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def cuts_compiled_graphs() -> bool:
    """Whether Dynamo cuts the graph of a compiled model at the buckets of the DDP that runs it."""
    import torch._dynamo.utils  # seconds, where nothing is compiled

    return torch._dynamo.utils.get_optimize_ddp_mode() != "no_optimization"


def has_compiled_code(model: torch.nn.Module) -> bool:
    """Whether Dynamo has code for a module's forward, or its training step, already. No public function tells."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    functions: list[Any] = [getattr(type(model), "training_step", None)]
    for module in model.modules():  # around one of torch's own modules, torch.compile puts a function of its own
        functions += [type(module).forward, getattr(module.forward, "_torchdynamo_orig_callable", None)]
    codes = {function.__code__ for function in functions if hasattr(function, "__code__")}
    return any(_debug_get_cache_entry_list(code) for code in codes)


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies tensors of one device in place by one number, in few kernels; the optimizers' own way to do so.

    Args:
        tensors: dense, of any shapes.
        factor: a tensor without dimensions on the same device.
    """
    torch._foreach_mul_(tensors, factor)


def loss_scale(scaler: Any) -> torch.Tensor | None:
    """Returns by what a gradient scaler multiplies the loss, on its device; ``get_scale`` would wait for the device."""
    return getattr(scaler, "_scale", None) if scaler is not None and scaler.is_enabled() else None


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often a tensor was changed in place; autograd counts it, and has no public word for it."""
    return tensor._version


def averages_models(strategy: Any) -> bool:
    """Whether a strategy averages weights now and then in place of gradients, by a hook or as post-local SGD does."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    has_outer_step = getattr(getattr(strategy, "comm_hook", None), "outer", None) is not None
    return has_outer_step or isinstance(getattr(strategy, "_ddp_comm_state", None), PostLocalSGDState)


def runs_bare_hook(strategy: Any) -> bool:
    """Whether gradients go through Lightning's own ``ddp_comm_hook``, of which nothing else is known."""
    return getattr(strategy, "_ddp_comm_hook", None) is not None


def keeps_batch_statistics(module: torch.nn.Module) -> bool:
    """Whether a layer normalises by its batch and may keep running statistics; the common base has no public name."""
    return isinstance(module, torch.nn.modules.batchnorm._NormBase)


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


def train_fetcher(trainer: Any) -> Any:
    """Returns what fetches training batches now; each time Lightning has made the loaders, it is another one."""
    return trainer.fit_loop._data_fetcher


def logging_step(trainer: Any) -> int:
    """Returns the step number under which Lightning gives this batch's values to the loggers."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def train_batches_done(trainer: Any) -> int:
    """Returns the batches that this rank has trained on in the epoch of the latest train iterator."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.processed)


def set_train_batches_done(trainer: Any, num_batches: int, *, in_total: bool = True) -> None:
    """Sets what a resumed epoch loop takes as done already; between the start of the run and its first batch.

    A checkpoint counts batches of the interrupted run, which may have had another number of ranks, or have lost the
    gradients of an accumulation window that was not complete.

    Args:
        trainer: the Trainer.
        num_batches: batches done in this epoch.
        in_total: whether the count over all epochs changes by as many.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    fewer = progress.current.processed - num_batches
    for tracker in (progress.current, progress.total) if in_total else (progress.current,):
        for name in ("ready", "started", "processed", "completed"):
            setattr(tracker, name, getattr(tracker, name) - fewer)


def reenter_train_epoch(trainer: Any) -> None:
    """Makes a resumed run go on inside the epoch that its checkpoint had already counted as over.

    Lightning ends an epoch when ``max_steps`` or a stop ends the run inside it, and would go on with the next one,
    whose first batches it then takes as done.
    """
    fit_loop = trainer.fit_loop
    for tracker in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        tracker.processed -= 1
        tracker.completed = min(tracker.completed, tracker.processed)
    fit_loop.restarting = True
    fit_loop.update_restart_stage()


def train_loaders_are_cycled(trainer: Any) -> bool:
    """Whether training loaders that end before the longest one begin again."""
    return bool(trainer.fit_loop._combined_loader._mode == "max_size_cycle")


def given_train_loaders(trainer: Any) -> list[Any]:
    """Returns the training loaders that a fit was given as objects; none where a module or datamodule makes them."""
    source = trainer.fit_loop._data_source
    if source.instance is None or source.is_module():
        return []
    given = source.instance
    if isinstance(given, dict):
        return list(given.values())
    return list(given) if isinstance(given, (list, tuple)) else [given]


def is_last_train_batch(trainer: Any) -> bool:
    """Whether the latest training batch was its epoch's last, and is done; also where only the loader's end tells."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return bool(progress.is_last_batch) and progress.current.ready == progress.current.processed


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
            original = original_of(dataloader)
            dataloader = process(original)
            for change in process_then_transform.transforms:  # type: ignore[attr-defined]
                dataloader = change(dataloader, trainer.state.stage)
            note_original(dataloader, original)
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
    return _gives_iterator(loop._data_fetcher)


def _gives_iterator(data_fetcher: Any) -> bool:
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

    return isinstance(data_fetcher, _DataLoaderIterDataFetcher)


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

    def pending(self, *, synced: bool = False) -> dict[str, tuple[str, float, float, dict[str, Any]]]:
        """Returns each plain value that was logged per batch and is due now.

        Args:
            synced: return those that were logged with ``sync_dist=True`` instead, wherever they were logged.

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
            if item.is_tensor
            and _is_for_all_ranks(item.meta.sync)
            and (item.meta.sync.should if synced else _is_per_batch(item.meta.fx))
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

    def restore(self, snapshot: dict[str, dict[str, Any]], *, keep_new: bool = False) -> None:
        """Puts every plain value back; a key that is new since then holds nothing.

        Args:
            snapshot: what :meth:`snapshot` returned.
            keep_new: whether a new key stays known, with nothing in it, where all ranks have to know the same keys.
        """
        for key, item in self._results.items():
            if not item.is_tensor:
                continue  # a torchmetrics object: it keeps its own state, and has to be known where others compute it
            if key in snapshot:
                item.__dict__.update(snapshot[key])
                item.has_reset = item.has_reset and not keep_new
            else:
                names = [name for name in ("value", "cumulated_batch_size") if keep_new and name in vars(item)]
                kept = {name: getattr(item, name).dtype for name in names}
                item.reset()  # not "due" then: the other ranks' gathered values make it known again
                item.has_reset = not keep_new
                for name, dtype in kept.items():  # Lightning resets to its default, and all ranks reduce in their own
                    setattr(item, name, getattr(item, name).to(dtype))

    def _due(self) -> list[tuple[str, Any]]:
        return [
            (key, item) for key, item in self._results.valid_items() if item.meta.on_epoch and item._computed is None
        ]


class LoggedReductions(Protocol):
    """What :func:`intercept_reductions` calls."""

    def reduce_logged(self, key: str, value: Any, group: Any, reduce_op: Any) -> Any:
        """Reduces one logged value now, and knows its key."""

    def reduce_epoch(self, logged: LoggedValues) -> None:
        """Comes before the epoch-level values of a loop are computed, training ones on all ranks alike."""

    def after_training_epoch(self) -> None:
        """Comes when all values of a training epoch have been computed."""


def intercept_reductions(trainer: Any, reductions: LoggedReductions) -> Callable[[], None]:
    """Lets ``reductions`` know by which key ``self.log(..., sync_dist=True)`` logged what it reduces.

    Lightning reduces each key by the strategy's ``reduce``, which sees a bare number.

    Returns:
        A function that undoes it.
    """
    connector, fit_loop = trainer._logger_connector, trainer.fit_loop
    loops = (fit_loop.epoch_loop, fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in loops:
        loop._results.log = _log_with_key(loop._results, reductions)

    def epoch_end_reached() -> None:
        type(connector).epoch_end_reached(connector)
        running = [loop for loop in loops if loop._results is trainer._results]
        if running and "metrics" not in vars(trainer._results):  # LoggedValues.on_epoch_metrics: somebody else does it
            reductions.reduce_epoch(LoggedValues(running[0]))

    def on_epoch_end() -> None:
        type(connector).on_epoch_end(connector)
        if trainer._results is fit_loop.epoch_loop._results:
            reductions.after_training_epoch()

    connector.epoch_end_reached, connector.on_epoch_end = epoch_end_reached, on_epoch_end

    def undo() -> None:
        for name in ("epoch_end_reached", "on_epoch_end"):
            vars(connector).pop(name, None)
        for loop in loops:
            vars(loop._results).pop("log", None)

    return undo


def _log_with_key(results: Any, reductions: LoggedReductions) -> Callable[..., None]:
    def log(fx: str, name: str, value: Any, *arguments: Any, **settings: Any) -> None:
        has_index = settings.get("add_dataloader_idx", True) and results.dataloader_idx is not None
        key = f"{fx}.{name}" + (f".{results.dataloader_idx}" if has_index else "")
        if settings.get("sync_dist"):
            settings["sync_dist_fn"] = _ReduceByKey(reductions, key)
        type(results).log(results, fx, name, value, *arguments, **settings)

    hidden: Callable[..., None] = torch.compiler.disable(log)  # type: ignore[no-untyped-call]  # as Lightning's own
    return hidden


class _ReduceByKey:
    """A reduction that knows its key; equal for equal keys, because Lightning compares what a key is logged with.

    Not a dataclass: Lightning moves their fields to devices.
    """

    def __init__(self, reductions: LoggedReductions, key: str) -> None:
        self.reductions, self.key = reductions, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ReduceByKey) and (self.reductions, self.key) == (other.reductions, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, value: Any, group: Any = None, reduce_op: Any = None) -> Any:
        return self.reductions.reduce_logged(self.key, value, group, reduce_op)


# Values are replaced at each update, never changed in place, so references are enough.
_ITEM_STATE = ("value", "cumulated_batch_size", "_update_count", "_computed", "_forward_cache", "has_reset")


def _is_for_all_ranks(sync: Any) -> bool:
    """Whether a value is one of all ranks; ``rank_zero_only`` and a group of the user's own say that it is not."""
    return not sync.rank_zero_only and sync.group is None


def _is_per_batch(hook: str) -> bool:
    """Whether a value was logged in a step or in a hook around one; epoch hooks log what is complete already."""
    name = hook.split(".")[0]
    return name.endswith("_step") or "_batch_" in name


def choose_checkpoint(trainer: Any, choose: Callable[[str | None], Any]) -> None:
    """Asks for the checkpoint of the fit that begins, once, when it is restored; to be called in a ``setup`` hook.

    Lightning takes the path in the main program, before the processes have found each other.

    Args:
        trainer: it has the process group, and has restored nothing yet.
        choose: called on all ranks at the same time; returns a path, or ``None`` to restore nothing. It is told which
            one Lightning has chosen by itself, that of a requeued SLURM job, and not asked where the fit was given one.
    """
    connector = trainer._checkpoint_connector

    def restore(checkpoint_path: Any = None, *arguments: Any) -> None:
        del connector._restore_modules_and_callbacks
        requeued = checkpoint_path if checkpoint_path and checkpoint_path == connector._hpc_resume_path else None
        if (not checkpoint_path or requeued) and trainer.state.fn == "fit":  # no fit follows one that failed at once
            checkpoint_path = choose(requeued)
        connector._restore_modules_and_callbacks(checkpoint_path, *arguments)

    connector._restore_modules_and_callbacks = restore


class MonitorMoments(Protocol):
    """What :func:`intercept_monitors` calls; on all ranks at the same moment of the fit."""

    overlay: dict[str, Any]
    """Values that stand before Lightning's own in ``trainer.callback_metrics``."""

    def before_plateau_schedulers(self, interval: str) -> None:
        """Before the schedulers that follow a metric read it; ``interval`` is ``"step"`` or ``"epoch"``."""


def intercept_monitors(trainer: Any, moments: MonitorMoments) -> Callable[[], None]:
    """Lets ``moments`` decide what ``trainer.callback_metrics`` shows.

    Lightning reads it in the middle of its loops, where no hook can come before. So two objects of this Trainer get a
    subclass of their own class.

    Returns:
        A function that undoes it.
    """
    epoch_class, connector_class = type(trainer.fit_loop.epoch_loop), type(trainer._logger_connector)

    def update_lr_schedulers(loop: Any, interval: str, update_plateau_schedulers: bool) -> None:
        if update_plateau_schedulers and not (interval == "step" and loop._should_accumulate()):
            moments.before_plateau_schedulers(interval)
        epoch_class.update_lr_schedulers(loop, interval, update_plateau_schedulers)

    def callback_metrics(connector: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = connector_class.callback_metrics.__get__(connector)
        metrics.update(moments.overlay)
        return metrics

    return _all_of(
        _specialise(trainer.fit_loop.epoch_loop, update_lr_schedulers=update_lr_schedulers),
        _specialise(trainer._logger_connector, callback_metrics=property(callback_metrics)),
    )


class StopMoments(Protocol):
    """What :func:`intercept_stopping` calls; each on all ranks at the same moment of the run, but for the wishes.

    Those of an evaluation come on ranks with unequal numbers of batches as often as on the one with the fewest.
    """

    def is_stop_agreed(self) -> bool:
        """Answers whoever reads ``trainer.should_stop``."""

    def wish_stop(self, stop: bool) -> None:
        """Is told what was written to ``trainer.should_stop``, on the rank where it was."""

    def wish_time_is_up(self) -> None:
        """Is told by a ``Timer`` that its time is up, on the rank where it is."""

    def before_fit(self) -> None:
        """Before Lightning first asks whether to train at all, and once more before the first epoch."""

    def after_batch(self) -> None:
        """After all hooks of a training batch, before a validation that is due then."""

    def after_batch_and_validation(self, *, ends_epoch: bool, inside_window: bool) -> None:
        """The same, after that validation; whether the epoch ends here, and whether gradients are accumulated."""

    def after_epoch(self) -> None:
        """After all hooks of a training epoch, before Lightning asks whether to train another one."""

    def before_evaluation(self, loop: Any) -> None:
        """Before a validation, test or prediction."""

    def count_evaluation_steps(self, num_steps: int) -> None:
        """When the loaders are known: how many steps this rank will take, 0 where nobody can tell."""

    def after_evaluation_step(self, loop: Any) -> None:
        """After all hooks of one of its batches."""

    def after_evaluation(self, loop: Any) -> None:
        """After all of its hooks."""


def intercept_stopping(trainer: Any, moments: StopMoments) -> Callable[[], None]:
    """Lets ``moments`` decide what ``trainer.should_stop`` is, and when to leave for another reason.

    Lightning reads ``should_stop`` in the middle of its loops, where no hook can come before; and a plain attribute
    cannot be watched. So objects of this Trainer get a subclass of their own class. Lightning's own handlers of signals
    are not installed, its broadcast of rank 0's SIGTERM at each step is not sent, and a ``Timer`` wishes instead of
    broadcasting rank 0's clock.

    Returns:
        A function that undoes it; what was wished for or agreed stays in ``trainer.should_stop``.
    """
    from lightning.pytorch.callbacks import Timer

    fit_class, epoch_class = type(trainer.fit_loop), type(trainer.fit_loop.epoch_loop)

    def skip(loop: Any) -> bool:
        moments.before_fit()
        return bool(fit_class.skip.__get__(loop))

    def on_run_start(loop: Any) -> None:
        fit_class.on_run_start(loop)
        moments.before_fit()

    def on_epoch_end(loop: Any) -> None:
        fit_class.on_advance_end(loop)
        moments.after_epoch()

    def on_batch_end(loop: Any, data_fetcher: Any) -> None:
        moments.after_batch()
        epoch_class.on_advance_end(loop, data_fetcher)
        moments.after_batch_and_validation(
            ends_epoch=loop._is_training_done, inside_window=train_window_is_open(trainer)
        )

    def advance(loop: Any, data_fetcher: Any) -> None:
        try:
            epoch_class.advance(loop, data_fetcher)
        except StopIteration as error:
            raise _end_of_data(error, data_fetcher) from error.__cause__

    def check_time(timer: Any) -> None:
        remaining_s = timer.time_remaining()
        if remaining_s is not None and remaining_s <= 0:
            moments.wish_time_is_up()

    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    should_stop = property(lambda _: moments.is_stop_agreed(), lambda _, stop: moments.wish_stop(bool(stop)))
    wished_before = trainer.should_stop
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    undo = _all_of(
        _specialise(trainer, should_stop=should_stop),
        _specialise(
            trainer.fit_loop,
            skip=property(skip),
            on_run_start=on_run_start,
            on_advance_start=_without_end(fit_class.on_advance_start),
            advance=_without_end(fit_class.advance),
            on_advance_end=_without_end(on_epoch_end),
        ),
        _specialise(
            trainer.fit_loop.epoch_loop,
            advance=advance,
            on_advance_end=_without_end(on_batch_end),
            _broadcast_sigterm_tensor=lambda loop: None,
        ),
        _specialise(trainer._signal_connector, register_signal_handlers=lambda connector: None),
        *(_intercept_evaluation(loop, moments) for loop in loops),
        *(_specialise(timer, _check_time_remaining=lambda timer, _: check_time(timer)) for timer in timers),
    )
    moments.wish_stop(wished_before)

    def release() -> None:
        undo()
        trainer.should_stop = moments.is_stop_agreed()

    return release


def _intercept_evaluation(loop: Any, moments: StopMoments) -> Callable[[], None]:
    loop_class = type(loop)
    step_name = "_predict_step" if hasattr(loop, "_predict_step") else "_evaluation_step"
    step_of_class = getattr(loop_class, step_name)
    is_counted = True

    def run(loop: Any) -> Any:
        nonlocal is_counted
        is_counted = False
        moments.before_evaluation(loop)
        result = loop_class.run(loop)
        moments.after_evaluation(loop)
        return result

    def setup_data(loop: Any) -> None:
        nonlocal is_counted
        loop_class.setup_data(loop)
        if not is_counted:  # called by others as well
            is_counted = True
            moments.count_evaluation_steps(_num_steps(loop))

    def step(loop: Any, *arguments: Any) -> None:
        try:
            step_of_class(loop, *arguments)
        except StopIteration as error:
            raise _end_of_data(error, loop._data_fetcher) from error.__cause__
        moments.after_evaluation_step(loop)

    return _specialise(loop, run=run, setup_data=setup_data, **{step_name: step})


def _without_end(function: Callable[..., None]) -> Callable[..., None]:
    """Lets a part of a loop that reads no data end by no ``StopIteration`` of a hook."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except StopIteration as error:
            raise _end_of_data(error) from error.__cause__

    return call


def _end_of_data(error: StopIteration, data_fetcher: Any = None) -> Exception:
    """Returns the error itself if it is the data's, else one in words: Lightning takes any for the end of the data.

    No context manager can do so: for ``contextlib``, a ``RuntimeError`` with this cause is the ``StopIteration``.
    """
    if (where := hook_of(error)) is None or _gives_iterator(data_fetcher):
        return error
    return DDPPluginError(f"{where} raised StopIteration, which Lightning would take for the end of the data.")


def _num_steps(loop: Any) -> int:
    """Returns how many steps an evaluation takes at least, 0 where nobody can tell."""
    if loop._combined_loader is None:
        return 0
    numbers = loop.max_batches if isinstance(loop.max_batches, list) else [loop.max_batches]
    num_steps = sum(numbers) if loop._combined_loader._mode == "sequential" else min(numbers, default=0)
    return 0 if num_steps == float("inf") else int(num_steps)


def train_window_is_open(trainer: Any) -> bool:
    """Whether gradients are being accumulated, so that more batches come before the optimizer steps."""
    return bool(trainer.fit_loop.epoch_loop._should_accumulate())


def note_sigterm(trainer: Any) -> None:
    """Lets ``trainer.received_sigterm`` answer yes; Lightning forgets it when the next run begins."""
    trainer._signal_connector.received_sigterm = True


def interrupt_validation(trainer: Any) -> None:
    """Writes down that the validation inside the fit has begun and is not over, so that a resumed run does it anew.

    Lightning would recognise that from a batch that is in its step, and take a validation that has not begun, or is
    between two batches, for done.
    """
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    num_before = progress.total.completed - progress.current.completed
    for tracker, num_done in ((progress.total, num_before), (progress.current, 0)):
        tracker.ready = tracker.started = num_done + 1
        tracker.processed = tracker.completed = num_done
    progress.is_last_batch = False


def forget_interrupted_validation(trainer: Any) -> None:
    """Evens the counts of a validation that is done anew; a later checkpoint would be taken for one inside it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop.restarting:
        loop.batch_progress.total.reset_on_restart()


def hpc_checkpoint_path(trainer: Any) -> str:
    """Returns the next path at which Lightning looks for a checkpoint when SLURM starts the job again."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def _all_of(*functions: Callable[[], None]) -> Callable[[], None]:
    def call_all() -> None:
        for function in functions:
            function()

    return call_all


def _specialise(instance: Any, **members: Any) -> Callable[[], None]:
    """Gives one object a subclass of its class with other members; the function that is returned takes it back."""
    own = type(instance)
    special = type(own.__name__, (own,), {"__module__": own.__module__, "__doc__": own.__doc__, **members})
    instance.__class__ = special

    def undo() -> None:
        special.is_taken_back = True  # type: ignore[attr-defined]
        if type(instance) is special:
            below: Any = own
            while vars(below).get("is_taken_back", False):  # released before what was put on top of it
                below = below.__base__
            instance.__class__ = below
        else:  # somebody put a class on top: theirs stays, and finds nothing changed below
            for name in members:
                delattr(special, name)

    return undo


def plateau_monitors(trainer: Any, interval: str) -> list[str]:
    """Returns the monitors of the ``ReduceLROnPlateau`` schedulers that step now, by Lightning's own count."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    position = 1 + (trainer.fit_loop.epoch_loop.batch_idx if interval == "step" else trainer.current_epoch)
    return [
        config.monitor
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau
        and config.monitor is not None
        and config.interval == interval
        and position % config.frequency == 0
    ]


def may_save_now(callback: Any, global_step: int) -> bool:
    """Whether a ``ModelCheckpoint`` may read its monitor after this training batch; it keeps its intervals private."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    if not isinstance(callback, ModelCheckpoint):
        return False
    every = callback._every_n_train_steps
    return callback._train_time_interval is not None or (every >= 1 and global_step % every == 0)


def wraps_checkpoint_io(io: Any) -> bool:
    """Whether a ``CheckpointIO`` hands the files to another one, which Lightning fills in if there is none."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    return isinstance(io, _WrappingCheckpointIO)


def innermost_checkpoint_io(io: Any) -> Any:
    """Returns the ``CheckpointIO`` that opens files for this one; one that changes what is loaded stands for itself."""
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    while isinstance(io, _WrappingCheckpointIO) and type(io).load_checkpoint is _WrappingCheckpointIO.load_checkpoint:
        io = io.checkpoint_io
    return io


def remove_after_saves(io: Any, path: Any) -> None:
    """Removes a checkpoint; behind the saves that an ``AsyncCheckpointIO`` has not done yet, and not if they fail.

    Lightning removes at once, so that of an old checkpoint and the one that replaces it there may be none for a while.
    """
    saver = next((each for each in _background_ios(io) if each._executor is not None), None)
    if saver is None:
        io.remove_checkpoint(path)
        return

    def remove() -> None:
        if saver._error is None:
            try:
                io.remove_checkpoint(path)
            except BaseException as error:
                saver._error = error  # raised at the next save, as an error of the last one is

    saver._executor.submit(remove)


def saves_in_background(io: Any) -> bool:
    """Whether a ``CheckpointIO``, or one that it wraps, is an ``AsyncCheckpointIO``."""
    return bool(_background_ios(io))


def finish_saves(io: Any) -> BaseException | None:
    """Waits for the saves that an ``AsyncCheckpointIO`` has not done yet; returns what the last one to fail raised.

    The error is taken out: Lightning keeps it, and raises it at the next save and once more in ``teardown``.
    """
    error = None
    for each in _background_ios(io):
        if each._executor is not None:
            each._executor.submit(int).result()  # there is one thread, so it comes last
        error, each._error = error or each._error, None
    return error


def _background_ios(io: Any) -> list[Any]:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

    found = []
    while isinstance(io, _WrappingCheckpointIO):
        if isinstance(io, AsyncCheckpointIO):
            found.append(io)
        io = io.checkpoint_io
    return found


def guard_launched(launcher: Any, guard: Callable[..., Any], before: Callable[[], None] | None = None) -> None:
    """Lets ``guard(function, *args, **kwargs)`` call what a launcher runs in each process; ``None`` is let alone.

    Lightning hands the launcher all that a Trainer does, and nothing lies between it and the handling of exceptions.

    Args:
        launcher: a strategy's; changed.
        guard: what can be pickled where the launcher starts processes by ``spawn``.
        before: called first of all, in the process that launches, before any other is started; can be pickled too.
    """
    if launcher is not None:
        launcher.launch = partial(_launch_guarded, launcher, guard, before)


def _launch_guarded(
    launcher: Any,
    guard: Callable[..., Any],
    before: Callable[[], None] | None,
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if before is not None:
        before()
    return type(launcher).launch(launcher, partial(guard, function), *args, **kwargs)


def hook_of(error: BaseException) -> str | None:
    """Returns in which method of a module, callback or strategy an exception was raised, as ``"Class.method"``.

    It is the last one that Lightning called, as the traceback shows; Lightning keeps no note of it.
    """
    from lightning.pytorch.trainer import call

    found, is_called = None, False
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == call.__file__:
            found = frame.f_locals.get("hook_name", found)  # all there is where a decorator or a lambda was called
        elif is_called and "self" in frame.f_locals:
            found = f"{type(frame.f_locals['self']).__name__}.{frame.f_code.co_name}"
        is_called = frame.f_code.co_filename == call.__file__
    return found


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


# ---------------------------------------------------------------------------------------------------------- tracing


class WatchesCollectives(Protocol):
    """What :func:`watch_collectives` tells."""

    def issued(self, operation: str, num_bytes: int, stack: list[tuple[str, int, str]], *, is_on_host: bool) -> Any:
        """Sees a collective begin.

        Args:
            operation: such as ``"all_reduce"``.
            num_bytes: what this rank brings to it.
            stack: ``(file, line, function)``, innermost first.
            is_on_host: whether it is of CPU tensors, or a barrier.
        """

    def under_way(self, call: Any, work: object, begun_s: float) -> None:
        """Sees what stands for it; ``None`` where it is over already."""

    def waited(self, work: object, begun_s: float) -> None:
        """Sees that somebody has waited for it since then."""


# Methods of a process group: what each is called, and which of its arguments is what the rank brings.
_COLLECTIVES = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),  # before torch 2.13; all_gather_single since
    "all_gather_single": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
    "barrier": ("barrier", 0),
}


def watch_collectives(watch: WatchesCollectives) -> Callable[[], None]:
    """Tells of each collective that Python issues and of each wait for one, in any thread and however it was imported.

    The methods of torch's class of process groups are replaced, which ``torch.distributed`` calls for every group, and
    the function by which DDP broadcasts buffers. A tensor that cannot be looked at is not told, and goes its way.

    Returns:
        A function that undoes it.
    """
    from torch._C._distributed_c10d import Work

    undo = [
        _replace(dist.ProcessGroup, name, partial(_watched_collective, watch, *described))
        for name, described in _COLLECTIVES.items()
        if name in vars(dist.ProcessGroup)
    ]
    undo.append(_replace(Work, "wait", partial(_watched_wait, watch)))
    undo.append(_replace(dist, "_broadcast_coalesced", partial(_watched_collective, watch, "broadcast", 1, offset=0)))
    return _all_of(*undo)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    own = vars(owner)[name]
    setattr(owner, name, make(getattr(owner, name)))
    return lambda: setattr(owner, name, own)


def _watched_collective(
    watch: WatchesCollectives, operation: str, brought: int, usual: Callable[..., Any], offset: int = 1
) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = None
        try:
            is_on_host = operation == "barrier" or any(tensor.device.type == "cpu" for tensor in _tensors(args))
            num_bytes = sum(map(_num_bytes, _tensors(args[brought + offset : brought + offset + 1])))
            call = watch.issued(operation, num_bytes, _stack(), is_on_host=is_on_host)
        except DDPPluginError:  # a signal's, about another rank
            raise
        except Exception:  # a tensor that cannot be looked at: torch says what it thinks of it
            pass
        begun_s = time.perf_counter()
        work = usual(*args, **kwargs)
        if call is not None:
            watch.under_way(call, work, begun_s)
        return work

    return collective


def _watched_wait(watch: WatchesCollectives, usual: Callable[..., Any]) -> Callable[..., Any]:
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return usual(work, *args, **kwargs)
        finally:
            watch.waited(work, begun_s)

    return wait


def _stack() -> list[tuple[str, int, str]]:
    frame = sys._getframe().f_back
    found: list[tuple[str, int, str]] = []
    while frame := frame.f_back if frame is not None else None:
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    return found


def _num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements, of a sparse one's those that are there."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout != torch.strided:
        tensor = tensor.values()
    return tensor.numel() * tensor.element_size()


def _tensors(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for part in given:
            yield from _tensors(part)


def profiler_is_on() -> bool:
    """Whether a torch profiler of somebody's records now; a second one cannot begin."""
    from torch._C._autograd import _profiler_enabled

    return bool(_profiler_enabled())
