"""A stranger's `docker compose`: the file on stdin in an empty folder, and a service that gets its model from us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest
import requests

from tests.container.stages.containers import ROOT
from tests.ports import free_port

DEMO = "appliance/demo:llama-cpu"
FILE = ROOT / "compose/appliance.yaml"
# A mirror may hold the lists of an earlier day; their signature is checked all the same.
FORKY = """\
FROM debian:trixie-slim AS get
RUN rm -rf /etc/apt/sources.list* && echo 'deb http://deb.debian.org/debian forky main' > /etc/apt/sources.list \\
 && apt-get -o Acquire::Check-Valid-Until=false update && cd /tmp && apt-get download docker-compose \\
 && dpkg -x docker-compose_*.deb /x
FROM scratch
COPY --from=get /x/usr/libexec/docker/cli-plugins/docker-compose /
"""
CURL = """\
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends curl && rm -rf /var/lib/apt/lists/*
"""


@pytest.fixture
def project() -> Iterator[str]:
    """The name of a project and of its volume, with nothing left of it afterwards."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    client = docker.from_env()
    yield name
    for container in client.containers.list(all=True, ignore_removed=True):
        if name in str(container.name):
            container.remove(force=True, v=True)
    for kind in (client.networks.list(names=[name]), client.volumes.list(filters={"name": name})):
        for each in kind:
            each.remove()


def test_the_file_on_stdin_in_an_empty_folder_serves_with_a_key(project: str, tmp_path: Path) -> None:
    port = str(free_port())
    variables = {"APPLIANCE_IMAGE": DEMO, "APPLIANCE_PROJECT": project, "APPLIANCE_VOLUME": project}
    environment = {**os.environ, **variables, "APPLIANCE_HOST_PORT": port}

    def compose(*words: str, stdin: str | None = None) -> str:
        argv = ["docker", "compose", *words]
        done = subprocess.run(
            argv, cwd=tmp_path, env=environment, input=stdin, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    compose("-f", "-", "up", "--detach", "--wait", stdin=FILE.read_text())
    base = f"http://127.0.0.1:{port}/v1"
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert requests.post(f"{base}/chat/completions", json=body, timeout=60).status_code == 401
    # The file is needed once. The key is in no log: whoever may use Docker here can ask for it.
    key = compose("-p", project, "exec", "-T", "appliance", "appliance", "key").strip()
    assert key not in compose("-p", project, "logs")
    headers = {"Authorization": f"Bearer {key}"}
    reply = requests.post(f"{base}/chat/completions", json=body, headers=headers, timeout=120)
    assert reply.json()["choices"][0]["message"]["content"]
    compose("-p", project, "down", "--volumes")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(docker.errors.NotFound):
        docker.from_env().containers.get(f"{project}-appliance-1")


@pytest.fixture(scope="module")
def compose_240(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian forky's Compose, which knows providers; this machine's may be older."""
    folder = tmp_path_factory.mktemp("compose")
    argv = ["docker", "buildx", "build", "--quiet", "--output", f"type=local,dest={folder}", "-"]
    done = subprocess.run(argv, input=FORKY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / "docker-compose"


@pytest.fixture(scope="module")
def app_image() -> Iterator[str]:
    tag = f"appliance-test/curl:{uuid.uuid4().hex[:12]}"
    argv = ["docker", "buildx", "build", "--quiet", "--provenance=false", "--load", "--tag", tag, "-"]
    done = subprocess.run(argv, input=CURL, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    yield tag
    docker.from_env().images.remove(tag, force=True)


@pytest.mark.build_half
def test_an_app_gets_its_model_of_the_provider(compose_240: Path, app_image: str, project: str, tmp_path: Path) -> None:
    program = tmp_path / "bin/appliance"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m appliance.host "$@"\n')
    program.chmod(0o755)
    options = f"        image: {DEMO}\n        volume: {project}\n        cpu: true\n        fast: true\n"
    text = (ROOT / "compose/app.yaml").read_text().rstrip("\n") + "\n" + options
    (tmp_path / "app.yaml").write_text(text)
    docker_program = Path(str(shutil.which("docker"))).parent
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{docker_program}:{os.environ['PATH']}",
        "APP_IMAGE": app_image,
        "APPLIANCE_MODEL": "demo",
        "PYTHONPATH": str(ROOT),
    }

    def compose(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(compose_240), "-f", "app.yaml", "-p", project, *words]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    done = compose("up", "--detach")
    assert done.returncode == 0, done.stderr
    client = docker.from_env()
    app = client.containers.get(f"{project}-app-1")
    app.wait(timeout=120)
    answer = json.loads(app.logs(stderr=False))
    assert answer["choices"][0]["message"]["content"]
    variables = dict(word.split("=", 1) for word in app.attrs["Config"]["Env"])
    assert variables["LLM_URL"] == "http://llm:11435/v1"
    assert variables["LLM_API_KEY"].startswith("sk-")
    model = client.containers.get(f"appliance-{project}-llm")
    again = compose("up", "--detach")
    assert again.returncode == 0, again.stderr
    assert client.containers.get(f"appliance-{project}-llm").id == model.id
    (tmp_path / "app.yaml").write_text(text.replace("        fast: true\n", "        fats: true\n"))
    wrong = compose("up", "--detach")
    assert wrong.returncode != 0
    assert "service llm: no such option of the provider: fats; perhaps you meant 'fast'" in wrong.stderr
    (tmp_path / "app.yaml").write_text(text)
    done = compose("down")
    assert done.returncode == 0, done.stderr
    with pytest.raises(docker.errors.NotFound):
        client.containers.get(f"appliance-{project}-llm")
    assert client.networks.list(names=[project]) == []
