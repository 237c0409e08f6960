# Every target does its own set-up: it finds a Python, makes $(VENV), installs pinned versions, and does so once.
# Override with e.g. `make test PYTHON=3.11 VENV=.venv-3.11`, `make generate EXTRAS=cuda`, `make generate ARGS="--watch"`.

PYTHON ?= 3.12 3.11 3.13
VENV ?= .venv
EXTRAS ?=
ARGS ?=
SEED ?= 0
WORKERS ?= 2

# Byte code is compiled on import and kept: compiling all that is installed took longer than installing it.
export PIP_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALL := .ci/install $(VENV)
comma := ,
SHORT := not slow and not long and not gpu and not network
LONG := long and not slow and not gpu and not network
BOTH := not slow and not gpu and not network
VERSIONS := versions and not slow and not gpu and not network
ALL := not gpu and not network
# A worker keeps neighbours, which share programs, and takes of another's only when it is out of work.
SPREAD := -n $(WORKERS) --dist worksteal

.PHONY: help generate test test-long test-both test-versions test-all check format docs gpu bench wheel setup setup-dev clean distclean

help:
	@echo "make generate   solve a held-out word problem with the built-in model (SEED=3, ARGS=--watch)"
	@echo "make test       what matters for a change, under four minutes on two cores"
	@echo "make test-long  the rest of what CI runs; test-both: the two at once, as CI does, in less time"
	@echo "make test-versions  what depends on the version of JAX"
	@echo "make test-all   everything, the long fuzzing and sweeps too"
	@echo "make check      format, lint, types, layering"
	@echo "make format     rewrite the files as ruff wants them"
	@echo "make docs       build the docs site into build/docs/; any warning is an error"
	@echo "make gpu        the tests that need an NVIDIA GPU (installs jax[cuda13])"
	@echo "make bench      step times on this machine's accelerator"
	@echo "make wheel      build the wheel into dist/"
	@echo "make clean      remove caches and build outputs; distclean removes the environments as well"

generate: setup
	@$(BIN)/dllm-jax generate --seed $(SEED) $(ARGS)

test: setup-dev
	$(BIN)/python -m pytest -q $(SPREAD) --durations=10 -m "$(SHORT)" $(ARGS)

test-long: setup-dev
	$(BIN)/python -m pytest -q $(SPREAD) --durations=10 -m "$(LONG)" $(ARGS)

test-both: setup-dev
	$(BIN)/python -m pytest -q $(SPREAD) --durations=10 -m "$(BOTH)" $(ARGS)

test-versions: setup-dev
	$(BIN)/python -m pytest -q $(SPREAD) -m "$(VERSIONS)" $(ARGS)

test-all: setup-dev
	$(BIN)/python -m pytest -q $(SPREAD) -m "$(ALL)" $(ARGS)

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q -p no:cacheprovider -m "" tests/project/test_layering.py

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The redirect stands where a reader looks first; pages are named by their place in the repository.
docs: $(VENV)/.docs
	rm -rf build/docs
	JAX_PLATFORMS=cpu $(BIN)/sphinx-build -q -W --keep-going -E -j 2 -c docs -d build/doctrees . build/docs
	@echo '<meta http-equiv="refresh" content="0; url=docs/README.html">' >build/docs/index.html
	@echo "the site is build/docs/index.html"

gpu: setup-dev
	$(INSTALL) -e '.[cuda]'
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

bench: setup
	$(BIN)/python benchmarks/step_time.py $(ARGS)

wheel: setup-dev
	rm -rf dist
	$(BIN)/python -m pip --disable-pip-version-check -q wheel --no-deps -w dist .

# --- set-up: a stamp in the environment says what was installed, so a second run costs nothing ---

$(VENV)/.made:
	@python=$$(.ci/find-python $(PYTHON)) || exit 1; \
	wanted=$$("$$python" -c 'import sys; print(*sys.version_info[:2], sep=".")'); \
	if [ "$$($(BIN)/python -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null)" != "$$wanted" ]; then \
		echo "making $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@touch $@

$(VENV)/.runtime$(EXTRAS): $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing the pinned dependencies into $(VENV) (once)"
	@$(INSTALL) -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

$(VENV)/.dev$(EXTRAS): $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing the pinned development dependencies into $(VENV) (once)"
	@$(INSTALL) -e '.[dev$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	@touch $@ $(VENV)/.runtime$(EXTRAS)

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing what builds the docs site into $(VENV) (once)"
	@$(INSTALL) -e '.[docs]'
	@touch $@

setup: $(VENV)/.runtime$(EXTRAS)
setup-dev: $(VENV)/.dev$(EXTRAS)

clean:
	rm -rf dist build .pytest_cache .ruff_cache .hypothesis .cache
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-3.11 .venv-3.12 .venv-3.13
