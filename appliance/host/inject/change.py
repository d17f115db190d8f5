"""One file of the user's: read it, change it in memory, compare, and write it whole with the same mode and owner."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError
from appliance.host.inject.formats import FORMATS
from appliance.host.inject.place import MISSING, NotEditableError, Place, drop, look, put
from appliance.host.inject.tools import FileEdit
from appliance.values import dataclass

_MOST_BYTES = 4 << 20
_PRIVATE = 0o600
_PUBLIC = 0o644


@dataclass(frozen=True, kw_only=True)
class Before:
    """A file before the change. `path` is the real file if `named` is a link. `data` is None if there is no file."""

    named: Path
    path: Path
    data: bytes | None
    mode: int | None


@dataclass(frozen=True, kw_only=True)
class Change:
    before: Before
    after: bytes | None  # None: the file is removed
    mode: int

    @property
    def is_needed(self) -> bool:
        return self.after != self.before.data or (self.before.mode is not None and self.mode != self.before.mode)


def read_before(named: Path) -> Before:
    """Return the file's content and mode. Raises ConfigError if it is not a readable regular file."""
    path = Path(os.path.realpath(named))
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            message = f"not a settings file: {path}"
            raise ConfigError(message, hint="name another one with --file")
        return Before(named=named, path=path, data=path.read_bytes(), mode=stat.S_IMODE(found.st_mode))
    except FileNotFoundError:
        return Before(named=named, path=path, data=None, mode=None)
    except (OSError, ValueError) as error:
        message = f"the file cannot be read: {named}: {error}"
        raise ConfigError(message, hint="check who owns it") from error


def text_of(before: Before) -> str:
    try:
        return (before.data or b"").decode()
    except UnicodeDecodeError as error:
        message = f"the file is not UTF-8 and was not changed: {before.named}: {error}"
        raise ConfigError(message, hint="save it as UTF-8 in its editor") from error


def plan_change(edit: FileEdit) -> Change:
    """Return the change to a file. Raises ConfigError, with nothing changed, if the file is not valid or the edit is
    not safe."""
    before = read_before(edit.path)
    text = text_of(before)
    mode = before.mode if before.mode is not None else _PUBLIC
    mode = mode & _PRIVATE if edit.holds_key else mode
    return Change(before=before, after=edited(edit, text).encode(), mode=mode)


def edited(edit: FileEdit, text: str) -> str:
    """Return the text with all edits applied."""
    draft = Draft(edit.path, edit.format, text)
    for each in edit.edits:
        draft.put(each.place, each.value)
    return draft.text


class Draft:
    """A file's text while it is changed. After each step it is parsed again and must equal the previous document plus
    that change."""

    def __init__(self, path: Path, format_name: str, text: str) -> None:
        self._path = path
        self._format = FORMATS[format_name]
        # A file with mixed line ends keeps them: nothing is translated then.
        self._newline = "\r\n" if 0 < text.count("\r\n") == text.count("\n") else "\n"
        self._text = text.replace(self._newline, "\n")
        self.document = self._load()

    @property
    def text(self) -> str:
        return self._text.replace("\n", self._newline)

    def put(self, place: Place, value: object) -> None:
        if look(self.document, place) != value:
            self._step(place, lambda: (put(self.document, place, value), self._format.put(self._text, place, value)))

    def drop(self, place: Place) -> None:
        if look(self.document, place) is not MISSING:
            self._step(place, lambda: (drop(self.document, place), self._format.drop(self._text, place)))

    def _step(self, place: Place, change: Callable[[], tuple[dict[str, Any], str]]) -> None:
        try:
            meant, self._text = change()
        except NotEditableError as error:
            raise self._refused(place, str(error)) from error
        self.document = self._load()
        if self.document != meant:
            raise self._refused(place, "the result would differ from the intended change")

    def _load(self) -> dict[str, Any]:
        try:
            return self._format.load(self._text)
        except (ValueError, RecursionError) as error:
            message = f"the file is not valid and was not changed: {self._path}: {error}"
            raise ConfigError(message, hint="repair that line first; the tool itself cannot read it either") from error

    def _refused(self, place: Place, why: str) -> ConfigError:
        message = f"the file cannot be changed without rewriting your own text: {self._path}: {place}: {why}"
        return ConfigError(message, hint=f"put {place} on lines of its own, or change it by hand")


def write(change: Change) -> None:
    """Write the change completely or not at all. Raises ConfigError if the file changed since it was read, or cannot be
    written."""
    before = change.before
    if read_before(before.named).data != before.data:
        message = f"the file was changed meanwhile and was not overwritten: {before.named}"
        raise ConfigError(message, hint="close the tool that writes it and try again")
    try:
        if change.after is None:
            before.path.unlink()
        else:
            replace_file(before.path, change.after, change.mode)
    except OSError as error:
        message = f"the file cannot be written: {before.path}: {error}"
        raise ConfigError(message, hint="check the folder's owner and mode") from error


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace the file atomically: it is always the old or the new one. Owner and group stay. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a handle, not a path
            file.write(data)
            file.flush()
            if path.exists():
                _keep_owner(handle, path)
            os.fchmod(handle, mode)
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _keep_owner(handle: int, path: Path) -> None:
    owner, ours = path.stat(), os.fstat(handle)
    if (owner.st_uid, owner.st_gid) != (ours.st_uid, ours.st_gid):
        os.fchown(handle, owner.st_uid, owner.st_gid)  # raises PermissionError if the file is not ours to replace


def diff(change: Change, secrets: Sequence[str]) -> str:
    """Return the change as `diff -u` shows it, with keys hidden."""
    before, after = ((data or b"").decode(errors="replace") for data in (change.before.data, change.after))
    for secret in secrets:
        before, after = before.replace(secret, "<key>"), after.replace(secret, "<key>")
    name = str(change.before.named)
    rows = difflib.unified_diff(before.splitlines(), after.splitlines(), name, f"{name} (new)", lineterm="")
    return "\n".join(rows)
