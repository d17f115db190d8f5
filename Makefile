# Two commands for users, each of which does all its own set-up: `make up` and `make test`. The rest is parts of them.
# Variables that may be given: MODEL (what `up` serves: a recipe, or a model of one as in MODEL=Qwen3-8B), APPLIANCE_HOST_PORT (of this machine,
# 11435), APPLIANCE_VOLUME and APPLIANCE_PROJECT (names of volume and compose project: appliance), each setting as compose/appliance.yaml has it, CELL (on which image), WAIT=tuned (`up` measures at once and waits for it), BAKE_WEIGHTS=1 (the model in its image),
# IMAGE_PREFIX (of names of images), LAYERS (a folder with a build's layers), CA_BUNDLE (behind an intercepting proxy), HF_ENDPOINT, BASE (another base image), DEBIAN_MIRROR, WHEELS (a folder with wheels that PyPI does not have), PYTHON.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BASE ?= auto
COMMA := ,
# Where Debian's packages come from, when not from snapshot.debian.org: ROOT or ROOT@TIMESTAMP, as `images build` takes it.
DEBIAN_MIRROR ?=
# What pip, OpenSSL and requests are told on a machine behind such a proxy serves here as well.
CA_BUNDLE ?= $(firstword $(PIP_CERT) $(SSL_CERT_FILE) $(REQUESTS_CA_BUNDLE))
CELL ?= llama-cpu
DEVCONTAINER ?= cpu
# A recipe of images/models. The demo's weights are in its image: they come of a Python package, and `make up` needs no other host.
MODEL ?= demo
BAKE_WEIGHTS ?=
# Of names that are this machine's own: no registry is asked for them.
IMAGE_PREFIX ?= appliance

IMAGE := appliance:$(CELL)
VOLUME := $(or $(APPLIANCE_VOLUME),appliance)
PROJECT := $(or $(APPLIANCE_PROJECT),appliance)
compose = APPLIANCE_IMAGE=$(1) APPLIANCE_VOLUME=$(VOLUME) docker compose --project-name $(PROJECT) -f compose/appliance.yaml$(2)
COMPOSE := $(call compose,$(IMAGE),$(if $(findstring -cu,$(CELL)), -f compose/gpu.yaml))
# What compose writes on all that it makes: how `clean` tells ours from a volume that somebody else filled.
OURS := --filter label=com.docker.compose.project=$(PROJECT)
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# What fails for want of time beside other tests runs once more, alone, and is named: tests/once_more.py.
PATIENT = $(PY) -m tests.once_more $@
# Tests share nothing: each worker has folders, sockets and ports of its own. WORKERS=0 runs them one by one.
WORKERS ?= logical
AT_ONCE := --maxprocesses 8 --dist worksteal
TWO_AT_ONCE = $(MAKE) --no-print-directory --jobs 2
KEPT_BACK ?=
kept_back = $(if $(filter $@,$(KEPT_BACK)),code=0; $(1) >.make/$@.log 2>&1 || code=$$?; cat .make/$@.log; exit $$code,$(1))
# Process tests wait half of their time for engines and clocks: three times as many workers as CPUs.
WAITING ?= $(if $(filter logical,$(WORKERS)),$(shell echo $$((3 * $$(nproc)))),$(WORKERS))
THOROUGH := --hypothesis-profile thorough
CA := $(if $(CA_BUNDLE),--ca-bundle $(CA_BUNDLE))
MIRROR := $(if $(DEBIAN_MIRROR),--debian-mirror $(DEBIAN_MIRROR))
# What a stage took, test by test; the names of the slowest on the screen, the rest in a file.
REPORT = --durations=20 --durations-min=1 --junitxml=.make/junit/$@.xml
# Container tests of the build half are left out, and named, unless ALL=1 or a change since the commit SINCE may concern them.
ALL ?=
SINCE ?=
BUILD_HALF := build_matrix.yaml docker-bake.json images .devcontainer tests/container
changed = $(if $(ALL),all,$(if $(SINCE),$(shell git diff --name-only '$(SINCE)' -- $(BUILD_HALF) || echo unknown)))
# The base of the CUDA 12.4 cells, whose compiler the tests try; a test says so when it cannot be had.
TRIXIE := debian:trixie-slim
HUB := $(if $(HF_ENDPOINT),--hub $(HF_ENDPOINT))
FETCH := $(PY) -m images fetch demo $(CA)
# A folder with a build's layers, for a machine whose builder has none: read if it is there, else written.
LAYERS ?=
CACHE := $(if $(LAYERS),$(if $(wildcard $(LAYERS)/index.json),--cache-from type=local$(COMMA)src=$(LAYERS),--cache-to type=local$(COMMA)dest=$(LAYERS)$(COMMA)mode=max))
BUILD := $(PY) -m images build --base $(BASE) $(MIRROR) $(CA) $(CACHE) $(if $(WHEELS),--wheels '$(WHEELS)')
# The tags that `image` and `up` made, one a line.
BUILT := .make/built

