# The main commands. A fresh machine needs Python 3.11+, Rust and make.
#
# All Python code runs from the built wheel, installed into an empty environment outside the source tree,
# so that the tests run the shipped package. Downloads and compiled crates are cached; the wheel and
# its environment are always rebuilt.
#
#   make test PYTHON=python3.13                        another interpreter
#   make test TORCH="torch==2.11.* numpy<2.4"          other versions of the dependencies
#   make test PYTEST="-k layers -x"                    some of the tests
#   make test PYTEST="-n 0"                            the tests in one process
#
# `make dev` and `make check` are the exception: they use the source tree, from .venv, and skip everything that takes minutes.

PYTHON ?= python3
TORCH  ?=
PYTEST ?=

CACHE  := $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/electra-fast
TREE   := $(notdir $(CURDIR))-$(shell pwd | cksum | cut -d' ' -f1)
TOOLS  := $(CACHE)/tools-$(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:3], sep=".")')
ENV    := $(CACHE)/$(TREE)/test
DEMO   := $(CACHE)/$(TREE)/demo
EXPERIMENTS := $(CACHE)/$(TREE)/experiments
# Crates from the registry are compiled once per machine, not once per checkout.
export CARGO_TARGET_DIR ?= $(CACHE)/target
# Messages of crates have the paths of their sources; this keeps the folders of the build machine out of them.
export RUSTFLAGS += --remap-path-prefix=$(HOME)=~

# Python's checks run in parallel with Rust's, since neither keeps two cores busy. Other goals (`make clean test`) keep their order.
ifeq ($(filter-out test test-all lint,$(MAKECMDGOALS)),)
MAKEFLAGS += --jobs=2
endif

# One worker more than cores, since some tests wait, but at most 8: each needs one or two gigabytes of memory. A file's
# tests share fixtures.
WORKERS = -n $(shell $(PYTHON) -c 'import os; print(min(8, 1 + os.cpu_count()))') --dist loadfile --no-loadscope-reorder
# The tests start many Python processes that import torch, which takes twice as long without bytecode. The bytecode
# goes into the environment, which every run recreates, and never into the source tree.
BYTECODE := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(ENV)/bytecode

# A limit in seconds for each Rust test program, without its compilation. By then, libtest has named a test that hangs:
# it "has been running for over 60 seconds".
TIMEOUT := --config 'target."cfg(all())".runner = ["timeout", "--foreground", "--verbose", "--kill-after=10", "600"]'

# $(call environment,FOLDER,EXTRAS): an empty environment with the wheel and its dependencies.
define environment
	$(TOOLS)/bin/uv venv --quiet --clear --python $(TOOLS)/bin/python $(1)
	$(TOOLS)/bin/uv pip install --python $(1)/bin/python \
	    "electra-fast$(2) @ file://$$(ls $(CURDIR)/dist/electra_fast-*.whl)" $(foreach r,$(TORCH),'$(r)')
endef

# $(call pytest,MARKERS): tests from the installed wheel.
pytest = cd $(ENV) && $(BYTECODE) bin/pytest -c $(CURDIR)/pyproject.toml $(WORKERS) -m '$(1)' --durations=20 $(CURDIR)/tests $(PYTEST)

.PHONY: help demo dev check test test-slow test-all bytecode lint lint-python lint-rust test-rust docs wheel bench experiments clean env

help:
	@echo "make demo   text to a trained, exported encoder: 1 to 3 minutes of training on two CPU cores: ./demo"
	@echo "make test   build the wheel, install it in an empty environment, run the checks and test each behavior once"
	@echo "make test-all  make test, and the slow tests: pages, examples, other libraries, stores, faults of ranks, fuzzers"
	@echo "make dev    an environment with this source tree, to edit and run: ./.venv"
	@echo "make check  after an edit: lint, Rust's unit tests, the tests that start no process and train no run, from ./.venv"
	@echo "make lint   only the checks: ruff, mypy, rustfmt, clippy"
	@echo "make docs   the documentation's site, with regenerated reference pages: ./site"
	@echo "make wheel  the release wheel: ./dist"
	@echo "make bench  run the scripts of bench/ that need no texts, hours or GPU, from the installed wheel"
	@echo "make experiments TEXTS='FILE...' GLUE=FOLDER [BLIMP=FILE BOOKS='FILE...']   the queue of bench/experiments.toml, at the lowest priority"
	@echo "make clean  remove the outputs of these commands for this checkout (shared tools and registry crates stay)"

