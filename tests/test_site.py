"""The site builds without a warning, has no dead link, loads nothing from elsewhere, and names everything."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ddp_plugin
import ddp_plugin.batchnorm
import ddp_plugin.checkpoints
import ddp_plugin.collectives
import ddp_plugin.hooks
from tests.harness import ROOT

# What a browser fetches by itself, as against what a reader may click.
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("video", "src"), ("link", "href")}


class Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and value is not None:
                self.loads.append(value)
            elif tag == "a" and name == "href" and value is not None:
                self.links.append(value)


def pages_of(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}


def problems(site: Path) -> list[str]:
    """Returns every dead link or anchor, and everything that would be loaded from another place."""
    found, pages = [], pages_of(site)
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # it is shown at any address, so its links begin at the root
        for target in [*page.links, *page.loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if target in page.loads and parts.scheme != "data":
                    found.append(f"{path.name} loads {target}")
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchors = pages[file].anchors | {"__top"} if file in pages else set()
            if not file.exists() or (parts.fragment and file in pages and unquote(parts.fragment) not in anchors):
                found.append(f"{path.name} leads to {target}")
    for path in site.rglob("*.css"):
        found += [
            f"{path.name} loads {url}" for url in re.findall(r"url\(['\"]?((?:https?:)?//[^)]+)", path.read_text())
        ]
    return found


def mkdocs(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ruff lays out signatures
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = mkdocs("--site-dir", str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return folder


def test_the_site_leads_nowhere_that_is_not_there_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert problems(site) == []
    assert len(pages_of(site)) > 25


def test_a_warning_ends_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    validation = re.search(r"^validation:\n(?:  .+\n)+", settings, re.M)
    assert validation is not None
    (tmp_path / "mkdocs.yml").write_text(f"site_name: small\nnav: [index.md]\n{validation[0]}")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    page.write_text("# One\n\n[there](#one)\n")
    assert mkdocs(folder=tmp_path).returncode == 0
    page.write_text("# One\n\n[nowhere](#two)\n")
    assert mkdocs(folder=tmp_path).returncode != 0
    page.write_text("# One\n")
    (tmp_path / "docs" / "left_out.md").write_text("# Not in the nav\n")
    assert mkdocs(folder=tmp_path).returncode != 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<a href="other.html">', None),
        ('<a href="other.html#here">', None),
        ('<a href="https://example.org">', None),
        ('<a href="none.html">', "page.html leads to none.html"),
        ('<a href="other.html#gone">', "page.html leads to other.html#gone"),
        ('<img src="none.png">', "page.html leads to none.png"),
        ('<script src="https://example.org/x.js">', "page.html loads https://example.org/x.js"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "page.html loads //example.org/x.css"),
    ],
)
def test_that_search_finds_problems(text: str, problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(text)
    (tmp_path / "other.html").write_text('<p id="here">')
    assert problems(tmp_path) == ([problem] if problem else [])


def test_every_page_is_in_the_nav(site: Path) -> None:
    listed = re.search(r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', (site / "index.html").read_text(), re.S)
    assert listed is not None
    linked = {(site / target).resolve() for target in Page(listed[0]).links if not target.startswith("#")}
    written = {
        site / page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")
    } - {site / "index.html"}
    assert {page.resolve() for page in written} <= linked


def public_names() -> Iterator[str]:
    packages = (ddp_plugin, ddp_plugin.hooks, ddp_plugin.collectives, ddp_plugin.batchnorm, ddp_plugin.checkpoints)
    for package in packages:
        yield from (f"{package.__name__}.{name}" for name in package.__all__ if name != "__version__")


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = {anchor for path in (site / "reference").glob("*.html") for anchor in Page(path.read_text()).anchors}
    assert [name for name in public_names() if name not in anchors] == []


def test_what_a_name_communicates_stands_apart(site: Path) -> None:
    text = (site / "reference" / "callbacks.html").read_text()
    assert len(re.findall(r'<details class="collectives" open>\s*<summary>Collectives</summary>', text)) > 10
    assert re.search(r":(?:class|func|meth|data|attr|mod):", text) is None  # each is a link, or code
    assert 'href="#ddp_plugin.GlobalMeanLoss"' in text or 'href="#ddp_plugin.callbacks' in text


def test_every_command_shows_its_help(site: Path) -> None:
    text = (site / "command-line.html").read_text()
    for path in (ROOT / "ddp_plugin" / "commands").glob("*.py"):
        if "def add_arguments" in path.read_text():
            assert f"usage: ddp-plugin {path.stem}" in text
