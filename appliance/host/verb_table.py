"""List of the verbs for the machine that runs the containers, used by both command lines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Verb(NamedTuple):
    module: str  # imported when the verb is called: `list` must not load what only `bench` needs
    about: str
    inside: str  # what to use instead inside a container, which cannot reach Docker


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "run": Verb(
            "appliance.host.verbs.run",
            "start a model in a container on this machine",
            "inside the container `appliance serve` serves a model",
        ),
        "status": Verb(
            "appliance.host.verbs.status",
            "show what an appliance does now: phase, tok/s, memory, uptime",
            "inside the container use `appliance health`, or GET /appliance/v1/status with the key of `appliance key`",
        ),
        "list": Verb(
            "appliance.host.verbs.list_services",
            "list all appliances on this machine",
            "inside the container `appliance models` lists models; outside, `docker ps` lists containers",
        ),
        "chat": Verb(
            "appliance.host.verbs.chat",
            "chat with the model in the terminal",
            "inside the container use /v1/chat/completions with the key of `appliance key`",
        ),
        "logs": Verb(
            "appliance.host.verbs.logs",
            "show the log of an appliance; -f follows it",
            "outside the container `docker logs NAME` shows the log",
        ),
        "stop": Verb(
            "appliance.host.verbs.stop",
            "stop an appliance; its volume stays",
            "outside the container `docker stop NAME` stops it",
        ),
        "mode": Verb(
            "appliance.host.verbs.mode",
            "show the modes of an appliance, or switch to one of them",
            "inside the container use it in the same way",
        ),
        "usage": Verb(
            "appliance.host.verbs.usage",
            "show what was used with each key: requests, tokens, time",
            "inside the container use it in the same way",
        ),
        "bench": Verb(
            "appliance.host.bench",
            "measure prefill, decode and latency of an appliance or any OpenAI endpoint",
            "inside the container: appliance bench http://127.0.0.1:11435/v1, with the key in OPENAI_API_KEY",
        ),
        "inject": Verb(
            "appliance.host.inject",
            "add the appliance to the settings of an editor or another tool; --undo removes it",
            "it changes the settings of programs on the host",
        ),
        "compose": Verb(
            "appliance.host.verbs.compose",
            "start and stop a model for `docker compose`, as the provider of a service",
            "outside the container `docker compose` calls it",
        ),
        "upgrade": Verb(
            "appliance.host.verbs.upgrade",
            "change to a newer image and compare the speed; --back undoes it",
            "outside the container, start a newer image on the same volume",
        ),
        "version": Verb(
            "appliance.host.verbs.version",
            "show versions of this command, of Docker and of running appliances",
            "inside the container `appliance version` shows the image's version",
        ),
    }
)
