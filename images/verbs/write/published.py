"""`images published`: what a registry has of cells and recipes, as rows of images/published.yaml."""

from __future__ import annotations

import argparse
from pathlib import Path

from images.ci import push
from images.console import ROOT, progress, say
from images.host import published
from images.recipes import recipe
from images.verbs import flags
from images.verbs.checkout import load, published_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)
    about = "where the images were pushed: REGISTRY/NAME:<cell> and REGISTRY/NAME/<model>:<cell>"
    parser.add_argument("--registry", metavar="REGISTRY/NAME", required=True, help=about)
    about = "ask for the image of this recipe as well; may be given several times"
    parser.add_argument("--model", metavar="NAME", action="append", default=[], help=about)
    about = "first make the tag <cell> of what each platform has pushed"
    parser.add_argument("--merge", action="store_true", help=about)
    about = f"the file, whose other rows stay [{published.FILE}]"
    parser.add_argument("--out", metavar="FILE", type=Path, default=ROOT / published.FILE, help=about)


def run(options: argparse.Namespace) -> int:
    """Writes the file once every answer is there, so that a registry that lacks one image changes nothing."""
    push.check_name(options.registry, "--registry")
    loaded, cells = load(options)
    for name in options.model:
        recipe.load(ROOT, name)
    wanted = [(cell.id, name) for cell in cells for name in (None, *options.model)]
    if options.dry_run:
        names = [f"{options.registry}/{name}:{cell}" if name else f"{options.registry}:{cell}" for cell, name in wanted]
        say(options, names, names)
        return 0
    old = published_images(loaded, options.out.absolute())
    if options.merge:
        for cell in cells:
            for name in (options.registry, *(f"{options.registry}/{model}" for model in options.model)):
                progress(cell.id, f"{name}: {', '.join(push.merge(ROOT, cell, name))}")
    new = [published.ask(ROOT, options.registry, cell, name) for cell, name in wanted]
    before = options.out.read_text("utf-8")
    options.out.write_text(published.text(before, published.merged(old, new)), "utf-8")
    lines = [f"{row.image}@{row.digest}  {row.compressed_bytes / 1e6:.1f} MB" for row in new]
    say(options, [row.model_dump() for row in new], lines)
    return 0
