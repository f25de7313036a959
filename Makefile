# Every target works on a clean clone that has python3 (with venv) and pip; the set-up is made once and is instant after.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt

# Nothing here may run for ever. Where there is no timeout(1) (macOS without coreutils) the limits are simply not set.
TIMEOUT := $(shell command -v timeout 2>/dev/null)
limit = $(if $(TIMEOUT),$(TIMEOUT) -k 30 $(1),)
# The same for what a person watches and may interrupt: ctrl-C reaches it.
limit_shown = $(if $(TIMEOUT),$(TIMEOUT) --foreground -k 30 $(1),)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test check bench setup clean

help:
	@echo "make demo    train a small policy on this machine's CPU"
	@echo "make test    the whole test suite"
	@echo "make check   ruff, mypy, docstrings, the documentation's code blocks"
	@echo "make bench   the benchmarks"
	@echo "make setup   only make $(VENV)"
	@echo "make clean   remove $(VENV) and every cache"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# What a user of the demo needs, and no more.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV): the first time takes minutes"
	@$(call limit_shown,1200) $(PIP_INSTALL) -e '.[demo]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Setting up $(VENV): the first time takes minutes"
	@$(call limit_shown,1200) $(PIP_INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-demo

setup: $(VENV)/.stamp-dev

demo: $(VENV)/.stamp-demo
	@$(call limit_shown,1200) $(BIN)/python examples/grpo_arithmetic.py

test: $(VENV)/.stamp-dev
	@$(call limit,2700) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(call limit,600) $(BIN)/mypy
	$(call limit,600) $(BIN)/python -m pytest -q tests/test_docstrings.py tests/test_docs.py

bench: $(VENV)/.stamp-dev
	@$(call limit_shown,1800) $(BIN)/python -m benchmarks.run $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/_build dask-scratch-space
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
