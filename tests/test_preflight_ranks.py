"""Preflight on real ranks: each mismatch is one sentence, the same on all ranks, before anything waits."""

import json
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_plugin import CustomDDPStrategy, DecisionSync, GlobalMeanLoss, PerRankSeed, _compat
from ddp_plugin.errors import DDPPluginError
from ddp_plugin.preflight import facts, roll_call
from ddp_plugin.preflight.facts import take_facts
from ddp_plugin.strategy import preflight
from tests.harness import RankFailureError, ranks, run_ranks, trainer

WITHIN_S = 60.0  # of the ranks' own time limits; on an idle machine each takes a tenth of a second


def rank() -> int:
    return int(os.environ["RANK"])


class Module(pl.LightningModule):
    """A model whose width, dtype, layers and learning rate can be a rank's own."""

    def __init__(
        self, width: int = 4, dtype: torch.dtype = torch.float32, bias: bool = True, lr: float = 0.1, tag: int = 0
    ) -> None:
        super().__init__()
        self.save_hyperparameters("tag")
        self.net = nn.Sequential(nn.Linear(2, width, dtype=dtype), nn.Linear(width, 1, bias=bias, dtype=dtype))
        self.lr = lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch.to(self.net[0].weight.dtype)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader(batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(torch.ones(12, 2), batch_size=batch_size)  # type: ignore[arg-type]


def fit(module: pl.LightningModule | None = None, batch_size: int = 2, **settings: Any) -> pl.Trainer:
    run = trainer(**settings)
    run.fit(module or Module(), loader(batch_size))
    return run


# ----------------------------------------------------------------------------------------------- errors on all ranks

CASES: dict[str, tuple[Callable[[bool], Any], str]] = {
    # what the odd rank does, and the beginning of the sentence; {others} and {odd} are ranks
    "accumulation": (
        lambda odd: fit(accumulate_grad_batches=2 if odd else 1),
        "accumulate_grad_batches is 1 on {others} and 2 on {odd}",
    ),
    "steps": (lambda odd: fit(max_steps=1 if odd else 2), "max_steps is 2 on {others} and 1 on {odd}"),
    "clipping": (
        lambda odd: fit(gradient_clip_val=1.0 if odd else None),
        "gradient_clip_val is None on {others} and 1.0 on {odd}",
    ),
    "precision": (
        lambda odd: fit(precision="64-true" if odd else "32-true"),
        "precision is '32-true' on {others} and '64-true' on {odd}",
    ),
    "hook": (
        lambda odd: fit(strategy=CustomDDPStrategy(comm_hook="bf16" if odd else "fp16")),
        "comm_hook is fp16{{}} on {others} and bf16{{}} on {odd}",
    ),
    "options of the hook": (
        lambda odd: fit(strategy=CustomDDPStrategy(comm_hook={"name": "powersgd", "matrix_rank": 2 if odd else 1})),
        "comm_hook is powersgd",
    ),
    "strategy": (
        lambda odd: fit(strategy=CustomDDPStrategy(bucket_cap_mb=1 if odd else 2)),
        "bucket_cap_mb is 2 on {others} and 1 on {odd}",
    ),
    "stage": (
        lambda odd: trainer().validate(Module(), loader()) if odd else fit(),
        "what runs is 'fit' on {others} and 'validate' on {odd}",
    ),
    "a callback that is missing": (
        lambda odd: fit(callbacks=[PerRankSeed()] if odd else [DecisionSync(), PerRankSeed()]),
        "callback DecisionSync is there on {others} and missing on {odd}",
    ),
    "the order of callbacks": (
        lambda odd: fit(callbacks=[c() for c in (DecisionSync, PerRankSeed)[:: -1 if odd else 1]]),
        "order of the callbacks that communicate is ['DecisionSync', 'PerRankSeed'] on {others} and ['PerRankSeed',",
    ),
    "planned accumulation": (
        lambda odd: fit(callbacks=[GradientAccumulationScheduler({0: 2 if odd else 1})]),
        "callback GradientAccumulationScheduler is there with {{0: 1}} on {others} and there with {{0: 2}} on {odd}",
    ),
    "one layer more": (
        lambda odd: fit(Module(bias=not odd)),
        "net.1.bias is parameter float32 [1] on {others} and missing on {odd}",
    ),
    "a shape": (
        lambda odd: fit(Module(width=5 if odd else 4)),
        "net.0.weight is parameter float32 [4, 2] on {others} and parameter float32 [5, 2] on {odd}",
    ),
    "a dtype": (
        lambda odd: fit(Module(dtype=torch.float64 if odd else torch.float32)),
        "net.0.weight is parameter float32 [4, 2] on {others} and parameter float64 [4, 2] on {odd}",
    ),
    "a shape while validating": (
        lambda odd: trainer().validate(Module(width=5 if odd else 4), loader(), verbose=False),
        "net.0.weight is parameter float32 [4, 2] on {others} and parameter float32 [5, 2] on {odd}",
    ),
    "an optimizer": (
        lambda odd: fit(Module(lr=0.2 if odd else 0.1)),
        "lr of group 0 of SGD 0 is 0.1 on {others} and 0.2 on {odd}",
    ),
}


def refused(case: str, odd: int) -> tuple[str, bool]:
    message = error_of(lambda: CASES[case][0](rank() == odd))
    return message, dist.is_initialized()


def error_of(run: Callable[[], Any]) -> str:
    with warnings.catch_warnings(), pytest.raises(DDPPluginError) as caught:  # noqa: PT012  # the filters are no call
        warnings.simplefilter("ignore")
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "is_given_a_group"), [*((case, False) for case in CASES), ("accumulation", True), ("a shape", True)]
)
def test_a_mismatch_is_one_sentence_on_all_ranks(case: str, is_given_a_group: bool) -> None:
    results = run_ranks(refused, 2, init=is_given_a_group, timeout_s=WITHIN_S, case=case, odd=1)
    sentence = CASES[case][1].format(others="rank 0", odd="rank 1")
    for number, (message, _) in enumerate(results):
        said = re.sub(rf", on rank {number} of 2", "", message)
        assert sentence in said, "names as they are written"
        assert "Expected all 2 ranks to fit together before the first step." in said
        assert said == re.sub(", on rank 0 of 2", "", results[0][0])


