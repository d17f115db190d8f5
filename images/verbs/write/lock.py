"""`images lock`: locks of Python packages, of Debian packages and of base images."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from images import docker
from images.build import build, mirror, snapshot
from images.console import ROOT, say
from images.errors import UsageError, VerificationError, near_miss
from images.matrix import matrix, render
from images.matrix.matrix import LOCKS, Cell, Matrix
from images.pins import bases, debian, lock, web_lock
from images.verbs import flags
from images.verbs.checkout import platform_of, rendered
from images.verbs.plan import archives_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_certificates(parser)
    flags.add_common(parser)
    parser.add_argument("names", metavar="NAME", nargs="*", help="locks, or bases, to write; all without it")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--upgrade", action="store_true", help="move to the newest versions that the .in files allow")
    about = "instead: ask apt, in each base that is here, what a build installs; write images/locks/debian-*.json"
    one.add_argument("--debian", action="store_true", help=about)
    about = "write nothing; exit 61 naming each package that nothing asks for and each hash that no archive has"
    parser.add_argument("--check", action="store_true", help=about)
    flags.add_index(parser)
    about = "of --debian: the locks of this platform, from its index of the archive; without it this machine's"
    parser.add_argument("--platform", choices=matrix.PLATFORMS, help=about)
    flags.add_mirror(parser, of="with --debian: ", otherwise="as of six hours ago, or else from the base's own sources")
    about = "instead: ask npm for the libraries of the pages and write images/locks/web.json; with --upgrade the newest"
    parser.add_argument("--web", action="store_true", help=about)
    about = "instead: ask registries for the digests of the base images and write them into build_matrix.yaml"
    one.add_argument("--bases", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    if options.check and (options.upgrade or options.bases):
        flag = "--upgrade" if options.upgrade else "--bases"
        message = f"--check writes nothing, and {flag} is there to write"
        raise UsageError(message, hint="lock --check, or lock --check --debian")
    if options.web:
        return _lock_web(options)
    if options.bases:
        return _lock_bases(options)
    if options.debian:
        return _lock_debian(options)
    for flag, value in {"--debian-mirror": options.debian_mirror, "--platform": options.platform}.items():
        if value:
            message = f"{flag} belongs to --debian, which is not there: {value}"
            raise UsageError(message, hint=f"lock --debian {flag} {value}")
    known = matrix.load_locks(ROOT)
    names = [name for name in known if not options.names or name in options.names]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        message = f"no such lock: {', '.join(unknown)}"
        raise UsageError(message, hint=near_miss(unknown[0], known) or f"the locks are {', '.join(known)}")
    if options.dry_run:
        say(options, names, names)
        return 0
    ca_bundle = build.check_ca_bundle(options.ca_bundle)
    if options.check:
        lines = [
            line
            for name in names
            for line in lock.faults(ROOT, name, known[name], ca_bundle=ca_bundle, index_url=options.index_url)
        ]
        return _say_locks(options, lines, [f"{LOCKS}/{name}.txt" for name in names])
    changed = {
        name: lock.lock(
            ROOT, name, known[name], ca_bundle=ca_bundle, upgrade=options.upgrade, index_url=options.index_url
        )
        for name in names
    }
    say(options, changed, [f"{name}: {'changed' if is_new else 'as it was'}" for name, is_new in changed.items()])
    return 0


def _say_locks(options: argparse.Namespace, faults: Sequence[str], asked: Sequence[str]) -> int:
    say(options, faults, faults or [f"{path}: as the archives have it" for path in asked])
    if faults:
        more = f" and {len(faults) - 1} more" * (len(faults) > 1)
        message = f"locks are not what the archives have: {faults[0]}{more}"
        raise VerificationError(message, hint="who added it? git log -p says; `lock` writes the file anew")
    return 0


def _lock_web(options: argparse.Namespace) -> int:
    """Writes the lock of the pages' libraries."""
    if options.names or options.check or options.debian or options.bases:
        message = "lock --web writes one lock, and goes with --upgrade only"
        raise UsageError(message, hint="python -m images lock --web [--upgrade]")
    known = web_lock.libraries(ROOT)
    if options.dry_run:
        say(options, [each.name for each in known], [f"{each.name}: {each.version}" for each in known])
        return 0
    lines = web_lock.lock(ROOT, ca_bundle=build.check_ca_bundle(options.ca_bundle), upgrade=options.upgrade)
    say(options, lines, lines)
    return 0


def _lock_bases(options: argparse.Namespace) -> int:
    """Writes the digests of all base images, or of the named ones."""
    loaded = matrix.load(ROOT)
    known = {cell.base.name: cell.base for cell in loaded.cells}
    known |= {kit.image.name: kit.image for kit in loaded.toolkits.values() if kit.image}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        message = f"no such base: {', '.join(unknown)}"
        raise UsageError(message, hint=near_miss(unknown[0], known) or f"the bases are {', '.join(known)}")
    wanted = bases.choose(known, options.names)
    if options.dry_run:
        say(options, [base.image for base in wanted], [f"{base.name}: {base.image}" for base in wanted])
        return 0
    found = bases.lock(ROOT, wanted, today=datetime.now(UTC).date())
    say(options, [asdict(each) for each in found], [*map(str, found), f"now: {render.RENDER_COMMAND}"])
    return 0


def _lock_debian(options: argparse.Namespace) -> int:
    """Writes one lock for each base that the engine has, for the engine's own platform."""
    if options.names:
        message = f"lock --debian takes no names: {' '.join(options.names)}"
        raise UsageError(message, hint="it asks apt in every base that is here")
    loaded = matrix.load(ROOT)
    archives = archives_of(options, loaded, is_strict=False)
    moment = snapshot.settled(datetime.now(UTC))
    dockerfiles = [(cell, rendered(cell)[cell.folder / "Dockerfile"]) for cell in loaded.cells]
    if options.check and not options.dry_run:
        return _check_debian(options, loaded, dockerfiles)
    archive = archives.given if options.dry_run else archives.choose(loaded.cells[0].base, moment)
    engine = docker.Engine()
    platform = options.platform or platform_of(engine)
    lines = debian.lock(
        ROOT, dockerfiles, engine, mirror.as_archive(archive), platform=platform, is_dry=options.dry_run
    )
    if not options.dry_run and not (archive and archive.timestamp):
        lines.append(f"{archives.reason}: the snapshot of each lock is told from the dates of the lists")
    say(options, lines, lines)
    return 0


def _check_debian(options: argparse.Namespace, loaded: Matrix, dockerfiles: Sequence[tuple[Cell, str]]) -> int:
    """Compares Debian locks with a snapshot of their moment. Today's archive has other packages by right."""
    strict = archives_of(options, loaded, is_strict=True)
    base = loaded.cells[0].base
    engine = docker.Engine()
    platform = options.platform or platform_of(engine)
    faults = debian.faults_of_locks(
        ROOT, dockerfiles, engine, lambda moment: mirror.as_archive(strict.choose(base, moment)), platform=platform
    )
    return _say_locks(options, faults, [f"{LOCKS}/debian-*-{platform.partition('/')[2]}.json"])
