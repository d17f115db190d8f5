# Two commands for users, each of which does all its own set-up: `make up` and `make test`. The rest is parts of them.
# Variables that may be given: CA_BUNDLE (behind an intercepting proxy), BASE (another base image), PYTHON.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BASE ?= auto
# What pip, OpenSSL and requests are told on a machine behind such a proxy serves here as well.
CA_BUNDLE ?= $(firstword $(PIP_CERT) $(SSL_CERT_FILE) $(REQUESTS_CA_BUNDLE))
CELL ?= llama-cpu

IMAGE := appliance:$(CELL)
VOLUME := $(or $(APPLIANCE_VOLUME),appliance)
MODEL := .make/models/SmolLM2-135M-Instruct.Q4_1.gguf
COMPOSE := APPLIANCE_IMAGE=$(IMAGE) docker compose -f compose/appliance.yaml
HARDENED := --rm -i --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --user 1000:0 --network none
PY := .venv/bin/python
CA := $(if $(CA_BUNDLE),--ca-bundle $(CA_BUNDLE))

export TESTCONTAINERS_RYUK_DISABLED ?= true

.PHONY: help up down clean venv image model test lint drift unit integration verify render lock bench prune reproduce

help: ## show this
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: docker image model ## build or reuse the image, start it, wait until it is tuned, ask it a question
	@docker volume create $(VOLUME) >/dev/null
	@if ! docker run $(HARDENED) -v $(VOLUME):/data $(IMAGE) models list --json </dev/null | grep -q '"$(notdir $(MODEL))"'; then \
	  docker run $(HARDENED) -v $(VOLUME):/data $(IMAGE) models add $(notdir $(MODEL)) <$(MODEL); fi
	@APPLIANCE_MODEL=$${APPLIANCE_MODEL:-$(notdir $(MODEL))} $(COMPOSE) up --detach --quiet-pull
	@$(PY) -m appliance.host.up "$$($(COMPOSE) ps --all --quiet appliance)"

down: ## stop it and keep the volume
	$(COMPOSE) down

clean: ## remove what make made: container, volume, images, .venv, caches (the builder's cache is Docker's own)
	-$(COMPOSE) down --volumes
	-docker volume rm $(VOLUME) 2>/dev/null
	-docker image ls --quiet --filter label=io.appliance.cell | sort -u | xargs --no-run-if-empty docker image rm --force
	rm -rf .venv .make .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	find appliance images tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

venv: .venv/installed ## .venv with everything, from hash-locked requirements

.venv/installed: images/locks/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"error: Python 3.11 or newer is needed, this is {sys.version.split()[0]}\n\nhint: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip install --quiet --disable-pip-version-check $(if $(CA_BUNDLE),--cert $(CA_BUNDLE)) --require-hashes --requirement $<
	@touch $@

.PHONY: docker
docker:
	@docker info >/dev/null 2>&1 || { echo "error: Docker does not answer"; echo; echo "hint: start it, and check that this user may use it: docker info"; exit 1; } >&2

image: docker venv ## build the image, or reuse it
	@$(PY) -m images build --only $(CELL) --base $(BASE) $(CA)

model: venv ## fetch the demo model
	@$(PY) -m images fetch demo $(CA)

render: venv ## write images/rendered from build_matrix.yaml
	@$(PY) -m images render

lock: venv ## refresh the hash-locked requirements
	@$(PY) -m images lock $(CA)

test: lint drift unit integration verify ## everything that CI runs

lint: venv ## ruff, mypy; hadolint for the Dockerfiles, actionlint and zizmor for the workflows
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/hadolint images/rendered/*/Dockerfile
	.venv/bin/actionlint .github/workflows/*.yml
	.venv/bin/zizmor --offline --quiet .github/workflows
	@if docker buildx build --help 2>/dev/null | grep -q -e ' --check '; then \
	  for file in images/rendered/*/Dockerfile; do docker buildx build --check --file "$$file" . || exit 1; done; \
	else echo "skipped: docker buildx build --check: this buildx has no such option"; fi

prune: venv ## give back what builds left behind; the builder's cache with: images prune --cache
	@$(PY) -m images prune

reproduce: venv ## build CELL twice without a cache and compare the manifest digests
	@$(PY) -m images verify --reproduce $(CELL) --base $(BASE) $(CA)

drift: venv ## rendered files are what the matrix says
	$(PY) -m images render --check

unit: venv ## no engine, no network, no GPU
	$(PY) -m pytest tests/unit

integration: image model ## real processes, and real containers of the built image
	$(PY) -m pytest tests/integration

verify: image ## prove what is inside the built image
	$(PY) -m images verify --only $(CELL) $(CA)

bench: image model ## time from docker run to the first token, against the bare engine
	$(PY) benchmarks/start.py
