"""`images bake`: docker-bake.json, or the variables that its targets take."""

from __future__ import annotations

import argparse
import shlex

from images import docker
from images.build import bake, build
from images.console import ROOT, say
from images.verbs import flags
from images.verbs.checkout import generate, load, platform_here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)
    about = "print the variables of this moment instead, as NAME=value lines for `env`"
    parser.add_argument("--env", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    loaded, cells = load(options)
    if not options.dry_run:  # bake makes no folder for what it writes
        (ROOT / bake.ARCHIVES).mkdir(parents=True, exist_ok=True)
    if not options.env:
        return generate(options, bake.BAKE_FILE, bake.bake_file(loaded.cells, loaded.publisher))
    values: dict[str, str] = {}
    for cell in cells:
        base = build.choose_base(cell, None, docker.Engine())
        values |= bake.environment(build.plan_job(ROOT, cell, build.Options(), base, platform=platform_here()))
    say(options, values, [f"{name}={shlex.quote(value)}" for name, value in values.items()])
    return 0
