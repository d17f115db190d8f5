"""The host command's whole life with the real image: run, status, list, chat, logs, stop, upgrade and its way back."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

from tests.container.stages.containers import IMAGE, MODEL, ROOT, volume

# Of what docker inspect tells: all that a docker line decides.
HOST_CONFIG = (
    "Binds", "CapAdd", "CapDrop", "DeviceRequests", "NetworkMode", "PortBindings", "Privileged", "ReadonlyRootfs",
    "RestartPolicy", "SecurityOpt", "Tmpfs", "UsernsMode",
)  # fmt: skip


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def appliance(*words: str, stdin: str = "", timeout_s: float = 180) -> Done:
    argv = [sys.executable, "-m", "appliance.host", *words]
    done = subprocess.run(argv, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=timeout_s)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def names(count: int = 1) -> Iterator[list[str]]:
    """Yield names for containers. All containers of these names are removed at the end, even if the test failed."""
    made = [f"test-{uuid.uuid4().hex[:8]}" for _ in range(count)]
    client = docker.from_env()
    try:
        yield made
    finally:
        for container in client.containers.list(all=True, ignore_removed=True):
            if str(container.name).removeprefix("appliance-").removesuffix("-before").removesuffix("-replaced") in made:
                container.remove(force=True, v=True)
        client.close()


@pytest.fixture(scope="module")
def empty_volume() -> Iterator[str]:
    with volume(model=False) as name:
        yield name


@pytest.fixture(scope="module")
def running(empty_volume: str) -> Iterator[tuple[str, Done]]:
    with names() as [name]:
        words = ("--detach", "--name", name, "--volume", empty_volume, "--image", IMAGE, "--fast")
        yield name, appliance("run", str(MODEL), *words)


def inspected(name: str) -> dict[str, Any]:
    client = docker.from_env()
    try:
        attributes: dict[str, Any] = client.containers.get(name).attrs
        return attributes
    finally:
        client.close()


def test_a_file_is_served_and_the_endpoint_told(running: tuple[str, Done]) -> None:
    _, done = running
    assert done.code == 0, done.err
    assert re.search(r"endpoint  http://127\.0\.0\.1:\d+/v1\n", done.out)
    assert re.search(r"key       sk-\S{20,}\n", done.out)
    assert "model     SmolLM2-135M-Instruct.Q4_1, context 8,192, mode balanced\n" in done.out
    assert "the model is being loaded" in done.err


def test_it_is_hardened_as_compose_does_it(running: tuple[str, Done]) -> None:
    attributes = inspected(f"appliance-{running[0]}")
    host, config = attributes["HostConfig"], attributes["Config"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Tmpfs"] == {"/tmp": ""}
    assert (config["User"].partition(":")[2], config["StopTimeout"]) == ("0", 45)
    [weights] = [mount for mount in attributes["Mounts"] if mount["Type"] == "bind"]
    assert weights["RW"] is False
    with names() as [other]:
        key = appliance("run", str(MODEL), "--name", other, "--dry-run").out
    assert re.search(r"sk-", key + json.dumps(attributes)) is None


def test_the_dry_run_is_the_docker_line_that_does_the_same(running: tuple[str, Done], empty_volume: str) -> None:
    name, _ = running
    ours = inspected(f"appliance-{name}")
    port = ours["HostConfig"]["PortBindings"]["11435/tcp"][0]["HostPort"]
    with names() as [other]:
        given = ("--detach", "--name", other, "--volume", empty_volume, "--image", IMAGE, "--fast")
        line = shlex.split(appliance("run", str(MODEL), *given, "--dry-run").out)
        index = line.index("--publish") + 1
        line[index] = re.sub(r":\d+:", f":{port}:", line[index])
        # Made and not started: its port is taken.
        subprocess.run(["docker", "create", *line[3:]], check=True, capture_output=True, text=True, timeout=60)
        theirs = inspected(f"appliance-{other}")
    for field in HOST_CONFIG:
        assert (theirs["HostConfig"].get(field) or None) == (ours["HostConfig"].get(field) or None), field
    assert mounts(theirs) == mounts(ours)
    assert sorted(theirs["Config"]["Env"]) == sorted(ours["Config"]["Env"])  # Docker keeps no order
    for field in ("User", "Image", "StopTimeout", "Cmd"):
        assert theirs["Config"][field] == ours["Config"][field], field


def mounts(attributes: dict[str, Any]) -> list[tuple[str, str, bool]]:
    return sorted((each["Type"], each["Destination"], each["RW"]) for each in attributes["Mounts"])


def test_status_and_list(running: tuple[str, Done]) -> None:
    name, _ = running
    status = json.loads(appliance("status", name, "--json").out)
    assert (status["state"], status["phase"], status["tuning"]) == ("running", "ready", "off")
    assert (status["model"], status["context"], status["mode"]) == ("SmolLM2-135M-Instruct.Q4_1", 8192, "balanced")
    assert status["uptime_s"] > 0
    [row] = [row for row in json.loads(appliance("list", "--json").out) if row["name"] == name]
    assert (row["phase"], row["endpoint"], row["is_ours"]) == ("ready", status["endpoint"], True)


def test_chat_streams_an_answer(running: tuple[str, Done]) -> None:
    done = appliance("chat", running[0], "--max-tokens", "12", stdin="Say hello.\n/exit\n")
    assert done.code == 0, done.err
    assert done.out.strip()


def test_logs_are_sentences(running: tuple[str, Done]) -> None:
    done = appliance("logs", running[0])
    assert re.search(r"^\d\d:\d\d:\d\d listening on 0\.0\.0\.0:11435$", done.out, re.MULTILINE)
    assert "{" not in done.out


def test_two_at_once_on_two_ports(running: tuple[str, Done], empty_volume: str) -> None:
    """Both containers use one volume and one key."""
    with names() as [other]:
        done = appliance("run", str(MODEL), "-d", "--name", other, "--volume", empty_volume, "--image", IMAGE, "--fast")
        assert done.code == 0, done.err
        first, second = (
            dict(re.findall(r"^(endpoint|key) +(\S+)$", each.out, re.MULTILINE)) for each in (running[1], done)
        )
        assert first["key"] == second["key"]
        assert first["endpoint"] != second["endpoint"]
        stopped = appliance("stop", other)
        assert stopped.out == f"stopping {other}\nkept: volume {empty_volume}\n"
        with pytest.raises(docker.errors.NotFound):
            inspected(f"appliance-{other}")


def test_a_file_that_is_no_model_is_said_with_the_code_of_the_appliance(empty_volume: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no model at all")
    tmp_path.chmod(0o755)
    with names() as [name]:
        done = appliance("run", str(path), "-d", "--name", name, "--volume", empty_volume, "--image", IMAGE)
        assert (done.code, done.out) == (30, ""), done.err
        assert "broken.gguf" in done.err
        with pytest.raises(docker.errors.NotFound):
            inspected(f"appliance-{name}")


def test_an_upgrade_keeps_volume_key_and_profiles_compares_the_speeds_and_goes_back() -> None:
    client = docker.from_env()
    tag = f"appliance-test/next:{uuid.uuid4().hex[:8]}"
    try:
        with volume(model=False) as own, names() as [name]:
            words = (
                "-d",
                "--name",
                name,
                "--volume",
                own,
                "--image",
                IMAGE,
                "--set",
                "tune=first",
                "--set",
                "budget_s=10",
            )
            before = appliance("run", str(MODEL), *words)
            assert before.code == 0, before.err
            # The same build under another version: its profile holds, so nothing is measured again here.
            repository, version = tag.split(":")
            changes = ["LABEL org.opencontainers.image.version=9.9"]
            client.api.commit(f"appliance-{name}", repository=repository, tag=version, changes=changes)
            done = appliance("upgrade", name, "--image", tag, "--court-s", "0")
            assert done.code == 0, done.err
            assert re.search(r"version: \S+ -> 9\.9", done.out)
            assert re.search(r"decode at \d+ tokens: [\d.]+ -> [\d.]+ tok/s", done.out), done.out
            assert key_of(before.out) == appliance_key(name)
            back = appliance("upgrade", name, "--back")
            assert back.code == 0, back.err
            assert re.search(r"version: 9\.9 -> \S+", back.out)
            status = json.loads(appliance("status", name, "--json").out)
            assert (status["image"], status["tuning"]) == (IMAGE, "measured")
            assert appliance("stop", name).code == 0
            assert client.volumes.get(own).name == own
    finally:
        if client.images.list(tag):  # else the test failed before, and says why
            client.images.remove(tag, force=True)
        client.close()


def test_a_reset_forgets_the_profiles_of_this_model(empty_volume: str) -> None:
    given = ("-d", "--volume", empty_volume, "--image", IMAGE)
    measured = ("--set", "tune=first", "--set", "budget_s=10")
    with names() as [name]:
        assert appliance("run", str(MODEL), *given, *measured, "--name", name).code == 0
        assert appliance("stop", name).code == 0
        done = appliance("run", str(MODEL), *given, "--fast", "--reset", "--name", name)
        assert done.code == 0, done.err
        assert f"forgotten: 1 of 1 profiles on volume {empty_volume}" in done.err
        assert json.loads(appliance("status", name, "--json").out)["speed"] is None


def key_of(out: str) -> str:
    found = re.search(r"^key +(\S+)$", out, re.MULTILINE)
    assert found, out
    return found[1]


def appliance_key(name: str) -> str:
    argv = ["docker", "exec", f"appliance-{name}", "appliance", "key"]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
