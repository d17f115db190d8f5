"""How a container is started, as data: the options for Docker and the equivalent docker command. Pure.

Hardened like compose/appliance.yaml; a test compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from appliance.documents import load, read
from appliance.host.docker.ports import PORT
from appliance.values import dataclass

DATA = "/data"
GRACE_S = 45
RETRIES = 5
RESTARTS = "on-failure"
LABEL = "io.appliance.host"  # on all containers that the host command starts; its value is the launch itself
PREFIX = "appliance-"
# a limit, not a reservation: an engine of several processes has its queues there, and Docker's default is 64 MiB
SHM_SIZE = "4g"
BEFORE = "-before"  # suffix of the name of a container that an upgrade replaced
# same as compose: running streams get half a minute, and the grace leaves time for the rest
DEFAULTS = {"APPLIANCE_DRAIN_S": "30"}
# Fields that labels of before do not have, with their values.
LATER: Mapping[str, Any] = MappingProxyType({"networks": [], "alias": ""})


@dataclass(frozen=True, kw_only=True)
class Bind:
    """A file or folder of this machine, mounted read-only in the container."""

    source: str
    target: str


@dataclass(frozen=True, kw_only=True)
class GpuRequest:
    """A request for GPUs. `driver` is Docker's: "nvidia" with indices or UUIDs (empty means all), or "cdi" with device
    names."""

    driver: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything needed to start the same container again. It contains no secret, since it is stored as a label."""

    name: str
    image: str
    model: str  # as the user typed it
    settings: dict[str, str]  # APPLIANCE_* variables
    passed: tuple[str, ...]  # variables passed by name; their values are not stored
    binds: tuple[Bind, ...]
    volume: str
    bind: str
    port: int
    user: str
    gpus: GpuRequest | None
    restarts: bool
    networks: tuple[str, ...] = ()  # joined beside Docker's own, by name
    alias: str = ""  # the container's name in them

    @property
    def short_name(self) -> str:
        return self.name.removeprefix(PREFIX)

    def as_label(self) -> str:
        # Without what few have, so that a command of before can still upgrade the rest.
        given = {name: value for name, value in asdict(self).items() if value or name not in LATER}
        return json.dumps(given, sort_keys=True)


def parse_label(text: str) -> Launch:
    """Return the launch in a label. Raises ValueError if the text is not a launch."""
    return read(Launch, {**LATER, **load(text)})


def container_name(word: str) -> str:
    """Return a name that Docker allows, made from the model's name."""
    slug = re.sub(r"[^a-z0-9_.-]+", "-", word.lower()).strip("-._")
    return PREFIX + (slug or "model")


def environment(launch: Launch, here: Mapping[str, str]) -> dict[str, str]:
    return {**launch.settings, **{name: here[name] for name in launch.passed if name in here}}


def create_options(launch: Launch, here: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for docker-py's create_container and for its create_host_config. `here` is the environment of
    this process."""
    container = {
        "image": launch.image,
        "name": launch.name,
        "user": launch.user,
        "environment": environment(launch, here),
        "labels": {LABEL: launch.as_label()},
        "ports": [PORT],
        "stop_timeout": GRACE_S,
    }
    host: dict[str, Any] = {
        "read_only": True,
        "tmpfs": {"/tmp": ""},  # noqa: S108
        "shm_size": SHM_SIZE,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "port_bindings": {PORT: (launch.bind, launch.port)},
        "binds": [f"{launch.volume}:{DATA}"],
        "mounts": [_mount(each) for each in launch.binds],
    }
    if launch.restarts:
        host["restart_policy"] = {"Name": RESTARTS, "MaximumRetryCount": RETRIES}
    if launch.gpus:
        host["device_requests"] = [_device_request(launch.gpus)]
    return container, host


def _mount(bind: Bind) -> dict[str, Any]:
    return {"Type": "bind", "Source": bind.source, "Target": bind.target, "ReadOnly": True}


def _device_request(gpus: GpuRequest) -> dict[str, Any]:
    if gpus.driver == "cdi":
        return {"Driver": "cdi", "Count": 0, "DeviceIDs": list(gpus.devices), "Capabilities": [], "Options": {}}
    count = 0 if gpus.devices else -1
    ids = list(gpus.devices)
    return {"Driver": "", "Count": count, "DeviceIDs": ids, "Capabilities": [["gpu"]], "Options": {}}


def command_line(launch: Launch) -> tuple[str, ...]:
    """Return the docker command that starts the same container, without the label. Values of `passed` variables are not
    in it."""
    words = ["docker", "run", "--detach", "--name", launch.name, "--pull", "never", "--read-only", "--tmpfs", "/tmp"]  # noqa: S108
    words += ["--shm-size", SHM_SIZE, "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]
    words += ["--user", launch.user, "--stop-timeout", str(GRACE_S)]
    if launch.restarts:
        words += ["--restart", f"{RESTARTS}:{RETRIES}"]
    if launch.gpus:
        words += _gpu_words(launch.gpus)
    for name, value in launch.settings.items():
        words += ["--env", f"{name}={value}"]
    for name in launch.passed:
        words += ["--env", name]
    words += ["--publish", f"{_in_address(launch.bind)}:{launch.port}:{PORT}", "--volume", f"{launch.volume}:{DATA}"]
    for bind in launch.binds:
        words += ["--mount", f"type=bind,{_field('source', bind.source)},{_field('target', bind.target)},readonly"]
    return (*words, launch.image)


def _gpu_words(gpus: GpuRequest) -> list[str]:
    if gpus.driver == "cdi":
        return [word for device in gpus.devices for word in ("--device", device)]
    return ["--gpus", _quoted(f"device={','.join(gpus.devices)}") if gpus.devices else "all"]


def _field(name: str, value: str) -> str:
    """Return a field of a --mount option. Docker reads the option as a row of CSV."""
    return _quoted(f"{name}={value}")


def _quoted(field: str) -> str:
    return '"' + field.replace('"', '""') + '"' if any(mark in field for mark in ',"\n') else field


def _in_address(bind: str) -> str:
    return f"[{bind}]" if ":" in bind else bind
