# `make demo` and `make test` need nothing but python3: each makes its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
# Test processes; auto is one for each core.
WORKERS ?= auto
# The CPU build of torch, so that nothing pulls gigabytes of CUDA; for a GPU: make TORCH=torch
TORCH ?= torch==2.13.0

.PHONY: demo test test-all check clean

demo: $(VENV)/installed
	$(VENV)/bin/specctl generate "Once upon a time"

# A module's tests stay together: they share fixtures and models.
test: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope

test-all: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadscope -m ""

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV)
