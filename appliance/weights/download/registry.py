"""Resolve an artifact of a container registry to its files, by its manifest.

Source: opencontainers/distribution-spec, spec.md, "Pulling manifests".
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import aiohttp

from appliance.errors import ConfigError, DownloadError
from appliance.reference import Artifact
from appliance.settings import HubSettings
from appliance.weights.cache.artifact import (
    INDEX_TYPES,
    MANIFEST_TYPES,
    Manifest,
    files_of,
    only_model,
    parse_manifest,
)
from appliance.weights.cache.download_set import Wanted, WantedFile
from appliance.weights.download.login import read_limited
from appliance.weights.download.ranges import RefusedError, open_reply, open_session
from appliance.weights.download.retry import Patience, patiently

_MANIFEST_BYTES = 4 * 2**20  # a registry need not accept more: distribution-spec, "Pushing manifests"


async def resolve_artifact(
    text: str, artifact: Artifact, hub: HubSettings, *, is_folder: bool, on_wait: Callable[[str], None]
) -> Wanted:
    """Return the files that the tag or digest means now. Raises ConfigError if the registry has no such model or this
    image does not serve it, DownloadError if the registry refuses or sends something else."""

    async def ask() -> tuple[Manifest, str]:
        async with open_session() as session:
            return await _read_model(session, artifact, hub)

    manifest, digest = await patiently(ask, Patience(hub.patience_s), artifact.name, on_wait)
    files = tuple(
        WantedFile(
            path=path,
            bytes=layer.size,
            sha256=layer.sha256,
            url=f"{artifact.api}/blobs/{layer.digest}",
            registry=artifact.host,
        )
        for path, layer in files_of(manifest, artifact, is_folder=is_folder)
    )
    folder = f"models--{artifact.folder}"
    return Wanted(repo=None, revision=digest, folder=folder, files=files, name=text, ref="main")


async def _read_model(session: aiohttp.ClientSession, artifact: Artifact, hub: HubSettings) -> tuple[Manifest, str]:
    """Return the model's manifest, and the sha256 of what the reference itself leads to."""
    data = await _read(session, artifact, artifact.reference, hub)
    manifest, digest = parse_manifest(data, artifact), hashlib.sha256(data).hexdigest()
    if manifest.entries:
        entry = only_model(manifest, artifact)
        manifest = parse_manifest(await _read(session, artifact, entry.digest, hub), artifact)
    return manifest, digest


async def _read(session: aiohttp.ClientSession, artifact: Artifact, reference: str, hub: HubSettings) -> bytes:
    """Return a manifest by tag or digest. One with another digest than named is refused."""
    url = f"{artifact.api}/manifests/{reference}"
    file = WantedFile(path=artifact.name, bytes=None, sha256=None, url=url, registry=artifact.host)
    headers = {"Accept": ", ".join((*MANIFEST_TYPES, *INDEX_TYPES)), "Accept-Encoding": "identity"}
    try:
        async with open_reply(session, file, headers, hub) as reply:
            data = await read_limited(reply, _MANIFEST_BYTES)
    except RefusedError as error:
        if error.status != 404:
            raise
        message = f"no such model in the registry: {artifact.name}"
        raise ConfigError(message, hint="check its repository and tag") from error
    if data is None:
        message = f"manifest is longer than {_MANIFEST_BYTES:,} bytes: {artifact.name}"
        raise DownloadError(message, hint="this is no model's manifest: check the reference")
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if reference.startswith("sha256:") and found != reference:
        message = f"manifest has another digest than named: {artifact.name}: expected {reference}, got {found}"
        raise DownloadError(message, hint="the registry or a proxy on the way changed it: do not use this model")
    return data
