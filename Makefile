# make demo        set-up, then teach a small real model to add, through real Kafka, a real S3 server and vLLM
# make test        set-up, then lint and every test
#
# Options: STEPS=30  MODEL=directory-or-name  PORT_BASE=17100  RECIPE=file  ENGINE=cpu|gpu (which vLLM to install)

STEPS ?= 30
MODEL ?= smollm2-135m-instruct
PORT_BASE ?= 17100
RECIPE ?= examples/arithmetic/recipe.py
RUN ?= demo-$(shell date +%Y%m%d-%H%M%S)
PYTEST_ARGS ?=

BIN := .venv/bin

.PHONY: demo test lint setup clean distclean

# Its state is its own: `slipstream up` and its runs stay untouched.
demo: setup
	@SLIPSTREAM_HOME=.slipstream/demo exec $(BIN)/slipstream run --up --fresh $(RECIPE) --run $(RUN) --steps $(STEPS) --model $(MODEL) \
		--port-base $(PORT_BASE) --summary summary.json

test: setup lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/mypy slipstream tests/support conftest.py
	@for each in services/*/; do $(BIN)/mypy $${each}slipstream_$$(basename $$each) || exit 1; done

setup:
	@ENGINE="$(ENGINE)" scripts/setup

# What runs left behind: logs, checkpoints, the log's and the store's data.
clean:
	@[ ! -x $(BIN)/slipstream ] || $(BIN)/slipstream down
	rm -rf .slipstream summary.json .pytest_cache .mypy_cache .ruff_cache .hypothesis

distclean: clean
	rm -rf .venv
