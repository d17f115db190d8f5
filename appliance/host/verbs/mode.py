"""`appliance mode` on the host."""

from __future__ import annotations

import argparse

from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.host.shared import mode
from appliance.settings import process_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    mode.add_arguments(parser)
    parser.add_argument("--name", metavar="NAME", help="name from `appliance list`; not needed if there is only one")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), options.name)
        gateway = containers.gateway(client, found)
    return mode.show_modes(gateway, options)
