"""Containers of our images on this machine: which exist, how they were started, where they answer."""

from __future__ import annotations

import argparse
import difflib
import io
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from docker.api import APIClient
from docker.errors import APIError, NotFound

from appliance.errors import ConfigError, UsageError, VolumeError
from appliance.host.docker.http import Gateway
from appliance.host.docker.launch import DATA, LABEL, PREFIX, RESTARTS, RETRIES, Launch, parse_label
from appliance.host.docker.ports import PORT
from appliance.values import dataclass

RECIPE = "io.appliance.recipe"  # label of a model image
# label of all our images and so of their containers; empty on images that are only built on one of ours
CELL = "io.appliance.cell"
KEY = f"{DATA}/secrets/api_key"
AUTH_OFF = {"off", "false", "no", "0"}
ALL_ADDRESSES = ("", "0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, kw_only=True)
class Found:
    """A container as Docker lists it. `launch` is None if this command did not start it."""

    id: str
    name: str
    image: str
    image_id: str
    state: str
    created_s: int
    words: str  # Docker's words: "Up 3 minutes"
    labels: dict[str, str]
    launch: Launch | None
    address: tuple[str, int] | None  # address of its port on this machine; None if it publishes none

    @property
    def is_up(self) -> bool:
        """True if it runs, also if Docker restarts it again and again."""
        return self.state not in ("created", "exited", "dead")

    @property
    def short_name(self) -> str:
        return self.name.removeprefix(PREFIX)

    @property
    def model(self) -> str:
        """The model named at the start; the recipe of its image if this command did not start it, else empty."""
        return self.launch.model if self.launch else self.labels.get(RECIPE, "")


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the container's name to a verb, as a word and as the flag that every verb accepts."""
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="name from `appliance list`; not needed if there is only one"
    )
    parser.add_argument("--name", dest="named", metavar="NAME", help="the name as a flag, which every verb accepts")


def name_in(options: argparse.Namespace) -> str | None:
    """Return the given name, or None. Raises UsageError for two different names."""
    if options.name and options.named and options.name != options.named:
        message = f"two containers are named: {options.name} and {options.named}"
        raise UsageError(message, hint="give only one of them")
    name: str | None = options.name or options.named
    return name


def all_of_ours(client: APIClient) -> list[Found]:
    """Return all containers of our images, newest first, also those not started by this command."""
    rows = client.containers(all=True, filters={"label": CELL})
    return [found for found in map(_found, rows) if found.labels.get(CELL)]


def by_name(client: APIClient, name: str) -> Found | None:
    """Return the container of that name, of any image; None if there is none."""
    rows = client.containers(all=True, filters={"name": f"^/?{name}$"})
    # in the filter a dot matches any letter
    return next((each for each in map(_found, rows) if each.name == name), None)


def _found(row: dict[str, Any]) -> Found:
    labels = dict(row.get("Labels") or {})
    return Found(
        id=row["Id"],
        name=(row.get("Names") or ["/"])[0].lstrip("/"),
        image=row["Image"],
        image_id=row["ImageID"],
        state=row["State"],
        created_s=row["Created"],
        words=row["Status"],
        labels=labels,
        launch=_launch(labels),
        address=_address(row.get("Ports") or ()),
    )


def _launch(labels: dict[str, str]) -> Launch | None:
    try:
        return parse_label(labels[LABEL])
    # written by another version of this command: the container is shown, but cannot be upgraded
    except (KeyError, ValueError):
        return None


