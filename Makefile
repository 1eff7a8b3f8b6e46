# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes its own virtual environment and installs through the pinned constraints.
PYTHON ?= python3
VENV := .venv
GPU_TESTS ?= tests/gpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt hatch_build.py src/torch_lawa/mean/kernels.c
OWN_TARGETS := not gpu and not data and not browser and not matrix and not packaging

.PHONY: help demo test test-fast check format docs coverage bench bench-offline clean
.PHONY: test-jax record-jax
.PHONY: test-gpu test-data test-faults test-browser test-matrix test-oldest test-timm test-megatron test-packaging
.PHONY: test-deepspeed test-finetuning record-diffusers test-torchtitan record-torchtitan

help:
	@echo "make demo       train the embedded default and show what averaging saved"
	@echo "make test       format, lint, types, layers and tests"
	@echo "make test-fast  unit tests and laws only, in under a minute"
	@echo "make docs       build the documentation site into site/"
	@echo "make coverage   run the tests once with coverage"
	@echo "make test-packaging  build wheels and sdist, install each into an empty environment"
	@echo "make check      the same without the tests"
	@echo "make format     rewrite the code in its own format"
	@echo "make bench      time the averager against its peers on this CPU"
	@echo "make bench-offline  time averaging files against its peers; 40 GB of disk, an hour"
	@echo "make test-gpu   tests that need a CUDA device"
	@echo "make test-data LAWA_DATA=FOLDER   tests that need the real data sets"
	@echo "make test-faults  kills, interrupts and damage, for LAWA_FAULTS_SECONDS (600)"
	@echo "make test-matrix  sharded models: more placements, stores and rank counts"
	@echo "make test-oldest  the integrations with the oldest frameworks that are supported"
	@echo "make test-megatron  with megatron-core, in an environment of its own"
	@echo "make test-timm  with timm, in an environment of its own"
	@echo "make test-finetuning  with Diffusers and TRL, in an environment of its own"
	@echo "make test-deepspeed  engines and checkpoints of DeepSpeed, in an environment of its own; minutes"
	@echo "make test-torchtitan  runs of torchtitan on CPU ranks, in an environment of its own; minutes"
	@echo "make test-jax   Orbax checkpoints, with JAX, in an environment of its own"
	@echo "make test-browser  the report's page in a headless browser"

demo: $(VENV)/.demo
	$(BIN)/lawa demo --overwrite

test: check
	$(BIN)/python -m pytest -n auto -m "$(OWN_TARGETS)"

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -m "$(OWN_TARGETS) and not slow" tests/unit tests/laws

coverage: $(VENV)/.dev
	$(PIP) coverage
	COVERAGE_PROCESS_START=pyproject.toml $(BIN)/python -m coverage run --parallel-mode \
	  -m pytest -n auto -m "$(OWN_TARGETS)"
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered --sort=cover

docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	.venv-docs/bin/python docs/site/check_links.py site

test-packaging: $(VENV)/.dev
	$(PIP) -e '.[dev,packaging]'
	$(BIN)/python -m pytest -n 3 -m packaging tests/packaging

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# FOLDER holds cifar-100-binary, tiny-imagenet-50, wikipedia and wikitext-103, or some of them.
test-data: $(VENV)/.dev
	@test -n "$(LAWA_DATA)" || { echo "say where the data is: make test-data LAWA_DATA=FOLDER"; exit 1; }
	LAWA_DATA=$(LAWA_DATA) $(BIN)/python -m pytest -n auto -m data

# Seeded (LAWA_FAULTS_SEED); a short slice of it is in make test.
test-faults: export LAWA_FAULTS_SECONDS ?= 600
test-faults: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto -o timeout=0 -m faults

test-matrix: $(VENV)/.dev
	$(BIN)/python -m pytest -m matrix

# Old frameworks warn of what newer libraries will change: that is no error here. Transformers 5.0
# itself cannot resume two processes on CPUs.
test-oldest: .venv-oldest/.oldest
	.venv-oldest/bin/python -m pytest -n auto -o filterwarnings=default \
	  -m "not gpu and not matrix" tests/integrations \
	  --ignore tests/integrations/test_transformers_ranks.py

# timm's torchvision is built for CUDA and, beside the CPU build of torch, in the way of others.
test-timm: .venv-timm/.timm
	.venv-timm/bin/python -m pytest tests/integrations/test_timm.py

# Models are made from configurations: nothing is downloaded. Deprecations that Diffusers and TRL
# warn of are theirs.
test-finetuning: .venv-finetuning/.finetuning
	HF_HUB_OFFLINE=1 .venv-finetuning/bin/python -m pytest -o filterwarnings=default tests/finetuning

record-diffusers: .venv-finetuning/.finetuning
	HF_HUB_OFFLINE=1 .venv-finetuning/bin/python tests/recorded/record_diffusers.py

# DeepSpeed trains on CPU processes; the first start compiles one of its operators.
test-deepspeed: .venv-deepspeed/.deepspeed
	.venv-deepspeed/bin/python -m pytest -o filterwarnings=default \
	  tests/integrations/test_deepspeed.py tests/integrations/test_deepspeed_online.py \
	  tests/integrations/test_deepspeed_frameworks.py tests/integrations/test_deepspeed_docs.py \
	  tests/unit/torch_lawa/checkpoints/formats/test_deepspeed.py

# torchtitan's own trainer on CPU ranks; warnings of the frameworks are theirs.
test-torchtitan: .venv-torchtitan/.torchtitan
	.venv-torchtitan/bin/python -m pytest -o filterwarnings=default \
	  tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_recorded.py

