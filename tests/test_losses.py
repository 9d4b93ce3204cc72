"""The comparison of losses knows which hooks are lossy, what is noise, and fails where a hook is not within it."""

import subprocess
import sys

import pytest

from ddp_plugin.hooks import HOOKS
from tests.benchmarks import losses
from tests.benchmarks.losses import lossy_hooks, make, read_hook, verdict
from tests.harness import ROOT

EXACT = {"allreduce", "ring", "tree", "butterfly", "parameter_server"}
TINY = ("model.dim=32", "model.hidden_dim=64", "model.num_layers=1", "data.max_bytes=300_000")


def test_every_hook_that_may_train_is_either_exact_or_compared() -> None:
    assert set(lossy_hooks()) == set(HOOKS) - EXACT - {"noop"}


def test_noise_is_two_standard_deviations_upward() -> None:
    exact = [1.0, 2.0, 3.0]  # a mean of 2 and a standard deviation of 1
    assert verdict([4.0], exact) == (2.0, True)
    assert verdict([4.5, 4.0], exact) == (2.25, False)
    assert verdict([-9.0], exact) == (-11.0, True)


def test_options_are_read_from_text() -> None:
    text = "powersgd matrix_rank=8 warm_start=false"
    assert read_hook(text) == (text, {"name": "powersgd", "matrix_rank": 8, "warm_start": False})


def test_every_lossy_hook_comes_to_its_own_way_within_the_steps_that_are_compared() -> None:
    """Else the comparison would show nothing about it."""
    for name in lossy_hooks():
        hook = make(name)
        assert hook is not None
        assert hook.start_step + 3 * hook.period <= 300, name


@pytest.mark.parametrize("hook", ["local_sgd", "diloco", "int8"])
@pytest.mark.parametrize("loss", [3.9, 4.1])
def test_no_hook_is_excused(hook: str, loss: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*_: object, hook: object, seed: int, **__: object) -> list[float]:
        return [loss if hook else 1.0 + seed]

    monkeypatch.setattr(losses, "run_ranks", trained)
    monkeypatch.setattr(sys, "argv", ["losses", "--seeds", "3", hook])
    if loss > 4:  # a mean of 2 and a standard deviation of 1
        with pytest.raises(SystemExit, match="1"):
            losses.main()
    else:
        losses.main()


@pytest.mark.long
def test_a_run_prints_its_verdicts_and_fails_for_one_that_is_not_noise() -> None:
    hooks = ("topk density=1 start_step=0", "topk density=0.00001 start_step=0")  # everything; nearly nothing
    command = [sys.executable, "-m", "tests.benchmarks.losses", *hooks, "--seeds", "2", "--steps", "20"]
    finished = subprocess.run(
        [*command, "--settings", "optimizer.warmup_steps=5", *TINY],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    everything, nothing = finished.stdout.splitlines()[-2:]
    assert "of 2 exact runs" in finished.stdout
    assert "  within the noise" in everything
    assert "NOT within the noise" in nothing