def _address(ports: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    for each in ports:
        if each.get("PrivatePort") == PORT and each.get("PublicPort"):
            host = str(each.get("IP", ""))
            return ("127.0.0.1" if host in ALL_ADDRESSES else host), int(each["PublicPort"])
    return None


def choose(found: Sequence[Found], name: str | None, *, running: bool = True) -> Found:
    """Return the container with that name, short name or beginning of one; without a name, the only one. Raises
    ConfigError."""
    if name is not None:
        return _named(found, name)
    shown = [each for each in found if each.is_up] if running else list(found)
    if not shown:
        message = "no appliance runs on this machine" if running else "there is no appliance on this machine"
        raise ConfigError(message, hint="start one: appliance run qwen")
    if len(shown) > 1:
        message = f"several appliances are on this machine: {', '.join(each.short_name for each in shown)}"
        raise ConfigError(message, hint="choose one: --name NAME")
    return shown[0]


def _named(found: Sequence[Found], name: str) -> Found:
    exact = [each for each in found if name in (each.name, each.short_name) or each.id.startswith(name)]
    begins = [each for each in found if each.short_name.startswith(name)]
    if len(exact) == 1 or (not exact and len(begins) == 1):
        return (exact or begins)[0]
    names = [each.short_name for each in found]
    near = difflib.get_close_matches(name, names, 1)
    message = f"no such appliance: {name}" if not begins else f"several names begin like this: {name}"
    known = f"known are: {', '.join(names)}" if names else "there is none; start one: appliance run qwen"
    raise ConfigError(message, hint=f"perhaps you meant '{near[0]}'" if near else known)


def gateway(client: APIClient, found: Found) -> Gateway:
    """Return the gateway with its key. Raises ConfigError if no port is published, VolumeError if the key cannot be
    read."""
    return replace(unlocked(found), key=key(client, found))


def unlocked(found: Found) -> Gateway:
    """Return the gateway without a key, for open routes. Raises ConfigError if no port is published."""
    if found.address is None:
        words = "it does not run" if not found.is_up else f"it publishes no port {PORT}"
        message = f"{found.name} cannot be asked: {words}"
        remedy = f"start it with -p 127.0.0.1:{PORT}:{PORT}, on a network that lets ports be published"
        raise ConfigError(message, hint=remedy if found.is_up else "start it again: appliance run")
    host, port = found.address
    return Gateway(host=host, port=port)


def key(client: APIClient, found: Found) -> str:
    """Return the key, read from the volume through Docker, so that it appears in no process list and no log. "" if none
    is required."""
    if found.launch and found.launch.settings.get("APPLIANCE_AUTH", "").lower() in AUTH_OFF:
        return ""
    try:
        chunks, _ = client.get_archive(found.id, KEY)
    except NotFound:
        return ""  # no key is required, or it does not exist yet
    text = _content(b"".join(chunks)).strip()
    if not text:
        message = f"the key file on the volume is empty: {KEY}"
        hint = f"docker exec {found.name} rm {KEY}, then stop and run it again: a new key is made"
        raise VolumeError(message, hint=hint)
    return text


def _content(archive: bytes) -> str:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is not None:
                return file.read().decode(errors="replace")
    return ""


def state(client: APIClient, container_id: str) -> dict[str, Any]:
    """Return Docker's state: Status, ExitCode, OOMKilled, StartedAt. Raises ConfigError if the container is gone."""
    try:
        inspected: dict[str, Any] = client.inspect_container(container_id)["State"]
    except NotFound as error:
        message = f"the container is gone: {container_id[:12]}"
        raise ConfigError(message, hint="it was removed meanwhile; see `appliance list`") from error
    return inspected


def set_restarts(client: APIClient, container_id: str, *, restarts: bool) -> None:
    """Set whether Docker restarts the container after a crash. Only a container that has served is restarted: if a
    start fails, later attempts would fail the same way."""
    name, retries = (RESTARTS, RETRIES) if restarts else ("no", 0)
    policy: Any = {"Name": name, "MaximumRetryCount": retries}  # docker-py's stubs lack "no"
    with suppress(NotFound):  # gone meanwhile
        client.update_container(container_id, restart_policy=policy)


def remove(client: APIClient, found: Found) -> None:
    """Remove the container only; the volume stays."""
    try:
        client.remove_container(found.id, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # already being removed
            raise
