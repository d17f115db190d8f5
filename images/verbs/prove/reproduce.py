"""`images verify --reproduce`: cells built twice, or once and compared with what was published."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict

from images import docker
from images.build import build, given, mirror, packages
from images.console import EVERYTHING, ROOT, progress, say
from images.errors import UsageError, VerificationError
from images.matrix import matrix
from images.proof import reproduce
from images.verbs.checkout import load_all, platform_here, platform_of
from images.verbs.plan import archives_of, dry, plan, publisher_of, with_toolkit

OF_REPRODUCE = (
    *("--against", "--base", "--toolkit-image", "--epoch", "--debian-mirror", "--index-url", "--wheels", "--locked"),
    *("--source", "--url", "--vendor"),
)
NOT_MET = "  of the newest Debian packages: the lock was not met"


def refuse_alone(options: argparse.Namespace) -> None:
    """Refuses flags of --reproduce without it. They would be ignored and look as if they had been obeyed."""
    for flag in OF_REPRODUCE:
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value is not False:
            said = "" if value is True or flag == "--index-url" else f": {value}"  # may hold a password
            message = f"{flag} belongs to --reproduce, which is not there{said}"
            raise UsageError(message, hint=f"verify --reproduce CELL {flag}{said.replace(':', '', 1)}")


def reproduce_cells(options: argparse.Namespace) -> int:
    """Builds each cell twice, for minutes or hours. Only an explicit --reproduce asks for it."""
    _refuse_with_reproduce(options)
    loaded = load_all()
    cells = matrix.select(loaded.cells, options.reproduce)
    archives = archives_of(options, loaded, is_strict=options.locked or options.against is not None)
    wanted = build.Options(
        base=options.base,
        toolkit_image=options.toolkit_image,
        ca_bundle=build.check_ca_bundle(options.ca_bundle),
        epoch_s=options.epoch,
        index_url=options.index_url,
        publisher=publisher_of(options, loaded),
        wheels=options.wheels,
        no_cache=True,
    )
    engine = docker.Engine()
    if options.dry_run:
        wanted = with_toolkit(wanted, loaded, cells, engine, is_dry=True)
        jobs = [dry(plan(cell, wanted, engine, platform_here(), is_dry=True), archives) for cell in cells]
        commands = [list(reproduce.uncached_argv(job, ())) for job in jobs]
        say(options, commands, [shlex.join(command) for command in commands])
        return 0
    build.refuse_platform(cells, engine.platform, done="reproduced")
    wanted = with_toolkit(wanted, loaded, cells, engine, is_dry=False)
    jobs = [plan(cell, wanted, engine, platform_of(engine)) for cell in cells]
    if options.against:
        return _reproduce_against(options, jobs, engine, archives)
    found = [_reproduce_one(job, engine, archives) for job in jobs]
    lines = [f"{each.cell}  {each.first}  {each.second}{'' if each.is_locked else NOT_MET}" for each in found]
    say(options, [asdict(each) for each in found], lines)
    differing = [f"{each.cell}: {each.difference}" for each in found if not each.is_same]
    if differing:
        message = f"two builds of the same commit differ: {'; '.join(differing)}"
        unmet = "" if all(each.is_locked for each in found) else ", or the archive moved between the two"
        hint = "what writes that file puts a time, a path or a random number into it"
        raise VerificationError(message, hint=hint + unmet)
    return 0


def _refuse_with_reproduce(options: argparse.Namespace) -> None:
    """Refuses flags about an existing image: --reproduce builds its own."""
    only = None if options.only == EVERYTHING else options.only
    record = "images/proven.yaml" if options.record else None
    said = {"--only": only, "--image": options.image, "--cuobjdump": options.cuobjdump, "--record": record}
    for flag, value in said.items():
        if value is not None:
            message = f"{flag} does not go with --reproduce {options.reproduce}, which builds for itself: {value}"
            raise UsageError(message, hint="--reproduce names the cells, as a glob where you like; else leave it out")


def _reproduce_one(job: build.Job, engine: docker.Engine, archives: packages.Archives) -> reproduce.Reproduction:
    with mirror.workplace(ROOT, job), given.placed(job):
        settled = packages.settle(ROOT, job, engine, archives, lambda line: progress(job.cell.id, line))
        return reproduce.reproduce(ROOT, settled, engine)


def _reproduce_against(
    options: argparse.Namespace, jobs: Sequence[build.Job], engine: docker.Engine, archives: packages.Archives
) -> int:
    if len(jobs) != 1:
        message = f"--against names one image, but {len(jobs)} cells match: {options.reproduce}"
        raise UsageError(message, hint="choose one with --reproduce")
    published = reproduce.published(options.against, engine.platform, cwd=ROOT)
    with mirror.workplace(ROOT, jobs[0]), given.placed(jobs[0]):
        settled = packages.settle(ROOT, jobs[0], engine, archives, lambda line: progress(jobs[0].cell.id, line))
        found = reproduce.against(ROOT, settled, engine, published)
    say(options, asdict(found), [f"{found.cell}  {found.first}  {found.second}"])
    if not found.is_same:
        what = found.difference or f"{found.first} here, {found.second} there"
        message = f"this commit does not build what was published: {found.cell}: {what}"
        save = f"docker save --output IMAGE.oci.tar {options.against}, and --against IMAGE.oci.tar names the file"
        raise VerificationError(message, hint=None if found.difference else save)
    return 0
