"""python3 -m appliance.host.start.preflight: reports what would stop `make up` or `make test`, before anything is made.

Reports all findings at once, each with what to do. Uses the standard library only and takes under a second: it runs on
the machine's own Python, before there is a .venv. Prints for make, on stdout, the recipe and variant that the model's
name means.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from appliance.errors import ConfigError, FatalError, VolumeError
from appliance.host.build_cache import cached_mib
from appliance.host.docker import ports
from appliance.host.docker.inventory import CLONE, Inventory, load_inventory
from appliance.model_names import Meant, nearest, resolve
from appliance.run import Finished, RunTimeout, run
from appliance.values import dataclass

CELL_LABEL = "io.appliance.cell"
PROJECT_LABEL = "com.docker.compose.project"
OWN_PROJECTS = {"appliance", "appliance-replicas"}  # names of the compose files that use the volume
DOCKER_S = 20.0  # a command that takes longer hangs
VENV_MIB = 1100  # 729 MiB installed, plus the wheels that are unpacked into it
BIND = "127.0.0.1"  # the address at which compose/appliance.yaml publishes the port
# Names in our volume. A volume that has content and none of these belongs to another program.
OURS = {"models", "profiles", "cache", "secrets", "appliance.yaml"}
PLUGINS = {
    "compose": "install it: https://docs.docker.com/compose/install/linux/ (Debian: docker-compose-plugin)",
    "buildx": "install it: https://docs.docker.com/build/install-buildx/ (Debian: docker-buildx-plugin)",
}


class NoRoomError(FatalError):
    exit_code = 60  # same code as a failed build


@dataclass(frozen=True, kw_only=True)
class Docker:
    """Answers of the docker command. `info` is None without the command; `server` is "" if no daemon answers."""

    info: Mapping[str, Any] | None
    why: str  # the command's error message if it fails
    containers: tuple[Mapping[str, str], ...]
    volume: Mapping[str, Any] | None
    users: tuple[Mapping[str, str], ...]  # containers that use this volume
    has_image: bool  # True if the cell's image exists
    cache: str = ""  # the builder's own list of its cache

    @property
    def server(self) -> str:
        return str((self.info or {}).get("ServerVersion") or "")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    inventory = load_inventory()
    meant = _meant(options, inventory)
    found = list(findings(options, inventory, meant))
    _show(found, meant, as_json=options.json)
    return found[0].exit_code if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m appliance.host.start.preflight", description=__doc__)
    about = "up checks everything, test only what a build needs, venv only Python"
    parser.add_argument("what", choices=("up", "test", "venv"), help=about)
    parser.add_argument("--model", metavar="NAME", default="demo", help="same as MODEL of make [demo]")
    parser.add_argument("--cell", metavar="CELL", default="", help="cell that is built; not checked if empty")
    parser.add_argument("--port", metavar="N", default=str(ports.PORT), help=f"port on this machine [{ports.PORT}]")
    parser.add_argument("--volume", metavar="NAME", default="appliance", help="volume [appliance]")
    parser.add_argument("--project", metavar="NAME", default="appliance", help="compose project [appliance]")
    parser.add_argument(
        "--path", metavar="NAME=PATH", action="append", default=[], help="path that must exist, unless it is empty"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return parser


def _meant(options: argparse.Namespace, inventory: Inventory | None) -> Meant | None:
    return resolve(options.model, inventory.recipes) if inventory else Meant(recipe=options.model, rung="")


def _show(found: Sequence[FatalError], meant: Meant | None, *, as_json: bool) -> None:
    if as_json:
        rows = [{"error": each.message, "hint": each.hint, "exit_code": each.exit_code} for each in found]
        row = {"recipe": meant.recipe, "rung": meant.rung} if meant else {"recipe": None, "rung": None}
        print(json.dumps({"findings": rows, **row}, indent=1))
        return
    for each in found:
        print(f"error: {each.message}\n\nhint: {each.hint}\n", file=sys.stderr)
    if meant and not found:
        print(f"recipe={meant.recipe} rung={meant.rung}")


def findings(options: argparse.Namespace, inventory: Inventory | None, meant: Meant | None) -> Iterator[FatalError]:
    """Yield everything that would fail, in the order in which it would fail."""
    yield from python_findings(CLONE)
    yield from path_findings(options.path)
    if options.what == "venv":
        return
    docker = query_docker(options.volume, options.cell)
    yield from docker_findings(docker)
    yield from cell_findings(options.cell, inventory)
    yield from room_findings(wanted_room(docker, options.cell, inventory))
    if options.what == "up":
        yield from model_findings(options.model, inventory, meant)
        yield from port_findings(options.port, options.project, docker)
        if docker.volume is not None:
            users = {each["Names"]: _labels(each) for each in docker.users}
            hint = f"another one: make up APPLIANCE_VOLUME={options.volume}-2"
            yield from volume_findings(options.volume, docker.volume, users, project=options.project, hint=hint)


def python_findings(clone: Path) -> Iterator[FatalError]:
    if not (clone / ".venv/installed").exists() and importlib.util.find_spec("ensurepip") is None:
        message = f"this Python cannot create a .venv, because it has no ensurepip: {sys.executable}"
        yield ConfigError(message, hint="sudo apt install python3-venv, or another one: make PYTHON=/path/to/python3")


def path_findings(given: Iterable[str]) -> Iterator[FatalError]:
    for each in given:
        name, _, path = each.partition("=")
        if path and not os.path.exists(path):  # noqa: PTH110 - pathlib's raises for what may not be looked at
            yield ConfigError(f"{name} names a path that does not exist: {path}", hint=f"correct it, or omit {name}")


def query_docker(volume: str, cell: str) -> Docker:
    """Ask the docker command six questions at the same time."""
    form = ("--format", "{{json .}}")
    asked: tuple[tuple[str, ...], ...] = (
        ("info", *form),
        ("ps", "--no-trunc", *form),
        ("volume", "inspect", volume),
        ("ps", "--all", "--no-trunc", "--filter", f"volume={volume}", *form),
        ("image", "inspect", "--format", "{{.Id}}", f"appliance:{cell or 'none'}"),
        ("buildx", "du", "--verbose"),
    )
    with ThreadPoolExecutor(max_workers=len(asked)) as pool:
        info, running, inspected, users, image, cache = pool.map(_ask, asked)
    volumes = _documents(inspected) if inspected.returncode == 0 else []
    return Docker(
        info=None if info.returncode == NO_COMMAND else next(iter(_documents(info)), {}),
        why=info.stderr.strip(),
        containers=tuple(_documents(running)),
        volume=next(iter(volumes), None),
        users=tuple(_documents(users)),
        has_image=bool(cell) and image.returncode == 0,
        cache=cache.stdout if cache.returncode == 0 else "",
    )


NO_COMMAND, NO_ANSWER = 127, 124  # same codes as a shell


def _ask(words: tuple[str, ...]) -> Finished:
    try:
        return run(("docker", *words), timeout_s=DOCKER_S)
    except FileNotFoundError:
        return Finished(returncode=NO_COMMAND, stdout="", stderr="")
    except (OSError, RunTimeout) as error:
        return Finished(returncode=NO_ANSWER, stdout="", stderr=str(error))


def _documents(finished: Finished) -> list[dict[str, Any]]:
    """Return the JSON objects of an answer, one a line or in one list; lines that are not JSON are skipped."""
    found: list[dict[str, Any]] = []
    for text in (finished.stdout,) if finished.stdout.startswith("[") else finished.stdout.splitlines():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        found += [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
    return found


def docker_findings(docker: Docker) -> Iterator[FatalError]:
    if docker.info is None:
        yield ConfigError(
            "Docker is missing: there is no docker command", hint="https://docs.docker.com/engine/install/"
        )
        return
    if not docker.server:
        yield _silent(docker)
    client = docker.info.get("ClientInfo")
    there = {each.get("Name") for each in (client or {}).get("Plugins") or ()}
    for name, hint in PLUGINS.items():
        if client and name not in there:
            yield ConfigError(f"Docker's plugin {name} is missing: no `docker {name}`", hint=hint)
    if docker.server and not _keeps_manifests(docker.info):
        message = f"Docker keeps its images in a store that cannot load what is built here: {docker.info.get('Driver')}"
        hint = '{"features": {"containerd-snapshotter": true}} in /etc/docker/daemon.json, and a restart of Docker'
        yield ConfigError(message, hint=hint)


def _silent(docker: Docker) -> ConfigError:
    # the keys of `podman info`, for a docker command that is Podman's
    if {"host", "store"} <= (docker.info or {}).keys():
        message = "the docker command here is Podman's, which lacks the builder and the image store that are needed"
        return ConfigError(message, hint="install Docker: https://docs.docker.com/engine/install/")
    said = docker.why or " ".join((docker.info or {}).get("ServerErrors") or ()) or "it gave no reason"
    if "permission denied" in said.lower():
        return ConfigError("this user may not use Docker", hint='sudo usermod -aG docker "$USER", and log in again')
    hint = "start it: sudo systemctl start docker, or Docker Desktop; see `docker info`"
    return ConfigError(f"Docker does not answer: {said.splitlines()[-1]}", hint=hint)


def _keeps_manifests(info: Mapping[str, Any]) -> bool:
    status = {str(row[0]): str(row[1]) for row in info.get("DriverStatus") or () if len(row) == 2}
    return status.get("driver-type", "").startswith("io.containerd.")


def cell_findings(cell: str, inventory: Inventory | None) -> Iterator[FatalError]:
    if inventory and cell and cell not in inventory.cells:
        near = difflib.get_close_matches(cell, list(inventory.cells), 1)
        meant = f"perhaps you meant {near[0]}; " if near else ""
        yield ConfigError(f"CELL is not a cell: {cell}", hint=f"{meant}`python3 -m images list` lists all cells")


def model_findings(called: str, inventory: Inventory | None, meant: Meant | None) -> Iterator[FatalError]:
    if inventory and meant is None:
        near = nearest(called, inventory.recipes)
        known = f"the recipes are {', '.join(each.name for each in inventory.recipes)}"
        hint = f"make up MODEL={near[0]}{f', or {near[1]}' if near[1:] else ''}; {known}" if near else known
        yield ConfigError(f"MODEL is not a recipe or a model of one: {called}", hint=hint)


def port_findings(asked: str, project: str, docker: Docker) -> Iterator[FatalError]:
    """Yield an error if the port is in use, unless the appliance of this project holds it, which `make up` updates."""
    name = "APPLIANCE_HOST_PORT"
    if not asked.isdecimal() or not 1 <= int(asked) <= 65535:
        yield ConfigError(
            f"{name} is not a port: {asked}", hint=f"a number from 1 to 65535, as in make up {name}=12000"
        )
        return
    holder = next((each for each in docker.containers if _publishes(each, asked)), None)
    if holder and _labels(holder).get(PROJECT_LABEL) == project:
        return
    if holder is None and ports.is_free(BIND, int(asked)):
        return
    by = f", by container {holder['Names']}" if holder else ""
    stop = f"; or stop it: docker stop {holder['Names']}" if holder else ""
    free = next(port for port in range(ports.PORT + 1, 65536) if _is_free(port, docker))
    yield ConfigError(f"the port is in use: {BIND}:{asked}{by}", hint=f"make up {name}={free}{stop}")


def _is_free(port: int, docker: Docker) -> bool:
    published = any(_publishes(each, str(port)) for each in docker.containers)
    return not published and ports.is_free(BIND, port)


def _publishes(container: Mapping[str, str], port: str) -> bool:
    """True if the container publishes the TCP port at our address or at all addresses; any other use does not
    conflict."""
    addresses = "|".join(map(re.escape, ("0.0.0.0", BIND)))  # noqa: S104
    return re.search(rf"\b(?:{addresses}):{port}->\d+/tcp", container.get("Ports", "")) is not None


def volume_findings(
    name: str,
    volume: Mapping[str, Any],
    users: Mapping[str, Mapping[str, str]],
    *,
    project: str | None = None,
    hint: str,
) -> Iterator[FatalError]:
    """Yield an error if the volume belongs to another program, judged by its users and contents. Docker uses any volume
    of this name.

    `users` maps containers to their labels. `project` is the compose project that would have created it; None without
    compose.
    """
    strangers = [container for container, labels in users.items() if not labels.get(CELL_LABEL)]
    owner = (volume.get("Labels") or {}).get(PROJECT_LABEL)
    if owner in OWN_PROJECTS | {project} - {None}:
        return  # other containers may use it too, such as a backup
    if strangers:
        why = f"it is used by container {strangers[0]}, which is not an appliance"
    elif project and owner and owner != project and not users:
        why = f"it was created by the compose project {owner}"
    elif names := _of_others(Path(str(volume.get("Mountpoint")))):
        why = f"it holds {', '.join(names[:3])}"
    else:
        return
    message = f"volume {name} is not the appliance's: {why}"
    yield VolumeError(message, hint=f"{hint}; docker volume inspect {name} shows it")


def _of_others(folder: Path) -> list[str]:
    """Return the names in a volume if none of them is ours; empty if this user may not look."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name != "lost+found")
    except OSError:
        return []
    return [] if OURS & set(names) else names


