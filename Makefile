# `make demo`, `make test`, and `make check` for a change's tests alone. Each sets up .venv by itself; a second call installs nothing again.
# TORCH=… chooses another torch build, e.g. make demo TORCH="torch==2.11.0"; PYTHON=… another interpreter.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNS := $(VENV)/.installed-to-run

# Every launch is five processes that read the sources; where bytecode is switched off, each would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-parts test-runs check test-full mutation lint types docs docs-check clean install

install: $(STAMP)

# Without --no-compile pip would compile every module of every package, one after the other, of which a run imports a third.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --no-compile

# The largest package is compiled, by being imported, while pip fetches the others.
$(RUNS): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "$(TORCH)"
	{ $(BIN)/python -c "import torch" 2>/dev/null & $(PIP_INSTALL) -e ".[gguf]" && wait; }
	@touch $(RUNS)

# With what tests, lint and types need besides.
$(STAMP): $(RUNS)
	$(PIP_INSTALL) -e ".[dev,wandb,gguf,quantised,search,ifbench]"
	@touch $(STAMP)

demo: $(RUNS)
	$(BIN)/python -m recipes.demo $(ARGS)

# Two sides at once, because each waits for others of its processes half of the time. ARGS="-k name" goes to both.
test: $(STAMP)
	$(MAKE) --no-print-directory -j 2 test-parts test-runs

# Where ARGS leaves nothing to run on one side, pytest's status is 5.
test-parts test-runs: test-%: $(STAMP)
	$(BIN)/python -m pytest -m "not full and not gpu" $(FOLDERS.$*) $(ARGS) || { status=$$?; test -n "$(ARGS)" -a $$status = 5; }

# The launches are done in half of the time of the parts, so they take the last of these (r to z). Names of files would be slower:
# pytest goes through the whole folder for each.
FOLDERS.parts := tests/unit --ignore-glob="*/unit/test_[r-z]*.py"
FOLDERS.runs := tests/contracts tests/loop tests/first_hour tests/unit --ignore-glob="*/unit/test_[!r-z]*.py"

# While you work: what the change against AGAINST (main) concerns, in a minute and a half.
check: lint types
	$(BIN)/python tools/changed_tests.py --against $(or $(AGAINST),main) --seconds 60

test-full: $(STAMP)
	$(BIN)/python tools/test_report.py $(ARGS)

mutation: $(STAMP)
	$(BIN)/python tools/mutation_test.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python tools/make_docs.py

docs-check: $(STAMP)
	$(BIN)/python tools/make_docs.py --check

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
