"""Preflight without processes: what a rank says, where ranks differ, and what contradicts itself."""

import json
import os
import pickle
import socket
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from omegaconf import OmegaConf
from torch import nn

from ddp_plugin import CustomDDPStrategy
from ddp_plugin.hooks import HOOKS
from ddp_plugin.preflight import facts
from ddp_plugin.preflight.addresses import gloo_address, is_port_free, is_this_machine, machine_identity
from ddp_plugin.preflight.comparison import CALLBACK_ORDER, compare, compare_models, in_ranks
from ddp_plugin.preflight.environment import LIGHTNING, OTHER, SLURM, TORCHRUN, Request, contradictions
from ddp_plugin.preflight.facts import Facts, digest, environment_settings, model_entries, shown, take_facts
from tests.harness import ROOT

# ---------------------------------------------------------------------------------------------------------- comparison


def of_rank(rank: int, host: str = "a", pid: int | None = None, **kinds: dict[str, str]) -> Facts:
    return Facts(rank, host, 100 + rank if pid is None else pid, kinds)


def said(*of_ranks: Facts) -> list[tuple[str, bool]]:
    return [(finding.sentence.split(":")[0], finding.is_error) for finding in compare(of_ranks)]


def test_ranks_are_named_in_short() -> None:
    assert in_ranks([3]) == "rank 3"
    assert in_ranks([2, 1]) == "ranks 1, 2"
    assert in_ranks([9, *range(7)]) == "ranks 0-6, 9"
    assert in_ranks([0, 2, 4, 5, 6, 2]) == "ranks 0, 2, 4-6"


def test_nothing_is_found_where_ranks_are_alike() -> None:
    one = {"world": {"world_size": "2"}, "version": {"torch": "2.13.0"}, "environment": {"NCCL_ALGO": "Ring"}}
    assert compare([of_rank(rank, host=str(rank), **one) for rank in range(4)]) == []


def test_a_sentence_says_who_has_what_and_what_to_change() -> None:
    ranks = [of_rank(rank, version={"torch": "2.12.1" if rank == 3 else "2.13.0"}) for rank in (2, 0, 3, 1)]
    (finding,) = compare(ranks)
    assert finding.sentence == (
        "torch is 2.13.0 on ranks 0-2 and 2.12.1 on rank 3: install one version on every machine"
    )
    assert finding.is_error


@pytest.mark.parametrize(
    ("package", "other", "is_error"),
    [
        ("torch", "2.13.1", False),
        ("torch", "2.13.0+cpu", False),
        ("torch", "2.12.0", True),
        ("torch", "3.13.0", True),
        ("lightning", "2.12.0", True),
        ("lightning", "2.13.4", False),
        ("ddp_plugin", "2.13.1", True),
        ("NCCL", "2.13.1", True),
        ("python", "2.12.0", False),
        ("torchmetrics", "1.0", False),
    ],
)
def test_versions_that_speak_another_language_are_errors(package: str, other: str, is_error: bool) -> None:
    (finding,) = compare([of_rank(0, version={package: "2.13.0"}), of_rank(1, version={package: other})])
    assert finding.is_error is is_error


@pytest.mark.parametrize(
    ("kind", "name", "is_error"),
    [
        ("world", "num_nodes", True),
        ("setting", "accumulate_grad_batches", True),
        ("callback", "callback EarlyStopping", True),
        ("optimizer", "lr of group 0 of SGD 0", True),
        ("launcher", "SLURM_JOB_ID", False),
        ("environment", "NCCL_ALGO", False),
        ("environment", "TORCH_DISTRIBUTED_DEBUG", False),
        ("device", "device", False),
        ("option", "batch size", False),
    ],
)
def test_each_kind_is_an_error_or_a_warning(kind: str, name: str, is_error: bool) -> None:
    for second in ({name: "2"}, {}):  # another value, and none at all
        (finding,) = compare([of_rank(0, **{kind: {name: "1"}}), of_rank(1, **{kind: second})])
        assert finding.is_error is is_error
        assert finding.sentence.startswith(f"{name} is 1 on rank 0 and ")
        assert " on rank 1: " in finding.sentence


