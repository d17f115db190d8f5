"""Prompts that engines keep on the volume: what a file's name says of it, and how files are removed.

A name is `<model>-<rest of the key>.<owner>.<random>.prompt`. The model is the beginning of its digest, the owner a tag
of the API key whose requests made the file. Nothing here reads a file.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from appliance.system.disk import read_file
from appliance.system.secret_file import read_or_make

NO_OWNER = "none"  # of requests without a key
_SECRET = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?P<model>[0-9a-f]{16})-[0-9a-f]{32}\.(?P<owner>[a-z0-9]{1,32})\.[0-9a-f]{16}\.prompt")


def owner_of(key_sha256: str) -> str:
    """Return the tag of an API key, from the hexadecimal SHA-256 of the key. Another key has another tag."""
    return hashlib.sha256(f"prompts of {key_sha256}".encode()).hexdigest()[:16]


def read_or_make_secret(path: Path) -> str:
    """Return the secret of the volume, 32 hexadecimal digits; make it if there is none. Raises OSError."""
    return read_or_make(path, _read, partial(secrets.token_hex, 16))


def _read(path: Path) -> str:
    """Return the secret; empty if there is none, or if the file holds something else: it is made anew."""
    try:
        text = read_file(path, 4096).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""
    return text if _SECRET.fullmatch(text) else ""


def held_bytes(folder: Path) -> int:
    """Return the bytes of all saved prompts. Raises OSError."""
    return sum(entry.stat(follow_symlinks=False).st_size for entry in _entries(folder))


def remove_of_models(folder: Path, models: Collection[str]) -> int:
    """Remove the prompts of models, each given by the first 16 digits of its digest. Returns how many. Raises
    OSError."""
    return _remove(folder, lambda found: found["model"] in models)


def remove_of_owners(folder: Path, owners: Collection[str]) -> int:
    """Remove the prompts of these owners. Returns how many. Raises OSError."""
    return _remove(folder, lambda found: found["owner"] in owners)


def keep_owners(folder: Path, owners: Collection[str]) -> int:
    """Remove the prompts of all other owners, but not those without one. Returns how many. Raises OSError."""
    return _remove(folder, lambda found: found["owner"] not in (*owners, NO_OWNER))


def _remove(folder: Path, is_gone: Callable[[re.Match[str]], bool]) -> int:
    count = 0
    for entry in list(_entries(folder)):
        found = _NAME.fullmatch(entry.name)
        if found and is_gone(found):
            Path(entry.path).unlink(missing_ok=True)
            count += 1
    return count


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if entry.name.endswith(".prompt"))
    except FileNotFoundError:
        return
