"""One training step: the strategy and its callbacks beside Lightning's ``DDPStrategy`` and a loop in plain torch."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_plugin import CustomDDPStrategy, PerRankSeed, default_callbacks
from ddp_plugin.batchnorm import convert_batchnorm
from ddp_plugin.hooks import HOOKS, Contents
from tests.benchmarks.models import WORKLOADS, Classifier, Workload, make_optimizer
from tests.benchmarks.timing import Row, Times, interleaved, ratio_row
from tests.harness import trainer

__all__ = [
    "batchnorm_rows",
    "fit",
    "hook_rows",
    "require_equal",
    "samples",
    "step_rows",
    "time_batchnorm",
    "time_hooks",
    "time_steps",
]

TRAINING_HOOKS = {  # past their exact first steps
    name: {"name": name, "start_step": 1} if HOOKS[name]().start_step else {"name": name}
    for name in HOOKS
    if HOOKS[name]().refusal is None
}
NUM_SKIPPED = 5  # first steps of a run: DDP rebuilds its buckets in the second, allocators warm up
PLAIN, THEIRS, OURS = "plain torch", "Lightning's DDPStrategy", "CustomDDPStrategy"
SEEDED, DEFAULT = "CustomDDPStrategy + PerRankSeed", "CustomDDPStrategy + default_callbacks()"
SYNCED, LOCAL = "synchronised BatchNorm", "BatchNorm"


def _seconds_per_step(started_s: list[float]) -> float:
    """From the start of the first step that counts to the start of the last: data, hooks and optimizer included."""
    return (started_s[-1] - started_s[NUM_SKIPPED]) / (len(started_s) - 1 - NUM_SKIPPED)


def samples(workload: Workload, num_steps: int) -> TensorDataset:
    """Returns what all ranks together train on in ``num_steps`` steps that count, and in those before."""
    return workload.samples((num_steps + NUM_SKIPPED + 1) * workload.batch_size * dist.get_world_size())


def _loader(workload: Workload, data: TensorDataset) -> DataLoader[Any]:
    # Sharded by hand: Lightning's own sampler would shuffle, whatever the loader says.
    return DataLoader(data, workload.batch_size, sampler=DistributedSampler(data, shuffle=False))


def fit(workload: Workload, data: TensorDataset, **settings: Any) -> tuple[float, list[Tensor]]:
    """Trains one epoch by a Trainer; returns the seconds of a step and the losses."""
    module = Classifier(workload)
    trainer(**settings).fit(module, _loader(workload, data))
    return _seconds_per_step(module.started_s), module.losses


def fit_plainly(
    workload: Workload, data: TensorDataset, change: Callable[[nn.Module], Any] = lambda network: None
) -> tuple[float, list[Tensor]]:
    """Trains one epoch by a loop that knows neither Lightning nor this package; DDP's defaults give its bucket plan."""
    network = workload.network()
    change(network)
    model = DistributedDataParallel(network)
    optimizer = make_optimizer(network)
    started_s, losses = [], []
    for inputs, labels in _loader(workload, data):
        started_s.append(time.perf_counter())
        loss = F.cross_entropy(model(inputs), labels)
        losses.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _seconds_per_step(started_s), losses


def _timed(name: str, run: Callable[[], tuple[float, list[Tensor]]], losses: dict[str, Tensor]) -> Callable[[], float]:
    def timed() -> float:
        seconds, found = run()
        losses[name] = torch.stack(found)
        return seconds

    return timed


def require_equal(losses: dict[str, Tensor]) -> None:
    """Refuses to compare the speed of things that do not compute the same."""
    first = next(iter(losses))
    for name, values in losses.items():
        if not torch.equal(values, losses[first]):
            raise RuntimeError(f"{name} and {first} trained differently, so their times cannot be compared")


