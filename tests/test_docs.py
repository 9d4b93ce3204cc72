"""Every Python block in the docs runs, and what the docs name exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in PAGES
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))
]


def test_there_are_blocks_and_pages() -> None:
    assert len(BLOCKS) >= 4
    assert {page.name for page in PAGES} >= {
        "README.md",
        "tour.md",
        "choosing.md",
        "guarantees.md",
        "step.md",
        "tutorials.md",
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_runs(block: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / target).exists(), target
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
