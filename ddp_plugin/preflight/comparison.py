"""Where the ranks differ, in one sentence for each difference: who has what, and what to change.

What an error is and what a warning, and why:

================== ======= =============================================================================================
what differs       level   because
================== ======= =============================================================================================
rank               error   two processes with one rank: both train, or none ever starts
world              error   world size, nodes, devices for each node, backend, kind of device, launcher: ranks wait for
                           others that do not exist, or speak another language
loopback address   error   of a rank on several machines: gloo, which the control group is of, connects in vain
one GPU, two ranks error   NCCL refuses it; with gloo, which serves such ranks, nothing is said
parameter, buffer  error   DistributedDataParallel hangs, or mixes what does not belong together
setting            error   steps, accumulation, clipping, precision, hook, and the like: unequal numbers of collectives,
                           or a result that is neither rank's
callback           error   one that communicates and is missing on a rank, or comes in another order, waits for ever
optimizer          error   equal gradients, different updates: the models part; where the ranks train alone, and only
                           their parameters are averaged, the settings of optimizers are not compared
version            error   ddp_plugin; first two numbers of torch and lightning; NCCL: other messages, other numbers
version            warning anything else: last number of torch and lightning, build, Python, torchmetrics, numpy, CUDA
environment        error   ``TORCH_DISTRIBUTED_DEBUG``: ``DETAIL`` on one rank sends messages that others do not expect
environment        warning variables of NCCL, gloo and torch: may suit one kind of machine
device             warning other kinds of GPU: all wait for the slowest
launcher           warning job numbers and the like: processes of two jobs may have met
option             warning hyperparameters, options of callbacks, batch sizes, other callbacks: may be intended
================== ======= =============================================================================================
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from ddp_plugin.preflight.facts import (
    CALLBACK,
    DEVICE,
    ENVIRONMENT,
    LAUNCHER,
    OPTIMIZER,
    OPTION,
    PLACE,
    SETTING,
    VERSION,
    WORLD,
    Facts,
)

__all__ = ["CALLBACK_ORDER", "Finding", "compare", "compare_models", "in_ranks"]

CALLBACK_ORDER = "order of the callbacks that communicate"
"""A name of kind :data:`~ddp_plugin.preflight.facts.CALLBACK`; it is compared where all ranks have the same ones."""

_NUM_GROUPS_SHOWN = 4
_NUM_TENSORS_SHOWN = 5
_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_MAX_RESTARTS")


@dataclass(frozen=True)
class Finding:
    """One difference between ranks.

    Attributes:
        sentence: which ranks have what, and what to change; without a full stop.
        is_error: whether the run cannot be right, or cannot end; else it may be intended.
    """

    sentence: str
    is_error: bool


@dataclass(frozen=True)
class _Kind:
    change: str
    is_error: Callable[[str, Sequence[str]], bool]  # of a name and its values
    absent: str = "missing"


def _always(name: str, values: Sequence[str]) -> bool:
    return True


def _never(name: str, values: Sequence[str]) -> bool:
    return False


def _is_grave_version(name: str, values: Sequence[str]) -> bool:
    if name in ("torch", "lightning"):
        return len({tuple(value.split(".")[:2]) for value in values}) > 1
    return name in ("ddp_plugin", "NCCL")


def _sends_more(name: str, values: Sequence[str]) -> bool:
    return name == "TORCH_DISTRIBUTED_DEBUG" and "DETAIL" in [value.upper() for value in values]


_KINDS: Mapping[str, _Kind] = {  # most important first
    WORLD: _Kind("start every process with the same devices, num_nodes and strategy", _always),
    VERSION: _Kind("install one version on every machine", _is_grave_version),
    SETTING: _Kind("give every rank the same value", _always),
    CALLBACK: _Kind("give every rank the same callbacks in the same order", _always),
    OPTIMIZER: _Kind("make the same optimizers on every rank", _always),
    LAUNCHER: _Kind("start all processes in one job", _never, "not set"),
    ENVIRONMENT: _Kind("set it alike on every machine", _sends_more, "not set"),
    DEVICE: _Kind("all ranks wait for the slowest device; use one kind", _never),
    OPTION: _Kind("give every rank the same value, unless it is meant", _never),
}


def compare(facts: Sequence[Facts]) -> list[Finding]:
    """Compares what the ranks say about themselves.

    Args:
        facts: of the ranks that have come, in any order; all of them say the same kinds of things.

    Returns:
        Errors first, then warnings; each in the order of the table above.
    """
    facts = sorted(facts, key=lambda each: (each.rank, each.hostname, each.pid))
    findings = [*_ranks_taken_twice(facts), *_found_by_nobody(facts), *_shared_gpus(facts)]
    for kind, rule in _KINDS.items():
        by_rank = [(each.rank, each.values.get(kind, {})) for each in facts]
        findings += _differences(kind, rule, by_rank)
    return sorted(findings, key=lambda finding: not finding.is_error)


def _differences(kind: str, rule: _Kind, by_rank: Sequence[tuple[int, Mapping[str, str]]]) -> list[Finding]:
    findings: list[Finding] = []
    names = dict.fromkeys(name for _, values in by_rank for name in values)
    for name in names if kind != LAUNCHER else [name for name in _JOB_VARIABLES if name in names]:
        if name == CALLBACK_ORDER and findings:  # it follows from those
            continue
        groups: dict[str | None, list[int]] = {}
        for rank, values in by_rank:
            groups.setdefault(values.get(name), []).append(rank)
        if len(groups) > 1:
            is_error = rule.is_error(name, [value for value in groups if value is not None])
            findings.append(Finding(f"{name} is {_who_has_what(groups, rule.absent)}: {rule.change}", is_error))
    return findings


def _who_has_what(groups: Mapping[str | None, Sequence[int]], absent: str) -> str:
    parts = [f"{absent if value is None else value} on {in_ranks(ranks)}" for value, ranks in groups.items()]
    if len(parts) > _NUM_GROUPS_SHOWN:
        others = [rank for ranks in list(groups.values())[_NUM_GROUPS_SHOWN:] for rank in ranks]
        parts = [*parts[:_NUM_GROUPS_SHOWN], f"something else on {in_ranks(others)}"]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _ranks_taken_twice(facts: Sequence[Facts]) -> list[Finding]:
    by_rank: dict[int, list[Facts]] = {}
    for each in facts:
        by_rank.setdefault(each.rank, []).append(each)
    return [
        Finding(
            f"rank {rank} is taken by {' and by '.join(each.process for each in several[:_NUM_GROUPS_SHOWN])}: give "
            "every node its own NODE_RANK and every process of a node its own LOCAL_RANK, and every run a MASTER_PORT "
            "of its own",
            is_error=True,
        )
        for rank, several in by_rank.items()
        if len(several) > 1
    ]


def _found_by_nobody(facts: Sequence[Facts]) -> list[Finding]:
    places = [(each, each.values.get(PLACE, {})) for each in facts]
    if len({place.get("machine") for _, place in places}) == 1:
        return []
    lost = [each for each, place in places if "address" in place and ip_address(place["address"]).is_loopback]
    if not lost:
        return []
    address = lost[0].values[PLACE]["address"]
    return [
        Finding(
            f"{in_ranks([each.rank for each in lost])} would tell other machines to find them at {address}, which is "
            f"what the name {lost[0].hostname} stands for there: set GLOO_SOCKET_IFNAME to the network device between "
            "the machines (see `ip -br addr`), or give the name its own address in /etc/hosts",
            is_error=True,
        )
    ]


def _shared_gpus(facts: Sequence[Facts]) -> list[Finding]:
    by_gpu: dict[str, list[Facts]] = {}
    for each in facts:
        gpu = each.values.get(PLACE, {}).get("gpu")
        if gpu is not None and "nccl" in each.values.get(WORLD, {}).get("backend", ""):
            by_gpu.setdefault(gpu, []).append(each)
    return [
        Finding(
            f"{in_ranks([each.rank for each in several])} have one GPU, {several[0].values[PLACE]['device']} of "
            f"{several[0].hostname}, where NCCL wants one for each rank: look at LOCAL_RANK and CUDA_VISIBLE_DEVICES, "
            "or start fewer processes",
            is_error=True,
        )
        for several in by_gpu.values()
        if len({each.rank for each in several}) > 1
    ]


def compare_models(entries: Sequence[tuple[Sequence[int], Sequence[tuple[str, str]]]]) -> list[Finding]:
    """Compares the models of all ranks by what is in them.

    Args:
        entries: ``(ranks, what model_entries says there)`` for each model that some ranks have.

    Returns:
        The first differences, each an error, by name; one that tells how many more there are; or the first place where
        the order differs.
    """
    tables = [(ranks, dict(listed)) for ranks, listed in entries]
    names = dict.fromkeys(name for _, listed in entries for name, _ in listed)
    findings = []
    for name in names:
        groups: dict[str | None, list[int]] = {}
        for ranks, table in tables:
            groups.setdefault(table.get(name), []).extend(ranks)
        if len(groups) > 1:
            findings.append(f"{name} is {_who_has_what(groups, 'missing')}")
    if len(findings) > _NUM_TENSORS_SHOWN:
        num_more = len(findings) - _NUM_TENSORS_SHOWN
        findings = [*findings[:_NUM_TENSORS_SHOWN], f"{num_more} more parameters and buffers are not the same"]
    if not findings and len(entries) > 1:
        (first_ranks, first), (ranks, other) = entries[0], entries[1]
        place = next(index for index, (one, two) in enumerate(zip(first, other, strict=True)) if one != two)
        findings = [
            f"number {place} in the model's order is {first[place][0]} on {in_ranks(first_ranks)} and "
            f"{other[place][0]} on {in_ranks(ranks)}"
        ]
    return [Finding(f"{found}: build the same model on every rank", is_error=True) for found in findings]


def in_ranks(ranks: Sequence[int]) -> str:
    """Names ranks: ``"rank 3"``, ``"ranks 0-6, 9"``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(set(ranks)) > 1)} {', '.join(parts)}"
