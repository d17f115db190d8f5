"""The appliance that runs on this machine: its endpoint and its key, asked of Docker.

Containers are known by the image's labels, which `docker run`, compose and the host command have in common.
"""

from __future__ import annotations

import docker
import docker.errors
import requests.exceptions
from docker.models.containers import Container

from appliance.errors import ConfigError, EngineNotReadyError
from appliance.host.endpoint import Endpoint

CELL_LABEL = "io.appliance.cell"
INNER_PORT = "11435/tcp"


def running_endpoint(name: str | None) -> Endpoint:
    """Of the container called `name`, or of the only one that runs. ConfigError where there is none or a choice."""
    try:
        container = _find(name)
        return Endpoint(base=f"http://{_address(container)}/v1", key=_key(container), key_source=_source(container))
    except docker.errors.NotFound as error:
        message = f"no such container: {name}"
        raise ConfigError(message, hint="`docker ps` shows what runs; or give a URL") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        message = f"no URL was given, and Docker does not tell what runs here: {error}"
        raise ConfigError(message, hint="give the URL of the endpoint, or start Docker") from error


def _find(name: str | None) -> Container:
    client = docker.from_env()
    if name:
        return client.containers.get(name)
    found = client.containers.list(filters={"label": CELL_LABEL})
    if len(found) == 1:
        return found[0]
    if not found:
        message = "no appliance runs on this machine, and no URL was given"
        raise ConfigError(message, hint="start one with `appliance run`, or give the URL of an endpoint")
    message = f"several appliances run here: {', '.join(sorted(str(each.name) for each in found))}"
    raise ConfigError(message, hint="choose one with --name NAME, or give its URL")


def _address(container: Container) -> str:
    published = (container.attrs["NetworkSettings"].get("Ports") or {}).get(INNER_PORT)
    if not published:
        message = f"the container publishes no port {INNER_PORT}: {container.name}"
        raise ConfigError(message, hint="start it with -p 127.0.0.1:11435:11435")
    host = published[0]["HostIp"]
    host = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host  # noqa: S104 - what it is bound to, not where we bind
    return f"[{host}]:{published[0]['HostPort']}" if ":" in host else f"{host}:{published[0]['HostPort']}"


def _key(container: Container) -> str:
    code, output = container.exec_run(["appliance", "key"], stderr=False)
    if code != 0 or not isinstance(output, bytes):
        message = f"the container does not tell its key: `appliance key` ended with code {code}"
        raise EngineNotReadyError(message, hint=f"see `docker logs {container.name}`")
    return output.decode().strip()


def _source(container: Container) -> str:
    return f"from `docker exec {container.name} appliance key`"
