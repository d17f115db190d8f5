"""Compares an image's configuration with the last stage of its Dockerfile: what `docker run` takes from it. Pure.

A second volume, another user or a trigger for derived images is no file, so no manifest has it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from datetime import timedelta

from images.pins import debian

INSTRUCTION = re.compile(r"^(USER|WORKDIR|VOLUME|EXPOSE|STOPSIGNAL|HEALTHCHECK|ENTRYPOINT|CMD) (.+)$", re.MULTILINE)
DURATION = re.compile(r"(\d+)(h|m|s)")
UNITS = {"h": timedelta(hours=1), "m": timedelta(minutes=1), "s": timedelta(seconds=1)}
TIMES = {
    "interval": "Interval",
    "timeout": "Timeout",
    "start-period": "StartPeriod",
    "start-interval": "StartInterval",
}
# Of a configuration, and of no Dockerfile here: the values that do nothing.
NONE_OF = {"OnBuild": None, "Shell": None, "NetworkDisabled": None}
# Said elsewhere, or of containers alone.
APART = {"Env", "Labels", "ArgsEscaped", "Hostname", "Domainname", "Image", "MacAddress"}


def given(dockerfile: str) -> dict[str, object]:
    """Returns the configuration in the engine's own form, durations in nanoseconds.

    Raises ValueError for a form that no Dockerfile of the project has.
    """
    stage = debian.STAGE.split(dockerfile.replace("\\\n", " "))[-1]
    said = dict(INSTRUCTION.findall(stage))
    return {
        "User": said["USER"],
        "WorkingDir": said["WORKDIR"],
        "Volumes": {each: {} for each in shlex.split(said["VOLUME"])},
        "ExposedPorts": {f"{each}/tcp": {} for each in said["EXPOSE"].split()},
        "StopSignal": said["STOPSIGNAL"],
        "Healthcheck": _health(said["HEALTHCHECK"]),
        "Entrypoint": json.loads(said["ENTRYPOINT"]),
        "Cmd": json.loads(said["CMD"]),
    }


def differing(config: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """Returns a line for each value that differs from the Dockerfile's or is added to them."""
    wanted = {**NONE_OF, **expected}
    names = [*wanted, *(name for name in config if name not in wanted and name not in APART)]
    return [
        f"{name}: {config.get(name)!r}, expected {wanted.get(name)!r}"
        for name in names
        if (config.get(name) or None) != (wanted.get(name) or None)
    ]


def _health(text: str) -> dict[str, object]:
    flags, _, command = text.partition(" CMD ")
    said = dict(word.removeprefix("--").split("=") for word in flags.split())
    times = {TIMES[name]: _nanoseconds(value) for name, value in said.items() if name in TIMES}
    return {"Test": ["CMD", *json.loads(command)], **times, "Retries": int(said["retries"])}


def _nanoseconds(text: str) -> int:
    total = sum((int(number) * UNITS[unit] for number, unit in DURATION.findall(text)), timedelta())
    return total // timedelta(microseconds=1) * 1000
