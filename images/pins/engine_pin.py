"""Moves llama.cpp's pin to a release of the package that carries its source.

Before a line is written the release is fetched, held to the index's hash, and every patch of the matrix is tried on its
source in their order. Commit and version are the release's own; the build's number is upstream's tag of that commit.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from images import docker
from images.errors import BuildError, MatrixError, VerificationError
from images.matrix.matrix import LOCKS, MATRIX_FILE, Engine

INDEX = "https://pypi.org/simple"
SOURCE = "vendor/llama.cpp"  # in the package
ANSWER = "application/vnd.pypi.simple.v1+json"  # PEP 691
TIMEOUT_S = 60.0
# `## [0.3.36]`, and below it up to the next release: `- feat: update llama.cpp to ggml-org/llama.cpp@0c1e57098`.
UPDATE = re.compile(r"llama\.cpp@([0-9a-f]{7,40})")
VERSION = re.compile(r"^set\(LLAMA_VERSION_(MAJOR|MINOR|PATCH)\s+(\d+)\)", re.MULTILINE)
IS_DEV = re.compile(r"^option\(LLAMA_BUILD_IS_DEV\s.*\bON\)", re.MULTILINE)
TAG = re.compile(r"([0-9a-f]{40})\trefs/tags/b(\d+)$")
HUNK = re.compile(r"^(?:patching file (?P<file>.+)|(?P<failed>\d+) out of \d+ hunks? (?:FAILED|ignored).*)$")
BLOCK = r"^  {engine}:\n((?:    .*\n|\s*\n|  #.*\n)*)"


@dataclass(frozen=True, kw_only=True)
class Release:
    """A source distribution as an index lists it."""

    version: str
    url: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What the matrix says of the engine."""

    release: str
    version: str
    build: int
    commit: str  # all 40 digits

    def __str__(self) -> str:
        return f"llama.cpp {self.version}, build {self.build}, commit {self.commit[:9]} (release {self.release})"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a patch went. `missed` names each file of which parts do not apply, with their number; empty: it applies."""

    patch: str
    missed: Mapping[str, int]

    def __str__(self) -> str:
        if not self.missed:
            return f"{self.patch}: applies"
        parts = (f"{file} ({count} part{'s' * (count > 1)})" for file, count in self.missed.items())
        return f"{self.patch}: does not apply: {', '.join(parts)}"


def find(distribution: str, wanted: str | None, *, index_url: str | None, ca_bundle: Path | None) -> Release:
    """Asks the index for the newest release with a source distribution, or for `wanted`. Raises BuildError."""
    address = f"{(index_url or INDEX).rstrip('/')}/{canonicalize_name(distribution)}/"
    answer = _get(address, ca_bundle, accept=ANSWER)
    try:
        known = {found.version: found for found in _releases(answer.json()["files"], distribution, address)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the index's answer is not a project page of PEP 691: {error!r}"
        raise BuildError(message, hint="is it the right index? --index-url takes its simple API") from error
    if wanted is None and known:
        return known[max(known, key=Version)]
    if wanted is None or wanted not in known:
        which = f"no source of {distribution} {wanted}" if wanted else f"no source of {distribution}"
        message = f"the index has {which}"
        newest = sorted(known, key=Version)[-3:]
        raise BuildError(message, hint=f"the newest are {', '.join(newest)}" if newest else "is it the right index?")
    return known[wanted]


def _releases(files: Sequence[Mapping[str, Any]], distribution: str, address: str) -> Iterator[Release]:
    name = re.compile(rf"{'[-_.]'.join(map(re.escape, distribution.split('-')))}-(.+)\.tar\.gz", re.IGNORECASE)
    for file in files:
        found = name.fullmatch(str(file.get("filename")))
        sha256 = (file.get("hashes") or {}).get("sha256")
        if found is None or sha256 is None or file.get("yanked"):
            continue
        try:
            is_final = not Version(found[1]).is_prerelease
        except InvalidVersion:
            continue
        if is_final:
            url = requests.compat.urljoin(address, str(file["url"]))
            yield Release(version=found[1], url=url, sha256=str(sha256))


def unpack(release: Release, folder: Path, *, ca_bundle: Path | None) -> None:
    """Fetches a release and unpacks changelog and engine source. Raises BuildError, and VerificationError for other
    bytes than the index names."""
    packed = _get(release.url, ca_bundle).content
    sha256 = hashlib.sha256(packed).hexdigest()
    if sha256 != release.sha256:
        message = f"release {release.version} is not what the index names: SHA-256 {sha256}, not {release.sha256}"
        raise VerificationError(message)
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            for member in tar:
                inner = member.name.partition("/")[2]
                if inner == "CHANGELOG.md" or inner.startswith(f"{SOURCE}/"):
                    tar.extract(member.replace(name=inner, deep=False), folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        message = f"release {release.version} cannot be unpacked: {error}"
        raise BuildError(message) from error


def read(release: Release, folder: Path, repository: str) -> Pin:
    """Returns what an unpacked release says of itself, with upstream's number of the build. Raises BuildError."""
    changes, cmake = _text(folder / "CHANGELOG.md"), _text(folder / SOURCE / "CMakeLists.txt")
    section = re.search(rf"^## \[{re.escape(release.version)}\]\n(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL)
    commits = UPDATE.findall(section[1]) if section else []
    if not commits:
        message = f"release {release.version} does not say which commit of llama.cpp it carries: CHANGELOG.md"
        raise BuildError(message, hint=f"set version, build and commit in {MATRIX_FILE} by hand")
    parts = dict(VERSION.findall(cmake))
    if parts.keys() != {"MAJOR", "MINOR", "PATCH"}:
        message = f"release {release.version} does not say llama.cpp's version where it is looked for: CMakeLists.txt"
        raise BuildError(message, hint=f"set version, build and commit in {MATRIX_FILE} by hand")
    build, commit = _tag_of(commits[0], repository)
    version = ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))
    return Pin(
        release=release.version,
        version=f"{version}-dev" if IS_DEV.search(cmake) else version,
        build=build,
        commit=commit,
    )