def test_three_ranks_are_named_in_groups() -> None:
    results = run_ranks(refused, 3, init=False, timeout_s=WITHIN_S, case="accumulation", odd=1)
    assert all("accumulate_grad_batches is 1 on ranks 0, 2 and 2 on rank 1: give every" in m for m, _ in results)
    assert not any(is_initialized for _, is_initialized in results)  # refused before a process group was made


def unchecked(case: str) -> None:
    """The same without preflight: what the sentence spares its reader."""
    patch = pytest.MonkeyPatch()
    patch.setattr("ddp_plugin.preflight.comparison.compare", lambda facts: [])
    patch.setattr("ddp_plugin.preflight.comparison.compare_models", lambda models: [])
    refused(case, odd=1)


@pytest.mark.parametrize("case", ["accumulation", "precision", "a shape", "a shape while validating", "stage"])
def test_without_preflight_there_is_no_such_sentence(case: str) -> None:
    """A hang, an abort, a wrong result without a word, or an error that names no rank."""
    with pytest.raises(RankFailureError) as caught:
        run_ranks(unchecked, 2, init=False, timeout_s=8.0, case=case)
    assert "on rank 0 and" not in str(caught.value)


# --------------------------------------------------------------------------------------- what may be meant: warnings


@contextmanager
def warned() -> Iterator[list[str]]:
    said: list[str] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(preflight, "rank_zero_warn", said.append)
    yield said
    patch.undo()


