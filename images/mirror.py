"""Debian packages from another archive, for one build: a mirror near by, or a snapshot of the day of the lock.

Every instruction that calls apt-get is given two mounts: the base's sources with the mirror's address in them, and a
line of apt's configuration that points there. A mount is in no layer and in no history, and the address comes from a
context of its own: so it is nowhere in the image, which has the digest that it would have without a mirror.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from images import debian
from images.build import Job
from images.errors import UsageError
from images.installed import INSTRUCTION

FORM = re.compile(r"(?P<root>https?://[A-Za-z0-9._~:/%+-]+?)/?(?:@(?P<timestamp>\d{8}T\d{6}Z))?")
CONTEXT = "debian-mirror-address"
STAGE = "debian-mirror"
# Components that are off by default change nothing for packages of main, and one stage asks for some of them.
SED = """\
s,https?://[^] ]*/(debian|debian-security)/?( |$),{root}/\\1{below}\\2,g
/^(Components:|deb )/ s/\\bmain\\b/main contrib non-free/
"""
CONFIGURATION = """\
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "/run/debian-mirror";
"""
# The Release files of a snapshot may say of themselves that they are out of date.
SNAPSHOT_CONFIGURATION = 'Acquire::Check-Valid-Until "false";\n'
# A source that is left as it was would be asked in silence, so the stage fails instead.
SOURCES = f"""\
FROM @BASE@ AS {STAGE}
RUN --mount=type=bind,from={CONTEXT},target=/address \\
    mkdir -p /mirror/sources \\
 && cp /address/apt.conf /mirror/ \\
 && for file in $(find /etc/apt/sources.list /etc/apt/sources.list.d -name '*.list' -o -name '*.sources'); do \\
      sed -E -f /address/rewrite.sed "$file" > "/mirror/sources/${{file##*/}}"; \\
    done \\
 && grep -hE '^(URIs:|deb )' /mirror/sources/* > /mirror/used \\
 && if grep -vFf /address/root /mirror/used; then echo 'error: neither debian nor debian-security' >&2; exit 1; fi

"""
MOUNTS = f"""\
--mount=type=bind,from={STAGE},source=/mirror/apt.conf,target=/etc/apt/apt.conf.d/99debian-mirror \\
    --mount=type=bind,from={STAGE},source=/mirror/sources,target=/run/debian-mirror \\
    """


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """`root` holds the archives debian and debian-security, as on Debian's own hosts; a timestamp stands below each."""

    root: str
    timestamp: str | None = None


def parse_mirror(text: str) -> Mirror:
    """ROOT or ROOT@TIMESTAMP; UsageError for anything else."""
    found = FORM.fullmatch(text)
    if found is None:
        message = f"--debian-mirror is no address of a mirror: {text}"
        raise UsageError(
            message, hint="http://HOST/PATH, where PATH/debian is; of a snapshot archive …@20260718T020000Z"
        )
    return Mirror(root=found["root"], timestamp=found["timestamp"])


def plan(job: Job) -> Job:
    """The job with another Dockerfile and one context more, which `written` puts there."""
    folder = job.archive.with_name(f"{job.cell.id}.mirror")
    return replace(
        job, variant=folder / "Dockerfile", contexts=(*job.contexts, f"{CONTEXT}={(folder / 'address').as_posix()}")
    )


@contextmanager
def written(root: Path, job: Job, mirror: Mirror) -> Iterator[None]:
    """What a planned job names, as long as it is built."""
    own = job.cell.folder / "Dockerfile"
    folder = root / job.dockerfile.parent
    try:
        (folder / "address").mkdir(parents=True, exist_ok=True)
        (root / job.dockerfile).write_text(through_mirror((root / own).read_text("utf-8")), "utf-8")
        if (root / f"{own}.dockerignore").is_file():
            shutil.copyfile(root / f"{own}.dockerignore", root / f"{job.dockerfile}.dockerignore")
        for name, text in address(mirror).items():
            (folder / "address" / name).write_text(text, "utf-8")
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def address(mirror: Mirror) -> dict[str, str]:
    """The files of the context: what the sources become, and what apt is told."""
    below = f"/{mirror.timestamp}" if mirror.timestamp else ""
    return {
        "root": f"{mirror.root}/\n",
        "rewrite.sed": SED.format(root=mirror.root, below=below),
        "apt.conf": CONFIGURATION + (SNAPSHOT_CONFIGURATION if mirror.timestamp else ""),
    }


def through_mirror(dockerfile: str) -> str:
    """The Dockerfile with the mounts wherever apt-get is called, and before all else the stage that they come from."""
    head, below, *rest = debian.STAGE.split(dockerfile, maxsplit=1)
    name, body = rest
    text = f"FROM {below} AS {name}{body}"
    return head + SOURCES.replace("@BASE@", below) + INSTRUCTION.sub(_mounted, text)


def _mounted(instruction: re.Match[str]) -> str:
    text = instruction.group()
    return text.replace("RUN ", f"RUN {MOUNTS}", 1) if text.startswith("RUN ") and "apt-get " in text else text
