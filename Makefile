# Two commands show the product (`make llm`, `make resnet`), one shows that it is right (`make test`).
# Each works from a fresh clone: it makes a virtual environment, installs into it, and runs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: llm resnet test lint docs docs-serve pictures parity bench bench-slow-link losses exit-codes chaos test-long test-gpu clean

llm: $(VENV)/.installed
	$(BIN)/python recipes/llm.py $(ARGS)

resnet: $(VENV)/.installed
	$(BIN)/python recipes/resnet.py $(ARGS)

# Tests that measure time run alone, the others two files at a time: they wait for ranks to start more than they compute.
# The longest files go first, so that none is left alone at the end.
TIMED := $(addprefix tests/test_,bucket_timeline.py communication_monitor.py monitor_costs.py slow_link.py straggler_monitor.py)
LONG := $(addprefix tests/test_,failing.py two_hosts.py recipe_llm.py stopping.py launch.py recipe_resnet.py restarting.py tune.py)
OTHERS := $(filter-out $(TIMED) $(LONG),$(wildcard tests/test_*.py)) tests/gpu
NOTHING_SELECTED := 5

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TIMED) $(ARGS) || [ $$? -eq $(NOTHING_SELECTED) ]
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" $(LONG) $(OTHERS) $(ARGS) || [ $$? -eq $(NOTHING_SELECTED) ]

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, into site/: open site/index.html (its search needs a server: docs-serve). A warning ends the build. Signatures are laid out by ruff, which is looked for on the path.
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" mkdocs build --strict $(ARGS)

docs-serve: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 PATH="$(abspath $(BIN)):$$PATH" mkdocs serve $(ARGS)

# The pictures of the pages, by the project's own commands and callbacks.
pictures: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python docs/make_pictures.py

# Every cell of the parity table; `make test` runs a sample of it.
parity: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_parity.py --whole-parity-table $(ARGS)

bench: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks $(ARGS)

# Two network namespaces with a rate limit between them: needs root rights, ip and tc, and says so where they are missing.
bench-slow-link: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.slow_link $(ARGS)

# Held-out loss of the language-model recipe with each lossy hook, beside the spread of exact runs.
losses: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.benchmarks.losses $(ARGS)

# A clean run ends with 0 every time: RUNS=100 of them, one after another.
exit-codes: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exit_codes --num-runs $(or $(RUNS),100) $(ARGS)

# The language-model recipe, killed at random moments and started again, must be the run that was not.
SEED ?= 0
KILLS ?= 10
chaos: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --seed $(SEED) --kills $(KILLS) $(ARGS)

# What `make test` leaves out, because each takes a minute.
test-long: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m long $(ARGS)

test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest tests/gpu -m gpu $(ARGS)

# torch goes first, at the constrained version, so that a CPU build that pip can see is taken where there is one. Pip's own
# settings choose another build, for instance PIP_INDEX_URL or PIP_FIND_LINKS in the environment.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
