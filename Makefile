# `make demo` and `make test` need nothing but python3: each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# Test processes; auto is one for each core.
WORKERS ?= auto
# A worker for each core: more threads in each would only wait for one another.
ONE_THREAD = OMP_NUM_THREADS=1
# What pip installs as torch, instead of the build that fits this machine: make TORCH="torch==2.13.0"
TORCH ?=

# Minutes that the measurements on a GPU may take, and where their report goes.
MINUTES ?= 10
REPORT ?= gpu-report

.PHONY: demo test test-all test-exhaustive check gpu clean

demo: $(VENV)/installed
	$(VENV)/bin/specctl generate "Once upon a time"

# A module's tests stay together: they share fixtures and models.
test: $(VENV)/installed-dev
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope

test-all: $(VENV)/installed-dev
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope -m "not exhaustive"

# Products of policies with all else, too.
test-exhaustive: $(VENV)/installed-dev
	$(ONE_THREAD) $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope -m ""

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# On a GPU: its tests and measurements, each in a process of its own, and one report.
gpu: $(VENV)/installed-dev
	$(VENV)/bin/python -m tools.gpu_report.run $(REPORT) --minutes $(MINUTES)

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
