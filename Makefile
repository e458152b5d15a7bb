# A thin front over tools/setup, CMake, CTest, pytest and the command `intarsia`.
TORCH ?= torch==2.13.0
STEPS ?=
TEXT ?=
ARGS ?=
PYTEST ?= pytest
PYTHON ?= python3
export TORCH

bin := .venv/bin
sources := $(shell find CMakeLists.txt LICENSE README.md pyproject.toml cmake include src python tests/cpp tests/packaging \
             -type f -not -name '*.pyc' 2>/dev/null)
cxx_files := $(shell find include src tests examples -name '*.h' -o -name '*.cpp' -o -name '*.c' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := help
.PHONY: help demo test bench gpu-test gpu-bench figures format lint asan gate emulation coverage clean
.DELETE_ON_ERROR:

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

demo: build/.installed  ## train a small MoE language model; STEPS=30, TEXT=path, ARGS="--router rounded"
	$(bin)/intarsia train $(if $(STEPS),--steps $(STEPS)) $(if $(TEXT),--text $(TEXT)) $(ARGS)

test: build/.installed  ## every test: CTest, then pytest; ARGS="-k route"
	ctest --test-dir build --output-on-failure --parallel $(shell nproc)
	$(bin)/python -m $(PYTEST) $(ARGS)

bench: build/.installed  ## time and memory of the layer against torch; ARGS="--repeats 3"
	$(bin)/python bench/layer.py $(ARGS)

gpu-test:  ## on a GPU machine: every GPU test, with what INTARSIA_LIBRARY_DIR has or built here; ARGS="-k layer"
	PYTHON=$(PYTHON) tools/gpu_session $(PYTHON) -m pytest -q -p gpu_watchdog -p no:cacheprovider --override-ini addopts= \
	  $(shell $(PYTHON) -c 'import hypothesis' 2>/dev/null || echo --noconftest) $(wildcard tests/python/test_gpu*.py) $(ARGS)

gpu-bench:  ## on a GPU machine: the layer beside the bound and others; ARGS="--shapes olmoe,mixtral --merge FILE --out FILE"
	PYTHON=$(PYTHON) tools/gpu_session $(PYTHON) bench/gpu.py $(ARGS)

figures: build/.installed  ## draw docs/figures again
	$(bin)/python tools/draw_memory.py

format: .venv/.ready  ## rewrite C++ and Python in the project's style
	$(bin)/clang-format -i $(cxx_files)
	$(bin)/ruff check --fix-only --quiet .
	$(bin)/ruff format .

lint: .venv/.ready  ## style, includes, tree, reports
	$(bin)/clang-format --dry-run -Werror $(cxx_files)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/python tools/check_includes.py
	$(bin)/python tools/check_tree.py
	$(bin)/python tools/reports.py --check

asan: .venv/.ready  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	tools/sanitize

gate:  ## the tensor-core kernels without a GPU: models on the CPU, then ptxas over every kernel (nvcc)
	cmake -S . -B build-gate -G Ninja --log-level=NOTICE -DINTARSIA_TORCH=OFF -DINTARSIA_CLI=OFF -DINTARSIA_ONEDNN=OFF
	cmake --build build-gate --target tensor_core_tests
	build-gate/tensor_core_tests --gtest_brief=1
	tools/ptxas_gate --build build-gate

emulation:  ## every kernel on the CPU, a fibre a thread: needs CUDA's headers, but neither nvcc nor a GPU
	$(MAKE) -f tests/cuda/emulation/Makefile --jobs $(shell nproc) check

coverage: asan build/.installed  ## lines of src/ and python/ that no test runs
	$(bin)/python -m coverage run -m pytest --quiet
	tools/coverage

clean:  ## remove all that was built, .venv included
	rm -rf build build-asan build-emulation build-gate .venv out

.venv/.ready: tools/setup
	tools/setup environment
	touch $@

build/.installed: .venv/.ready $(sources)
	tools/setup build
	touch $@
