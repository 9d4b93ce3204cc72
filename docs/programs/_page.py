"""Writes docs/tutorials.md from the programs beside this file and what they print: python docs/programs/_page.py."""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

from _start import report, start

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "tutorials.md"

CHAPTERS = {
    "What DDP sends, and when": (
        "collectives_of_a_step",
        "overlap",
        "bucket_cap",
        "bucket_order",
        "bucket_view",
        "unused_bucket",
        "parameter_hook",
        "fp16_hook",
    ),
    "Static graphs and compilation": ("static_graph", "static_accumulation", "compile_order", "compile_prefix"),
    "Accumulation, losses and rates": (
        "no_sync",
        "tail_window",
        "equivalence",
        "mean_of_means",
        "batch_norm",
        "learning_rate",
    ),
    "Who sees which sample": (
        "sampler_padding",
        "validation",
        "unused_sampler",
        "sampler_seed",
        "new_sampler",
        "rank_zero",
        "random_dataset",
        "streams",
        "initialisation",
        "uneven_batches",
        "workers",
    ),
    "All-reduce": ("ring_bytes", "tree_rounds", "ring_code"),
    "Starting, saving, fitting": ("torchrun_defaults", "spawn_in_torchrun", "load_checkpoint", "seven_billion"),
}
NAMES = tuple(name for names in CHAPTERS.values() for name in names)

HEAD = """# What tutorials get wrong

Statements about data parallel training that one meets again and again, each with a short program that shows what is
true. They run on CPU with gloo, need no GPU and no data, and each works by itself, for instance
`python docs/programs/static_graph.py`. Every program checks its own statement, for what is said as well as for what to
do; continuous integration runs them all and compares what they print with this page.
"""


def page(outputs: Mapping[str, str]) -> str:
    """Returns the whole page, given what each program prints below its docstring."""
    chapters = []
    for title, names in CHAPTERS.items():
        chapters += [f"## {title}\n", *(section(name, outputs[name]) for name in names)]
    return "\n".join([HEAD, *chapters])


def section(name: str, output: str) -> str:
    """Returns a program's part of the page: what is said, what is true, its core, its output, what to do instead."""
    heading, said, true, instead = importlib.import_module(name).__doc__.strip().split("\n\n")
    said, true, instead = (
        f"**{word}:**{text}" for word, text in (part.split(":", 1) for part in (said, true, instead))
    )
    said, true, instead = (re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text) for text in (said, true, instead))
    # From the constants to the check: without imports, and without what all programs end with.
    source = (FOLDER / f"{name}.py").read_text()
    core = source[source.index("NUM_RANKS =") : source.index("def check(")].strip()
    return "\n".join(
        (
            f"### {heading.rstrip('.')}\n",
            f"{said}\n",
            f"{true}\n",
            f"From [programs/{name}.py](programs/{name}.py):\n",
            f"```py\n{core}\n```\n",
            f"```text\n$ python docs/programs/{name}.py\n{output}\n```\n",
            f"{instead}\n",
        )
    )


def main() -> None:
    """Runs every program, those with as many ranks one after another in the same processes, and writes the page."""
    outputs = {}
    for num_ranks in sorted({importlib.import_module(name).NUM_RANKS for name in NAMES}):
        names = [name for name in NAMES if num_ranks == importlib.import_module(name).NUM_RANKS]
        outputs |= {name: report(name, results) for name, results in start(names, num_ranks).items()}
    PAGE.write_text(page(outputs))


if __name__ == "__main__":
    main()
