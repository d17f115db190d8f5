"""Which Debian packages a build installs: asked of apt inside the base, written to a lock, and held against an image.

A lock belongs to one base and one platform. It has a part for each set of packages that a stage installs, and in it
every package that apt would bring along, with version and SHA-256. It names no address: a mirror is the machine's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.parser import HeaderParser
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from images import docker
from images.errors import BuildError, MatrixError
from images.matrix import LOCKS, Base, Cell, Platform

INSTALL = re.compile(r"apt-get install -y --no-install-recommends ([a-z0-9][a-z0-9 .+=~:-]*)")
STAGE = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)
# 'ADDRESS' name_version_architecture.deb SIZE SHA256:…
URI_LINE = re.compile(r"^'\S+' ([a-z0-9][a-z0-9+.-]*)_([^_\s]+)_([a-z0-9]+)\.deb (\d+) SHA256:([0-9a-f]{64})$")
PART_MARK = "@part "
DATE_MARK = "@date "


class Locked(BaseModel):
    """One package file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str
    architecture: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Lock(BaseModel):
    """One file of images/locks/debian-*.json. `parts`: what a stage asks for, in order -> what apt installs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    image: str
    base: str  # its identity, as BaseChoice has it: what it holds already is in no part
    platform: Platform
    archive_date: str  # of the youngest list that apt read
    parts: dict[str, dict[str, Locked]]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A package as dpkg's status file has it."""

    name: str
    version: str
    architecture: str
    source: str | None


def path_for(base: Base, platform: Platform) -> Path:
    """`debian:bookworm-slim` on linux/amd64 is debian-bookworm-slim-amd64.json."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{base.image}-{platform.partition('/')[2]}")
    return LOCKS / f"debian-{name.removeprefix('debian-')}.json"


def load(root: Path, base: Base, platform: Platform) -> Lock | None:
    """None when there is none; MatrixError when it is no lock."""
    path = root / path_for(base, platform)
    if not path.is_file():
        return None
    try:
        return Lock.model_validate_json(path.read_bytes())
    except ValidationError as error:
        message = f"{path_for(base, platform)} is no Debian lock: {' '.join(str(error).split())}"
        raise MatrixError(message, hint="python -m images lock --debian") from error


def asked(dockerfile: str) -> dict[str, str]:
    """Stage -> the packages that it and the stages below it install, as one line; stages that install none are out."""
    found: dict[str, str] = {}
    pieces = STAGE.split(dockerfile.replace("\\\n", " "))[1:]
    for below, name, body in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=True):
        words = [*found.get(below, "").split(), *(word for line in INSTALL.findall(body) for word in line.split())]
        if words:
            found[name] = " ".join(dict.fromkeys(words))
    return found


def lock(root: Path, dockerfiles: Iterable[tuple[Cell, str]], engine: docker.Engine, *, is_dry: bool) -> list[str]:
    """Writes the lock of each base that the engine has. A line for each file, and one for each package that moved."""
    lines: list[str] = []
    for (image, platform), (base, parts) in _by_base(dockerfiles, engine).items():
        here, path = engine.image(image), path_for(base, platform)
        if here is None:
            lines.append(f"{path}: left as it is: {image} is not here")
            continue
        lines.append(f"{path}: {len(parts)} parts of {image}")
        if is_dry:
            continue
        new = query(engine, image=image, identity=here.id, platform=platform, parts=sorted(parts))
        old = load(root, base, platform)
        lines += moved(old, new) if old else []
        (root / path).write_text(dump(new), "utf-8")
    return lines


def query(engine: docker.Engine, *, image: str, identity: str, platform: Platform, parts: Iterable[str]) -> Lock:
    """Asks apt in the base itself. BuildError when it cannot say."""
    done = engine.run_shell(image, _script(parts))
    if done.code != 0:
        message = f"apt in {image} cannot say what it would install: {' '.join(done.lines[-3:])}"
        raise BuildError(message, hint="a package may have another name in this release")
    return parse_answer(done.lines, image=image, identity=identity, platform=platform)


def parse_answer(lines: Iterable[str], *, image: str, identity: str, platform: Platform) -> Lock:
    """What the script printed. BuildError when no list had a date, or a part names no package."""
    dates: list[datetime] = []
    parts: dict[str, dict[str, Locked]] = {}
    packages: dict[str, Locked] = {}
    for line in lines:
        if line.startswith(DATE_MARK):
            dates.append(parsedate_to_datetime(line.removeprefix(DATE_MARK)))
        elif line.startswith(PART_MARK):
            packages = parts.setdefault(line.removeprefix(PART_MARK), {})
        elif match := URI_LINE.match(line):
            name, version, architecture, _, sha256 = match.groups()
            packages[name] = Locked(version=unquote(version), architecture=architecture, sha256=sha256)
    if not dates or not parts or not all(parts.values()):
        message = f"apt in {image} named no packages: {len(dates)} dated lists, {len(parts)} parts"
        raise BuildError(message, hint="is the archive reachable from a container?")
    date = max(dates).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Lock(image=image, base=identity, platform=platform, archive_date=date, parts=parts)


def dump(lock: Lock) -> str:
    return json.dumps(lock.model_dump(), indent=1, sort_keys=True) + "\n"


def moved(old: Lock, new: Lock) -> list[str]:
    """A line for each package that is not what it was."""
    return [
        f"{name}: {was.version} -> {_description(was, now)}"
        for part, packages in old.parts.items()
        for name, was in packages.items()
        if (now := new.parts.get(part, {}).get(name)) != was
    ]


def _description(was: Locked, now: Locked | None) -> str:
    if now is None:
        return "gone"
    return now.version if now.version != was.version else f"another file: SHA-256 {now.sha256}"


def parse_status(text: str) -> Iterator[Installed]:
    """The installed packages of a dpkg status file, or of one paragraph of it."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        fields = HeaderParser().parsestr(paragraph)
        name, version = fields.get("Package"), fields.get("Version")
        # A file for each package, in images made without dpkg, has no such line.
        is_installed = fields.get("Status", "install ok installed") == "install ok installed"
        if name and version and is_installed:
            architecture = fields.get("Architecture", "all")
            yield Installed(name=name, version=version, architecture=architecture, source=fields.get("Source"))


