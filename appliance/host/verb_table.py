"""The verbs of the machine that runs the containers: the one list of them, for both command lines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Verb(NamedTuple):
    module: str  # imported when the verb is called: `list` must not pay for `bench`
    about: str
    inside: str  # what serves the same purpose in a container, which has no Docker to ask


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "run": Verb(
            "appliance.host.verbs.run",
            "start a model in a container of this machine",
            "in here a model is served with `appliance serve`",
        ),
        "status": Verb(
            "appliance.host.verbs.status",
            "what it does now: phase, tok/s, memory, uptime",
            "in here `appliance health` says whether it serves, and GET /appliance/v1/status the rest, "
            "with the key of `appliance key`",
        ),
        "list": Verb(
            "appliance.host.verbs.list_services",
            "every appliance on this machine",
            "in here `appliance models` lists the models; outside, `docker ps` the containers",
        ),
        "chat": Verb(
            "appliance.host.verbs.chat",
            "talk to it in the terminal",
            "in here it is asked at /v1/chat/completions, with the key of `appliance key`",
        ),
        "logs": Verb("appliance.host.verbs.logs", "what it said; -f follows", "outside, `docker logs NAME` shows them"),
        "stop": Verb("appliance.host.verbs.stop", "end it; its volume stays", "outside, `docker stop NAME` ends it"),
        "bench": Verb(
            "appliance.host.bench",
            "measure prefill, decode and latency of it, or of any OpenAI endpoint",
            "in here with its URL: appliance bench http://127.0.0.1:11435/v1, and the key in OPENAI_API_KEY",
        ),
        "inject": Verb(
            "appliance.host.inject",
            "put it into the settings of an editor or another tool; --undo takes it out",
            "it changes settings of programs of that machine",
        ),
        "upgrade": Verb(
            "appliance.host.verbs.upgrade",
            "take a newer image and compare its speed; --back takes the one before",
            "outside, a newer image is started on the same volume",
        ),
        "version": Verb(
            "appliance.host.verbs.version",
            "versions of this command, of Docker and of what runs",
            "in here `appliance version` tells of the image",
        ),
    }
)
