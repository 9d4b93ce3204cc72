"""Around the processes: which tasks, started again without the one that killed them, ended when nothing moves."""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.slow_link.hosts import INTERFACE, Host
from tests.benchmarks.slow_link.job import Job, Task, read_records, write_record
from tests.benchmarks.slow_link.variants import BASELINE, REFERENCE, Variant
from tests.harness import ROOT

__all__ = ["loss_tasks", "run_job", "stall_s", "time_tasks"]

STALL_S = 60.0
TRANSFERS = 12  # fp32 gradients that a task may send without a word: a few steps, at the slowest algorithm
FIRST_PORT = 29_500
NUM_BASELINE = 3


def time_tasks(chosen: Iterable[Variant], with_costs: bool = False) -> list[Task]:
    """Returns what is measured at one rate: link, backward, all variants, the baseline first, between and last."""
    runs = [v.name for v in chosen if v.not_run is None and v.name != BASELINE]
    middle = len(runs) // 2
    order = [BASELINE, *runs[:middle], BASELINE, *runs[middle:], BASELINE]
    tasks = [Task("link"), Task("trace")]
    tasks += [Task("time", name, order[:place].count(name)) for place, name in enumerate(order)]
    return [*tasks, Task("costs")] if with_costs else tasks


def loss_tasks(chosen: Iterable[Variant], num_seeds: int) -> list[Task]:
    """Returns the trainings of equal length: each variant with the first seed, the reference with all of them."""
    first = [Task("loss", v.name) for v in chosen if v.not_run is None and v.name != REFERENCE]
    return [*(Task("loss", REFERENCE, seed) for seed in range(num_seeds)), *first]


def stall_s(job: Job) -> float:
    """Returns for how long nothing may be reported before the processes count as hanging."""
    if job.rate_mbit is None:
        return STALL_S + job.budget_s
    return STALL_S + job.budget_s + TRANSFERS * job.workload.config.num_parameters * 4 * 8 / (job.rate_mbit * 1e6)


def run_job(
    hosts: tuple[Host, Host], job: Job, say: Callable[[str], None] = lambda line: None
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Does all tasks of a job that can be done.

    A task that fails, dies or hangs ends its pair of processes; the next pair goes on behind it.

    Args:
        hosts: where.
        job: what; its ``records`` is replaced.
        say: hears a line for each task.

    Returns:
        The records of what was done, and the reasons of what was not, by variant (or kind of task).

    Raises:
        RuntimeError: the processes end before they begin with anything.
    """
    with tempfile.TemporaryDirectory(prefix="slow-link-") as folder:
        records_path, left, starts = Path(folder, "records"), list(job.tasks), 0
        while left:
            starts += 1
            pair = _Pair(hosts, replace(job, tasks=tuple(left), records=str(records_path)), Path(folder), starts)
            trouble = pair.wait(stall_s(job), say)
            ended = {record["task"] for record in read_records(records_path) if record["event"] != "begun"}
            left = [task for task in left if task not in ended]
            if trouble is not None and left and not pair.failed_task(ended):
                guilty = pair.begun_task()
                if guilty not in left:
                    raise RuntimeError(f"the processes on the two hosts did not get to work: {trouble}")
                write_record(records_path, guilty, event="failed", reason=trouble)
                left.remove(guilty)
        records = read_records(records_path)
    failures = {(r["task"].variant or r["task"].kind): r["reason"] for r in records if r["event"] == "failed"}
    return [record for record in records if record["event"] == "done"], failures


class _Pair:
    """A worker on each host, under torchrun."""

    def __init__(self, hosts: tuple[Host, Host], job: Job, folder: Path, number: int) -> None:
        self.hosts, self.records_path = hosts, Path(job.records)
        self.num_earlier = len(read_records(self.records_path))
        self.logs = [folder / f"log-{number}-{rank}" for rank in range(len(hosts))]
        path = folder / f"job-{number}"
        job.write(path)
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "recipes")]),
        }
        self.processes = []
        for rank, (host, log) in enumerate(zip(hosts, self.logs, strict=True)):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            torchrun += ["--node-rank", str(rank), "--master-addr", hosts[0].address]
            torchrun += ["--master-port", str(FIRST_PORT + number), "--max-restarts", "0"]
            command = [*torchrun, "-m", "tests.benchmarks.slow_link.worker", str(path)]
            self.processes.append(host.start(command, environment, ROOT, log))

    def wait(self, patience_s: float, say: Callable[[str], None]) -> str | None:
        """Waits for the end; returns what went wrong, or ``None``."""
        num_seen, moved_s, trouble, told = 0, time.monotonic(), None, set()
        while True:
            for record in self._records()[num_seen:]:
                num_seen, moved_s = num_seen + 1, time.monotonic()
                task = record["task"]
                if record["event"] != "begun" and task not in told:  # both ranks may tell that it failed
                    told.add(task)
                    words = f"{task.kind} {task.variant} {task.number}: {record['event']} {record.get('reason', '')}"
                    say(words.rstrip())
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                break
            if any(code for code in codes):
                time.sleep(1.0)  # the other rank may still have something to say
                trouble = "the process died: " + self._last_words(codes)
                break
            if time.monotonic() - moved_s > patience_s:
                trouble = f"hung: no word for {patience_s:.0f} s"
                break
            time.sleep(0.1)
        for host in self.hosts:
            host.end_processes()
        for process in self.processes:
            process.wait()
        return trouble

    def failed_task(self, ended: set[Task]) -> bool:
        """Whether a worker of this pair said itself what failed."""
        return any(record["event"] == "failed" and record["task"] in ended for record in self._records())

    def begun_task(self) -> Task | None:
        """Returns what it began last."""
        begun = [record["task"] for record in self._records() if record["event"] == "begun"]
        return begun[-1] if begun else None

    def _records(self) -> list[dict[str, Any]]:
        return read_records(self.records_path)[self.num_earlier :]

    def _last_words(self, codes: list[int | None]) -> str:
        rank = next(rank for rank, code in enumerate(codes) if code)
        lines = [line.strip() for line in self.logs[rank].read_text(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line and "ChildFailedError" not in line]
        return (telling or lines or [f"exit status {codes[rank]}"])[-1][:300]