OPTIONS: dict[str, tuple[Callable[[bool], Any], str]] = {
    "batch size": (lambda odd: fit(batch_size=3 if odd else 2, max_steps=2), "batch size is [2] on rank 0 and [3]"),
    "hyperparameter": (lambda odd: fit(Module(tag=odd)), "hyperparameter tag is False on rank 0 and True on rank 1"),
    "another callback": (
        lambda odd: fit(callbacks=[] if odd else [pl.Callback()]),
        "callback Callback is there on rank 0 and missing on rank 1",
    ),
    "an option of a callback": (
        lambda odd: fit(callbacks=[EarlyStopping("x", patience=3 + odd, strict=False)]),
        "patience of EarlyStopping is 3 on rank 0 and 4 on rank 1",
    ),
    "environment": (lambda odd: fit_with(NCCL_ALGO="Ring") if odd else fit(), "NCCL_ALGO is not set on rank 0"),
    "seed": (lambda odd: fit_with(PL_GLOBAL_SEED=str(7 + odd)), "PL_GLOBAL_SEED is 7 on rank 0 and 8 on rank 1"),
    "job": (lambda odd: fit_with(SLURM_JOB_ID=str(7 + odd)), "SLURM_JOB_ID is 7 on rank 0 and 8 on rank 1"),
}


def fit_with(**variables: str) -> None:
    os.environ.update(variables)
    fit()


def warns(name: str) -> list[str]:
    with warned() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OPTIONS[name][0](rank() == 1)
    return said


@pytest.mark.parametrize("name", OPTIONS)
def test_what_may_be_meant_is_said_once_and_the_run_goes_on(name: str) -> None:
    said = run_ranks(warns, 2, init=False, timeout_s=WITHIN_S, name=name)[0]
    assert len(said) == 1
    assert said[0].startswith(f"The ranks are not set up alike: {OPTIONS[name][1]}")


def _says_nothing() -> list[str]:
    with warned() as said:
        callbacks = [DecisionSync(), PerRankSeed(), GlobalMeanLoss(), ModelCheckpoint(save_top_k=0)]
        run = fit(batch_size=2 + rank(), max_steps=1, enable_checkpointing=True, callbacks=callbacks)
        run.validate(Module(), loader(), verbose=False)
    os.environ["NCCL_SOCKET_IFNAME"] = f"eth{rank()}"  # what belongs to a machine
    with warned() as again:
        fit()
    return said + again


def test_nothing_is_said_of_ranks_that_are_alike() -> None:
    assert run_ranks(_says_nothing, 3, init=False, timeout_s=WITHIN_S) == [[], [], []]


@ranks(2, init=False)
def test_ranks_that_train_alone_may_have_learning_rates_of_their_own_but_no_optimizers() -> None:
    hook = {"name": "local_sgd", "period": 2}
    fit(Module(lr=0.1 * (1 + rank())), strategy=CustomDDPStrategy(comm_hook=hook))
    module = Module()
    kind = (torch.optim.SGD, torch.optim.Adam)[rank()]
    module.configure_optimizers = lambda: kind(module.parameters(), lr=0.1)  # type: ignore[method-assign,assignment]
    said = error_of(lambda: fit(module, strategy=CustomDDPStrategy(comm_hook=hook)))
    assert "optimizers is ['SGD'] on rank 0 and ['Adam'] on rank 1" in said


@ranks(2, init=False)
def test_a_warning_is_not_repeated_in_the_next_run() -> None:
    with warned() as said:
        run = trainer()
        for _ in range(2):
            run.fit(Module(tag=rank()), loader())
    assert len(said) == 1


@ranks(2, init=False)
def test_ranks_that_share_a_model_among_them_are_not_compared() -> None:
    strategy = CustomDDPStrategy(process_group="its own", init_sync=False)
    strategy.model = Module(width=4 + rank())
    strategy.set_world_ranks = lambda: None  # type: ignore[method-assign]
    assert not strategy._one_model_on_all_ranks


# ------------------------------------------------------------------------------------------------------------ roll call