ifneq ($(filter-out tuned,$(WAIT)),)
$(error WAIT=$(WAIT) is unknown: WAIT=tuned waits until the machine is measured, without it `make up` ends with the first answer)
endif

export TESTCONTAINERS_RYUK_DISABLED ?= true
# Where it is set, each worker compiles every test anew, and each process that a test starts the whole appliance.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help devcontainer-verify up down clean venv image model check test lint drift unit properties mutants process container integration verify render lock bench prune reproduce release web

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# What the machine should run is for `images select` to say, where nobody named a cell. The demo is for a first look: a
# CUDA image takes half an hour to build and is not begun for it. `choose` says the cell, and keeps the losers to itself.
ifneq ($(origin CELL),file)
choose := echo $(CELL)
else
choose := if [ "$$recipe" = demo ]; then \
  { ! command -v nvidia-smi >/dev/null || ! cell=$$($(PY) -m images select 2>/dev/null) || \
  echo "this machine has a GPU, and this is the image for its CPU; for the GPU: make up CELL=$${cell\#*:}" >&2; } && echo $(CELL); \
  else $(PY) -m images select 2>.make/select | sed 's/.*://' && sed '/^not chosen:/,$$d' .make/select >&2 || \
  { cat .make/select; echo; echo "or on the CPU: make up MODEL=$(MODEL) CELL=llama-cpu"; exit 1; } >&2; fi
endif

# One look at all that would stop it, in the first second; what MODEL means is kept for `up`. Without a Python that is new
# enough the shell looks at Docker alone.
LOOK := venv
MEANT := .make/meant
TOLD := /dev/null
OLD_PYTHON := hint: sudo apt install python3 python3-venv, or make PYTHON=/path/to/python3.11
.PHONY: preflight
preflight:
	@mkdir -p $(dir $(MEANT))
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  $(PYTHON) -m appliance.host.start.preflight $(LOOK) --path 'CA_BUNDLE=$(CA_BUNDLE)' --path 'WHEELS=$(WHEELS)' >$(TOLD); \
	else \
	  found=$$($(PYTHON) --version 2>&1) || found="there is no $(PYTHON)"; \
	  printf 'error: Python 3.11 or newer is needed: %s\n\n%s\n' "$$found" '$(OLD_PYTHON)' >&2; \
	  $(if $(filter venv,$(LOOK)),,docker info >/dev/null 2>&1 || printf '\nerror: Docker does not answer\n\nhint: docker info says why\n' >&2;) \
	  exit 1; \
	fi

up: LOOK = up --model '$(MODEL)' --cell '$(if $(filter-out file,$(origin CELL))$(filter demo,$(MODEL)),$(CELL))' \
  --port '$(or $(APPLIANCE_HOST_PORT),11435)' --volume '$(VOLUME)' --project '$(PROJECT)'
