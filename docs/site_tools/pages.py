"""What the site has beside the pages of this folder: the API reference, every command's help, the nav's patterns."""

import argparse
import ast
import fnmatch
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent

# Page, title, what it is about, and the modules whose public names it holds.
REFERENCE: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "strategy",
        "Strategy",
        "What the Trainer is given. How its parts build on one another: [Tour](../tour.md#into-lightning).",
        ("ddp_plugin.strategy", "ddp_plugin.config"),
    ),
    (
        "callbacks",
        "Callbacks",
        "Each works without arguments and without the others. Which to take is said in [Choosing](../choosing.md); "
        "what they log, in [Loggers](../loggers.md). Methods that Lightning calls are left out here.",
        (
            "ddp_plugin.callbacks",
            "ddp_plugin.callbacks.communication_monitor",
            "ddp_plugin.callbacks.straggler_monitor",
            "ddp_plugin.evaluation",
            "ddp_plugin.supervision.diagnosis",
        ),
    ),
    (
        "hooks",
        "Communication hooks",
        "How the ranks' gradients become their mean. Which hook for which link is said in "
        "[Choosing](../choosing.md#which-communication-hook-for-which-link).",
        (
            "ddp_plugin.hooks",
            "ddp_plugin.hooks.exact",
            "ddp_plugin.hooks.cast",
            "ddp_plugin.hooks.noop",
            "ddp_plugin.hooks.quantised",
            "ddp_plugin.hooks.powersgd",
            "ddp_plugin.hooks.topk",
            "ddp_plugin.hooks.hierarchical",
            "ddp_plugin.hooks.periodic",
            "ddp_plugin.hooks.algorithms",
        ),
    ),
    (
        "collectives",
        "Collectives",
        "All-reduces over send and receive: as data, as tables, in seconds, and on tensors.",
        ("ddp_plugin.collectives",),
    ),
    ("tuning", "Tuning", "Settings by short measured runs of your own model.", ("ddp_plugin.tuning",)),
    (
        "layers",
        "BatchNorm, rates, weights",
        "What serves a plain torch loop as well as a Trainer.",
        ("ddp_plugin.batchnorm", "ddp_plugin.learning_rate", "ddp_plugin.weighting", "ddp_plugin.noise_scale"),
    ),
    (
        "files",
        "Checkpoints and predictions",
        "What is written, and how it is found and read again.",
        ("ddp_plugin.checkpoints", "ddp_plugin.predictions"),
    ),
    (
        "timeline",
        "Timeline",
        "Where the time of a step goes, as plain numbers.",
        ("ddp_plugin.timeline.steps", "ddp_plugin.timeline.straggling"),
    ),
    ("errors", "Errors", "What is raised beside `ValueError` and `TypeError`.", ("ddp_plugin.errors",)),
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Writes out the nav's patterns: each stands for the pages that no other line names, by file name."""
    assert config.nav is not None
    on_disk = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).rglob("*.md"))]
    reference = ["reference/index.md", *(f"reference/{page}.md" for page, *_ in REFERENCE)]
    config.nav = _written_out(config.nav, set(_leaves(config.nav)), [*on_disk, *reference])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the API reference: a page of directives for each group of modules, and one that lists them."""
    lines = [
        "# API reference",
        "",
        "Every public name, from its docstring: shapes, dtypes, units, what is raised, and",
        "",
    ]
    lines[-2] += " which collectives run on which ranks."
    for page, title, about, modules in REFERENCE:
        names = names_of(modules)
        text = f"# {title}\n\n{about}\n\n" + "".join(f"::: {name}\n\n" for name in names)
        files.append(File.generated(config, f"reference/{page}.md", content=text))
        listed = ", ".join(f"[`{name.rsplit('.', 1)[-1]}`][{name}]" for name in names)
        lines += [f"**[{title}]({page}.md)**: {listed}", ""]
    files.append(File.generated(config, "reference/index.md", content="\n".join(lines)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Adds the help of every command to the page about them."""
    return markdown + "".join(_helps()) if page.file.src_uri == "command-line.md" else markdown


def names_of(modules: tuple[str, ...]) -> list[str]:
    """Returns the dotted public names of modules, each once, and by the shortest path by which it can be imported."""
    top = public_names("ddp_plugin")
    found: dict[str, str] = {}
    for module in modules:
        for name in public_names(module):
            found.setdefault(name, f"ddp_plugin.{name}" if name in top else f"{module}.{name}")
    return list(found.values())


def public_names(module: str) -> list[str]:
    """Returns what a module's ``__all__`` names, in its order, without importing it."""
    base = ROOT.joinpath(*module.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def _helps() -> Iterator[str]:
    commands = importlib.import_module("ddp_plugin.commands")
    for _, name, _ in pkgutil.iter_modules(commands.__path__):
        module = importlib.import_module(f"ddp_plugin.commands.{name}")
        if hasattr(module, "add_arguments"):
            parser = argparse.ArgumentParser(
                prog=f"ddp-plugin {name}",
                description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
                formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=84),
            )
            module.add_arguments(parser)
            yield f"\n\n## `ddp-plugin {name} --help`\n\n```text\n{parser.format_help()}```\n"


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(item)


def _written_out(nav: list[Any], named: set[str], pages: list[str]) -> list[Any]:
    written: list[Any] = []
    for item in nav:
        if isinstance(item, str) and "*" in item:
            matching = [page for page in pages if fnmatch.fnmatch(page, item) and page not in named]
            written += [{"API reference": matching}] if item.startswith("reference/") else matching
        elif isinstance(item, dict):
            written.append({k: _written_out(v, named, pages) if isinstance(v, list) else v for k, v in item.items()})
        else:
            written.append(item)
    return written