demo: wheel
	$(call environment,$(DEMO),)
	$(DEMO)/bin/electra-fast demo --out demo

dev: $(TOOLS)/bin/maturin
	test -x .venv/bin/python || $(TOOLS)/bin/uv venv --quiet --python $(TOOLS)/bin/python .venv
	$(if $(TORCH),$(TOOLS)/bin/uv pip install --quiet --python .venv/bin/python $(foreach r,$(TORCH),'$(r)'))
	VIRTUAL_ENV=$(CURDIR)/.venv PATH=$(TOOLS)/bin:$$PATH $(TOOLS)/bin/maturin develop --quiet --release --locked --uv --extras test

check: dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	cargo fmt --all --check
	.venv/bin/mypy --strict --cache-dir $(CACHE)/$(TREE)/mypy
	cargo test $(TIMEOUT) --release --locked --workspace --lib --quiet
	.venv/bin/pytest --quiet $(WORKERS) -m 'not slow and not process and not long' $(PYTEST)

test: lint bytecode test-rust
	$(call pytest,not slow)

# In the environment that `make test` made.
test-slow:
	$(call pytest,slow)

test-all:
	$(MAKE) test
	$(MAKE) test-slow

# In parallel with Rust's tests. Without bytecode, all workers would compile the same modules at the same time.
bytecode: lint-python
	cd $(ENV) && $(BYTECODE) bin/pytest -c $(CURDIR)/pyproject.toml --quiet --quiet --collect-only $(CURDIR)/tests

lint: lint-python lint-rust

lint-python: env
	$(ENV)/bin/python .ci/site_pages.py
	$(ENV)/bin/ruff check .
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/mypy --strict --cache-dir $(CACHE)/$(TREE)/mypy

# After the wheel, since cargo builds one thing at a time.
lint-rust: wheel
	cargo fmt --all --check
	cargo clippy --release --locked --workspace --all-targets -- -D warnings

test-rust: lint-rust
	cargo test $(TIMEOUT) --release --locked --workspace --tests

docs: env
	$(ENV)/bin/python .ci/generate_reference.py
	$(ENV)/bin/python .ci/site_pages.py

wheel: $(TOOLS)/bin/maturin
	rm -f dist/electra_fast-*.whl
	$(TOOLS)/bin/maturin build --release --locked --interpreter $(TOOLS)/bin/python --out dist
	$(TOOLS)/bin/python .ci/clean_wheel.py dist/electra_fast-*.whl

# Shows that the scripts run, with small settings if possible, except those that need texts, hours or a GPU. A failure
# does not stop the others. For numbers, run a single script on an idle machine.
bench: SKIPPED := adaptation experiments recipes gpu
bench: env
	failed=; for script in $(filter-out $(SKIPPED:%=bench/%.py),$(wildcard bench/*.py)); do \
	    echo "== $$script"; quick=; if grep -q parse_arguments "$$script"; then quick=--quick; fi; \
	    timeout 900 $(ENV)/bin/python "$$script" $$quick || failed="$$failed $$script"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

# Takes hours. Run it in a separate clone, because edits of bench/ affect it.
experiments: $(if $(and $(TEXTS),$(GLUE)),wheel)
	$(if $(and $(TEXTS),$(GLUE)),,$(error make experiments needs TEXTS='FILE...' and GLUE=FOLDER))
	$(call environment,$(EXPERIMENTS),[test])
	$(EXPERIMENTS)/bin/python bench/experiments.py $(TEXTS) --glue $(GLUE) --out experiments \
	    $(and $(BLIMP),$(BOOKS),--blimp $(BLIMP) --books $(BOOKS))

clean:
	cargo clean --release --package electra-data --package electra-data-py
	rm -rf dist demo site .venv .cache .ruff_cache .pytest_cache python/electra_fast/_data.*.so $(CACHE)/$(TREE)

env: wheel
	$(call environment,$(ENV),[test])

# Build and install tools, in a separate environment.
$(TOOLS)/bin/maturin:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(TOOLS)
	$(TOOLS)/bin/pip install --quiet uv "maturin>=1.9,<2"
