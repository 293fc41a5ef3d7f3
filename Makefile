# Two commands for a newcomer: `make demo` and `make test`. Both make the same environment first.
#
# TORCH is what pip is given for torch: `make test TORCH=torch==2.13.0`. Left out, pip takes its default,
# which is the one for CUDA. Without a GPU, this fetches several GB less:
# `make demo TORCH='torch --index-url https://download.pytorch.org/whl/cpu'`
# JOBS is how many processes share the tests; those of one file stay together, with what they set up.

TORCH ?= torch
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Hundreds of short processes import what the first one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-browser check fix docs bench torture fixtures clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: $(STAMP)        ## train a small model, inspect its checkpoint, export it, load it, generate, go on elsewhere
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: $(STAMP) lint   ## everything: format, lint, types, import contract, all tests
	$(PYTEST)

test-browser: $(STAMP) ## the pages of --html in Debian's headless Chromium (apt-get install chromium chromium-driver)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

check: $(STAMP) lint  ## the inner loop: everything but the tests that train or take long
	$(PYTEST) -q -m "not deepspeed and not slow"

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)         ## repair format and what ruff can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site needs no torch: without .venv it gets an environment of its own, in a minute.
DOCS_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-docs)

.venv-docs/bin/mkdocs:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet ".[docs]"

docs: $(if $(wildcard $(STAMP)),,.venv-docs/bin/mkdocs)  ## the pages of docs/ as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

bench: $(STAMP)       ## speed and memory, as ratios to cp and to DeepSpeed's script, in one run
	$(BIN)/python -m benchmarks.run $(BENCH)

torture: $(STAMP)     ## kills, refusals, full disks and fuzzing at length; TORTURE="--seconds 600 --kills 1000"
	$(BIN)/python -m tests.torture $(TORTURE)

fixtures: $(STAMP)    ## make the small checkpoints of fixtures/ anew, with real DeepSpeed
	set -e; for script in fixtures/make*.py; do $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) demo
