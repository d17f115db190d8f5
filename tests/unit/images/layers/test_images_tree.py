"""Layers as `docker save` writes them, made here by hand."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from images.errors import VerificationError
from images.layers.tree import Extraction, Tree, parse_certificates, read_tree

PUBLIC = b"-----BEGIN CERTIFICATE-----\nMIIBpub\nlic=\n-----END CERTIFICATE-----\n"
COMPANY = b"-----BEGIN CERTIFICATE-----\r\nMIIBcompany\r\n-----END CERTIFICATE-----\r\n"
KEY = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"A" * 64 + b"\n-----END RSA PRIVATE KEY-----\n"


def test_later_layers_replace_and_hide(tmp_path: Path) -> None:
    tree = read_layers(
        tmp_path,
        {"./etc/a": b"1", "etc/b": b"22", "old/x/y": b"3", "keep": b""},
        {"etc/.wh.b": b"", "etc/a": b"4444", "old/.wh..wh..opq": b"", "old/new": b"5"},
    )
    assert sorted(tree.files) == ["etc/a", "keep", "old/new"]
    assert (tree.files["etc/a"].layer, tree.files["etc/a"].size_bytes) == (1, 4)
    assert sorted(tree.base) == ["etc/a", "etc/b", "keep", "old/x/y"]
    assert tree.size_bytes == 5


def test_a_removed_folder_takes_its_files_with_it(tmp_path: Path) -> None:
    tree = read_layers(tmp_path, {"var/lists/a": b"1", "var/listsnot": b"2"}, {"var/.wh.lists": b""})
    assert sorted(tree.files) == ["var/listsnot"]


def test_a_key_that_a_later_layer_removes_is_still_found(tmp_path: Path) -> None:
    tree = read_layers(tmp_path, {}, {"root/id": b"x" + KEY}, {"root/.wh.id": b""})
    assert "root/id" not in tree.files
    assert tree.private_keys == ["layer 1: root/id"]


def test_an_encrypted_key_is_a_key(tmp_path: Path) -> None:
    """The keys have the forms that `openssl genrsa -aes128 -traditional` and `openssl pkcs8 -topk8` write."""
    traditional = KEY.replace(b"A" * 64, b"Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0A1B\n\n" + b"A" * 64)
    newer = KEY.replace(b"RSA PRIVATE", b"ENCRYPTED PRIVATE")
    tree = read_layers(tmp_path, {}, {"a.pem": traditional, "b.pem": newer})
    assert tree.private_keys == ["layer 1: a.pem", "layer 1: b.pem"]


def test_what_the_base_brings_is_no_leak(tmp_path: Path) -> None:
    tree = read_layers(tmp_path, {"lib/tls.so": KEY, "etc/ca": PUBLIC}, {"etc/ca": PUBLIC + COMPANY})
    assert tree.private_keys == []
    assert tree.base_certificates == {b"MIIBpublic="}
    assert tree.certificates == {"layer 1: etc/ca": {b"MIIBpublic=", b"MIIBcompany"}}


def test_a_word_about_keys_is_no_key(tmp_path: Path) -> None:
    tree = read_layers(tmp_path, {}, {"lib.so": b"-----BEGIN PRIVATE KEY-----\0-----END"})
    assert tree.private_keys == []


def test_facts_are_kept_whole_and_byte_code_by_its_header(tmp_path: Path) -> None:
    layer = {"opt/appliance/engine_facts.json": b"{}" * 40, "a/x.pyc": b"p" * 40, "a/x.py": b"s" * 40}
    tree = read_layers(tmp_path, {}, layer)
    assert tree.files["opt/appliance/engine_facts.json"].content == b"{}" * 40
    assert tree.files["a/x.pyc"].content == b"p" * 16
    assert tree.files["a/x.py"].content == b""


def test_what_is_extracted_is_what_a_container_sees(tmp_path: Path) -> None:
    layers: list[dict[str, bytes]] = [
        {"opt/a.so": b"old", "opt/b.so": b"gone", "opt/c.txt": b"text", "opt/d.so": b"kept"},
        {"opt/.wh.b.so": b"", "opt/../opt/e.so": b"odd", "opt/a.so": b"new"},
    ]
    folder = tmp_path / "out"
    folder.mkdir()
    tree = read_layers(tmp_path, *layers, extraction=Extraction(pattern=re.compile(r"^opt/.+\.so$"), folder=folder))
    found = {path: file.read_bytes() for path, file in tree.extracted.items()}
    assert found == {"opt/a.so": b"new", "opt/d.so": b"kept", "opt/../opt/e.so": b"odd"}
    assert all(file.parent == folder for file in tree.extracted.values())


def test_an_elf_says_whose_instructions_it_holds(tmp_path: Path) -> None:
    header = b"\x7fELF\x02\x01\x01".ljust(18, b"\0")
    tree = read_layers(
        tmp_path, {"x": header + b"\x3e\0" + b"\0" * 44, "arm": header + b"\xb7\0" + b"\0" * 44, "txt": b"words"}
    )
    assert {path: entry.machine for path, entry in tree.files.items()} == {"x": 62, "arm": 183, "txt": None}


def test_certificates_are_compared_without_their_line_ends() -> None:
    assert parse_certificates(COMPANY) == parse_certificates(COMPANY.replace(b"\r\n", b"\n")) == {b"MIIBcompany"}


@pytest.mark.parametrize("data", [b"", b"not a tar at all" * 100])
def test_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "x.tar"
    archive.write_bytes(data)
    with pytest.raises(VerificationError, match="cannot be read"):
        read_tree(archive)


@pytest.mark.parametrize(
    "files",
    [{"index.json": b"{}"}, {"manifest.json": b"[]"}, {"manifest.json": b"[{}]"}, {"manifest.json": b"{"},
     {"manifest.json": b'[{"Layers": ["gone"]}]'}, {"manifest.json": b"[1]"}, {"manifest.json": b'{"Layers": []}'}],
    ids=str,
)  # fmt: skip
def test_a_sound_tar_that_is_no_docker_save_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    archive = tmp_path / "x.tar"
    archive.write_bytes(_tar(files))
    with pytest.raises(VerificationError, match=r"the saved image cannot be read: .*/x\.tar: ") as caught:
        read_tree(archive)
    assert caught.value.exit_code == 61


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5])
def test_a_damaged_archive_is_refused(tmp_path: Path, at: float) -> None:
    data = bytearray(gzip.compress(_tar({"manifest.json": json.dumps([{"Layers": []}]).encode()})))
    data[int(at * len(data))] ^= 0xFF
    archive = tmp_path / "x.tar"
    archive.write_bytes(data)
    with pytest.raises(VerificationError, match="the saved image cannot be read"):
        read_tree(archive)


def read_layers(folder: Path, *layers: dict[str, bytes], extraction: Extraction | None = None) -> Tree:
    names = [f"blobs/{number}" for number in range(len(layers))]
    blobs = {name: gzip.compress(_tar(layer)) for name, layer in zip(names, layers, strict=True)}
    archive = folder / "image.tar"
    archive.write_bytes(_tar({**blobs, "manifest.json": json.dumps([{"Layers": names}]).encode()}))
    return read_tree(archive, extraction=extraction)


def _tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, data in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()
