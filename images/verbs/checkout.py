"""The matrix and the generated files of this clone, checked, as verbs need them."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path

from images import docker
from images.console import ROOT, say
from images.errors import MatrixError, UsageError, near_miss
from images.host import published
from images.host.published import Published
from images.matrix import compat, drift, matrix, render
from images.matrix.matrix import Cell, Matrix
from images.pins import debian, lock, lock_sums
from images.recipes import recipe


def load_all() -> Matrix:
    loaded = matrix.load(ROOT)
    compat.check(loaded.cells)
    inputs = sorted({path for cell in loaded.cells for path in render.inputs(cell)})
    _refuse_missing(inputs)
    lock.refuse_unhashed_inputs(ROOT, inputs)
    lock_sums.refuse_edited(ROOT, inputs)
    return loaded


def _refuse_missing(inputs: Sequence[Path]) -> None:
    """Refuses a matrix that names missing files, such as a patch, before a build stumbles on it."""
    missing = [path.as_posix() for path in inputs if not (ROOT / path).exists()]
    if missing:
        message = f"{matrix.MATRIX_FILE} names files that are not there: {', '.join(missing)}"
        folder = [path.as_posix() for path in (ROOT / missing[0]).parent.glob("*")]
        near = near_miss((ROOT / missing[0]).as_posix(), folder)
        raise MatrixError(message, hint=near and near.replace(f"{ROOT.as_posix()}/", ""))


def load(options: argparse.Namespace) -> tuple[Matrix, tuple[Cell, ...]]:
    """Returns the matrix and the chosen cells. The whole matrix is checked even for one cell."""
    loaded = load_all()
    return loaded, matrix.select(loaded.cells, options.only)


def published_images(loaded: Matrix, path: Path = published.FILE) -> tuple[Published, ...]:
    """Returns the rows of the file, whose cells and recipes are those of this clone."""
    return published.load(path, cells=[cell.id for cell in loaded.cells], recipes=recipe.names(ROOT))


def rendered(cell: Cell) -> dict[Path, str]:
    return render.render(cell, render.load_template(ROOT, cell))


def is_locked(cell: Cell, platform: matrix.Platform) -> bool:
    return (ROOT / debian.path_for(cell.base, platform)).exists()


def generate(options: argparse.Namespace, path: Path, text: str) -> int:
    if not options.dry_run:
        drift.write(ROOT, {path: text})
    say(options, path.as_posix(), [path.as_posix()])
    return 0


def refuse_one_image(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    if options.image and len(cells) != 1:
        message = f"--image names one image, but {len(cells)} cells match: {options.only}"
        raise UsageError(message, hint="choose one with --only")


def platform_of(engine: docker.Engine) -> matrix.Platform:
    return next(known for known in matrix.PLATFORMS if known == engine.platform)


def platform_here() -> matrix.Platform:
    name = f"linux/{docker.ARCHITECTURES.get(platform.machine(), platform.machine())}"
    for each in matrix.PLATFORMS:
        if each == name:
            return each
    message = f"no image is for this machine: {name}"
    raise UsageError(message, hint=f"--platform asks for another one: {', '.join(matrix.PLATFORMS)}")
