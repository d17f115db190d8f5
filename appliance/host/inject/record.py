"""The record of an injection, kept in the appliance's own settings folder: enough to remove exactly that again.

Values are stored as hashes, since one of them may be a key. The previous content is in the backup in the file's folder.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from appliance.documents import load, read
from appliance.errors import ConfigError
from appliance.host.inject.change import replace_file
from appliance.host.inject.place import Item, Place
from appliance.host.inject.target import Places
from appliance.values import dataclass

SCHEMA = 1
_FOLDER = "injected"


@dataclass(frozen=True, kw_only=True)
class InjectedValue:
    keys: tuple[str, ...]
    item: Item | None
    sha256: str
    is_secret: bool

    @property
    def place(self) -> Place:
        return Place(keys=self.keys, item=self.item)


@dataclass(frozen=True, kw_only=True)
class InjectedFile:
    path: str
    format: str
    existed: bool
    mode: int | None  # mode of the file before the injection
    backup: str | None  # copy of the earlier file; None if there was none
    sha256: str  # hash of the file as we wrote it
    is_exact: bool  # True: only we changed the file since the backup
    values: tuple[InjectedValue, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    schema: int
    tool: str
    key_file: str | None  # the appliance's own key file if the tool reads it, else None
    files: tuple[InjectedFile, ...]

    def file(self, path: Path) -> InjectedFile | None:
        return next((each for each in self.files if each.path == str(path)), None)


def hash_of(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def load_record(places: Places, tool: str) -> Record | None:
    """Return the record; None if nothing was injected. Raises ConfigError for a record that cannot be read."""
    path = _path(places, tool)
    try:
        record = read(Record, load(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        message = f"the record of what was injected cannot be read: {path}: {error}"
        raise ConfigError(
            message, hint="remove the values by hand; the backup is in the folder of the tool's file"
        ) from error
    if record.schema != SCHEMA:
        message = f"the record is of another version: {path}: schema {record.schema}, this version reads {SCHEMA}"
        raise ConfigError(message, hint="use the version that injected it")
    return record


def save_record(places: Places, record: Record) -> None:
    """Write the record. Raises OSError."""
    path = _path(places, record.tool)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(record), indent=1).encode(), 0o600)


def forget_record(places: Places, tool: str) -> None:
    _path(places, tool).unlink(missing_ok=True)


def is_key_file_used(places: Places) -> bool:
    """True if a tool reads the appliance's own key file. An unreadable record counts as one that does."""
    return any(_may_use_key_file(places, path.stem) for path in (places.own / _FOLDER).glob("*.json"))


def _may_use_key_file(places: Places, tool: str) -> bool:
    try:
        record = load_record(places, tool)
    except ConfigError:
        return True
    return record is not None and record.key_file is not None


def _path(places: Places, tool: str) -> Path:
    return places.own / _FOLDER / f"{tool}.json"