def faults(
    cell: Cell, lock: Lock | None, part: str, *, image: Mapping[str, str], base: Mapping[str, str], identity: str
) -> list[str]:
    """Where an image is not what the lock says, each naming its package. `image` and `base`: package -> version."""
    if lock is None:
        return [f"{cell.base.image} has no Debian lock: python -m images lock --debian"]
    if part not in lock.parts:
        return [f"the lock has no part for: {part}"]
    locked = lock.parts[part]
    found = [
        f"{name} moved: {image.get(name, 'not installed')}, the lock says {each.version}"
        for name, each in locked.items()
        if image.get(name) != each.version
    ]
    if identity != lock.base:  # another base brings other packages along, so only what is locked can be judged
        return found
    added = {name: version for name, version in image.items() if base.get(name) != version}
    return found + [f"{name} {version} is not in the lock" for name, version in added.items() if name not in locked]


def _by_base(
    dockerfiles: Iterable[tuple[Cell, str]], engine: docker.Engine
) -> dict[tuple[str, Platform], tuple[Base, set[str]]]:
    """What the cells that can be built here ask of each base."""
    found: dict[tuple[str, Platform], tuple[Base, set[str]]] = {}
    for cell, dockerfile in dockerfiles:
        for platform in cell.platforms:
            if platform == engine.platform:
                _, parts = found.setdefault((cell.base.image, platform), (cell.base, set()))
                parts.update(asked(dockerfile).values())
    return found


def _script(parts: Iterable[str]) -> str:
    asks = "\n".join(
        f"echo '{PART_MARK}{part}'\n"
        f"apt-get install -y --no-install-recommends --print-uris -qq -o Acquire::ForceHash=SHA256 {part}"
        for part in parts
    )
    # Sections that are off by default change nothing for packages of main, and nvidia-cuda-toolkit is in one of them.
    return f"""
find /etc/apt -name '*.sources' -o -name '*.list' \
  | xargs sed -i -E '/^(Components:|deb )/ s/\\bmain\\b/main contrib non-free/'
apt-get update -qq >&2
sed -n 's/^Date: /{DATE_MARK}/p' /var/lib/apt/lists/*Release
{asks}
"""
