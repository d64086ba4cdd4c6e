# `make demo` and `make test` work on a fresh machine: Python 3.10 or newer with venv, and make. Each builds .venv first
# when it is missing or out of date; a second call does not.

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_VENV ?= .venv-docs
DOCS_BIN := $(DOCS_VENV)/bin
MERMAID := 11.12.0
DOCS_STAMP := $(DOCS_VENV)/.installed
FRAMEWORKS_VENV ?= .venv-frameworks
FRAMEWORKS_BIN := $(FRAMEWORKS_VENV)/bin
FRAMEWORKS_STAMP := $(FRAMEWORKS_VENV)/.installed
# torchtitan's own tests are in its repository only. TORCHTITAN_SOURCE may be a folder that is a clone of it.
TORCHTITAN_SOURCE ?= https://github.com/pytorch/torchtitan
TORCHTITAN_REF ?= v0.3.0
TORCHTITAN_TESTS := test_override test_expert_parallel test_inference_moe

.PHONY: demo test test-full mutants lint format test-newest test-frameworks test-engines gpu-test bench picture
.PHONY: docs docs-serve reference wheel wheel-check lock clean

demo: $(STAMP)  ## run text through an expert-parallel layer on 4 ranks, in every format, and check it
	$(BIN)/moelink demo --ranks 4

test: $(STAMP)  ## the quick tier: every test that needs no GPU, with its cheapest parameters; minutes
	$(BIN)/pytest -m "not gpu" $(PYTEST_ARGS)

test-full: $(STAMP)  ## the full tier: with all parameters
	$(BIN)/pytest -m "not gpu" --full $(PYTEST_ARGS)

mutants: $(STAMP)  ## plant each fault of tests/mutants_table.py in a copy; the test that it names must fail
	$(BIN)/python tests/mutants.py

lint: $(STAMP)  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test-newest:  ## the quick tier with the newest Triton, in a venv of its own
	$(MAKE) test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt

test-frameworks: $(FRAMEWORKS_STAMP)  ## torchtitan and Megatron-core with moelink in them, in a venv of its own; Python 3.11 or newer
	$(FRAMEWORKS_BIN)/pytest -n 0 --full tests/test_torchtitan.py tests/test_torchtitan_settings.py \
	  tests/test_megatron.py tests/test_megatron_settings.py tests/test_docs_frameworks.py
	rm -rf build/torchtitan
	if git clone --quiet $(TORCHTITAN_SOURCE) build/torchtitan && git -C build/torchtitan checkout --quiet $(TORCHTITAN_REF); \
	  then cd build/torchtitan && PYTHONPATH=$(CURDIR)/tests $(CURDIR)/$(FRAMEWORKS_BIN)/python -P -m pytest -q -p no:cacheprovider \
	    -p torchtitan_plugin $(TORCHTITAN_TESTS:%=tests/unit_tests/%.py); \
	  else echo "torchtitan's own tests did not run: no clone of $(TORCHTITAN_SOURCE) at $(TORCHTITAN_REF)"; fi

gpu-test: $(STAMP)  ## tests that need CUDA devices
	$(BIN)/pytest -m gpu

ENGINES := vllm sglang
# With NEWEST=1 environments get the newest releases of the ranges that moelink accepts (integrations/versions.py).
NEWEST_vllm := vllm<0.34
NEWEST_sglang := sglang<0.6

test-engines: $(ENGINES:%=.venv-%/.installed)  ## the tests of vLLM and SGLang, with the engines themselves; by hand, nightly
	.venv-vllm/bin/pytest -m "not gpu" --full tests/test_vllm.py
	.venv-sglang/bin/pytest -m "not gpu" --full tests/test_sglang.py

bench: $(STAMP)  ## the CPU benchmark, its JSON, and the tables in the docs
	$(BIN)/python -m moelink.tools.bench.collective
	$(BIN)/python -m moelink.tools.bench.render

picture: $(STAMP)  ## the picture in README.md, from the data of a demonstration run
	$(BIN)/moelink demo --ranks 4 --json > docs/demo.json
	$(BIN)/python docs/picture.py

.PHONY: docs docs-serve reference wheel wheel-check

docs: $(DOCS_STAMP)  ## the site, in build/site; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

