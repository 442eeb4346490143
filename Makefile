# CI runs `make check`, `make test` and `make test-slow`, and prints `make lines`; the other targets are run by hand. `make help` lists them.
# WORKERS: more than cores, since tests often wait for other processes and for deadlines.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SGLANG ?= .venv-sglang
SOAK_S ?= 3600
WORKERS ?= 6
FUZZ_S  ?= 600
REQUESTS ?= 10000
FAULTS ?= 60
HOLD_S ?= 10
REVISION ?= 4f9f60b
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes: each would compile every module again

.PHONY: quickstart help test test-slow check lines setup clean docs docs-test files reference screenshots observe
.PHONY: chaos cluster-test compose-test fuzz fuzz-agents fuzz-files fuzz-ring soak wheel-test mutation-proof test-sglang sglang-env test-vllm test-more
.PHONY: bench bench-async bench-memory bench-quickstart bench-recipe proof

quickstart: $(STAMP)  ## train a tiny language model with all services on this machine
	$(BIN)/penstock quickstart

help:  ## list the targets, and the names of bench, proof and test-more
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## */\1\t/p' Makefile | sort | awk -F'\t' '{printf "  %-18s %s\n", $$1, $$2}'
	@$(foreach kind,bench proof test-more,echo "make $(kind) NAME=... one of: $(call names,$(kind))";)

names = $(sort $(patsubst $(1).%,%,$(filter $(1).%,$(.VARIABLES))))
named = @test -n '$($(1).$(NAME))' || { echo "usage: make $(1) NAME=... [ARGS=\"...\"]; one of: $(call names,$(1))"; exit 2; }

# $(1): an expression of markers
define suite
@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(1)"; code=$$?; \
	if [ $$code -ne 1 ]; then exit $$code; fi; \
	echo "failed beside other tests: running them again, alone. A test that passes only alone must wait for a condition instead of a time."; \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none
endef

test: $(STAMP)  ## the suite, on a real nats-server and a real S3 server (ten minutes on two cores)
	$(call suite,not slow and not chaos)

test-slow: $(STAMP)  ## whole runs, kills, several ranks, comparisons with other libraries: each takes many seconds (half an hour on two cores)
	$(call suite,slow and not chaos)

# kubectl, the schemas of Kubernetes and of compose, hadolint, promtool: whatever is not installed is skipped and named.
MANIFESTS := tests/deploy/clusters tests/deploy/test_compose.py tests/deploy/test_compose_interpreter.py tests/deploy/test_monitoring.py \
	tests/deploy/monitoring/test_alerts.py tests/deploy/monitoring/test_dashboards.py tests/deploy/test_nats_config.py
check: $(STAMP)  ## check style, types, allowed imports, and every manifest, dashboard and rule of deploy/ with the real tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q --no-header $(MANIFESTS)

lines:  ## count lines, files and words beside the budget; never fails
	@$(PYTHON) tests/lines.py

# Tests that need more time or other packages than the suite has.
test-more.faults := PENSTOCK_TEST_EXAMPLES=50 PENSTOCK_TEST_OUTAGE_S=60 $(BIN)/python -m pytest --timeout 3600 \
	tests/trainer/recovery/test_exactly_once.py tests/trainer/groups/test_collect.py tests/system/test_misfortunes.py
