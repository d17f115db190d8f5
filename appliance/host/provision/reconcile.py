"""Brings channel and token to the wanted state and reports what was done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from appliance.errors import EngineNotReadyError
from appliance.host.provision.admin import (
    Admin,
    channels_named,
    create_token,
    token_key,
    tokens_named,
    update,
    user_of,
)
from appliance.host.provision.api import RefusedError
from appliance.host.provision.channel import ENABLED, Change, Wanted, changed, only
from appliance.host.provision.secret import write_key
from appliance.values import dataclass

LISTED_S = 20.0  # one-api's cache of channels is refreshed at fixed intervals only
POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class ChannelDone:
    """`did`: created, updated, enabled, unchanged, or left disabled if a user disabled it by hand."""

    did: str
    id: int
    fields: tuple[str, ...] = ()  # names of the changed fields


@dataclass(frozen=True, kw_only=True)
class TokenDone:
    """`did`: created, unchanged, or left disabled if a user disabled it."""

    did: str
    id: int
    is_written: bool  # True: the key was just written to its file
    key: str = field(repr=False)


def reconcile_channel(admin: Admin, wanted: Wanted) -> ChannelDone:
    """Create or update the channel. Raises ConfigError if several channels have its name, RefusedError,
    NoAnswerError."""
    change = changed(wanted, channels_named(admin, wanted.name))
    if change.id is None:
        admin.create(change.fields)
        return ChannelDone(did="created", id=_made(admin, wanted))
    if change.fields:
        update(admin, change.id, change.fields)
    if change.enables:
        admin.enable(change.id)
    return ChannelDone(did=_did(change), id=change.id, fields=tuple(change.fields))


def _made(admin: Admin, wanted: Wanted) -> int:
    """Return the id of the created channel. The answer to the POST has no id, and a second channel may have been
    created meanwhile."""
    found = channels_named(admin, wanted.name)
    if not found:
        message = f"the channel '{wanted.name}' was created but is not listed"
        raise RefusedError(message)
    return int(only(found, "channel", wanted.name)["id"])


def _did(change: Change) -> str:
    if change.is_disabled_by_hand:
        return "left disabled"
    if change.fields:
        return "updated"
    return "enabled" if change.enables else "unchanged"


def reconcile_token(admin: Admin, name: str, key_file: Path | None) -> TokenDone:
    """Create the token if it is missing, and write its key to `key_file`. Raises ConfigError if several tokens have its
    name or the file cannot be written, RefusedError, NoAnswerError."""
    user = user_of(admin)
    found = tokens_named(admin, name, user)
    is_new = not found
    if is_new:
        _create_token(admin, name)
        found = tokens_named(admin, name, user)
        if not found:
            message = f"the token '{name}' was created but is not listed"
            raise RefusedError(message)
    token = only(found, "token", name)
    key = token_key(admin, token)
    is_written = key_file is not None and write_key(key_file, key)
    return TokenDone(did=_token_did(token, is_new=is_new), id=int(token["id"]), is_written=is_written, key=key)


def _token_did(token: Mapping[str, Any], *, is_new: bool) -> str:
    if is_new:
        return "created"
    return "unchanged" if token.get("status", ENABLED) == ENABLED else "left disabled"


def _create_token(admin: Admin, name: str) -> None:
    """Create the token, at the second attempt if the first fails: with PostgreSQL the first new token collides with the
    id of one-api's own initial token."""
    try:
        create_token(admin, name)
    except RefusedError:
        create_token(admin, name)


def is_listed(admin: Admin, token: TokenDone, models: tuple[str, ...]) -> bool:
    """True if a client with the token is offered all the models, now or within LISTED_S. Raises NoAnswerError."""
    end = time.monotonic() + LISTED_S
    while True:
        try:
            if set(models) <= set(admin.api.models(token.key)):
                return True
        except RefusedError as error:
            if time.monotonic() >= end:
                message = f"the relay refuses the token: {error}"
                raise EngineNotReadyError(message, hint="check in the console whether the token is disabled") from error
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
