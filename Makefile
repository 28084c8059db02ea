# make demo   many queues, three worker processes, one of them killed: watch them being shared out
# make test   everything that must hold: lint, types, tests (ZooKeeper included), documentation
# make bench  qdo measured beside its peers
# make docs   the documentation, into docs/_build/html
# make lint   ruff and mypy only
#
# Everything lives in .venv; `make clean` takes it away again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
SHELL := /bin/bash

.DELETE_ON_ERROR:
.PHONY: help demo test bench docs lint types clean python zookeeper

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(STAMP)
	$(BIN)/qdo demo

# The tests come last, so that their own summary closes the output. Two files run at a time, each
# with servers of its own: tests mostly wait for processes and clocks, and one after the other they
# take more than twice as long.
test: zookeeper lint docs
	QDO_REQUIRE_ZOOKEEPER=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

# Each makes the virtual environment of the peers at first use.
bench: $(STAMP) zookeeper
	$(BIN)/python -m bench
	$(BIN)/python -m bench.executors

# Made anew whenever what it holds may have changed.
$(STAMP): setup.py pyproject.toml .ci/prepare
	@bash .ci/prepare python "$(PYTHON)"
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,docs]'
	@touch $@

zookeeper:
	@bash .ci/prepare zookeeper

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
