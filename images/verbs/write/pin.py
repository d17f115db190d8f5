"""`images pin`: llama.cpp's pin moves to a newer release of its source, if all patches apply to it."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from images.build import build
from images.console import ROOT, progress, say
from images.errors import UsageError, VerificationError
from images.matrix import matrix, render
from images.matrix.matrix import MATRIX_FILE
from images.pins import engine_pin, lock
from images.verbs import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_certificates(parser)
    flags.add_common(parser)
    flags.add_index(parser)
    parser.add_argument("--release", metavar="VERSION", help="this release of the source; without it the newest")
    about = "the repository whose tags number the builds [https://github.com/ and its name in images/matrix/engines.py]"
    parser.add_argument("--repository", metavar="URL", help=about)
    about = "keep the source in this new folder, patched as far as the patches apply, to mend the others on it"
    parser.add_argument("--keep", metavar="DIR", type=Path, help=about)


def run(options: argparse.Namespace) -> int:
    """Writes the pin, and its lock, once every patch applies; exit 61 names each that does not."""
    if options.keep and options.keep.exists():
        message = f"--keep names something that is there already: {options.keep}"
        raise UsageError(message, hint="name a new folder")
    loaded = matrix.load(ROOT)
    engine = next(cell.engine for cell in loaded.cells if cell.engine.patches)
    source, ca_bundle = engine.source, build.check_ca_bundle(options.ca_bundle)
    release = engine_pin.find(source.distribution, options.release, index_url=options.index_url, ca_bundle=ca_bundle)
    if release.version == source.release:
        say(
            options,
            {"release": release.version, "is_new": False},
            [f"{source.distribution} {release.version}: as it is pinned"],
        )
        return 0
    progress(engine.name, f"{source.distribution} {release.version}, {source.release} is pinned")
    with tempfile.TemporaryDirectory(prefix="engine-pin-") as made:
        folder = options.keep or Path(made)
        engine_pin.unpack(release, folder, ca_bundle=ca_bundle)
        found = engine_pin.read(release, folder, options.repository or f"https://github.com/{engine.files.repository}")
        trials = engine_pin.try_patches(ROOT, engine.patches, folder / engine_pin.SOURCE)
    lines = [str(found), *map(str, trials)]
    missed = [each.patch for each in trials if each.missed]
    say(options, {**asdict(found), "is_new": True, "patches": [asdict(each) for each in trials]}, lines)
    if missed:
        message = f"{len(missed)} of {len(trials)} patches do not apply to {found}: {', '.join(missed)}"
        hint = "--keep DIR leaves the source as far as the patches apply; mend images/patches on it, and once more"
        raise VerificationError(message, hint=hint)
    if options.dry_run:
        return 0
    engine_pin.write(ROOT, engine, found)
    lock.lock(ROOT, source.lock, "sdist", ca_bundle=ca_bundle, upgrade=False, index_url=options.index_url)
    progress(engine.name, f"{MATRIX_FILE} and the lock {source.lock} are written; now: {render.RENDER_COMMAND}")
    return 0
