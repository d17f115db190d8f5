"""Ollama's folder: `manifests/<host>/<namespace>/<model>/<tag>`, JSON that names blobs by their sha256.

Sources in ollama/ollama: types/model/name.go@5c0caaff (names), manifest/paths.go@c73feaf7 (folders, digests),
manifest/manifest.go@00188139 (`manifests-v2`, with links to blobs, and lists with one manifest per runner),
server/download.go@d32613d3 (an unfinished blob is `<name>-partial`).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from appliance.documents import load
from appliance.errors import printable
from appliance.values import dataclass

FOLDERS = ("manifests-v2", "manifests")  # manifests-v2 first: its entries are newer
HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"
_SAME_HOSTS = {"ollama.com": HOST, "registry.ollama.ai": HOST}
MODEL, PROJECTOR, ADAPTER, TENSOR = (
    f"application/vnd.ollama.image.{kind}" for kind in ("model", "projector", "adapter", "tensor")
)
_LIST = "application/vnd.ollama.manifest.list.v2+json"
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
MANIFEST_BYTES = 2**20  # real ones have about 1 KiB
MANIFESTS_LIMIT = 5_000
_LAYERS_LIMIT = 10_000  # a safetensors model has a layer for each tensor
_OTHER_RUNNERS = ("mlx",)  # their entries in a list are not GGUF files


@dataclass(frozen=True, kw_only=True)
class Blob:
    path: Path
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class OllamaModel:
    """A model as `ollama list` names it. If there is a `problem`, the weights may be missing."""

    name: str
    manifest: Path
    weights: Blob | None = None
    projector: Blob | None = None
    problem: str | None = None


class ManifestError(ValueError):
    """Describes what is wrong with a manifest; the words follow the model's name in messages."""


def is_store(folder: Path) -> bool:
    return (folder / "blobs").is_dir() and any((folder / name).is_dir() for name in FOLDERS)


def parse_name(text: str) -> tuple[str, str, str, str] | None:
    """Parse host, namespace, model and tag in lower case, with Ollama's defaults; None if it is not a model name."""
    rest, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        rest, tag = text, TAG
    parts = rest.split("/")
    if not 1 <= len(parts) <= 3:
        return None
    host, namespace, model = (HOST, NAMESPACE)[: 3 - len(parts)] + tuple(parts)
    if not all(_PART.fullmatch(part) for part in (host, namespace, model, tag)):
        return None
    return _SAME_HOSTS.get(host.lower(), host.lower()), namespace.lower(), model.lower(), tag.lower()


def list_ollama(store: Path) -> tuple[OllamaModel, ...]:
    """List models by name. Manifests are not trusted: a digest must name a file in `blobs`, or the model has a
    problem.

    Raises OSError for folders that cannot be read.
    """
    found: dict[str, OllamaModel] = {}
    for path, name in _manifests(store):
        if name not in found:
            found[name] = _read(store, path, name)
    return tuple(found[name] for name in sorted(found))


def _manifests(store: Path) -> Iterator[tuple[Path, str]]:
    budget = iter(range(MANIFESTS_LIMIT))
    for root in (store / name for name in FOLDERS):
        if root.is_dir():
            yield from _below(root, (), budget)


def _below(folder: Path, parts: tuple[str, ...], budget: Iterator[int]) -> Iterator[tuple[Path, str]]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for _, entry in zip(budget, entries, strict=False))
    for name in names:
        decoded = name.replace("%3A", ":")  # a host with a port, in manifests-v2
        if not _PART.fullmatch(decoded):
            continue
        if len(parts) == 3:
            yield folder / name, _shown((*parts, decoded))
        elif (folder / name).is_dir() and not (folder / name).is_symlink():
            yield from _below(folder / name, (*parts, decoded), budget)


def _shown(parts: tuple[str, ...]) -> str:
    """Return the shortest name that Ollama accepts for it."""
    host, namespace, model, tag = parts
    own = _SAME_HOSTS.get(host.lower(), host)
    before = [] if own == HOST and namespace.lower() == NAMESPACE else [namespace]
    return "/".join([*([] if own == HOST else [own, *([] if before else [namespace])]), *before, f"{model}:{tag}"])


def _read(store: Path, path: Path, name: str) -> OllamaModel:
    root = os.path.realpath(store)
    try:
        layers = _layers(_manifest(path, store, root))
        weights = _weights(layers)
        blob = _blob(store, root, weights)
        projectors = [layer for layer in layers if layer.get("mediaType") == PROJECTOR]
        projector = _blob(store, root, projectors[0]) if projectors else None
    except ManifestError as error:
        return OllamaModel(name=name, manifest=path, problem=str(error))
    return OllamaModel(name=name, manifest=path, weights=blob, projector=projector)


