"""The launch files: those of torchrun really run, on one and two hosts; SLURM's with a scheduler that the test plays;
Kubernetes' against its schema, and its command as the operator would run it.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.benchmarks.slow_link.hosts import INTERFACE, HostsError, two_hosts
from tests.chaos.verdict import settings, write_texts
from tests.harness import ROOT

LAUNCH = ROOT / "recipes" / "launch"
NUM_STEPS = 8
PORT = 29_419


def environment(**variables: str) -> dict[str, str]:
    """As a person's shell would have it; the programs of this environment come first."""
    kept = {k: v for k, v in os.environ.items() if not re.match(r"SLURM_|PET_|(LOCAL_)?RANK$|WORLD_SIZE$|MASTER_", k)}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return kept | {"OMP_NUM_THREADS": "1", "PATH": path, "PYTHONPATH": str(ROOT)} | variables


def arguments(folder: Path) -> list[str]:
    return ["recipes/llm.py", *settings(write_texts(folder / "texts"), NUM_STEPS), f"output_dir={folder / 'out'}"]


def last_checkpoint(folder: Path) -> int:
    return max(int(path.stem.removeprefix("step=")) for path in (folder / "out" / "checkpoints").glob("step=*.ckpt"))


def test_one_node(tmp_path: Path) -> None:
    command = [str(LAUNCH / "one_node.sh"), *arguments(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(PROCESSES="2"), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "x 2 processes x" in done.stdout
    assert last_checkpoint(tmp_path) == NUM_STEPS


@pytest.mark.parametrize("missing", ["HEAD", "NODES"])
def test_several_nodes_have_to_be_told_where_they_meet(missing: str) -> None:
    told = {"HEAD": "localhost:29400", "NODES": "2"}
    del told[missing]
    done = subprocess.run(
        [str(LAUNCH / "several_nodes.sh"), "recipes/llm.py"], env=environment(**told), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.search(rf"{missing}: say ", done.stderr)


@pytest.mark.parametrize("script", ["one_node.sh", "several_nodes.sh"])
def test_a_wrong_setting_is_said_once_and_started_never(script: str, tmp_path: Path) -> None:
    command = [str(LAUNCH / script), *arguments(tmp_path), "trainer.max_step=4"]
    variables = environment(PROCESSES="2", HEAD="localhost:29400", NODES="2")
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "Did you mean 'max_steps'?" in done.stderr


def test_a_command_is_not_looked_at_before_it_starts(tmp_path: Path) -> None:
    """``-m ddp_plugin tune`` is started by these files too, and would begin to tune."""
    (tmp_path / "say.py").write_text("import os, sys; print(os.environ.get('RANK'), sys.argv[1:])")
    command = [str(LAUNCH / "one_node.sh"), "-m", "say"]
    variables = environment(PROCESSES="1", PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["0 ['trainer.devices=-1', 'trainer.num_nodes=-1', 'resume=auto']"]


def on_two_hosts(folder: Path, command: list[str], variables: Mapping[str, str]) -> list[str]:
    """Runs a command on both of two hosts, the same on each; returns what they printed."""
    try:
        with two_hosts() as hosts:
            agents = [
                host.start(
                    command,
                    environment(
                        **{
                            name: value.format(head=hosts[0].address, own=host.address, is_head=int(number == 0))
                            for name, value in variables.items()
                        }
                    ),
                    ROOT,
                    folder / f"output-{number}",
                )
                for number, host in enumerate(hosts)
            ]
            statuses = [agent.wait(timeout=240) for agent in agents]
    except HostsError as reason:
        pytest.skip(str(reason))
    outputs = [(folder / f"output-{number}").read_text() for number in range(2)]
    assert statuses == [0, 0], "\n".join(output[-3000:] for output in outputs)
    return outputs


def test_two_nodes(tmp_path: Path) -> None:
    command = [str(LAUNCH / "several_nodes.sh"), *arguments(tmp_path)]
    variables = {"HEAD": f"{{head}}:{PORT}", "NODES": "2", "PROCESSES": "1", "ADDRESS": "{own}", "INTERFACE": INTERFACE}
    outputs = on_two_hosts(tmp_path, command, variables)
    assert sum("x 2 processes x" in output for output in outputs) == 1, "rank 0 alone prints the plan"
    assert last_checkpoint(tmp_path) == NUM_STEPS


# --------------------------------------------------------------------------------------------------------------- SLURM

SRUN = """
import os, signal, subprocess, sys
given = sys.argv[1:]
while given[0].startswith("--"):
    given.pop(0)
def variables(rank):
    return os.environ | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
tasks = [subprocess.Popen(given, env=variables(rank)) for rank in range(int(os.environ["SLURM_NTASKS"]))]
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def job_script(name: str) -> tuple[dict[str, str], str]:
    """Returns the options that sbatch reads in a script, and the script."""
    text = (LAUNCH / name).read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", text, re.MULTILINE))
    assert len(options) == text.count("\n#SBATCH")
    return options, text


def test_what_slurm_is_asked_for() -> None:
    options, text = job_script("slurm.sbatch")
    assert options["ntasks-per-node"] == options["gpus-per-node"], "a task for each GPU"
    assert options["signal"].startswith("USR1@"), "to the tasks; B: would tell the script alone"
    assert "requeue" in options
    assert options["open-mode"] == "append", "or the output of before is lost"
    assert text.index("\nset -e") > text.rindex("#SBATCH"), "sbatch reads no option behind the first command"


def start_job(folder: Path, programs: Path, given: list[str], number_of_restarts: int) -> subprocess.Popen[str]:
    slurm = {"JOB_ID": "4711", "JOB_NAME": "ddp_plugin", "NNODES": "1", "NTASKS": "2", "NTASKS_PER_NODE": "2"}
    slurm |= {"NODELIST": "127.0.0.1", "RESTART_COUNT": str(number_of_restarts), "CPUS_PER_TASK": "1"}
    variables = environment(**{f"SLURM_{name}": value for name, value in slurm.items()})
    variables |= {"PATH": f"{programs}{os.pathsep}{variables['PATH']}", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        ["bash", str(LAUNCH / "slurm.sbatch"), *given],
        cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_a_slurm_job_is_requeued_and_goes_on(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("srun", f"#!{sys.executable}\n{SRUN}"),
        ("scontrol", f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n'),
    ):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    given = [*arguments(tmp_path), "trainer.max_steps=400", "trainer.validate_every=400", "checkpoint.keep=2"]
    first = start_job(tmp_path, programs, given, 0)
    deadline = time.monotonic() + 120.0
    while not list(tmp_path.glob("out/checkpoints/step=*.ckpt")) and first.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGUSR1)
    said, _ = first.communicate(timeout=120)
    assert first.returncode == 0, said[-3000:]
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 4711"]
    (saved,) = tmp_path.glob("out/hpc_ckpt_*.ckpt")
    assert last_checkpoint(tmp_path) < 400
    second = start_job(tmp_path, programs, given, 1)
    said, _ = second.communicate(timeout=240)
    assert second.returncode == 0, said[-3000:]
    assert saved.name in said, "Lightning says what it goes on from"
    assert last_checkpoint(tmp_path) == 400
    assert (tmp_path / "calls").read_text().splitlines() == ["requeue 4711"]


# ---------------------------------------------------------------------------------------------------------- Kubernetes


def pytorch_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    return job


def check_job(job: dict[str, Any]) -> None:
    jsonschema.validate(job, json.loads((ROOT / "tests" / "pytorchjob.schema.json").read_text()))
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **replicas["template"]}
        kubernetes_validate.validate(pod, "1.31", strict=True)


def test_the_job_fits_its_schema() -> None:
    check_job(pytorch_job())


@pytest.mark.parametrize("path", ["spec.replicas", "spec.elasticPolicy.rdzvPorts", "pod.containers.0.comand"])
def test_a_field_that_does_not_exist_is_noticed(path: str) -> None:
    job = pytorch_job()
    *parents, name = path.split(".")
    place: Any = job
    for parent in parents:
        if parent == "pod":
            place = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        else:
            place = place[int(parent)] if parent.isdigit() else place[parent]
    place[name] = 1
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_job(job)


def test_the_pods_agree_with_the_job() -> None:
    job = pytorch_job()
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["ports"][0]["containerPort"] == job["spec"]["elasticPolicy"]["rdzvPort"]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    volumes = {volume["name"] for volume in template["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    (timeout,) = (int(word.partition("=")[2]) for word in container["command"] if word.startswith("--shutdown-timeout"))
    assert timeout < template["terminationGracePeriodSeconds"]


def test_the_pods_command_runs_as_the_operator_starts_it(tmp_path: Path) -> None:
    job = pytorch_job()
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    policy, given = job["spec"]["elasticPolicy"], arguments(tmp_path)
    command = [word for word in container["command"] if not word.startswith(("config=", "data.", "output_dir="))]
    at = command.index(given[0]) + 1
    program = shutil.which(command[0], path=environment()["PATH"])
    assert program is not None
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    variables |= {  # as the operator's ElasticEnvVarGenerator writes them, for two pods of one process
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"{{head}}:{policy['rdzvPort']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_LOCAL_ADDR": "{own}",  # pods know one another's names; these hosts have none
        "PET_RDZV_CONF": "is_host={is_head}",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    on_two_hosts(tmp_path, [program, *command[1:at], *given[1:], *command[at:]], variables)
    assert last_checkpoint(tmp_path) == NUM_STEPS
