"""`appliance upgrade`: replaces a container by one of a newer image on the same volume and compares the speed; `--back`
undoes it.

The previous container is kept, stopped, and with it its image: going back builds and downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from docker.api import APIClient
from rich.console import Console

from appliance.console.terminal import Terminal
from appliance.errors import ConfigError, FatalError, UsageError
from appliance.host.docker import containers, image
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.docker.image import Image
from appliance.host.docker.launch import BEFORE, GRACE_S, Launch
from appliance.host.start.ask import agrees
from appliance.host.start.follow import display_on, refuse_ended, until_ready
from appliance.host.start.start import start
from appliance.host.verbs.compare import SpeedChange, labels_changed, plan_changed, speeds_changed
from appliance.settings import process_environment
from appliance.values import dataclass

ASIDE = "-replaced"  # suffix of the previous container's name until the new one serves
POLL_S = 0.5
TUNING = "/appliance/v1/tuning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    containers.add_name(parser)
    parser.add_argument("--image", metavar="IMAGE", help="image to change to (default: the newest of the same name)")
    parser.add_argument(
        "--back", action="store_true", help="return to the previous container; a second time returns to the new one"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not compare speeds; measure later, when idle")
    parser.add_argument("--yes", "-y", action="store_true", help="build the image without asking")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an upgrade. `before` and `after` are status documents."""

    name: str
    labels: dict[str, tuple[str, str]]
    before: dict[str, Any]
    after: dict[str, Any]
    why_not_compared: str | None

    @property
    def speeds(self) -> tuple[SpeedChange, ...]:
        return speeds_changed(self.before, self.after)


def run(options: argparse.Namespace) -> int:
    if options.back and options.image:
        message = f"--back and --image exclude each other: {options.image}"
        raise UsageError(message, hint="--back returns to the previous container")
    environment, err = process_environment(), Terminal(stderr=True, highlight=False)
    with connected(environment) as client:
        found = containers.choose(containers.all_of_ours(client), containers.name_in(options))
        launch = found.launch
        if launch is None:
            message = f"{found.name} was not started by `appliance run`, or by another version of it"
            raise ConfigError(message, hint="stop it and start it with `appliance run`")
        if options.back:
            outcome = _go_back(client, found, err)
        else:
            newer = _newer(client, found, launch, options, err)
            if newer is None:
                print(
                    json.dumps({"upgraded": None})
                    if options.json
                    else f"{found.short_name} is up to date: {found.image}"
                )
                return 0
            outcome = _upgrade(client, found, replace(launch, image=newer.reference), newer, environment, err, options)
    print(json.dumps(_document(outcome)) if options.json else _text(outcome, is_back=options.back))
    return 0


def _newer(client: APIClient, found: Found, launch: Launch, options: argparse.Namespace, err: Console) -> Image | None:
    """Return the newer image, or None if there is none. An image of a clone is built after asking: only the build tells
    whether it is newer."""
    reference = options.image or launch.image
    wish = image.of_running(reference, found.labels, is_named=bool(options.image))
    here = image.find(client, reference)
    is_newest = wish.published is not None and wish.reference == reference  # a digest names one image for ever
    if here is None or (here.id == found.image_id and not is_newest):
        here = _brought(client, wish, options, err, is_here=here is not None) or here
    if here is None:
        message = f"no such image: {reference}"
        raise ConfigError(message, hint="`appliance run` gets one, or name one: --image IMAGE")
    return here if here.id != found.image_id else None


def _brought(
    client: APIClient, wish: image.Wanted, options: argparse.Namespace, err: Console, *, is_here: bool
) -> Image | None:
    if wish.can_be_pulled:
        return image.pull(client, wish, err, may_fail=is_here)
    if not (wish.cell and image.has_builder()):
        return None
    if not (options.yes or agrees(f"Build {wish.reference} from this clone? Unchanged parts are reused")):
        err.print("nothing is built; build it with --yes", markup=False)
        return None
    return image.build(client, wish, err, agrees=lambda _: True)


def _upgrade(
    client: APIClient,
    found: Found,
    launch: Launch,
    newer: Image,
    environment: Mapping[str, str],
    err: Console,
    options: argparse.Namespace,
) -> Outcome:
    before = _status(client, found)
    _set_aside(client, found, err)
    try:
        gateway = start(client, launch, environment, err, fixed_port=True)
    except (FatalError, KeyboardInterrupt):
        _restore(client, found, err)
        raise
    _keep_as_before(client, found)
    now = containers.choose(containers.all_of_ours(client), launch.name)
    why = "--no-measure" if options.no_measure else _measured(client, now, gateway, err)
    labels = labels_changed(found.labels, newer.labels)
    return Outcome(
        name=found.short_name, labels=labels, before=before, after=_status(client, now), why_not_compared=why
    )


