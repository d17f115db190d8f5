"""Enters an endpoint in a tool's files and removes it again: planned in memory first, then all files are written
together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from appliance.errors import ConfigError, FatalError, UsageError
from appliance.host.inject.change import (
    Change,
    Draft,
    diff,
    edited,
    plan_change,
    read_before,
    replace_file,
    text_of,
    write,
)
from appliance.host.inject.formats import FORMATS
from appliance.host.inject.place import MISSING, Place, look
from appliance.host.inject.record import (
    SCHEMA,
    InjectedFile,
    InjectedValue,
    Record,
    forget_record,
    hash_of,
    is_key_file_used,
    load_record,
    save_record,
    sha256,
)
from appliance.host.inject.target import Places, Target
from appliance.host.inject.tools import FileEdit, Tool
from appliance.values import dataclass

BACKUP = ".appliance-backup"
KEY_FILE = "api_key"
_PRIVATE = 0o600


@dataclass(frozen=True, kw_only=True)
class Injection:
    """The files to write. `record` is None when the endpoint is removed."""

    tool: str
    changes: tuple[Change, ...]
    record: Record | None
    is_known: bool = True  # True: it was injected before
    secrets: tuple[str, ...] = ()  # keys, never to be shown
    key: str | None = None  # key to write to the appliance's own key file; None: none
    backups: tuple[tuple[Path, bytes, int], ...] = ()  # backups to write: path, content, mode
    stale_backups: tuple[Path, ...] = ()  # old backups to remove

    @property
    def is_needed(self) -> bool:
        return any(change.is_needed for change in self.changes)


def plan_injection(tool: Tool, places: Places, target: Target, file: Path | None, *, may_create: bool) -> Injection:
    """Return the files to write. Raises ConfigError, with nothing changed, if a file is invalid, missing, or cannot be
    edited safely."""
    path = _file_of(tool, places, file)
    old = load_record(places, tool.name)
    _check_same_file(tool, old, path)
    first = old.file(path) if old else None
    is_new = not first.existed if first else not path.exists()
    _check_folder(tool, path, may_create)
    edits = tool.edits(path, target, is_new) if tool.edits else ()
    planned = [_planned(edit, old.file(edit.path) if old else None) for edit in edits]
    # Files that this endpoint no longer needs, such as the key's file if no key is required now.
    left = [file for file in old.files if file.path not in {new.path for _, new in planned}] if old else []
    is_own_key = tool.needs_key_file and target.key_file == places.own / KEY_FILE
    record = Record(
        schema=SCHEMA,
        tool=tool.name,
        key_file=str(target.key_file) if is_own_key else None,
        files=tuple(file for _, file in planned),
    )
    changes = (*(change for change, _ in planned), *(change for file in left if (change := revert(file))))
    new = [(change, file) for change, file in planned if file.backup and not (old and old.file(change.before.named))]
    return Injection(
        tool=tool.name,
        changes=changes,
        record=record,
        is_known=old is not None,
        secrets=secrets_in(changes, (*record.files, *left)),
        key=target.key if is_own_key else None,
        backups=tuple(_backup(change, file) for change, file in new),
        stale_backups=tuple(Path(file.backup) for file in left if file.backup),
    )


def secrets_in(changes: Sequence[Change], files: Sequence[InjectedFile]) -> tuple[str, ...]:
    """Return all keys in the files before and after the changes, the user's own keys included."""
    found = set()
    for change in changes:
        file = next(each for each in files if each.path == str(change.before.named))
        for data in (change.before.data, change.after):
            document = FORMATS[file.format].load((data or b"").decode())
            found |= {look(document, each.place) for each in file.values if each.is_secret}
    return tuple(str(each) for each in found if each is not MISSING)


def _file_of(tool: Tool, places: Places, file: Path | None) -> Path:
    if file is not None:
        return file.absolute()
    if tool.file is None:
        message = f"{tool.title} has no settings file of its own"
        raise UsageError(message, hint="name the file with --file FILE")
    return tool.file(places)