def test_only_the_debug_level_that_sends_messages_has_to_be_the_same() -> None:
    name = "TORCH_DISTRIBUTED_DEBUG"
    for one, other, is_error in (("OFF", "INFO", False), ("INFO", "DETAIL", True), ("detail", "OFF", True)):
        (finding,) = compare([of_rank(0, environment={name: one}), of_rank(1, environment={name: other})])
        assert finding.is_error is is_error
    (finding,) = compare([of_rank(0), of_rank(1, environment={name: "DETAIL"})])
    assert finding.is_error


def test_what_belongs_to_one_rank_may_differ() -> None:
    ranks = [of_rank(r, place={"local_rank": str(r)}, launcher={"RANK": str(r), "MASTER_ADDR": str(r)}) for r in (0, 1)]
    assert compare(ranks) == []


def test_errors_come_before_warnings_and_causes_before_effects() -> None:
    def rank(number: int, value: str) -> Facts:
        kinds = ("option", "optimizer", "setting", "version", "world", "environment")
        return of_rank(number, **{kind: {f"{kind} x": value} for kind in kinds})

    assert said(rank(0, "1"), rank(1, "2")) == [
        ("world x is 1 on rank 0 and 2 on rank 1", True),
        ("setting x is 1 on rank 0 and 2 on rank 1", True),
        ("optimizer x is 1 on rank 0 and 2 on rank 1", True),
        ("version x is 1 on rank 0 and 2 on rank 1", False),
        ("environment x is 1 on rank 0 and 2 on rank 1", False),
        ("option x is 1 on rank 0 and 2 on rank 1", False),
    ]