def _manifest(path: Path, store: Path, root: str) -> dict[str, Any]:
    document = _load(_bytes(path, root))
    if document.get("mediaType") != _LIST:
        return document
    children = document.get("manifests")
    for child in children if isinstance(children, list) else []:
        if isinstance(child, dict) and child.get("runner") not in _OTHER_RUNNERS:
            return child if "layers" in child else _referenced(store, root, child)
    message = "it has no GGUF file, only weights for another Ollama runner"
    raise ManifestError(message)


def _referenced(store: Path, root: str, child: dict[str, Any]) -> dict[str, Any]:
    sha256 = _sha256(child.get("digest"))
    data = _bytes(store / "blobs" / f"sha256-{sha256}", root)
    if hashlib.sha256(data).hexdigest() != sha256:
        message = f"its manifest is damaged: sha256 is not {sha256}"
        raise ManifestError(message)
    return _load(data)


def _bytes(path: Path, root: str) -> bytes:
    """Read a manifest. Raises ManifestError if it is too large, or a link out of the store."""
    try:
        target = os.path.realpath(path, strict=True)
        if not Path(target).is_relative_to(root):
            message = "its manifest is a link to outside of the folder"
            raise ManifestError(message)
        # O_NONBLOCK, so that opening a pipe does not block.
        handle = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            data = file.read(MANIFEST_BYTES + 1)
    except OSError as error:
        message = f"its manifest cannot be read: {(error.strerror or str(error)).lower()}"
        raise ManifestError(message) from error
    if len(data or b"") > MANIFEST_BYTES:
        message = f"its manifest is larger than {MANIFEST_BYTES:,} bytes"
        raise ManifestError(message)
    return data or b""


def _load(data: bytes) -> dict[str, Any]:
    try:
        return load(data)
    except ValueError as error:
        message = "its manifest is not a JSON document"
        raise ManifestError(message) from error


def _layers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    layers = manifest.get("layers")
    if not isinstance(layers, list) or len(layers) > _LAYERS_LIMIT or not all(isinstance(one, dict) for one in layers):
        message = "its manifest has no list of layers"
        raise ManifestError(message)
    return layers


def _weights(layers: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [layer.get("mediaType") for layer in layers]
    if kinds.count(MODEL) == 1 and ADAPTER not in kinds:
        return layers[kinds.index(MODEL)]
    if ADAPTER in kinds:
        message = "it has an adapter, which cannot be served, and without it the model would differ"
    elif MODEL in kinds:
        message = f"its weights are in {kinds.count(MODEL)} files, which an engine can only find by name"
    elif TENSOR in kinds:
        message = "it is not a GGUF file: Ollama keeps it as tensors"
    else:
        message = "it has no weights here: it runs in Ollama's cloud"
    raise ManifestError(message)


def _sha256(digest: object) -> str:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        message = f"its manifest has an invalid digest: {printable(str(digest))!s:.80}"
        raise ManifestError(message)
    return match[1].lower()


def _blob(store: Path, root: str, layer: dict[str, Any]) -> Blob:
    """Return the blob. Raises ManifestError if it is missing, incomplete, a link out of the folder, or unreadable."""
    sha256, size = _sha256(layer.get("digest")), layer.get("size")
    path = store / "blobs" / f"sha256-{sha256}"
    try:
        target = os.path.realpath(path, strict=True)
        found = os.stat(target).st_size  # noqa: PTH116 - the real path is a string
    except FileNotFoundError as error:
        is_begun = path.with_name(f"{path.name}-partial").exists()
        message = "its download is not finished" if is_begun else f"its blob is missing: {path.name}"
        raise ManifestError(message) from error
    except OSError as error:
        message = f"its blob cannot be read: {path.name}: {(error.strerror or str(error)).lower()}"
        raise ManifestError(message) from error
    if not Path(target).is_relative_to(root) or not os.path.isfile(target):  # noqa: PTH113
        message = f"its blob is not a file in the folder: {path.name}"
        raise ManifestError(message)
    if type(size) is int and size != found:
        message = f"its blob has {found:,} bytes, and the manifest says {size:,}: {path.name}"
        raise ManifestError(message)
    return Blob(path=path, sha256=sha256, bytes=found)
