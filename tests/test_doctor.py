"""``ddp-plugin doctor``: what it sees, what it warns of, and that its self-test can fail."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_plugin.cli import main
from ddp_plugin.doctor import self_test
from ddp_plugin.doctor.environment import launcher_of, look_at_environment
from ddp_plugin.doctor.examination import examine
from ddp_plugin.doctor.findings import Finding, Report
from ddp_plugin.doctor.loaders import advise_workers, workers_per_rank
from ddp_plugin.doctor.machine import Machine, available_cores, look_at_machine
from ddp_plugin.doctor.self_test import SelfTest, run_self_test
from ddp_plugin.hooks import HOOKS
from ddp_plugin.planning.links import read_link
from tests.harness import ranks

ROOMY = Machine(16, 64 * 10**9, 60 * 10**9, 30 * 10**9, 0)


# ------------------------------------------------------------------------------------------------------------- machine


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_containers_quota_counts(quota: str, cores: int | None, tmp_path: Path) -> None:
    (file := tmp_path / "cpu.max").write_text(quota)
    assert available_cores(file) == (len(os.sched_getaffinity(0)) if cores is None else cores)


def test_this_machine_is_seen() -> None:
    machine = look_at_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > (machine.free_memory_bytes or 0) > 0


def test_workers_share_what_the_ranks_leave() -> None:
    assert workers_per_rank(ROOMY, 4) == 3
    assert workers_per_rank(replace(ROOMY, num_cores=4), 4) == 0
    assert workers_per_rank(replace(ROOMY, free_memory_bytes=4 * 10**9), 4) == 1
    assert workers_per_rank(replace(ROOMY, free_memory_bytes=None), 2) == 7


def test_too_many_ranks_and_too_little_shared_memory_are_said() -> None:
    assert advise_workers(ROOMY, 4)[1] == []
    (few,) = advise_workers(replace(ROOMY, num_cores=2), 4)[1]
    assert "4 ranks share 2 cores" in few.problem
    (small,) = advise_workers(replace(ROOMY, shared_memory_bytes=64 * 10**6), 4)[1]
    assert "/dev/shm has 64 MB free" in small.problem
    assert "--shm-size" in small.remedy


# --------------------------------------------------------------------------------------------------------- environment

QUIET = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "nobody: a shell"),
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "torchrun"),
        ({"SLURM_JOB_ID": "7"}, "SLURM"),
        ({"RANK": "0"}, "another launcher, or a shell that exported it"),
    ],
)
def test_who_has_set_the_variables(variables: dict[str, str], name: str) -> None:
    assert launcher_of(variables) == name


@pytest.mark.parametrize(
    ("variables", "problem", "is_error"),
    [
        ({}, "OMP_NUM_THREADS is not set", False),
        (QUIET | {"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE are set", False),
        (QUIET | {"CUDA_LAUNCH_BLOCKING": "1"}, "nothing overlaps", False),
        (QUIET | {"NCCL_P2P_DISABLE": "1"}, "main memory", False),
        (QUIET | {"NCCL_IB_DISABLE": "1"}, "over TCP", False),
        (QUIET | {"TORCH_DISTRIBUTED_DEBUG": "detail"}, "crash", True),
    ],
)
def test_each_warning_has_a_remedy(variables: dict[str, str], problem: str, is_error: bool) -> None:
    (found,) = look_at_environment(variables, ROOMY)[1]
    assert problem in found.problem
    assert found.is_error == is_error
    assert found.remedy


@pytest.mark.parametrize(
    "variables",
    [
        QUIET,
        QUIET | {"RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
        {"SLURM_CPUS_PER_TASK": "4"},
        QUIET | {"NCCL_DEBUG": "INFO"},
    ],
)
def test_what_is_right_is_let_alone(variables: dict[str, str]) -> None:
    assert look_at_environment(variables, ROOMY)[1] == []


def test_errors_are_printed_before_warnings() -> None:
    report = Report({"versions": {"torch": "2"}}, [Finding(False, "a", "b"), Finding(True, "c", "d")])
    assert str(report).splitlines()[-2:] == ["ERROR: c. d.", "warning: a. b."]
    assert report.has_errors
    assert "nothing to complain about" in str(Report())


# ----------------------------------------------------------------------------------------------------------- self-test


def test_two_processes_find_everything_right_and_a_link() -> None:
    test = run_self_test()
    assert test.failure is None
    assert all(test.works.values()), test.works
    assert {name.removeprefix("comm_hook ") for name in test.works if "comm_hook" in name} == set(HOOKS) - {"noop"}
    assert test.link is not None
    assert 1e6 < 1 / test.link.beta_s_per_byte < 1e12


def test_processes_that_fail_are_quoted() -> None:
    test = run_self_test("carrier_pigeon")
    assert test.failure is not None
    assert "carrier_pigeon" in test.failure.lower()
    assert test.link is None


@ranks(2)
def test_the_self_test_can_fail(world_size: int) -> None:
    cpu = torch.device("cpu")
    assert self_test._sums(dist.all_reduce, cpu)
    assert not self_test._sums(lambda tensor: tensor.mul_(2), cpu)
    assert self_test._hook_works("allreduce", cpu)
    exact = HOOKS["allreduce"]
    HOOKS["allreduce"] = lambda: replace(HOOKS["int4"](), name="allreduce", error_bound=exact().error_bound)
    assert not self_test._hook_works("allreduce", cpu), "rounded to four bits, and called exact"
    HOOKS["allreduce"] = lambda: replace(HOOKS["noop"](for_measuring=True), error_bound=exact().error_bound)
    assert not self_test._hook_works("allreduce", cpu), "no exchange at all"


# -------------------------------------------------------------------------------------------------------- command line


def test_doctor_for_people_and_for_machines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCH_DISTRIBUTED_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--no-self-test", "--ranks", "1"]) == 0
    told = capsys.readouterr().out
    assert f"torch         {torch.__version__}" in told
    assert "data loading" in told
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert main(["doctor", "--no-self-test", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["sections"]["versions"]["torch"] == torch.__version__
    assert any(finding["is_error"] for finding in report["findings"])
    assert report["links"] == {}


def test_what_the_self_test_found_is_told_and_saved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ddp_plugin.collectives import Link

    slow, found = Link(1e-3, 1e-7), {"all_reduce": True, "comm_hook int8": False}
    monkeypatch.setattr("ddp_plugin.doctor.examination.run_self_test", lambda backend: SelfTest(found, slow))
    report, _ = examine(QUIET, 1)
    problems = [finding.problem for finding in report.findings]
    assert "comm_hook int8 gives wrong numbers by gloo" in problems
    assert any("10 MB/s by gloo, less than a network would" in problem for problem in problems)
    assert report.sections["two processes, gloo"]["latency"] == "1e+03 microseconds a message"
    assert main(["doctor", "--save-link", str(tmp_path / "link.json")]) == 1
    assert read_link(tmp_path / "link.json") == slow
    capsys.readouterr()
    assert main(["plan", "--parameters", "1e6", "--inside", str(tmp_path / "link.json")]) == 0
    assert "inside a node: 0.01 GB/s, 1000 microseconds a message" in capsys.readouterr().out


def test_a_self_test_that_failed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_plugin.doctor.examination.run_self_test", lambda backend: SelfTest({}, None, "no route"))
    report, _ = examine(QUIET, 1)
    assert report.has_errors
    assert "cannot exchange tensors by gloo: no route" in str(report)


@pytest.mark.parametrize("arguments", [["--ranks", "0"], ["--no-self-test", "--save-link", "x.json"]])
def test_what_cannot_be_asked_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert "Expected" in capsys.readouterr().err