docs-serve: $(DOCS_STAMP)  ## the site at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs serve --strict

reference: $(STAMP)  ## the reference pages that are made from the command line and from moelink.env
	$(BIN)/python docs/support/reference.py

wheel:  ## dist/moelink-*.whl
	rm -rf dist
	$(PYTHON) -m venv --clear build/venv
	build/venv/bin/pip install --quiet --require-hashes -r requirements/build.txt
	build/venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

wheel-check: wheel  ## install the wheel into an empty environment, and run the demonstration there
	rm -rf build/wheel-check
	$(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/pip install --quiet "$$(echo dist/moelink-*.whl)[cli]" -c $(CONSTRAINTS)
	cd build/wheel-check && env -u PYTHONPATH bin/python -c "import moelink as m; assert 'wheel-check' in m.__file__, m"
	cd build/wheel-check && env -u PYTHONPATH bin/moelink demo --ranks 2

# torch's own dependencies for CUDA come with it, at the versions that it names.
UV := build/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --upgrade \
  --custom-compile-command "make lock" -c constraints.txt
NOT_LOCKED := torch cuda-toolkit cuda-bindings cuda-pathfinder nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc \
  nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse \
  nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvtx

lock:  ## requirements/*.txt: the newest versions that constraints.txt allows, with the hashes of their files
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet uv
	$(UV) pyproject.toml --extra cli --extra plot --extra transformers --group dev \
	  $(NOT_LOCKED:%=--no-emit-package %) -o requirements/dev.txt
	$(UV) --group build -o requirements/build.txt
	$(UV) --group docs -o requirements/docs.txt

clean:
	rm -rf .venv .venv-docs .venv-newest .venv-frameworks .venv-vllm .venv-sglang build dist
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis

# What is installed is pinned by hash (requirements/, see `make lock`), but for torch: which build of it a machine gets, for
# CPUs or for one of CUDA's versions, depends on where its pip looks, and each has hashes of its own. CUDA builds insist on
# a Triton of their own: where pip finds no other, the first set of versions has no solution and the second one is taken.
# The stamp is written last, so an interrupted installation is repeated.
TORCH := $(BIN)/pip install --quiet torch triton
$(STAMP): pyproject.toml $(CONSTRAINTS) requirements/dev.txt requirements/build.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --no-deps -r requirements/dev.txt -r requirements/build.txt
	$(TORCH) -c $(CONSTRAINTS) || $(TORCH) -c constraints-cuda.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# Frameworks name the versions of what they need themselves; those that moelink was tested with are in the file.
$(FRAMEWORKS_STAMP): pyproject.toml requirements/frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_BIN)/pip install --quiet -r requirements/frameworks.txt
	$(if $(NEWEST),$(FRAMEWORKS_BIN)/pip install --quiet --upgrade 'torchtitan<0.4' 'megatron-core<0.17')
	$(FRAMEWORKS_BIN)/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# An engine asks for its own torch, CUDA and a hundred servers' packages. Its layers of experts need few of them, and run
# with a torch for CPUs, so nothing is installed that requirements/ does not name.
$(ENGINES:%=.venv-%/.installed): .venv-%/.installed: requirements/%.txt requirements/build.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install --quiet torch==2.13.0 triton -c constraints.txt
	.venv-$*/bin/pip install --quiet --no-deps -r requirements/$*.txt
	$(if $(NEWEST),.venv-$*/bin/pip install --quiet --no-deps --upgrade '$(NEWEST_$*)')
	.venv-$*/bin/pip install --quiet --require-hashes --no-deps -r requirements/build.txt
	.venv-$*/bin/pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

# The site needs neither torch nor moelink: griffe reads the sources. Mermaid draws its diagrams and comes with it, so that
# no page asks another host for it; without npm, diagrams are shown as text.
$(DOCS_STAMP): pyproject.toml requirements/docs.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_BIN)/pip install --quiet --require-hashes -r requirements/docs.txt
	if command -v npm > /dev/null; then \
	  npm pack --silent --pack-destination $(DOCS_VENV) mermaid@$(MERMAID) && \
	  tar -xzOf $(DOCS_VENV)/mermaid-$(MERMAID).tgz package/dist/mermaid.min.js > $(DOCS_VENV)/mermaid.min.js; fi
	touch $@
