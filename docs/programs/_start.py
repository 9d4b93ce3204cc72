"""Starts a program on processes of this machine, and prints what each of its variants gave."""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(file: str) -> None:
    """Prints what a program says, and what it measures on its ``NUM_RANKS`` processes."""
    name = Path(file).stem
    program = importlib.import_module(name)
    print(program.__doc__)
    print(report(name, start([name], program.NUM_RANKS)[name]))


def start(names: Sequence[str], num_ranks: int) -> dict[str, list[Any]]:
    """Runs programs, one after another, on processes that are started for them; see :func:`measure`."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_rank_main, (names, num_ranks, store.port, results), num_ranks)
    return results.get()


def measure(name: str) -> list[Any]:
    """Runs a program's variants on this rank, and its check: what each gave, with several ranks a list by rank."""
    program = importlib.import_module(name)
    results = [_of_all_ranks(variant()) for variant in program.VARIANTS]
    program.check(*results)
    return results


def report(name: str, results: Sequence[Any]) -> str:
    """Writes results one a line, after the first line of each variant's docstring."""
    program = importlib.import_module(name)
    labels = [variant.__doc__.splitlines()[0].rstrip(".") for variant in program.VARIANTS]
    width = max(map(len, labels))
    texts = [_text_by_rank(result) if program.NUM_RANKS > 1 else _text(result) for result in results]
    return "\n".join(f"{label:<{width}}  {text}" for label, text in zip(labels, texts, strict=True))


def _rank_main(rank: int, names: Sequence[str], num_ranks: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).parent))
    if num_ranks > 1:
        os.environ.update(  # as torchrun does it
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            GROUP_RANK="0",
            WORLD_SIZE=str(num_ranks),
            LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="programs",
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
        dist.init_process_group("gloo")
    measured = {name: measure(name) for name in names}
    if rank == 0:
        results.put(measured)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _of_all_ranks(value: Any) -> Any:
    if not dist.is_initialized():
        return value
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _text_by_rank(values: Sequence[Any]) -> str:
    if all(value == values[0] for value in values):
        return _text(values[0])
    return "; ".join(f"rank {rank}: {_text(value)}" for rank, value in enumerate(values))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
