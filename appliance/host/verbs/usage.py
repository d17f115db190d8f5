"""`appliance usage` on the host."""

from __future__ import annotations

import argparse

from appliance.errors import EngineNotReadyError
from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.host.docker.http import NoAnswerError
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
        message = f"the appliance does not answer: {error}"
        raise EngineNotReadyError(message, hint="see its log: `appliance logs` or `docker logs`") from error
    usage.show_usage(document, as_json=options.json)
    return 0
