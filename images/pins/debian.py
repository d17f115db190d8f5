"""Locks the Debian packages of a build, by asking apt inside the base, and compares an image with the lock.

A lock belongs to one base and one platform. For another platform than the engine's it is made of that platform's index,
as if the base had the same packages there. It has a part for each set of packages that a stage installs: every package
that apt would bring along, with version and SHA-256. It names no address, only the moment at which a snapshot archive
has all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from debian.deb822 import Deb822
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from images import docker
from images.errors import BuildError, MatrixError
from images.matrix.matrix import LOCKS, Base, Cell, Platform
from images.pins import lock_sums

INSTALL = re.compile(r"apt-get install -y --no-install-recommends ([a-z0-9][a-z0-9 .+=~:-]*)")
STAGE = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)
# 'ADDRESS' name_version_architecture.deb SIZE SHA256:…
URI_LINE = re.compile(r"^'\S+' ([a-z0-9][a-z0-9+.-]*)_([^_\s]+)_([a-z0-9]+)\.deb (\d+) SHA256:([0-9a-f]{64})$")
PART_MARK = "@part "
LIST_MARK = "@list "  # suite and date of a list that apt read
LOCK_COMMAND = "python -m images lock --debian"
# Timestamps of snapshot archives.
TIMESTAMP = "%Y%m%dT%H%M%SZ"
# The main archive publishes every six hours, and its snapshot is taken about half an hour later: a list of 02:11 is in
# the snapshots 20261024T023111Z to 20261024T08…. Asked for the date of the list itself, a snapshot archive gives the
# state before it; four hours later it gives this one, and not yet the next.
SNAPSHOT_DELAY = timedelta(hours=4)


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
    base: str  # identity from BaseChoice; packages of the base are in no part
    platform: Platform
    archive_date: str  # date of the youngest list that apt read
    snapshot: Annotated[str, Field(pattern=r"^\d{8}T\d{6}Z$")]  # timestamp to ask a snapshot archive for
    suites: list[str]  # suites whose lists apt read
    parts: dict[str, dict[str, Locked]]


@dataclass(frozen=True, kw_only=True)
class Installed:
    """A package as dpkg's status file has it."""

    name: str
    version: str
    architecture: str
    source: str | None


def path_for(base: Base, platform: Platform) -> Path:
    """Returns the lock's path: debian-bookworm-slim-amd64.json for `debian:bookworm-slim` on linux/amd64."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{base.image}-{platform.partition('/')[2]}")
    return LOCKS / f"debian-{name.removeprefix('debian-')}.json"


def load(root: Path, base: Base, platform: Platform) -> Lock | None:
    """Reads a lock, None if there is none. Raises MatrixError for another file or a lock of another platform."""
    path = path_for(base, platform)
    if not (root / path).is_file():
        return None
    found = load_file(root / path, name=str(path))
    architecture = platform.partition("/")[2]
    foreign = {each.architecture for part in found.parts.values() for each in part.values()} - {architecture, "all"}
    if found.platform != platform or foreign:
        said = found.platform if found.platform != platform else f"packages for {', '.join(sorted(foreign))}"
        message = f"{path} is a Debian lock of another platform than {platform}: {said}"
        raise MatrixError(message, hint=f"{LOCK_COMMAND} --platform {platform} writes it")
    return found


def load_file(path: Path, *, name: str) -> Lock:
    try:
        return Lock.model_validate_json(path.read_bytes())
    except ValidationError as error:
        message = f"{name} is no Debian lock: {' '.join(str(error).split())}"
        raise MatrixError(message, hint=LOCK_COMMAND) from error


def content(lock: Lock, parts: Iterable[str]) -> bytes:
    """Returns the parts of a lock that a build installs, as bytes without date and source."""
    asked = {part: lock.model_dump()["parts"].get(part) for part in parts}
    return json.dumps(asked, sort_keys=True).encode()


def asked(dockerfile: str) -> dict[str, str]:
    """Returns each stage with its packages, those of the stages below included. Empty stages are left out."""
    found: dict[str, str] = {}
    pieces = STAGE.split(dockerfile.replace("\\\n", " "))[1:]
    for below, name, body in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=True):
        words = [*found.get(below, "").split(), *(word for line in INSTALL.findall(body) for word in line.split())]
        if words:
            found[name] = " ".join(dict.fromkeys(words))
    return found


@dataclass(frozen=True, kw_only=True)
class Archive:
    """The archive that `lock` asks. `prepare` turns the base's sources into shell lines that run before apt."""

    prepare: Callable[[str], str] | None = None  # None: the base's own sources
    timestamp: str | None = None  # timestamp of a snapshot archive


