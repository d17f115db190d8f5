"""What is in a built image, read from its saved layers: every file of each, also those that a later one hides."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from images.errors import VerificationError

PRIVATE_KEY = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\r?\n(?:[A-Za-z0-9+/=:, -]+\r?\n)?[A-Za-z0-9+/=\r\n]{60,}"
)
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\s*([A-Za-z0-9+/=\s]+?)\s*-----END CERTIFICATE-----")
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# Read into memory for the checks that look inside: the facts, and the first bytes of byte code.
KEPT = re.compile(r"^opt/appliance/[a-z_]+\.json$")
HEADER_BYTES = 16

Kind = Literal["file", "folder", "link", "other"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    path: str  # without a leading slash
    kind: Kind
    mode: int
    uid: int
    gid: int
    size_bytes: int
    layer: int  # 0 is the base
    content: bytes = b""  # whole for the facts, the header for byte code, else empty


@dataclass(kw_only=True)
class Tree:
    """`files` is what a container sees. Certificates are those of each layer, by their text without line ends."""

    files: dict[str, Entry] = field(default_factory=dict)
    base: dict[str, Entry] = field(default_factory=dict)
    private_keys: list[str] = field(default_factory=list)  # `layer 3: path`, of our own layers
    certificates: dict[str, set[bytes]] = field(default_factory=dict)  # of our own layers, by place
    base_certificates: set[bytes] = field(default_factory=set)

    @property
    def size_bytes(self) -> int:
        """Files as a container sees them, uncompressed."""
        return sum(entry.size_bytes for entry in self.files.values())


def read_tree(archive: Path) -> Tree:
    """Reads what `docker save` wrote. VerificationError when it is something else."""
    tree = Tree()
    try:
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            layers = json.load(manifest)[0]["Layers"] if manifest else []
            for number, name in enumerate(layers):
                blob = tar.extractfile(name)
                if blob:
                    _add_layer(tree, number, blob)
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        message = f"the saved image cannot be read: {archive}: {error}"
        raise VerificationError(message) from error
    return tree


def parse_certificates(data: bytes) -> set[bytes]:
    """The bodies of all PEM certificates, without line ends."""
    if b"-----BEGIN CERTIFICATE-----" not in data:  # saves the regular expression 200 MB of binaries
        return set()
    return {b"".join(body.split()) for body in CERTIFICATE.findall(data)}


def _add_layer(tree: Tree, number: int, blob: IO[bytes]) -> None:
    with tarfile.open(fileobj=blob, mode="r:*") as layer:
        for member in layer:
            path = PurePosixPath(member.name)
            if path.name.startswith(WHITEOUT):
                _remove(tree, path)
                continue
            reader = layer.extractfile(member) if member.isreg() else None
            data = reader.read() if reader else b""
            entry = _entry(member, number, data)
            tree.files[entry.path] = entry
            if number == 0:
                tree.base[entry.path] = entry
            _look_for_secrets(tree, entry, data)


def _remove(tree: Tree, whiteout: PurePosixPath) -> None:
    name = whiteout.name.removeprefix(WHITEOUT)
    gone = _clean(whiteout.parent if whiteout.name == OPAQUE else whiteout.parent / name)
    for path in list(_below(tree, gone)):
        del tree.files[path]
    if whiteout.name != OPAQUE:
        tree.files.pop(gone, None)


def _below(tree: Tree, folder: str) -> Iterator[str]:
    return (path for path in tree.files if path.startswith(f"{folder}/"))


def _entry(member: tarfile.TarInfo, layer: int, data: bytes) -> Entry:
    path = _clean(PurePosixPath(member.name))
    is_code = path.endswith(".pyc")
    return Entry(
        path=path,
        kind=_kind(member),
        mode=member.mode & 0o7777,
        uid=member.uid,
        gid=member.gid,
        size_bytes=member.size if member.isreg() else 0,
        layer=layer,
        content=data[:HEADER_BYTES] if is_code else data if KEPT.match(path) else b"",
    )


def _kind(member: tarfile.TarInfo) -> Kind:
    if member.isreg() or member.islnk():
        return "file"
    if member.isdir():
        return "folder"
    return "link" if member.issym() else "other"


def _look_for_secrets(tree: Tree, entry: Entry, data: bytes) -> None:
    """What the base brings is public: Debian's libgnutls carries the private keys of its own self-test."""
    if entry.layer == 0:
        tree.base_certificates |= parse_certificates(data)
        return
    place = f"layer {entry.layer}: {entry.path}"
    if PRIVATE_KEY.search(data):
        tree.private_keys.append(place)
    found = parse_certificates(data)
    if found:
        tree.certificates[place] = found


def _clean(path: PurePosixPath) -> str:
    return path.as_posix().removeprefix("./").strip("/")
