# make demo   many queues, three worker processes, one of them killed: watch them being shared out
# make check  what to run while you work, in a minute: lint, types, and tests of single parts
# make test   what must hold: lint, types, documentation, tests with their servers; nine minutes
# make test-rest   what `make test` leaves out: other coordinators, whole fleets; takes as long
# make smoke  an installed qdo on every supported Python that this machine has; part of test-rest
# make soak   real fleets under random faults, four minutes of them
# make bench  qdo measured beside its peers
# make audit  known vulnerabilities of libraries
# make docs   the documentation, into docs/_build/html
# make lint   ruff, mypy, and pyright for uses of the API only
# make screenshots   the pictures of the dashboard in the documentation
#
# Everything is installed into .venv; `make clean` removes it. `make demo` installs qdo only, the
# others add the tools of tests and documentation.
#
# make check FILES=tests/unit/brokers/sqs runs all tests of this file or folder instead, those with
# servers included.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QDO := $(VENV)/qdo-installed
STAMP := $(VENV)/installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check
SHELL := /bin/bash

# Tests start a thousand Python processes: with bytecode caches each start takes half the time.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help demo check test test-rest smoke soak audit bench docs screenshots lint types clean python zookeeper postgresql redis deployment browser

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(QDO)
	$(BIN)/qdo demo

# Every eighth fault point of `make test`, a fifth of its histories. dmypy keeps
# the types of the last run, which takes 2 s instead of 15.
FILES :=
QUICK := --level check --fault-stride 8 --histories 20 --fuzz 50
check: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/dmypy run
	$(BIN)/python -m pytest -q --processes 3 $(or $(FILES),$(QUICK))

REQUIRED := TESTS_REQUIRE_ZOOKEEPER=1 TESTS_REQUIRE_POSTGRESQL=1 TESTS_REQUIRE_CHROMIUM=1
REQUIRED += TESTS_REQUIRE_REDIS=1
PYTEST = $(REQUIRED) TMPDIR=$$(bash .ci/prepare scratch) $(BIN)/python -m pytest
# Failed items run once more, alone: a machine that stalls makes some of ten thousand fail.
AGAIN = -p tests.support.runs.second_runs --unstable $(VENV)/unstable-$@.log
WHOLE = --processes 6 --durations 20 $(AGAIN) -p tests.support.runs.costs

# Lint and documentation run beside the tests, and are shown if they fail.
BESIDE := $(VENV)/beside.log
# `make test COSTS=--write-costs` accepts what folders of tests cost now.
COSTS := --costs
COSTS_TABLE := tests/golden/costs.txt
test: $(STAMP) zookeeper postgresql redis deployment
	@$(MAKE) --no-print-directory lint docs >$(BESIDE) 2>&1 & \
	$(PYTEST) $(WHOLE) $(COSTS) $(COSTS_TABLE) --level test --fuzz 100 --histories 100; tests=$$?; \
	wait $$! || { cat $(BESIDE); exit 1; }; exit $$tests

# Then all inputs for readers of foreign bytes, and all histories: `make test` tries a twentieth of
# them. An installed qdo is tried beside.
SEEDED := tests/unit/brokers/test_fuzz.py tests/unit/test_fuzz_readers.py tests/simulation
SEEDED += tests/contract/streams/test_machine.py
test-rest: $(STAMP) zookeeper postgresql redis deployment browser
	@$(MAKE) --no-print-directory help smoke >$(BESIDE) 2>&1 & \
	$(PYTEST) $(WHOLE) --level rest && $(PYTEST) -q --processes 3 $(SEEDED); tests=$$?; \
	wait $$! || { cat $(BESIDE); exit 1; }; exit $$tests

# PYTHONS="3.11 3.13" runs these only, and fails without one of them.
PYTHONS :=
smoke: $(STAMP)
	$(BIN)/python -m tests.smoke $(PYTHONS)

# Not part of `make test`: a machine that stalls for the session timeout of 2 s violates its rules.
SOAK := --coordinator all --rounds 4 --seconds 60 --seed $(shell date +%s)
soak: $(STAMP) zookeeper
	$(BIN)/python -m tests.soak $(SOAK)

# In an environment of its own, because pip-audit has libraries in common with qdo. Not part of
# `make test-rest`: it asks pypi.org.
AUDIT := .audit
audit: $(STAMP)
	test -x $(AUDIT)/bin/pip-audit || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --disable-pip-version-check 'pip-audit>=2.10,<3'
	$(BIN)/python -m tests.audit $(AUDIT)/bin/pip-audit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright -p tests/uses --pythonpath $(BIN)/python

docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# By hand, after a change of the pages: two runs never give the same pictures.
screenshots: $(STAMP) browser
	$(BIN)/python -m docs.screenshots

# Each creates the virtual environment of the peers at its first run.
bench: $(STAMP) zookeeper
	$(BIN)/python -m bench
	$(BIN)/python -m bench.executors

# Created again when the requirements may have changed.
$(QDO): setup.py pyproject.toml .ci/prepare
	@bash .ci/prepare python "$(PYTHON)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(STAMP): $(QDO)
	$(PIP) --editable '.[test,docs]'
	@touch $@

zookeeper:
	@bash .ci/prepare $@ && echo "$@: installed; nothing was started"

postgresql:
	@bash .ci/prepare $@ && echo "$@: installed; nothing was started"

redis:
	@bash .ci/prepare $@ && echo "$@: installed; nothing was started"

deployment:
	@bash .ci/prepare $@ && echo "$@: installed; nothing was started"

browser:
	@bash .ci/prepare $@ && echo "$@: installed; nothing was started"

clean:
	rm -rf $(VENV) .audit .smoke build dist docs/_build tests/screenshots src/*.egg-info .pytest_cache .mypy_cache .dmypy.json .ruff_cache .hypothesis