def _check_same_file(tool: Tool, old: Record | None, path: Path) -> None:
    if old and not old.file(path):
        message = f"{tool.title} has the appliance in another file: {old.files[-1].path}"
        raise ConfigError(message, hint=f"`appliance inject {tool.name} --undo` first")


def _check_folder(tool: Tool, path: Path, may_create: bool) -> None:
    if not path.parent.is_dir() and not may_create:
        message = f"{tool.title} does not seem to be installed: no folder {path.parent}"
        raise ConfigError(
            message, hint="start it once, create the folder with --create, or name the file with --file FILE"
        )


def _planned(edit: FileEdit, first: InjectedFile | None) -> tuple[Change, InjectedFile]:
    """Return the change and its record. The values of an earlier injection, `first`, are removed before, since their
    places depend on the model."""
    change = plan_change(edit)
    values = tuple(
        InjectedValue(keys=each.place.keys, item=each.place.item, sha256=hash_of(each.value), is_secret=each.is_secret)
        for each in edit.edits
    )
    if first is not None and (change.is_needed or values != first.values):
        reverted = revert(first)
        text = (reverted.after or b"").decode() if reverted else ""
        change = replace(change, after=edited(edit, text).encode())
    return change, _recorded(edit, change, values, first)


def _recorded(
    edit: FileEdit, change: Change, values: tuple[InjectedValue, ...], first: InjectedFile | None
) -> InjectedFile:
    before = change.before
    backup = str(_free_backup(edit.path)) if before.data is not None else None
    return InjectedFile(
        path=str(edit.path),
        format=edit.format,
        existed=first.existed if first else before.data is not None,
        mode=first.mode if first else before.mode,
        backup=first.backup if first else backup,
        sha256=sha256(change.after or b""),
        is_exact=first is None or (first.is_exact and before.data is not None and sha256(before.data) == first.sha256),
        values=values,
    )


def _free_backup(path: Path) -> Path:
    """Return an unused name: an older backup may be the only copy of a file and is never overwritten."""
    names = (path.with_name(f"{path.name}{BACKUP}{number or ''}") for number in count())
    return next(name for name in names if not name.exists())


def _backup(change: Change, file: InjectedFile) -> tuple[Path, bytes, int]:
    return Path(file.backup or ""), change.before.data or b"", change.before.mode or _PRIVATE


def plan_undo(tool: Tool, places: Places) -> Injection:
    """Return the changes that remove the endpoint. Raises ConfigError if nothing was injected, or if the user changed
    the injected values."""
    record = load_record(places, tool.name)
    if record is None:
        message = f"the appliance is not in the settings of {tool.title}"
        raise ConfigError(message, hint="`appliance inject --list` shows where it is")
    changes = tuple(change for file in record.files if (change := revert(file)) is not None)
    backups = tuple(Path(file.backup) for file in record.files if file.backup)
    return Injection(
        tool=tool.name,
        changes=changes,
        record=None,
        secrets=secrets_in(changes, record.files),
        stale_backups=backups,
    )


def revert(file: InjectedFile) -> Change | None:
    """Return the file without the injected values; None if the file is gone. Raises ConfigError if the user changed
    them."""
    before = read_before(Path(file.path))
    if before.data is None:
        return None
    mode = file.mode if file.mode is not None else before.mode or _PRIVATE
    base = _base(file)
    if file.is_exact and sha256(before.data) == file.sha256:
        return Change(before=before, after=base, mode=mode)
    draft = Draft(before.named, file.format, text_of(before))
    base_document = Draft(before.named, file.format, (base or b"").decode()).document
    changed = [str(value.place) for value in file.values if not _is_ours_or_gone(draft, value)]
    if changed:
        raise _conflict(file, Change(before=before, after=base, mode=mode), changed)
    for value in file.values:
        _take_out(draft, value.place, base_document)
    is_empty = not file.existed and not draft.document
    return Change(before=before, after=None if is_empty else draft.text.encode(), mode=mode)


