"""Reads the saved layers of an image: every file of each layer, hidden ones too."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO, Literal

from images.errors import VerificationError
from images.layers.leaks import leaks

# Encrypted ones have header lines and an empty one: Proc-Type, DEK-Info.
PRIVATE_KEY = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----\r?\n(?:[A-Za-z0-9+/=:,. -]*\r?\n){0,6}?[A-Za-z0-9+/=\r\n]{60,}"
)
CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----\s*([A-Za-z0-9+/=\s]+?)\s*-----END CERTIFICATE-----")
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
# Read into memory for the checks that look inside: the facts, the packages, and the first bytes of byte code.
KEPT = re.compile(r"^(?:opt/appliance/(?:[a-z_]+\.json|files\.sha256)|var/lib/dpkg/status|etc/passwd)$")
HEADER_BYTES = 16
ELF_MAGIC = b"\x7fELF"
ELF_MACHINE = struct.Struct("<18xH")  # little-endian, as both platforms are

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
    content: bytes = b""  # whole if kept, the header for byte code, else empty
    machine: int | None = None  # ELF machine: whose instructions these are
    sha256: str = ""  # SHA-256 of the bytes; for a hard link, of its target's
    target: str = ""  # target of a symbolic link, as written


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """Files to write to a folder while the layers are read, for another program."""

    pattern: re.Pattern[str]
    folder: Path


@dataclass(kw_only=True)
class Tree:
    """Files of an image. `files` are those a container sees; certificates are of each layer, without line ends."""

    files: dict[str, Entry] = field(default_factory=dict)
    base: dict[str, Entry] = field(default_factory=dict)
    private_keys: list[str] = field(default_factory=list)  # `layer 3: path`, own layers only
    secrets: list[str] = field(default_factory=list)  # `layer 3: path (GitHub token)`, own layers only
    configuration: bytes = b""  # configuration of the image with its history, JSON
    certificates: dict[str, set[bytes]] = field(default_factory=dict)  # certificates of the own layers, by place
    base_certificates: set[bytes] = field(default_factory=set)
    extracted: dict[str, Path] = field(default_factory=dict)  # requested files, by path in the image

    @property
    def size_bytes(self) -> int:
        """Size of the files that a container sees, uncompressed."""
        return sum(entry.size_bytes for entry in self.files.values())


def read_tree(archive: Path, *, kept: re.Pattern[str] = KEPT, extraction: Extraction | None = None) -> Tree:
    """Reads the output of `docker save` and keeps the bytes of `kept`. Raises VerificationError for anything else."""
    tree = Tree()
    try:
        with tarfile.open(archive) as tar:
            manifest = tar.extractfile("manifest.json")
            image = json.load(manifest)[0] if manifest else {"Layers": []}
            if image.get("Config") and (described := tar.extractfile(image["Config"])):
                tree.configuration = described.read()
            for number, name in enumerate(image["Layers"]):
                blob = tar.extractfile(name)
                if blob:
                    _add_layer(tree, number, blob, kept, extraction)
    except (OSError, EOFError, zlib.error, tarfile.TarError, LookupError, ValueError) as error:
        message = f"the saved image cannot be read: {archive}: {error}"
        raise VerificationError(message) from error
    except (AttributeError, TypeError) as error:  # whoever wrote it: JSON of another form
        message = f"the saved image cannot be read: {archive}: its manifest.json has another form: {error}"
        raise VerificationError(message) from error
    tree.extracted = {path: file for path, file in tree.extracted.items() if path in tree.files}
    return tree


def members(layer: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yields a layer's members in order, None for one without bytes. Read each before asking for the next."""
    with tarfile.open(fileobj=layer, mode="r:*") as tar:
        for member in tar:
            yield member, tar.extractfile(member) if member.isreg() else None


def parse_certificates(data: bytes) -> set[bytes]:
    """Returns the bodies of all PEM certificates, without line ends."""
    if b"-----BEGIN CERTIFICATE-----" not in data:  # saves the regular expression 200 MB of binaries
        return set()
    return {b"".join(body.split()) for body in CERTIFICATE.findall(data)}


def _add_layer(tree: Tree, number: int, blob: IO[bytes], kept: re.Pattern[str], extraction: Extraction | None) -> None:
    for member, reader in members(blob):
        path = PurePosixPath(member.name)
        if path.name.startswith(WHITEOUT):
            _remove(tree, path)
            continue
        data = reader.read() if reader else b""
        entry = _entry(member, number, data, kept)
        if member.islnk():
            entry = _linked(tree, entry, _clean(PurePosixPath(member.linkname)))
        tree.files[entry.path] = entry
        if number == 0:
            tree.base[entry.path] = entry
        _look_for_secrets(tree, entry, data)
        if extraction:
            _extract(tree, entry, data, extraction)


def _extract(tree: Tree, entry: Entry, data: bytes, extraction: Extraction) -> None:
    """Writes the file under a hash: an image's paths are not for this machine. A later layer replaces it."""
    tree.extracted.pop(entry.path, None)
    # A hard link has no bytes of its own: the name that it links to brings them.
    if data and entry.kind == "file" and extraction.pattern.match(entry.path):
        file = extraction.folder / hashlib.sha256(entry.path.encode()).hexdigest()
        file.write_bytes(data)
        tree.extracted[entry.path] = file


def _remove(tree: Tree, whiteout: PurePosixPath) -> None:
    name = whiteout.name.removeprefix(WHITEOUT)
    gone = _clean(whiteout.parent if whiteout.name == OPAQUE else whiteout.parent / name)
    for path in list(_below(tree, gone)):
        del tree.files[path]
    if whiteout.name != OPAQUE:
        tree.files.pop(gone, None)


def _below(tree: Tree, folder: str) -> Iterator[str]:
    return (path for path in tree.files if path.startswith(f"{folder}/"))


def _entry(member: tarfile.TarInfo, layer: int, data: bytes, kept: re.Pattern[str]) -> Entry:
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
        content=data[:HEADER_BYTES] if is_code else data if kept.match(path) else b"",
        machine=_machine(data),
        sha256=hashlib.sha256(data).hexdigest() if member.isreg() else "",
        target=member.linkname if member.issym() else "",
    )


def _linked(tree: Tree, entry: Entry, target: str) -> Entry:
    return replace(entry, sha256=tree.files[target].sha256) if target in tree.files else entry


def _machine(data: bytes) -> int | None:
    return (
        int(ELF_MACHINE.unpack_from(data)[0]) if data.startswith(ELF_MAGIC) and len(data) > ELF_MACHINE.size else None
    )


def _kind(member: tarfile.TarInfo) -> Kind:
    if member.isreg() or member.islnk():
        return "file"
    if member.isdir():
        return "folder"
    return "link" if member.issym() else "other"


def _look_for_secrets(tree: Tree, entry: Entry, data: bytes) -> None:
    """Looks for secrets in a file. Files of the base are public: Debian's libgnutls has keys of its own self-test."""
    if entry.layer == 0:
        tree.base_certificates |= parse_certificates(data)
        return
    place = f"layer {entry.layer}: {entry.path}"
    if PRIVATE_KEY.search(data):
        tree.private_keys.append(place)
    tree.secrets += (f"{place} ({name})" for name in leaks(data, entry.path))
    found = parse_certificates(data)
    if found:
        tree.certificates[place] = found


def _clean(path: PurePosixPath) -> str:
    return path.as_posix().removeprefix("./").strip("/")
