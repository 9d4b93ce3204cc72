"""The harness can fail: a test tool that cannot is worth nothing."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailureError, ranks, run_ranks


def _all_reduce(value: float) -> float:
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()


def _fail_on(rank: int) -> None:
    assert dist.get_rank() != rank, "on purpose"


def _fail_while_others_wait() -> None:
    assert dist.get_rank() != 0, "on purpose"
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def _hang_in_a_named_function() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.1)


def _leave_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def test_returns_every_ranks_value() -> None:
    assert run_ranks(_all_reduce, 3, value=2.0) == [12.0, 12.0, 12.0]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_reports_the_rank_that_failed(rank: int) -> None:
    with pytest.raises(RankFailureError, match=rf"(?s)rank {rank} of 3: Traceback.*on purpose"):
        run_ranks(_fail_on, 3, rank=rank)


def test_a_failure_on_one_rank_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailureError, match="on purpose"):
        run_ranks(_fail_while_others_wait, 2, timeout_s=60)
    assert time.monotonic() - begin < 30


def test_reports_a_rank_that_died() -> None:
    with pytest.raises(RankFailureError, match="rank 1 of 2: died without a word, exit code 7"):
        run_ranks(_die, 2)


def test_reports_the_stacks_of_a_rank_that_hangs() -> None:
    with pytest.raises(RankFailureError, match=r"(?s)rank 1 of 2: did not finish in time.*_hang_in_a_named_function"):
        run_ranks(_hang_in_a_named_function, 2, timeout_s=8)


def test_leaves_no_process_behind() -> None:
    for pid in run_ranks(_leave_a_child, 2, init=False):
        for _ in range(40):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except FileNotFoundError:
                break
            if state == "Z":
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"process {pid} is still running")


@ranks(1, 2, 3)
def test_the_decorator_runs_the_stated_number_of_ranks(world_size: int) -> None:
    assert dist.get_world_size() == world_size


@ranks(2)
@pytest.mark.parametrize("value", [1.5])
def test_the_decorator_passes_parameters(value: float) -> None:
    assert _all_reduce(value) == 4.5


def test_the_decorator_refuses_no_ranks() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ranks()
