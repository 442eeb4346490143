# CI runs `make check` and `make test`; the other targets are run by hand.
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
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE  # the tests start hundreds of processes: each would compile every module again

.PHONY: bench-async docs docs-test reference real-model bench-plane after-run wheel-test test-vllm test-secrets mutation-proof
.PHONY: quickstart test chaos test-sglang sglang-env check setup clean bench-quickstart bench-staleness
.PHONY: fuzz-ring bench-replay bench-patches fuzz-patches bench-sandbox bench-reward test-faults fuzz soak bench-idle bench-trainer bench-memory
.PHONY: compose-test cluster-test
.PHONY: fuzz-agents bench-agents test-trackers proof-runs-api screenshots bench-page observe proof-observe proof-slurm proof-nodes
.PHONY: bench-checkpoints test-environments test-images test-experts bench-page-overhead proof-page proof-upgrade

quickstart: $(STAMP)  ## train a tiny language model with all services on this machine
	$(BIN)/penstock quickstart

test: $(STAMP)  ## all tests, on a real nats-server and a real S3 server
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder; code=$$?; \
	if [ $$code -ne 1 ]; then exit $$code; fi; \
	echo "failed beside other tests: once more, alone. A test that passes only alone is too hasty: mend it."; \
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

test-faults: $(STAMP)  ## exactly-once tests with thousands of generated failures and outages of one minute (minutes)
	PENSTOCK_TEST_EXAMPLES=50 PENSTOCK_TEST_OUTAGE_S=60 $(BIN)/python -m pytest --timeout 3600 \
		tests/trainer/recovery/test_exactly_once.py tests/trainer/groups/test_collect.py tests/system/test_misfortunes.py

test-secrets: $(STAMP)  ## plant words as secrets in a small run and look for them in all that it leaves (a minute)
	PENSTOCK_TEST_SECRETS=1 $(BIN)/python -m pytest --timeout 300 tests/system/test_secrets_left.py

mutation-proof: $(STAMP)  ## remove each guard of docs/security.md in a copy of the tree: a test must fail (a quarter of an hour; what is proven and unchanged is not tried again)
	$(BIN)/python -m tests.mutation.prove --write docs/security.md

fuzz: $(STAMP)  ## property tests and the fuzzers of both HTTP APIs with 40 times as many examples, new in each run (an hour)
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --timeout 3600
	PENSTOCK_TEST_EXAMPLES=40 $(BIN)/python -m pytest --timeout 3600 \
		tests/reward_service/endpoints/test_openapi_fuzz.py tests/console/web/control/test_schema.py

chaos: $(STAMP)  ## kill processes at random (three seeds), then audit and replay; plus a control that must fail (half an hour)
	$(BIN)/python -m pytest -m chaos --timeout 3600
	$(BIN)/python -m tests.rigs.chaos.run
	$(BIN)/python -m tests.rigs.chaos.run --without-ids --seeds 0 --steps 20 --kills 7 --points 4
	$(BIN)/python -m tests.rigs.chaos.run --without-guards --seeds 0 --steps 14 --kills 4 --points 3

test-vllm: $(STAMP)  ## run the engine contract tests against a running vLLM server at URL (docs/vllm.md shows how to start one)
	test -n "$(URL)" || { echo "usage: make test-vllm URL=http://127.0.0.1:8000"; exit 2; }
	PENSTOCK_TEST_VLLM_URL=$(URL) $(BIN)/python -m pytest --timeout 600 tests/contracts/test_client_contract.py

test-sglang: $(STAMP) $(SGLANG)/.installed  ## run the engine contract tests against a real SGLang server on the CPU
	PENSTOCK_TEST_SGLANG=1 PENSTOCK_SGLANG_PYTHON=$(CURDIR)/$(SGLANG)/bin/python \
		$(BIN)/python -m pytest --timeout 600 tests/contracts tests/sglang

test-trackers: .venv-trackers/.installed  ## run the tracker tests with the real W&B, MLflow, trackio, SwanLab and TensorBoard, offline (two minutes to install)
	PENSTOCK_TEST_TRACKERS=1 .venv-trackers/bin/python -m pytest --noconftest -o addopts= tests/console/tracking/test_writers.py

test-environments: .venv-environments/.installed  ## play environments with the real GEM, OpenEnv, verifiers and TRL, and train an agent and tools for a step (minutes to install)
	PENSTOCK_TEST_GEM_PYTHON=$(CURDIR)/.venv-environments/gem/bin/python \
	PENSTOCK_TEST_OPENENV_PYTHON=$(CURDIR)/.venv-environments/openenv/bin/python \
	PENSTOCK_TEST_TRL_PYTHON=$(CURDIR)/.venv-environments/trl/bin/python \
	PENSTOCK_TEST_VERIFIERS_PYTHON=$(CURDIR)/.venv-environments/verifiers/bin/python \
	PENSTOCK_TEST_ENVIRONMENTS=1 \
		$(BIN)/python -m pytest --timeout 600 tests/rollout_service/environments/adapters tests/system/test_train_agent.py

