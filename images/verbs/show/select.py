"""`images select`: the image for this machine, or for one that is described."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from images import docker
from images.build import model
from images.choice import described, gpus, select
from images.console import ROOT, say
from images.errors import UsageError
from images.matrix import matrix
from images.recipes import recipe
from images.verbs import flags
from images.verbs.checkout import load_all, platform_here
from images.verbs.machine import machine_here
from images.verbs.make.models import add_prefix
from images.verbs.state import record_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_common(parser)
    about = "llama (default) serves GGUF, vllm serves safetensors"
    parser.add_argument("--engine", metavar="NAME", default=select.DEFAULT_ENGINE, help=about)
    parser.add_argument("--driver", metavar="VERSION", help="version of the driver, as nvidia-smi shows it: 570.124.06")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        action="append",
        default=[],
        help="name of a GPU; repeatable: one image for all",
    )
    parser.add_argument("--sm", metavar="SM", action="append", default=[], help="a GPU by its number: 90 or 9.0")
    parser.add_argument("--platform", choices=matrix.PLATFORMS, help="platform of the image (default: this machine's)")
    about = "select for the machine in this file, the output of `appliance probe --json`; - is stdin"
    parser.add_argument("--machine", metavar="FILE", help=about)
    about = "also name that cell's model image, appliance/NAME:<cell>, without the tag, in this machine's Docker"
    parser.add_argument("--alias", metavar="NAME", help=about)
    add_prefix(parser)


def run(options: argparse.Namespace) -> int:
    loaded = load_all()
    record = record_of(loaded)
    choice = select.choose(loaded, _machine(options), engine=options.engine, record=record)
    rest = "\n".join(f"  {loser.cell:<20} {loser.why}" for loser in choice.runners_up)
    tag = choice.tag
    where = "" if choice.platform == record.own else f" on a machine of {choice.platform}"
    get = f"{tag} is here" if choice.is_here else f"get it{where}: {choice.command}"
    left = "".join(f"left out: {each.gpu}: {each.why}\n" for each in choice.left_out)
    if options.alias:
        prefix = model.check_prefix(options.image_prefix)
        recipe.load(ROOT, options.alias)
        tag = model.tag_of(options.alias, choice.cell, prefix)
        name = model.alias_of(options.alias, prefix)
        if not options.dry_run:
            model.set_alias(options.alias, choice.cell, docker.Engine(), prefix)
        say(options, {**asdict(choice), "tag": tag, "alias": name}, [name])
    else:
        say(options, asdict(choice), [tag])
    if not options.json:
        said = f"{tag}: {choice.why}\n{left}{choice.proof}\n{get}"
        print(f"{said}\nnot chosen:\n{rest}", file=sys.stderr)
    return 0


def _machine(options: argparse.Namespace) -> select.Machine:
    """Returns the described machine, else this one."""
    here = options.platform or platform_here()
    # An empty --driver is a script's empty variable, and not the same as no driver told.
    driver = None if options.driver is None else select.parse_driver(options.driver)
    if options.machine is not None:
        if options.gpu or options.sm or driver is not None:
            message = "--machine tells GPUs and driver: leave out --gpu, --sm and --driver"
            raise UsageError(message)
        return described.read_machine(options.machine, here)
    named = (*map(gpus.parse_gpu, options.gpu), *map(gpus.parse_sm, options.sm))
    if named:
        return select.Machine(platform=here, gpus=named, driver=driver)
    if driver is not None:
        message = f"--driver needs a GPU to go with it: {driver}"
        raise UsageError(message, hint="--gpu 'RTX 5090' or --sm 120")
    return machine_here(here)
