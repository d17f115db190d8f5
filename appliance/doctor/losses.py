"""Checks for silent losses: speed that this machine could have and does not."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from appliance.address import read_address
from appliance.doctor.check import Check, passed, warned
from appliance.errors import FatalError
from appliance.preview.preview import Preview
from appliance.probe import Gpu, Hardware
from appliance.probe.load.meter import Meter
from appliance.profile import ProfileStore, losses
from appliance.settings import Settings
from appliance.volume import read_key

ASK_S = 5.0
_BYTES_MAX = 2**20
# Losses of slots and limits have checks of their own.
SHOWN_ELSEWHERE = ("pcie_narrow", "power_limit", "other_programs", "below_prediction", "slower_build")


def speed_checks(settings: Settings, found: Preview | None) -> Iterator[Check]:
    """Yield checks of the measured speed against its prediction and against earlier images."""
    if found is None or found.profile is None:
        return
    earlier = ProfileStore(settings.profiles_dir, lambda _: None).of_other_builds(found.profile.key)
    lost = [*losses.of_speed(found.plan, found.profile), *losses.of_builds(found.plan, found.profile, earlier)]
    for loss in lost:
        yield warned("speed", loss.what, loss.hint)
    if not lost:
        yield passed("speed", f"measured: {found.profile.speed}")


def energy_check(hardware: Hardware, environment: Mapping[str, str], gpus: Sequence[Gpu]) -> Check:
    """Say whether energy can be read, else why not. It is no fault: figures of energy are then unknown."""
    meter = Meter(hardware, environment, gpus)
    meter.read()
    meter.stop()
    of = "GPUs" if gpus else "CPUs"
    return passed("energy", f"unknown: {meter.why_unknown}" if meter.why_unknown else f"the {of} tell it")


def running_checks(settings: Settings) -> Iterator[Check]:
    """Yield the losses that the appliance of this container has seen since its start; nothing if none answers."""
    for loss in _asked(settings):
        kind, what, hint = (str(loss.get(name, "")) for name in ("kind", "what", "hint"))
        if kind not in SHOWN_ELSEWHERE:
            yield warned(f"loss {kind}", what, hint)


def _asked(settings: Settings) -> list[Mapping[str, object]]:
    address = read_address(settings.address_path)
    if address is None:
        return []
    connection = http.client.HTTPConnection(*address, timeout=ASK_S)
    try:
        key = read_key(settings.key_path) if settings.auth else None
        with closing(connection):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            connection.request("GET", "/appliance/v1/status", headers=headers)
            found = json.loads(connection.getresponse().read(_BYTES_MAX))
    except (OSError, http.client.HTTPException, ValueError, RecursionError, FatalError):
        return []  # it ended a moment ago, or the key has a check of its own
    listed = found.get("losses") if isinstance(found, dict) else None
    return [loss for loss in listed if isinstance(loss, dict)] if isinstance(listed, list) else []
