"""A run that is killed and started again is the run that was not."""

import copy
import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from saving import SaveCheckpoints, saved_steps
from torch.utils.data import DataLoader

from ddp_plugin import AutoResume, default_callbacks
from ddp_plugin.checkpoints import RefusedCheckpointError, files
from ddp_plugin.errors import DDPPluginError
from tests.chaos.history import Start, Step, coverage_problems, surviving_steps
from tests.chaos.killing import KINDS, Kill, draw_kills
from tests.chaos.verdict import PRECISION, compare, run_whole, write_texts
from tests.harness import ranks, trainer
from tests.test_mid_epoch_resume import Augmented, Model

# ------------------------------------------------------------------------------------------------------ real processes

NUM_STEPS = 36
KILLS = [
    Kill("save", after_steps=5, delay_s=0.01, rank_ratio=0.0, next_world_size=2),
    Kill("worker", after_steps=6, delay_s=0.02, rank_ratio=0.7, next_world_size=2),
    Kill("tree", after_steps=5, delay_s=0.03, rank_ratio=0.0, next_world_size=1),
]


def test_three_kills_leave_no_trace(tmp_path: Path) -> None:
    """In the middle of a save, of one rank under torchrun, and of all, after which one process goes on alone."""
    texts = write_texts(tmp_path / "texts")
    whole = run_whole(tmp_path / "whole", texts, 2, NUM_STEPS)
    verdict = compare(whole, tmp_path / "killed", texts, 2, NUM_STEPS, KILLS)
    assert verdict.problems == []
    assert verdict.outcome.hit == ["save", "worker", "tree"]
    assert verdict.outcome.in_save == 1
    assert [start.world_size for start in verdict.starts] == [2, 2, 2, 1]
    assert [start.begins_at > 0 for start in verdict.starts] == [False, True, True, True]
    assert verdict.num_compared == NUM_STEPS // 4
    # On two processes the same bits, on one the same numbers.
    change = verdict.starts[-1].begins_at
    assert verdict.num_identical >= change // 4 > 0
    assert verdict.num_elsewhere == NUM_STEPS - change
    assert 0 < verdict.worst_loss_ratio <= PRECISION  # sums in another order
    output = verdict.outcome.output
    assert output.count("AutoResume: goes on at step") == 3
    assert "there is no complete checkpoint" in output
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*"))  # what was half written is gone


# ---------------------------------------------------------------------------------------------------- the killer itself


def test_kills_are_drawn_by_the_seed_alone() -> None:
    kills = draw_kills(3, 12, [2, 1, 3], (5, 8))
    assert kills == draw_kills(3, 12, [2, 1, 3], (5, 8)) != draw_kills(4, 12, [2, 1, 3], (5, 8))
    counts = Counter(kill.kind for kill in kills)
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert all(5 <= kill.after_steps <= 8 and 0 <= kill.rank_ratio < 1 for kill in kills)
    assert {kill.next_world_size for kill in kills} == {1, 2, 3}
    by_hand = [kill.next_world_size for kill in kills if kill.kind != "worker"]
    assert all(before != after for before, after in zip([2, *by_hand], by_hand, strict=False))


