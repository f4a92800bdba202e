# Everything runs in .venv, which the targets make themselves. Only Python 3.11 or newer and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long lint bench bench-parts bench-selective study clean

demo: $(VENV)/demo.stamp
	KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/finetooth demo

test: lint
	$(BIN)/python tests/run.py

test-long: $(VENV)/test.stamp
	$(BIN)/python tests/run.py --long

# BENCH=quick for the most important part of it.
bench: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/bench.py $(if $(filter quick,$(BENCH)),--quick)

bench-parts: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/parts.py

bench-selective: $(VENV)/bench.stamp
	$(BIN)/python benchmarks/selective.py

study: $(VENV)/bench.stamp
	KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python benchmarks/study.py

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml requirements/tensorflow.txt
	$(BIN)/python -m pip install --quiet -r requirements/tensorflow.txt -e .
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml requirements/tensorflow.txt requirements/test.txt requirements/models.txt
	$(BIN)/python -m pip install --quiet -r requirements/test.txt -e .
	$(BIN)/python -m pip install --quiet --no-deps -r requirements/models.txt
	touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp requirements/bench.txt
	$(BIN)/python -m pip install --quiet -r requirements/bench.txt
	touch $@
