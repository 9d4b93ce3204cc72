"""Every Python block in the docs runs, and what the docs name exists."""

import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.harness import ROOT, RankFailureError, run_ranks

FRONT = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
RUN_ELSEWHERE = {  # they need arguments, or a notebook
    "how-to/lightning-cli.md": "tests/test_lightning_cli.py",
    "how-to/hydra.md": "tests/test_hydra.py",
    "how-to/jupyter.md": "tests/test_jupyter.py",
}
LAUNCHER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
)

KEPT: list[object] = []  # the globals of a program: they live as long as its process, as they do without runpy


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def blocks_of(pages: list[Path]) -> list[object]:
    return [
        pytest.param(block, id=f"{name_of(page)}-{index}")
        for page in pages
        if name_of(page) not in RUN_ELSEWHERE
        for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
    ]


def world_size_of(block: str) -> int:
    """How many processes a block is for; 1 also where it starts them by another way than a launcher."""
    if re.search(r"start_method=|ddp_plugin_(?:spawn|fork|notebook)|\btune\(", block):
        return 1
    found = re.search(r"devices=(\d+)|--nproc-per-node (\d+)", block)
    return int(found[1] or found[2]) if found else 1


def run_as_a_program(path: str) -> None:
    """Runs a file as torchrun would, or by itself; the process is a fork of one that has imported torch already."""
    os.chdir(Path(path).parent)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    if os.environ["WORLD_SIZE"] == "1":
        for name in LAUNCHER:
            del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT)
    sys.argv = [path]
    KEPT.append(runpy.run_path(path, run_name="__main__"))


def run_block(block: str, folder: Path) -> None:
    script = folder / "block.py"
    script.write_text(block)
    run_ranks(run_as_a_program, world_size_of(block), init=False, timeout_s=150.0, path=str(script))


def test_there_are_blocks_and_pages() -> None:
    assert len(blocks_of(FRONT)) >= 1
    assert len(blocks_of(PAGES)) >= 20
    assert {name_of(page) for page in PAGES} >= {
        "README.md",
        "tour.md",
        "choosing.md",
        "guarantees.md",
        "how-to/hang.md",
        "step.md",
        "tutorials.md",
    }


@pytest.mark.parametrize(("name", "test"), RUN_ELSEWHERE.items())
def test_pages_that_run_elsewhere_are_read_there(name: str, test: str) -> None:
    (page,) = (page for page in PAGES if name_of(page) == name)
    assert len(re.findall(r"^```python\n", page.read_text(), re.M)) == 1  # the one that is run there
    assert f'"how-to" / "{Path(name).name}"' in (ROOT / test).read_text()


@pytest.mark.parametrize("block", blocks_of(FRONT))
def test_every_block_of_the_front_page_runs_as_a_person_runs_it(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("block", blocks_of([page for page in PAGES if page not in FRONT]))
def test_every_python_block_runs(block: str, tmp_path: Path) -> None:
    run_block(block, tmp_path)


@pytest.mark.parametrize(
    "block", ["assert 1 == 2", "# torchrun --nproc-per-node 2\nimport os\nassert os.environ['RANK'] == '0'"]
)
def test_a_block_that_is_wrong_on_any_rank_is_noticed(block: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailureError, match="AssertionError"):
        run_block(block, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        is_made_by_the_site = "reference/" in target
        assert is_made_by_the_site or (page.parent / target).exists(), target
    for path in re.findall(r"^--8<-- \"(.+)\"$", text, re.M):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:ddp_plugin|recipes|tests|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_make_targets_in_the_docs_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.M)}
    assert named
    assert named <= targets


def test_ci_runs_the_command_of_the_readme() -> None:
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command == "make test"
    assert command in (ROOT / "README.md").read_text()


def test_the_tour_names_every_module_in_reading_order() -> None:
    from tests.test_architecture import STORY

    tour = (ROOT / "docs" / "tour.md").read_text()
    named = re.findall(r"`ddp_plugin/([\w/]+)\.py`", tour)
    order = [name.replace("/", ".").removesuffix(".__init__") for name in named]
    assert order == [module for module in STORY if not module.startswith("callbacks")]
    for module in STORY:
        if module.startswith("callbacks."):
            assert "ddp_plugin/callbacks" in tour