up: TOLD = $(MEANT)
test: LOOK = test --cell '$(CELL)'

# The volume is compose's to make, and the model's to fill: an image fetches what it has not in it.
# The id by labels: `compose ps --all` also names containers of `compose run`.
up: preflight venv ## build or reuse the image, start it, ask it a question; MODEL=qwen: on the image for this machine; WAIT=tuned: measure first; APPLIANCE_HOST_PORT=N
	@. $(MEANT) && served="$(IMAGE_PREFIX:/=)/$$recipe" && \
	bake='$(BAKE_WEIGHTS)' && if [ "$(origin BAKE_WEIGHTS) $$recipe" = "file demo" ]; then bake=1; fi && \
	cell=$$($(choose)) && echo "appliance:$$cell" >>$(BUILT) && \
	$(BUILD) --only "$$cell" --model "$$recipe" --alias --image-prefix '$(IMAGE_PREFIX)' $${bake:+--bake-weights $${rung:+--rung "$$rung"}} $(HUB) && \
	printf '%s\n' "$$served" "$$served:$$cell" >>$(BUILT) && \
	case "$$cell" in *-cu*) gpu='-f compose/gpu.yaml' ;; *) gpu= ;; esac && \
	APPLIANCE_MODEL="$${APPLIANCE_MODEL:-$${rung:+$$recipe:$$rung}}" \
	$(call compose,"$$served", $$gpu) up --detach --quiet-pull --pull never
	@$(PY) -m appliance.host.verbs.up "$$(docker ps --all --quiet $(OURS) \
	  --filter label=com.docker.compose.service=appliance --filter label=com.docker.compose.oneoff=False)" $(if $(WAIT),--wait $(WAIT))

down: ## stop it and keep the volume
	$(COMPOSE) down

clean: ## remove what make made: container, volume, image, .venv, caches (the builder's cache is Docker's own)
	-$(COMPOSE) down
	-docker volume ls --quiet $(OURS) --filter name='^$(VOLUME)$$' | xargs --no-run-if-empty docker volume rm
	@if docker volume inspect $(VOLUME) >/dev/null 2>&1; then echo "kept: volume $(VOLUME), which compose did not make for $(PROJECT)"; fi
	-for tag in $$(sort -u $(wildcard $(BUILT)) </dev/null); do if docker image inspect "$$tag" >/dev/null 2>&1; then docker image rm "$$tag"; fi; done
	rm -rf .venv .make .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find appliance images tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

venv: .venv/installed ## .venv with everything, from hash-locked requirements

.venv/installed: images/locks/dev.txt images/locks/cuda-tools.txt | preflight
	@test ! -L .venv || { echo "error: .venv is a link, and making it anew would empty what it points to"; exit 1; } >&2
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(if $(CA_BUNDLE),--cert $(CA_BUNDLE)) --require-hashes $(foreach lock,$^,--requirement $(lock))
	@touch $@

.PHONY: docker
docker:
	@docker info >/dev/null 2>&1 || { echo "error: Docker does not answer"; echo; echo "hint: start it, and check that this user may use it: docker info"; exit 1; } >&2

image: docker venv ## build the image, or reuse it
	@mkdir -p $(dir $(BUILT))
	@$(BUILD) --only $(CELL) --tag $(IMAGE) | tee -a $(BUILT)
	@sort -u -o $(BUILT) $(BUILT)

model: venv ## fetch the demo model
	@$(FETCH)

render: venv ## write images/rendered from build_matrix.yaml
	@$(PY) -m images render

lock: venv ## refresh the hash-locked requirements (Debian packages: images lock --debian)
	@$(PY) -m images lock $(CA)

check: venv ## half a minute, for every save: ruff, mypy, the fast tests with few examples of each property
	@$(TWO_AT_ONCE) static fast

.PHONY: static fast
static: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

