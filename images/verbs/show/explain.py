"""`images explain`: why a cell exists, cannot exist or is not built."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from images.choice import explain
from images.console import say
from images.errors import MatrixError
from images.matrix import matrix
from images.verbs import flags
from images.verbs.checkout import load_all
from images.verbs.state import record_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    parser.add_argument("cell", metavar="CELL_ID", help="such as llama-cu130-sm90; it need not exist")
    parser.add_argument("--platform", choices=matrix.PLATFORMS, help="ask for one platform; without it any will do")


def run(options: argparse.Namespace) -> int:
    loaded = load_all()
    found = explain.explain(options.cell, loaded, platform=options.platform, record=record_of(loaded))
    say(options, {**asdict(found), "message": found.message, "hint": found.hint}, explain.lines(found))
    if found.verdict != "exists":
        raise MatrixError(found.message, hint=found.hint)
    return 0
