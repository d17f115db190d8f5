"""`images gate`: kernels of GPU libraries that an SM runs natively."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from images.choice import gpus
from images.console import say
from images.errors import UsageError, VerificationError
from images.proof import gate
from images.verbs import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="shared libraries, objects, .fatbin files")
    parser.add_argument("--sm", metavar="SM", required=True, help="the chip by its number: 90 or 9.0")
    parser.add_argument("--known-gaps", metavar="FILE", type=Path, help="kernels that may need a JIT, as YAML")
    flags.add_cuobjdump(parser)


def run(options: argparse.Namespace) -> int:
    """Judges kernels for one GPU by the rule of `verify`."""
    known = options.known_gaps and gate.load_known_gaps(options.known_gaps)
    sm = int(gpus.parse_sm(options.sm).sm)
    for file in options.files:
        if not file.is_file():
            message = f"no such file: {file}"
            raise UsageError(message, hint="a shared library, an object or a .fatbin file")
    if options.dry_run:
        say(options, [str(file) for file in options.files], [str(file) for file in options.files])
        return 0
    tool = gate.find_tool(options.cuobjdump)
    report = gate.judge([gate.query_library(tool, file) for file in options.files], sm, known)
    lines = [gate.describe(library, report.sm) for library in report.libraries]
    say(options, {**asdict(report), "faults": report.faults}, [*lines, *(f"FAIL {each}" for each in report.faults)])
    if report.faults:
        more = len(report.faults) - 1
        message = f"SM {report.sm} does not run all of it natively: {report.faults[0]}" + (
            f" and {more} more" * (more > 0)
        )
        compiled = "compile it with -gencode arch=compute_XX,code=sm_XX for that SM"
        has_kernels = any(library.kernels for library in report.libraries)
        raise VerificationError(message, hint=compiled if has_kernels else "is it a library with code for a GPU?")
    return 0