test-more.secrets := PENSTOCK_TEST_SECRETS=1 $(BIN)/python -m pytest --timeout 300 tests/system/test_secrets_left.py
test-more.images := PENSTOCK_TEST_IMAGES=1 $(BIN)/python -m pytest --timeout 900 tests/system/test_train_images.py
test-more.experts := PENSTOCK_TEST_EXPERTS=1 $(BIN)/python -m pytest --timeout 900 tests/system/test_train_routed_episodes.py
test-more.turns := PENSTOCK_TEST_TURNS=1 $(BIN)/python -m pytest --timeout 1800 tests/system/test_shared_device_run.py
test-more.verbs := PENSTOCK_TEST_VERBS=1 $(BIN)/python -m pytest --timeout 900 tests/packaging/test_working_directory.py
test-more.advice := PENSTOCK_TEST_ADVICE=1 $(BIN)/python -m pytest --timeout 900 tests/deploy/plan/test_advice.py
test-more.patches := PENSTOCK_TEST_EXAMPLES=6 $(BIN)/python -m pytest tests/rollout_service/engines/test_weight_patch.py
test-more.imports := PENSTOCK_TEST_IMPORTS=1 $(BIN)/python -m pytest -n 0 -s --timeout 600 tests/system/test_imported_runs.py
test-more.zoo := PENSTOCK_TEST_ZOO=1 $(BIN)/python -m pytest --timeout 900 tests/zoo
test-more.trackers := PENSTOCK_TEST_TRACKERS=1 .venv-trackers/bin/python -m pytest --noconftest -o addopts= tests/console/tracking/test_writers.py
test-more.environments := \
	PENSTOCK_TEST_GEM_PYTHON=$(CURDIR)/.venv-environments/gem/bin/python \
	PENSTOCK_TEST_OPENENV_PYTHON=$(CURDIR)/.venv-environments/openenv/bin/python \
	PENSTOCK_TEST_TRL_PYTHON=$(CURDIR)/.venv-environments/trl/bin/python \
	PENSTOCK_TEST_VERIFIERS_PYTHON=$(CURDIR)/.venv-environments/verifiers/bin/python \
	PENSTOCK_TEST_ENVIRONMENTS=1 \
	$(BIN)/python -m pytest --timeout 600 tests/agents/environments/adapters tests/agents/environments/test_program.py tests/system/test_train_agent.py
test-more.axe := PENSTOCK_TEST_AXE=$(CURDIR)/build/axe/node_modules/axe-core/axe.min.js $(BIN)/python -m pytest --timeout 900 tests/console/web/test_page_in_browser.py
test-more: $(STAMP) $(if $(filter trackers environments,$(NAME)),.venv-$(NAME)/.installed) $(if $(filter axe,$(NAME)),build/axe/node_modules)  ## tests with more examples or other packages: NAME=faults, secrets, images, experts, turns, patches, advice, verbs, imports, zoo, trackers, environments, axe (axe-core by npm)
	$(call named,test-more)
	$(test-more.$(NAME)) $(ARGS)

test-vllm: $(STAMP)  ## run the engine contract tests against a running vLLM server at URL (docs/vllm.md shows how to start one)
	test -n "$(URL)" || { echo "usage: make test-vllm URL=http://127.0.0.1:8000"; exit 2; }
	PENSTOCK_TEST_VLLM_URL=$(URL) $(BIN)/python -m pytest --timeout 600 tests/contracts/test_client_contract.py

test-sglang: $(STAMP) $(SGLANG)/.installed  ## run the engine contract tests against a real SGLang server on the CPU
	PENSTOCK_TEST_SGLANG=1 PENSTOCK_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python \
		$(BIN)/python -m pytest --timeout 600 tests/contracts tests/sglang

sglang-env: $(SGLANG)/.installed  ## install SGLang for CPUs in a separate environment (0.3 GB to download)

gpu-check: $(STAMP)  ## what only a GPU can show, in parts with deadlines: attention, steps, publication, a run (nine minutes; ARGS=--toy: on the CPU)
	$(BIN)/python -m tests.rigs.gpu_check $(ARGS)

gpu-carry: $(STAMP)  ## files, wheels and script of gpu-check for a machine without network: OUT=folder (ARGS=--help)
	$(BIN)/python -m tests.rigs.gpu_carry $(OUT) --wheels $(ARGS)

wheel-test: $(STAMP)  ## install only the wheel in an empty environment and run the quickstart (two minutes)
	$(BIN)/python -m tests.packaging.wheel_quickstart

