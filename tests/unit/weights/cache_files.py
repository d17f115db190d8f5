"""Folders in the layout of huggingface_hub's cache, and of other tools, for tests."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

COMMIT = "a" * 40
OTHER_COMMIT = "b" * 40


def put_cached(
    cache: Path, repo: str, file: str, data: bytes = b"GGUF", *, commit: str = COMMIT, ref: str | None = "main"
) -> Path:
    """Put a file in the cache as the hub's client does: a blob named by its sha256, a relative link, a ref. Returns the
    link."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
    link = folder / "snapshots" / commit / file
    for made in (blob, link, folder / "refs/main", cache / ".locks" / folder.name / f"{blob.name}.lock"):
        made.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(data)
    (cache / ".locks" / folder.name / f"{blob.name}.lock").touch()
    link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        (folder / "refs" / ref).write_text(commit)
    return link


def let_others_in(folder: Path) -> None:
    """Let every user enter the folder. pytest's own folders are closed, and one more of them if tests run in
    parallel."""
    for each in (folder, *folder.parents):
        if each.stat().st_uid == os.getuid() and not each.stat().st_mode & 0o001:
            each.chmod(each.stat().st_mode | 0o755)


def put_blob(store: Path, data: bytes) -> str:
    """Put a blob in Ollama's store; returns the digest."""
    digest = hashlib.sha256(data).hexdigest()
    (store / "blobs").mkdir(parents=True, exist_ok=True)
    (store / "blobs" / f"sha256-{digest}").write_bytes(data)
    return f"sha256:{digest}"


def layer(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": size}


def put_manifest(
    store: Path, name: str, layers: list[dict[str, Any]], *, host: str = "registry.ollama.ai", **more: object
) -> Path:
    """Put a manifest in Ollama's store; `name` is namespace/model/tag."""
    path = store / "manifests" / host / name
    path.parent.mkdir(parents=True, exist_ok=True)
    media_type = "application/vnd.docker.distribution.manifest.v2+json"
    path.write_text(json.dumps({"schemaVersion": 2, "mediaType": media_type, "layers": layers, **more}))
    return path


def put_ollama(store: Path, name: str, data: bytes, projector: bytes | None = None) -> Path:
    """Put a model in the state that `ollama pull` leaves."""
    layers = [layer("model", put_blob(store, data), len(data)), layer("license", put_blob(store, b"free"), 4)]
    if projector is not None:
        layers.append(layer("projector", put_blob(store, projector), len(projector)))
    return put_manifest(store, name, layers)
