"""Models on the disk by name, with size, place and state, and incomplete files."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from appliance.documents import load
from appliance.errors import printable
from appliance.settings import Settings
from appliance.system.disk import read_file
from appliance.values import dataclass
from appliance.weights.cache.size import as_size
from appliance.weights.stores.remove import used_blobs
from appliance.weights.stores.stores import (
    Listing,
    Note,
    QuantizedFile,
    StoredModel,
    list_quantized,
    list_store,
    other_stores,
    repo_of,
    unfinished,
    volume_store,
)

_PROFILE_BYTES = 16 * 2**20
_PROFILES_LIMIT = 200
_REPOS_LIMIT = 2_000


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    tool: str
    path: Path
    format: str
    bytes: int
    missing: str | None  # what is missing; None if it is complete
    last_used: float | None  # seconds since 1970; None if the disk does not record it
    profiles: tuple[str, ...]
    serving: str | None = None  # its state in the running appliance, such as ready or asleep; None if it has none there
    quantized: Note | None = None  # of a file that the appliance quantized

    def as_document(self) -> dict[str, Any]:
        used = datetime.fromtimestamp(self.last_used, UTC).isoformat(timespec="seconds") if self.last_used else None
        return {
            "name": self.name,
            "tool": self.tool,
            "path": str(self.path),
            "format": self.format,
            "bytes": self.bytes,
            "state": "partial" if self.missing else "complete",
            "missing": self.missing,
            "last_used": used,
            "profiles": list(self.profiles),
            "serving": self.serving,
            "quantized": asdict(self.quantized) if self.quantized else None,
        }


@dataclass(frozen=True, kw_only=True)
class DiskView:
    """All models and folders. `free_bytes` is None if there is no volume."""

    models_dir: Path
    rows: tuple[Row, ...]
    listings: tuple[Listing, ...]
    free_bytes: int | None

    @property
    def own_bytes(self) -> int:
        return sum(row.bytes for row in self.rows if row.tool == "volume")

    def as_document(self) -> dict[str, Any]:
        folders = [
            {"tool": listing.store.tool, "folder": str(listing.store.folder), "problem": listing.problem}
            for listing in self.listings
        ]
        return {
            "models": [row.as_document() for row in self.rows],
            "folders": folders,
            "volume_bytes": self.own_bytes,
            "free_bytes": self.free_bytes,
        }

    def as_text(self) -> str:
        lines = _table(self.rows) if self.rows else [f"no models in {self.models_dir}"]
        lines += [
            f"{listing.store.tool} {printable(str(listing.store.folder))}: {listing.problem}"
            for listing in self.listings
            if listing.problem
        ]
        count = sum(row.tool == "volume" for row in self.rows)
        free = "" if self.free_bytes is None else f"; {as_size(self.free_bytes)} free"
        volume = f"volume: {count} {'model' if count == 1 else 'models'}, {as_size(self.own_bytes)}{free}"
        return "\n".join([*lines, volume])


def view(settings: Settings, serving: Mapping[Path, str] = MappingProxyType({})) -> DiskView:
    """Inspect the disk. `serving` has the states of models in the running appliance, by the paths of their weights.
    Raises ConfigError if a requested folder does not exist."""
    states = {path.resolve(): state for path, state in serving.items()}
    listings = tuple(list_store(store) for store in (volume_store(settings.models_dir), *other_stores(settings)))
    profiles = _profiles(settings.profiles_dir)
    rows = [_row(model, profiles, states.get(model.path.resolve())) for listing in listings for model in listing.models]
    rows += [_quantized(file, profiles, states) for file in list_quantized(settings.models_dir)]
    rows += [_partial(path.name, path, "quantizing not finished") for path in unfinished(settings.models_dir)]
    rows += [*_partly_fetched(settings.models_dir), *_partly_copied(settings.models_dir)]
    rows += [*_unlinked(settings.models_dir), *_damaged(settings.models_dir)]
    free = None
    with suppress(OSError):  # there is no volume yet
        free = shutil.disk_usage(settings.models_dir).free
    return DiskView(models_dir=settings.models_dir, rows=tuple(rows), listings=listings, free_bytes=free)


def _row(model: StoredModel, profiles: Mapping[str, list[str]], serving: str | None) -> Row:
    return Row(
        name=model.name,
        tool=model.store.tool,
        path=model.path,
        format="GGUF" if model.format == "gguf" else model.format,
        bytes=model.bytes,
        missing=model.problem,
        last_used=_last_used(model.files),
        profiles=tuple(profiles.get(str(model.path), ())),
        serving=serving,
    )


def _quantized(file: QuantizedFile, profiles: Mapping[str, list[str]], states: Mapping[Path, str]) -> Row:
    note = file.note
    return Row(
        name=file.path.name,
        tool="volume",
        path=file.path,
        format="GGUF",
        bytes=0 if note.refused else note.bytes,
        missing=file.loss_in_words if note.refused else None,
        last_used=None if note.refused else _last_used([file.path]),
        profiles=tuple(profiles.get(str(file.path), ())),
        serving=states.get(file.path.resolve()),
        quantized=note,
    )


def _last_used(files: Iterable[Path]) -> float | None:
    """Time of the last read, if the disk records it: to the day with relatime, None with noatime."""
    times = []
    for path in files:
        with suppress(OSError):
            if os.statvfs(path).f_flag & os.ST_NOATIME == 0:
                times.append(path.stat().st_atime)
    return max(times, default=None)


def _profiles(folder: Path) -> dict[str, list[str]]:
    """Return profile ids by the path of the model that they were measured with. Unreadable profiles are skipped."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("[0-9a-f]*.json"))[:_PROFILES_LIMIT]:
        with suppress(OSError, ValueError):
            plan = load(read_file(path, _PROFILE_BYTES)).get("plan")
            model = plan.get("model_path") if isinstance(plan, dict) else None
            if isinstance(model, str):
                found.setdefault(model, []).append(path.stem)
    return found


