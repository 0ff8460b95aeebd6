# Every target does its own set-up; the second time that takes no time.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.millpond-setup
LOG := $(VENV)/setup.log
PYTHON ?=

# Every container is a Python of its own: compiled once, not by each.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-long soak simulate chaos check bench clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1@\2/p' Makefile | tr '@' '\t'

setup: $(STAMP) ## make .venv with all dependencies, and see that Java is there
	@:

demo: setup ## two streaming queries share one State; every answer is checked
	@$(BIN)/millpond demo

# More workers than cores: many tests wait, for a disk or for a Java machine to start. Kernels first: else each of the
# processes would compile them.
test: setup ## run all tests but the long ones
	@$(BIN)/python -m millpond.stores.windows.warming
	@$(BIN)/python -m pytest -n $$((2 + $$(nproc))) --dist loadscope --no-loadscope-reorder -m "not long"

test-long: setup ## the tests that would make `make test` too long
	@$(BIN)/python -m pytest -n auto --dist loadscope -m long

soak: setup ## the long tests: many more histories, ten minutes of kill -9; fixed seeds
	MILLPOND_SOAK=700 $(BIN)/python -m pytest tests/durability/test_state_machine.py
	MILLPOND_SOAK=1 $(BIN)/python -m pytest tests/durability/test_crash_points.py tests/durability/test_transactions.py
	MILLPOND_TXN_EXAMPLES=20 $(BIN)/python -m pytest tests/txn/test_txn_random.py tests/pond/test_pond_transactions.py --timeout 1800
	MILLPOND_PROGRAM_EXAMPLES=3000 $(BIN)/python -m pytest tests/programs/test_programs_random.py tests/programs/test_program_random.py tests/programs/test_programs_kernels.py --timeout 1800
	MILLPOND_SOAK_SECONDS=600 $(BIN)/python -m pytest tests/processes/test_kill.py -k killed_at_random --timeout 1200

SEEDS ?= 1000
simulate: setup ## a whole pond in all weathers, from SEEDS seeds; the first that fails is told with its history
	@$(BIN)/python -m millpond.testing.simulation --seeds $(SEEDS)

SECONDS ?= 600
SEED ?= 7
chaos: setup ## a pond of processes for SECONDS, while all that may fail does, as planned from SEED
	@MILLPOND_CHAOS_SECONDS=$(SECONDS) MILLPOND_CHAOS_SEED=$(SEED) \
		$(BIN)/python -m pytest tests/processes/test_chaos.py -n 0 -s

check: setup ## ruff and mypy, as CI runs them
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## measure the kernels beside DuckDB and polars
	@$(BIN)/millpond bench kernels

clean: ## remove what the other targets made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml scripts/venv.sh scripts/java.sh
	@sh scripts/java.sh
	@PYTHON='$(PYTHON)' sh scripts/venv.sh $(VENV)
	@echo "installing dependencies (a minute or two)"
	@$(BIN)/python -m pip install -q --no-input --disable-pip-version-check -e '.[dev,bench]' >$(LOG) 2>&1 \
		|| { cat $(LOG); echo "millpond: pip could not install the dependencies" >&2; exit 1; }
	@echo "compiling kernels (once)"
	@$(BIN)/python -m millpond.stores.windows.warming
	@touch $@
	@echo "ready"
