# v41: what a newcomer and CI run. Installs into .venv (or .venv-2.11) beside this file; compiled programs are kept in
# ~/.cache/v41, as wherever v41 runs, and stay there.
#   make demo       the small model reads and writes text, compiled, checked against eager
#   make test       lint, types, import rules, tests          make test-2.11   the tests on the oldest torch
#   make nightly    long property runs, others' models        make mutation    guards of passes broken, one by one
#   make browser    the page of v41 inspect --html, tried in the Chromium that is on the path
#   make docs       a reference page for each part, from docstrings, into docs/reference
#   make clean      removes what the others made beside this file
SHELL := bash
PYTHON ?= python3
WORKERS ?= 2
# Small tensors: a second thread costs more than it brings, and the tests' workers share the cores.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
# PyPI's torch names the triton it needs; a CPU build names none and gets this one.
TRITON := 3.6.0
BIN := .venv/bin
BIN_211 := .venv-2.11/bin
FOLDERS := v41 model_def passes lowering runtime tools tests
PYTEST := -m pytest -n $(WORKERS) --dist worksteal --durations 10

.PHONY: demo test lint nightly mutation browser test-2.11 docs clean

demo: .venv/installed
	@echo "compiles, runs and compares: one to two minutes on two free cores, with a bar where this is a terminal" >&2
	@$(BIN)/v41 generate --compare-eager

test: lint
	$(BIN)/python $(PYTEST) -m "not slow"

# -rs: says which tests were left out, and why, such as those of the page where there is no Chromium.
nightly: .venv/installed-models .venv/installed-browser
	V41_HYPOTHESIS=nightly $(BIN)/python $(PYTEST) -rs
	$(MAKE) mutation

mutation: .venv/installed
	$(BIN)/python -m tests.mutation

browser: .venv/installed-browser
	@$(BIN)/python -m tests.tools.test_browser
	$(BIN)/python -m pytest tests/tools/test_browser.py

test-2.11: .venv-2.11/installed
	$(BIN_211)/python $(PYTEST) -m "not slow"

docs: .venv/installed
	$(BIN)/python -m v41.tools.reference docs/reference

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@echo "ten longest files:"; find $(FOLDERS) -name '*.py' -exec wc -l {} + | grep -v ' total$$' | sort -rn | sed 10q

.venv/installed: pyproject.toml constraints.txt constraints-tools.txt Makefile
	$(call install,.venv,constraints.txt)

.venv-2.11/installed: pyproject.toml constraints-2.11.txt constraints-tools.txt Makefile
	$(call install,.venv-2.11,constraints-2.11.txt)

.venv/installed-models .venv/installed-browser: .venv/installed-%: .venv/installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[$*]"
	@touch $@

# $(1) folder of the environment, $(2) its constraints. The stamp comes last: an install cut short is done again.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "v41 needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet -c $(2) torch
	$(1)/bin/python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("triton"))' \
		|| $(1)/bin/python -m pip install --quiet -c $(2) triton==$(TRITON)
	$(1)/bin/python -m pip install --quiet -c $(2) -e ".[test]"
	@touch $(1)/installed
endef

clean:
	rm -rf .venv .venv-2.11 build dist v41.egg-info docs/reference
	rm -rf .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
