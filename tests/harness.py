"""Many ranks as easily as one: ``@ranks(1, 2, 3)`` runs a test in that many real processes over gloo.

Every rank's failure is reported with its own traceback; a rank that hangs is reported with its stacks; nothing that was
started is left behind. The processes come from a fork server that has torch and Lightning imported already, so a rank
costs a tenth of a second and inherits no thread, no autograd state and no process group from the test runner.
"""

import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

__all__ = ["RankFailureError", "ranks", "run_ranks", "trainer"]

ROOT = Path(__file__).resolve().parent.parent
GRACE_S = 5.0  # what the other ranks get to finish, once one has failed


class RankFailureError(AssertionError):
    """At least one rank failed, died or hung; the message holds the report of every rank."""


def ranks(*world_sizes: int, init: bool = True, timeout_s: float = 120.0) -> Callable[..., Any]:
    """Runs the decorated test once for each world size, with its body executed on every rank.

    The test may take ``world_size`` and any fixture or parameter whose value can be pickled.

    Args:
        world_sizes: how many processes, one test case each.
        init: whether a gloo process group exists when the body starts; ``False`` leaves that to a Trainer.
        timeout_s: after this the ranks are stopped and their stacks reported.
    """
    if not world_sizes or any(n < 1 for n in world_sizes):
        raise ValueError(f"ranks() needs world sizes of at least 1, got {world_sizes}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(**arguments: Any) -> None:
            world_size = arguments["world_size"]
            if "world_size" not in signature.parameters:
                del arguments["world_size"]
            run_ranks(function, world_size, init=init, timeout_s=timeout_s, **arguments)

        if "world_size" not in signature.parameters:
            extra = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
            signature_out = signature.replace(parameters=[*signature.parameters.values(), extra])
            wrapper.__signature__ = signature_out  # type: ignore[attr-defined]
        return pytest.mark.parametrize("world_size", world_sizes)(wrapper)

    return decorate


def run_ranks(
    function: Callable[..., Any], world_size: int, /, *, init: bool = True, timeout_s: float = 120.0, **arguments: Any
) -> list[Any]:
    """Runs ``function(**arguments)`` on ``world_size`` ranks and returns what each returned, in rank order.

    Args:
        function: a module-level function; it is found again by name in the new processes.
        world_size: number of processes.
        init: see :func:`ranks`.
        timeout_s: see :func:`ranks`.
        arguments: passed on, pickled.

    Raises:
        RankFailureError: any rank raised, died or did not finish in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "lightning.pytorch", "torchmetrics", "ddp_plugin", "tests.harness"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # ours, so no port can be lost
    target = (inspect.getmodule(function).__name__, function.__qualname__)  # type: ignore[union-attr]
    started: list[tuple[BaseProcess, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                settings = (rank, world_size, store.port, init, timeout_s, str(Path(folder, f"stacks-{rank}")))
                process = context.Process(target=_rank_main, args=(target, arguments, settings, sender), daemon=False)
                process.start()
                sender.close()
                started.append((process, receiver))
            return _collect(started, Path(folder), timeout_s)
        finally:
            for process, receiver in started:
                _end(process)
                receiver.close()


def _collect(started: list[tuple[BaseProcess, Connection]], folder: Path, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    verdicts: dict[int, tuple[bool, Any]] = {}
    pending = {receiver: rank for rank, (_, receiver) in enumerate(started)}
    while pending and (remaining := deadline - time.monotonic()) > 0:
        for receiver in wait(list(pending), timeout=remaining):
            rank = pending.pop(receiver)  # type: ignore[arg-type]
            try:
                verdicts[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                process = started[rank][0]
                process.join(GRACE_S)
                verdicts[rank] = (False, f"died without a word, exit code {process.exitcode}")
            if not verdicts[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in pending.values():
        verdicts[rank] = (False, "did not finish in time; its stacks:\n" + _stacks(started[rank][0], folder, rank))
    for rank, (process, _) in enumerate(started):
        if verdicts[rank][0]:
            process.join(GRACE_S)
            if process.exitcode != 0:
                verdicts[rank] = (False, f"finished its test, then ended with exit code {process.exitcode}")
    if all(passed for passed, _ in verdicts.values()):
        return [verdicts[rank][1] for rank in range(len(started))]
    report = [
        f"--- rank {r} of {len(started)}: {'passed' if ok else text}" for r, (ok, text) in sorted(verdicts.items())
    ]
    raise RankFailureError("\n" + "\n".join(report))


def _stacks(process: BaseProcess, folder: Path, rank: int) -> str:
    path = folder / f"stacks-{rank}"
    if process.pid is None or not process.is_alive() or not path.exists():
        return "(none: the process had not started its test)"
    os.kill(process.pid, signal.SIGUSR1)
    for _ in range(20):
        time.sleep(0.05)
        if text := path.read_text():
            return text
    return "(none: the process did not answer)"


def _end(process: BaseProcess) -> None:
    """Ends a rank and everything it started (it leads a process group of its own)."""
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _rank_main(
    target: tuple[str, str],
    arguments: dict[str, Any],
    settings: tuple[int, int, int, bool, float, str],
    sender: Connection,
) -> None:
    import faulthandler

    rank, world_size, port, init, timeout_s, stacks_path = settings
    os.setsid()
    stacks = open(stacks_path, "w")  # noqa: SIM115  # stays open for faulthandler as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="True",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # what data workers use in a program that a person starts
    warnings.filterwarnings("error", module=r"ddp_plugin")
    sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "recipes")) if folder not in sys.path]
    try:
        if init:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
            dist.barrier()  # nobody may finish, and leave, while others still connect
        function: Any = importlib.import_module(target[0])
        for part in target[1].split("."):
            function = getattr(function, part)
        value = getattr(function, "__wrapped__", function)(**arguments)
        verdict = (True, value)
    except BaseException:
        verdict = (False, traceback.format_exc())
    try:
        sender.send_bytes(pickle.dumps(verdict))  # by value: a tensor that send() shares is gone with this process
    except Exception:
        sender.send((False, "the return value could not be pickled:\n" + traceback.format_exc()))
    sender.close()
    if verdict[0] and dist.is_initialized():
        dist.destroy_process_group()


def trainer(**settings: Any) -> Any:
    """Makes a small quiet CPU Trainer for the ranks that are running: no logger, no checkpoint, no progress bar."""
    import lightning.pytorch as pl

    from ddp_plugin import CustomDDPStrategy

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
    }
    if "strategy" not in settings:
        defaults["strategy"] = CustomDDPStrategy()
    return pl.Trainer(**(defaults | settings))
