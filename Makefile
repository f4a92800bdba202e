# Everything runs in .venv, which the targets make themselves. Only Python 3.11 to 3.13 and make are needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Nothing is left to download here: all that is needed is among the requirements.
INSTALL := $(PIP) install --no-deps --no-build-isolation -e .

.PHONY: demo test test-all test-rest lint bench bench-parts bench-selective study clean

demo: $(VENV)/demo.stamp
	KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/finetooth demo

test: lint
	$(BIN)/python tests/run.py

# Every test, also those that take long: all layers in all modes, real models.
test-all: lint
	$(BIN)/python tests/run.py --all

# What `make test` leaves out of it.
test-rest: $(VENV)/test.stamp
	$(BIN)/python tests/run.py --rest

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

# TensorFlow has no wheels for other versions.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: $(VENV)/bin/python pyproject.toml $(addprefix requirements/,tensorflow.txt lock.txt)
	$(PIP) install -r requirements/tensorflow.txt
	$(INSTALL)
	touch $@

$(VENV)/test.stamp: $(VENV)/bin/python pyproject.toml $(addprefix requirements/,tensorflow.txt test.txt models.txt lock.txt)
	$(PIP) install -r requirements/test.txt
	$(PIP) install --no-deps --no-build-isolation -r requirements/models.txt
	$(INSTALL)
	touch $@

$(VENV)/bench.stamp: $(VENV)/test.stamp requirements/bench.txt
	$(PIP) install -r requirements/bench.txt
	touch $@
