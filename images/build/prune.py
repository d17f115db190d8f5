"""Gives back what builds left behind, and touches nothing of anybody else.

It takes images without a name that carry our label, archives below .make, and temporary locks and times there whose
image is gone. If asked, it also takes records of the builder's cache whose instruction is in a rendered Dockerfile or
names a path that only our images have.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from images import docker
from images.build import bake, build, packages
from images.matrix import timing
from images.matrix.engines import ENGINES

LABEL = "io.appliance.cell"
FOLDERS = (build.ARCHIVES, bake.ARCHIVES)
ARCHIVE = re.compile(r"^[a-z0-9.-]+\.(?:oci|saved|sbom)\.tar$|^[a-z0-9.-]+\.part$")
# A younger archive may belong to a build that runs now; buildx writes to it until the end.
ARCHIVE_AGE_S = 3600.0
OUR_FOLDERS = "|".join(("/opt/appliance", *(files.folder for files in ENGINES.values())))
OUR_PATHS = re.compile(rf"(?:{OUR_FOLDERS})\b|\bAPPLIANCE_[A-Z]|\bimages/(?:builder|locks|patches|rendered|rootfs)/")
EXEC = "mount / from exec /bin/sh -c "
STEP = re.compile(r"^\[[^\]]+\] ")
INSTRUCTION = re.compile(r"^(?:RUN|COPY|ADD)\s", re.MULTILINE)
MOUNT_FLAG = re.compile(r"^(?:--\S+ )*")


@dataclass(frozen=True, kw_only=True)
class Leftover:
    what: str  # an archive's path, an image's id, a record's id with its instruction
    size_bytes: int
    is_gone: bool


def prune(root: Path, engine: docker.Engine, *, with_cache: bool, is_dry: bool) -> list[Leftover]:
    """Removes what builds left behind and returns it, each with its fate. A dry run only finds."""
    found = [*_archives(root, is_dry=is_dry), *_images(engine, is_dry=is_dry), *_of_builds(root, engine, is_dry=is_dry)]
    return found + (_cache(root, engine, is_dry=is_dry) if with_cache else [])


def instructions(dockerfile: str) -> set[str]:
    """Returns RUN, COPY and ADD as one line each, in the form of the builder's cache, without flags of RUN."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE))
    lines = [_one_line(line) for line in joined.splitlines() if INSTRUCTION.match(line)]
    return {MOUNT_FLAG.sub("", line.removeprefix("RUN ")) if line.startswith("RUN ") else line for line in lines}


def is_ours(description: str, known: set[str]) -> bool:
    """True if one of these instructions, or an earlier form of one, made the cache record."""
    text = _one_line(description)
    instruction = text.removeprefix(EXEC) if text.startswith(EXEC) else STEP.sub("", text)
    return instruction in known or bool(OUR_PATHS.search(instruction))


def _archives(root: Path, *, is_dry: bool) -> Iterator[Leftover]:
    before_s = time.time() - ARCHIVE_AGE_S
    for path in sorted(path for folder in FOLDERS for path in (root / folder).glob("*")):
        if not path.is_file() or path.is_symlink() or not ARCHIVE.match(path.name) or path.stat().st_mtime > before_s:
            continue
        size_bytes = path.stat().st_size
        if not is_dry:
            path.unlink()
        yield Leftover(what=path.relative_to(root).as_posix(), size_bytes=size_bytes, is_gone=not is_dry)


def _of_builds(root: Path, engine: docker.Engine, *, is_dry: bool) -> Iterator[Leftover]:
    """Removes temporary locks and times of builds whose image is gone. Young ones stay: a build may still run."""
    before_s = time.time() - ARCHIVE_AGE_S
    folder = root / build.ARCHIVES
    named = (packages.path_for("*").name, timing.path_for(folder, "*").name)
    for path in sorted(path for name in named for path in folder.glob(name)):
        build_id = path.name.partition(".")[0]
        if path.stat().st_mtime > before_s or engine.images_labelled({build.BUILD_ID_LABEL: build_id}):
            continue
        size_bytes = path.stat().st_size
        if not is_dry:
            path.unlink()
        yield Leftover(what=path.relative_to(root).as_posix(), size_bytes=size_bytes, is_gone=not is_dry)


def _images(engine: docker.Engine, *, is_dry: bool) -> Iterator[Leftover]:
    for image in engine.images_untagged(LABEL):
        is_gone = not is_dry and engine.remove(image.id)
        yield Leftover(what=f"image {image.id} of {image.labels[LABEL]}", size_bytes=image.size_bytes, is_gone=is_gone)


def _cache(root: Path, engine: docker.Engine, *, is_dry: bool) -> list[Leftover]:
    """Removes children before their parents, which the builder keeps while a child is left: hence the passes."""
    known = _known(path.read_text("utf-8") for path in sorted(root.glob("images/rendered/*/Dockerfile")))
    ours = [each for each in engine.build_cache() if not each.is_in_use and is_ours(each.description, known)]
    freed = dict.fromkeys((each.id for each in ours), 0)
    left = set() if is_dry else set(freed)
    while left:
        for record_id in left:
            freed[record_id] += engine.prune_cache(record_id)
        still_there = left & {each.id for each in engine.build_cache()}
        if still_there == left:
            break
        left = still_there
    return [_of_cache(each, is_gone=not is_dry and each.id not in left) for each in ours]


def _of_cache(record: docker.CacheRecord, *, is_gone: bool) -> Leftover:
    text = STEP.sub("", _one_line(record.description).removeprefix(EXEC))
    return Leftover(what=f"cache {record.id}: {text[:80]}", size_bytes=record.size_bytes, is_gone=is_gone)


def _known(dockerfiles: Iterable[str]) -> set[str]:
    return {instruction for text in dockerfiles for instruction in instructions(text)}


def _one_line(text: str) -> str:
    return " ".join(text.split())
