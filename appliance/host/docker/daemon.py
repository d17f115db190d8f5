"""The connection to the Docker daemon, and error messages if it is missing, stopped or not allowed for this user."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import docker.utils
import requests.exceptions
from docker.api import APIClient
from docker.context import ContextAPI
from docker.errors import DockerException

from appliance.errors import ConfigError

TIMEOUT_S = 60
ADDRESS = "DOCKER_HOST"


@contextmanager
def connected(environment: Mapping[str, str]) -> Iterator[APIClient]:
    """Yield a client of the daemon that the docker command would use. Raises ConfigError, also for errors of Docker
    that no other code handles while the client is used."""
    where = address(environment)
    try:
        given = docker.utils.kwargs_from_env(environment=dict(environment))
        tls = given.get("tls") or False
        with APIClient(given.get("base_url") or where, version="auto", timeout=TIMEOUT_S, tls=tls) as client:
            yield client
    except (DockerException, requests.exceptions.RequestException, OSError) as error:
        raise explained(error, where, has_command=shutil.which("docker") is not None) from error


def address(environment: Mapping[str, str]) -> str:
    """Return DOCKER_HOST, else the address of the docker context in use. Raises ConfigError if the context cannot be
    read."""
    if where := environment.get(ADDRESS):
        return where
    try:
        context = ContextAPI.get_current_context()
    except (DockerException, OSError, ValueError) as error:
        message = f"the docker context in use cannot be read: {error}"
        hint = "`docker context ls` shows them, `docker context use default` resets it"
        raise ConfigError(message, hint=hint) from error
    return str(context.Host)


def explained(error: Exception, where: str, *, has_command: bool) -> ConfigError:
    """Return the error with a hint, by the cause that the operating system gave."""
    cause = _cause(error)
    if isinstance(cause, PermissionError):
        message = f"this user may not use Docker: no permission for {where}"
        return ConfigError(message, hint='join its group and log in again: sudo usermod -aG docker "$USER"')
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError) and not has_command:
        message = f"Docker is missing: nothing answers at {where}, and there is no docker command"
        return ConfigError(message, hint="install it: https://docs.docker.com/engine/install/")
    if isinstance(cause, FileNotFoundError | ConnectionRefusedError):
        message = f"Docker is stopped: nothing answers at {where}"
        return ConfigError(
            message, hint=f"start it: sudo systemctl start docker, or Docker Desktop; or check {ADDRESS}"
        )
    message = f"Docker returned an unexpected error: {error}"
    return ConfigError(message, hint=f"`docker info` shows why; {ADDRESS} selects another daemon")


def _cause(error: BaseException) -> BaseException:
    """Return the innermost exception: requests and urllib3 wrap the socket's exception twice, in their arguments."""
    inner = [each for each in (error.__cause__, error.__context__, *error.args) if isinstance(each, BaseException)]
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        inner.append(reason)
    for each in inner:
        deepest = _cause(each)
        if isinstance(deepest, OSError) and deepest.errno is not None:
            return deepest
    return error
