"""What would stop `make up`, from what the docker command says."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import FatalError
from appliance.host.build_cache import cached_mib
from appliance.host.docker.inventory import CLONE, load_inventory
from appliance.host.start import preflight
from appliance.host.start.preflight import (
    Docker,
    docker_findings,
    model_findings,
    path_findings,
    port_findings,
    python_findings,
    room_findings,
    volume_findings,
    wanted_room,
)
from tests.ports import free_port

INFO: dict[str, Any] = {
    "ServerVersion": "29.0", "Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
    "ClientInfo": {"Plugins": [{"Name": "buildx"}, {"Name": "compose"}]},
}  # fmt: skip
SOUND = Docker(info=INFO, why="", containers=(), volume=None, users=(), has_image=False)
INVENTORY = load_inventory()
OURS = {
    "Names": "appliance-appliance-1",
    "Labels": "a=b,com.docker.compose.project=appliance,io.appliance.cell=llama-cpu",
}
OTHERS = {"Names": "db", "Labels": "com.docker.compose.project=shop"}


def told(found: Iterable[FatalError]) -> list[tuple[str, str | None]]:
    return [(each.message, each.hint) for each in found]


@pytest.mark.parametrize(
    ("info", "why", "message", "hint"),
    [
        (None, "", "Docker is missing: there is no docker command", "docs.docker.com/engine/install"),
        (
            {**INFO, "ServerVersion": ""}, "permission denied while trying to connect", "this user may not use Docker",
            "usermod -aG docker",
        ),
        ({**INFO, "ServerVersion": ""}, "Cannot connect: no", "Docker does not answer: Cannot connect: no", "start it"),
        ({**INFO, "ServerVersion": "", "ServerErrors": ["EOF"]}, "", "Docker does not answer: EOF", "docker info"),
        (
            {"host": {}, "store": {}, "version": {}}, "Emulate Docker CLI using podman.",
            "the docker command here is Podman's, which lacks the builder and the image store that are needed",
            "install Docker",
        ),
        (
            {**INFO, "ClientInfo": {"Plugins": None}}, "",
            "Docker's plugin compose is missing: no `docker compose`", "docker-compose-plugin",
        ),
        (
            {**INFO, "ClientInfo": {"Plugins": [{"Name": "compose"}]}}, "",
            "Docker's plugin buildx is missing: no `docker buildx`", "docker-buildx-plugin",
        ),
        (
            {**INFO, "Driver": "overlay2", "DriverStatus": [["Backing Filesystem", "extfs"]]}, "",
            "Docker keeps its images in a store that cannot load what is built here: overlay2",
            "containerd-snapshotter",
        ),
    ],
)  # fmt: skip
def test_what_docker_lacks(info: dict[str, Any] | None, why: str, message: str, hint: str) -> None:
    found = told(docker_findings(replace(SOUND, info=info, why=why)))
    assert found[0][0] == message
    assert hint in str(found[0][1])


def test_a_sound_docker_is_no_finding() -> None:
    assert told(docker_findings(SOUND)) == []
    assert told(docker_findings(replace(SOUND, info={**INFO, "ClientInfo": None}))) == []  # an old one tells no plugins


def test_a_port_in_use_is_told_with_a_free_one() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        [(message, hint)] = told(port_findings(str(port), "appliance", SOUND))
        assert message == f"the port is in use: 127.0.0.1:{port}"
        assert str(hint).startswith("make up APPLIANCE_HOST_PORT=")
        assert told(port_findings(str(hint).partition("=")[2], "appliance", SOUND)) == []


def test_a_port_of_this_projects_own_appliance_is_none() -> None:
    port = free_port()
    ours = {**OURS, "Ports": f"127.0.0.1:{port}->11435/tcp"}
    assert told(port_findings(str(port), "appliance", replace(SOUND, containers=(ours,)))) == []
    [(message, hint)] = told(port_findings(str(port), "other", replace(SOUND, containers=(ours,))))
    assert message == f"the port is in use: 127.0.0.1:{port}, by container appliance-appliance-1"
    assert str(hint).endswith("; or stop it: docker stop appliance-appliance-1")


@pytest.mark.parametrize(
    "published", ["10.1.2.3:{}->11435/tcp", "0.0.0.0:{}->53/udp", "127.0.0.10:{}->80/tcp", "{}/tcp"]
)
def test_a_port_that_is_published_elsewhere_is_free(published: str) -> None:
    port = free_port()
    other = {**OTHERS, "Ports": published.format(port)}
    assert told(port_findings(str(port), "appliance", replace(SOUND, containers=(other,)))) == []


def test_a_port_that_docker_alone_knows_of_is_in_use() -> None:
    """If Docker runs without its proxy, no program listens on the port."""
    port = free_port()
    other = {**OTHERS, "Ports": f"53/udp, 0.0.0.0:{port}->80/tcp, [::]:{port}->80/tcp"}
    [(message, _)] = told(port_findings(str(port), "appliance", replace(SOUND, containers=(other,))))
    assert message == f"the port is in use: 127.0.0.1:{port}, by container db"


@pytest.mark.parametrize("port", ["", "0", "65536", "-1", "127.0.0.1:80", "8000-8010", "x"])
def test_what_is_no_port(port: str) -> None:
    [(message, _)] = told(port_findings(port, "appliance", SOUND))
    assert message == f"APPLIANCE_HOST_PORT is not a port: {port}"


@pytest.mark.parametrize(
    ("volume", "users", "names", "why"),
    [
        ({"Labels": None}, (), (), None),
        ({"Labels": None}, (), ("cache", "lost+found", "mine"), None),
        ({"Labels": {"com.docker.compose.project": "appliance"}}, (OURS,), ("models",), None),
        ({"Labels": {"com.docker.compose.project": "other"}}, (OURS,), (), None),  # appliances share one by intent
        ({"Labels": None}, (OURS, OTHERS), (), "it is used by container db, which is not an appliance"),
        ({"Labels": {"com.docker.compose.project": "shop"}}, (), (), "it was created by the compose project shop"),
        ({"Labels": {"com.docker.compose.project": "appliance-replicas"}}, (), ("models",), None),
        ({"Labels": {"com.docker.compose.project": "appliance"}}, (OTHERS,), (), None),  # a backup, or who looks at it
        (
            {"Labels": {"com.docker.compose.project": "shop"}},
            (OTHERS,),
            (),
            "it is used by container db, which is not an appliance",
        ),
        ({"Labels": None}, (), ("base", "pg_wal"), "it holds base, pg_wal"),
    ],
)
def test_a_volume_of_another_program(
    tmp_path: Path,
    volume: dict[str, Any],
    users: tuple[dict[str, str], ...],
    names: tuple[str, ...],
    why: str | None,
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    made = {**volume, "Mountpoint": str(tmp_path)}
    labels = {each["Names"]: preflight._labels(each) for each in users}
    found = list(volume_findings("appliance", made, labels, project="appliance", hint="APPLIANCE_VOLUME=other"))
    assert [each.message for each in found] == ([f"volume appliance is not the appliance's: {why}"] if why else [])
    assert all(each.exit_code == 50 and "APPLIANCE_VOLUME=" in str(each.hint) for each in found)


def test_the_projects_of_our_own_compose_files_are_known() -> None:
    volumes = [
        text for path in (CLONE / "compose").glob("*.yaml") if "APPLIANCE_VOLUME:-" in (text := path.read_text())
    ]
    names = {
        name for text in volumes for name in re.findall(r"^name: \$\{APPLIANCE_PROJECT:-(.+)\}$", text, re.MULTILINE)
    }
    assert names == preflight.OWN_PROJECTS


def test_too_little_room_is_told_with_the_figures(tmp_path: Path) -> None:
    assert told(room_findings([(".venv", tmp_path, 1), ("images", tmp_path, 0)])) == []
    [error] = room_findings([(".venv", tmp_path, 1), ("images", tmp_path, 10**9)])
    assert error.message.startswith("too little disk space: 1,000,000,001 MiB are needed, ")
    assert f"1,000,000,000 MiB for images in {tmp_path}" in error.message
    assert error.exit_code == 60


def test_what_a_build_needs_is_the_cells_and_nothing_where_its_image_is_here(tmp_path: Path) -> None:
    docker = replace(SOUND, info={**INFO, "DockerRootDir": str(tmp_path)})
    assert INVENTORY
    needs = dict.fromkeys([path for _, path, _ in wanted_room(docker, "llama-cpu", INVENTORY)])
    assert tmp_path in needs
    assert tmp_path not in [path for _, path, _ in wanted_room(replace(docker, has_image=True), "llama-cpu", INVENTORY)]
    assert tmp_path not in [path for _, path, _ in wanted_room(docker, "", INVENTORY)]


RECORD = """ID:\t\tmgl4bfy7ng4m
Mutable:\tfalse
Size:\t\t{size}
Description:\t{description}
Usage count:\t1
"""


def test_what_the_builders_cache_has_is_not_asked_for_again(tmp_path: Path) -> None:
    assert INVENTORY
    text = (CLONE / "images/rendered/llama-cpu/Dockerfile").read_text("utf-8")
    found = re.search(r"^RUN (apt-get update(?:.*\\\n)+.*)$", text, re.MULTILINE)
    assert found
    command = found[1]
    shown = "mount / from exec /bin/sh -c " + re.sub(r"\\\n", " ", command)
    records = [(shown, "1.5GB"), ("mount / from exec /bin/sh -c make another", "9GB"), ("local source", "3kB")]
    listing = "\n".join(RECORD.format(size=size, description=words) for words, size in records)
    assert cached_mib(listing, text) == 1430
    docker = replace(SOUND, info={**INFO, "DockerRootDir": str(tmp_path)})
    (whole,) = [mib for _, path, mib in wanted_room(docker, "llama-cpu", INVENTORY) if path == tmp_path]
    (rest,) = [
        mib for _, path, mib in wanted_room(replace(docker, cache=listing), "llama-cpu", INVENTORY) if path == tmp_path
    ]
    assert rest == whole - 1430
    for odd in ("", "ERROR: no builder", "Size:\t\tmuch\nDescription:\tmount / from exec /bin/sh -c "):
        assert cached_mib(odd, text) == 0


def test_what_cannot_be_looked_at_is_no_traceback() -> None:
    """The case is a folder that this user may not open. The test takes a name that is too long, which root cannot open
    either."""
    closed = "/" + 300 * "a"
    [(message, _)] = told(path_findings([f"CA_BUNDLE={closed}"]))
    assert message == f"CA_BUNDLE names a path that does not exist: {closed}"
    docker = replace(SOUND, info={**INFO, "DockerRootDir": closed})
    assert closed not in [str(path) for _, path, _ in wanted_room(docker, "llama-cpu", INVENTORY)]


def test_a_model_and_a_file_that_are_not_there(tmp_path: Path) -> None:
    [(message, hint)] = told(model_findings("Qwen3.6-27B", INVENTORY, None))
    assert message == "MODEL is not a recipe or a model of one: Qwen3.6-27B"
    assert str(hint).startswith("make up MODEL=Qwen3.8-27B, or ")
    [(message, _)] = told(path_findings(["WHEELS=", f"CA_BUNDLE={tmp_path}/ca.pem", f"X={tmp_path}"]))
    assert message == f"CA_BUNDLE names a path that does not exist: {tmp_path}/ca.pem"


def test_a_python_that_can_make_an_environment_is_no_finding(tmp_path: Path) -> None:
    assert told(python_findings(tmp_path)) == []


def test_all_of_it_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main(["venv", "--model", "qwen3:8b", "--path", "WHEELS=/nowhere", "--json"]) == 10
    document = json.loads(capsys.readouterr().out)
    assert [each["exit_code"] for each in document["findings"]] == [10]
    assert (document["recipe"], document["rung"]) == ("qwen", "8b")
    assert preflight.main(["venv", "--model", "qwen3:8b"]) == 0
    assert capsys.readouterr().out == "recipe=qwen rung=8b\n"
