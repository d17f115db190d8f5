"""`images prune`: space of what builds left behind, given back."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from images import docker
from images.build import prune
from images.console import ROOT, say
from images.verbs import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    about = "also the builder's cache of our builds; the next build of each cell compiles its engine again"
    parser.add_argument("--cache", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    found = prune.prune(ROOT, docker.Engine(), with_cache=options.cache, is_dry=options.dry_run)
    lines = [f"{each.size_bytes / 2**20:8.0f} MiB  {_fate(each, options)}  {each.what}" for each in found]
    total_mib = sum(each.size_bytes for each in found if each.is_gone or options.dry_run) / 2**20
    lines.append(f"{total_mib:8.0f} MiB  {'would be given back' if options.dry_run else 'given back'}")
    say(options, [asdict(each) for each in found], lines)
    return 0


def _fate(each: prune.Leftover, options: argparse.Namespace) -> str:
    return "found " if options.dry_run else "gone  " if each.is_gone else "in use"