mutation-proof: $(STAMP)  ## remove each guard of tests/mutation/guards.toml in a copy of the tree: a test must fail (a quarter of an hour; what is proven and unchanged is not tried again)
	$(BIN)/python -m tests.mutation.prove --write tests/mutation/proven.md

fuzz: $(STAMP)  ## property tests and the fuzzers of both HTTP APIs with 40 times as many examples, new in each run (an hour)
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --timeout 3600
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest --timeout 3600 \
		tests/reward_service/endpoints/test_openapi_fuzz.py tests/console/web/control/test_schema.py \
		tests/reward_service/rewards/test_graded_pairs.py

fuzz-files: $(STAMP)  ## mutated and generated files of strangers against each reader for FUZZ_S seconds: memory, CPU, errors
	$(BIN)/python -m tests.rigs.fuzz_files --seconds=$(FUZZ_S)

fuzz-ring: $(STAMP)  ## attack a whole run with the login of every role for FUZZ_S seconds while processes are killed (then minutes of proof)
	$(BIN)/python -m tests.rigs.fuzz.run --seconds $(FUZZ_S) --json fuzz-findings/report.json

fuzz-agents: $(STAMP)  ## random agents against the proxy with random weights: every trained token is recomputed, every end rewarded (REQUESTS=100000: 1,100 s of CPU time)
	$(BIN)/python -m tests.rigs.fuzz_agents.run --requests $(REQUESTS)

chaos: $(STAMP)  ## kill processes at random (three seeds), then audit and replay; plus a control that must fail (half an hour)
	$(BIN)/python -m pytest -m chaos --timeout 3600
	$(BIN)/python -m tests.rigs.chaos.run
	$(BIN)/python -m tests.rigs.chaos.run --without-ids --seeds 0 --steps 20 --kills 7 --points 4
	$(BIN)/python -m tests.rigs.chaos.run --without-guards --seeds 0 --steps 14 --kills 4 --points 3

soak: $(STAMP)  ## run at full speed for SOAK_S seconds (an hour) and fail when memory or bounded bytes on disk grow
	$(BIN)/python -m tests.rigs.soak --seconds $(SOAK_S)

compose-test: $(STAMP)  ## compose.yaml's profile cpu as processes in namespaces, as root: TLS, roles, restarts, audit, replay (minutes; `ip`, `unshare`)
	$(BIN)/python -m tests.rigs.compose.run

cluster-test: $(STAMP)  ## a run on hosts of its own, as root: three NATS servers, TLS, roles; FAULTS partitions, losses, skews and kills, HOLD_S seconds each (half an hour; `ip`, a C compiler)
	$(BIN)/python -m tests.rigs.cluster.run --faults $(FAULTS) --hold-s $(HOLD_S)

# Each takes minutes; what it proves and needs is the first line of its module.
$(foreach name,agents layouts nodes observe slurm,$(eval proof.$(name) := tests.rigs.proofs.$(name)))
proof.planted-failures := tests.rigs.planted_failures
proof.patches := tests.rigs.fuzz_patches --mutations 200000
proof.upgrade = tests.rigs.proofs.upgrade $(REVISION)
proof: $(STAMP)  ## a proof that takes minutes: NAME=agents, ..., upgrade (a run that older code, REVISION, began)
	$(call named,proof)
	$(BIN)/python -m $(proof.$(NAME)) $(ARGS)

# The question that each answers: benchmarks/README.md.
bench.plane := benchmarks.plane
bench.async := benchmarks.asynchrony
bench.staleness := benchmarks.staleness --all --report
bench.weights := benchmarks.weights.host_part --mb 1024 --versions 5
bench: $(STAMP)  ## measure one thing, beside a baseline: NAME=plane, async, staleness, weights
	$(call named,bench)
	$(BIN)/python -m $(bench.$(NAME)) $(ARGS)

bench-async: $(STAMP)  ## trained tokens and idle time with every bound on staleness, through the real services with simulated engines (an hour)
	$(BIN)/python -m benchmarks.asynchrony