def wanted_room(docker: Docker, cell: str, inventory: Inventory | None) -> list[tuple[str, Path, int]]:
    """Return what will be written where, in MiB. If the cell's image exists, hardly anything is built; parts in the
    builder's cache are not counted either."""
    found = [] if (CLONE / ".venv/installed").exists() else [(".venv", CLONE, VENV_MIB)]
    needs = inventory.cells.get(cell) if inventory else None
    if needs and not docker.has_image:
        found.append(("archives of images", CLONE, needs["archives_mib"]))
        root = Path(str((docker.info or {}).get("DockerRootDir") or "/nonexistent"))
        # Otherwise Docker's folder is in a virtual machine, on another machine, or unreadable for this user.
        if os.path.isdir(root):  # noqa: PTH112 - pathlib's raises for the latter
            rest_mib = max(0, needs["engine_mib"] - cached_mib(docker.cache, _dockerfile(cell)))
            found.append(("Docker's images and cache", root, rest_mib))
    return found


def _dockerfile(cell: str) -> str:
    """Return the cell's Dockerfile; empty if this clone has none."""
    try:
        return (CLONE / f"images/rendered/{cell}/Dockerfile").read_text("utf-8")
    except OSError:
        return ""


def room_findings(wanted: Sequence[tuple[str, Path, int]]) -> Iterator[FatalError]:
    by_disk: dict[int, list[tuple[str, Path, int]]] = {}
    for each in wanted:
        by_disk.setdefault(each[1].stat().st_dev, []).append(each)
    for needs in by_disk.values():
        need_mib, free_mib = sum(mib for _, _, mib in needs), shutil.disk_usage(needs[0][1]).free // 2**20
        if free_mib < need_mib:
            where = ", ".join(f"{mib:,} MiB for {what} in {path}" for what, path, mib in needs)
            message = f"too little disk space: {need_mib:,} MiB are needed, {free_mib:,} MiB are free: {where}"
            yield NoRoomError(message, hint="`docker system df` shows what uses it; `make prune` frees some")


def _labels(container: Mapping[str, str]) -> dict[str, str]:
    pairs = (each.partition("=") for each in container.get("Labels", "").split(","))
    return {name: value for name, _, value in pairs}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
