# One command each; CI calls the same targets. `make help` lists them.

VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough. Another one: make setup PYTHON=python3.13
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; break; fi; done)
ARGS ?=
# The `bin` directory of another PostgreSQL than the wheel's, for the tests and `make db`: /usr/lib/postgresql/15/bin
PG_BIN ?=
# Processes that `make test` runs the tests in, each with servers of its own; 0 is none but pytest's, as --pdb needs it.
WORKERS ?= 3
# The same for `make test-faults`, whose tests have processes of their own and leave little of two cores.
FAULT_WORKERS ?= 2
# How long `make chaos` lasts, and `make churn`. SEED: a run to play again; without it a new one is drawn, and printed.
MINUTES ?= 10
SEED ?=

# The peers have an environment of their own, so that what they need cannot clash with what we need. The newest Python,
# because one of them wants 3.12. Another one: make bench-peers PEERS_PYTHON=/path/to/python3.13
PEERS_VENV := .venv-peers
PEERS_PYTHON ?= $(or $(shell for p in python3.14 python3.13 python3.12; do \
	if $$p -c '' 2>/dev/null; then echo $$p; break; fi; done),$(PYTHON))

# With `=`: pytest takes a directory that stands by itself for one of tests.
PYTEST_SERVER = $(if $(PG_BIN),--postgres-binaries="$(PG_BIN)")

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-faults chaos churn check format bench bench-peers db clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' Makefile

setup: $(VENV)/.dev ## make .venv with everything for development

demo: $(VENV)/.demo ## gateway and relays on a PostgreSQL of their own, with real requests
	@$(BIN)/relay-dispatch demo $(ARGS)

test: $(VENV)/.dev ## run the tests (make test ARGS='-k fence' PG_BIN=/usr/lib/postgresql/15/bin)
	@$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_SERVER) $(ARGS)

test-faults: $(VENV)/.dev ## run the tests of faults: failover, poolers, shutdown … (ARGS='-k failover')
	@$(BIN)/python -m pytest -n $(FAULT_WORKERS) $(PYTEST_SERVER) tests/faults $(ARGS)

chaos: $(VENV)/.dev ## break everything for a while, and audit what came of it (MINUTES=10 SEED=7)
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

churn: $(VENV)/.dev ## connects, cancels and errors without end: what is left of them? (MINUTES=30)
	@$(BIN)/python -m tests.chaos.churn --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: $(VENV)/.dev ## format, lint, types, layers, settings table
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/settings_table.py --check

format: $(VENV)/.dev ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench ## run the benchmarks, each beside its hand-written baseline
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(PEERS_VENV)/.peers ## run other queues beside ours (make bench-peers ARGS='pgqueuer --quick')
	@$(PEERS_VENV)/bin/python -m benchmarks.peers $(ARGS)

db: $(VENV)/.demo ## leave a PostgreSQL server running and print its DSNs (ARGS=--stop ends it)
	@$(BIN)/python -m dispatch_core.dev.postgres $(if $(PG_BIN),--binaries "$(PG_BIN)") $(ARGS)

clean: ## remove .venv and caches; the development server's data stays
	rm -rf $(VENV) $(PEERS_VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build

# --- the environment: plain venv and pip, made anew when pyproject.toml changes -------------------

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Relay Dispatch needs Python 3.11 or newer; none was found. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Relay Dispatch needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) has no venv module: install your system's package for it (Debian, Ubuntu: python3-venv)." >&2; exit 1; }
	@echo '$(PYTHON) -m venv $(VENV)' >&2
	@$(PYTHON) -m venv $(VENV) >&2

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# On stderr: stdout is the result's, as in `make demo ARGS=--json > report.json`.
# The larger sets contain the smaller one, so their stamps satisfy it too.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo 'installing what demo needs into $(VENV) …' >&2
	@$(PIP_INSTALL) -e '.[demo]' >&2
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo 'installing what dev needs into $(VENV) …' >&2
	@$(PIP_INSTALL) -e '.[dev]' >&2
	@touch $@ $(VENV)/.demo

$(VENV)/.bench: pyproject.toml | $(BIN)/python
	@echo 'installing what bench needs into $(VENV) …' >&2
	@$(PIP_INSTALL) -e '.[bench]' >&2
	@touch $@ $(VENV)/.demo

$(PEERS_VENV)/bin/python:
	@test -n "$(PEERS_PYTHON)" || { echo "No Python was found. Name one: make bench-peers PEERS_PYTHON=/path/to/python3" >&2; exit 1; }
	@echo '$(PEERS_PYTHON) -m venv $(PEERS_VENV)' >&2
	@$(PEERS_PYTHON) -m venv $(PEERS_VENV) >&2

$(PEERS_VENV)/.peers: pyproject.toml | $(PEERS_VENV)/bin/python
	@echo 'installing what bench-peers needs into $(PEERS_VENV) …' >&2
	@$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench-peers]' >&2
	@touch $@
