"""Containers of our images on this machine: which there are, what they were started with, where they answer."""

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

RECIPE = "io.appliance.recipe"  # of a model image
CELL = "io.appliance.cell"  # of every image of ours, and so of every container of one; empty on what only stands on one
KEY = f"{DATA}/secrets/api_key"
AUTH_OFF = {"off", "false", "no", "0"}
ALL_ADDRESSES = ("", "0.0.0.0", "::")  # noqa: S104


@dataclass(frozen=True, kw_only=True)
class Found:
    """A container as Docker lists it. `launch` is None for one that somebody else started."""

    id: str
    name: str
    image: str
    image_id: str
    state: str
    created_s: int
    words: str  # Docker's own: "Up 3 minutes"
    labels: dict[str, str]
    launch: Launch | None
    address: tuple[str, int] | None  # of its port on this machine

    @property
    def is_up(self) -> bool:
        """Also one that Docker starts again and again."""
        return self.state not in ("created", "exited", "dead")

    @property
    def short_name(self) -> str:
        return self.name.removeprefix(PREFIX)

    @property
    def model(self) -> str:
        """The model that its start named; the recipe of its image if somebody else started it, else empty."""
        return self.launch.model if self.launch else self.labels.get(RECIPE, "")


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add the name of a container to a verb, as a word and as the flag that every verb takes."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="of `appliance list`; the only one without it")
    parser.add_argument("--name", dest="named", metavar="NAME", help="the same as a flag, as every verb takes it")


def name_in(options: argparse.Namespace) -> str | None:
    """Return the name that was given, or None. Raises UsageError for two names."""
    if options.name and options.named and options.name != options.named:
        message = f"two containers are named: {options.name} and {options.named}"
        raise UsageError(message, hint="leave one of them away")
    name: str | None = options.name or options.named
    return name


def all_of_ours(client: APIClient) -> list[Found]:
    """All that run one of our images, newest first, whoever started them."""
    rows = client.containers(all=True, filters={"label": CELL})
    return [found for found in map(_found, rows) if found.labels.get(CELL)]


def by_name(client: APIClient, name: str) -> Found | None:
    """Whatever image it is of."""
    rows = client.containers(all=True, filters={"name": f"^/?{name}$"})
    return next((each for each in map(_found, rows) if each.name == name), None)  # a dot of the filter is any letter


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
    except (KeyError, ValueError):  # of another version of this command: it is shown, and cannot be upgraded
        return None


def _address(ports: Sequence[dict[str, Any]]) -> tuple[str, int] | None:
    for each in ports:
        if each.get("PrivatePort") == PORT and each.get("PublicPort"):
            host = str(each.get("IP", ""))
            return ("127.0.0.1" if host in ALL_ADDRESSES else host), int(each["PublicPort"])
    return None


def choose(found: Sequence[Found], name: str | None, *, running: bool = True) -> Found:
    """By its name, its short name or the beginning of one; the only one without. Raises ConfigError."""
    if name is not None:
        return _named(found, name)
    shown = [each for each in found if each.is_up] if running else list(found)
    if not shown:
        message = "no appliance runs on this machine" if running else "there is no appliance on this machine"
        raise ConfigError(message, hint="start one: appliance run qwen")
    if len(shown) > 1:
        message = f"several appliances are here: {', '.join(each.short_name for each in shown)}"
        raise ConfigError(message, hint="say which one: --name NAME")
    return shown[0]


def _named(found: Sequence[Found], name: str) -> Found:
    exact = [each for each in found if name in (each.name, each.short_name) or each.id.startswith(name)]
    begins = [each for each in found if each.short_name.startswith(name)]
    if len(exact) == 1 or (not exact and len(begins) == 1):
        return (exact or begins)[0]
    names = [each.short_name for each in found]
    near = difflib.get_close_matches(name, names, 1)
    message = f"no such appliance: {name}" if not begins else f"the name begins several: {name}"
    known = f"there are: {', '.join(names)}" if names else "there is none; start one: appliance run qwen"
    raise ConfigError(message, hint=f"perhaps you meant '{near[0]}'" if near else known)


def gateway(client: APIClient, found: Found) -> Gateway:
    """With the key. ConfigError where no port is published, VolumeError where the key cannot be had."""
    return replace(unlocked(found), key=key(client, found))


def unlocked(found: Found) -> Gateway:
    """Without the key, for what is open. ConfigError where no port is published."""
    if found.address is None:
        words = "it does not run" if not found.is_up else f"it publishes no port {PORT}"
        message = f"{found.name} cannot be asked: {words}"
        remedy = f"start it with -p 127.0.0.1:{PORT}:{PORT}, on a network that lets ports be published"
        raise ConfigError(message, hint=remedy if found.is_up else "start it again: appliance run")
    host, port = found.address
    return Gateway(host=host, port=port)


def key(client: APIClient, found: Found) -> str:
    """From the volume, through Docker: in no process list and no log. "" where none is asked for."""
    if found.launch and found.launch.settings.get("APPLIANCE_AUTH", "").lower() in AUTH_OFF:
        return ""
    try:
        chunks, _ = client.get_archive(found.id, KEY)
    except NotFound:
        return ""  # none is asked for, or it is not made yet
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
    """Docker's own: Status, ExitCode, OOMKilled, StartedAt. ConfigError for one that is gone."""
    try:
        inspected: dict[str, Any] = client.inspect_container(container_id)["State"]
    except NotFound as error:
        message = f"the container is gone: {container_id[:12]}"
        raise ConfigError(message, hint="somebody removed it meanwhile; appliance list") from error
    return inspected


def set_restarts(client: APIClient, container_id: str, *, restarts: bool) -> None:
    """Whether Docker starts it again after a crash. Only one that has served is: of a start that fails the first
    failure is told, and the next ones would be the same."""
    name, retries = (RESTARTS, RETRIES) if restarts else ("no", 0)
    policy: Any = {"Name": name, "MaximumRetryCount": retries}  # docker-py's stubs know no "no"
    with suppress(NotFound):  # gone meanwhile
        client.update_container(container_id, restart_policy=policy)


def remove(client: APIClient, found: Found) -> None:
    """Container and nothing else: the volume stays."""
    try:
        client.remove_container(found.id, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:  # being removed already
            raise