def lock(
    root: Path,
    dockerfiles: Iterable[tuple[Cell, str]],
    engine: docker.Engine,
    archive: Archive,
    *,
    platform: Platform,
    is_dry: bool,
) -> list[str]:
    """Writes the lock of each base that the engine has. A line for each file, and one for each package that moved."""
    lines: list[str] = []
    for image, (base, parts) in _by_base(dockerfiles, platform).items():
        here, path = engine.image(image), path_for(base, platform)
        if here is None:
            lines.append(f"{path}: left as it is: {image} is not here")
            continue
        lines.append(f"{path}: {len(parts)} parts of {image}")
        if is_dry:
            continue
        new = query(engine, archive, image=image, identity=here.id, platform=platform, parts=sorted(parts))
        refuse_partial(new, base)
        lines += _changes(root / path, new)
        (root / path).write_text(dump(new), "utf-8")
        lock_sums.record(root, path)
    return lines


def _changes(path: Path, new: Lock) -> list[str]:
    """Compares the lock with the new one. An unreadable lock counts as changed: this command mends it."""
    if not path.is_file():
        return []
    try:
        return moved(load_file(path, name=path.name), new)
    except MatrixError as error:
        return [f"{path.name} is written anew: {error.message}"]


def query(
    engine: docker.Engine, archive: Archive, *, image: str, identity: str, platform: Platform, parts: Iterable[str]
) -> Lock:
    """Asks apt in the base itself. Raises BuildError if it cannot say."""
    before = archive.prepare("\n".join(engine.run_shell(image, PRINT_SOURCES).lines)) if archive.prepare else ""
    is_foreign = platform != engine.platform
    done = engine.run_shell(image, before + script(parts, platform if is_foreign else None))
    if done.code != 0:
        message = f"apt in {image} cannot say what it would install: {' '.join(done.lines[-3:])}"
        raise BuildError(message, hint="a package may have another name in this release")
    # No base of that platform was asked, so no image's base is this one, and only what is locked can be judged.
    base = f"{identity} as {engine.platform} has it" if is_foreign else identity
    return parse_answer(done.lines, image=image, identity=base, platform=platform, snapshot=archive.timestamp)


def refuse_partial(lock: Lock, base: Base) -> None:
    """Raises BuildError unless the lock was made of all that an official image installs from."""
    wanted = [f"{base.suite}{end}" for end in ("", "-updates", "-security")]
    missing = [suite for suite in wanted if suite not in lock.suites]
    if missing:
        message = f"a lock of {lock.image} would lack the packages of {', '.join(missing)}: its sources name only "
        raise BuildError(message + ", ".join(lock.suites), hint=f"take the official image: docker pull {lock.image}")


def parse_answer(
    lines: Iterable[str], *, image: str, identity: str, platform: Platform, snapshot: str | None = None
) -> Lock:
    """Parses the script's output. Raises BuildError if no list has a date or a part names no package."""
    dates: dict[str, datetime] = {}
    parts: dict[str, dict[str, Locked]] = {}
    packages: dict[str, Locked] = {}
    for line in lines:
        if line.startswith(LIST_MARK):
            suite, _, date = line.removeprefix(LIST_MARK).partition(" ")
            dates[suite] = parsedate_to_datetime(date).astimezone(UTC)
        elif line.startswith(PART_MARK):
            packages = parts.setdefault(line.removeprefix(PART_MARK), {})
        elif match := URI_LINE.match(line):
            name, version, architecture, _, sha256 = match.groups()
            packages[name] = Locked(version=unquote(version), architecture=architecture, sha256=sha256)
    if not dates or not parts or not all(parts.values()):
        message = f"apt in {image} named no packages: {len(dates)} dated lists, {len(parts)} parts"
        raise BuildError(message, hint="is the archive reachable from a container?")
    youngest = max(dates.values())
    return Lock(
        image=image,
        base=identity,
        platform=platform,
        archive_date=youngest.strftime("%Y-%m-%dT%H:%M:%SZ"),
        snapshot=snapshot or (youngest + SNAPSHOT_DELAY).strftime(TIMESTAMP),
        suites=sorted(dates),
        parts=parts,
    )


def dump(lock: Lock) -> str:
    return json.dumps(lock.model_dump(), indent=1, sort_keys=True) + "\n"


def moved(old: Lock, new: Lock) -> list[str]:
    """Returns a line for each package that changed."""
    return [
        f"{name}: {was.version} -> {_description(was, now)}"
        for part, packages in old.parts.items()
        for name, was in packages.items()
        if (now := new.parts.get(part, {}).get(name)) != was
    ]


def differences(old: Lock, new: Lock) -> list[str]:
    """Compares both ways: changed packages, and those that only one has. `new` is of the moment of `old`."""
    missing = [
        f"{name} is missing: {now.version}"
        for part, packages in new.parts.items()
        for name, now in packages.items()
        if name not in old.parts.get(part, {})
    ]
    strange = [f"nothing installs: {part}" for part in old.parts if part not in new.parts]
    common = old.model_copy(update={"parts": {part: old.parts[part] for part in old.parts if part in new.parts}})
    return list(dict.fromkeys([*strange, *moved(common, new), *missing]))


