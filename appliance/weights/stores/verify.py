"""Re-read models and check hashes: a blob against its name, other files against known hashes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from appliance.errors import ModelUnreadableError
from appliance.values import dataclass
from appliance.weights.stores.remove import blob_of
from appliance.weights.stores.stores import StoredModel, why_damaged
from appliance.weights.stores.transfer import Hash, OnBytes, digest_file

_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT = re.compile(r"[0-9a-f]{40}")  # of files too small for git-lfs
State = Literal["sound", "damaged", "unknown", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result for one file.

    "unknown": readable, but its hash is not known. "unreadable": this user may not read it. `found` is None if it
    was not hashed.
    """

    model: str
    file: Path
    state: State
    expected: str | None = None
    found: str | None = None
    reason: str | None = None

    def as_document(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}


def verify(model: StoredModel, known: Mapping[str, str], on_bytes: OnBytes) -> tuple[Checked, ...]:
    """Check each file. An incomplete model is damaged. `known` has sha256 hashes by path."""
    if model.problem:
        return (Checked(model=model.name, file=model.path, state="damaged", reason=model.problem),)
    projector = [model.projector] if model.projector else []
    return tuple(_verify_file(model, path, known, on_bytes) for path in (*model.files, *projector))


def _verify_file(model: StoredModel, path: Path, known: Mapping[str, str], on_bytes: OnBytes) -> Checked:
    expected, digest = _expected(model, path, known)
    if path.exists() and not os.access(path, os.R_OK, effective_ids=True):
        return Checked(model=model.name, file=path, state="unreadable", expected=expected, reason="it is not readable")
    try:
        found = digest_file(path, digest, on_bytes)
    except ModelUnreadableError as error:
        return Checked(model=model.name, file=path, state="damaged", expected=expected, reason=error.message)
    if expected is not None and found != expected:
        reason = f"its hash is {found}, expected {expected}"
        return Checked(model=model.name, file=path, state="damaged", expected=expected, found=found, reason=reason)
    if expected is not None:
        return Checked(model=model.name, file=path, state="sound", expected=expected, found=found)
    why = why_damaged(path) if path.suffix.lower() == ".gguf" else None
    return Checked(model=model.name, file=path, state="damaged" if why else "unknown", found=found, reason=why)


def _expected(model: StoredModel, path: Path, known: Mapping[str, str]) -> tuple[str | None, Hash]:
    """Return the expected hash, None if unknown, and the hash object to compute it."""
    blob = blob_of(path)
    name = (blob or path).name.removeprefix("sha256-")
    if (blob or model.store.tool == "Ollama") and _SHA256.fullmatch(name):
        return name, hashlib.sha256()
    if blob and _GIT.fullmatch(name):
        # git's hash of a blob includes its length.
        return name, hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    return known.get(str(path)), hashlib.sha256()


def set_aside(checked: Checked) -> Path:
    """Rename the damaged file and unlink what leads to it, so that it is fetched again. Returns the new name."""
    blob = blob_of(checked.file)
    damaged = blob or checked.file
    aside = damaged.with_name(f"{damaged.name}.damaged")
    damaged.rename(aside)
    if blob:
        for link in blob.parents[1].joinpath("snapshots").rglob("*"):
            if blob_of(link) == blob:
                link.unlink()
    return aside
