"""`images router`: the image of the balancer in front of several appliances, built and verified."""

from __future__ import annotations

import argparse

from images import docker
from images.build import build, router
from images.console import ROOT, say
from images.verbs import flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_certificates(parser)
    flags.add_common(parser)
    parser.add_argument("--image", metavar="IMAGE", default="appliance:llama-cpu", help="to build it on; %(default)s")
    parser.add_argument("--tag", metavar="IMAGE", help=f"name of the image; {router.NAME}:<version> without it")
    flags.add_index(parser)


def run(options: argparse.Namespace) -> int:
    tag = options.tag or f"{router.NAME}:{router.version_of((ROOT / router.LOCK).read_text('utf-8'))}"
    if options.dry_run:
        say(options, {"tag": tag, "image": options.image}, (f"{tag} on {options.image}",))
        return 0
    source = router.Source(ca_bundle=build.check_ca_bundle(options.ca_bundle), index_url=options.index_url)
    engine = docker.Engine()
    made = router.build(ROOT, engine, image=options.image, tag=tag, source=source)
    router.verify(ROOT, engine, tag)
    did = "reused" if made.is_reused else "built"
    say(options, {"tag": tag, "version": made.version, "did": did, "verified": True}, (tag,))
    return 0