def other_world(world_sizes: list[int]) -> str:
    """Each rank believes in a world of its own size."""
    own = world_sizes[rank()]
    os.environ["WORLD_SIZE"] = str(own)
    return error_of(lambda: fit(devices=own))


def test_ranks_of_two_worlds_do_not_wait_for_one_another() -> None:
    for sizes in ([2, 4], [3, 2]):
        began = time.monotonic()
        results = run_ranks(other_world, 2, init=False, timeout_s=WITHIN_S, world_sizes=sizes)
        assert time.monotonic() - began < WITHIN_S / 2
        for message in results:
            assert f"world_size is {sizes[0]} on rank 0 and {sizes[1]} on rank 1: start every process" in message


def _same_rank() -> str:
    os.environ.update(RANK="0", LOCAL_RANK="0")
    return error_of(lambda: fit(devices=2))


def test_two_processes_of_one_rank_are_named() -> None:
    one, two = run_ranks(_same_rank, 2, init=False, timeout_s=WITHIN_S)
    assert one == two
    host = re.escape(socket.gethostname())
    assert re.search(rf"rank 0 is taken by process \d+ on {host} and by process \d+ on {host}: give every node", one)


def _one_stays_away() -> tuple[str, list[str]]:
    pytest.MonkeyPatch().setattr(roll_call, "PATIENCE_S", 0.2)
    if rank() == 1:
        return "", []
    said: list[str] = []
    pytest.MonkeyPatch().setattr("warnings.warn", lambda message, *_, **__: said.append(str(message)))
    message = error_of(lambda: fit(strategy=CustomDDPStrategy(timeout=timedelta(seconds=3))))
    return message, [text for text in said if "waits" in text]


def test_a_rank_that_does_not_come_is_named_while_others_wait_and_when_they_give_up() -> None:
    (zero, warned_0), _, (two, warned_2) = run_ranks(_one_stays_away, 3, init=False, timeout_s=WITHIN_S)
    assert zero == two
    assert "rank 1 of 3 has not come to 127.0.0.1:" in zero
    assert any(re.fullmatch(r"Rank 0 waits at 127\.0\.0\.1:\d+: rank.* 1.* of 3 ha.* not come\.", w) for w in warned_0)
    assert any("Rank 2 waits at 127.0.0.1:" in text for text in warned_2)


def _after_a_restart() -> tuple[int, list[str]]:
    """As under torchrun, where the store still has what the processes wrote that were killed."""
    server = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    store = dist.PrefixStore("ddp_plugin/roll_call", server)
    dead = take_facts(rank(), {facts.WORLD: {"world_size": "7"}, facts.SETTING: {"max_epochs": "9"}})
    store.set(f"arrival {store.add('arrivals', 1) - 1}", json.dumps([f"dead {rank()}", dead.to_json()]))
    store.add("arrivals", 1)  # and one that was killed before it could write
    with warned() as said:
        fit()
    return dist.get_world_size(), said


def test_processes_that_are_gone_are_not_counted() -> None:
    assert run_ranks(_after_a_restart, 2, init=False, timeout_s=WITHIN_S) == [(2, [])] * 2


@ranks(2, init=False)
def test_nothing_of_an_earlier_run_is_in_the_store_of_the_group() -> None:
    fit()
    _compat.default_store().set("mine", "1")
    assert _compat.default_store().check(["mine"])
    dist.barrier()
    dist.destroy_process_group()
    fit()
    assert not _compat.default_store().check(["mine"])


@ranks(2)
def test_a_group_of_another_size_is_refused() -> None:
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC") or name in ("WORLD_SIZE", "RANK"):
            del os.environ[name]
    os.environ["LOCAL_RANK"] = "0"
    assert "Got one of 2, which existed before" in error_of(lambda: fit(devices=1))


