# Each target sets up .venv by itself: `make demo` and `make test` are all that a fresh machine needs besides
# Python 3.11 or later with its headers, make and a C++20 compiler. The Slurm tests also need root and the packages
# slurm-wlm and munge; without them they are skipped, and the summary says so.

PYTHON ?= python3
TORCH ?= torch==2.13.0
# Handed to pip together with torch: for instance the index of the builds for your accelerator, or of the CPU builds.
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard deadpool/communicator/csrc/*)

.PHONY: help setup demo test test-full test-megatron-0.19 bench bench-peers lint format clean

help:
	@echo 'make demo       train under host losses and compare with an undisturbed run, bit for bit'
	@echo 'make test       lint and the tests, without the long cases'
	@echo 'make test-full  the long cases'
	@echo 'make bench      training with DeadPool beside the same training without it; a few minutes'
	@echo 'make bench-peers  other libraries on the same workload; downloads about 1 GB'
	@echo 'make test-megatron-0.19  the tests of the Megatron plugin, with megatron-core 0.19'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     ruff format'
	@echo 'make clean      remove what was built here, .venv included'

setup: $(VENV)/installed

# torch first: the extension is compiled against it, and DeepSpeed looks for it while it is installed.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check $(TORCH) setuptools wheel ninja pybind11 $(TORCH_PIP_ARGS)
	@touch $@

$(VENV)/installed: $(VENV)/torch setup.py pyproject.toml $(NATIVE)
	$(BIN)/pip install --disable-pip-version-check --no-build-isolation -e '.[embedded,deepspeed,megatron,dev]'
	@touch $@

demo: setup
	$(BIN)/deadpool verify --standalone --nnodes 3 --spares 2 \
	  --inject host-loss:rank=1@step=12,at=collective=2 \
	  --inject host-stop:rank=0@step=27 \
	  examples/train_gpt.py --steps 40

# Jobs of several processes one after the other, with the machine to themselves; the rest two at a time.
JOBS := tests/scenarios tests/slurm $(wildcard tests/plugins/*/test_verify.py tests/plugins/*/test_pretrain.py)

test: lint
	$(BIN)/python -m pytest -m 'not full' -n 2 --dist worksteal $(JOBS:%=--ignore=%) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m 'not full' $(JOBS) $(PYTEST_ARGS)

test-full: setup
	$(BIN)/python -m pytest -m full $(PYTEST_ARGS)

bench: setup
	benchmarks/run.sh

bench-peers: setup
	benchmarks/peers/setup.sh
	benchmarks/run.sh peers

# megatron-core from 0.17 on says that it needs Python 3.12, runs on 3.11 all the same, and imports triton (1 GB).
MEGATRON := .venv-megatron-0.19

$(MEGATRON)/installed: $(VENV)/installed
	$(BIN)/pip install --disable-pip-version-check --no-deps --ignore-requires-python --upgrade \
	  --target $(MEGATRON) 'megatron-core==0.19.2' triton
	@touch $@

test-megatron-0.19: $(MEGATRON)/installed
	PYTHONPATH=$(CURDIR)/$(MEGATRON) $(BIN)/python -m pytest tests/plugins/megatron $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(MEGATRON) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f deadpool/communicator/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
