"""`images gaps`: reports on the kernels of an engine's wheels, one for each cell and SM."""

from __future__ import annotations

import argparse
from pathlib import Path

from images.console import ROOT, say
from images.errors import UsageError, VerificationError
from images.matrix import drift
from images.proof import gate, wheel_gaps
from images.verbs import flags
from images.verbs.checkout import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_only(parser)
    flags.add_common(parser)
    parser.add_argument(
        "files", metavar="FILE", nargs="*", type=Path, help="wheels of the lock; others are only listed"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 61 naming each file that differs")
    flags.add_cuobjdump(parser)


def run(options: argparse.Namespace) -> int:
    """Writes or checks the gate's verdict on an engine's wheels, one file for each chip of its cells."""
    _, chosen = load(options)
    cells = [cell for cell in chosen if not cell.engine.is_compiled]
    if not cells:
        message = f"no cell that matches is of an engine from wheels: {options.only}"
        raise UsageError(message, hint="such as --only 'vllm-*'")
    if options.dry_run:
        paths = [wheel_gaps.path_for(cell, sm).as_posix() for cell in cells for sm in cell.sms]
        say(options, paths, paths)
        return 0
    lock_text = (ROOT / cells[0].engine.source.lock_file).read_text("utf-8")
    wheels = wheel_gaps.read_wheels(gate.find_tool(options.cuobjdump), options.files, cells[0].engine, lock_text)
    texts = {
        wheel_gaps.path_for(cell, form.sm): wheel_gaps.report(cell, form, wheels)
        for cell in cells
        for form in cell.sm_forms
    }
    found = wheel_gaps.faults(ROOT, texts)
    if options.check and found:
        message = f"the reports on the wheels are not what these wheels say: {'; '.join(found)}"
        raise VerificationError(message, hint=f"{wheel_gaps.COMMAND}, then commit what it wrote")
    if not options.check:
        drift.write(ROOT, texts)
    say(options, found, found or [f"{len(texts)} reports as they were"])
    return 0
