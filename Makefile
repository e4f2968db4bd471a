# Everything from a fresh clone: `make demo` and `make test` find or make a Python environment, build, and run.
# `make help` lists the targets.

# The Python to use. If it has no torch 2.10 or newer, .venv is made with it and TORCH is installed there.
PYTHON ?= $(shell command -v python3 || command -v python)
# The torch for a new .venv: a CUDA build, which compiling the kernels needs. Its CUDA must have nvcc's major version;
# for another CUDA set TORCH and PIP_INDEX_URL as https://pytorch.org/get-started/locally says.
TORCH ?= torch==2.14.1
ARGS ?=

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
SOURCES := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/kernels/*/*.h csrc/kernels/*/*.cuh csrc/kernels/*/*.cu benchmarks/*/*.cpp tests/*/*.cpp)

# $(call with,EXTRAS,COMMAND): run COMMAND with $$PY set to a Python that has torch and these optional dependencies.
with = @PY="$$($(PYTHON) build_tools/environment.py --torch '$(TORCH)' --extras $(1))" && $(2)

.PHONY: help build test demo bench lint format clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  Variables: PYTHON, TORCH, ARGS (passed on), FLASH3_VARIANTS, FLASH3_CUTLASS_DIR, MAX_JOBS (CONTRIBUTING.md)"

build:  ## compile in place: the kernels for this machine and the extension
	$(call with,build,"$$PY" build_tools/develop.py)

test:  ## build, then run every test tier that this machine can run
	$(call with,build$(comma)test$(comma)demo,"$$PY" build_tools/develop.py && "$$PY" build_tools/run_tests.py $(ARGS))

demo:  ## build, then show flash3 at work: kernels on a Hopper GPU, the reference path elsewhere
	$(call with,build$(comma)demo,"$$PY" build_tools/develop.py && "$$PY" examples/demo.py $(ARGS))

bench:  ## build, then measure against the other attention implementations (ARGS="fwd --head-dims 128")
	$(call with,build$(comma)demo,"$$PY" build_tools/develop.py && "$$PY" -m benchmarks $(or $(ARGS),both))

lint:  ## check style: ruff, clang-format, whitespace
	$(call with,dev,"$$PY" -m ruff check . && "$$PY" -m ruff format --check . && "$$PY" build_tools/check_text.py \
	  && "$$(dirname "$$PY")/clang-format" --dry-run --Werror $(SOURCES))

format:  ## apply the style
	$(call with,dev,"$$PY" -m ruff check --fix . && "$$PY" -m ruff format . \
	  && "$$PY" build_tools/check_text.py --fix; "$$(dirname "$$PY")/clang-format" -i $(SOURCES))

clean:  ## remove what was built (not .venv and not the CUTLASS headers)
	rm -rf build dist *.egg-info flash3/_C*.so
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

comma := ,
