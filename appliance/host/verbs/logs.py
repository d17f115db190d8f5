"""`appliance logs`: the log lines of an appliance, as sentences."""

from __future__ import annotations

import argparse
from typing import Literal

from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.host.docker.log_lines import lines, sentence
from appliance.settings import process_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    containers.add_name(parser)
    parser.add_argument(
        "--follow", "-f", action="store_true", help="follow the log until Ctrl-C or the container's end"
    )
    parser.add_argument("--tail", metavar="N", type=_count, help="only the last N lines")
    parser.add_argument("--json", action="store_true", help="print the lines as the appliance wrote them")


def _count(text: str) -> int:
    if not text.isdecimal():
        message = f"not a number of lines: {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), containers.name_in(options), running=False)
        tail: Literal["all"] | int = "all" if options.tail is None else int(options.tail)
        chunks = client.logs(found.id, stream=True, follow=options.follow, tail=tail)
        for line in lines(chunks):
            print(line if options.json else sentence(line), flush=True)
    return 0
