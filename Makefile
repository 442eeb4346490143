# CI runs `make check` and `make test`; the other targets are for people.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SGLANG ?= .venv-sglang
WORKERS ?= 2
export OMP_NUM_THREADS ?= 1

.PHONY: bench-plane wheel-test
.PHONY: quickstart test chaos test-sglang sglang-env check setup clean bench-quickstart bench-staleness
.PHONY: bench-replay bench-patches fuzz-patches bench-sandbox bench-reward test-faults fuzz

quickstart: $(STAMP)  ## train a tiny language model, with every service on this machine
	$(BIN)/penstock quickstart

test: $(STAMP)  ## the whole suite, on a real nats-server and a real S3 server
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-faults: $(STAMP)  ## exactly-once under thousands of generated failures, outages of a minute (minutes)
	PENSTOCK_TEST_EXAMPLES=50 PENSTOCK_TEST_OUTAGE_S=60 $(BIN)/python -m pytest --timeout 3600 \
		tests/trainer/recovery/test_exactly_once.py tests/trainer/groups/test_collect.py tests/system/test_misfortunes.py

fuzz: $(STAMP)  ## property tests with 40 times as many examples, new ones each time; the reward API likewise (an hour)
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --timeout 3600
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest --timeout 3600 tests/reward_service/endpoints/test_openapi_fuzz.py

chaos: $(STAMP)  ## kill any process at random, three seeds; audit and replay; and a control that must fail (half an hour)
	$(BIN)/python -m pytest -m chaos --timeout 900
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.chaos --without-ids --seeds 0 --steps 20 --kills 7 --points 4

test-sglang: $(STAMP) $(SGLANG)/.installed  ## the engine contract against a real SGLang server, on the CPU
	PENSTOCK_TEST_SGLANG=1 PENSTOCK_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python \
		$(BIN)/python -m pytest --timeout 600 tests/contracts tests/sglang

sglang-env: $(SGLANG)/.installed  ## SGLang for CPUs, in an environment of its own (0.3 GB to download)

bench-staleness: $(STAMP)  ## which corrections learn from stale samples: the missing runs, the table and the plot (hours)
	$(BIN)/python -m benchmarks.staleness --all --report

fuzz-patches: $(STAMP)  ## hostile weight patches, manifests and layouts: 200,000 of them, under a memory limit (minutes)
	$(BIN)/python -m tests.protocol.weights.fuzz_patches --mutations 200000

bench-patches: $(STAMP)  ## sparse weight patches compared with memcpy, full safetensors and XOR + zstd, at five densities (minutes)
	$(BIN)/python -m benchmarks.weight_patches

check: $(STAMP)  ## style, types, and allowed imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench-sandbox: $(STAMP)  ## programs per second and core in each sandbox, compared with a plain subprocess
	$(BIN)/python -m benchmarks.sandbox

bench-replay: $(STAMP)  ## the quickstart and its replay from the record: versions, wall and CPU seconds (minutes)
	$(BIN)/python -m benchmarks.replay --steps 30

bench-quickstart: $(STAMP)  ## the quickstart for seeds 0, 1, 2: learning, wall and CPU seconds
	$(BIN)/python benchmarks/quickstart.py

bench-plane: $(STAMP)  ## from a worker's put to the trainer's acknowledgement; PEERS=PYTHON also measures Ray and Redis
	$(BIN)/python -m benchmarks.plane $(if $(PEERS),--peers $(PEERS))

bench-reward: $(STAMP)  ## rewards by HTTP under load, with slow, hung, flaky, crashing and invalid endpoints
	$(BIN)/python -m benchmarks.reward_load --rate 25

wheel-test: $(STAMP)  ## install the wheel alone in an empty environment and run the quickstart there (two minutes)
	$(BIN)/python -m tests.packaging.wheel_quickstart

setup: $(STAMP)  ## make only the virtual environment

# torch first and pinned: its CPU build is small, any other pulls gigabytes; deepspeed is built against it.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel numpy
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation deepspeed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

# Without dependencies: every pin is listed, and SGLang's own requirements would pull gigabytes for CUDA.
$(SGLANG)/.installed: deploy/sglang_cpu/lock.txt
	test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --no-deps -r deploy/sglang_cpu/lock.txt
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) .pytest_cache .ruff_cache .hypothesis
