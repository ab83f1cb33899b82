# Each target makes what it needs: `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RELEASES ?=

.PHONY: setup demo test test-mindspeed matrix fingerprints lint docs bench clean

setup: $(BIN)/.installed

# Here torch is the CPU build where the index has one under this pin; users bring their own.
$(BIN)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" wheel torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[test,lint,plot]"
	touch $@

demo: setup
	$(BIN)/replay-patch demo

# A newcomer's tests, in minutes; RELEASES=all is everything, as CI runs it.
test: setup
	$(BIN)/python tests/run.py $(if $(RELEASES),--releases $(RELEASES))

# make test-mindspeed MINDSPEED_PATH=/dir [MEGATRON=0.12.1 or a folder that holds megatron/]
# MindSpeed 2.1, 26.x and master need the folder of a Megatron-LM checkout.
test-mindspeed: setup
	@test -n "$(MINDSPEED_PATH)" || { echo "MINDSPEED_PATH=/dir names a MindSpeed checkout"; exit 2; }
	$(BIN)/python tests/run.py --mindspeed $(MINDSPEED_PATH)$(if $(MEGATRON),=$(MEGATRON))

# Every check on every tested release (minutes), and what is made from the result.
matrix: setup
	mkdir -p build
	$(BIN)/replay-patch matrix --megatron all --json build/matrix.json
	$(BIN)/python tools/generated_docs.py --matrix build/matrix.json

# What the drift report compares with: all that patches change or rely on, in every tested release.
fingerprints: setup
	$(BIN)/python -m replay_patch.matrix.fingerprints_on_bed --write

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: setup
	$(BIN)/python tools/generated_docs.py

# Takes about ten minutes, and means something only on a machine that does nothing else.
bench: setup
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
