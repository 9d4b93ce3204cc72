"""Each program about what tutorials get wrong shows what the page says, and would notice if it did not."""

import importlib
import itertools
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import ROOT, run_ranks

PROGRAMS = ROOT / "docs" / "programs"
sys.path.append(str(PROGRAMS))  # where python looks when it is given one of them

import _page  # noqa: E402
import _start  # noqa: E402


def run_programs(names: list[str]) -> dict[str, list[Any] | str]:
    """Returns what each program measured on these ranks, or how it failed."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")  # with torch's own time limit, as a Trainer would make it
    results: dict[str, list[Any] | str] = {}
    for name in names:
        try:
            results[name] = _start.measure(name)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def measured() -> dict[str, list[Any]]:
    found: dict[str, list[Any] | str] = {}
    programs = {name: importlib.import_module(name) for name in _page.NAMES}
    for num_ranks in sorted({program.NUM_RANKS for program in programs.values()}):
        names = [name for name, program in programs.items() if num_ranks == program.NUM_RANKS]
        found |= run_ranks(run_programs, num_ranks, init=False, names=names)[0]
    failed = {name: result for name, result in found.items() if isinstance(result, str)}
    assert not failed, "\n".join(f"--- {name}\n{text}" for name, text in failed.items())
    return found  # type: ignore[return-value]


def test_every_program_is_on_the_page_once() -> None:
    on_disk = sorted(path.stem for path in PROGRAMS.glob("*.py") if not path.stem.startswith("_"))
    assert sorted(_page.NAMES) == on_disk


@pytest.mark.parametrize("name", _page.NAMES)
def test_the_page_shows_a_program_and_what_it_printed(name: str, measured: dict[str, list[Any]]) -> None:
    section = _page.section(name, _start.report(name, measured[name]))
    heading = section.splitlines()[0]
    shown = re.search(rf"^{re.escape(heading)}\n.*?(?=^##|\Z)", _page.PAGE.read_text(), re.S | re.M)
    assert shown, f"{heading} is not on the page: run python docs/programs/_page.py"
    assert shown[0].strip() == section.strip()


def test_the_page_is_made_of_nothing_else(measured: dict[str, list[Any]]) -> None:
    assert _page.PAGE.read_text() == _page.page({name: _start.report(name, measured[name]) for name in _page.NAMES})


@pytest.mark.parametrize("name", _page.NAMES)
def test_a_program_notices_a_variant_that_behaves_like_another(name: str, measured: dict[str, list[Any]]) -> None:
    check, results = importlib.import_module(name).check, measured[name]
    check(*results)
    exchanges = [(i, j) for i, j in itertools.permutations(range(len(results)), 2) if results[i] != results[j]]
    assert exchanges, "all variants gave the same: nothing is shown"
    for i, j in exchanges:
        with pytest.raises(AssertionError):
            check(*results[:i], results[j], *results[i + 1 :])


def run_alone(file: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(file)], cwd=file.parent, env=environment, capture_output=True, text=True, timeout=120
    )


def test_a_program_works_by_itself(measured: dict[str, list[Any]]) -> None:
    done = run_alone(PROGRAMS / "mean_of_means.py")
    assert done.returncode == 0, done.stderr
    program = importlib.import_module("mean_of_means")
    assert done.stdout == f"{program.__doc__}\n{_start.report('mean_of_means', measured['mean_of_means'])}\n"


def test_a_program_whose_statement_does_not_hold_fails(tmp_path: Path) -> None:
    (tmp_path / "_start.py").write_text((PROGRAMS / "_start.py").read_text())
    source = (PROGRAMS / "parameter_hook.py").read_text()
    (tmp_path / "changed.py").write_text(
        source.replace("assert hook == [1.0, 1.0, 1.0]", "assert hook == [1.0, 2.0, 3.0]")
    )
    done = run_alone(tmp_path / "changed.py")
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
