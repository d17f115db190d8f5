"""Turns the user's options and this machine's facts into a Launch. Everything that can be refused is refused here."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docker.api import APIClient
from docker.errors import NotFound
from rich.console import Console

from appliance.errors import ConfigError, UsageError
from appliance.host.docker import containers, gpus, image, ports
from appliance.host.docker.containers import Found
from appliance.host.docker.http import Gateway
from appliance.host.docker.image import Image
from appliance.host.docker.inventory import recipes_here
from appliance.host.docker.launch import DEFAULTS, PREFIX, Bind, Launch, container_name
from appliance.host.start.ask import agrees
from appliance.host.start.model_argument import Weights, understand
from appliance.host.start.preflight import volume_findings
from appliance.host.start.together import refuse_together
from appliance.reference import refuse_password
from appliance.settings import PREFIX as VARIABLE
from appliance.settings import resolve_settings
from appliance.values import dataclass

UID = 1000  # same as compose
HUB_FOLDER = "/mnt/huggingface"  # the usual place in /root is closed to other users
HUB_VARIABLE = "HF_HUB_CACHE"
PASSED = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "DOCKER_AUTH_CONFIG")
INSIDE = {"data_dir", "engine_dir", "facts_dir", "runtime_dir", "host", "port", "model"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    launch: Launch
    replaces: Found | None  # a container of the same name that has ended, or may run


def prepare(
    client: APIClient,
    options: argparse.Namespace,
    environment: Mapping[str, str],
    err: Console,
    *,
    may_run: bool = False,
) -> Prepared:
    """Return the launch. Pulls or builds the image if it does not exist, unless this is a dry run. `may_run` is True if
    a container of this name that this command started may still run. Raises FatalError."""
    found = containers.all_of_ours(client)
    taken = {each.address[1]: each.name for each in found if each.address}
    # The port of a container that may still run is its own, and is free again before the next one starts.
    own = [port for port, name in taken.items() if may_run and options.name and name == container_name(options.name)]
    recipes, hub = recipes_here(), environment.get("HF_ENDPOINT", "")
    refuse_together(
        lambda: understand(options.model, hub, recipes),
        lambda: variables(options, Weights(called="", name="", setting=None)),
        lambda: options.port in own or ports.choose(options.bind, options.port, taken),
        lambda: _asked_gpus(options),
        lambda: image.refuse_build_without_clone() if options.build else None,
        lambda: _refuse_foreign(client, options.volume),
    )
    weights = understand(options.model, hub, recipes)
    if weights.note:
        err.print(f"note: {weights.note}", markup=False, soft_wrap=True)
    settings = variables(options, weights)
    name = container_name((options.name or weights.name).removeprefix(PREFIX))
    replaces = _replaced(client, found, name, may_run=may_run)
    port = options.port if options.port in own else ports.choose(options.bind, options.port, taken)
    here = () if options.cpu else gpus.query_gpus()
    info = client.info()
    request = gpus.request(_asked_gpus(options), here, gpus.ways(info, which=shutil.which))
    wish = image.wanted(
        client, named=options.image, recipe=weights.recipe, prefix=environment.get(image.PREFIX),
        on_cpu=options.cpu or options.gpus == "none", here=here,
    )  # fmt: skip
    chosen = _image(client, wish, options, err)
    if chosen:
        gpus.check_image(chosen.reference, chosen.labels, here, request)
    binds = (*weights.binds, *_hub(environment, weights))
    hub_here = {HUB_VARIABLE: HUB_FOLDER} if binds != weights.binds else {}
    launch = Launch(
        name=name,
        image=chosen.reference if chosen else wish.reference,
        model=options.model,
        settings={**settings, **hub_here},
        passed=() if weights.is_here else tuple(word for word in PASSED if environment.get(word)),
        binds=binds,
        volume=options.volume,
        bind=options.bind,
        port=port,
        user=user(info, weights),
        gpus=request,
        restarts=options.detach,
    )
    return Prepared(launch=launch, replaces=replaces)


def _refuse_foreign(client: APIClient, volume: str) -> None:
    """Refuse a volume of another program. Raises VolumeError."""
    try:
        inspected = client.inspect_volume(volume)
    except NotFound:
        return
    users = client.containers(all=True, filters={"volume": volume})
    named = {(each.get("Names") or ["/"])[0].lstrip("/"): dict(each.get("Labels") or {}) for each in users}
    for error in volume_findings(volume, inspected, named, hint="use another one: --volume NAME"):
        raise error


def _image(client: APIClient, wish: image.Wanted, options: argparse.Namespace, err: Console) -> Image | None:
    if options.dry_run:
        return image.find_any(client, wish)
    agreed: Callable[[str], bool] = (lambda _: True) if options.yes or options.build else agrees
    return image.obtain(client, wish, err, agrees=agreed, builds=options.build)


def variables(options: argparse.Namespace, weights: Weights) -> dict[str, str]:
    """Return the container's variables, checked as the appliance would check them. Raises UsageError and
    ConfigError."""
    given = {name: value for name in ("mode", "ctx_size") if (value := getattr(options, name)) is not None}
    for word in options.set:
        name, equals, value = word.partition("=")
        name = name.strip().lower().replace("-", "_").removeprefix(VARIABLE.lower())
        if not equals or name in INSIDE:
            message = f"--set takes NAME=VALUE of a setting that this command does not set itself: {word}"
            raise UsageError(message, hint="as in --set parallel=8; `appliance serve --help` lists them")
        refuse_password(value)
        given[name] = value
    if options.fast:
        given["tune"] = "off"
    named = {f"{VARIABLE}{name.upper()}": value for name, value in given.items()}
    resolve_settings({}, named)
    chosen = {f"{VARIABLE}MODEL": weights.setting} if weights.setting else {}
    return {**DEFAULTS, **chosen, **named}


def _asked_gpus(options: argparse.Namespace) -> str | None:
    if not options.cpu:
        return None if options.gpus is None else str(options.gpus)
    if options.gpus not in (None, "none"):
        message = f"--cpu and --gpus {options.gpus} exclude each other"
        raise UsageError(message, hint="give only one of them")
    return "none"


def _replaced(client: APIClient, found: Sequence[Found], name: str, *, may_run: bool) -> Found | None:
    """Return the container of this name, or None. Raises ConfigError if it runs, unless it may, or is not ours."""
    other = next((each for each in found if each.name == name), None) or containers.by_name(client, name)
    if other is None or (other.launch and (may_run or not other.is_up)):
        return other
    if other.launch:
        at = f" at {Gateway(host=other.address[0], port=other.address[1]).url}" if other.address else ""
        message = f"the name is in use: {other.short_name} serves {other.model}{at}"
        raise ConfigError(
            message, hint=f"use it: appliance chat {other.short_name}; or start a second one: --name OTHER"
        )
    message = f"the name is in use by a container that this command did not start: {name} ({other.words})"
    raise ConfigError(message, hint="choose another one: --name OTHER")


def user(info: Mapping[str, Any], weights: Weights) -> str:
    """Return the user for the container: the caller with group 0, so that files which only the caller may read can be
    read.

    In a rootless daemon root is the caller. If the caller is root, it is compose's user, or the owner of weights that
    others may not read.
    """
    if any("rootless" in option for option in info.get("SecurityOptions") or ()):
        return "0:0"
    if uid := os.getuid():
        return f"{uid}:0"
    private = [found.st_uid for bind in weights.binds if not (found := Path(bind.source).stat()).st_mode & 0o004]
    return f"{private[0] if private else UID}:0"


def is_open_to_all(launch: Launch) -> bool:
    """True if other machines can reach it without a key."""
    asks = launch.settings.get(f"{VARIABLE}AUTH", "on").lower() not in containers.AUTH_OFF
    return not asks and not (launch.bind.startswith("127.") or launch.bind == "::1")


def _hub(environment: Mapping[str, str], weights: Weights) -> tuple[Bind, ...]:
    """Return the bind of Hugging Face's cache on this machine, so that models fetched by name are read from there.
    Empty if there is none, or if the model is a local file."""
    if weights.is_here:
        return ()
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME", "/root")) / ".cache/huggingface")
    folder = Path(environment.get(HUB_VARIABLE) or home / "hub")
    return (Bind(source=str(folder.resolve()), target=HUB_FOLDER),) if folder.is_dir() else ()
