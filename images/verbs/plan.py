"""The plan of a build, shared by verbs that build: base, toolkit, archives, publisher."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from images import docker
from images.build import build, given, index, mirror, packages, substitute
from images.console import ROOT, progress
from images.matrix import compat, matrix
from images.matrix.matrix import Cell, Matrix
from images.matrix.publisher import Publisher


def with_toolkit(
    wanted: build.Options, loaded: Matrix, cells: Sequence[Cell], engine: docker.Engine, *, is_dry: bool
) -> build.Options:
    """Returns the options with an image's name in place of `substitute`. The image is made unless this is dry."""
    if wanted.toolkit_image != substitute.WORD:
        return wanted
    name = substitute.find(cells, engine) if is_dry else substitute.make(ROOT, loaded, cells, wanted, engine)
    return replace(wanted, toolkit_image=name)


def publisher_of(options: argparse.Namespace, loaded: Matrix) -> Publisher:
    given = {"source": options.source, "url": options.url, "vendor": options.vendor}
    return loaded.publisher.overridden(given)


def archives_of(options: argparse.Namespace, loaded: Matrix, *, is_strict: bool) -> packages.Archives:
    own = mirror.parse_mirror(options.debian_mirror) if options.debian_mirror else None
    return packages.Archives(loaded.snapshot, given=own, is_strict=is_strict)


def plan(
    cell: Cell, wanted: build.Options, engine: docker.Engine, platform: matrix.Platform, *, is_dry: bool = False
) -> build.Job:
    """Plans the build of a cell. Raises BuildError if its base or its toolkit's image cannot be had."""
    if wanted.toolkit_image is None:
        compat.refuse_unresolved(cell)
    given.check_wheels(cell, wanted.wheels)
    base = build.choose_base(cell, wanted.base, engine, is_dry=is_dry)
    toolkit = build.choose_toolkit(cell, wanted.toolkit_image, engine)
    progress(cell.id, base.describe(cell))
    job = build.plan_job(ROOT, cell, wanted, base, toolkit, platform=platform)
    return given.plan(job, wanted.wheels)


def dry(job: build.Job, archives: packages.Archives) -> build.Job:
    """Returns the job of a dry run. No archive is asked, so only a named one can be shown."""
    return index.plan(mirror.plan(job) if archives.given else job)
