"""States of images: proven, built here, or only rendered."""

from __future__ import annotations

import platform
import sys

from images import docker
from images.build import build, packages
from images.choice import proofs
from images.console import ROOT
from images.errors import MatrixError
from images.matrix.matrix import Cell, Matrix


def record_of(loaded: Matrix) -> proofs.Record:
    own = f"linux/{docker.ARCHITECTURES.get(platform.machine(), platform.machine())}"
    return proofs.Record(proofs=proofs.load(ROOT, loaded.cells), here=_built_here(loaded, own), own=own)


def _built_here(loaded: Matrix, own: str) -> dict[str, proofs.Here]:
    """Returns cells' images in this machine's engine, by tag. None without an engine, which is no fault of a list."""
    cells = {cell.tag: cell for cell in loaded.cells}
    listed = _ask_docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", proofs.REPOSITORY)
    tags = [tag for tag in listed if tag in cells]
    # One line for each image; docker's line about a tag that is gone is skipped.
    form = "{{.Id}} {{json .RepoTags}} {{json .Config.Labels}}"
    told = _ask_docker("image", "inspect", "--format", form, *tags) if tags else ()
    found = (docker.parse_inspected(line) for line in told)
    return {
        tag: proofs.Here(digest=image.id, is_current=_is_current(cells[tag], own, image))
        for image in found
        if image
        for tag in image.tags
        if tag in tags
    }


def _is_current(cell: Cell, own: str, image: docker.Image) -> bool:
    """True if this tree gives its build id. False for an unreadable lock, which other verbs report."""
    try:
        wanted = packages.build_id_of(ROOT, cell, own, image.labels)
    except MatrixError:
        return False
    return image.labels.get(build.BUILD_ID_LABEL) == wanted


def _ask_docker(*words: str) -> tuple[str, ...]:
    asked = docker.capture(("docker", *words), cwd=ROOT, timeout_s=docker.QUICK_TIMEOUT_S)
    if asked.code == docker.TIMED_OUT:
        print(f"which images are here is not known: {asked.lines[0]}", file=sys.stderr)
    return asked.lines if asked.code == 0 else ()