record-torchtitan: .venv-torchtitan/.torchtitan
	.venv-torchtitan/bin/python tests/recorded/record_torchtitan.py

# Deprecations that Orbax and JAX warn of are theirs.
test-jax: .venv-jax/.jax
	.venv-jax/bin/python -m pytest -o filterwarnings=default tests/jax_checkpoints
	.venv-jax/bin/python -m pytest -o filterwarnings=default -k "orbax or Orbax" \
	  tests/laws/test_offline_law.py tests/unit/torch_lawa/checkpoints/formats
	LAWA_FAULTS_SECONDS=60 .venv-jax/bin/python -m pytest -o filterwarnings=default -o timeout=0 \
	  -k "orbax or Orbax" tests/faults/test_damaged_inputs.py tests/faults/test_file_system.py

record-jax: .venv-jax/.jax
	JAX_PLATFORMS=cpu .venv-jax/bin/python tests/jax_checkpoints/record.py

# The newest release in the environment, and beside it an old one that saves flattened masters.
test-megatron: .venv-megatron/.megatron
	LAWA_MEGATRON_OLD=$(CURDIR)/.venv-megatron/old \
	  .venv-megatron/bin/python -m pytest tests/integrations/test_megatron.py

# Playwright brings its own Chromium where it can be downloaded; else one of the system is taken.
test-browser: $(VENV)/.dev
	$(PIP) -e '.[dev,browser]'
	-$(BIN)/playwright install chromium
	LAWA_SCREENSHOTS=runs/screenshots $(BIN)/python -m pytest -p no:xdist -m browser tests/browser

# Needs no environment of ours: PYTHON is an interpreter with torch for CUDA and pytest, and maybe
# none of pytest's plugins. Tests that compile come last; one that hangs shows where.
test-gpu:
	PYTHONPATH=src:tests CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON) -m pytest -p no:cacheprovider \
	  --noconftest -o addopts= -o timeout=0 -o filterwarnings=default -o faulthandler_timeout=120 -m gpu \
	  -v -ra --tb=short --durations=15 $(GPU_TESTS)

bench: .venv-bench/.bench
	.venv-bench/bin/python benchmarks/online.py

bench-offline: .venv-bench/.bench
	.venv-bench/bin/python benchmarks/offline.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "torch-lawa needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python $(SOURCES)
	$(PIP) -e '.[lab]'
	@touch $@

# pip compiles on one core, which takes half of its time; a file that cannot be compiled is no error.
$(VENV)/.dev: $(VENV)/bin/python $(SOURCES)
	$(PIP) --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@ $(VENV)/.demo

.venv-docs/.docs: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

.venv-bench/.bench: $(SOURCES)
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e . ema-pytorch mergekit torch-ema
	@touch $@

.venv-oldest/.oldest: $(SOURCES) constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	cut -d= -f1 constraints-oldest.txt | grep -v '^#' | sed 's/$$/==/' > .venv-oldest/names
	grep -v -F -f .venv-oldest/names constraints.txt > .venv-oldest/newer
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-oldest/newer -c constraints-oldest.txt -e '.[dev]'
	@touch $@

.venv-timm/.timm: $(SOURCES)
	$(PYTHON) -m venv .venv-timm
	.venv-timm/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[lab]' pytest pytest-timeout hypothesis timm
	@touch $@

.venv-finetuning/.finetuning: $(SOURCES)
	$(PYTHON) -m venv .venv-finetuning
	.venv-finetuning/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[transformers]' diffusers peft safetensors trl pytest pytest-timeout hypothesis
	@touch $@

.venv-deepspeed/.deepspeed: $(SOURCES)
	$(PYTHON) -m venv .venv-deepspeed
	.venv-deepspeed/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e . accelerate deepspeed huggingface_hub ninja safetensors scikit-learn transformers \
	  pytest pytest-timeout hypothesis
	@touch $@

.venv-jax/.jax: $(SOURCES) constraints-jax.txt
	$(PYTHON) -m venv .venv-jax
	.venv-jax/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -c constraints-jax.txt \
	  -e '.[orbax]' flax jax optax orbax-checkpoint safetensors pytest pytest-timeout hypothesis
	@touch $@

# Without wandb and what it brings: torchtitan imports it only to log with it. triton comes with the
# CUDA builds of PyTorch, and torchtitan imports it on CPUs as well.
.venv-torchtitan/.torchtitan: $(SOURCES) constraints-torchtitan.txt
	$(PYTHON) -m venv .venv-torchtitan
	cut -d= -f1 constraints-torchtitan.txt | grep -v '^#' | sed 's/$$/==/' > .venv-torchtitan/names
	grep -v -F -f .venv-torchtitan/names constraints.txt > .venv-torchtitan/others
	.venv-torchtitan/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c .venv-torchtitan/others -c constraints-torchtitan.txt \
	  -e . datasets einops pillow safetensors spmd_types tensorboard tokenizers torch_checkpointing \
	  torchdata transformers triton tyro pytest pytest-timeout hypothesis
	.venv-torchtitan/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  -c constraints-torchtitan.txt torchtitan
	@touch $@

.venv-megatron/.megatron: $(SOURCES)
	$(PYTHON) -m venv .venv-megatron
	.venv-megatron/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e . pytest pytest-timeout hypothesis megatron-core psutil
	.venv-megatron/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target .venv-megatron/old megatron-core==0.9.0
	@touch $@

clean:
	rm -rf $(VENV) .venv-bench .venv-docs .venv-oldest .venv-timm .venv-finetuning .venv-megatron .venv-deepspeed .venv-jax .venv-torchtitan site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
