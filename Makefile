# `make demo` and `make test` do all the set-up themselves, in $(VENV).
PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
BIN     := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test doctest lint format bench fuzz clean
# Two installs into one environment at once would trip over each other.
.NOTPARALLEL:

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## */  make \1|/p' Makefile | awk -F'|' '{printf "%-16s%s\n", $$1, $$2}'

demo: $(VENV)/.has-demo  ## statistics, explain and 200 training steps of a small transformer and a CNN
	$(BIN)/python examples/demo.py

test: doctest  ## every doctest, then every test
	$(BIN)/python -m pytest -n $(WORKERS) tests

# Not in the same run as the tests: what tests/conftest.py configures (64-bit floats, say) would change the outputs.
doctest: $(VENV)/.has-test
	$(BIN)/python -m pytest --doctest-modules --doctest-glob='*.md' src $(wildcard README.md docs/*.md)

lint: $(VENV)/.has-lint  ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.has-lint  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.has-bench  ## time and memory against the plain gradient; PEERS=python-with-PyTorch adds its libraries
	$(BIN)/python -m benchmarks $(if $(PEERS),--peers $(PEERS))

fuzz: $(VENV)/.has-test  ## random programs against the twin, for a long time
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -n $(WORKERS) tests/fuzz

clean:  ## remove the environment and every cache
	rm -rf .venv* build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp for each set of extras, so that the demo does not wait for what only the tests need.
$(VENV)/.has-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "pergrad needs Python 3.11 or newer and '$(PYTHON)' is not: run make with PYTHON=/path/to/python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing pergrad[$*] into $(VENV) (once; a minute or two)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