def time_steps(workload_name: str, num_steps: int, num_rounds: int) -> Times:
    """Times a step of all variants on this rank.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    workload, losses = WORKLOADS[workload_name], {}
    data = samples(workload, num_steps)
    runs: dict[str, Callable[[], tuple[float, list[Tensor]]]] = {
        PLAIN: lambda: fit_plainly(workload, data),
        THEIRS: lambda: fit(workload, data, strategy=DDPStrategy()),
        OURS: lambda: fit(workload, data, strategy=CustomDDPStrategy()),
        SEEDED: lambda: fit(workload, data, strategy=CustomDDPStrategy(), callbacks=[PerRankSeed(seed=1)]),
        DEFAULT: lambda: fit(workload, data, strategy=CustomDDPStrategy(), callbacks=default_callbacks()),
    }
    times = interleaved({name: _timed(name, run, losses) for name, run in runs.items()}, num_rounds)
    require_equal(losses)
    return times


def step_rows(workload_name: str, times: Times) -> list[Row]:
    """Returns the report of one network: each variant over Lightning's, and each over plain torch."""
    rows = []
    for baseline in (THEIRS, PLAIN):
        section = f"training step / {baseline}"
        for subject in times:
            if subject != baseline and (subject, baseline) != (PLAIN, THEIRS):
                rows.append(ratio_row(section, f"{workload_name}: {subject}", times, subject, baseline))
    return rows


def time_hooks(workload_name: str, num_steps: int, num_rounds: int) -> tuple[Times, dict[str, int]]:
    """Times a step with each hook and with none on this rank.

    Returns:
        The times, and the bytes that this rank sends in a step, by hook.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    workload = WORKLOADS[workload_name]
    data = samples(workload, num_steps)
    variants = {"none": lambda: fit(workload, data, strategy=CustomDDPStrategy())[0]}
    for name, spec in TRAINING_HOOKS.items():
        variants[name] = lambda spec=spec: fit(workload, data, strategy=CustomDDPStrategy(comm_hook=spec))[0]
    times = interleaved(variants, num_rounds)
    buckets = _buckets(workload)
    bytes_sent = {}
    for name in TRAINING_HOOKS:
        hook = HOOKS[name]()
        num_bytes = sum(hook.wire_bytes(bucket, dist.get_world_size(), dist.get_rank()) for bucket in buckets)
        bytes_sent[name] = round(num_bytes / hook.period)
    return times, bytes_sent


def _buckets(workload: Workload) -> list[Contents]:
    """Returns what each bucket holds that the last of a few steps reduced."""
    seen: dict[int, Contents] = {}

    class Watch:
        def before_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
            if bucket_index == 0:
                seen.clear()  # buckets are rebuilt after the first step
            seen[bucket_index] = Contents.of(parameters, {id(p): str(i) for i, p in enumerate(parameters)})

        def after_reduction(self, bucket_index: int, gradient: Tensor, parameters: list[Tensor]) -> None:
            pass

    strategy = CustomDDPStrategy()
    strategy.add_bucket_observer(Watch())
    fit(workload, samples(workload, 1), strategy=strategy)
    assert sum(bucket.num_elements for bucket in seen.values()) == sum(
        p.numel() for p in workload.network().parameters()
    )
    return list(seen.values())


def hook_rows(workload_name: str, times: Times, bytes_sent: dict[str, int]) -> list[Row]:
    """Returns the report of the hooks: time over no hook, and bytes on the wire as the hooks declare them."""
    section = "training step with comm_hook / without"
    rows = [ratio_row(section, f"{workload_name}: {name}", times, name, "none") for name in TRAINING_HOOKS]
    section = "bytes that a rank sends per step (declared by the hook)"
    return rows + [Row(section, f"{workload_name}: {name}", "bytes", b, b, b) for name, b in bytes_sent.items()]


def time_batchnorm(workload_name: str, num_steps: int, num_rounds: int) -> Times:
    """Times a plain torch step with and without synchronised BatchNorm on this rank.

    Collectives:
        Those of the trainings, and a barrier before each, on all ranks.
    """
    workload = WORKLOADS[workload_name]
    data = samples(workload, num_steps)
    return interleaved(
        {
            LOCAL: lambda: fit_plainly(workload, data)[0],
            SYNCED: lambda: fit_plainly(workload, data, change=convert_batchnorm)[0],
        },
        num_rounds,
    )


def batchnorm_rows(workload_name: str, times: Times) -> list[Row]:
    """Returns the report of BatchNorm."""
    return [
        ratio_row(
            "training step in plain torch, synchronised BatchNorm / BatchNorm", workload_name, times, SYNCED, LOCAL
        )
    ]
