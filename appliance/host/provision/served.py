"""Queries what the appliance serves: its models, their context, and the key that it accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError
from appliance.host.docker.http import READY, Gateway, NoAnswerError, Reply, refusal
from appliance.host.provision.channel import check_models
from appliance.values import dataclass


@dataclass(frozen=True, kw_only=True)
class Served:
    models: tuple[str, ...]  # names of the models, aliases included
    context: int | None  # the smallest of all models; None: no model reports it
    key: str = field(repr=False)


def readiness(gateway: Gateway) -> dict[str, Any]:
    """Return the health document, which needs no key; empty while the appliance does not answer."""
    try:
        return gateway.get(READY).document
    except NoAnswerError:
        return {}


def query_served(gateway: Gateway, key_file: Path | None) -> Served:
    """Return what a ready appliance serves. Raises ConfigError if its key is missing or refused, NoAnswerError if it is
    gone."""
    reply = gateway.get("/v1/models")
    key = ""
    if reply.status == 401:
        key = _read_key(key_file)
        reply = Gateway(host=gateway.host, port=gateway.port, key=key).get("/v1/models")
    if reply.status != 200:
        raise refusal(reply)
    return _served(reply, key)


def _served(reply: Reply, key: str) -> Served:
    rows = reply.document.get("data")
    models = [row for row in rows if isinstance(row, dict) and row.get("id")] if isinstance(rows, list) else []
    if not models:
        message = "there is no appliance at this address: /v1/models lists no model"
        raise ConfigError(message, hint="give its address with --appliance URL")
    names = [str(name) for row in models for name in (row["id"], *row.get("aliases", ()))]
    contexts = [context for row in models if (context := _context(row))]
    return Served(models=check_models(names), context=min(contexts, default=None), key=key)


def _context(row: Mapping[str, Any]) -> int | None:
    context = row.get("context_length")
    return context if isinstance(context, int) else None


def _read_key(key_file: Path | None) -> str:
    if key_file is None:
        message = "the appliance requires a key, but none was given"
        raise ConfigError(message, hint="--key-file FILE, which is secrets/api_key on the appliance's volume")
    try:
        key = key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        message = f"the appliance's key cannot be read: {key_file}: {error}"
        raise ConfigError(message, hint="mount the appliance's volume, as a user of group 0") from error
    if not key:
        message = f"the appliance's key is empty: {key_file}"
        raise ConfigError(message, hint="remove the file: the appliance creates a key when it starts")
    return key
