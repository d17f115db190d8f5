"""`images fetch`: weights of a recipe, brought to this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from images.build import build
from images.console import ROOT, say
from images.recipes import convert, fetch, recipe
from images.verbs import flags
from images.verbs.weights import WEIGHTS, add_rung, folder_of, rung_of, weights_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_certificates(parser)
    flags.add_common(parser)
    parser.add_argument("name", metavar="NAME", help="a file of images/models, without .yaml")
    add_rung(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, default=WEIGHTS, help="default: .make/models")
    about = f"make of a GGUF file a folder of bf16 safetensors as well, in {convert.IMAGE}, and print that"
    parser.add_argument("--safetensors", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    row = recipe.load(ROOT, options.name)
    rung = rung_of(options, row)
    if options.safetensors:
        convert.refuse_other(rung)
    targets = tuple(fetch.target_of(file, folder_of(row, rung, options.to)) for file in rung.files)
    folder = targets[0].with_suffix("") if options.safetensors else None
    if not options.dry_run:
        ca_bundle = build.check_ca_bundle(options.ca_bundle)
        targets = weights_of(row, rung, options.to, ca_bundle, options.hub)
        folder = convert.to_safetensors(ROOT, targets[0], ca_bundle=ca_bundle) if options.safetensors else None
    said = [{"file": str(at), "sha256": file.sha256} for at, file in zip(targets, rung.files, strict=True)]
    made = {"folder": str(folder)} if folder else {}
    say(options, {**said[0], "files": said, **made}, [str(folder)] if folder else [str(at) for at in targets])
    return 0
