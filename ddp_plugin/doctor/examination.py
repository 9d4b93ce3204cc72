"""The whole examination of a machine, section after section."""

import os
import platform
from collections.abc import Mapping

import torch

from ddp_plugin.doctor.environment import look_at_environment
from ddp_plugin.doctor.findings import Finding, Report
from ddp_plugin.doctor.loaders import advise_workers
from ddp_plugin.doctor.machine import Machine, interfaces, look_at_machine, topology
from ddp_plugin.doctor.self_test import SelfTest, run_self_test
from ddp_plugin.errors import counted
from ddp_plugin.preflight.facts import versions

__all__ = ["examine"]

_SLOW_BYTES_PER_S = 100e6  # less than a gigabit network, between two processes that share a memory


def examine(
    variables: Mapping[str, str], num_ranks: int | None = None, backends: tuple[str, ...] | None = None
) -> tuple[Report, dict[str, SelfTest]]:
    """Looks at everything, and tries communication out.

    Args:
        variables: the environment, ``os.environ``.
        num_ranks: processes that will run on this machine; one for each GPU, or two, when ``None``.
        backends: to try out, none to leave that out; when ``None`` gloo, and NCCL where there are two GPUs.

    Collectives:
        None here; the self-test's processes have their own.
    """
    machine = look_at_machine()
    report = Report({"versions": versions(), "machine": _machine_rows(machine), "network": interfaces()})
    if torch.cuda.is_available():
        report.sections["GPUs"] = _gpu_rows()
    sections, findings = look_at_environment(variables, machine)
    report.sections.update(sections)
    report.findings += findings
    ranks = num_ranks if num_ranks is not None else max(machine.num_gpus, 1 if machine.num_gpus else 2)
    report.sections["data loading"], found = advise_workers(machine, ranks)
    report.findings += found
    if backends is None:
        backends = ("gloo", "nccl") if machine.num_gpus > 1 else ("gloo",)
    tests = {backend: run_self_test(backend) for backend in backends}
    for backend, test in tests.items():
        rows, found = _test_rows(backend, test)
        report.sections[f"two processes, {backend}"] = rows
        report.findings += found
    return report, tests


def _machine_rows(machine: Machine) -> dict[str, str]:
    def size(value: int | None) -> str:
        return "unknown" if value is None else f"{value / 1e9:.1f} GB"

    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{machine.num_cores} of {os.cpu_count()} may be used",
        "memory": f"{size(machine.memory_bytes)}, {size(machine.free_memory_bytes)} free",
        "/dev/shm": f"{size(machine.shared_memory_bytes)} free",
        "GPUs": str(machine.num_gpus) if machine.num_gpus else "none that torch sees",
    }


def _gpu_rows() -> dict[str, str]:
    rows = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        rows[str(index)] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    if (joined := topology()) is not None:
        rows["joined by"] = "\n" + joined
    return rows


def _test_rows(backend: str, test: SelfTest) -> tuple[dict[str, str], list[Finding]]:
    if test.failure is not None:
        problem = f"two processes on this machine cannot exchange tensors by {backend}: {test.failure}"
        remedy = "Look at the interfaces above: a firewall on 127.0.0.1, or GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        return {"result": "failed"}, [Finding(True, problem, remedy)]
    wrong = [name for name, works in test.works.items() if not works]
    rows = {"result": f"{counted(len(test.works) - len(wrong), 'way')} to exchange tensors give the right numbers"}
    found = [Finding(True, f"{name} gives wrong numbers by {backend}", "Report it, with this output") for name in wrong]
    if test.link is not None:
        rate = 1 / test.link.beta_s_per_byte if test.link.beta_s_per_byte else float("inf")
        rows["bandwidth"] = f"{rate / 1e9:.3g} GB/s in each direction"
        rows["latency"] = f"{test.link.alpha_s * 1e6:.3g} microseconds a message"
        if rate < _SLOW_BYTES_PER_S:
            problem = (
                f"two processes of this machine exchange {rate / 1e6:.0f} MB/s by {backend}, less than a network would"
            )
            found.append(Finding(False, problem, "See what else runs here, and which interface the backend has taken"))
    return rows, found
