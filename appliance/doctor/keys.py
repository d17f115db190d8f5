"""Checks of the API keys: the appliance's own, and the file of named ones."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from datetime import UTC, datetime

from appliance.doctor.check import Check, failed, judged, passed, warned
from appliance.errors import FatalError
from appliance.gateway.accounts.named_keys import NamedKey, read_keys
from appliance.settings import Settings
from appliance.volume import read_key


def key_check(settings: Settings) -> Check:
    if not settings.auth:
        return warned(
            "key", "authentication is off", "everyone who reaches the port can use the model: set APPLIANCE_AUTH=on"
        )
    try:
        has_key = bool(read_key(settings.key_path))
    except FatalError as error:
        return failed("key", error)
    if not has_key:
        return passed("key", "none yet: the first start creates it")
    is_open = bool(settings.key_path.stat().st_mode & stat.S_IRWXO)
    return judged("key", "there is one", "other users can read it: chmod 640 secrets/api_key" if is_open else None)


def named_keys_check(settings: Settings, user: int | None = None, groups: Collection[int] | None = None) -> Check:
    """Check the file of named keys. A fault is a warning: a start goes on, and refuses the named keys alone.

    `user` and `groups` are those of this process unless they are given.
    """
    name, path = "named keys", settings.named_keys_path
    if not settings.auth:
        return passed(name, "not used: authentication is off")
    try:
        keys = read_keys(path)
        found = path.stat() if keys else None
    except FatalError as error:
        return warned(name, f"none is accepted: {error.message}{_owner(settings)}", error.hint or "")
    except OSError:  # removed just now
        found = None
    if found is None:
        return passed(name, "none")
    trouble = None
    if found.st_mode & stat.S_IRWXO:
        trouble = "other users can read or change it: chmod 640 secrets/keys.json"
    elif not _is_own(found, os.geteuid() if user is None else user, _groups() if groups is None else groups):
        owner = f"{found.st_uid}:{found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"
        trouble = f"it belongs to {owner}, so this user may not be able to read it: chgrp 0 secrets/keys.json"
    return judged(name, _shown(keys), trouble)


def _is_own(found: os.stat_result, user: int, groups: Collection[int]) -> bool:
    """True if the file's mode lets this user read it. Root may read everything, but other starts need not be root's."""
    if found.st_uid == user:
        return bool(found.st_mode & stat.S_IRUSR)
    return found.st_gid in groups and bool(found.st_mode & stat.S_IRGRP)


def _groups() -> frozenset[int]:
    return frozenset({os.getegid(), *os.getgroups()})


def _owner(settings: Settings) -> str:
    """Return who may read a file that is in the way; empty if it is not there or not to be seen."""
    try:
        found = settings.named_keys_path.stat()
    except OSError:
        return ""
    return f" (it belongs to {found.st_uid}:{found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o})"


def _shown(keys: Collection[NamedKey]) -> str:
    """Return counts. Names may be those of people, and the bundle shows this text."""
    today = datetime.now(UTC).date()
    parts = (
        (len(keys), "key" if len(keys) == 1 else "keys"),
        (sum(key.is_admin for key in keys), "of administrators"),
        (sum(key.has_ended(today) for key in keys), "past the last day"),
    )
    return ", ".join(f"{count} {words}" for count, words in parts if count)
