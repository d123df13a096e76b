# `make demo` trains the default job on four local nodes and kills one; `make test` runs the checks and tests.
# `make docs` builds the documentation as a site.
# Each makes its own .venv first; the demo's has no packages of the tests. PYTHON names the interpreter to make it from.
# The packages are of the versions in constraints.txt, which the tests have been run with; `make lock` takes the newest
# that pyproject.toml allows.
# Four targets run side by side on two processors: what computes all the time first, beside real runs (tests/e2e) and
# tests of processes, which wait for most of theirs. One that fails ends no other. Tests that compare times have the
# machine to themselves.
# Byte code is kept whatever the environment says: the tests start some hundred processes, and each would compile all
# that it imports. What is never imported is not compiled. Each target ends with its slowest tests. `make test` tries a
# part of the examples of each property, and of several tests of a promise one or two; `make test-all` has all
# (HYPOTHESIS_PROFILE: see tests/examples.py).
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.runs
LOCK_VENV := .venv-lock
STUB_VENV := .venv-cuda-stub
STUB_STAMP := $(STUB_VENV)/.installed
SITE := site
SELECT ?= not slow
PYTEST := $(BIN)/python -m pytest --durations=15 --durations-min=1
ALONE = $(shell grep --recursive --files-with-matches --include='test_*.py' 'mark\.alone' tests)
DECISIONS := tests/control tests/planner tests/schedule tests/sim
RUNTIME := tests/roles tests/runtime
TRAINING := tests/cuda_stub tests/storage tests/training tests/transformers
BESIDE := $(MAKE) --no-print-directory --jobs=4 --keep-going --output-sync=target

# Seeds of disturbed runs: `make test-cuda-stub SEEDS=200`.
SEEDS ?= 20
export CUDA_STUB_SEEDS ?= $(SEEDS)

.PHONY: demo test test-all test-slow test-cuda-stub test-runs test-runtime test-training test-decisions test-tools test-others \
	docs lint types format lock clean

# A demo of its own name, which never goes on from an earlier one.
demo: $(RUNS)
	$(BIN)/oobleck up --local 4 --tag demo --resume never --steps 60 --kill node2@20
	@echo "To go on: source $(VENV)/bin/activate, then oobleck init"

test: export HYPOTHESIS_PROFILE ?= brief
test: $(STAMP) lint
	$(BESIDE) SELECT="not slow and not alone" test-training test-runs test-runtime test-tools test-others \
		test-decisions types
	$(PYTEST) -m "not slow and alone" $(ALONE)

test-all: export HYPOTHESIS_PROFILE ?= whole
test-all: test test-slow

test-slow: $(STAMP)
	$(BESIDE) SELECT="slow and not alone" DECISIONS= RUNTIME= TRAINING= test-runs test-others test-tools
	$(PYTEST) -m "slow and alone" $(ALONE)

# Torch's CUDA build without a GPU, over tools/gpu/stub. Its environment takes 5 GB.
test-cuda-stub: $(STUB_STAMP)
	$(STUB_VENV)/bin/python -m pytest --durations=15 --durations-min=1 tests/cuda_stub

test-runs: $(STAMP)
	$(PYTEST) -m "$(SELECT)" tests/e2e

test-decisions: $(STAMP)
	$(PYTEST) -m "$(SELECT)" $(DECISIONS)

test-runtime: $(STAMP)
	$(PYTEST) -m "$(SELECT)" $(RUNTIME)

test-training: $(STAMP)
	$(PYTEST) -m "$(SELECT)" $(TRAINING)

test-tools: $(STAMP)
	$(PYTEST) -m "$(SELECT)" tests/tools

test-others: $(STAMP)
	$(PYTEST) -m "$(SELECT)" $(addprefix --ignore ,tests/e2e tests/tools $(DECISIONS) $(RUNTIME) $(TRAINING))

# Any broken link, anchor or reference fails.
docs: $(STAMP)
	$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet --doctree-dir $(SITE)/.doctrees docs $(SITE)
	@echo $(SITE)/index.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the sizes come from: the files that pip fetches on Linux, and the directory that they fill.
$(RUNS): pyproject.toml constraints.txt
	@echo "Installing PyTorch and the rest into $(VENV), once: 2.8 GB to download and about 5 GB on disk with CUDA (pip's default);"
	@echo "0.3 GB and 1.2 GB for CPUs: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make demo"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable .
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.[test]'
	@touch $(RUNS) $@

# `===` takes no build with a label of its own (+cpu), which would be preferred where there is one.
$(STUB_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(STUB_VENV)
	$(STUB_VENV)/bin/python -m pip install --quiet --no-compile --no-cache-dir --disable-pip-version-check \
		--constraint constraints.txt 'torch===2.13.0' hypothesis psutil pytest pytest-timeout pytest-trio --editable .
	@touch $@

# Versions without the builds' own labels (+cpu), which other machines may not have. What torch asks for beside itself
# for GPUs it names by version already; nvidia-ml-py is asked for by us.
lock:
	$(PYTHON) -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '.[test]'
	sed '/^[^#]/,$$d' constraints.txt > $(LOCK_VENV)/constraints.txt
	$(LOCK_VENV)/bin/python -m pip freeze --exclude oobleck-train \
		| grep -Ev '^(nvidia-[a-ln-z]|cuda|triton)' \
		| sed -E 's/\+.*//; s/^(torch==[0-9]+\.[0-9]+).*/\1.*/' >> $(LOCK_VENV)/constraints.txt
	mv $(LOCK_VENV)/constraints.txt constraints.txt
	rm -rf $(LOCK_VENV)

clean:
	rm -rf $(VENV) $(LOCK_VENV) $(STUB_VENV) tools/gpu/stub/build $(SITE) .mypy_cache .ruff_cache .pytest_cache .hypothesis