@contextmanager
def own_store(port: int) -> Iterator[None]:
    """Lets rank 0 hold the store, as it does everywhere but under torchrun."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = str(port)
    yield


def _hosted_by_rank_0(port: int) -> int:
    with own_store(port):
        run = fit()
        dist.barrier()
        return run.world_size


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("", 0))
        return int(server.getsockname()[1])


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0_holds_the_store_and_the_group_uses_it(world_size: int) -> None:
    results = run_ranks(_hosted_by_rank_0, world_size, init=False, timeout_s=WITHIN_S, port=free_port())
    assert results == [world_size] * world_size


def _refused_by_rank_0(port: int) -> str:
    with own_store(port):
        return refused("accumulation", odd=1)[0]


def test_all_ranks_read_the_verdict_before_rank_0_takes_its_store_away() -> None:
    results = run_ranks(_refused_by_rank_0, 3, init=False, timeout_s=WITHIN_S, port=free_port())
    assert results[0] == results[1] == results[2]


def _port_in_use(port: int) -> str:
    pytest.MonkeyPatch().setattr(roll_call, "PATIENCE_S", 0.2)
    with own_store(port):
        return error_of(lambda: fit(strategy=CustomDDPStrategy(timeout=timedelta(seconds=3))))


def test_a_port_that_another_program_holds_is_told_on_all_ranks() -> None:
    """Torch itself would wait for ever for a program that listens and does not answer."""
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        zero, one = run_ranks(_port_in_use, 2, init=False, timeout_s=WITHIN_S, port=port)
    assert f"Expected port {port} to be free for rank 0. Got it in use, by another run or another program" in zero
    assert f"Expected an answer from 127.0.0.1:{port}, where rank 0 meets the others. Got none for rank 1" in one


@ranks(2, init=False)
def test_an_address_that_nobody_knows_is_refused_on_one_node() -> None:
    os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR is no-such-host\.invalid, a name that this machine does not know"
    ):
        fit()


def test_an_address_that_nobody_knows_yet_is_waited_for_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several nodes: a cluster may learn the names of its machines while they start."""
    monkeypatch.setattr(roll_call, "PATIENCE_S", 0.2)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    meeting = roll_call.Meeting("no-such-host.invalid", 29500, world_size=2, timeout=timedelta(seconds=1))
    silent = r"no-such-host\.invalid is not known on this machine"
    with (
        pytest.warns(UserWarning, match=f"Rank 1 waits for .*:29500 to answer: the name {silent}"),
        pytest.raises(DDPPluginError, match=f"none for rank 1, process .*: the name {silent}"),
        roll_call.roll_call(meeting, take_facts(1, {}), lambda of_ranks: []),
    ):
        raise AssertionError("nobody is there")


def _slurm_job(port: int, devices: int) -> Any:
    for name in list(os.environ):
        if name.startswith("TORCHELASTIC") or name in ("WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    own = os.environ.pop("RANK")
    slurm = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "PROCID": own, "LOCALID": own, "NODEID": 0}
    os.environ.update({f"SLURM_{name}": str(value) for name, value in slurm.items()}, MASTER_PORT=str(port))
    try:
        return fit(devices=devices).world_size
    except ValueError as error:
        return str(error)


def test_a_slurm_job_trains_and_one_with_other_devices_does_not_begin() -> None:
    assert run_ranks(_slurm_job, 2, init=False, timeout_s=WITHIN_S, port=free_port(), devices=2) == [2, 2]
    for message in run_ranks(_slurm_job, 2, init=False, timeout_s=WITHIN_S, port=free_port(), devices=4):
        assert "SLURM has started 2 tasks, and the Trainer has devices=4 and num_nodes=1, which makes 4" in message


class Configured(BoringModel):
    """One whose hyperparameters are written down, and not all there yet."""

    def __init__(self) -> None:
        super().__init__()
        os.environ.pop("NOBODY_SETS_THIS", None)
        self.save_hyperparameters(OmegaConf.create({"a": {"b": "???", "c": "${oc.env:NOBODY_SETS_THIS}"}, "d": 1}))


@ranks(2, init=False)
def test_hyperparameters_that_are_not_there_yet_stop_nobody(world_size: int) -> None:
    trainer(max_steps=1).fit(Configured())
