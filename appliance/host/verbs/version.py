"""`appliance version` on the host: versions of this command, of Docker, and of each running appliance."""

from __future__ import annotations

import argparse
import json
import platform

from appliance import __version__
from appliance.errors import ConfigError
from appliance.host.docker import containers
from appliance.host.docker.daemon import connected
from appliance.settings import process_environment

VERSION = "org.opencontainers.image.version"
BUILD_ID = "io.appliance.build-id"
ENGINE, ENGINE_VERSION = "io.appliance.engine", "io.appliance.engine.version"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run(options: argparse.Namespace) -> int:
    row = {"appliance": __version__, "python": platform.python_version()}
    try:
        with connected(process_environment()) as client:
            docker = str(client.version()["Version"])
            running = [_of(each.labels) | {"name": each.short_name} for each in containers.all_of_ours(client)]
    except ConfigError as error:  # our own version is known without Docker
        docker, running = f"none: {error.message}", []
    if options.json:
        print(json.dumps({**row, "docker": docker, "containers": running}))
        return 0
    lines = [f"{name}: {value}" for name, value in (row | {"docker": docker}).items()]
    lines += [
        f"{each['name']}: {each['cell']} {each['version']}, {each['engine']}, build {each['build_id']}"
        for each in running
    ]
    print("\n".join(lines))
    return 0


def _of(labels: dict[str, str]) -> dict[str, str]:
    return {
        "cell": labels.get(containers.CELL, ""),
        "version": labels.get(VERSION, ""),
        "engine": f"{labels.get(ENGINE, '')} {labels.get(ENGINE_VERSION, '')}".strip(),
        "build_id": labels.get(BUILD_ID, ""),
    }
