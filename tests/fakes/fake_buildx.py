#!/usr/bin/env python3
"""`docker buildx build` that builds nothing: put on the PATH as `docker`.

It appends its words to FAKE_BUILDX_LOG. With `type=local` it writes FAKE_MANIFEST as files.sha256; with `type=oci` an
archive of one layer, of which it holds the next of FAKE_LAYERS, its labels in the configuration. FAKE_CODE ends it.
FAKE_EDITS, `NUMBER FILE`: in the run of that number it writes to the file, as somebody does meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import sys
import tarfile
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    log = Path(os.environ["FAKE_BUILDX_LOG"])
    earlier = log.read_text("utf-8").splitlines() if log.exists() else []
    log.write_text("\n".join([*earlier, json.dumps(words)]) + "\n", "utf-8")
    number, _, edited = os.environ.get("FAKE_EDITS", "").partition(" ")
    if number == str(len(earlier) + 1):
        with Path(edited).open("a") as file:
            file.write("# edited\n")
    if code := int(os.environ.get("FAKE_CODE", "0")):
        print("ERROR: failed to solve: a step failed")
        return code
    output = dict(part.partition("=")[::2] for part in words[words.index("--output") + 1].split(","))
    target = Path(output["dest"])
    if output["type"] == "local":
        target.mkdir()
        (target / "files.sha256").write_text(os.environ["FAKE_MANIFEST"], "utf-8")
        return 0
    count = sum("type=oci" in line for line in earlier)
    write_archive(target, os.environ["FAKE_LAYERS"].split(",")[count].encode(), labels_of(words))
    return 0


def labels_of(words: list[str]) -> dict[str, str]:
    said = [value for flag, value in itertools.pairwise(words) if flag == "--label"]
    return {name: value for name, _, value in (each.partition("=") for each in said)}


def write_archive(path: Path, layer: bytes, labels: dict[str, str]) -> None:
    config = json.dumps({"config": {"Labels": labels}}).encode()
    parts = [{"digest": digest(data), "size": len(data)} for data in (config, layer)]
    document = {"config": parts[0], "layers": parts[1:]}
    manifest = json.dumps(document).encode()
    index = json.dumps({"manifests": [{"digest": digest(manifest)}]}).encode()
    blobs = {f"blobs/{digest(data).replace(':', '/')}": data for data in (config, layer, manifest)}
    with tarfile.open(path, "w") as tar:
        for name, data in {"index.json": index, **blobs}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


if __name__ == "__main__":
    sys.exit(main())