test-images: $(STAMP)  ## train a tiny Qwen2.5-VL on rows with images through every service, audit and replay it (a minute)
	PENSTOCK_TEST_IMAGES=1 $(BIN)/python -m pytest --timeout 900 tests/system/test_train_images.py

test-experts: $(STAMP)  ## train a tiny mixture of experts on episodes with router replay through every service, audit and replay it (a minute)
	PENSTOCK_TEST_EXPERTS=1 $(BIN)/python -m pytest --timeout 900 tests/system/test_train_routed_episodes.py

sglang-env: $(SGLANG)/.installed  ## install SGLang for CPUs in a separate environment (0.3 GB to download)

bench-staleness: $(STAMP)  ## compare corrections for stale samples: missing runs, table and plot (hours)
	$(BIN)/python -m benchmarks.staleness --all --report

fuzz-ring: $(STAMP)  ## attack a whole run with the login of every role for FUZZ_S seconds while processes are killed (then minutes of proof)
	$(BIN)/python -m tests.rigs.fuzz.run --seconds $(FUZZ_S) --json fuzz-findings/report.json

fuzz-patches: $(STAMP)  ## decode 200,000 malformed weight patches, manifests and layouts under a memory limit (minutes)
	$(BIN)/python -m tests.rigs.fuzz_patches --mutations 200000

bench-patches: $(STAMP)  ## compare sparse weight patches with memcpy, full safetensors and XOR + zstd, at five densities (minutes)
	$(BIN)/python -m benchmarks.weights.patches

# kubectl, the schemas of Kubernetes and of compose, hadolint, promtool: whatever is not installed is skipped and named.
MANIFESTS := tests/deploy/clusters tests/deploy/test_compose.py tests/deploy/test_compose_interpreter.py tests/deploy/test_monitoring.py \
	tests/deploy/monitoring/test_alerts.py tests/deploy/monitoring/test_dashboards.py tests/deploy/test_nats_config.py
check: $(STAMP)  ## check style, types, allowed imports, and every manifest, dashboard and rule of deploy/ with the real tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q --no-header $(MANIFESTS)

bench-memory: $(STAMP)  ## the memory that `penstock plan` estimates, compared with measured peaks (minutes)
	$(BIN)/python -m benchmarks.trainer_memory --phases --record benchmarks/trainer_memory.json

bench-checkpoints: $(STAMP)  ## for how long training stands still for a checkpoint, written in the step and by a thread (minutes)
	$(BIN)/python -m benchmarks.checkpoints

bench-trainer: $(STAMP)  ## tokens per CPU second, peak memory and exactness of packed rows, compared with padding (minutes)
	$(BIN)/python -m benchmarks.trainer_packing
	$(BIN)/python -m benchmarks.trainer_packing --memory
	$(BIN)/python -m benchmarks.trainer_packing --error

bench-sandbox: $(STAMP)  ## measure programs per second and core in each sandbox, compared with a plain subprocess
	$(BIN)/python -m benchmarks.sandbox

bench-replay: $(STAMP)  ## time the quickstart and its replay from the record: wall and CPU seconds (minutes)
	$(BIN)/python -m benchmarks.replay --steps 30

bench-quickstart: $(STAMP)  ## run the quickstart for seeds 0, 1, 2, beside a plain script; TRL too with PEER=PYTHON
	$(BIN)/python benchmarks/quickstart.py --plain $(if $(PEER),--peer $(PEER) --threads 2)

real-model: $(STAMP)  ## train SmolLM2-135M for seeds 0, 1, 2 (hours); TRL beside it with PEER=PYTHON
	$(BIN)/python -m benchmarks.real_model $(if $(PEER),--peer $(PEER))

soak: $(STAMP)  ## run at full speed for SOAK_S seconds (an hour) and fail when memory or bounded bytes on disk grow
	$(BIN)/python -m tests.rigs.soak --seconds $(SOAK_S)

fuzz-agents: $(STAMP)  ## random agents against the proxy with random weights: every trained token is recomputed (REQUESTS=100000: ten minutes)
	$(BIN)/python -m tests.rigs.fuzz_agents.run --requests $(REQUESTS)

.PHONY: proof-agents
proof-agents: $(STAMP)  ## kill workers, proxies and an environment server at random while agents are trained: audit, replay, survivors (minutes)
	$(BIN)/python -m tests.rigs.proofs.agents

proof-runs-api: $(STAMP)  ## create, kill the console, pause, audit, resume, queue and delete real runs through the Runs API (a minute)
	$(BIN)/python -m tests.rigs.proofs.runs_api

