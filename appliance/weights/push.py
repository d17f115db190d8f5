"""`models push`: send a model to a container registry as a ModelPack, one raw layer for each file.

Source: opencontainers/distribution-spec, spec.md, "Pushing blobs" (POST, then one PUT) and "Pushing manifests";
cache/artifact.py has those of ModelPack.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import aiohttp

from appliance.documents import load
from appliance.errors import ConfigError, DownloadError, ModelUnreadableError, printable
from appliance.reference import Artifact, parse_reference
from appliance.settings import HubSettings
from appliance.values import dataclass
from appliance.weights.cache.artifact import (
    CONFIG,
    FILE_PATH,
    MANIFEST_TYPES,
    MODEL,
    RAW_CONFIG,
    RAW_WEIGHTS,
)
from appliance.weights.cache.size import as_size
from appliance.weights.download.login import LOGIN_HINT, log_in, origin, read_limited
from appliance.weights.download.ranges import as_sent, broken, open_session
from appliance.weights.download.retry import PASSING, Patience, Transient, patiently
from appliance.weights.show import Counted
from appliance.weights.stores.import_files import name_of
from appliance.weights.stores.remove import blob_of
from appliance.weights.stores.stores import StoredModel, facts_of
from appliance.weights.stores.transfer import digest_file

_CHUNK_BYTES = 2**20
_SHA256 = re.compile(r"(?:sha256-)?([0-9a-f]{64})")
# A registry reads the whole blob again before it answers: minutes for 40 GB on a slow disk.
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=15, sock_read=900)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """`sent_bytes` are without the files that the registry had."""

    name: str
    reference: str
    digest: str
    bytes: int
    sent_bytes: int

    def document(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        sent = f"{as_size(self.sent_bytes)} of {as_size(self.bytes)} sent"
        return printable(f"{self.name}: pushed to {self.reference}, {sent}\n  {self.digest}")


@dataclass(frozen=True, kw_only=True)
class _Blob:
    """What a layer is made of: a file, or the configuration's text."""

    media_type: str
    sha256: str
    size: int
    name: str = ""
    file: Path | None = None
    data: bytes = b""

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"

    def descriptor(self) -> dict[str, Any]:
        named = {"annotations": {FILE_PATH: self.name}} if self.name else {}
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **named}


def push(model: StoredModel, target: str, hub: HubSettings) -> Pushed:
    """Send the model. Blocks. Raises ConfigError for a target that cannot be pushed to, ModelUnreadableError for a
    damaged model, DownloadError if the registry refuses or does not answer."""
    artifact = parse_reference(target).artifact
    if artifact is None or artifact.digest:
        message = f"not a tag in a container registry: {printable(target)}"
        raise ConfigError(message, hint="as in oci://registry.example/team/model:q4")
    if hub.offline:
        message = f"offline mode is on, nothing is sent: {artifact.name}"
        raise DownloadError(message, hint="repeat it with --offline off")
    if model.problem:
        message = f"model cannot be pushed: {printable(f'{model.name}: {model.problem}')}"
        raise ModelUnreadableError(message, hint="`appliance models list` shows its state")
    facts = facts_of(model)  # first: it refuses a damaged model before anything is sent
    files = [*model.files, *([model.projector] if model.projector else [])]
    meter = Counted("hashing", sum(file.stat().st_size for file in files))
    layers = [_layer(model, file, meter) for file in files]
    meter.end()
    blobs = [*layers, _config(facts, layers)]
    return asyncio.run(_push(model, artifact, blobs, hub))


def _layer(model: StoredModel, file: Path, meter: Counted) -> _Blob:
    """Describe a file. A blob's name is its sha256, which the registry and we check again on the way."""
    known = _SHA256.fullmatch((blob_of(file) or file).name)
    sha256 = known[1] if known else digest_file(file, hashlib.sha256(), meter)
    name = name_of(model, file)
    is_weights = name.endswith((".gguf", ".safetensors"))
    kind = RAW_WEIGHTS if is_weights else RAW_CONFIG
    return _Blob(media_type=kind, sha256=sha256, size=file.stat().st_size, name=name, file=file)


def _config(facts: dict[str, str], layers: list[_Blob]) -> _Blob:
    """Return ModelPack's configuration. It has no time and no place, so that the same model has the same digest."""
    content = {"type": "layers", "diffIds": [each.digest for each in layers]}
    data = json.dumps({"descriptor": {"name": facts.pop("name")}, "config": facts, "modelfs": content}).encode()
    return _Blob(media_type=CONFIG, sha256=hashlib.sha256(data).hexdigest(), size=len(data), data=data)


async def _push(model: StoredModel, artifact: Artifact, blobs: list[_Blob], hub: HubSettings) -> Pushed:
    *layers, config = blobs
    total, sent = sum(each.size for each in blobs), 0
    async with open_session() as session:
        upload = _Upload(session, artifact, hub, Counted(f"pushing to {artifact.host}", total))
        for blob in blobs:
            patience = Patience(hub.patience_s)
            sent += await patiently(partial(upload.blob, blob), patience, artifact.name, upload.say)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPES[0],
            "artifactType": MODEL,
            "config": config.descriptor(),
            "layers": [each.descriptor() for each in layers],
        }
        data = json.dumps(manifest).encode()
        patience = Patience(hub.patience_s)
        await patiently(lambda: upload.manifest(data), patience, artifact.name, upload.say)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    return Pushed(name=model.name, reference=artifact.name, digest=digest, bytes=total, sent_bytes=sent)


