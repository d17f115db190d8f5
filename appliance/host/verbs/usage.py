"""`appliance usage` on the host."""

from __future__ import annotations

import argparse

from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import NoAnswerError, unanswered
from appliance.host.shared import usage
from appliance.settings import process_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usage.add_arguments(parser)
    containers.add_name(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), containers.name_in(options))
        gateway = containers.gateway(client, found)
    by = f"&by={options.by}" if options.by else ""
    try:
        document = gateway.document(f"usage?days={options.days}{by}")
    except NoAnswerError as error:
        raise unanswered(error) from error
    usage.show_usage(document, as_json=options.json)
    return 0
