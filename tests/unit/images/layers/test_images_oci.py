"""OCI archives made by hand: one image, an image with something said about it, several platforms, and no archive."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from images import __main__ as command
from images.errors import BuildError, UsageError, VerificationError
from images.layers import oci
from images.proof import reproduce

SAID = {"predicateType": "https://spdx.dev/Document"}


def test_one_image(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    mine = archive.manifest("mine")
    with oci.opened(archive.write([mine])) as tar:
        assert oci.read(tar) == oci.Contents(index=mine["digest"], manifest=mine["digest"], statements=())


def test_what_is_said_about_an_image_is_not_taken_for_it(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    mine = archive.manifest("mine", "linux/amd64")
    index = archive.index([archive.about(mine), mine])
    with oci.opened(archive.write([index])) as tar:
        found = oci.read(tar)
        assert oci.manifest_of(tar) == {"layers": [], "name": "mine"}
    assert (found.index, found.manifest, found.statements) == (index["digest"], mine["digest"], (SAID,))


def test_of_several_platforms_one_is_chosen(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    images = [archive.manifest(name, f"linux/{name}") for name in ("amd64", "arm64")]
    path = archive.write([archive.index(images)])
    assert reproduce.published(str(path), "linux/arm64", cwd=tmp_path).manifest == images[1]["digest"]
    with oci.opened(path) as tar:
        with pytest.raises(VerificationError, match="one image for linux/riscv64 expected, and the archive holds 0"):
            oci.read(tar, "linux/riscv64")
        with pytest.raises(VerificationError, match="one image expected, and the archive holds 2"):
            oci.read(tar)


def test_a_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("words")
    with pytest.raises(VerificationError, match=r"not an OCI archive: .*notes\.txt"):
        reproduce.published(str(path), "linux/amd64", cwd=tmp_path)


def test_an_archive_that_was_damaged_on_its_way_is_named(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    path = archive.write([archive.manifest("mine")])
    packed = bytearray(gzip.compress(path.read_bytes()))
    refused = 0
    for at in range(20, len(packed) - 8, 7):
        damaged = bytearray(packed)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            with oci.opened(path) as tar:
                oci.read(tar)
        except VerificationError as error:  # and nothing else, wherever the damage lies
            refused += error.message.startswith(f"not an OCI archive: {path}: ")
    assert refused > 10


def test_an_archive_without_its_blob_is_named(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    mine = archive.manifest("mine")
    archive.blobs.clear()
    with (
        oci.opened(archive.write([mine])) as tar,
        pytest.raises(VerificationError, match=r"blobs/sha256/.* is missing"),
    ):
        oci.read(tar)


@pytest.mark.parametrize("index", ['{"manifests": "x"}', '{"manifests": [{"mediaType": "x"}]}', "[1]", "null"])
def test_an_archive_with_documents_of_another_form_is_named(tmp_path: Path, index: str) -> None:
    path = tmp_path / "strange.oci.tar"
    (tmp_path / "index.json").write_text(index)
    with tarfile.open(path, "w") as tar:
        tar.add(tmp_path / "index.json", "index.json")
    with pytest.raises(VerificationError, match=r"not an OCI archive: .*strange\.oci\.tar"):
        reproduce.published(str(path), "linux/amd64", cwd=tmp_path)


def test_a_manifests_digest_is_taken_as_it_is(tmp_path: Path) -> None:
    digest = "sha256:" + "0" * 64
    assert reproduce.published(digest, "linux/amd64", cwd=tmp_path) == reproduce.Published(manifest=digest)


@pytest.mark.parametrize("what", ["appliance:llama-cpu", "sha256:12", "missing.oci.tar", "host/app@sha256:xyz"])
def test_what_is_neither_archive_nor_digest_is_exit_2(tmp_path: Path, what: str) -> None:
    with pytest.raises(UsageError, match=f"--against is neither an archive that is here nor a digest: {what}"):
        reproduce.published(what, "linux/amd64", cwd=tmp_path)


def test_a_registry_that_does_not_answer_is_exit_60(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no registry answers for what was published"):
        reproduce.published("127.0.0.1:9/app@sha256:" + "0" * 64, "linux/amd64", cwd=tmp_path)


def test_no_docker_is_not_a_registry_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="program cannot be started: docker: No such file") as caught:
        reproduce.published("127.0.0.1:9/app@sha256:" + "0" * 64, "linux/amd64", cwd=tmp_path)
    assert caught.value.hint == "install Docker with its buildx plugin"


def test_a_comparison_without_a_build_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["verify", "--only", "llama-cpu", "--against", "sha256:" + "0" * 64]) == 2
    assert "--against belongs to --reproduce, which is not there" in capsys.readouterr().err


class Archive:
    """Collects blobs and writes them with an index.json over some of them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.oci.tar"
        self.blobs: dict[str, bytes] = {}

    def manifest(self, name: str, platform: str | None = None) -> dict[str, Any]:
        entry: dict[str, Any] = {"digest": self._add({"layers": [], "name": name})}
        if platform:
            system, _, machine = platform.partition("/")
            entry["platform"] = {"os": system, "architecture": machine}
        return entry

    def about(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return an attestation in the form that BuildKit adds: an entry of unknown platform with the image's
        digest."""
        said = self._add({"layers": [{"digest": self._add(SAID)}]})
        unknown = {"os": "unknown", "architecture": "unknown"}
        return {"digest": said, "platform": unknown, "annotations": {oci.ABOUT: entry["digest"]}}

    def index(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        return {"digest": self._add({"manifests": entries})}

    def write(self, entries: list[dict[str, Any]]) -> Path:
        with tarfile.open(self.path, "w") as tar:
            for name, data in {"index.json": json.dumps({"manifests": entries}).encode(), **self.blobs}.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return self.path

    def _add(self, document: dict[str, Any]) -> str:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[oci.blob(digest)] = data
        return digest
