"""Waits for both servers, with messages and a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from appliance.errors import EngineNotReadyError
from appliance.host.docker.http import Gateway, NoAnswerError
from appliance.host.provision.api import Api, RefusedError
from appliance.host.provision.served import readiness

POLL_S = 0.5
SAY_EVERY_S = 30.0
Say = Callable[[str], None]


class Saying:
    """Says each sentence once, and again after half a minute."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._said = ""
        self._said_s = 0.0

    def __call__(self, words: str) -> None:
        now = time.monotonic()
        if words != self._said or now - self._said_s >= SAY_EVERY_S:
            self._say(words)
            self._said, self._said_s = words, now


def until_up(api: Api, limit_s: float, say: Say) -> str:
    """Return the version of one-api once it answers. Raises EngineNotReadyError after the limit, with the last
    error."""
    began = time.monotonic()
    saying = Saying(say)
    while True:
        try:
            status = api.ask("GET", "/api/status").data
            return str((status or {}).get("version") or "of no version")
        except (NoAnswerError, RefusedError) as error:
            last = str(error)
        if time.monotonic() - began >= limit_s:
            message = f"one-api did not start within {limit_s:g} s: {api.url}: {last}"
            hint = "see its log; without a network it exits because it cannot load two files: docs/one-api.md"
            raise EngineNotReadyError(message, hint=hint)
        saying(f"waiting for one-api at {api.url}")
        time.sleep(POLL_S)


def until_ready(gateway: Gateway, limit_s: float, say: Say) -> None:
    """Wait until the appliance is ready. Raises EngineNotReadyError after the limit, with what the appliance was
    doing."""
    began = time.monotonic()
    saying = Saying(say)
    while True:
        document = readiness(gateway)
        if document.get("status") == "ready":
            return
        doing = _doing(document)
        if time.monotonic() - began >= limit_s:
            message = f"the appliance was not ready within {limit_s:g} s: {gateway.base}: {doing}"
            raise EngineNotReadyError(message, hint="see its log; a first download may take longer: --model-wait-s N")
        saying(f"waiting for the appliance at {gateway.base}: {doing}")
        time.sleep(POLL_S)


def _doing(document: Mapping[str, Any]) -> str:
    """Return what the appliance is doing, as in "the model is being fetched, 24 %"."""
    done, total = document.get("bytes_done"), document.get("bytes_total")
    share = f", {done / total:.0%}" if done is not None and total else ""
    return f"{document.get('message') or 'no answer'}{share}"
