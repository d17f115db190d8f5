"""One court session of an upgrade: what is compared, in which way, and what follows from it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from docker.api import APIClient

from appliance.errors import FatalError, VolumeError
from appliance.host.court import report
from appliance.host.court.hearing import Hearing
from appliance.host.court.judge import Verdict
from appliance.host.court.memory import why_in_turn
from appliance.host.court.mix import Mix, mix_of
from appliance.host.court.replay import Build
from appliance.host.court.report import Record
from appliance.host.court.sides import Beside, InTurn, Side, Sides, build_of
from appliance.host.court.watch import CpuWatch, available_mib
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.start.follow import Display
from appliance.values import dataclass

DAYS = 30  # of the usage that stands for requests which are not recorded any more


class CourtError(FatalError):
    """The old image stays. `record` says why."""

    exit_code = 61

    def __init__(self, record: Record, name: str) -> None:
        verdict = record.finding.verdict
        found = "lost" if verdict is Verdict.LOST else f"was not decided ({record.finding.speeds.why})"
        message = f"the comparison of both images {found}: {name} keeps {record.old_image}"
        hint = "run it again when the machine is quiet" if verdict is Verdict.NOT_DECIDED else "see the table"
        super().__init__(message, hint=f"{hint}; `appliance upgrade --court-s 0` changes without a comparison")
        self.record = record


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared. `why_in_turn` says why both images cannot be loaded at once; empty if they can."""

    found: Found
    new_image: str
    mix: Mix
    why_in_turn: str
    limit_s: float


def seconds(text: str) -> float:
    """Parse the option `--court-s`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        message = f"not a number of seconds from 0 to 3600: {text[:40]}"
        raise argparse.ArgumentTypeError(message)
    return value


def open_case(client: APIClient, found: Found, new_image: str, status: Mapping[str, Any], limit_s: float) -> Case | str:
    """Return the case, or why there is no comparison: `limit_s` is 0, or the old image answers no completions."""
    if not limit_s:
        return "--court-s 0"
    if not status:
        return "the previous container does not answer"
    gateway = containers.gateway(client, found)
    build = build_of(gateway)
    mix = _mix(client, found, gateway, build)
    try:
        list(build.ask({"prompt": "One, two,", "max_tokens": 2}))
    except FatalError as error:
        return f"the previous container answers no completions: {error.message}"
    why = why_in_turn(
        status,
        has_gpus=found.launch is None or found.launch.gpus is not None,
        available_mib=available_mib(),
    )
    return Case(found=found, new_image=new_image, mix=mix, why_in_turn=why, limit_s=limit_s)


def _mix(client: APIClient, found: Found, gateway: Gateway, build: Build) -> Mix:
    """Return the mix of clients' requests: those of earlier sessions are left out."""
    sessions = report.sessions(client, found.id)
    try:
        rows = [
            row
            for row in gateway.requests()
            if row.get("model") == build.model and not any(first <= row["time"] <= last for first, last in sessions)
        ]
        total = gateway.get(f"/appliance/v1/usage?days={DAYS}").document.get("total")
    except NoAnswerError:
        rows, total = [], None
    return mix_of(rows, total or {})


def hear_beside(client: APIClient, case: Case, new: Found, display: Display) -> Record:
    """Compare while both are loaded. Raises CourtError if the old image stays."""
    builds = {side: build_of(containers.gateway(client, each)) for side, each in _sides(case, new).items()}
    return _hear(client, case, Beside(builds=builds, working=(case.found.id, new.id)), new, display)


def hear_in_turn(client: APIClient, case: Case, new: Found, display: Display) -> Record:
    """Compare while one is loaded at a time; `new` is. Raises CourtError if the old image stays; else the new one is
    loaded in the end."""
    ids = {side: each.id for side, each in _sides(case, new).items()}
    sides = InTurn(client, ids, Side.NEW, display)
    record = _hear(client, case, sides, new, display)
    sides.up(Side.NEW)
    return record


def _sides(case: Case, new: Found) -> dict[Side, Found]:
    return {Side.OLD: case.found, Side.NEW: new}


def _hear(client: APIClient, case: Case, sides: Sides, new: Found, display: Display) -> Record:
    sampler = CpuWatch(client).sample
    hearing = Hearing(
        sides, case.mix, limit_s=case.limit_s, sampler=sampler, tell=lambda words: display.show({"message": words})
    )
    began, finding = _now(), hearing.hear()
    record = Record(old_image=case.found.image, new_image=case.new_image, created=began, ended=_now(), finding=finding)
    try:
        report.keep(client, new.id, record, user=new.launch.user if new.launch else "")
    except VolumeError as error:  # the finding holds without its file
        display.show({"message": error.message})
    if record.finding.verdict is not Verdict.AS_GOOD:
        raise CourtError(record, case.found.short_name)
    return record


def _now() -> str:
    return datetime.now(UTC).isoformat()
