"""`images build`: cells as images of this machine, with a model or pushed if asked for."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from images import docker
from images.build import build, given, mirror, packages
from images.ci import push
from images.console import EVERYTHING, ROOT, progress, say
from images.errors import UsageError
from images.matrix import addresses, space
from images.matrix.matrix import Cell
from images.proof import sbom
from images.verbs import flags
from images.verbs.checkout import load, platform_here, platform_of
from images.verbs.make.models import add_prefix, build_model, models_of
from images.verbs.plan import archives_of, dry, plan, publisher_of, with_toolkit
from images.verbs.weights import add_rung


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_certificates(parser)
    flags.add_common(parser)
    flags.add_source(parser)
    parser.add_argument("--tag", metavar="IMAGE", help="name of the image; appliance:<cell> without it")
    parser.add_argument("--all", action="store_true", help="confirm a build of every cell, if --only is not given")
    parser.add_argument("--no-cache", action="store_true", help="run every step again; recompiles the engine")
    parser.add_argument("--force", action="store_true", help="build even if an image with this build id is here")
    about = "a cache to read, as docker buildx takes it: type=local,src=DIR; may be given several times"
    parser.add_argument("--cache-from", metavar="SPEC", action="append", default=[], help=about)
    parser.add_argument("--cache-to", metavar="SPEC", action="append", default=[], help="a cache to write, likewise")
    about = (
        "then push the image to this repository as :<cell>, with bill of materials and provenance; print the digest. "
        "With --model: that image, to REGISTRY/NAME/<model>"
    )
    parser.add_argument("--push", metavar="REGISTRY/NAME", help=about)
    about = "also build appliance/NAME:<cell>, which fetches and serves weights of images/models/NAME.yaml"
    parser.add_argument("--model", metavar="NAME", help=about)
    add_rung(parser)
    about = "with --model: put the weights into the image, for machines without a network"
    parser.add_argument("--bake-weights", action="store_true", help=about)
    about = "with --model: also name the image appliance/NAME, without a tag, in this machine's Docker"
    parser.add_argument("--alias", action="store_true", help=about)
    add_prefix(parser)
    parser.add_argument("--no-space-check", action="store_true", help="build even if the disks seem too full for it")


def run(options: argparse.Namespace) -> int:
    loaded, cells = load(options)
    if options.tag and len(cells) != 1:
        message = f"--tag names one image, but {len(cells)} cells match: {options.only}"
        raise UsageError(message, hint="choose one with --only")
    _refuse_unasked(options, cells)
    name = push.check_name(options.push) if options.push else None
    archives = archives_of(options, loaded, is_strict=options.locked or name is not None)
    models = models_of(options, cells)
    wanted = build.Options(
        base=options.base,
        toolkit_image=options.toolkit_image,
        ca_bundle=build.check_ca_bundle(options.ca_bundle),
        tag=options.tag,
        epoch_s=options.epoch,
        index_url=options.index_url,
        publisher=publisher_of(options, loaded),
        wheels=options.wheels,
        no_cache=options.no_cache,
        force=options.force or options.no_cache,
        space_check=not options.no_space_check,
        cache_from=tuple(options.cache_from),
        cache_to=tuple(options.cache_to),
    )
    engine = docker.Engine()
    if options.dry_run:
        wanted = with_toolkit(wanted, loaded, cells, engine, is_dry=True)
        jobs = [dry(plan(cell, wanted, engine, platform_here(), is_dry=True), archives) for cell in cells]
        rows = [
            {"cell": job.cell.id, "build_id": job.build_id, "command": list(build.buildx_argv(job))} for job in jobs
        ]
        say(options, rows, [_build_line(row) for row in rows])
        return 0
    build.refuse_platform(cells, engine.platform)
    for cell in cells:
        addresses.refuse_narrow(cell, addresses.here())
    wanted = with_toolkit(wanted, loaded, cells, engine, is_dry=False)
    # With a model, its image is what is pushed: the cell was, or its layers go along.
    results = [_build_cell(cell, wanted, engine, archives, None if models else name) for cell in cells]
    if models:
        results = [
            build_model(cell, result, engine, options, named, rung)
            for cell, result, (named, rung) in zip(cells, results, models, strict=True)
        ]
    say(options, results, [_build_line(result) for result in results])
    return 0


def _refuse_unasked(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Asks or refuses if every cell would be built, which takes days: --only may have been forgotten."""
    if options.only != EVERYTHING or options.all or options.dry_run or len(cells) == 1:
        return
    if sys.stdin.isatty():
        print(f"build {len(cells)} images, about half an hour each? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().casefold() in ("y", "yes"):
            return
    message = f"build without --only means all {len(cells)} cells: {', '.join(cell.id for cell in cells)}"
    raise UsageError(
        message, hint="choose with --only CELL; `images select` names this machine's; --all builds them all"
    )


def _build_cell(
    cell: Cell, wanted: build.Options, engine: docker.Engine, archives: packages.Archives, name: str | None
) -> dict[str, object]:
    job = plan(cell, wanted, engine, platform_of(engine))
    reused = None if wanted.force else build.find_built(job, engine)
    if reused and name and not push.is_current(job, engine.image(reused.digest)):
        progress(cell.id, f"built again: {reused.tag} has this build id, and the date or revision of another commit")
        reused = None
    with mirror.workplace(ROOT, job), given.placed(job):
        if reused:
            progress(
                cell.id, f"reused: {reused.tag} has this build id already: {reused.build_id} (--force builds it again)"
            )
        else:
            job, reused = _hold(job, wanted, engine, archives)
        built = reused or build.build(ROOT, job, engine)
        bill = ROOT / sbom.path_for(cell)
        if not sbom.describes(bill, built.digest):
            sbom.write(ROOT, cell, engine, image=built.tag, out=bill)
            progress(cell.id, f"bill of materials: {sbom.path_for(cell)}")
        return asdict(built) | (_push(job, built, engine, archives, name) if name else {})


def _hold(
    job: build.Job, wanted: build.Options, engine: docker.Engine, archives: packages.Archives
) -> tuple[build.Job, build.Built | None]:
    """Decides the packages of the job. Returns the job, and its image if it is already here."""
    cell = job.cell
    build.refuse_engine(job, engine)
    temporary = None if wanted.force else packages.find_temporary(ROOT, job, engine, archives)
    reused = build.find_built(temporary, engine) if temporary else None
    if temporary and reused:
        progress(
            cell.id, f"{archives.reason}; reused: {reused.tag}, of the packages that were the newest when it was built"
        )
        return temporary, reused
    if wanted.space_check:
        data = engine.data_folder()
        space.refuse_full(cell, space.needs(cell, archives=job.archive.parent, engine_data=data))
    held = packages.hold(ROOT, job, engine, archives, lambda line: progress(cell.id, line))
    if held.no_cache and not job.no_cache:
        progress(cell.id, "what the builder had kept is of other packages than the lock's: every step runs again")
    return held, None


def _push(
    job: build.Job, built: build.Built, engine: docker.Engine, archives: packages.Archives, name: str
) -> dict[str, object]:
    if built.is_reused:  # exported from layers of a build with the same archive
        job = packages.by_way_of(ROOT, job, engine, archives)
    pushed = push.push(ROOT, job, built, engine, name=name)
    others = [each for each in job.cell.platforms if each != engine.platform]
    if others:
        words = ("docker", "buildx", "imagetools", "create", "--tag", f"{name}:{job.cell.id}")
        sources = [f"{name}:{push.tag_of(job.cell, each)}" for each in job.cell.platforms]
        progress(job.cell.id, f"when {', '.join(others)} is pushed too, merge: {shlex.join((*words, *sources))}")
    return {"pushed": pushed.reference}


def _build_line(result: Mapping[str, object]) -> str:
    """Returns the line for stdout: the tag, the pushed reference, or the command of a dry run."""
    command = result.get("command")
    if isinstance(command, list):
        return shlex.join(command)
    return str(result.get("pushed") or result.get("alias") or result["tag"])
