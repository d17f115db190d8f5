"""The fake registry as a process of a test, and artifacts to put into it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.hub.running import RunningHub, program, turn

RAW = "application/vnd.cncf.model.weight.v1.raw"
GGUF = "application/vnd.docker.ai.gguf.v3"
PROJECTOR = "application/vnd.docker.ai.mmproj"
MODELPACK = {
    "artifactType": "application/vnd.cncf.model.manifest.v1+json",
    "config": "application/vnd.cncf.model.config.v1+json",
}
DOCKER = {"config": "application/vnd.docker.ai.model.config.v0.1+json"}
Layer = tuple[str, str, bytes]  # media type, path or "", content


class RunningRegistry(RunningHub):
    @property
    def host(self) -> str:
        return self.endpoint.removeprefix("http://")

    def name(self, rest: str) -> str:
        return f"oci://{self.host}/{rest}"


@contextmanager
def running_registry(folder: Path, *knobs: str) -> Iterator[RunningRegistry]:
    """Serves `folder`; what is under it may change meanwhile. One at a time."""
    addresses = program("tests.fakes.registry")
    yield RunningRegistry(**addresses, folder=folder, log=turn(addresses, folder, *knobs))


def descriptor(folder: Path, kind: str, data: bytes, path: str = "") -> dict[str, Any]:
    """Store a blob and return what a manifest says of it."""
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(data).hexdigest()
    (folder / "blobs" / sha256).write_bytes(data)
    named = {"annotations": {"org.cncf.model.filepath": path}} if path else {}
    return {"mediaType": kind, "digest": f"sha256:{sha256}", "size": len(data), **named}


def put_artifact(
    folder: Path, files: list[Layer], *, name: str = "team/tiny:q4", kinds: dict[str, str] = MODELPACK, **more: Any
) -> str:
    """Store an artifact and return its manifest's digest. `more` are fields of the manifest that are other than
    usual."""
    document = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        **kinds,
        "config": descriptor(folder, kinds["config"], b"{}"),
        "layers": [descriptor(folder, kind, data, path) for kind, path, data in files],
        **more,
    }
    return put_manifest(folder, json.dumps(document).encode(), name)


def put_manifest(folder: Path, data: bytes, name: str) -> str:
    repository, _, tag = name.rpartition(":")
    (folder / repository).mkdir(parents=True, exist_ok=True)
    (folder / repository / tag).write_bytes(data)
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def put_index(folder: Path, entries: list[dict[str, Any]], name: str) -> str:
    kind = "application/vnd.oci.image.index.v1+json"
    data = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()
    return put_manifest(folder, data, name)


def entry(digest: str, **more: Any) -> dict[str, Any]:
    """Return what an index says of a manifest."""
    return {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest, "size": 1, **more}
