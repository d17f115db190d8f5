"""Compares the packages in a cell's stages, cached layers too, with the lock before anything is compiled.

The rendered Dockerfile is left as it is. Beside it stands a second one, the same text and a few stages more: each of
them repeats a stage up to its last `apt-get install`, so it shares that stage's layers, and the last one lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from images import docker
from images.build.build import Job, explain_failure, extended, targeted_argv
from images.errors import BuildError
from images.pins import debian

TARGET = "packages-list"
LISTER, LISTING = "packages", "packages.txt"
INSTRUCTION = re.compile(r"^[A-Z]+ (?:.*\\\n)*.*$", re.MULTILINE)
STAGE_MARK, FILE_MARK, LISTS_MARK = "@stage", "@file", "@lists"
BASE = "."  # a stage of the listing: packages of the image below all stages
SHOWN = 5
TODAY = f"{debian.LOCK_COMMAND} locks what the archive has today"
# A list of the archive may be compressed as apt likes it, so apt reads it; awk keeps the files of installed packages.
LIST = r"""\
 form='${db:Status-Status} ${Package} ${Architecture} ${Version}\n' \
 && ( echo '@stage .'; dpkg-query -W -f="$form"; \
      for stage in /stages/*; do \
        echo "@stage ${stage##*/}"; dpkg-query --admindir="$stage/var/lib/dpkg" -W -f="$form" || exit 1; \
      done ) > /packages.txt \
 && find /stages/*/var/lib/apt/lists -maxdepth 1 -name '*_Packages*' > /lists.txt \
 && xargs -r /usr/lib/apt/apt-helper cat-file < /lists.txt \
    | awk 'NR == FNR { have[$2 " " $3 " " $4] = 1; next } \
           $1 == "Package:" { name = $2 } $1 == "Version:" { version = $2 } $1 == "Architecture:" { arch = $2 } \
           $1 == "SHA256:" && (name " " arch " " version) in have { print "@file", name, version, $2 }' \
      /packages.txt - | sort -u > /files.txt \
 && echo "@lists $(wc -l < /lists.txt)" | cat /files.txt - >> /packages.txt"""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Packages of each stage by name, and the SHA-256 of each package file by the archive's lists."""

    versions: Mapping[str, Mapping[str, str]]
    files: Mapping[tuple[str, str], frozenset[str]]  # name and version; absent if a stage kept no lists


def hold_to_lock(root: Path, job: Job, engine: docker.Engine, *, hint: str = TODAY) -> Job:
    """Returns the job, changed so that its packages are those of its lock. Raises BuildError naming each that moved.

    If a cached layer is older than the lock, everything is built again: code compiled with it is as old.
    """
    refuse_unlocked(root, job, engine)
    found = differing(root, job)
    if found and not job.no_cache:
        job = replace(job, no_cache=True)
        found = differing(root, job)
    if found:
        message = f"cell {job.cell.id} would not be built of what {name_of(job)} says: {some(found)}"
        raise BuildError(message, hint=hint)
    return job


def refuse_unlocked(root: Path, job: Job, engine: docker.Engine) -> debian.Lock:
    """Returns the job's lock. Raises BuildError without one, or if it lacks packages of the stages."""
    if job.lock is None:
        message = f"cell {job.cell.id} has no Debian lock for {engine.platform}: {job.cell.base.image}"
        raise BuildError(message, hint=f"{debian.LOCK_COMMAND} --platform {engine.platform} writes it")
    unlocked = _asked(root, job).values() - job.lock.parts.keys()
    if unlocked:
        message = f"cell {job.cell.id} asks for packages that {name_of(job)} has no part for: {min(unlocked)}"
        raise BuildError(message, hint=debian.LOCK_COMMAND)
    return job.lock


def name_of(job: Job) -> str:
    """Returns the name of the job's lock for messages."""
    if job.lock and job.is_locked:
        return str(debian.path_for(job.cell.base, job.lock.platform))
    return f"the temporary lock of {job.lock.archive_date}" if job.lock else "no lock"


def some(found: Sequence[str]) -> str:
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{'; '.join(found[:SHOWN])}{more}"


