"""Two processes on this machine that exchange tensors: whether it works, and how fast it is."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_plugin.collectives import Measurement, all_reduce, fit, measure
from ddp_plugin.collectives.cost import Link
from ddp_plugin.collectives.schedules import ALGORITHMS
from ddp_plugin.hooks import HOOKS, Contents, attach, resolve_hook

__all__ = ["SelfTest", "run_self_test"]

_SIZES_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class SelfTest:
    """What two processes found.

    Attributes:
        works: for each collective, algorithm and hook, whether its result was right.
        link: what the ring's times say about the way between two processes here.
        failure: why nothing was found, in the words of the process that failed; ``None`` where all went well.
    """

    works: dict[str, bool]
    link: Link | None
    failure: str | None = None


def run_self_test(backend: str = "gloo") -> SelfTest:
    """Starts two processes on this machine, and returns what they found.

    Args:
        backend: ``"gloo"`` on CPUs, or ``"nccl"`` on two GPUs.

    Collectives:
        None in this process; see :func:`_exchange` for the two.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        answer = Path(folder) / "answer.json"

        def words_of(rank: int) -> Path:
            return Path(folder) / f"rank-{rank}"

        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC"))
        }
        started = []
        for rank in range(2):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "ddp_plugin.doctor.self_test", backend, str(answer)]
            with words_of(rank).open("w") as words:
                started.append(subprocess.Popen(command, env=inherited | place, stdout=words, stderr=words))
        failed, is_late = _wait(started)
        if is_late:
            return SelfTest({}, None, f"they did not meet or did not finish within {_PATIENCE_S:g} s")
        failure = None if failed is None else _last_line(words_of(failed), started[failed].returncode)
        if failure is not None or not answer.is_file():
            return SelfTest({}, None, failure or "the processes ended without an answer")
        told = json.loads(answer.read_text())
        measured = [Measurement(**{**one, "options": ()}) for one in told["measured"]]
        return SelfTest(told["works"], fit(measured))


def _wait(started: Sequence["subprocess.Popen[bytes]"]) -> tuple[int | None, bool]:
    """Waits until all processes are over, one has failed or the time is up, and ends those that stay.

    Returns:
        The number of one that failed, and whether the time was up first.
    """
    ends_s = time.monotonic() + _PATIENCE_S
    try:
        while True:
            statuses = [process.poll() for process in started]
            failed = [number for number, status in enumerate(statuses) if status not in (None, 0)]
            if failed or None not in statuses:
                return (failed[0] if failed else None), False
            if time.monotonic() > ends_s:
                return None, True
            time.sleep(0.05)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()


def _last_line(file: Path, status: int) -> str:
    return next(reversed(file.read_text().strip().splitlines()), f"exit status {status}")


def _exchange(backend: str, answer: Path) -> None:
    """The body of each process.

    Collectives:
        Every algorithm of this package, every hook on a small model, and measured rings, on both ranks.
    """
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if backend == "nccl" else torch.device("cpu")
    works = {"all_reduce": _sums(dist.all_reduce, device)}
    for name in ALGORITHMS:
        works[f"algorithm {name}"] = _sums(lambda tensor, name=name: all_reduce(tensor, algorithm=name), device)  # type: ignore[misc]
    for name in HOOKS:
        if name != "noop":
            works[f"comm_hook {name}"] = _hook_works(name, device)
    measured = measure(_SIZES_BYTES, algorithms=("ring",), device=device)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps({"works": works, "measured": [asdict(one) for one in measured]}))
    dist.barrier()
    dist.destroy_process_group()


def _sums(reduce: Callable[[torch.Tensor], object], device: torch.device) -> bool:
    """Whether a sum over two ranks is the sum; whole numbers, so that no order of additions shows."""
    rank = dist.get_rank()
    tensor = torch.arange(1001, device=device, dtype=torch.float32) + rank
    reduce(tensor)
    return torch.equal(tensor, 2 * torch.arange(1001, device=device, dtype=torch.float32) + 1)


def _hook_works(name: str, device: torch.device) -> bool:
    """Whether one step's gradients are their mean, as far as the hook says; for one that averages parameters, those."""
    spec = {"name": name, "start_step": 0} if HOOKS[name]().start_step else name
    torch.manual_seed(0)
    network = torch.nn.Linear(64, 32, bias=False).to(device)
    model = DistributedDataParallel(network)
    hook = resolve_hook(spec)
    attached = attach(hook, model)
    try:
        own = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        if hook.outer is not None:
            with model.no_sync(), torch.no_grad():
                network.weight += own
            for _ in range(hook.outer.period):
                attached.after_step()
            return _is_same(network.weight.detach())
        (model(own) * own[:, :32]).sum().backward()
        result = network.weight.grad
        assert result is not None
        alone = torch.nn.Linear(64, 32, bias=False).to(device)
        alone.load_state_dict(network.state_dict())
        (alone(own) * own[:, :32]).sum().backward()
        assert alone.weight.grad is not None
        gradients = [torch.empty_like(alone.weight.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(gradients, alone.weight.grad)
        stacked = torch.stack(gradients).flatten(1)
        bound = hook.error_bound(stacked, Contents(("weight",), ((32, 64),), torch.float32)).to(device)
        error = (result.flatten() - stacked.to(torch.float64).mean(0)).abs()
        return bool((error <= bound.squeeze(0)).all()) and _is_same(result)
    finally:
        attached.close()


def _is_same(tensor: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    held = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(held, tensor.contiguous())
    return all(torch.equal(held[0], other) for other in held)


if __name__ == "__main__":
    _exchange(sys.argv[1], Path(sys.argv[2]))