bench-memory: $(STAMP)  ## the memory that `penstock plan` estimates, compared with measured peaks (minutes)
	$(BIN)/python -m benchmarks.trainer_memory --phases --record benchmarks/trainer_memory.json

bench-quickstart: $(STAMP)  ## run the quickstart for seeds 0, 1, 2, beside a plain script; TRL too with PEER=PYTHON
	$(BIN)/python -m benchmarks.quickstart --plain $(if $(PEER),--peer $(PEER) --threads 2)

bench-recipe: $(STAMP)  ## run a recipe for the seeds 0, 1 and 2: RECIPE=lake (minutes), smollm2 (hours); TRL beside smollm2 with PEER=PYTHON
	$(BIN)/python -m benchmarks.recipes $(RECIPE) $(if $(PEER),--peer $(PEER))

files: $(STAMP)  ## write the list of all files in CONTRIBUTING.md
	$(BIN)/python -m docs.file_list

reference: $(STAMP)  ## write the descriptions of settings that help, completion and the schema are made from
	$(BIN)/python -m penstock.deploy.write_reference

observe: $(STAMP)  ## a run (RUN=run.toml) on this machine with a Prometheus that scrapes all services; prints the addresses
	test -n "$(RUN)" || { echo "usage: make observe RUN=run.toml"; exit 2; }
	$(BIN)/python -P -m penstock.deploy.monitoring.observe $(RUN)

docs: $(VENV)/.docs  ## build the documentation site in build/docs; every warning is an error
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going -n -q . build/docs
	$(BIN)/python -m docs.self_contained build/docs
	@echo "open build/docs/index.html"

docs-test: $(STAMP)  ## run every command of README and docs that needs no GPU, docker or second machine (minutes)
	$(BIN)/python -m tests.docs.run_commands

screenshots: $(STAMP)  ## take the pictures of the page in docs/images again (needs Debian's chromium and the extra browser-tests)
	$(BIN)/python -m tests.console.web.screenshots

setup: $(STAMP)  ## create the virtual environment only

# Install the pinned torch first: its CPU build is small, other builds pull gigabytes; deepspeed is built against it.
$(STAMP): pyproject.toml constraints.txt
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel numpy
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation deepspeed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[all,dev]'
	touch $(STAMP)

# Of the documentation alone: no test needs it.
$(VENV)/.docs: $(STAMP) pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# An environment of their own: they need other versions of packages that the suite pins.
build/axe/node_modules:
	npm install --silent --prefix build/axe axe-core@4.14

.venv-trackers/.installed: pyproject.toml
	test -d .venv-trackers || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/pip install --quiet --upgrade pip
	.venv-trackers/bin/pip install --quiet -e '.[local,tensorboard,wandb,mlflow,trackio,swanlab]' pytest pytest-asyncio pytest-timeout
	touch $@

# One environment for each: they need different versions of the same packages.
.venv-environments/.installed: $(STAMP)
	for one in gem openenv trl verifiers; do test -d .venv-environments/$$one || $(PYTHON) -m venv .venv-environments/$$one; done
	.venv-environments/gem/bin/pip install --quiet gem-llm==0.1.0 -e '.[rollout]'
	.venv-environments/openenv/bin/pip install --quiet openenv==0.10.0
	.venv-environments/trl/bin/pip install --quiet -c constraints.txt torch
	.venv-environments/trl/bin/pip install --quiet trl==1.16.0
	.venv-environments/verifiers/bin/pip install --quiet uv verifiers==0.4.0
	touch $@

# --no-deps: the lock file lists every package, and SGLang's own requirements would pull gigabytes for CUDA.
$(SGLANG)/.installed: deploy/sglang_cpu/lock.txt
	test -d $(SGLANG) || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --no-deps -r deploy/sglang_cpu/lock.txt
	touch $@

clean:
	rm -rf $(VENV) $(SGLANG) .venv-trackers .venv-environments build/docs .pytest_cache .ruff_cache .hypothesis