bench-agents: $(STAMP)  ## CPU and latency that the agents' proxy adds to a request, and a thousand episodes with slow tools (two minutes)
	$(BIN)/python -m benchmarks.agent_proxy

bench-async: $(STAMP)  ## trained tokens and idle time with every bound on staleness, through the real services with simulated engines (an hour)
	$(BIN)/python -m benchmarks.asynchrony

bench-idle: $(STAMP)  ## a thousand idle workers: heartbeat latency and CPU of nats-server, with and without a busy disk (minutes)
	$(BIN)/python -m benchmarks.idle_workers

bench-plane: $(STAMP)  ## measure the path of a group from worker to trainer; PEERS=PYTHON also measures Ray and Redis
	$(BIN)/python -m benchmarks.plane $(if $(PEERS),--peers $(PEERS))

bench-reward: $(STAMP)  ## load-test HTTP rewards with slow, hung, flaky, crashing and invalid endpoints
	$(BIN)/python -m benchmarks.reward_load --rate 25

reference: $(STAMP)  ## write the descriptions of settings and flags anew that help, completion and schema are made of
	$(BIN)/python -m penstock.deploy.write_reference

observe: $(STAMP)  ## a run (RUN=run.toml) on this machine with a Prometheus that scrapes all services; prints the addresses
	test -n "$(RUN)" || { echo "usage: make observe RUN=run.toml"; exit 2; }
	$(BIN)/python -P -m penstock.deploy.monitoring.observe $(RUN)

proof-observe: $(STAMP)  ## a real run under a real Prometheus, as root: every query of the dashboards answers, seven faults make their alerts fire (a quarter of an hour)
	$(BIN)/python -m tests.rigs.proofs.observe

compose-test: $(STAMP)  ## compose.yaml's profile cpu as processes in namespaces, as root: TLS, roles, restarts, audit, replay (minutes; `ip`, `unshare`)
	$(BIN)/python -m tests.rigs.compose.run

proof-nodes: $(STAMP)  ## one trainer on two nodes, as root: two network namespaces, one killed and resumed, replayed on one node (minutes; `ip`)
	$(BIN)/python -m tests.rigs.proofs.nodes

FAULTS ?= 60
HOLD_S ?= 10
cluster-test: $(STAMP)  ## a run on hosts of its own, as root: three NATS servers, TLS, roles; FAULTS partitions, losses, skews and kills, HOLD_S seconds each (half an hour; `ip`, a C compiler)
	$(BIN)/python -m tests.rigs.cluster.run --faults $(FAULTS) --hold-s $(HOLD_S)

proof-layouts: $(STAMP)  ## the same batch in every layout of four ranks, and runs that share tokens and weights, replayed (minutes)
	$(BIN)/python -m tests.rigs.proofs.layouts

REVISION ?= 4f9f60b
proof-upgrade: $(STAMP)  ## a run that older code (REVISION) began: services replaced one by one, saved, restored and ended elsewhere (minutes)
	$(BIN)/python -m tests.rigs.proofs.upgrade $(REVISION)

proof-slurm: $(STAMP)  ## a real Slurm of one node, as root: a job is preempted, requeued and resumes (minutes; Debian's slurmctld, slurmd, slurm-client, munge)
	$(BIN)/python -m tests.rigs.proofs.slurm

after-run: $(STAMP)  ## type every command about a run after a local run has ended, and train on its rescored groups (three minutes)
	$(BIN)/python -m tests.rigs.proofs.after_run

wheel-test: $(STAMP)  ## install only the wheel in an empty environment and run the quickstart (two minutes)
	$(BIN)/python -m tests.packaging.wheel_quickstart

docs: $(VENV)/.docs  ## build the documentation site in build/docs; every warning is an error
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going -n -q . build/docs
	$(BIN)/python -m docs.self_contained build/docs
	@echo "open build/docs/index.html"

screenshots: $(STAMP)  ## take the pictures of the page in docs/images again (needs Debian's chromium and the extra browser-tests)
	$(BIN)/python -m tests.console.web.screenshots

bench-page-overhead: $(STAMP)  ## CPU seconds of the quickstart with the page open in a browser and without, in pairs (twenty minutes)
	$(BIN)/python -m benchmarks.page_overhead

proof-page: $(STAMP)  ## the page in a browser while trainer, NATS, S3, console, tracker and browser are killed at random (fifteen minutes)
	$(BIN)/python -m tests.rigs.proofs.page

bench-page: $(STAMP)  ## seconds of each view of the page on a run of 10,000 steps, 100 workers and a million trajectories (minutes)
	$(BIN)/python -m benchmarks.console_page

docs-test: $(STAMP)  ## run every command of README and docs that needs no GPU, docker or second machine (minutes)
	$(BIN)/python -m tests.docs.run_commands

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
