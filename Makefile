# make run     set up .venv, run the main job      ENGINE=torch|vllm  ARGS="key=value ..."
# make check   set up .venv, lint, the quick tests: for the inner loop
# make test    set up .venv, lint, run every test this machine can run
# make help    the rest
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
ACCEL ?= cpu
ENGINE ?=
ARGS ?=
export PYTHON TORCH_INDEX_URL
export OMP_NUM_THREADS ?= 1
# Container images often set it. Every process would then compile torch and transformers anew,
# ten seconds of a core, and a run is five processes.
unexport PYTHONDONTWRITEBYTECODE

# The name holds what the environment was made from: no setup while it is unchanged,
# whatever the dates of the files say.
KEY := $(shell cat pyproject.toml scripts/setup_venv.sh | cksum | cut -d' ' -f1)
STAMP := $(VENV)/.setup-$(ACCEL)-$(KEY)

PYTEST := $(BIN)/python -m pytest
# Two workers. Whole files, since the tests of one share a cluster or an engine, and in the
# order that tests/conftest.py gives.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder --durations=15

$(STAMP):
	bash scripts/setup_venv.sh $(VENV) $(ACCEL)
	@rm -f $(VENV)/.setup-*
	@touch $@

.PHONY: help setup run smoke check test lint format notebooks bench clean

help:
	@echo 'make run [ENGINE=torch|vllm] [ARGS="key=value ..."]   run the main job'
	@echo 'make check                                            lint, then unit and golden tests'
	@echo 'make test                                             lint, then all tests'
	@echo 'make setup [ACCEL=gpu] [PYTHON=...] [TORCH_INDEX_URL=...]'
	@echo 'make smoke | lint | format | notebooks | bench | clean'

setup: $(STAMP)

run: $(STAMP)
	@engine="$(ENGINE)"; chosen="$${engine:-$$(cat $(VENV)/engine)}"; \
	if [ -z "$$engine" ] && [ "$$chosen" = torch ]; then \
	  echo '=== VLLM IS NOT AVAILABLE HERE: RUNNING WITH engine=torch (see $(VENV)/vllm-import.log)'; fi; \
	exec $(BIN)/trinity-dask run +experiment=sort_digits engine="$$chosen" \
	  rerun_finished=true $(ARGS)

# A miniature of the main job in a directory of its own.
smoke: $(STAMP)
	@engine="$(ENGINE)"; chosen="$${engine:-$$(cat $(VENV)/engine)}"; \
	root=$$(mktemp -d) || exit 1; trap 'rm -rf "$$root"' EXIT; \
	$(BIN)/trinity-dask run +experiment=sort_digits_tiny engine="$$chosen" \
	  checkpoint_root_dir="$$root" monitor.progress=plain $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(PYTEST) tests/unit tests/golden -n 2 -q $(ARGS)

test: lint
	@bash scripts/test_programs.sh
	@$(BIN)/python scripts/what_cannot_run.py | tee $(VENV)/cannot-run.txt
ifeq ($(ARGS),)
	$(PYTEST) tests/unit tests/golden -n 2 -q
	$(PYTEST) tests/models tests/cluster tests/slurm tests/vllm tests/e2e tests/chaos tests/benchmarks $(BY_FILE)
# apart: playwright leaves a running event loop in its process
	$(PYTEST) tests/browser $(BY_FILE)
else
	$(PYTEST) --durations=15 $(ARGS)
endif
	@cat $(VENV)/cannot-run.txt

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP)
	$(BIN)/python notebooks/make_notebooks.py $(ARGS)

bench: $(STAMP)
	@for script in benchmarks/[a-z]*.py; do \
	  echo "=== $$script"; $(BIN)/python "$$script" $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
