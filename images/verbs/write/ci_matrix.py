"""`images ci-matrix`: the jobs of the images workflow."""

from __future__ import annotations

import argparse

from images.ci import ci
from images.verbs import flags
from images.verbs.checkout import generate, is_locked, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)


def run(options: argparse.Namespace) -> int:
    loaded, _ = load(options)
    return generate(options, ci.JOBS_FILE, ci.jobs_file(loaded.cells, is_locked))