def _set_aside(client: APIClient, found: Found, err: Console) -> None:
    err.print(f"stopping {found.short_name}: running answers get {GRACE_S} s", markup=False)
    if left_behind := containers.by_name(client, found.name + ASIDE):  # left by a killed upgrade
        containers.remove(client, left_behind)
    client.stop(found.id, timeout=GRACE_S)
    client.rename(found.id, found.name + ASIDE)


def _restore(client: APIClient, found: Found, err: Console) -> None:
    """Start the previous container again. The error that continues says why the new one failed."""
    err.print(f"the new container did not start: {found.short_name} is started again as before", markup=False)
    if failed := containers.by_name(client, found.name):
        containers.remove(client, failed)
    client.rename(found.id, found.name)
    client.start(found.id)


def _keep_as_before(client: APIClient, found: Found) -> None:
    if older := containers.by_name(client, found.name + BEFORE):
        containers.remove(client, older)
    client.rename(found.id, found.name + BEFORE)


def _go_back(client: APIClient, found: Found, err: Console) -> Outcome:
    """Swap the current and the previous container."""
    other = containers.by_name(client, found.name + BEFORE)
    if other is None:
        message = f"{found.short_name} has no previous container: it was not upgraded"
        raise ConfigError(message, hint="`appliance upgrade` creates one")
    before = _status(client, found)
    _set_aside(client, found, err)
    client.rename(other.id, found.name)
    try:
        containers.set_restarts(client, other.id, restarts=False)
        client.start(other.id)
        now = containers.choose(containers.all_of_ours(client), found.name)
        host, port = now.address or ("127.0.0.1", 0)
        with display_on(err) as display:
            until_ready(client, other.id, Gateway(host=host, port=port), display)
        containers.set_restarts(client, other.id, restarts=bool(now.launch and now.launch.restarts))
    except (FatalError, KeyboardInterrupt):
        client.rename(other.id, found.name + BEFORE)
        client.stop(other.id, timeout=GRACE_S)
        client.rename(found.id, found.name)
        client.start(found.id)
        raise
    client.rename(found.id, found.name + BEFORE)
    labels = labels_changed(found.labels, other.labels)
    return Outcome(
        name=found.short_name, labels=labels, before=before, after=_status(client, now), why_not_compared=None
    )


def _status(client: APIClient, found: Found) -> dict[str, Any]:
    """Return the status document; empty if the appliance does not answer."""
    try:
        return containers.gateway(client, found).document("status")
    except NoAnswerError:
        return {}


def _measured(client: APIClient, found: Found, gateway: Gateway, err: Console) -> str | None:
    """Start measuring and wait for its end. Returns None once it is measured, else why there is nothing to compare."""
    with display_on(err) as display:
        while True:
            refuse_ended(client, found.id)
            try:
                reply = gateway.ask("POST", TUNING, {})
                measurements = len(gateway.document("tuning").get("measurements", ()))
            except NoAnswerError as error:
                display.show({"message": f"no answer: {error}"})
            else:
                if reply.document.get("state") == "measured":
                    return None
                if isinstance(refusal := reply.document.get("error"), dict):
                    return str(refusal.get("message"))
                display.show({"message": f"measuring the new image: {measurements} measurements so far"})
            time.sleep(POLL_S)


def _document(outcome: Outcome) -> dict[str, Any]:
    speeds = [
        {"what": each.what, "unit": each.unit, "before": each.before, "after": each.after, "is_slower": each.is_slower}
        for each in outcome.speeds
    ]
    plan = plan_changed(outcome.before, outcome.after)
    row = {"upgraded": outcome.name, "changed": {**outcome.labels, **plan}, "speeds": speeds}
    return {**row, "why_not_compared": _why_not(outcome)}


def _why_not(outcome: Outcome) -> str | None:
    if outcome.speeds:
        return None
    if not ((outcome.before.get("speeds") or {}).get("measured")):
        return "nothing was measured before the upgrade"
    return outcome.why_not_compared or "no depth or job was measured with both"


def _text(outcome: Outcome, *, is_back: bool) -> str:
    lines = [f"{outcome.name} is {'back' if is_back else 'upgraded'}; volume, key and profiles are the same"]
    changed = {**outcome.labels, **plan_changed(outcome.before, outcome.after)}
    lines += [f"  {name}: {old} -> {new}" for name, (old, new) in changed.items()]
    if not changed:
        lines.append("  no version and no plan changed")
    slower = [each for each in outcome.speeds if each.is_slower]
    lines += [f"  {each.describe()}" for each in outcome.speeds if not each.is_slower]
    lines += [f"slower by more than 5 %: {each.describe()}" for each in slower]
    if why := _why_not(outcome):
        lines.append(f"speeds were not compared: {why}")
    again = "undoes this" if is_back else "returns to the previous one"
    return "\n".join([*lines, f"appliance upgrade {outcome.name} --back {again}"])