def _partly_fetched(models_dir: Path) -> list[Row]:
    """List blobs whose download has not ended; the file that they will become is unknown here."""
    folders = sorted(models_dir.glob("models--*"))[:_REPOS_LIMIT]
    return [_partial(repo_of(folder), path) for folder in folders for path in sorted(folder.glob("blobs/*.incomplete"))]


def _unlinked(models_dir: Path) -> list[Row]:
    """List blobs that no snapshot links to: of an unfinished download of several files, or left over."""
    rows = []
    for folder in sorted(models_dir.glob("models--*"))[:_REPOS_LIMIT]:
        used = used_blobs(folder)
        whole = [path for path in sorted(folder.glob("blobs/*")) if path.is_file() and not path.suffix]
        rows += [_partial(repo_of(folder), path, "no file links to it") for path in whole if path not in used]
    return rows


def _partly_copied(models_dir: Path) -> list[Row]:
    """List temporary files of a running or killed `add` or `import`; the next one removes them."""
    found = sorted(models_dir.glob(".*.gguf.*.part"))
    return [_partial(f"{path.name[1:].rpartition('.gguf.')[0]}.gguf", path) for path in found]


def _damaged(models_dir: Path) -> list[Row]:
    """List files that `verify --repair` set aside."""
    flat = [(path.name, path) for path in sorted(models_dir.glob("*.damaged"))]
    blobs = [(repo_of(path.parents[1]), path) for path in sorted(models_dir.glob("models--*/blobs/*.damaged"))]
    return [_partial(name, path, "damaged, set aside") for name, path in (*flat, *blobs)]


def _partial(name: str, path: Path, words: str = "download not finished") -> Row:
    found = 0
    with suppress(OSError):  # the download has just ended
        found = path.stat().st_size
    missing = f"{words}: {as_size(found)}"
    return Row(
        name=name, tool="volume", path=path, format="?", bytes=found, missing=missing, last_used=None, profiles=()
    )


def _cells(row: Row) -> tuple[str, ...]:
    state = printable(row.missing) if row.missing else "complete"
    if row.quantized:
        state += printable(f", {row.quantized.kind} of {Path(row.quantized.origin).name}")
    profiles = ", ".join(id_[:8] for id_ in row.profiles) or "-"
    return printable(row.name), as_size(row.bytes), row.format, row.tool, _ago(row.last_used), profiles, state


def _ago(then: float | None) -> str:
    if then is None:
        return "-"
    hours = max(0.0, time.time() - then) / 3600
    return "today" if hours < 24 else f"{hours / 24:,.0f} days ago"


def _table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table; without a running appliance it has no column about it."""
    every = [("name", "size", "format", "where", "last used", "profiles", "state"), *map(_cells, rows)]
    if any(row.serving for row in rows):
        now = ("now", *(row.serving or "-" for row in rows))
        every = [(*cells, word) for cells, word in zip(every, now, strict=True)]
    widths = [max(len(row[column]) for row in every) for column in range(len(every[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in every]
