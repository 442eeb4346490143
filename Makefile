# Everything a person types. CI types the same.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: quickstart test check setup clean bench-quickstart bench-staleness

quickstart: $(STAMP)  ## watch a language model learn, through every service, on this machine
	$(BIN)/penstock quickstart

test: $(STAMP)  ## the whole suite, on a real nats-server and a real S3 server
	$(BIN)/python -m pytest

bench-staleness: $(STAMP)  ## which corrections survive stale samples: the missing runs, the table and the plot (hours)
	$(BIN)/python -m benchmarks.staleness --all --report

check: $(STAMP)  ## style, types, and who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench-quickstart: $(STAMP)  ## the quickstart for seeds 0, 1, 2: learning, wall and CPU seconds
	$(BIN)/python benchmarks/quickstart.py

setup: $(STAMP)  ## only the virtual environment

# torch first and pinned: its CPU build is small, any other pulls gigabytes; deepspeed is built against it.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel numpy
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation deepspeed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
