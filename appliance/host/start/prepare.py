"""From what the user asked for and what this machine has to a Launch. All that can be refused is refused here."""

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

UID = 1000  # as compose
HUB_FOLDER = "/mnt/huggingface"  # /root, its usual place, is closed to any other user
HUB_VARIABLE = "HF_HUB_CACHE"
PASSED = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE")
INSIDE = {"data_dir", "engine_dir", "facts_dir", "runtime_dir", "host", "port", "model"}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    launch: Launch
    replaces: Found | None  # of the same name, which ended


def prepare(client: APIClient, options: argparse.Namespace, environment: Mapping[str, str], err: Console) -> Prepared:
    """Pulls or builds the image where it is not here, unless this is a dry run."""
    found = containers.all_of_ours(client)
    taken = {each.address[1]: each.name for each in found if each.address}
    recipes, hub = recipes_here(), environment.get("HF_ENDPOINT", "")
    refuse_together(
        lambda: understand(options.model, hub, recipes),
        lambda: variables(options, Weights(called="", name="", setting=None)),
        lambda: ports.choose(options.bind, options.port, taken),
        lambda: _asked_gpus(options),
        lambda: _refuse_foreign(client, options.volume),
    )
    weights = understand(options.model, hub, recipes)
    if weights.note:
        err.print(f"note: {weights.note}", markup=False, soft_wrap=True)
    settings = variables(options, weights)
    name = container_name((options.name or weights.name).removeprefix(PREFIX))
    replaces = _replaced(client, found, name)
    port = ports.choose(options.bind, options.port, taken)
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
    for error in volume_findings(volume, inspected, named, hint="another one: --volume NAME"):
        raise error


def _image(client: APIClient, wish: image.Wanted, options: argparse.Namespace, err: Console) -> Image | None:
    if options.dry_run:
        return image.find_any(client, wish)
    agreed: Callable[[str], bool] = (lambda _: True) if options.yes else agrees
    return image.obtain(client, wish, err, agrees=agreed)


def variables(options: argparse.Namespace, weights: Weights) -> dict[str, str]:
    """For the container, checked as the appliance would. Raises UsageError and ConfigError."""
    given = {name: value for name in ("mode", "ctx_size") if (value := getattr(options, name)) is not None}
    for word in options.set:
        name, equals, value = word.partition("=")
        name = name.strip().lower().replace("-", "_").removeprefix(VARIABLE.lower())
        if not equals or name in INSIDE:
            message = f"--set takes NAME=VALUE of a setting that is not the command's own: {word}"
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
        raise UsageError(message, hint="leave one of them away")
    return "none"


def _replaced(client: APIClient, found: Sequence[Found], name: str) -> Found | None:
    """The container of this name, which ended. ConfigError for one that runs, or that is not ours."""
    other = next((each for each in found if each.name == name), None) or containers.by_name(client, name)
    if other is None or (other.launch and not other.is_up):
        return other
    if other.launch:
        at = f" at {Gateway(host=other.address[0], port=other.address[1]).url}" if other.address else ""
        message = f"the name is in use: {other.short_name} serves {other.model}{at}"
        raise ConfigError(message, hint=f"appliance chat {other.short_name}, or a second one: --name OTHER")
    message = f"the name is in use by a container that this command did not start: {name} ({other.words})"
    raise ConfigError(message, hint="another one: --name OTHER")


def user(info: Mapping[str, Any], weights: Weights) -> str:
    """The caller's, with group 0: files that only the caller may read are read. Root of a rootless daemon is the
    caller. For a caller who is root it is compose's user, or the owner of weights that others may not read."""
    if any("rootless" in option for option in info.get("SecurityOptions") or ()):
        return "0:0"
    if uid := os.getuid():
        return f"{uid}:0"
    private = [found.st_uid for bind in weights.binds if not (found := Path(bind.source).stat()).st_mode & 0o004]
    return f"{private[0] if private else UID}:0"


def is_open_to_all(launch: Launch) -> bool:
    """Reachable from other machines, without a key."""
    asks = launch.settings.get(f"{VARIABLE}AUTH", "on").lower() not in containers.AUTH_OFF
    return not asks and not (launch.bind.startswith("127.") or launch.bind == "::1")


def _hub(environment: Mapping[str, str], weights: Weights) -> tuple[Bind, ...]:
    """Of what is fetched by name, a copy that Hugging Face's own tools have here is read where it lies."""
    if weights.is_here:
        return ()
    home = Path(environment.get("HF_HOME") or Path(environment.get("HOME", "/root")) / ".cache/huggingface")
    folder = Path(environment.get(HUB_VARIABLE) or home / "hub")
    return (Bind(source=str(folder.resolve()), target=HUB_FOLDER),) if folder.is_dir() else ()
