"""Channel and token as they should be, and what was done for it."""

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

LISTED_S = 20.0  # a cache of channels is refreshed by the clock alone
POLL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class ChannelDone:
    """`did`: created, updated, enabled, unchanged, or left where somebody has disabled it by hand."""

    did: str
    id: int
    fields: tuple[str, ...] = ()  # that were changed, without the key's value


@dataclass(frozen=True, kw_only=True)
class TokenDone:
    """`did`: created, unchanged, or left where somebody has disabled it."""

    did: str
    id: int
    is_written: bool  # into its file, just now
    key: str = field(repr=False)


def reconcile_channel(admin: Admin, wanted: Wanted) -> ChannelDone:
    """Raises ConfigError for channels of one name, RefusedError, NoAnswerError."""
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
    """The answer to a POST has no id, and another one may have been made meanwhile."""
    found = channels_named(admin, wanted.name)
    if not found:
        message = f"the channel '{wanted.name}' was created and is not there"
        raise RefusedError(message)
    return int(only(found, "channel", wanted.name)["id"])


def _did(change: Change) -> str:
    if change.is_disabled_by_hand:
        return "left disabled"
    if change.fields:
        return "updated"
    return "enabled" if change.enables else "unchanged"


def reconcile_token(admin: Admin, name: str, key_file: Path | None) -> TokenDone:
    """Raises ConfigError for tokens of one name and a file that cannot be written, RefusedError, NoAnswerError."""
    user = user_of(admin)
    found = tokens_named(admin, name, user)
    is_new = not found
    if is_new:
        _create_token(admin, name)
        found = tokens_named(admin, name, user)
        if not found:
            message = f"the token '{name}' was created and is not there"
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
    """Twice: with PostgreSQL the first token after one-api's own initial one collides with its number."""
    try:
        create_token(admin, name)
    except RefusedError:
        create_token(admin, name)


def is_listed(admin: Admin, token: TokenDone, models: tuple[str, ...]) -> bool:
    """Whether a client with the token is offered all of the models, now or soon. Raises NoAnswerError."""
    end = time.monotonic() + LISTED_S
    while True:
        try:
            if set(models) <= set(admin.api.models(token.key)):
                return True
        except RefusedError as error:
            if time.monotonic() >= end:
                message = f"the token does not open the relay: {error}"
                raise EngineNotReadyError(message, hint="is the token disabled in the console?") from error
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
