PYTHON ?= python3
PROMPT ?= What is the capital of France?
VENV   := .venv
BIN    := $(VENV)/bin
# On Linux the MLX backend is an extra: `make setup BACKEND=cuda` takes the CUDA one.
BACKEND ?= $(if $(filter Linux,$(shell uname -s)),cpu,)
EXTRAS := $(if $(BACKEND),[$(BACKEND)],)
# The compiled CPU kernels; `make setup NATIVE=` leaves them out.
NATIVE ?= $(if $(filter cuda,$(BACKEND)),,engine/native)

STAMP  := $(VENV)/.done-$(or $(BACKEND),metal)
export PROMPT

.PHONY: help setup run test browser format lint check sanitize bench fuzz docs site completions wheels binary clean

help: ## what there is to make
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1: \2/p' $(MAKEFILE_LIST)

setup: $(STAMP) $(VENV)/.native ## make .venv and install mlxcel with its development tools and kernels

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlxcel needs Python 3.11 or newer; try: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q --group dev -e '.$(EXTRAS)'
	rm -f $(VENV)/.done-*
	touch $@

$(VENV)/.native: $(STAMP) $(wildcard engine/native/*.* engine/native/src/*)
	@if [ -n "$(NATIVE)" ]; then \
	  echo "compiling the kernels, some minutes: $(VENV)/native.log"; \
	  $(BIN)/python -m pip install -q --group native > $(VENV)/native.log 2>&1 \
	    && $(BIN)/python -m pip install -q --no-build-isolation ./engine/native >> $(VENV)/native.log 2>&1 \
	    || echo "compiled kernels: not built ($(VENV)/native.log says why); the engine runs portable"; \
	fi
	touch $@

run: setup ## fetch the built-in model and answer PROMPT
	$(BIN)/mlxcel run -p "$$PROMPT"

test: setup ## every test, two at a time; fetches the built-in models once
	$(BIN)/python -m pytest -n 2 --dist worksteal

browser: tests/web/node_modules/.done ## what the test of the page in a browser needs; without it that test is skipped
	command -v chromium || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; }

tests/web/node_modules/.done: tests/web/package-lock.json
	npm ci --no-audit --no-fund --prefix tests/web
	touch $@

format: setup
	$(BIN)/ruff check -q --fix-only .
	$(BIN)/ruff format .

lint: setup ## style, walls and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

check: lint test

sanitize: sanitize-address sanitize-thread ## what is compiled, under the address, undefined-behaviour and thread sanitizers (GCC)

# Python and MLX are not instrumented; what looks like a race because of that is named in thread.supp.
sanitize-%: setup
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps --upgrade --target build/sanitize-$* \
	  -C build-dir=build/sanitize-$* -C cmake.build-type=RelWithDebInfo -C install.strip=false \
	  -C cmake.define.MLXCEL_SANITIZE=$* ./engine/native
	export UBSAN_OPTIONS=halt_on_error=1 ASAN_OPTIONS=detect_leaks=0 \
	  TSAN_OPTIONS=suppressions=$(CURDIR)/engine/native/test/thread.supp; \
	engine/native/build/sanitize-$*/pool_test && PYTHONPATH=build/sanitize-$* \
	  LD_PRELOAD="$$($(CXX) -print-file-name=lib$(if $(filter thread,$*),t,a)san.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest --capture=sys tests/engine/kernels tests/engine/test_recorded.py

bench: setup ## figures for docs/log.md; never part of the tests
	$(BIN)/python -m tests.bench.kernels
	$(BIN)/python -m tests.bench.decode

fuzz: setup ## five minutes of whatever the OpenAPI document allows and forbids, against a tiny model
	$(BIN)/python -m tests.fuzz 300

docs: setup ## the generated pages and figures
	$(BIN)/python docs/generate.py

site: setup ## the documents as pages for a browser, into build/site
	$(BIN)/python docs/build.py

completions: setup ## shell completions into completions/
	mkdir -p completions
	for shell in bash zsh fish; do _MLXCEL_COMPLETE=source_$$shell $(BIN)/mlxcel > completions/mlxcel.$$shell; done

wheels: setup ## mlxcel and its compiled kernels, to be installed by pipx, uv or pip, into dist/
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .
	@if [ -n "$(NATIVE)" ]; then $(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist ./engine/native; fi
	@ls -sh dist/*.whl

binary: setup ## one executable with everything in it, for Linux: dist/mlxcel
	$(BIN)/python -m mlxcel_cli.binary.build dist/mlxcel

clean:
	rm -rf $(VENV) tests/web/node_modules .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist engine/native/build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
