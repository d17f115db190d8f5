"""`images sbom`: the contents of built images as SPDX."""

from __future__ import annotations

import argparse
from pathlib import Path

from images import docker
from images.console import ROOT, say
from images.errors import UsageError
from images.proof import sbom
from images.verbs import flags
from images.verbs.checkout import load, refuse_one_image


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)
    parser.add_argument("--image", metavar="IMAGE", help="describe this image; appliance:<cell> without it")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to; beside the cell's archive without it")


def run(options: argparse.Namespace) -> int:
    _, cells = load(options)
    if options.out and len(cells) != 1:
        message = f"--out names one file, but {len(cells)} cells match: {options.only}"
        raise UsageError(message, hint="choose one with --only")
    refuse_one_image(options, cells)
    files = {cell.id: options.out or ROOT / sbom.path_for(cell) for cell in cells}
    if not options.dry_run:
        engine = docker.Engine()
        for cell in cells:
            sbom.write(ROOT, cell, engine, image=options.image or cell.tag, out=files[cell.id])
    paths = {cell_id: str(path) for cell_id, path in files.items()}
    say(options, paths, list(paths.values()))
    return 0
