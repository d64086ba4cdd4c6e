# `make demo` and `make test` work on a fresh machine: Python 3.10 or newer with venv, and make. Each builds .venv first
# when it is missing or out of date; a second call does not.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-full lint format test-newest gpu-test bench picture clean

demo: $(STAMP)  ## run text through an expert-parallel layer on 4 ranks, in every format, and check it
	$(BIN)/moelink demo --ranks 4

test: $(STAMP)  ## the quick tier: every test that needs no GPU, with its cheapest parameters; minutes
	$(BIN)/pytest -m "not gpu" $(PYTEST_ARGS)

test-full: $(STAMP)  ## the full tier: with all parameters
	$(BIN)/pytest -m "not gpu" --full $(PYTEST_ARGS)

lint: $(STAMP)  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-newest:  ## the quick tier with the newest Triton, in a venv of its own
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

gpu-test: $(STAMP)  ## tests that need CUDA devices
	$(BIN)/pytest -m gpu

bench: $(STAMP)  ## the CPU benchmark, its JSON, and the table in README.md
	$(BIN)/python -m moelink.tools.bench.collective
	$(BIN)/python -m moelink.tools.bench.render

picture: $(STAMP)  ## the picture in README.md, from the data of a demonstration run
	$(BIN)/moelink demo --ranks 4 --json > docs/demo.json
	$(BIN)/python docs/picture.py

clean:
	rm -rf .venv .venv-newest .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist

INSTALL := $(BIN)/pip install --quiet -e '.[cli,plot,transformers]' --group dev

# The stamp is written last, so an interrupted installation is repeated. CUDA builds of torch insist on a Triton of their
# own: where pip finds no other, the first set of versions has no solution and the second one is taken.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv --upgrade-deps $(VENV)
	$(INSTALL) -c $(CONSTRAINTS) || $(INSTALL) -c constraints-cuda.txt
	touch $@
