"""`images render`: every generated file, written or compared with what is committed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from images.build import bake
from images.choice import cards, proofs
from images.ci import ci, devcontainer
from images.console import EVERYTHING, ROOT, say
from images.errors import VerificationError
from images.host import inventory
from images.matrix import drift, render
from images.matrix.matrix import LOCKS, Matrix
from images.pins import debian, lock_sums, web_lock
from images.pins.lock_closure import closure_faults
from images.proof import cell_facts, wheel_gaps
from images.recipes import recipe
from images.verbs import flags
from images.verbs.checkout import is_locked, load, published_images, rendered

BRING_BACK = "git checkout "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 61 naming each file that differs")


def run(options: argparse.Namespace) -> int:
    loaded, cells = load(options)
    files = {path: text for cell in cells for path, text in rendered(cell).items()}
    recipes = [recipe.load(ROOT, name) for name in recipe.names(ROOT)]
    images = published_images(loaded)
    files |= {
        bake.BAKE_FILE: bake.bake_file(loaded.cells, loaded.publisher),
        ci.JOBS_FILE: ci.jobs_file(loaded.cells, is_locked),
        inventory.INVENTORY: inventory.inventory_file(loaded.cells, recipes, images),
        **cell_facts.files(loaded.cells, recipes),
    }
    for name, cell in loaded.devcontainers.items():
        files |= devcontainer.files(ROOT, name, cell)
    files[cards.PAGE] = cards.page(loaded, proofs.Record(proofs=proofs.load(ROOT, loaded.cells)))
    if options.check:
        lines = drift.drift(ROOT, files)
        if options.only == EVERYTHING:
            lines += drift.orphans(ROOT, files) + _unnamed(loaded) + ungated(ROOT, loaded)
        if lines:
            message = f"rendered files are not what the matrix says: {'; '.join(lines)}"
            raise VerificationError(message, hint=mend(lines))
        if options.only == EVERYTHING:
            _refuse_odd_locks(loaded)
    elif not options.dry_run:
        drift.write(ROOT, files)
    paths = [path.as_posix() for path in files]
    say(options, paths, paths)
    return 0


def _refuse_odd_locks(loaded: Matrix) -> None:
    lines = [*lock_sums.faults(ROOT), *(line for name in loaded.locks for line in closure_faults(ROOT, name))]
    if lines:
        message = f"locks are not what `lock` wrote: {'; '.join(lines)}"
        raise VerificationError(message, hint="who changed them? git log -p says; `python -m images lock` writes them")


def mend(lines: Sequence[str]) -> str:
    """Returns the hint for drift. `render` writes files and removes none."""
    left = [line.rpartition(drift.TAKE_AWAY)[2] for line in lines if drift.TAKE_AWAY in line]
    lost = [line.rpartition(BRING_BACK)[2] for line in lines if BRING_BACK in line]
    writes = [f"{render.RENDER_COMMAND}, then commit what it wrote"] if len(left) + len(lost) < len(lines) else []
    named = {drift.TAKE_AWAY: left, BRING_BACK: lost}
    return "; ".join([*writes, *(f"{command}{' '.join(paths)}" for command, paths in named.items() if paths)])


def ungated(root: Path, loaded: Matrix) -> list[str]:
    """Returns a line for each missing report on wheels. Without it `verify` takes every kernel in PTX for a fault."""
    wheels = [cell for cell in loaded.cells if not cell.engine.is_compiled]
    paths = [wheel_gaps.path_for(cell, sm) for cell in wheels for sm in cell.sms]
    return [f"{path}: missing: {BRING_BACK}{path}" for path in paths if not (root / path).is_file()]


def _unnamed(loaded: Matrix) -> list[str]:
    """Returns a line for each file left behind by a former cell, lock or devcontainer."""
    debian_locks = {debian.path_for(cell.base, each).name for cell in loaded.cells for each in cell.platforms}
    wheels = [cell for cell in loaded.cells if not cell.engine.is_compiled]
    files: dict[Path, set[str]] = {
        LOCKS: {
            *(f"{name}.{end}" for name in loaded.locks for end in ("in", "txt", "overrides")),
            *debian_locks,
            lock_sums.SUMS.name,
            web_lock.WEB.name,
        },
        wheel_gaps.FOLDER: {wheel_gaps.path_for(cell, sm).name for cell in wheels for sm in cell.sms},
    }
    return [
        *drift.unnamed(ROOT, files),
        *drift.unnamed(ROOT, {devcontainer.FOLDER: loaded.devcontainers}, is_folder=True),
    ]
