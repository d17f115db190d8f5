"""`images wheel`: the host command as a wheel and an sdist."""

from __future__ import annotations

import argparse
from pathlib import Path

from images.console import ROOT, say
from images.host import inventory, published, wheel
from images.recipes import recipe
from images.verbs import flags
from images.verbs.checkout import load_all, published_images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    about = f"name of the distribution [{wheel.NAME}]"
    parser.add_argument("--name", metavar="NAME", type=wheel.check_name, default=wheel.NAME, help=about)
    about = "the images that it may pull [images/published.yaml]"
    parser.add_argument("--published", metavar="FILE", type=Path, default=ROOT / published.FILE, help=about)
    about = "folder for both files [.make/wheel]"
    parser.add_argument("--out", metavar="DIR", type=Path, default=ROOT / ".make/wheel", help=about)


def run(options: argparse.Namespace) -> int:
    loaded = load_all()
    recipes = [recipe.load(ROOT, name) for name in recipe.names(ROOT)]
    images = published_images(loaded, options.published.absolute())
    if options.dry_run:
        files = [path.as_posix() for path in (*wheel.modules(ROOT), wheel.INVENTORY)]
        say(options, files, files)
        return 0
    made = wheel.build(ROOT, options.out, inventory.command_data(loaded.cells, recipes, images), name=options.name)
    say(options, {"wheel": str(made.wheel), "sdist": str(made.sdist)}, [str(made.wheel), str(made.sdist)])
    return 0
