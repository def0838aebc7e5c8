# The commands of this house. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -p no:cacheprovider

# The unit part in two plain processes: the messages of `-n 2` cost more than most of these tests (a third of it all).
UNIT_FIRST := tests/unit/admission tests/unit/ingress tests/unit/tidegate
SHORT := -m "not long"
UNIT := $(MAKE) --no-print-directory --jobs 2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) unit-first unit-rest

MOONCAKE := .mooncake
AIPERF_HOME := .aiperf
HARNESSES := .harnesses

# The native twin of kvcore is built where cargo is; TIDEGATE_NATIVE=0 takes pure Python all the same.
TIDEGATE_NATIVE ?= 1
CARGO := $(if $(filter 0,$(TIDEGATE_NATIVE)),,$(shell command -v cargo 2>/dev/null))
NATIVE_STAMP := $(VENV)/.native-$(if $(CARGO),built,skipped)
NATIVE_LOG := $(VENV)/native-build.log
NATIVE_SOURCES := $(wildcard native/*.toml native/Cargo.lock) $(shell find native/src native/python -name '*.rs' -o -name '*.py*' -type f)

# Byte code is kept: without it every process of a test compiles the whole house again.
unexport PYTHONDONTWRITEBYTECODE

# Rooms share nothing: every test starts its own bus on a free port. Whole systems run one after the other. Three rooms and
# two systems at a time were measured: no sooner done on two processors, and some tests then failed for it.
# These tests time real processes on machines that others use too: what failed among the others runs once more by itself,
# and only then is it a failure. What needed its second run is said; more than five failures are no accident.
TIMED = tests/support/timed.sh $(BIN)/python

LONG = $(PYTEST) -q -n 2 -m long tests/unit
INTEGRATION = $(TIMED) -q -n 2 --dist loadfile -m "not compose and not real" tests/integration
SYSTEM = $(TIMED) -q -m "not compose and not real" tests/system

.DEFAULT_GOAL := help
.PHONY: help setup native up demo check test test-unit unit-first unit-rest test-long test-histories test-integration test-system test-rooms test-real mooncake test-pool aiperf test-aiperf harnesses test-harnesses compose-test fuzz soak bench lock wheelhouse asyncapi clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP) $(NATIVE_STAMP) ## create the virtual environment and install everything at its locked version

$(STAMP): pyproject.toml requirements-dev.lock
	$(PYTHON) -c 'import sys; sys.exit("Tidegate needs Python 3.11 or newer; set PYTHON=...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m compileall -q schemas segments bus kvcore replica web services tidegate load
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
	@TIDEGATE_KVCORE=auto $(BIN)/python -c 'from kvcore import IMPLEMENTATION as used, WHY; \
	  print("kvcore: the native twin that is installed is kept and used; it cannot be built again, because cargo is not found" \
	  if used == "native" else f"kvcore: pure Python ({WHY}); cargo is not found: with Rust 1.88 or newer, make setup builds the native twin")'
endif
	@touch $@

native: ## build and install the native twin of kvcore again
	@rm -f $(VENV)/.native-*
	@$(MAKE) --no-print-directory setup

up: setup ## run the whole system with simulated engines; stays up until Ctrl-C (ARGS="--port 9000" to pass options)
	$(BIN)/tidegate up $(ARGS)

demo: setup ## one minute: agent sessions through real processes, and the figures
	$(BIN)/tidegate demo $(ARGS)

check: setup ## format, lint, types, generated files, licences, known weaknesses, unit tests (< 15 s of tests)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m schemas.asyncapi --check
	$(BIN)/python -m deploy.licences
	$(BIN)/python -m deploy.audit
ifneq ($(CARGO),)
	cd native && cargo fmt --check
	cd native && cargo clippy --quiet --locked --all-targets -- --deny warnings
endif
	@$(UNIT)

test-unit: setup ## pure tests only, but for the long ones (< 15 s on 2 cores)
	@$(UNIT)

unit-first:
	$(PYTEST) -q $(SHORT) $(UNIT_FIRST)

unit-rest:
	$(PYTEST) -q $(SHORT) tests/unit $(addprefix --ignore=,$(UNIT_FIRST))

test-long: setup ## the pure tests that compute for longer (marked `long`)
	$(LONG)

test-histories: setup ## ten thousand random histories of scheduling policies (HISTORIES_SEED=7 for others), and all properties at length
	$(PYTEST) -q -n 2 tests/histories
	$(PYTEST) -q -n 2 -m hypothesis --hypothesis-profile thorough tests/unit tests/integration/admission/test_books_user_policies.py

test-integration: setup ## one room at a time, with a real nats-server and the simulated engine
	$(INTEGRATION)

test-system: setup ## the whole system: demo, up, kill -9 of everything
	$(SYSTEM)

test: setup ## everything that needs no Docker and no real engine (< 10 minutes on 2 cores)
	@$(UNIT)
	@$(MAKE) --no-print-directory test-rooms

test-rooms: setup ## all of `make test` but the unit part, which `make check` has run
	$(LONG)
ifneq ($(CARGO),)
	$(PYTEST) -q -n 2 native/tests
endif
	$(INTEGRATION)
	$(SYSTEM)

test-real: setup ## real engines, pools and peers' packages, where they are installed
	$(PYTEST) -q tests -m real -rs

mooncake: ## a real Mooncake store for the tests into .mooncake/ (the master that publishes events, a client without CUDA)
	@PYTHON="$(PYTHON)" tests/support/install_mooncake.sh $(MOONCAKE)

test-pool: setup ## the bridge of a pool, and routing by it, against a real Mooncake store (make mooncake first)
	MOONCAKE_MASTER="$${MOONCAKE_MASTER:-$(CURDIR)/$(MOONCAKE)/mooncake_master}" \
	  MOONCAKE_PYTHON="$${MOONCAKE_PYTHON:-$(CURDIR)/$(MOONCAKE)/client/bin/python}" $(TIMED) -q tests/real -m mooncake -rs

aiperf: ## AIPerf for the tests, in a virtual environment of its own: .aiperf/
	$(PYTHON) -m venv $(AIPERF_HOME)
	$(AIPERF_HOME)/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0

test-aiperf: setup ## a real AIPerf against a real system (make aiperf first)
	AIPERF="$${AIPERF:-$(CURDIR)/$(AIPERF_HOME)/bin/aiperf}" $(PYTEST) -q tests/real/test_aiperf.py -rs

harnesses: ## real harnesses for the tests into .harnesses/ (Claude Code, Codex, OpenAI's Agents SDK, LangGraph, mini-swe-agent; Hermes apart)
	$(PYTHON) -m venv $(HARNESSES)/agents
	$(HARNESSES)/agents/bin/python -m pip install --quiet --disable-pip-version-check openai-agents==0.24.0 \
	  mini-swe-agent==2.4.6 langgraph==1.2.24 langchain-openai==1.7.4
	$(HARNESSES)/agents/bin/python -m pip install --quiet --disable-pip-version-check --no-deps claude-agent-sdk==0.2.184 \
	  openai-codex-cli-bin==0.163.0
	$(PYTHON) -m venv $(HARNESSES)/hermes
	$(HARNESSES)/hermes/bin/python -m pip install --quiet --disable-pip-version-check hermes-agent==0.19.0

test-harnesses: setup ## real harnesses against a real system, as docs/harnesses.md has them (make harnesses first)
	HARNESS_PYTHON="$${HARNESS_PYTHON:-$(CURDIR)/$(HARNESSES)/agents/bin/python}" \
	  HERMES="$${HERMES:-$(CURDIR)/$(HARNESSES)/hermes/bin/hermes}" $(PYTEST) -q tests/real/test_harnesses.py -rs

compose-test: setup ## build the images, `compose up`, the demo's client against it, kill and heal, `down`
	$(TIMED) -q tests/system/test_compose.py -m compose -s

fuzz: setup ## random input, five minutes each: both twins of kvcore, the front door's parsers (ARGS="--minutes 60 --seed 7")
	$(BIN)/python -m tests.fuzz.kvcore $(ARGS)
	$(BIN)/python -m tests.fuzz.front_door $(ARGS)

soak: setup ## eight minutes of chaos over a whole system under load: docs/soak.md (ARGS="--minutes 2 --seed 7 --nats 3")
	$(BIN)/python -m load.soak --json $(ARGS)

bench: setup ## benchmarks; each prints one JSON object last
	$(BIN)/python -m load.bench all --json

wheelhouse: setup ## wheels for an image build without network
	$(BIN)/python -m deploy.standins wheelhouse

asyncapi: setup ## regenerate asyncapi.yaml from schemas/
	$(BIN)/python -m schemas.asyncapi

lock: setup ## resolve requirements.lock and requirements-dev.lock again (needs `uv`)
	uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --extra otlp --no-header -o requirements.lock
	uv pip compile --quiet pyproject.toml --universal --python-version 3.11 --no-header --extra dev -o requirements-dev.lock

clean: ## remove the virtual environment and everything generated
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .tidegate dist build native/target
