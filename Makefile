# Every target prepares .venv by itself; only `setup` and `lock` ever reach for packages.
PYTHON ?= python3
BIN := .venv/bin
UV_VERSION := 0.13.9
LOCKS := .ci/requirements.txt .ci/requirements-dev.txt
SOURCES := admission_svc settlement_svc shared lua tests
# Workers of the test run; ARGS is handed on, e.g. make test ARGS="tests/store -k embedded".
JOBS ?= 2
ARGS ?=

.PHONY: setup demo test lint lengths bench mutants chaos lock clean

setup: .venv/.stamp

.venv/.stamp: $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r .ci/requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-index --no-deps --no-build-isolation \
		--config-settings editable_mode=compat -e .
	@touch $@

demo: setup
	$(BIN)/python -m settlement_svc.examples.demo $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $(JOBS) $(ARGS)

lint: setup lengths
	$(BIN)/ruff format --check -q $(SOURCES)
	$(BIN)/ruff check -q $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Golden copies are generated from files that are measured themselves.
lengths:
	@find $(SOURCES) -path '*/golden/*' -prune -o \( -name '*.py' -o -name '*.lua' \) -print | sort | xargs wc -l \
		| awk '$$2 != "total" && $$1 >= 500 { print $$2 ": " $$1 " lines, 499 allowed"; long = 1 } END { exit long }'

bench: setup
	$(BIN)/python -m tests.bench $(ARGS)

mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

# Random faults for a minute; ARGS="--seconds 600 --seed 7" for longer, or for the same again.
chaos: setup
	$(BIN)/python -m tests.faults.chaos $(ARGS)

# The lock files name versions and hashes only: no index, no path, so they hold behind any mirror.
lock:
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install -q --disable-pip-version-check uv==$(UV_VERSION)
	$(call compile,.ci/requirements.txt,)
	$(call compile,.ci/requirements-dev.txt,--extra dev -c .ci/requirements.txt)

compile = { echo '\# Written by "make lock" from pyproject.toml: change that, not this.'; \
	.venv-lock/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--no-emit-index-url --no-emit-find-links $(2) pyproject.toml; } > $(1).new && mv $(1).new $(1)

clean:
	rm -rf .venv .venv-lock build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
