"""`appliance stop`: finishes running answers and removes the container; the volume stays."""

from __future__ import annotations

import argparse
import json

from docker.api import APIClient
from docker.errors import NotFound

from appliance.errors import UsageError
from appliance.host.docker import containers
from appliance.host.docker.containers import Found
from appliance.host.docker.daemon import connected
from appliance.host.docker.launch import BEFORE, DATA, GRACE_S
from appliance.settings import process_environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="*", metavar="NAME", help="name from `appliance list`; not needed if there is only one"
    )
    about = "the name as a flag, which every verb accepts; may be given several times"
    parser.add_argument("--name", dest="named", metavar="NAME", action="append", default=[], help=about)
    parser.add_argument("--all", action="store_true", help="all appliances started by this command")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    names = list(dict.fromkeys([*options.name, *options.named]))
    if options.all and names:
        message = f"--all and a name exclude each other: {' '.join(names)}"
        raise UsageError(message, hint="give only one of them")
    with connected(process_environment()) as client:
        found = containers.all_of_ours(client)
        if options.all:
            chosen = [each for each in found if each.launch]
        else:
            chosen = [containers.choose(found, name) for name in names or [None]]
        for each in chosen:  # one after the other: each may take its whole grace
            if not options.json:
                print(f"stopping {each.short_name}", flush=True)
            stop(client, each)
        kept = sorted({volume for each in chosen for volume in [_volume(client, each)] if volume})
    if options.json:
        print(json.dumps({"stopped": [each.name for each in chosen], "kept_volumes": kept}))
    else:
        print(f"kept: volume {', '.join(kept)}" if kept else "nothing to stop" if not chosen else "stopped")
    return 0


def stop(client: APIClient, found: Found) -> None:
    """Stop the container. One that this command did not start is stopped but not removed, since its owner may want to
    start it again."""
    try:
        client.stop(found.id, timeout=GRACE_S)
    except NotFound:
        return
    if not found.launch:
        return
    containers.remove(client, found)
    if before := containers.by_name(client, found.name + BEFORE):
        containers.remove(client, before)


def _volume(client: APIClient, found: Found) -> str | None:
    """Return the volume's name. For our own containers it comes from the launch, since the container is gone."""
    if found.launch:
        return found.launch.volume
    mounts = client.inspect_container(found.id)["Mounts"]
    return next((str(each["Name"]) for each in mounts if each["Destination"] == DATA and each.get("Name")), None)