def _text(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.is_file() else ""


def _tag_of(commit: str, repository: str) -> tuple[int, str]:
    """Asks upstream for the tag bNNNN of a commit. Returns the number and the whole commit."""
    done = docker.capture(("git", "ls-remote", "--tags", repository), cwd=Path.cwd(), timeout_s=TIMEOUT_S)
    if done.code != 0:
        message = f"{repository} cannot be asked for its tags: {' '.join(done.lines)}"
        raise BuildError(message, hint="--repository takes a mirror or a clone of it")
    for line in done.lines:
        if (found := TAG.match(line)) and found[1].startswith(commit):
            return int(found[2]), found[1]
    message = f"no tag of {repository} is of the commit that the release carries: {commit}"
    raise BuildError(message, hint=f"set version, build and commit in {MATRIX_FILE} by hand")


def try_patches(root: Path, patches: Sequence[str], source: Path) -> list[Trial]:
    """Applies the patches to `source`, as the build does, each on top of those that went before. Raises BuildError if
    `patch` is not here."""
    return [_try(root, patch, source) for patch in patches]


def _try(root: Path, patch: str, source: Path) -> Trial:
    words = ("-p1", "--forward", "--batch", "--reject-file=-", "--input", str(root / patch))
    done = docker.capture(("patch", "-d", str(source), *words), cwd=root)
    missed: dict[str, int] = {}
    last = patch
    for line in done.lines:
        if found := HUNK.match(line):
            last = found["file"] or last
            if found["failed"]:
                missed[last] = int(found["failed"])
    if done.code != 0 and not missed:  # a file that is gone, or another word of `patch`
        missed[last] = 1
    return Trial(patch=Path(patch).stem, missed=missed if done.code else {})


def write(root: Path, engine: Engine, pin: Pin) -> None:
    """Writes the pin into matrix and `.in` file. The lock itself is `lock`'s to write."""
    source = engine.source
    path = root / MATRIX_FILE
    path.write_text(rewrite(path.read_text("utf-8"), engine.name, pin), "utf-8")
    asks = root / LOCKS / f"{source.lock}.in"
    text, was = asks.read_text("utf-8"), f"{source.distribution}=={source.release}\n"
    if was not in text:
        message = f"{asks.relative_to(root)} does not ask for {was.strip()}"
        raise MatrixError(message)
    asks.write_text(text.replace(was, f"{source.distribution}=={pin.release}\n"), "utf-8")


def rewrite(text: str, name: str, pin: Pin) -> str:
    """Returns the matrix with the engine's four lines changed, and no other byte. Raises MatrixError without them."""
    engines = re.search(r"^engines:\n", text, re.MULTILINE)
    block = re.compile(BLOCK.format(engine=name), re.MULTILINE).search(text, engines.end()) if engines else None
    if block is None:
        message = f"{MATRIX_FILE}: {name} is not written as a block of lines below `engines:`"
        raise MatrixError(message)
    lines = block.group(1)
    for key, value in {
        "    version": pin.version,
        "    build": str(pin.build),
        "    commit": pin.commit,
        "      release": pin.release,
    }.items():
        lines, count = re.subn(rf"^{key}: .*$", f"{key}: {value}", lines, flags=re.MULTILINE)
        if count != 1:
            message = f"{MATRIX_FILE}: engine {name} has {count} lines `{key.strip()}:` where one is expected"
            raise MatrixError(message)
    return text[: block.start(1)] + lines + text[block.end(1) :]


def _get(url: str, ca_bundle: Path | None, *, accept: str = "*/*") -> requests.Response:
    try:
        answer = requests.get(
            url, headers={"Accept": accept}, timeout=TIMEOUT_S, verify=str(ca_bundle) if ca_bundle else True
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        # Without the address: it may hold a password.
        why = f"status {error.response.status_code}" if error.response is not None else type(error).__name__
        message = f"the package index cannot be asked: {why}"
        raise BuildError(
            message, hint="--ca-bundle behind an intercepting proxy, --index-url for another index"
        ) from error
    return answer
