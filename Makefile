# Each target sets up what it needs and can be the first command ever typed in a checkout.
# The first that runs and is new enough: a name on the PATH may be a shim that leads nowhere.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$name; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
STAMP_DOCS := $(VENV)/.installed-docs
# Processes that share the tests; each holds a few models and starts ranks of its own.
JOBS ?= 2
# How often `make repeat` carries out TESTS.
TIMES ?= 20

.PHONY: help quickstart install install-dev test test-all test-gpu repeat chaos lint format docs bench bench-gpu clean

help:
	@echo "make quickstart   set up, then train a small language model on this machine (a few minutes)"
	@echo "make test         set up, then run the tests            make test-gpu   those that need a GPU"
	@echo "make test-all     all tests, slow ones, faults and repetitions too, with fresh seeds; PART=NAME runs one part of them"
	@echo "                  PART=processors: tests that compare numbers, as other processors compute"
	@echo "make repeat       TESTS=tests/FILE TIMES=20: the same tests again and again, each time with another seed"
	@echo "make lint         style, types, imports                 make bench      speed, side by side with others"
	@echo "make chaos        400 faults over runs, and their cost          make docs       the documentation as a site, build/site"
	@echo "                                                        make bench-gpu  the same on one GPU; ONLY=8b: one size"
	@echo "With PYTHON=/path/python on the command line test-gpu and bench-gpu use that environment, and install nothing."

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "lmforge needs Python 3.11 or newer, and none is on the PATH: make PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: on Debian and Ubuntu, apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable .
	@touch $@

$(STAMP_DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(STAMP) $(STAMP_DOCS)

$(STAMP_DOCS): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@ $(STAMP)

install: $(STAMP)

install-dev: $(STAMP_DEV)

quickstart: $(STAMP)
	$(BIN)/lmforge quickstart

# In the order of the files: by default those with the fewest tests come last, such as the quickstart, alone for a minute.
test: $(STAMP_DEV)
	$(BIN)/python -m pytest -m "not slow and not gpu" --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: $(STAMP_DEV)
	@$(BIN)/python -m tests.parts --jobs $(JOBS) $(PART)

repeat: $(STAMP_DEV)
	@test -n "$(TESTS)" || { echo "make repeat TESTS=tests/FILE.py [TIMES=20]: name the tests to repeat"; exit 2; }
	LMFORGE_TEST_SEED=$${LMFORGE_TEST_SEED:-fresh} $(BIN)/python -m pytest --repeat $(TIMES) $(TESTS)

# With PYTHON=… on this command line a GPU's environment is used as it is: nothing is made or installed.
ifeq ($(origin PYTHON),command line)
GPU_PYTHON := PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)
GPU_NEEDS :=
else
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := $(STAMP_DEV)
endif

test-gpu: $(GPU_NEEDS)
	@$(GPU_PYTHON) tests/gpu.py $(if $(JSON),--json "$(JSON)")

chaos: $(STAMP_DEV)
	$(BIN)/python -m tests.chaos --faults 200
	$(BIN)/python -m tests.chaos.rollouts --faults 200

lint: $(STAMP_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Its notice about another program is no news of this site.
docs: $(STAMP_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean
	@echo "build/site/index.html opens in a browser, without a network"

bench: $(STAMP_DEV)
	$(BIN)/python benchmarks/train_cpu.py

bench-gpu: $(GPU_NEEDS)
	$(GPU_PYTHON) benchmarks/gpu.py $(if $(ONLY),--only $(ONLY)) $(if $(OUT),--out "$(OUT)")

clean:
	rm -rf $(VENV) build dist *.egg-info
