# One verb per job. TORCH_INDEX_URL names the index that torch is taken from, PYTHON the interpreter (3.11 or newer).
SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest
# Test processes side by side, each with whole files: most tests wait for processes and clocks rather than for a core.
# WORKERS=0 runs all in one process, as a debugger wants it and as figures of promises are measured.
WORKERS ?= 2
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-full test-chaos lint protos shape bench peers hooks

help:  ## these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv with everything that serving, testing and linting need
	@PYTHON=$(PYTHON) scripts/setup.sh dev

serve:  ## install what serving needs and start the whole stack (ARGS="--prefill 2 --decode 2")
	@PYTHON=$(PYTHON) scripts/setup.sh serve
	@exec $(BIN)/deepinfer up $(ARGS)

chat:  ## talk to the running stack
	@exec $(BIN)/deepinfer chat $(ARGS)

test: setup  ## the tests of every change (minutes)
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu" $(ARGS)

test-full: setup  ## all tests but those that need a GPU
	$(PYTEST) $(SIDE_BY_SIDE) -m "not gpu" $(ARGS)

test-chaos: setup  ## kill, freeze and corrupt; prints what was measured of each promise, writes docs/promises.md
	$(PYTEST) -m "chaos and not gpu" --promises=docs/promises.md $(ARGS)

lint: setup  ## style, types, import matrix, contract, generated code, hygiene
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/breaking.sh
	$(BIN)/python scripts/protos.py --check
	$(BIN)/python scripts/hygiene.py

protos: setup  ## regenerate the protobuf code beside the .proto files
	$(BIN)/python scripts/protos.py

shape: setup  ## size profile of modules and functions, and its caps
	@$(BIN)/python scripts/shape.py

bench: setup  ## ratios against the reference and against the parts alone
	$(BIN)/python -m bench.parity
	$(BIN)/python -m bench.engine
	$(BIN)/python -m bench.push
	$(BIN)/python -m bench.stack
	$(BIN)/python -m bench.footprint

peers:  ## make .peers/vllm, which bench.engine --peer vllm runs (3.3 GB)
	@PYTHON=$(PYTHON) scripts/peers.sh

hooks: setup  ## run the quick checks before every commit
	$(BIN)/pre-commit install
