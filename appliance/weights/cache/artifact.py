"""Which layers of a registry's artifact are one model: ModelPack and Docker's format. Pure.

Sources: modelpack/model-spec docs/spec.md, docs/config.md, docs/annotations.md @ d78bf323; docker/model-runner
pkg/distribution/types/config.go and modelpack/types.go @ 642c7211.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from appliance.documents import load, read
from appliance.errors import ConfigError, DownloadError, printable
from appliance.image_facts import is_projector
from appliance.reference import Artifact, is_safe_path
from appliance.values import dataclass
from appliance.weights.cache.quants import folder_files, gguf_sets, projector_of

MODEL = "application/vnd.cncf.model.manifest.v1+json"  # artifactType
CONFIG = "application/vnd.cncf.model.config.v1+json"
RAW_WEIGHTS = "application/vnd.cncf.model.weight.v1.raw"
RAW_CONFIG = "application/vnd.cncf.model.weight.config.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
MANIFEST_TYPES = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
INDEX_TYPES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
# The second is Docker's addition to ModelPack.
_GGUF = frozenset({"application/vnd.docker.ai.gguf.v3", "application/vnd.cncf.model.weight.v1.gguf"})
_PROJECTOR = "application/vnd.docker.ai.mmproj"
_OTHERS = frozenset(
    {
        RAW_CONFIG,
        "application/vnd.cncf.model.weight.v1.safetensors",
        "application/vnd.docker.ai.safetensors",
        "application/vnd.docker.ai.model.file",
    }
)
_ARCHIVE = re.compile(r"application/vnd\.(?:cncf\.model\.weight\.|docker\.ai\.).*\btar\b.*")
_ABOUT = "vnd.docker.reference.type"  # annotation of an attestation in an index
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZE_LIMIT = 2**50


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """A reference to a blob or a manifest."""

    media_type: str
    digest: str
    size: int
    artifact_type: str
    annotations: dict[str, str]

    @property
    def sha256(self) -> str:
        return self.digest.removeprefix("sha256:")

    @property
    def path(self) -> str:
        return self.annotations.get(FILE_PATH, "")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Layers of an artifact, or the entries of an index of several manifests."""

    layers: tuple[Descriptor, ...]
    entries: tuple[Descriptor, ...]


def parse_manifest(data: bytes, artifact: Artifact) -> Manifest:
    """Raises DownloadError for what is no manifest, or has a digest or a size that cannot be one."""
    try:
        document = load(data)
        layers, entries = (tuple(map(_descriptor, document.get(name) or ())) for name in ("layers", "manifests"))
    except (ValueError, TypeError) as error:
        raise _malformed(artifact, printable(f"{error!s:.200}")) from error
    for each in (*layers, *entries):
        if not _DIGEST.fullmatch(each.digest) or not 0 <= each.size < _SIZE_LIMIT:
            raise _malformed(artifact, f"digest {each.digest!r:.90} of {each.size} bytes")
    return Manifest(layers=layers, entries=entries)


def _descriptor(row: object) -> Descriptor:
    given: dict[str, object] = row if isinstance(row, dict) else {}
    known = {"media_type": given.get("mediaType"), "digest": given.get("digest"), "size": given.get("size")}
    more = {"artifact_type": given.get("artifactType") or "", "annotations": given.get("annotations") or {}}
    return read(Descriptor, {**known, **more})


def _malformed(artifact: Artifact, problem: str) -> DownloadError:
    message = f"manifest of the registry cannot be parsed: {artifact.name}: {problem}"
    return DownloadError(message, hint="a proxy on the way may have answered; else push the model again")


def only_model(index: Manifest, artifact: Artifact) -> Descriptor:
    """Return the index's entry that is a model. Raises ConfigError if there is not exactly one."""
    found = [each for each in index.entries if _ABOUT not in each.annotations]
    found = [each for each in found if each.artifact_type == MODEL] or found
    if len(found) != 1:
        words = "".join(f"\n  {artifact.repository}@{each.digest}" for each in found[:24])
        message = f"index names {len(found)} manifests, and one is wanted: {artifact.name}{words}"
        raise ConfigError(message, hint="name one by its digest, as in oci://host/repository@sha256:…")
    return found[0]


