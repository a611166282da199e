# make demo       train the tiny recipe in a fresh .venv
# make test       run the fast tests: three to four minutes on two cores
# make test-slow  run the others: what serves, votes, launches, kills, continues a run, or repeats over families
# make test-all   run all of them, with coverage
# make lint       run ruff, mypy, import-linter and the house rules
# NEWEST=1 make ...  install the newest releases instead of the versions in constraints.txt
# make docs       build the documentation into build/site; a broken link or an undocumented public name is an error
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# A slow file's tests share launches of several processes, so one worker takes them all.
PYTEST_SLOW := $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 2
COVERAGE := --cov --cov-report=term --cov-fail-under=85
export OMP_NUM_THREADS ?= 1
# Without bytecode every worker compiles, and rewrites the asserts of, every test file again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-all lint docs clean
.DEFAULT_GOAL := demo

demo: $(VENV)/installed
	$(BIN)/lightning run recipes/tiny_shapes.yaml $(DEMO_ARGS)

test: $(VENV)/installed
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/installed
	$(PYTEST_SLOW) -m slow $(PYTEST_ARGS)

test-all: $(VENV)/installed
	$(PYTEST) $(COVERAGE) $(PYTEST_ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/python tools/house.py

docs: $(VENV)/installed-dev
	@# Without --quiet, which hides warnings from --strict.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open build/site/index.html"

TOO_OLD := Python 3.11 or later is needed. Name one: make $(MAKECMDGOALS) PYTHON=python3.12
PINS := $(if $(NEWEST),,-c constraints.txt)
# uv is several times faster than pip but ignores pip's configuration (a custom index, for example), so pip is the
# fallback. --no-compile skips compilation to bytecode, since most of the 23,000 files are never imported.
define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "$(TOO_OLD)")'
	@echo "Installing into $(VENV): about 6 GB, half a minute or more"
	$(PYTHON) -m venv $(VENV)
	($(PIP) install uv && $(BIN)/uv pip install --quiet --python $(BIN)/python $(PINS) -e ".[$(1)]") \
	    || $(PIP) install --no-compile $(PINS) -e ".[$(1)]" \
	    $(if $(PINS),|| { echo "constraints.txt cannot be installed here: installing the newest releases instead" >&2; \
	    $(PIP) install --no-compile -e ".[$(1)]"; })
endef

# Stamp files, so that a second call installs nothing. torch and torchvision must be chosen together: see docs/start.md.
$(VENV)/installed: pyproject.toml constraints.txt
	$(call install,test)
	touch $@

# Includes all of the above.
$(VENV)/installed-dev: pyproject.toml constraints.txt
	$(call install,dev)
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
