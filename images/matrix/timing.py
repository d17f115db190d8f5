"""Duration and compressed size of builds, for `verify --record`: .make/images/<build id>.took.json.

A cached command takes no time, so stages with cached commands are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError


@dataclass(frozen=True, kw_only=True)
class Took:
    digest: str  # of the image
    seconds: int  # seconds of all steps after the package check, of export and loading
    kept: tuple[str, ...]  # stages with a cached RUN
    compressed_bytes: int | None = None  # of its layers and configuration, which is what a registry sends


_TOOK = TypeAdapter(Took)


def path_for(folder: Path, build_id: str) -> Path:
    return folder / f"{build_id}.took.json"


def save(folder: Path, build_id: str, took: Took) -> None:
    """Keeps the time of a build. Of two builds of one image, the one that reused fewer stages counts."""
    known = load(folder, build_id, took.digest)
    if known is None or len(took.kept) < len(known.kept):
        path_for(folder, build_id).write_bytes(_TOOK.dump_json(took))


def load(folder: Path, build_id: str, digest: str) -> Took | None:
    """Returns the kept time. None for an image that was built elsewhere, or before times were kept."""
    try:
        took = _TOOK.validate_json(path_for(folder, build_id).read_bytes())
    except (OSError, ValidationError):
        return None
    return took if took.digest == digest else None
