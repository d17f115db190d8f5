"""Debian packages from another archive, for one build: a mirror, or a snapshot of the lock's day.

Every instruction that calls apt-get gets three mounts: the base's sources with the archive's address, and a line of
apt's configuration that points to them. They are secrets, in no layer, no history and no cache key: the image keeps its
digest, and another archive or date runs no step again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from images.build.build import Job
from images.build.installed import INSTRUCTION
from images.errors import BuildError, UsageError
from images.pins import debian

FORM = re.compile(r"(?P<root>https?://[A-Za-z0-9._~:/%+-]+?)/?(?:@(?P<timestamp>\d{8}T\d{6}Z))?")
ARCHIVE = re.compile(r"https?://[^\]\s]*?/(debian|debian-security)/?(?=\s|$)")
# Components that are off by default change nothing for packages of main, and one stage asks for some of them.
COMPONENTS = re.compile(r"^(?:Components:|deb ).*$", re.MULTILINE)
ADDRESSED = re.compile(r"^(?:URIs:|deb ).*$", re.MULTILINE)
SOURCES = "/run/debian-mirror"
CONFIGURED = "/etc/apt/apt.conf.d/99debian-mirror"
CONFIGURATION = f"""\
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "{SOURCES}";
Acquire::Retries "3";
"""
# The Release files of a snapshot may say of themselves that they are out of date.
SNAPSHOT_CONFIGURATION = 'Acquire::Check-Valid-Until "false";\n'
# File -> where apt finds it, and the secret's name.
TARGETS: Mapping[str, str] = {
    "apt.conf": CONFIGURED,
    "base.list": f"{SOURCES}/base.list",
    "base.sources": f"{SOURCES}/base.sources",
}
MOUNTS = "".join(
    f"--mount=type=secret,id=debian-{name},target={target},mode=0444 \\\n    " for name, target in TARGETS.items()
)
END = "end-of-debian-mirror"


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """An archive. `root` holds debian and debian-security like Debian's own hosts; a timestamp is below each."""

    root: str
    timestamp: str | None = None

    def __str__(self) -> str:
        """Returns the form that --debian-mirror takes."""
        return f"{self.root}@{self.timestamp}" if self.timestamp else self.root


def parse_mirror(text: str) -> Mirror:
    """Parses ROOT or ROOT@TIMESTAMP. Raises UsageError for anything else."""
    found = FORM.fullmatch(text)
    if found is None:
        message = f"--debian-mirror is no address of a mirror: {text}"
        raise UsageError(
            message,
            hint="--debian-mirror http://deb.debian.org takes http://deb.debian.org/debian; of a snapshot archive "
            "--debian-mirror http://snapshot.debian.org/archive@20260718T020000Z",
        )
    return Mirror(root=found["root"], timestamp=found["timestamp"])


def folder_of(job: Job) -> Path:
    """Returns the folder for the files of one build that goes through a mirror. It is removed after the build."""
    return job.archive.with_name(f"{job.cell.id}.mirror")


def plan(job: Job, files: Mapping[str, str] | None = None) -> Job:
    """Returns the job with another Dockerfile and its secrets, all of which `write` creates."""
    folder = folder_of(job)
    secrets = (f"id=debian-{name},src={(folder / name).as_posix()}" for name in TARGETS if not files or name in files)
    return replace(job, variant=folder / "Dockerfile", secrets=(*job.secrets, *secrets))


def write(root: Path, job: Job, mirror: Mirror, sources: str) -> Job:
    """Writes the files of the planned job and returns it. `sources`: the base's own, from `debian.PRINT_SOURCES`."""
    files = rewritten(mirror, sources)
    planned = plan(job, files)
    own, variant = job.cell.folder / "Dockerfile", root / planned.dockerfile
    variant.parent.mkdir(parents=True, exist_ok=True)
    variant.write_text(through_mirror((root / own).read_text("utf-8")), "utf-8")
    if (root / f"{own}.dockerignore").is_file():
        shutil.copyfile(root / f"{own}.dockerignore", f"{variant}.dockerignore")
    for name, text in files.items():
        (variant.parent / name).write_text(text, "utf-8")
    return planned


@contextmanager
def workplace(root: Path, job: Job) -> Iterator[None]:
    """Removes everything that a build through a mirror needed."""
    try:
        yield
    finally:
        shutil.rmtree(root / folder_of(job), ignore_errors=True)


def rewritten(mirror: Mirror, sources: str) -> dict[str, str]:
    """Returns files by name: the base's sources with this archive's address, and apt's configuration.

    Raises BuildError for a source that would stay as it is: it would be asked without anybody noticing.
    """
    texts = {"base.list": "", "base.sources": ""}
    for file in sources.split(debian.FILE_MARK)[1:]:
        name, _, text = file.partition("\n")
        texts[f"base{Path(name).suffix}"] += f"{_readdressed(mirror, text)}\n"
    if not any(map(str.strip, texts.values())):
        message = f"the base names no source of Debian packages: {sources.strip()[:200]!r}"
        raise BuildError(message, hint="the official images have them: debian:bookworm-slim")
    configuration = CONFIGURATION + (SNAPSHOT_CONFIGURATION if mirror.timestamp else "")
    return {"apt.conf": configuration, **{name: text for name, text in texts.items() if text.strip()}}


def prologue(files: Mapping[str, str]) -> str:
    """Returns shell lines that put rewritten sources into a temporary container."""
    written = (f"cat > {TARGETS[name]} <<'{END}'\n{text}\n{END}\n" for name, text in files.items())
    return f"mkdir -p {SOURCES}\n{''.join(written)}"


def as_archive(mirror: Mirror | None) -> debian.Archive:
    """Returns the mirror as an archive to make a Debian lock from; without a mirror the base's own sources."""
    if mirror is None:
        return debian.Archive()
    return debian.Archive(prepare=lambda sources: prologue(rewritten(mirror, sources)), timestamp=mirror.timestamp)


def through_mirror(dockerfile: str) -> str:
    """Returns the Dockerfile with the mounts at each call of apt-get: the same bytes for every mirror and date."""
    return INSTRUCTION.sub(_mounted, dockerfile)


def _readdressed(mirror: Mirror, text: str) -> str:
    below = f"/{mirror.timestamp}" if mirror.timestamp else ""
    text = ARCHIVE.sub(rf"{mirror.root}/\g<1>{below}", text)
    left = next((line for line in ADDRESSED.findall(text) if f"{mirror.root}/" not in line), None)
    if left:
        message = f"a source of the base is in neither of a mirror's archives debian and debian-security: {left}"
        raise BuildError(message, hint="take another base: --base debian:bookworm-slim")
    return COMPONENTS.sub(lambda line: re.sub(r"\bmain\b", "main contrib non-free", line.group()), text)


def _mounted(instruction: re.Match[str]) -> str:
    text = instruction.group()
    return text.replace("RUN ", f"RUN {MOUNTS}", 1) if text.startswith("RUN ") and "apt-get " in text else text
