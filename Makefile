# make help lists the targets. Each does its own set-up and does not repeat it.
SHELL := /bin/bash
PYTHON ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM := .venv-vllm

.DEFAULT_GOAL := help
# every target that says what it does
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## Make the virtual environment .venv (Python 3.12) and install everything into it

$(READY): pyproject.toml .ci/constraints.txt
	@python=$$(PYTHON="$(PYTHON)" .ci/find_python) && echo "using $$python" && \
	  { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --progress-bar off -c .ci/constraints.txt -e '.[train,rl,dev,docs]'
	@touch $@

demo: $(READY) ## Train, adapt and judge MTP heads on two CPU cores (about five minutes): runs/demo/
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/quickstart_cpu.sh

test: $(READY) ## Run the whole test suite (eight minutes on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-fast: $(READY) ## Run the tests that need neither several processes nor half a minute
	$(BIN)/python -m pytest -m "not dist and not slow"

bridge-check: .venv-bridge/.ready ## Train through Megatron Bridge on a CPU and compare with Megatron's own loop
	OMP_NUM_THREADS=1 .venv-bridge/bin/python -m pytest -p no:cacheprovider tests/bridges/test_megatron_bridge.py

.venv-bridge/.ready: pyproject.toml .ci/constraints.txt .ci/bridge.txt .ci/bridge.lock.txt
	@python=$$(PYTHON="$(PYTHON)" .ci/find_python) && { [ -x .venv-bridge/bin/python ] || "$$python" -m venv .venv-bridge; }
	.venv-bridge/bin/python -m pip install --quiet --progress-bar off -c .ci/constraints.txt -c .ci/bridge.lock.txt \
	  -e '.[train]' -r .ci/bridge.txt
	.venv-bridge/bin/python -m pip install --quiet --progress-bar off --no-deps megatron-bridge==0.6.2
	@touch $@

nemo-check: .venv-nemo/.ready ## Train through NeMo 2.7.3 on a CPU and compare with Megatron alone
	OMP_NUM_THREADS=1 .venv-nemo/bin/python -m pytest -p no:cacheprovider tests/bridges/test_nemo.py

.venv-nemo/.ready: pyproject.toml .ci/nemo.txt .ci/nemo.lock.txt
	@python=$$(PYTHON="$(PYTHON)" .ci/find_python) && { [ -x .venv-nemo/bin/python ] || "$$python" -m venv .venv-nemo; }
	.venv-nemo/bin/python -m pip install --quiet --progress-bar off -c .ci/nemo.lock.txt -r .ci/nemo.txt
	.venv-nemo/bin/python -m pip install --quiet --progress-bar off --no-deps nemo_toolkit==2.7.3 -e .
	@touch $@

check: $(READY) ## Lint, formatting and types (a quarter of a minute)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(READY) ## Measure the loss: time, memory, figure and table (under eight minutes; on a quiet machine)
	$(BIN)/python -m benchmarks.loss

bench-quick: $(READY) ## The same on small sizes, into runs/bench/ (a minute or two)
	$(BIN)/python -m benchmarks.loss --quick

bench-freeze: $(READY) ## What a training step costs in each freeze phase (two minutes; on a quiet machine)
	$(BIN)/python -m benchmarks.freeze_step

study-freeze: $(READY) ## One-off, alternating, joint: four ways to spend the same tokens (half an hour)
	$(BIN)/python -m benchmarks.freeze_study

study: $(READY) ## Compare the objectives on two domains: runs/study/ (about an hour; it resumes)
	$(BIN)/python -m benchmarks.study

study-quick: $(READY) ## The same, small and fast, into runs/study-quick/ (two minutes)
	$(BIN)/python -m benchmarks.study --quick

rl-study: $(READY) ## Reinforcement learning with and without drafts, six arms: runs/rl_study/ (45 minutes; it resumes)
	$(BIN)/python -m benchmarks.rl_study

rl-study-stress: $(READY) ## Two frozen heads while entropy is pushed up: runs/rl_study-stress/ (12 minutes after rl-study)
	$(BIN)/python -m benchmarks.rl_study --stress

rl-study-quick: $(READY) ## The same, small and fast, into runs/rl_study-quick/ (minutes)
	$(BIN)/python -m benchmarks.rl_study --quick

bench-decoding: $(READY) ## Measure decoding with a TV head against none (trains the model first: runs/decoding/)
	$(BIN)/python -m benchmarks.decoding

docs: $(READY) ## Write the API reference: docs/api/index.html
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore docs/reference.py

wheel: $(READY) ## Build the package into dist/
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

vllm-check: $(READY) $(VLLM)/.ready ## Let vLLM judge exported heads on the CPU: runs/vllm_check/ (FLAGS="--plant drop-fc" has to fail)
	$(BIN)/python -W ignore -m benchmarks.vllm_check $(FLAGS)

$(VLLM)/.ready: benchmarks/vllm_check/install.sh .ci/vllm.lock.txt
	PYTHON="$(PYTHON)" benchmarks/vllm_check/install.sh $(VLLM)

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove what runs and builds left behind (keeps the virtual environments)
	rm -rf runs build dist docs/api *.egg-info .pytest_cache .ruff_cache