def test_many_values_make_one_sentence() -> None:
    ranks = [of_rank(rank, setting={"max_steps": str(rank // 2)}) for rank in range(256)]
    (finding,) = compare(ranks)
    assert "0 on ranks 0, 1, 1 on ranks 2, 3," in finding.sentence
    assert "and something else on ranks 8-255" in finding.sentence


def test_a_callback_that_is_missing_is_named_and_its_order_is_not() -> None:
    both = {"callback A": "there", "callback B": "there", CALLBACK_ORDER: "[A, B]"}
    one = {"callback B": "there", CALLBACK_ORDER: "[B]"}
    swapped = both | {CALLBACK_ORDER: "[B, A]"}
    assert said(of_rank(0, callback=both), of_rank(1, callback=one)) == [
        ("callback A is there on rank 0 and missing on rank 1", True)
    ]
    assert said(of_rank(0, callback=both), of_rank(1, callback=swapped)) == [
        (f"{CALLBACK_ORDER} is [A, B] on rank 0 and [B, A] on rank 1", True)
    ]


def test_a_rank_that_is_taken_twice_is_an_error() -> None:
    (finding,) = compare([of_rank(0, host="a"), of_rank(1, host="a"), of_rank(0, host="b", pid=7)])
    assert finding.sentence.startswith("rank 0 is taken by process 100 on a and by process 7 on b: ")
    assert finding.is_error


def test_two_ranks_on_one_gpu_are_an_error_under_nccl() -> None:
    def rank(number: int, gpu: str, backend: str) -> Facts:
        place = {"gpu": gpu, "device": "cuda:0"}
        return of_rank(number, world={"backend": backend}, place=place)

    (finding,) = compare([rank(0, "x", "nccl"), rank(1, "x", "nccl"), rank(2, "y", "nccl")])
    assert finding.sentence.startswith("ranks 0, 1 have one GPU, cuda:0 of a,")
    assert finding.is_error
    assert compare([rank(0, "x", "gloo"), rank(1, "x", "gloo")]) == []
    assert compare([rank(0, "x", "nccl"), rank(1, "y", "nccl")]) == []


def test_an_address_that_leads_other_machines_to_themselves_is_an_error() -> None:
    """Debian writes the name of a machine beside 127.0.1.1."""

    def rank(number: int, machine: str, address: str | None) -> Facts:
        place = {"machine": machine} | ({} if address is None else {"address": address})
        return of_rank(number, host=machine, place=place)

    (finding,) = compare([rank(0, "one", "10.0.0.1"), rank(1, "two", "127.0.1.1"), rank(2, "two", "127.0.1.1")])
    assert finding.is_error
    assert finding.sentence.startswith("ranks 1, 2 would tell other machines to find them at 127.0.1.1, which is what")
    assert "the name two stands for" in finding.sentence
    assert "GLOO_SOCKET_IFNAME" in finding.sentence
    assert compare([rank(0, "one", "127.0.0.1"), rank(1, "one", "127.0.0.1")]) == []  # they meet there
    assert compare([rank(0, "one", "10.0.0.1"), rank(1, "two", "fe80::1%eth0")]) == []
    assert compare([rank(0, "one", None), rank(1, "two", None)]) == []  # a device was named


# -------------------------------------------------------------------------------------------------------------- models


def entries(*sizes: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> list[tuple[str, str]]:
    layers = (nn.Linear(one, two, bias=bias, dtype=dtype) for one, two in zip(sizes, sizes[1:], strict=False))
    return model_entries(nn.Sequential(*layers))


def test_models_are_compared_by_name() -> None:
    (finding,) = compare_models([([0, 1, 2], entries(4, 3)), ([3], entries(4, 3, bias=False))])
    assert finding.sentence == (
        "0.bias is parameter float32 [3] on ranks 0-2 and missing on rank 3: build the same model on every rank"
    )
    assert finding.is_error
    found = compare_models([([0], entries(4, 3)), ([1], entries(4, 3, dtype=torch.float64))])
    assert [f.sentence.split(":")[0] for f in found] == [
        "0.weight is parameter float32 [3, 4] on rank 0 and parameter float64 [3, 4] on rank 1",
        "0.bias is parameter float32 [3] on rank 0 and parameter float64 [3] on rank 1",
    ]


def test_many_differences_are_counted() -> None:
    found = compare_models([([0], entries(*[4] * 11)), ([1], entries(*[5] * 11))])
    assert len(found) == 6
    assert found[-1].sentence.startswith("15 more parameters and buffers are not the same")


def test_an_order_that_differs_is_found() -> None:
    one = entries(4, 3)
    (finding,) = compare_models([([0], one), ([1], one[::-1])])
    assert finding.sentence.startswith("number 0 in the model's order is 0.weight on rank 0 and 0.bias on rank 1")


def test_every_tensor_of_a_model_counts() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.LazyLinear(2), nn.Linear(2, 2, device="meta"))
    listed = dict(model_entries(module, ignored=["0.bias"]))
    assert set(listed) == (set(module.state_dict()) | {"1.weight", "1.bias"}) - {"0.bias"}
    assert listed["0.running_mean"] == "buffer float32 [3]"
    assert listed["1.weight"] == "parameter without a shape yet"


# --------------------------------------------------------------------------------------------------------------- facts


def test_facts_survive_json_and_pickle() -> None:
    own = take_facts(3, {facts.SETTING: {"precision": "'32-true'"}})
    assert Facts.from_json(own.to_json()) == own
    assert pickle.loads(pickle.dumps(own)) == own
    assert own.pid == os.getpid()
    assert own.values[facts.VERSION]["torch"] == torch.__version__
    assert own.values[facts.VERSION]["ddp_plugin"]


def test_variables_are_sorted_by_whom_they_concern() -> None:
    variables = {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG_FILE": "x", "TORCH_LOGS": "y"}
    variables |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": "z", "SLURM_PROCID": "0", "RANK": "1"}
    variables |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONHASHSEED": "0", "HOME": "/"}
    assert set(environment_settings(variables)) == {"NCCL_ALGO", "PYTHONHASHSEED"}
    assert set(facts.launcher_variables(variables)) == {"TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "RANK"}


def samples() -> list[Any]:
    hook = HOOKS["powersgd"]()
    return [
        None, 1.5, "x", [1, (2, {"b": {*"qwertz"}})], {"a": torch.float16}, Path("x"), timedelta(seconds=3), nn.Linear,
        nn.Linear(2, 2), print, partial(int, base=2), lambda: None, hook, torch.zeros(()), torch.ones(3), hook.options,
    ]  # fmt: skip


def test_words_are_the_same_in_every_process() -> None:
    program = (
        "import json; from tests.test_preflight import samples, shown; print(json.dumps([shown(v) for v in samples()]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True)
    words = [shown(value) for value in samples()]
    assert json.loads(done.stdout.splitlines()[-1]) == words
    assert len(set(words)) == len(words)
    assert not any(" at 0x" in text for text in words)


def test_a_long_value_is_cut_but_not_its_end() -> None:
    one, other = shown(list(range(1000))), shown([*range(999), 7])
    assert one != other
    assert len(one) < 200


def test_optimizers_are_told_by_group_and_name() -> None:
    net = nn.Linear(2, 2)
    groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.5}]
    found = facts.optimizer_facts([torch.optim.SGD(groups, lr=0.1)], net)
    assert found["optimizers"] == "['SGD']"
    assert found["lr of group 0 of SGD 0"] == "0.1"
    assert found["lr of group 1 of SGD 0"] == "0.5"
    assert found["parameters of group 1 of SGD 0"] == "['bias']"
    alone = facts.optimizer_facts([torch.optim.SGD(groups, lr=0.1)], net, with_settings=False)
    assert alone.keys() == {"optimizers", "parameters of group 0 of SGD 0", "parameters of group 1 of SGD 0"}


def test_facts_are_small_and_ten_thousand_parameters_are_one_digest() -> None:
    net = nn.ModuleList(nn.Linear(2, 2) for _ in range(5000))
    listed = model_entries(net)
    assert len(listed) == 10000
    assert len(digest(f"{name} {description}" for name, description in listed)) == 32
    strategy = CustomDDPStrategy()
    pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False, barebones=False)
    assert len(strategy._facts("gloo").to_json()) < 8192


# --------------------------------------------------------------------------------------------------------- environment


def asked(launcher: str = LIGHTNING, devices: int = 2, nodes: int = 1, *, starts: bool = False) -> Request:
    return Request(devices, nodes, launcher, starts)


WELL_STARTED = {
    "popen parent": ({}, asked(starts=True)),
    "popen parent with a port": ({"MASTER_PORT": "29500"}, asked(starts=True)),
    "popen child": ({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, asked()),
    "popen parent, second run": ({"LOCAL_RANK": "0", "NODE_RANK": "0", "MASTER_PORT": "1"}, asked()),
    "two nodes": ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "1"}, asked(nodes=2, starts=True)),
    "by hand": ({"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2"}, asked()),
    "RANK counts nodes": (
        {"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        asked(nodes=2, starts=True),
    ),
    "RANK counts nodes, a child": (
        {"RANK": "1", "WORLD_SIZE": "4", "NODE_RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        asked(nodes=2),
    ),
    "torchrun": ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3", "GROUP_RANK": "1"}, asked(TORCHRUN, nodes=2)),
    "srun": ({"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, asked(SLURM, nodes=2)),
    "salloc, one process": ({"SLURM_NTASKS": "4"}, asked(starts=True)),
    "srun --pty bash": (
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_PTY_PORT": "5", "SLURM_JOB_NAME": "bash"},
        asked(starts=True),
    ),
    "one for each device's node": ({"OMPI_COMM_WORLD_SIZE": "1"}, asked(starts=True)),
    "srun --pty bash, with MPI's variables": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "5", "PMI_SIZE": "2"},
        asked(starts=True),
    ),
    "a batch script that starts one process": (
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"},
        asked(starts=True),
    ),
    "what this launcher does not read": (
        {"NODE_RANK": "worker-0", "SLURM_NTASKS_PER_NODE": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        asked(TORCHRUN),
    ),
    "empty is unset": ({"MASTER_PORT": ""}, asked(starts=True)),
    "another launcher": ({"RANK": "7", "WORLD_SIZE": "9"}, asked(OTHER)),
}


@pytest.mark.parametrize("name", WELL_STARTED)
def test_a_launcher_that_goes_with_the_trainer_is_let_alone(name: str) -> None:
    assert contradictions(*WELL_STARTED[name]) == []


ILL_STARTED = {
    "torchrun has started 4 processes, and the Trainer has devices=2 and num_nodes=1": (
        {"WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        asked(TORCHRUN),
    ),
    "LOCAL_RANK is 2, and the Trainer has devices=2": (
        {"WORLD_SIZE": "4", "LOCAL_RANK": "2"},
        asked(TORCHRUN, nodes=2),
    ),
    "SLURM has started 8 tasks, and the Trainer has devices=2 and num_nodes=2, which makes 4": (
        {"SLURM_NTASKS": "8", "SLURM_LOCALID": "1"},
        asked(SLURM, nodes=2),
    ),
    "SLURM has started 1 tasks": ({"SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}, asked(SLURM)),
    "SLURM_NTASKS_PER_NODE is 4, and the Trainer has devices=2": (
        {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "4"},
        asked(SLURM),
    ),
    "SLURM_NNODES is 2, and the Trainer has num_nodes=1": ({"SLURM_NTASKS": "2", "SLURM_NNODES": "2"}, asked(SLURM)),
    "SLURM_NTASKS is not set": ({}, asked(SLURM)),
    "SLURM_LOCALID is 3": ({"SLURM_NTASKS": "2", "SLURM_LOCALID": "3"}, asked(SLURM)),
    "srun has started 4 tasks, and Lightning takes this job for an interactive one": (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_JOB_NAME": "interactive"},
        asked(starts=True),
    ),
    "OMPI_COMM_WORLD_SIZE is 4": ({"OMPI_COMM_WORLD_SIZE": "4"}, asked(starts=True)),
    "RANK is 0 and WORLD_SIZE is 2, but LOCAL_RANK is not set": ({"RANK": "0", "WORLD_SIZE": "2"}, asked(starts=True)),
    "WORLD_SIZE is 4, and the Trainer has devices=2": ({"LOCAL_RANK": "0", "WORLD_SIZE": "4"}, asked()),
    "RANK is 3, and Lightning counts NODE_RANK 0 x devices 2 + LOCAL_RANK 1 = 1": (
        {"LOCAL_RANK": "1", "RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        asked(nodes=2),
    ),
    "NODE_RANK is 2, and the Trainer has num_nodes=2": (
        {"NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        asked(nodes=2, starts=True),
    ),
    "num_nodes is 2, and MASTER_ADDR and MASTER_PORT not set": ({}, asked(nodes=2, starts=True)),
    "num_nodes is 2, and MASTER_PORT not set": ({"MASTER_ADDR": "a"}, asked(nodes=2, starts=True)),
    "LOCAL_RANK is 2": ({"LOCAL_RANK": "2"}, asked()),
    "WORLD_SIZE is 'two', which is no whole number": ({"WORLD_SIZE": "two"}, asked()),
    "MASTER_PORT is 0": ({"MASTER_PORT": "0", "WORLD_SIZE": "2"}, asked(TORCHRUN)),
    "MASTER_PORT is 70000": ({"MASTER_PORT": "70000"}, asked(starts=True)),
}


@pytest.mark.parametrize("sentence", ILL_STARTED)
def test_a_launcher_that_contradicts_the_trainer_is_found(sentence: str) -> None:
    (found,) = contradictions(*ILL_STARTED[sentence])
    assert found.startswith(sentence)
    assert ": " in found  # what to change


def test_a_port_in_use_is_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not is_port_free(port)
    assert is_port_free(port)


def test_addresses_of_this_machine() -> None:
    assert is_this_machine("127.0.0.1") is True
    assert is_this_machine("localhost") is True
    assert is_this_machine("192.0.2.1") is False  # reserved for documentation
    assert is_this_machine("no-such-host.invalid") is None


def test_the_address_that_gloo_tells_is_of_this_machine_unless_a_device_is_named() -> None:
    address = gloo_address({})
    assert address is not None
    assert is_this_machine(address)
    assert gloo_address({"GLOO_SOCKET_IFNAME": "eth0"}) is None


def test_processes_of_one_machine_and_network_have_one_identity() -> None:
    network = ["readlink", "/proc/self/ns/net"]
    here = subprocess.run(network, capture_output=True, text=True, check=True)
    elsewhere = subprocess.run(["unshare", "--net", *network], capture_output=True, text=True)
    assert here.stdout.strip() in machine_identity()
    if elsewhere.returncode == 0:  # with the rights for it
        assert elsewhere.stdout.strip() not in machine_identity()


# ---------------------------------------------------------------------------------------- before processes are started


class Nothing(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("nothing may begin")

    def configure_optimizers(self) -> None:
        return None


def start(**settings: Any) -> None:
    """Begins a fit whose processes would import this file's program again and again, if any were started."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, **settings)
    trainer.fit(Nothing(), [0])


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("torch.multiprocessing.start_processes", refuse)
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("method", ["popen", "fork", "spawn"])
def test_a_port_in_use_is_refused_before_any_process_starts(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"MASTER_PORT is {port}, and another run or program uses it"):
            start(devices=2, strategy=CustomDDPStrategy(start_method=method))
    with pytest.raises(AssertionError, match="a process was started"):
        start(devices=2, strategy=CustomDDPStrategy(start_method=method))


@pytest.mark.usefixtures("no_process")
def test_a_leftover_of_another_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="RANK is 0 and WORLD_SIZE is 2, but LOCAL_RANK is not set"):
        start(devices=2, strategy=CustomDDPStrategy())


@pytest.mark.usefixtures("no_process")
def test_slurm_tasks_that_are_not_the_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "train"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    strategy = CustomDDPStrategy()
    with pytest.raises(ValueError, match=r"SLURM has started 2 tasks, and the Trainer has devices=3 .* makes 3"):
        start(devices=3, strategy=strategy)
    assert isinstance(strategy.cluster_environment, SLURMEnvironment)


@pytest.mark.usefixtures("no_process")
def test_a_trainer_that_runs_nothing_may_have_any_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = CustomDDPStrategy()
    pl.Trainer(accelerator="cpu", devices=2, num_nodes=4, strategy=strategy, logger=False)
    assert isinstance(strategy.cluster_environment, LightningEnvironment)
    with pytest.raises(ValueError, match="num_nodes is 4, and MASTER_ADDR and MASTER_PORT not set"):
        start(devices=2, num_nodes=4, strategy=CustomDDPStrategy())


class Unwilling:
    """Answers no question about itself."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_a_value_that_cannot_be_shown_is_said_to_be_one() -> None:
    endless: dict[str, object] = {}
    endless["itself"] = endless
    missing = OmegaConf.create({"a": "???"})
    for value in (endless, missing, Unwilling()):
        assert shown(value) == f"a {type(value).__qualname__} that cannot be shown"


def test_the_order_of_a_mapping_says_nothing() -> None:
    assert shown({"a": 1, "b": 2}) == shown({"b": 2, "a": 1})


def test_what_one_rank_logs_is_no_setting() -> None:
    told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL", "TORCH_LOGS": "+dynamo", "TORCH_TRACE": "/tmp/rank0"}
    assert environment_settings(told | {"NCCL_ALGO": "Ring"}) == {"NCCL_ALGO": "Ring"}
