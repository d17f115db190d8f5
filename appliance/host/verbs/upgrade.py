"""`appliance upgrade`: replaces a container by one of a newer image on the same volume, if the newer one is as good;
`--back` undoes it.

Both images do the same work in pairs first (`../court/`). The previous container is kept, stopped, and with it its
image: going back builds and downloads nothing.
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
from appliance.host.court import session
from appliance.host.court.report import Record
from appliance.host.court.session import Case, CourtError
from appliance.host.docker import containers, image, ports
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
IN_COURT = "-court"  # suffix of the new container's name while both images are compared
COURT_S = 150.0
POLL_S = 0.5
TUNING = "/appliance/v1/tuning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    containers.add_name(parser)
    parser.add_argument("--image", metavar="IMAGE", help="image to change to (default: the newest of the same name)")
    parser.add_argument(
        "--back", action="store_true", help="return to the previous container; a second time returns to the new one"
    )
    parser.add_argument("--no-measure", action="store_true", help="do not compare speeds; measure later, when idle")
    words = "most seconds to compare the speed of both images first; 0: no comparison (default: %(default)s)"
    parser.add_argument("--court-s", metavar="SECONDS", type=session.seconds, default=COURT_S, help=words)
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
    court: Record | str  # or why there was none

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
            launch = replace(launch, image=newer.reference)
            try:
                outcome = _upgrade(client, found, launch, newer, environment, err, options)
            except CourtError as error:
                record = error.record
                print(
                    json.dumps({"upgraded": None, "court": record.document()})
                    if options.json
                    else "\n".join(record.lines())
                )
                raise
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
    case = session.open_case(client, found, newer.reference, before, options.court_s)
    # A plan that was not measured is compared with one that was not either.
    measures = not options.no_measure and (isinstance(case, str) or _is_measured(before))
    why = None if measures else "--no-measure" if options.no_measure else "nothing was measured before the upgrade"
    court: Record | str = case if isinstance(case, str) else ""
    if isinstance(case, Case) and not case.why_in_turn:
        court, why = _beside(client, case, launch, environment, err, measures=measures, why=why)
    _set_aside(client, found, err)
    try:
        gateway = start(client, launch, environment, err, fixed_port=True)
        now = containers.choose(containers.all_of_ours(client), launch.name)
        if isinstance(case, Case) and case.why_in_turn:
            err.print(f"both images take turns: {case.why_in_turn}", markup=False, soft_wrap=True)
            why = _measured(client, now, gateway, err) if measures else why
            with display_on(err) as display:
                court = session.hear_in_turn(client, case, now, display)
    except (FatalError, KeyboardInterrupt):
        _restore(client, found, err)
        raise
    _keep_as_before(client, found)
    if isinstance(case, str) and measures:
        why = _measured(client, now, gateway, err)
    labels = labels_changed(found.labels, newer.labels)
    after = _status(client, now)
    return Outcome(name=found.short_name, labels=labels, before=before, after=after, why_not_compared=why, court=court)


def _beside(
    client: APIClient,
    case: Case,
    launch: Launch,
    environment: Mapping[str, str],
    err: Console,
    *,
    measures: bool,
    why: str | None,
) -> tuple[Record, str | None]:
    """Compare both images while the previous container keeps serving. Raises CourtError if the old one stays."""
    name = case.found.name + IN_COURT
    if left_behind := containers.by_name(client, name):  # left by a killed upgrade
        containers.remove(client, left_behind)
    taken = {each.address[1]: each.name for each in containers.all_of_ours(client) if each.address}
    port = ports.choose(launch.bind, None, taken)
    candidate = replace(launch, name=name, port=port, networks=(), alias="", restarts=False)
    err.print(f"{case.found.short_name} keeps serving while both images are compared", markup=False)
    try:
        gateway = start(client, candidate, environment, err, fixed_port=False)
        new = containers.choose(containers.all_of_ours(client), name)
        why = _measured(client, new, gateway, err) if measures else why
        with display_on(err) as display:
            return session.hear_beside(client, case, new, display), why
    finally:
        if ended := containers.by_name(client, name):
            containers.remove(client, ended)


def _is_measured(status: Mapping[str, Any]) -> bool:
    return bool((status.get("speeds") or {}).get("measured"))


def _set_aside(client: APIClient, found: Found, err: Console) -> None:
    err.print(f"stopping {found.short_name}: running answers get {GRACE_S} s", markup=False)
    if left_behind := containers.by_name(client, found.name + ASIDE):  # left by a killed upgrade
        containers.remove(client, left_behind)
    client.stop(found.id, timeout=GRACE_S)
    client.rename(found.id, found.name + ASIDE)


def _restore(client: APIClient, found: Found, err: Console) -> None:
    """Start the previous container again. The error that continues says why."""
    err.print(f"the new container does not stay: {found.short_name} is started again as before", markup=False)
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
        name=found.short_name,
        labels=labels,
        before=before,
        after=_status(client, now),
        why_not_compared=None,
        court="--back",
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
    court = outcome.court
    told = {"court": None, "why_no_court": court} if isinstance(court, str) else {"court": court.document()}
    return {**row, "why_not_compared": _why_not(outcome), **told}


def _why_not(outcome: Outcome) -> str | None:
    if outcome.speeds:
        return None
    if not _is_measured(outcome.before):
        return "nothing was measured before the upgrade"
    return outcome.why_not_compared or "no depth or job was measured with both"


def _text(outcome: Outcome, *, is_back: bool) -> str:
    lines = [f"{outcome.name} is {'back' if is_back else 'upgraded'}; volume, key and profiles are the same"]
    if isinstance(outcome.court, Record):
        lines += ["both images did the same work in pairs:", *outcome.court.lines()]
    elif not is_back:
        lines.append(f"both images were not compared: {outcome.court}")
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
