"""The file of named API keys. It holds the SHA-256 of each key, so that whoever reads the file has no key.

A plain hash is enough: a key is 256 random bits, so no list of guesses contains it, and a slow hash for passwords would
cost each request 100 ms.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from appliance.documents import load
from appliance.errors import ConfigError, VolumeError
from appliance.system.disk import read_file
from appliance.system.secret_file import locked, new_key, replace_secret
from appliance.values import dataclass

KEYS_MAX = 256  # each request with a named key is compared with all of them
FILE_BYTES_MAX = 2**20
LIMITS = ("requests_per_minute", "tokens_per_minute", "streams")
LIMIT_MAX = {"requests_per_minute": 100_000, "tokens_per_minute": 10**12, "streams": 100_000}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class NamedKey:
    """One named key. A limit of None is none. `until` is its last day in UTC, as in 2026-12-31; None: it never ends."""

    name: str
    sha256: str
    created: str  # the day in UTC
    is_admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    streams: int | None = None  # requests that run at the same time
    until: str | None = None

    def has_ended(self, today: date) -> bool:
        return self.until is not None and date.fromisoformat(self.until) < today


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_keys(path: Path) -> tuple[NamedKey, ...]:
    """Return the keys of the file; none if there is no file.

    Raises ConfigError that names the file and what is wrong with it, VolumeError if it cannot be read.
    """
    try:
        data = read_file(path, FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        message = f"file of named keys cannot be read: {path}: {(error.strerror or str(error)).lower()}"
        raise VolumeError(message, hint="check owner and mode of the volume") from error
    try:
        return parse_keys(data)
    except ValueError as error:
        message = f"file of named keys is damaged: {path}: {error}"
        raise ConfigError(message, hint=f"mend it, or remove it and make the keys anew: rm {path}") from error


def parse_keys(data: bytes) -> tuple[NamedKey, ...]:
    """Return the keys of a file's text. Raises ValueError with the reason, which quotes no hash."""
    if len(data) > FILE_BYTES_MAX:
        message = f"it is over {FILE_BYTES_MAX // 2**20} MiB"
        raise ValueError(message)
    document = load(data)
    rows = document.get("keys")
    if document.keys() != {"keys"} or not isinstance(rows, list):
        message = 'it is not {"keys": […]}'
        raise ValueError(message)
    if len(rows) > KEYS_MAX:
        message = f"it has {len(rows)} keys, over the limit of {KEYS_MAX}"
        raise ValueError(message)
    found = tuple(_parsed(row, number) for number, row in enumerate(rows, 1))
    for part in ("name", "sha256"):
        if len({getattr(key, part) for key in found}) < len(found):
            message = f"two keys have the same {part}"
            raise ValueError(message)
    return found


def _parsed(row: object, number: int) -> NamedKey:
    names = {field.name for field in fields(NamedKey)}
    if not isinstance(row, dict) or not {"name", "sha256", "created"} <= row.keys() <= names:
        message = f"key {number} is not an object with the fields {', '.join(sorted(names))}"
        raise ValueError(message)
    faults = (name for name, is_valid in _CHECKS.items() if name in row and not is_valid(row[name]))
    if (fault := next(faults, None)) is not None:
        message = f"key {number} has an invalid {fault}"
        raise ValueError(message)
    return NamedKey(**row)


def is_name(value: object) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def is_day(value: object) -> bool:
    """True for a day as in 2026-12-31. Other forms of ISO 8601, which Python reads too, are none."""
    if not isinstance(value, str) or re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) is None:
        return False
    try:
        date.fromisoformat(value)
    except ValueError:
        return False
    return True


def _is_limit(most: int) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        return value is None or (type(value) is int and 0 < value <= most)

    return check


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "name": is_name,
    "sha256": lambda value: isinstance(value, str) and _DIGEST.fullmatch(value) is not None,
    "created": is_day,
    "is_admin": lambda value: isinstance(value, bool),
    "until": lambda value: value is None or is_day(value),
    **{name: _is_limit(most) for name, most in LIMIT_MAX.items()},
}


def add_key(
    path: Path, name: str, limits: Mapping[str, Any], *, is_admin: bool = False, until: str | None = None
) -> str:
    """Add a key and return it; `limits` are by the names of LIMITS. Raises ConfigError for a taken or invalid name."""
    key = new_key()

    def added(keys: Sequence[NamedKey]) -> Sequence[NamedKey]:
        if not is_name(name):
            message = f"not a name for a key: {name[:100]}"
            raise ConfigError(message, hint="letters, digits, dots, hyphens and underscores, at most 64: ci-runner")
        if any(each.name == name for each in keys):
            message = f"there is a key of this name: {name}"
            raise ConfigError(message, hint=f"`appliance keys rotate {name}` replaces the key and keeps its limits")
        if len(keys) >= KEYS_MAX:
            message = f"there are {KEYS_MAX} named keys, which is the limit"
            raise ConfigError(message, hint="`appliance keys remove NAME` makes room")
        today = datetime.now(UTC).date().isoformat()
        digest = digest_of(key.encode()).hex()
        more = NamedKey(name=name, sha256=digest, created=today, is_admin=is_admin, until=until, **limits)
        return *keys, more

    _change(path, added)
    return key


def remove_key(path: Path, name: str) -> None:
    """Remove a key. Raises ConfigError if there is none of this name."""
    _change(path, lambda keys: [key for key in keys if key is not _named(keys, name)])


def rotate_key(path: Path, name: str) -> str:
    """Replace a key by a new one with the same limits, and return that. Raises ConfigError if there is no such key."""
    key = new_key()

    def rotated(keys: Sequence[NamedKey]) -> Sequence[NamedKey]:
        old = _named(keys, name)
        new = NamedKey(**{**asdict(old), "sha256": digest_of(key.encode()).hex()})
        return [new if each is old else each for each in keys]

    _change(path, rotated)
    return key


def _named(keys: Sequence[NamedKey], name: str) -> NamedKey:
    for key in keys:
        if key.name == name:
            return key
    message = f"no key has this name: {name[:100]}"
    raise ConfigError(message, hint=f"there are: {', '.join(key.name for key in keys) or 'none'}")


def _change(path: Path, change: Callable[[Sequence[NamedKey]], Sequence[NamedKey]]) -> None:
    """Replace the file by what `change` makes of its keys; a reader sees the old file or the new one."""
    try:
        with locked(path):
            rows = [asdict(key) for key in change(read_keys(path))]
            replace_secret(path, (json.dumps({"keys": rows}, indent=1) + "\n").encode())
    except OSError as error:
        message = f"file of named keys cannot be written: {path}: {(error.strerror or str(error)).lower()}"
        raise VolumeError(message, hint="check the space, owner and mode of the volume") from error
