"""`appliance logs`: the lines of the appliance, as sentences."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from typing import Literal

from appliance.host import containers
from appliance.host.daemon import connected
from appliance.settings import process_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="of `appliance list`; the only one without it")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until Ctrl-C, or until it ends")
    parser.add_argument("--tail", metavar="N", type=int, help="only the last N lines")
    parser.add_argument("--json", action="store_true", help="as the appliance wrote them")


def run(options: argparse.Namespace) -> int:
    with connected(process_environment()) as client:
        found = containers.choose(containers.all_of_ours(client), options.name, running=False)
        tail: Literal["all"] | int = "all" if options.tail is None else int(options.tail)
        chunks = client.logs(found.id, stream=True, follow=options.follow, tail=tail)
        for line in lines(chunks):
            print(line if options.json else sentence(line), flush=True)
    return 0


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Docker cuts them anywhere."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


def sentence(line: str) -> str:
    """ "16:49:38 warning: the message"; what is no event of ours stays as it is."""
    try:
        event = json.loads(line)
        time, level, message = event["time"], event["level"], event["message"]
    except (ValueError, KeyError, TypeError):
        return line
    return f"{time[11:19]} {'' if level == 'info' else f'{level}: '}{message}"
