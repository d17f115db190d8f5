"""`images ci-steps`: the shell of the workflows, to be read, checked or run here."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from images.ci import ci_steps
from images.console import ROOT, say
from images.errors import UsageError, near_miss
from images.verbs import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    parser.add_argument("job", metavar="WORKFLOW/JOB", nargs="?", help="such as image/build; all without it")
    parser.add_argument("--out", metavar="DIR", type=Path, help="write each step's shell there, as it would be run")


def run(options: argparse.Namespace) -> int:
    """Shows the steps that a forge would run, or writes their shell."""
    known = ci_steps.load(ROOT)
    jobs = dict.fromkeys(f"{step.workflow}/{step.job}" for step in known)
    if options.job and options.job not in jobs:
        message = f"no such job: {options.job}"
        raise UsageError(message, hint=near_miss(options.job, jobs) or f"the jobs are {', '.join(jobs)}")
    steps = [step for step in known if options.job in (None, f"{step.workflow}/{step.job}")]
    if options.out and not options.dry_run:
        options.out.mkdir(parents=True, exist_ok=True)
        for step in steps:
            if step.script:
                (options.out / step.file).write_text(f"#!/usr/bin/env bash\n{step.script}", "utf-8")
    lines = [f"{step.file if step.script else f'{step.action} (an action)'}: {step.name}" for step in steps]
    say(options, [asdict(step) for step in steps], lines)
    return 0
