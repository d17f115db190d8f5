# Two commands for users, each of which does all its own set-up: `make up` and `make test`. The rest is parts of them.
# Variables that may be given: WAIT=tuned (`up` measures at once and waits for it), CA_BUNDLE (behind an intercepting proxy), BASE (another base image), DEBIAN_MIRROR, PYTHON.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BASE ?= auto
# Where Debian's packages come from, when not from snapshot.debian.org: ROOT or ROOT@TIMESTAMP, as `images build` takes it.
DEBIAN_MIRROR ?=
# What pip, OpenSSL and requests are told on a machine behind such a proxy serves here as well.
CA_BUNDLE ?= $(firstword $(PIP_CERT) $(SSL_CERT_FILE) $(REQUESTS_CA_BUNDLE))
CELL ?= llama-cpu

IMAGE := appliance:$(CELL)
VOLUME := $(or $(APPLIANCE_VOLUME),appliance)
PROJECT := $(or $(APPLIANCE_PROJECT),appliance)
COMPOSE := APPLIANCE_IMAGE=$(IMAGE) APPLIANCE_VOLUME=$(VOLUME) docker compose --project-name $(PROJECT) -f compose/appliance.yaml$(if $(findstring -cu,$(CELL)), -f compose/gpu.yaml)
# What compose writes on all that it makes: how `clean` tells ours from a volume that somebody else filled.
OURS := --filter label=com.docker.compose.project=$(PROJECT)
PY := .venv/bin/python
PYTEST := $(PY) -m pytest
# Tests share nothing: each worker has folders, sockets and ports of its own. WORKERS=0 runs them one by one.
WORKERS ?= logical
AT_ONCE := -n $(WORKERS) --maxprocesses 8 --dist worksteal
CA := $(if $(CA_BUNDLE),--ca-bundle $(CA_BUNDLE))
MIRROR := $(if $(DEBIAN_MIRROR),--debian-mirror $(DEBIAN_MIRROR))
# The base of the CUDA 12.4 cells, whose compiler the tests try; a test says so when it cannot be had.
TRIXIE := debian:trixie-slim
FETCH := $(PY) -m images fetch demo $(CA)
# The tags that `image` made, one a line.
BUILT := .make/built

ifneq ($(filter-out tuned,$(WAIT)),)
$(error WAIT=$(WAIT) is unknown: WAIT=tuned waits until the machine is measured, without it `make up` ends with the first answer)
endif

export TESTCONTAINERS_RYUK_DISABLED ?= true

