"""A real registry for tests: Debian's docker-registry in a container, on a port of the loopback, gone afterwards."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import requests
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer

from tests.container.stages.containers import wait_for

BASE = "debian:bookworm-slim"
IMAGE = "appliance-test/registry"
PORT = 5000
FOLDER = "/registry"
# Debian's own configuration asks for a password.
DOCKERFILE = f"""\
FROM {BASE}
RUN apt-get update \\
 && apt-get install -y --no-install-recommends docker-registry \\
 && rm -rf /var/lib/apt/lists/*
RUN printf '%s\\n' 'version: 0.1' 'storage:' \\
      '  filesystem:' '    rootdirectory: {FOLDER}' 'http:' "  addr: ':{PORT}'" > /registry.yml
ENTRYPOINT ["docker-registry", "serve", "/registry.yml"]
"""


@contextmanager
def registry() -> Iterator[str]:
    """Yield HOST:PORT of an empty registry. Docker talks to it without TLS because it is on the loopback."""
    with registry_container() as (host, _):
        yield host


@contextmanager
def registry_container() -> Iterator[tuple[str, Container]]:
    """Yield HOST:PORT of an empty registry, and its container."""
    name = f"{IMAGE}:{uuid.uuid4().hex[:12]}"  # of its own: tests at the same time must not remove each other's
    _build(name)
    container = DockerContainer(name).with_exposed_ports(PORT)
    try:
        container.start()
        host = f"127.0.0.1:{container.get_exposed_port(PORT)}"
        wait_for(lambda: _answers(host), 90, lambda: str(container.get_logs()))
        yield host, container.get_wrapped_container()
    finally:
        container.stop()
        docker.from_env().images.remove(name, force=True)


def manifest(host: str, repository: str, reference: str) -> requests.Response:
    """Return the registry's answer for a manifest; its status is 404 if the manifest does not exist."""
    kinds = ("index", "manifest")
    accept = ", ".join(f"application/vnd.oci.image.{kind}.v1+json" for kind in kinds)
    return requests.get(f"http://{host}/v2/{repository}/manifests/{reference}", headers={"Accept": accept}, timeout=30)


def _build(name: str) -> None:
    """Build the image with the builder's cache; a second build takes a second."""
    argv = ("docker", "buildx", "build", "--quiet", "--provenance=false", "--load", "--tag", name, "-")
    done = subprocess.run(argv, input=DOCKERFILE, capture_output=True, text=True, check=False, cwd=Path("/"))
    assert done.returncode == 0, done.stderr


def _answers(host: str) -> bool:
    try:
        return requests.get(f"http://{host}/v2/", timeout=60).status_code == 200
    except requests.ConnectionError:
        return False