def faults_of_locks(
    root: Path,
    dockerfiles: Iterable[tuple[Cell, str]],
    engine: docker.Engine,
    at: Callable[[str], Archive],
    *,
    platform: Platform,
) -> list[str]:
    """Returns a line for each package of a platform's locks that apt, asked as of their moment, does not install.

    `at`: the archive of a moment. Raises BuildError if a base is not here.
    """
    lines: list[str] = []
    for image, (base, parts) in _by_base(dockerfiles, platform).items():
        path = path_for(base, platform)
        old = load(root, base, platform)
        here = engine.image(image)
        if here is None:
            message = f"the base of {path} is not here: {image}"
            raise BuildError(message, hint=f"docker pull {image}")
        if old is None:
            lines.append(f"{path.name}: there is no lock")
            continue
        archive = at(old.snapshot)
        new = query(engine, archive, image=image, identity=here.id, platform=platform, parts=sorted(parts))
        lines += [f"{path.name}: {line}" for line in differences(old, new)]
    return lines


def _description(was: Locked, now: Locked | None) -> str:
    if now is None:
        return "gone"
    return now.version if now.version != was.version else f"another file: SHA-256 {now.sha256}"


def parse_status(text: str) -> Iterator[Installed]:
    """Yields the installed packages of a dpkg status file, or of one paragraph of it."""
    for fields in Deb822.iter_paragraphs(text, use_apt_pkg=False):
        name, version = fields.get("Package"), fields.get("Version")
        # A file for each package, in images made without dpkg, has no such line.
        is_installed = fields.get("Status", "install ok installed") == "install ok installed"
        if name and version and is_installed:
            architecture = fields.get("Architecture", "all")
            yield Installed(name=name, version=version, architecture=architecture, source=fields.get("Source"))


def faults(
    cell: Cell, lock: Lock | None, part: str, *, image: Mapping[str, str], base: Mapping[str, str], identity: str
) -> list[str]:
    """Returns a line for each package that differs from the lock. `image` and `base`: package -> version."""
    if lock is None:
        return [f"{cell.base.image} has no Debian lock: {LOCK_COMMAND}"]
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


def _by_base(dockerfiles: Iterable[tuple[Cell, str]], platform: Platform) -> dict[str, tuple[Base, set[str]]]:
    """Returns the parts that a platform's cells ask of each base, by its image."""
    found: dict[str, tuple[Base, set[str]]] = {}
    for cell, dockerfile in dockerfiles:
        if platform in cell.platforms:
            _, parts = found.setdefault(cell.base.image, (cell.base, set()))
            parts.update(asked(dockerfile).values())
    return found


# The sources of a base, each file behind a line with its name.
FILE_MARK = "@source "
PRINT_SOURCES = f"""
for file in $(find /etc/apt/sources.list /etc/apt/sources.list.d -name '*.list' -o -name '*.sources' 2>/dev/null); do
  echo "{FILE_MARK}${{file##*/}}"; cat "$file"; echo
done
"""


# A base of this machine taken for one of another platform: its packages are those of the other's index, since the same
# version needs other packages there. A package that the index has no longer keeps what is said here.
OTHER_ARCHITECTURE = r"""
own=$(dpkg --print-architecture)
sed -i "s/^Architecture: $own\$/Architecture: @ARCH@/" /var/lib/dpkg/status
echo @ARCH@ > /var/lib/dpkg/arch
echo 'APT::Architecture "@ARCH@"; APT::Architectures { "@ARCH@"; };' > /etc/apt/apt.conf.d/99architecture
"""
OTHER_PACKAGES = r"""
/usr/lib/apt/apt-helper cat-file /var/lib/apt/lists/*_Packages* | awk -v RS= '
  function field(name) {
    return match($0, "(^|\n)" name ": [^\n]*") ? substr($0, RSTART, RLENGTH) : ""
  }
  { key = field("Package") field("Version"); sub(/^\n/, "", key) }
  NR == FNR { status[key] = $0; next }
  key in status { sub(/\n/, "\nStatus: install ok installed\n"); status[key] = $0 }
  END { for (key in status) print status[key] "\n" }
' /var/lib/dpkg/status - > /tmp/status
mv /tmp/status /var/lib/dpkg/status
"""


def script(parts: Iterable[str], other: Platform | None = None) -> str:
    """Returns shell lines that print what `parse_answer` reads. `other`: another platform than this machine's."""
    architecture = other.partition("/")[2] if other else ""
    before = OTHER_ARCHITECTURE.replace("@ARCH@", architecture) if other else ""
    after = OTHER_PACKAGES if other else ""
    asks = "\n".join(
        f"echo '{PART_MARK}{part}'\n"
        f"apt-get install -y --no-install-recommends --print-uris -qq -o Acquire::ForceHash=SHA256 {part}"
        for part in parts
    )
    # Sections that are off by default change nothing for packages of main, and nvidia-cuda-toolkit is in one of them.
    return f"""
find /etc/apt -name '*.sources' -o -name '*.list' \
  | xargs sed -i -E '/^(Components:|deb )/ s/\\bmain\\b/main contrib non-free/'
{before}
apt-get update -qq >&2
{after}
for file in /var/lib/apt/lists/*Release; do
  awk -F ': ' '/^Codename:/ {{ suite = $2 }} /^Date:/ {{ date = $2 }} END {{ print "{LIST_MARK}" suite, date }}' "$file"
done
{asks}
"""