class _Upload:
    """Requests to one repository; remembers the logins, of which one for reading may not write."""

    def __init__(self, session: aiohttp.ClientSession, artifact: Artifact, hub: HubSettings, meter: Counted) -> None:
        self._session = session
        self._artifact = artifact
        self._hub = hub
        self._meter = meter
        self._logins: dict[bool, str | None] = {}  # True: only for reading

    def say(self, words: str) -> None:
        self._meter.end()
        print(printable(f"waiting: {words}"), file=sys.stderr, flush=True)

    async def blob(self, blob: _Blob) -> int:
        """Send a blob unless the registry has it. Returns the bytes sent."""
        api = self._artifact.api
        if await self._ask("HEAD", f"{api}/blobs/{blob.digest}", known=(200, 404)) == 200:
            self._meter(blob.size)
            return 0
        reply = await self._request("POST", f"{api}/blobs/uploads/", known=(202,))
        place = urljoin(f"{api}/blobs/uploads/", reply.headers.get("Location", ""))
        address = f"{place}{'&' if '?' in place else '?'}digest={blob.digest.replace(':', '%3A')}"
        source = _Source(blob, self._meter)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
        try:
            await self._ask("PUT", address, known=(201,), headers=headers, data=source.chunks())
        except (Transient, DownloadError):
            self._meter(-source.sent)
            if source.problem:
                raise source.problem from None
            raise
        return blob.size

    async def manifest(self, data: bytes) -> None:
        address = f"{self._artifact.api}/manifests/{self._artifact.tag}"
        await self._ask("PUT", address, known=(201,), headers={"Content-Type": MANIFEST_TYPES[0]}, data=data)
        self._meter.end()

    async def _ask(self, method: str, address: str, *, known: tuple[int, ...], **more: Any) -> int:  # noqa: ANN401
        return (await self._request(method, address, known=known, **more)).status

    async def _request(
        self,
        method: str,
        address: str,
        *,
        known: tuple[int, ...],
        headers: Mapping[str, str] | None = None,
        **more: Any,  # noqa: ANN401 - the client's own
    ) -> aiohttp.ClientResponse:
        """Return the registry's answer, of one of the known statuses; its body is closed."""
        name = self._artifact.name
        is_own, reads = origin(address) == origin(self._artifact.api), method == "HEAD"
        try:
            for _ in range(2):
                login = self._logins.get(reads) if is_own else None
                own = {**(headers or {}), **({"Authorization": login} if login else {})}
                async with self._session.request(
                    method, as_sent(address), headers=own, allow_redirects=False, timeout=_TIMEOUT, **more
                ) as reply:
                    if reply.status in known:
                        return reply
                    if reply.status == 401 and is_own and isinstance(more.get("data", b""), bytes):
                        self._logins[reads] = await log_in(self._session, reply, self._artifact.host, self._hub)
                        if self._logins[reads] not in (None, login):
                            continue
                    if reply.status in PASSING:
                        words = f"{reply.url.host} answers {reply.status}"
                        raise Transient(words)
                    raise await _refused(reply, name)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            raise broken(error, name, address) from error
        message = f"upload failed: {name}: the registry asks for a login again and again"
        raise DownloadError(message, hint=LOGIN_HINT)


async def _refused(reply: aiohttp.ClientResponse, name: str) -> DownloadError:
    """Return the error for a refusal, with the registry's own words."""
    data = await read_limited(reply, 2**16) or b""
    try:
        said = load(data)["errors"][0]
        words = f": {said['code']}: {said.get('message', '')}"
    except (ValueError, LookupError, TypeError, AttributeError):
        words = ""
    message = f"upload failed: {name}: {reply.url.host} answers {reply.status}{printable(words):.300}"
    hint = LOGIN_HINT if reply.status in (401, 403) else "files that the registry has are not sent again"
    return DownloadError(message, hint=hint)


class _Source:
    """A blob's bytes, hashed as they are sent: a disk may have changed them since the hash was made."""

    def __init__(self, blob: _Blob, meter: Counted) -> None:
        self._blob = blob
        self._meter = meter
        self.sent = 0
        self.problem: ModelUnreadableError | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        digest, what = hashlib.sha256(), self._blob
        if what.file is None:
            yield what.data
            return
        try:
            with what.file.open("rb") as file:
                while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
                    digest.update(chunk)
                    self.sent += len(chunk)
                    if self.sent >= what.size and digest.hexdigest() != what.sha256:
                        break
                    self._meter(len(chunk))
                    yield chunk
        except OSError as error:
            raise self._changed((error.strerror or str(error)).lower()) from error
        if digest.hexdigest() != what.sha256:
            words = f"its hash is {digest.hexdigest()}, expected {what.sha256}"
            raise self._changed(words)

    def _changed(self, words: str) -> ModelUnreadableError:
        """Keep the error: the client's library reports only that the connection broke."""
        message = f"file is damaged, or changed meanwhile: {printable(str(self._blob.file))}: {words}"
        self.problem = ModelUnreadableError(message, hint="`appliance models verify` checks every file")
        return self.problem