.PHONY: help up down clean venv image model check test lint drift unit process container integration verify render lock bench prune reproduce

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# `models add` runs in the service's own container, hardened as it is, so that compose makes the volume; it copies only
# what is not there already, and a copy that was interrupted is refused by its sha256.
# The id by labels: `compose ps --all` also names a container in which such a copy still runs.
# What the machine should run is for `images select` to say; a CUDA image takes half an hour to build and is not begun unasked.
up: docker image ## build or reuse the image, start it, ask it a question; WAIT=tuned: measure before the question
	@if [ "$(origin CELL)" = file ] && command -v nvidia-smi >/dev/null && cell=$$($(PY) -m images select 2>/dev/null); then \
	  echo "this machine has a GPU, and this is the image for its CPU; for the GPU: make up CELL=$${cell#*:}" >&2; fi
	@fetched=$$($(FETCH) --json) && \
	read -r sha256 file < <($(PY) -c 'import json, sys; row = json.loads(sys.argv[1]); print(row["sha256"], row["file"])' "$$fetched") && \
	$(COMPOSE) run --rm -T --no-deps appliance models add "$${file##*/}" --sha256 "$$sha256" <"$$file" && \
	APPLIANCE_MODEL=$${APPLIANCE_MODEL:-$${file##*/}} $(COMPOSE) up --detach --quiet-pull
	@$(PY) -m appliance.host.up "$$(docker ps --all --quiet $(OURS) \
	  --filter label=com.docker.compose.service=appliance --filter label=com.docker.compose.oneoff=False)" $(if $(WAIT),--wait $(WAIT))

down: ## stop it and keep the volume
	$(COMPOSE) down

clean: ## remove what make made: container, volume, image, .venv, caches (the builder's cache is Docker's own)
	-$(COMPOSE) down
	-docker volume ls --quiet $(OURS) --filter name='^$(VOLUME)$$' | xargs --no-run-if-empty docker volume rm
	@if docker volume inspect $(VOLUME) >/dev/null 2>&1; then echo "kept: volume $(VOLUME), which compose did not make for $(PROJECT)"; fi
	-sort -u $(wildcard $(BUILT)) </dev/null | xargs --no-run-if-empty docker image rm
	rm -rf .venv .make .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find appliance images tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

venv: .venv/installed ## .venv with everything, from hash-locked requirements

.venv/installed: images/locks/dev.txt images/locks/cuda-tools.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}\n\nhint: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@test ! -L .venv || { echo "error: .venv is a link, and making it anew would empty what it points to"; exit 1; } >&2
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(if $(CA_BUNDLE),--cert $(CA_BUNDLE)) --require-hashes $(foreach lock,$^,--requirement $(lock))
	@touch $@

.PHONY: docker
docker:
	@docker info >/dev/null 2>&1 || { echo "error: Docker does not answer"; echo; echo "hint: start it, and check that this user may use it: docker info"; exit 1; } >&2

image: docker venv ## build the image, or reuse it
	@mkdir -p $(dir $(BUILT))
	@$(PY) -m images build --only $(CELL) --base $(BASE) --tag $(IMAGE) $(MIRROR) $(CA) | tee -a $(BUILT)
	@sort -u -o $(BUILT) $(BUILT)

model: venv ## fetch the demo model
	@$(FETCH)

render: venv ## write images/rendered from build_matrix.yaml
	@$(PY) -m images render

lock: venv ## refresh the hash-locked requirements (Debian packages: images lock --debian)
	@$(PY) -m images lock $(CA)

check: venv ## under a minute, for every save: ruff, mypy, the fast tests with few examples of each property
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	$(PYTEST) $(AT_ONCE) --hypothesis-profile few tests/unit

test: lint drift unit process container verify ## everything that CI runs

lint: venv ## ruff, mypy; hadolint for the Dockerfiles, zizmor for the workflows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/hadolint images/rendered/*/Dockerfile images/emulator/Dockerfile images/models/Dockerfile images/scanner/Dockerfile
	.venv/bin/zizmor --offline --quiet .github/workflows
	@if docker buildx build --help 2>/dev/null | grep -q -e ' --check '; then \
	  for file in images/rendered/*/Dockerfile; do docker buildx build --check --file "$$file" . || exit 1; done; \
	else echo "skipped: docker buildx build --check: this buildx has no such option"; fi

prune: venv ## give back what builds left behind; the builder's cache with: images prune --cache
	@$(PY) -m images prune

reproduce: venv ## build CELL twice without a cache and compare the manifest digests
	@$(PY) -m images verify --reproduce $(CELL) --base $(BASE) $(MIRROR) $(CA)

drift: venv ## rendered files are what the matrix says
	$(PY) -m images render --check

unit: venv ## the fast tests: no engine, no network, no GPU
	$(PYTEST) $(AT_ONCE) tests/unit

.PHONY: trixie
trixie: docker
	@docker image inspect $(TRIXIE) >/dev/null 2>&1 || docker pull --quiet $(TRIXIE) || echo "skipped: what is tested on $(TRIXIE)"

# Some tests ask the engine itself, on this machine: what a C library here cannot run is left out, and they say so.
.PHONY: engine
engine: image
	@rm -rf .make/engine && id=$$(docker create $(IMAGE)) && docker cp --quiet $$id:/opt/llama .make/engine && docker rm $$id >/dev/null
	@.make/engine/llama-server --version >/dev/null 2>&1 || { echo "skipped: what asks the engine outside of its image, which does not run here" >&2; rm -rf .make/engine; }

process: venv model engine ## real processes on this machine, no containers
	$(PYTEST) $(AT_ONCE) tests/process

container: image model trixie ## real containers of the built image, one after the other
	$(PYTEST) tests/container

integration: process container ## both

verify: image ## prove what is inside the built image
	$(PY) -m images verify --only $(CELL) --image $(IMAGE) $(CA)

bench: image model ## time from docker run to the first token, against the bare engine
	$(PY) -m benchmarks.start