def _base(file: InjectedFile) -> bytes | None:
    if file.backup is None:
        return None
    try:
        return Path(file.backup).read_bytes()
    except OSError as error:
        message = f"the backup cannot be read: {file.backup}: {error}"
        raise ConfigError(message, hint=f"take the appliance out of {file.path} by hand") from error


def _is_ours_or_gone(draft: Draft, value: InjectedValue) -> bool:
    found = look(draft.document, value.place)
    return found is MISSING or hash_of(found) == value.sha256


def _take_out(draft: Draft, place: Place, base: dict[str, object]) -> None:
    old = look(base, place)
    if old is not MISSING and look(draft.document, place) is not MISSING:
        draft.put(place, old)
        return
    draft.drop(place)
    # Remove the groups that were created for it as well.
    outermost = len(place.keys) if place.item else len(place.keys) - 1
    for length in range(outermost, 0, -1):
        outer = Place(keys=place.keys[:length])
        if look(draft.document, outer) in ({}, []) and look(base, outer) is MISSING:
            draft.drop(outer)


def _conflict(file: InjectedFile, back: Change, changed: Sequence[str]) -> ConfigError:
    """Return the error, with the diff back to the earlier file for users who edit it by hand."""
    lines = diff(back, secrets_in((back,), (file,))).splitlines()
    message = f"the injected values were edited by hand, and nothing was changed: {file.path}: {', '.join(changed)}"
    where = f"the earlier file: {file.backup}" if file.backup else "there was no such file before"
    return ConfigError(message, hint=f"take it out by hand ({where}), then `--forget`", log=tuple(lines))


def apply(injection: Injection, places: Places) -> None:
    """Write all files, or none of them. Raises ConfigError if something cannot be written."""
    done: list[Change] = []
    try:
        if injection.key is not None:
            _write_key(places, injection.key)
        for path, data, mode in injection.backups:
            replace_file(path, data, mode)
        for change in injection.changes:
            change.before.path.parent.mkdir(parents=True, exist_ok=True)
            if change.is_needed:
                write(change)
                done.append(change)
        _remember(injection, places)
    except (OSError, FatalError) as error:
        for change in reversed(done):
            _restore(change)
        for path, _, _ in injection.backups:
            path.unlink(missing_ok=True)
        _drop_unused_key(places)
        if isinstance(error, FatalError):
            raise
        message = f"a file cannot be written: {error}"
        raise ConfigError(message, hint="all other files were restored; check the folder's owner") from error


def _restore(change: Change) -> None:
    before = change.before
    if before.data is None:
        before.path.unlink(missing_ok=True)
    else:
        replace_file(before.path, before.data, before.mode or _PRIVATE)


def _remember(injection: Injection, places: Places) -> None:
    if injection.record is not None:
        save_record(places, injection.record)
    else:
        forget_record(places, injection.tool)
    for path in injection.stale_backups:
        path.unlink(missing_ok=True)
    _drop_unused_key(places)


def _drop_unused_key(places: Places) -> None:
    if not is_key_file_used(places):
        (places.own / KEY_FILE).unlink(missing_ok=True)


def _write_key(places: Places, key: str) -> None:
    places.own.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(places.own / KEY_FILE, f"{key}\n".encode(), _PRIVATE)


def differences(injection: Injection) -> str:
    return "\n".join(diff(change, injection.secrets) for change in injection.changes if change.is_needed)


def state_of(tool: Tool, places: Places) -> str:
    """Return the state in words, for the list."""
    if tool.edits is None:
        return "by hand"
    record = load_record(places, tool.name)
    if record is None:
        return "not injected"
    for file in record.files:
        before = read_before(Path(file.path))
        if before.data is None:
            return "file is gone"
        if sha256(before.data) != file.sha256:
            document = FORMATS[file.format].load(text_of(before).replace("\r\n", "\n"))
            is_whole = all(hash_of_or_none(look(document, value.place)) == value.sha256 for value in file.values)
            return "injected, file edited since" if is_whole else "changed by you"
    return "injected"


def hash_of_or_none(value: object) -> str | None:
    return None if value is MISSING else hash_of(value)
