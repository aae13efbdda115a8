# What CI runs is what people run. `make help` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
SOURCES := $(shell find csrc -type f) CMakeLists.txt pyproject.toml
PACKAGE_FILES := $(shell find controller workers vision_workers proto cluster -name __init__.py)
PACKAGES := controller workers vision_workers proto cluster tests benchmarks examples
CPP := $(shell find csrc -name '*.cpp' -o -name '*.h')
SEED ?= 1
TOO_OLD := "Airside needs Python 3.11 or newer; name one: make PYTHON=python3.11"

export RAY_USAGE_STATS_ENABLED := 0

.PHONY: help install dev build proto fmt lint test test-fast test-matrix sim asan bench bench-vision demo serve wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(VENV)/.requirements: pyproject.toml
	@test -x $(BIN)/python || { $(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit($(TOO_OLD))' && \
	  $(PYTHON) -m venv $(VENV); }
	@echo "Installing PyTorch and build tools into $(VENV) (a few minutes the first time)"
	@$(PIP) install --quiet "$(TORCH)"
	@$(PIP) install --quiet "scikit-build-core>=1.0" "nanobind>=2.9" "apache-tvm-ffi>=0.1.10" "cmake>=3.26" ninja
	@touch $@

# An editable install knows packages by where their files were: new ones need another install.
$(VENV)/.installed: $(VENV)/.requirements $(SOURCES) $(PACKAGE_FILES)
	@echo "Installing Airside and what it needs, building its C++ parts (a minute or two)"
	@$(PIP) install --quiet --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Installing what tests and lint need, and what draws"
	@$(PIP) install --quiet --no-build-isolation -e ".[dev,bench]"
	@touch $@

install: $(VENV)/.installed  ## Airside in .venv, editable
dev: $(VENV)/.dev  ## the same with everything that tests and lint need
build: install  ## rebuild the C++ parts after a change

proto: dev  ## regenerate the gRPC stubs from proto/airside.proto
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iairside/proto=proto --python_out=build \
	  --grpc_python_out=build --mypy_out=quiet:build --mypy_grpc_out=quiet:build airside/proto/airside.proto
	cp build/airside/proto/airside_pb2* proto/

fmt: dev  ## format Python and C++
	$(BIN)/ruff check --fix --quiet $(PACKAGES)
	$(BIN)/ruff format --quiet $(PACKAGES)
	$(BIN)/clang-format -i $(CPP)

lint: dev  ## style, types, import directions
	$(BIN)/ruff check $(PACKAGES)
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/mypy
	PYTHONPATH=build/view $(BIN)/lint-imports
	$(BIN)/clang-format --dry-run -Werror $(CPP)

test: dev sim  ## all tests
	$(BIN)/python -m pytest --durations=40

test-matrix: dev  ## the same tokens in every combination of settings (about an hour)
	$(BIN)/python -m pytest tests/system/test_same_tokens.py --matrix

test-fast: dev  ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow"

build/sim/simulator: $(VENV)/.requirements $(SOURCES)
	mkdir -p build
	$(BIN)/cmake -S . -B build/sim -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DAIRSIDE_TESTS=ON > build/sim.log
	$(BIN)/cmake --build build/sim --target simulator >> build/sim.log
	touch $@

sim: build/sim/simulator  ## the engine core under a seeded storm: make sim SEED=7
	$< --seed $(SEED)

# Python is built without sanitizers, so it loads their runtime first; what it never frees is no leak of ours.
SANITIZED = LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0
ASAN_TESTS := tests/kernels $(addprefix tests/workers/test_,packed_weight.py step_program.py sampler.py linear.py \
  quantization.py gguf.py logprobs.py)

asan: dev  ## the same, the picture resizer and the kernels' tests, with AddressSanitizer and UBSan (GCC)
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(BIN))/python -DAIRSIDE_TESTS=ON -DAIRSIDE_KERNELS=ON -DAIRSIDE_SANITIZE=ON \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo
	$(BIN)/cmake --build build/asan --target simulator pixels_check _kernels_cpu
	build/asan/simulator --seed $(SEED)
	build/asan/pixels_check
	$(SANITIZED) $(BIN)/python -m pytest --kernels build/asan/csrc/kernels/cpu/_kernels_cpu.so $(ASAN_TESTS)

bench: dev  ## the controller's time per step; then Airside beside every engine that is installed, and a JSON file
	$(BIN)/python benchmarks/controller.py --cold
	$(BIN)/python benchmarks/compare.py

bench-vision: dev  ## text beside pictures, and pictures per second by number of vision workers
	$(BIN)/python benchmarks/vision.py

demo: install  ## the whole system: a cluster, text and pictures over gRPC, scaling, shutdown
	$(BIN)/airside demo

serve: install  ## the same server, left up
	$(BIN)/airside demo --keep

wheel: $(VENV)/.requirements  ## a wheel in dist/
	$(PIP) wheel --quiet --no-build-isolation --no-deps -w dist .

clean:  ## remove what was built, keep .venv
	rm -rf build dist bench-results