fast: venv
	$(PYTEST) -n $(WORKERS) $(AT_ONCE) -m fast tests/unit

# What needs the real vLLM runs in its image; all the rest drives a fake of it and is `make test`'s.
ifneq ($(filter vllm-%,$(CELL)),)
test: vllm verify ## everything that CI runs; ALL=1: also the build half's containers; CELL=vllm-cpu: what needs the real vLLM, and its image
else
# Two stages at a time: one waits while the other computes. What container tests say is shown when they have ended.
# PARTS are some of these stages, for machines that share them.
PARTS ?=
test: venv
ifeq ($(PARTS),)
	@$(TWO_AT_ONCE) lint unit drift
	@$(TWO_AT_ONCE) process container verify KEPT_BACK=container
else
	@$(TWO_AT_ONCE) $(PARTS)
endif
endif

lint: static ## ruff, mypy; hadolint for the Dockerfiles, zizmor for the workflows
	.venv/bin/hadolint images/rendered/*/Dockerfile .devcontainer/*/Dockerfile images/emulator/Dockerfile images/models/Dockerfile images/scanner/Dockerfile images/router/Dockerfile
	.venv/bin/zizmor --offline --quiet .github/workflows
	@if docker buildx build --help 2>/dev/null | grep -q -e ' --check '; then \
	  for file in images/rendered/*/Dockerfile; do docker buildx build --check --file "$$file" . || exit 1; done; \
	else echo "skipped: docker buildx build --check: this buildx has no such option"; fi

# The steps of .github/workflows/image.yml, on this machine. What is pushed is of the lock, and what was proven.
CELLS ?= $(CELL)
MODELS ?= $(sort $(basename $(notdir $(wildcard images/models/*.yaml))))
release: LOOK = test --cell '$(firstword $(CELLS))'
release: preflight venv ## REGISTRY=HOST/NAME CELLS='llama-cpu': build, prove and push cells with MODELS, then write images/published.yaml; FRESH=1: without the builder's cache
	@test -n '$(REGISTRY)' || { echo "error: no registry to push to: REGISTRY is not set"; echo; echo "hint: make release REGISTRY=ghcr.io/OWNER/appliance CELLS=llama-cpu"; exit 2; } >&2
	@set -e; for cell in $(CELLS); do \
	  $(BUILD) --only $$cell --locked $(if $(FRESH),--no-cache); \
	  $(PY) -m images verify --only $$cell $(CA); \
	  $(BUILD) --only $$cell --locked --push $(REGISTRY); \
	  for model in $(MODELS); do $(BUILD) --only $$cell --locked --push $(REGISTRY) --model $$model $$(test $$model != demo || echo --bake-weights) $(HUB); done; \
	  $(PY) -m images published --registry $(REGISTRY) --only $$cell $(foreach model,$(MODELS),--model $(model)) --merge; \
	done
	@$(PY) -m images render >/dev/null

prune: venv ## give back what builds left behind; the builder's cache with: images prune --cache
	@$(PY) -m images prune

reproduce: venv ## build CELL twice without a cache and compare the manifest digests
	@$(PY) -m images verify --reproduce $(CELL) --base $(BASE) $(MIRROR) $(CA)

drift: venv ## rendered files are what the matrix says
	$(PY) -m images render --check

unit: venv ## the fast tests with all examples and cases, and the thorough: no engine, no network, no GPU
	$(PYTEST) -n $(WORKERS) $(AT_ONCE) $(REPORT) $(THOROUGH) tests/unit

.PHONY: trixie
trixie: docker
	@docker image inspect $(TRIXIE) >/dev/null 2>&1 || docker pull --quiet $(TRIXIE) || echo "skipped: what is tested on $(TRIXIE)"

# For a gateway that runs from a checkout: its facts folder takes this as `web`.
WEB_LOCK := images/locks/web.json
web: venv ## the libraries of the pages, as an image has them, in .make/web
	@$(PY) images/builder/web_libraries.py $(WEB_LOCK) .make/web $(if $(CA_BUNDLE),--ca $(CA_BUNDLE))

# Some tests ask the engine itself, on this machine: what a C library here cannot run is left out, and they say so.
.PHONY: engine
engine: image
	@rm -rf .make/engine && id=$$(docker create $(IMAGE)) && docker cp --quiet $$id:/opt/llama .make/engine && docker rm --volumes $$id >/dev/null
	@.make/engine/llama-server --version >/dev/null 2>&1 || { echo "skipped: what asks the engine outside of its image, which does not run here" >&2; rm -rf .make/engine; }

# Once a week in a workflow: half an hour on four cores.
properties: venv ## 2,000 machines and models for each property of the planner, of which `make test` takes 60
	$(PYTEST) -n $(WORKERS) --hypothesis-profile weekly tests/process/test_plan_properties.py

# Every night in a workflow, with another seed: tests/mutants/README.md.
SEED ?= 1
COUNT ?= 60
LEAST ?= 0
mutants: venv model ## SEED=N COUNT=60: plant faults, run the tests that reach each, print those that none found; 1 if fewer than LEAST % are found
	$(PY) -m tests.mutants --seed $(SEED) --count $(COUNT) --least $(LEAST)

process: venv model engine ## real processes on this machine, no containers
	$(PATIENT) -n $(WAITING) $(AT_ONCE) $(REPORT) $(THOROUGH) tests/process

container: image model trixie ## real containers of the built image, two files at a time; ALL=1: the build half's too
	$(call kept_back,$(PATIENT) -n 2 --dist loadfile $(REPORT) $(if $(changed),,--leave-out-build-half) tests/container)

.PHONY: vllm
vllm: image ## real containers of vLLM's image (CELL=vllm-cpu): it serves the demo, and is killed
	@$(PY) -m images fetch demo --rung 135m-bf16 $(CA)
	APPLIANCE_TEST_VLLM_IMAGE=$(IMAGE) $(PYTEST) tests/container/test_container_vllm_parser.py tests/container/test_container_vllm_formats.py tests/container/test_container_vllm_hash.py tests/container/test_container_vllm_endings.py tests/container/test_container_vllm_serve.py tests/container/test_container_vllm_blocks.py tests/container/test_container_vllm_soak.py

# Two to three hours on two cores, of which ROUNDS may be made on other days: what each round of this image showed is
# kept, and judged together. Fails where a kill or a stop took longer than is promised.
SOAKED := .make/soak-$(CELL).jsonl
.PHONY: soak
soak: image ## ROUNDS=20 of each kill on the real vLLM (CELL=vllm-cpu): its processes, the container, starts at any moment
	@$(PY) -m images fetch demo --rung 135m-bf16 $(CA)
	code=0; APPLIANCE_TEST_VLLM_IMAGE=$(IMAGE) APPLIANCE_TEST_ROUNDS=$(or $(ROUNDS),20) APPLIANCE_TEST_RESULTS=$(SOAKED) $(PYTEST) tests/container/test_container_vllm_soak.py || code=$$?; \
	$(PY) -m benchmarks.soaked $(SOAKED) || code=$$?; exit $$code

integration: process container ## both

verify: image ## prove what is inside the built image
	$(PY) -m images verify --only $(CELL) --image $(IMAGE) $(CA)

# The first build of the engine takes a quarter of an hour on two cores; KEEP=1 leaves the container.
devcontainer-verify: docker ## build and enter the devcontainer (DEVCONTAINER=cpu or cuda), build the engine, rebuild after a change
	BASE='$(BASE)' CA_BUNDLE='$(CA_BUNDLE)' .devcontainer/verify $(DEVCONTAINER) --engine

bench: image model ## time from docker run to the first token, against the bare engine
	$(PY) -m benchmarks.start