def files_of(manifest: Manifest, artifact: Artifact, *, is_folder: bool) -> tuple[tuple[str, Descriptor], ...]:
    """Return name and layer of each file of the model, the first part first and a projector last.

    Raises ConfigError if this image serves none of it, DownloadError for a path that leaves its folder.
    """
    layers = [each for each in manifest.layers if each.media_type in {*_GGUF, *_OTHERS, _PROJECTOR, RAW_WEIGHTS}]
    for each in layers:
        if each.path and not is_safe_path(each.path):
            raise _malformed(artifact, f"layer has an unsafe path: {each.path!r:.200}")
    found = _folder(layers) if is_folder else _gguf(layers, artifact)
    return found or _refuse(manifest, artifact, is_folder=is_folder)


def _folder(layers: Sequence[Descriptor]) -> tuple[tuple[str, Descriptor], ...]:
    by_path = {each.path: each for each in layers}
    return tuple((path, by_path[path]) for path in folder_files(by_path))


def _gguf(layers: Sequence[Descriptor], artifact: Artifact) -> tuple[tuple[str, Descriptor], ...]:
    """Choose the GGUF files. Paths lose their folders: all parts and the projector of a model lie in one."""
    projectors, weights = {}, []
    for each in layers:
        name = PurePosixPath(each.path).name
        is_gguf = name.lower().endswith(".gguf")
        if each.media_type == _PROJECTOR or (is_gguf and is_projector(name)):
            projectors[name if is_gguf and is_projector(name) else f"mmproj-{_stem(artifact)}.gguf"] = each
        elif is_gguf or each.media_type in _GGUF or (each.media_type == RAW_WEIGHTS and not name):
            weights.append(each)
    names = _names(weights, artifact)
    sets = gguf_sets(names)
    if len(sets) > 1 or any(each.missing for each in sets) or len(names) < len(weights):
        message = f"artifact is not one whole model: {artifact.name}: it has {', '.join(sorted(names))}"
        raise ConfigError(message, hint="push each model, with all its parts, under a tag of its own")
    found = [(path, names[path]) for each in sets for path in each.paths]
    projector = projector_of(projectors)
    return (*found, *([(projector, projectors[projector])] if projector and found else []))


def _names(weights: Sequence[Descriptor], artifact: Artifact) -> dict[str, Descriptor]:
    """Return the layers by file name. Layers without names are the parts of one model, in order."""
    paths = [PurePosixPath(each.path).name for each in weights]
    if all(path.lower().endswith(".gguf") for path in paths):
        return dict(zip(paths, weights, strict=True))
    stem, count = _stem(artifact), len(weights)
    if count == 1:
        return {f"{stem}.gguf": weights[0]}
    return {f"{stem}-{number:05}-of-{count:05}.gguf": each for number, each in enumerate(weights, 1)}


def _stem(artifact: Artifact) -> str:
    name = artifact.repository.rpartition("/")[2]
    return f"{name}-{artifact.tag}" if artifact.tag not in (None, "latest") else name


def _refuse(manifest: Manifest, artifact: Artifact, *, is_folder: bool) -> tuple[tuple[str, Descriptor], ...]:
    kinds = [each.media_type for each in manifest.layers]
    if archives := [kind for kind in kinds if _ARCHIVE.fullmatch(kind)]:
        message = f"files of this artifact are in archives, which are not unpacked: {artifact.name}: {archives[0]}"
        hint = "pack it with one raw layer for each file, as `appliance models push` does"
        raise ConfigError(message, hint=hint)
    what = "a folder of safetensors" if is_folder else "a whole GGUF model"
    has = printable(", ".join(dict.fromkeys(kinds))) or "no layers"
    message = f"artifact has nothing that this image serves ({what}): {artifact.name}: it has {has:.400}"
    hint = "name a ModelPack or a model of Docker Model Runner in this format, or use the other engine's image"
    raise ConfigError(message, hint=hint)