def differing(root: Path, job: Job) -> list[str]:
    """Returns the differences between the job's stages and its lock; none without a lock."""
    if job.lock is None:
        return []
    return list(dict.fromkeys(faults(job, job.lock, _asked(root, job), query(root, job))))


def _asked(root: Path, job: Job) -> dict[str, str]:
    return debian.asked((root / job.dockerfile).read_text("utf-8"))


def faults(job: Job, lock: debian.Lock, asked: Mapping[str, str], holding: Holding) -> Iterator[str]:
    """Yields a line for each package of a stage that differs from the lock."""
    for stage, image in holding.versions.items():
        if stage == BASE:
            continue
        part, base = asked[stage], holding.versions[BASE]
        yield from debian.faults(job.cell, lock, part, image=image, base=base, identity=job.base.identity)
        for name, locked in lock.parts.get(part, {}).items():
            known = holding.files.get((name, locked.version), frozenset())
            if image.get(name) == locked.version and known and known != {locked.sha256}:
                yield f"{name} {locked.version} is another file: SHA-256 {min(known)}, the lock says {locked.sha256}"


def query(root: Path, job: Job) -> Holding:
    """Builds the stages as far as their packages go, or finds them in the cache. Raises BuildError if that fails."""
    with extended(root, job, listing((root / job.dockerfile).read_text("utf-8"))) as (longer, out):
        done = docker.stream(query_argv(longer, out), cwd=root)
        if done.code != 0:
            raise explain_failure(job.cell, done.lines)
        return parse_listing((out / LISTING).read_text("utf-8").splitlines())


def query_argv(job: Job, out: Path) -> tuple[str, ...]:
    """Returns the command of the listing, which must not be cached.

    BuildKit knows a step by its inputs, so the cache would give the old listing of a stage that ran again.
    """
    *words, context = targeted_argv(job, TARGET, f"type=local,dest={out}")
    # buildx refuses the two together.
    return (*words, *(() if job.no_cache else ("--no-cache-filter", LISTER)), context)


def listing(dockerfile: str) -> str:
    """Returns the stages to add, the last a listing. Raises BuildError if no stage installs packages."""
    pieces = debian.STAGE.split(dockerfile)[1:]
    copies: dict[str, str] = {}
    for below, name, body in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=True):
        ends = [found.end() for found in INSTRUCTION.finditer(body) if debian.INSTALL.search(_joined(found.group()))]
        if ends:
            copies[name] = f"FROM {below} AS packages-{name}{body[: ends[-1]]}\n"
    if not copies:
        message = f"no stage of the Dockerfile installs a package: {dockerfile[:80]!r}"
        raise BuildError(message)
    mounts = "".join(f"--mount=type=bind,from=packages-{name},target=/stages/{name} \\\n " for name in copies)
    last = (
        f"FROM {pieces[0]} AS {LISTER}\nRUN {mounts}{LIST}",
        f"FROM scratch AS {TARGET}\nCOPY --from={LISTER} /{LISTING} /",
    )
    return "\n".join([*copies.values(), *last])


def parse_listing(lines: Iterable[str]) -> Holding:
    """Parses the listing of the last stage. Raises BuildError if it is cut off or a stage names no package."""
    versions: dict[str, dict[str, str]] = {}
    files: dict[tuple[str, str], frozenset[str]] = {}
    stage, lists = "", None
    for line in lines:
        match line.split(" "):
            case [mark, name] if mark == STAGE_MARK:
                stage = name
                versions[stage] = {}
            case [mark, count] if mark == LISTS_MARK:
                lists = int(count)
            case [mark, name, version, sha256] if mark == FILE_MARK:
                files[name, version] = files.get((name, version), frozenset()) | {sha256}
            case ["installed", name, _, version] if stage:
                versions[stage][name] = version
    if BASE not in versions or not all(versions.values()) or len(versions) == 1:
        counts = {name: len(each) for name, each in versions.items()}
        message = f"the stages did not say which packages they hold: {counts}"
        raise BuildError(message)
    if lists is None or (lists and not files):  # the pipe that reads the lists has the status of its last command
        message = f"the lists of the archive name no file of an installed package: {lists} lists"
        raise BuildError(message)
    return Holding(versions=versions, files=files)


def _joined(instruction: str) -> str:
    return instruction.replace("\\\n", " ")
