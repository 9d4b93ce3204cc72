"""The process on each host: ``python -m tests.benchmarks.slow_link.worker JOB``, started by torchrun.

It does the tasks one after the other. After an exception the ranks may be anywhere in a collective, so it says what
happened and ends; whoever started it starts another one for the rest.
"""

import gc
import os
import re
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.hooks import Contents
from ddp_plugin.planning.traced import trace_step
from tests.benchmarks.slow_link import wire
from tests.benchmarks.slow_link.clock import EqualSteps, StepPlan, TimedSteps
from tests.benchmarks.slow_link.costs import measure_costs
from tests.benchmarks.slow_link.hosts import shape
from tests.benchmarks.slow_link.job import Job, Task, write_record
from tests.benchmarks.slow_link.training import quiet, train
from tests.benchmarks.slow_link.variants import Variant, variants
from tests.benchmarks.slow_link.workload import Batches, LanguageModel
from tests.harness import trainer

RAW_S = 1.0  # of transfer, by the link's own rate
NUM_TRACED = 7


class Worker:
    """One rank's side of all tasks.

    Args:
        job: what to do.

    Collectives:
        Those of the tasks, on both ranks.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = dist.get_rank()
        # Messages between the measurements have a group of their own: nothing that is measured meets them.
        self.group = dist.new_group(backend="gloo")
        self.variants = variants()
        self._contents: list[Contents] = []

    def do(self, task: Task) -> dict[str, Any]:
        """Does a task; returns what rank 0 reports."""
        gc.collect()  # the last task's Trainer, at nobody's cost
        shape(None)
        dist.barrier(self.group)
        doings = {"link": self.link, "trace": self.trace, "time": self.time, "loss": self.loss, "costs": self.costs}
        return doings[task.kind](task)

    def link(self, task: Task) -> dict[str, Any]:
        """Measures the link: a plain TCP transfer, one way and both ways at once, and exact all-reduces."""
        rate_mbit, address = self._rate_mbit(), os.environ["MASTER_ADDR"]
        num_bytes = int(RAW_S * rate_mbit * 1e6 / 8)
        self._limit()
        found: dict[str, Any] = {}
        for name, both_ways in (("raw_one_way_mbit", False), ("raw_both_ways_mbit", True)):
            dist.barrier(self.group)
            found[name] = wire.measure_raw(self.rank, address, num_bytes, both_ways)
        num_elements = sum(p.numel() for p in self._model(0).parameters())
        ideal_s = num_elements * 4 * 8 / (rate_mbit * 1e6)
        num_rounds = max(1, min(20, round(self.job.budget_s / ideal_s)))
        return found | wire.measure_all_reduce(num_elements, rate_mbit, num_rounds)

    def trace(self, task: Task) -> dict[str, Any]:
        """Notes when each gradient is ready, on both ranks at once, as in a step."""
        model = self._model(0)
        batch = next(iter(Batches(self.job.workload, 0, self.rank)))
        dist.barrier(self.group)
        traced = trace_step(model, lambda: model(*batch), NUM_TRACED)
        ready_s = {gradient.name: gradient.ready_s for gradient in traced.gradients}
        return {"forward_s": traced.forward_s, "backward_s": traced.backward_s, "ready_s": ready_s}

    def time(self, task: Task) -> dict[str, Any]:
        """Times the steps of a variant on the limited link."""
        variant = self.variants[task.variant]
        sampler, counted = wire.Sampler(), [0, 0]

        def begin() -> None:
            self._limit()
            counted[0] = wire.bytes_sent()
            dist.barrier(self.group)
            sampler.start()

        def end() -> None:
            sampler.stop()
            dist.barrier(self.group)  # only when both have got everything is everything sent
            counted[1] = wire.bytes_sent()

        plan = StepPlan(self.job.budget_s, self.job.max_steps, variant.period, variant.start_step)
        clock = TimedSteps(plan, self._agree, begin, end)
        model = self._model(0)
        train(variant, model, Batches(self.job.workload, 0, self.rank), clock)
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, clock.step_s, group=self.group)
        return {
            "step_s": [max(step) for step in zip(*by_rank, strict=True)],  # the slowest rank is the one waited for
            "period": variant.period,
            "sent_bytes_per_step": (counted[1] - counted[0]) / len(clock.step_s),
            "declared_bytes_per_step": self._declared_bytes(variant),
            "use_while_busy": wire.use_while_busy(sampler.samples, self._rate_mbit()),
        }

    def loss(self, task: Task) -> dict[str, Any]:
        """Trains some steps, and returns the loss on what nobody trained on, as the mean over the ranks."""
        model = self._model(task.number)
        batches = Batches(self.job.workload, task.number, self.rank)
        variant = self.variants[task.variant].for_losses(self.job.num_loss_steps)
        train(variant, model, batches, EqualSteps(self.job.num_loss_steps))
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, model.held_out_nats(), group=self.group)
        return {"loss_nats": sum(losses) / len(losses), "by_rank": losses}

    def costs(self, task: Task) -> dict[str, Any]:
        """Measures what the cost model is fitted to and judged by."""
        self._limit()
        dist.barrier(self.group)
        return measure_costs()

    def _model(self, seed: int) -> LanguageModel:
        return LanguageModel(self.job.workload, seed)

    def _rate_mbit(self) -> float:
        assert self.job.rate_mbit is not None, "this task is about a limited link"
        return self.job.rate_mbit

    def _limit(self) -> None:
        shape(self.job.rate_mbit)

    def _agree(self, number: int) -> int:
        chosen = [number]
        dist.broadcast_object_list(chosen, src=0, group=self.group)
        return chosen[0]

    def _declared_bytes(self, variant: Variant) -> float | None:
        hook = variant.hook
        if hook is None:
            return None
        contents = self._buckets()
        if hook.synchronises == "parameters":  # all of them at once
            parts = [list(part) for part in zip(*((c.names, c.shapes) for c in contents), strict=True)]
            contents = [Contents(sum(parts[0], ()), sum(parts[1], ()), contents[0].dtype)]
        return sum(hook.wire_bytes(c, dist.get_world_size(), self.rank) for c in contents) / hook.period

    def _buckets(self) -> list[Contents]:
        """Returns what DDP's buckets hold once they have been built again; found by a few steps on the open link."""
        if not self._contents:
            shape(None)
            model = self._model(0)
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            seen: dict[int, Contents] = {}

            class Look:
                def before_reduction(self, index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
                    if index == 0:
                        seen.clear()
                    seen[index] = Contents.of(parameters, names, gradient.dtype)

                def after_reduction(self, index: int, gradient: torch.Tensor, parameters: list[torch.Tensor]) -> None:
                    pass

            strategy = CustomDDPStrategy()
            strategy.add_bucket_observer(Look())
            steps = trainer(strategy=strategy, devices=1, num_nodes=2, limit_train_batches=3)
            steps.fit(model, Batches(self.job.workload, 0, self.rank))
            self._contents = list(seen.values())
        return self._contents


def in_a_line(error: BaseException) -> str:
    """Returns an error's name and message; of what came through callbacks of C++, the innermost one's."""
    told = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    inner = re.findall(r"\w+(?:Error|Exception): (?:(?!\w+(?:Error|Exception): ).)+", told)
    return (inner or [told])[-1].partition(" At: ")[0][:300]


def main(job_path: str) -> int:
    """Does all tasks of the job; returns the exit status."""
    torch.set_num_threads(1)
    quiet()
    job = Job.read(Path(job_path))
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    worker = Worker(job)
    for task in job.tasks:
        if worker.rank == 0:
            write_record(job.records, task, event="begun", at_s=time.time())
        try:
            found = worker.do(task)
        except Exception as error:
            traceback.print_exc()
            write_record(job.records, task, event="failed", reason=in_a_line(error))
            sys.stdout.flush()
            os._exit(1)  # the other rank may be in a collective, for which an orderly end would wait
        if worker.rank == 0:
            write_record(job.records, task, event="done", **found)
    shape(None)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
