# `make demo` trains the default job on four local nodes and kills one; `make test` runs the checks and tests.
# Each makes its own .venv first. PYTHON names the interpreter to make it from.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all lint types format clean

demo: $(STAMP)
	$(BIN)/oobleck up --local 4 --kill node2@40

test: $(STAMP) lint types
	$(BIN)/python -m pytest -m "not slow"

test-all: $(STAMP) lint types
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
