"""Creates a container from its Launch, starts it and follows it until it answers. A container that fails is removed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from docker.api import APIClient
from docker.errors import APIError, ImageNotFound
from rich.console import Console

from appliance.errors import ConfigError, FatalError, GpuUnusableError
from appliance.host.docker import containers, ports
from appliance.host.docker.http import Gateway
from appliance.host.docker.launch import Launch, create_options
from appliance.host.docker.log_lines import read_last_words
from appliance.host.start.follow import display_on, until_ready

PORT_IN_USE = ("port is already allocated", "address already in use")
# Docker's messages without the toolkit, and the toolkit's messages if it fails.
NO_GPU = ("could not select device driver", "nvidia-container-cli", "CDI device", "libnvidia-ml")
ATTEMPTS = 20


def start(
    client: APIClient, launch: Launch, environment: Mapping[str, str], err: Console, *, fixed_port: bool
) -> Gateway:
    """Start the container and return its gateway once it answers. Raises FatalError, with the container's exit code if
    it ended."""
    id_ = begin(client, launch, environment, fixed_port=fixed_port)
    try:
        found = containers.by_name(client, launch.name)
        host, port = (found and found.address) or (launch.bind, launch.port)
        with display_on(err) as display:
            until_ready(client, id_, Gateway(host=host, port=port), display)
        containers.set_restarts(client, id_, restarts=launch.restarts)
        ready = containers.choose(containers.all_of_ours(client), launch.name)
        return containers.gateway(client, ready)
    except FatalError:
        client.remove_container(id_, force=True)
        raise


def begin(client: APIClient, launch: Launch, environment: Mapping[str, str], *, fixed_port: bool) -> str:
    """Start the container and return its id. If the port was taken meanwhile, use the next free one, unless the user
    named it."""
    taken: dict[int, str] = {}
    for _ in range(ATTEMPTS):
        id_ = _create(client, launch, environment)
        try:
            client.start(id_)
        except APIError as error:
            client.remove_container(id_, force=True)
            if not _is_about(error, PORT_IN_USE):
                raise _refused(error, launch) from error
            if fixed_port:
                raise ports.in_use(launch.bind, launch.port) from error
            taken[launch.port] = "another program"
            launch = replace(launch, port=ports.choose(launch.bind, None, taken))
        else:
            return id_
    raise ports.in_use(launch.bind, launch.port)


def _create(client: APIClient, launch: Launch, environment: Mapping[str, str]) -> str:
    container, host = create_options(launch, environment)
    host.pop("restart_policy", None)  # no restarts before it serves
    try:
        made = client.create_container(**container, host_config=client.create_host_config(**host))
    except ImageNotFound as error:
        message = f"no such image here: {launch.image}"
        raise ConfigError(message, hint="`appliance run` gets it") from error
    except APIError as error:
        raise _refused(error, launch) from error
    id_ = str(made["Id"])
    try:
        for network in launch.networks:
            client.connect_container_to_network(id_, network, aliases=[launch.alias])
    except APIError as error:
        client.remove_container(id_, force=True)
        raise _refused(error, launch) from error
    return id_


def _is_about(error: APIError, words: tuple[str, ...]) -> bool:
    return any(word in str(error.explanation or error) for word in words)


def _refused(error: APIError, launch: Launch) -> FatalError:
    said = " ".join(str(error.explanation or error).split())
    if _is_about(error, NO_GPU):
        message = f"Docker cannot give the container a GPU: {said}"
        return GpuUnusableError(message, hint="install the NVIDIA Container Toolkit, or run on the CPU: --cpu")
    if error.status_code == 409:
        message = f"the name is in use: {launch.name}"
        return ConfigError(message, hint="choose another one: --name OTHER")
    return ConfigError(f"Docker refuses to start the container: {said}", hint="see the docker command with --dry-run")


def forget_profiles(client: APIClient, launch: Launch, environment: Mapping[str, str], err: Console) -> None:
    """Delete this model's profiles on the volume with the image's own verbs, without a network. Pinned profiles
    stay."""
    rows = json.loads(_ask_image(client, launch, environment, "profiles", "list", "--json"))
    mine = [row for row in rows if is_of_model(row, launch)]
    pinned = [row["id"] for row in mine if row.get("pinned")]
    for row in mine:
        if row["id"] not in pinned:
            _ask_image(client, launch, environment, "profiles", "forget", row["id"])
    kept = f"; kept because they are pinned: {', '.join(pinned)}" if pinned else ""
    words = f"forgotten: {len(mine) - len(pinned)} of {len(rows)} profiles on volume {launch.volume}{kept}"
    err.print(words, markup=False, soft_wrap=True)


def is_of_model(row: Mapping[str, Any], launch: Launch) -> bool:
    """True if the profile is of this model, by the name under which it is served: its alias, else its file's name. For
    a recipe or a repository, whose file is not known here, every file name that begins with its name matches."""
    name = str(row.get("model", "")).casefold()
    alias = launch.settings.get("APPLIANCE_ALIAS")
    wanted = (alias or launch.model.rsplit("/", 1)[-1].partition(":")[0].removesuffix(".gguf")).casefold()
    is_file = launch.model.endswith(".gguf")
    return name == wanted if alias or is_file else name.startswith(wanted.removesuffix("-gguf"))


def _ask_image(client: APIClient, launch: Launch, environment: Mapping[str, str], *words: str) -> str:
    """Return the standard output of one verb of the image, run on the launch's volume. Raises ConfigError with its
    error message."""
    container, host = create_options(replace(launch, gpus=None, restarts=False), environment)
    host.pop("port_bindings")
    config = {**container, "name": None, "labels": {}, "command": list(words)}
    id_ = client.create_container(**config, host_config=client.create_host_config(**host, network_mode="none"))["Id"]
    try:
        client.start(id_)
        code = client.wait(id_)["StatusCode"]
        out, err = (client.logs(id_, stdout=out, stderr=not out).decode(errors="replace") for out in (True, False))
    finally:
        client.remove_container(id_, force=True, v=False)
    if code != 0:
        said = read_last_words(err)
        why = said.message or " ".join(said.before[-3:])
        message = f"`appliance {' '.join(words)}` in the image ended with code {code}: {why}"
        raise ConfigError(message, hint="start without --reset")
    return out
