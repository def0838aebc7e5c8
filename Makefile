# The commands of this house. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider

# The native twin of kvcore is built where cargo is; TIDEGATE_NATIVE=0 takes pure Python all the same.
TIDEGATE_NATIVE ?= 1
CARGO := $(if $(filter 0,$(TIDEGATE_NATIVE)),,$(shell command -v cargo 2>/dev/null))
NATIVE_STAMP := $(VENV)/.native-$(if $(CARGO),built,skipped)
NATIVE_LOG := $(VENV)/native-build.log
NATIVE_SOURCES := $(wildcard native/*.toml native/Cargo.lock) $(shell find native/src native/python -name '*.rs' -o -name '*.py*' -type f)

# Byte code is kept: without it every process of a test compiles the whole house again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup native up demo check test test-unit test-integration test-system test-real compose-test fuzz bench lock wheelhouse asyncapi clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) $(NATIVE_STAMP) ## create the virtual environment and install everything at its locked version

$(STAMP): pyproject.toml requirements-dev.lock
	$(PYTHON) -c 'import sys; sys.exit("Tidegate needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q schemas bus kvcore replica web services tidegate load
	@touch $(STAMP)

# A build that fails is said once and not tried again until its sources change: the Python twin does the same work.
$(VENV)/.native-built: $(NATIVE_SOURCES) | $(STAMP)
	@echo "kvcore: building its native twin with cargo (a minute the first time; log in $(NATIVE_LOG))"
	@rm -f $(VENV)/.native-*
	@if PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
	  --force-reinstall ./native >$(NATIVE_LOG) 2>&1; then \
	  $(BIN)/python -c 'import kvcore; print("kvcore:", kvcore.IMPLEMENTATION, kvcore.WHY or "twin installed")'; \
	else \
	  $(BIN)/python -m pip uninstall --yes --quiet --disable-pip-version-check tidegate-kvcore 2>/dev/null; \
	  tail -n 15 $(NATIVE_LOG); \
	  echo "kvcore: the native twin could not be built (above, and $(NATIVE_LOG)); pure Python does its work. Try again: make native"; \
	fi
	@touch $@

$(VENV)/.native-skipped: | $(STAMP)
	@rm -f $(VENV)/.native-*
ifeq ($(TIDEGATE_NATIVE),0)
	@$(BIN)/python -m pip uninstall --yes --quiet --disable-pip-version-check tidegate-kvcore 2>/dev/null
	@echo "kvcore: pure Python (TIDEGATE_NATIVE=0)"
else
	@echo "kvcore: pure Python, because cargo is not found; with Rust 1.88 or newer installed, make setup builds the native twin"
endif
	@touch $@

native: ## build and install the native twin of kvcore again
	@rm -f $(VENV)/.native-*
	@$(MAKE) --no-print-directory setup

up: setup ## run the whole system with simulated engines; stays up until Ctrl-C (ARGS="--port 9000" to pass options)
	$(BIN)/tidegate up $(ARGS)

demo: setup ## one minute: agent sessions through real processes, and the figures
	$(BIN)/tidegate demo $(ARGS)

check: setup ## format, lint, types, generated files, unit tests (< 15 s of tests)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m schemas.asyncapi --check
ifneq ($(CARGO),)
	cd native && cargo fmt --check
	cd native && cargo clippy --quiet --locked --all-targets -- --deny warnings
endif
	$(PYTEST) -q -n 2 tests/unit

test-unit: setup ## pure tests only
	$(PYTEST) -q -n 2 tests/unit

test-integration: setup ## one room at a time, with a real nats-server and the simulated engine
	$(PYTEST) -q tests/integration

test-system: setup ## the whole system: demo, up, kill -9 of everything
	$(PYTEST) -q tests/system -m "not compose"

test: setup ## everything that needs no Docker and no real engine (< 10 minutes on 2 cores)
	$(PYTEST) -q -n 2 tests/unit
ifneq ($(CARGO),)
	$(PYTEST) -q -n 2 native/tests
endif
	$(PYTEST) -q tests/integration tests/system -m "not compose and not real"

test-real: setup ## real engines, pools and peers' packages, where they are installed
	$(PYTEST) -q tests -m real -rs

compose-test: setup ## build the images, `compose up`, the demo's client against it, kill and heal, `down`
	$(PYTEST) -q tests/system/test_compose.py -m compose -s

fuzz: setup ## both twins of kvcore fed the same random input for five minutes (ARGS="--minutes 60 --seed 7")
	$(BIN)/python -m tests.fuzz.kvcore $(ARGS)

bench: setup ## benchmarks; each prints one JSON object last
	$(BIN)/python -m load.bench all --json

wheelhouse: setup ## wheels for an image build without network
	$(BIN)/python -m deploy.standins wheelhouse

asyncapi: setup ## regenerate asyncapi.yaml from schemas/
	$(BIN)/python -m schemas.asyncapi

lock: setup ## resolve requirements.lock and requirements-dev.lock again (needs `uv`)
	uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --no-header -o requirements.lock
	uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --no-header --extra dev -o requirements-dev.lock

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .tidegate dist build native/target
