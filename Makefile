# make run     train the example, with live progress and a report at the end (ARGS="KEY=VALUE ..." changes settings)
# make test    lint, types, tests (15 minutes at most on 2 cores); `make fast` is the part under a minute
# make help    every target

SHELL := /bin/sh
CONFIG ?= examples/frozenlake.yaml
ARGS ?=
# cpu, or gpu; what .venv was made for stays until another is asked for.
EXTRA ?= $(shell cat .venv/.extra 2>/dev/null || echo cpu)
BIN := .venv/bin
STAMP := .venv/.synced
TESTS := $(BIN)/python scripts/test.py
MANIFESTS := pyproject.toml uv.lock $(wildcard packages/*/pyproject.toml)

.PHONY: help run environments environment test fast test-slow lint types wheels bench sync setup browser lock doctor clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

run: sync environments ## train examples/frozenlake.yaml (CONFIG=... for another, ARGS="KEY=VALUE ..."); resumes an unfinished run
	@exec $(BIN)/rollart train "$(CONFIG)" --continue $(ARGS)

# Interpreters that the configuration names, such as .venvs/gem/bin/python.
environments: sync
	@for name in $$(sed -n 's|^ *python: *\.venvs/\([a-z]*\)/.*|\1|p' "$(CONFIG)" | sort -u); do \
		scripts/environment.sh "$$name" || exit 1; done

environment: sync ## make .venvs/NAME, a Python of its own for the environment library NAME (gem, openenv, verifiers)
	@scripts/environment.sh "$(NAME)"

test: browser sync lint types ## lint, types and all tests but the slow ones
	$(TESTS) -m "not slow"

fast: sync ## the selection under 60 seconds: no engines, no servers
	$(BIN)/python -m pytest -m "not slow and not real and not engine and not seconds" -q

test-slow: sync ## the tests that take up to an hour
	$(TESTS) -m slow

lint: sync ## ruff, and that uv.lock holds no address
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/portable_lock.py --check

types: sync ## mypy
	$(BIN)/mypy

wheels: sync ## build all wheels; install each component alone and import it without its siblings
	$(BIN)/python scripts/check_wheels.py

bench: sync ## the quick form of every benchmark, then benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run_all.py --quick

doctor: sync ## what is installed, what is missing, what to do
	@$(BIN)/rollart doctor

sync: $(STAMP) ## make .venv

setup:
	@mkdir -p .tools && scripts/setup.sh

browser:
	@mkdir -p .tools && scripts/setup.sh --browser

$(STAMP): $(MANIFESTS) | setup
	@EXTRA=$(EXTRA) scripts/sync.sh && touch $@

# Another EXTRA than the one that .venv was made for makes it again.
ifneq ($(EXTRA),$(shell cat .venv/.extra 2>/dev/null || echo $(EXTRA)))
.PHONY: $(STAMP)
endif

lock: | setup ## resolve again and write the portable uv.lock
	.tools/uv/bin/uv lock
	python3 scripts/portable_lock.py

clean: ## remove .venv, .venvs, .tools and caches; runs/ stays
	rm -rf .venv .venvs .tools dist .mypy_cache .ruff_cache .pytest_cache