def _start(begins_at: int, steps: dict[int, list[int]]) -> Start:
    noted = {number: Step((number - 1) // 2, samples, [1.0]) for number, samples in steps.items()}
    return Start(begins_at, 2, 4, "place", 0.0, {}, noted)


HISTORY = [
    _start(0, {1: [0, 1], 2: [2, 3], 3: [3, 1]}),
    _start(2, {3: [3, 1], 4: [0, 2], 5: [1, 0]}),
    _start(4, {5: [1, 0], 6: [2, 3]}),
]


def test_each_start_undoes_what_came_after_its_checkpoint() -> None:
    steps = surviving_steps(HISTORY)
    assert {number: step.samples for number, step in steps.items()} == {
        1: [0, 1],
        2: [2, 3],
        3: [3, 1],
        4: [0, 2],
        5: [1, 0],
        6: [2, 3],
    }
    assert coverage_problems(steps, 4, 6) == []


@pytest.mark.parametrize(
    ("begins_at", "problem"),
    [
        (3, r"epoch 2: \[\] more than once, \[0, 1\] never|the steps are \[1, 2, 3, 5, 6\]"),  # a step is left out
        (5, r"epoch 2: \[0, 1\] more than once"),  # its samples are trained on again, under the next step's number
    ],
)
def test_a_resume_at_the_wrong_step_is_noticed(begins_at: int, problem: str) -> None:
    history = copy.deepcopy(HISTORY)
    history[2].begins_at = begins_at
    if begins_at == 5:
        history[2].steps = {6: history[2].steps[5], 7: history[2].steps[6]}
    problems = coverage_problems(surviving_steps(history), 4, 6)
    assert any(re.search(problem, found) for found in problems), problems


def test_a_step_that_only_one_rank_made_is_noticed() -> None:
    steps = surviving_steps(HISTORY)
    steps[4] = dataclasses.replace(steps[4], samples=[0])
    assert coverage_problems(steps, 4, 6) == ["epoch 1: [] more than once, [2] never", "steps of [1, 2] samples"]


# ------------------------------------------------------------------------------------------------ finding and resuming


@dataclasses.dataclass
class Allowed:
    """A hyperparameter that torch does not know."""

    value: int


def fit(folder: Path, max_steps: int, *others: pl.Callback, **settings: Any) -> tuple[pl.Trainer, Model, AutoResume]:
    pl.seed_everything(11, verbose=False)
    model, resume = Model(), AutoResume(str(folder))
    saving = SaveCheckpoints(folder, every_steps=3, keep=2)
    callbacks = [*default_callbacks(), saving, resume, *others]
    run = trainer(callbacks=callbacks, max_epochs=-1, max_steps=max_steps, enable_checkpointing=True)
    run.fit(model, DataLoader(Augmented(), batch_size=2, shuffle=True), **settings)
    return run, model, resume


@ranks(1, 2, init=False)
def test_auto_resume_goes_on_where_the_folder_ends(tmp_path: Path) -> None:
    _, whole, resume = fit(tmp_path / "whole", 15)
    assert resume.step is None
    fit(tmp_path / "parts", 7)
    _, second, resume = fit(tmp_path / "parts", 15)
    assert resume.step == 7
    assert torch.equal(second.values, whole.values)
    assert list(saved_steps(tmp_path / "parts")) == [12, 15]
    run, third, resume = fit(tmp_path / "parts", 15)  # there is nothing left to do
    assert (resume.step, run.global_step, third.seen) == (15, 15, {})
    assert torch.equal(third.values, whole.values)
    assert list(saved_steps(tmp_path / "parts")) == [12, 15]


@ranks(2, init=False)
def test_a_torn_checkpoint_is_passed_over_and_replaced(tmp_path: Path) -> None:
    _, whole, _ = fit(tmp_path / "whole", 9)
    run, _, _ = fit(tmp_path / "parts", 6)
    newest = tmp_path / "parts" / "step=6.ckpt"
    run.strategy.barrier()
    if run.is_global_zero:
        newest.write_bytes(newest.read_bytes()[:-500])
    run.strategy.barrier()
    _, second, resume = fit(tmp_path / "parts", 9)
    assert resume.step == 3
    assert torch.equal(second.values, whole.values)
    assert [path.name for path in (tmp_path / "parts-1").iterdir()] == ["step=6.ckpt"]
    assert list(saved_steps(tmp_path / "parts")) == [6, 9]


@ranks(2, init=False)
def test_only_rank_0_looks(tmp_path: Path) -> None:
    """A rank whose file system lags behind sees nothing, and resumes all the same."""
    import torch.distributed as dist

    from ddp_plugin.callbacks import auto_resume

    fit(tmp_path, 4)
    if dist.get_rank() == 1:
        auto_resume.newest_checkpoint = lambda folder: pytest.fail("rank 1 looked")  # type: ignore[assignment]
    _, _, resume = fit(tmp_path, 6)
    assert resume.step == 4


@ranks(2, init=False)
def test_a_folder_that_cannot_be_searched_is_said_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(DDPPluginError, match="a folder of checkpoints at"):
        fit(path, 4)


@ranks(1, 2, init=False)
def test_types_that_are_refused_stop_a_restart_unless_they_are_allowed(tmp_path: Path, world_size: int) -> None:
    """A whole checkpoint of Lightning's own is not passed over: the run would begin from nothing."""
    run, _, _ = fit(tmp_path, 4)
    if run.is_global_zero:
        for path in tmp_path.glob("*.ckpt"):
            torch.save(torch.load(path, weights_only=True) | {"hyper_parameters": {"path": Allowed(1)}}, path)
    run.strategy.barrier()
    with pytest.raises(RefusedCheckpointError, match="Allowed"):
        fit(tmp_path, 6)
    if world_size == 1:
        _, _, resume = fit(tmp_path, 6, weights_only=False)
        assert resume.step == 4


@ranks(2, init=False)
def test_what_killed_saves_have_left_is_removed_in_all_folders(tmp_path: Path) -> None:
    run, _, _ = fit(tmp_path, 4)
    run.strategy.barrier()
    older = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    if run.is_global_zero:
        older.mkdir(parents=True)
        with files._unfinished_file(older) as (path, _):
            pass
        path.write_bytes(b"of a writer that was killed")
        assert path.exists()
    run.strategy.barrier()
    fit(tmp_path, 6)
    assert list(older.iterdir()) == []


@ranks(1, init=False)
def test_a_trial_of_the_code_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    resume = AutoResume(str(tmp_path))
    run = trainer(callbacks=[*default_callbacks(), resume], fast_dev_run=True)
    run.fit(Model(), DataLoader(Augmented(), batch_size=2))
    assert (resume.step, run.global_step) == (None, 1)


@ranks(1, init=False)
def test_a_path_comes_first(tmp_path: Path) -> None:
    fit(tmp_path, 7)
    _, _, resume = fit(tmp_path, 9, ckpt_path=str(tmp_path / "step=6.ckpt"))
    assert resume.step == 6
    assert list(saved_steps(tmp_path)) == [6, 9]
    assert list(saved_steps(tmp_path.with_name(f"{tmp_path.name}-1"))) == [7]


@ranks(1, init=False)
def test_what_asks_once_is_not_asked_by_a_later_validation(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
            if stage == "fit":
                raise OSError("nothing restored yet")

    class Validates(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch).mean())

    fit(tmp_path, 4)
    callbacks = [AutoResume(str(tmp_path)), Fails()]
    run, model = trainer(callbacks=callbacks), Validates()
    with pytest.raises(OSError, match="nothing restored"):
        run.fit(model, DataLoader(Augmented(), batch_size=2))
    before = model.values
    run.validate(model, DataLoader(Augmented(), batch_size=2), verbose=False)
    assert torch.equal(model.values, before)


@ranks(2, init=False)
def test_without_the_callback_a_second_start_begins_anew(tmp_path: Path) -> None:
    fit(tmp_path, 7)
    pl.seed_everything(11, verbose=False)
    model = Model()
    run = trainer(
        callbacks=[*default_callbacks(), SaveCheckpoints(tmp_path, 3)],
        max_epochs=-1,
        max_steps=7,
        enable_checkpointing=True,
    )
    run.fit(model, DataLoader(Augmented(), batch_size=2, shuffle=True))
    assert sum(map(len, model.seen.values())) == 7


# -------------------------------------------------------------------------------------------------------------- saving


@ranks(2, init=False)
def test_saves_by_the_clock_of_rank_0_at_one_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import saving as module

    now_s = 0.0

    class Ticks(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            nonlocal now_s
            now_s += 25.0 if trainer.is_global_zero else 1.0

    module.time = type("Time", (), {"monotonic": staticmethod(lambda: now_s)})  # type: ignore[assignment]
    pl.seed_everything(11, verbose=False)
    saves = SaveCheckpoints(tmp_path, every_minutes=1.0, keep=9)
    run = trainer(
        callbacks=[*default_callbacks(), Ticks(), saves], max_epochs=-1, max_steps=12, enable_checkpointing=True
    )
    run.fit(Model(), DataLoader(Augmented(), batch_size=2, shuffle=True))
    # The third step passes the minute, the fourth one's message carries it to all ranks; then a minute anew.
    assert list(saved_steps(tmp_path)) == [4, 8, 12]


@ranks(1, init=False)
def test_saves_complete_steps_only_and_the_end(tmp_path: Path) -> None:
    pl.seed_everything(11, verbose=False)
    saves = SaveCheckpoints(tmp_path, every_steps=2, keep=9)
    settings: dict[str, Any] = {"accumulate_grad_batches": 3, "enable_checkpointing": True}
    run = trainer(callbacks=[*default_callbacks(), saves], max_epochs=-1, max_steps=5, **settings)
    run.fit(Model(), DataLoader(Augmented(), batch_size=2))
    assert list(saved_steps(tmp_path)) == [2, 4, 5]
    for step, path in saved_steps(tmp_path).items():
        assert torch.load(path, weights_only=True)["global_step"] == step


@pytest.mark.parametrize("wrong", [{"every_steps": 0}, {"every_minutes": 0.0}, {"keep": 0}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Correct the number"):
        SaveCheckpoints(tmp_path, **wrong)
