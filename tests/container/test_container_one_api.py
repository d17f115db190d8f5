"""compose/one-api.yaml and new-api.yaml for real, with the fake of their API in place of both images.

With APPLIANCE_TEST_REAL_FRONTS=1 the images of the compose files are pulled instead, and their databases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
import pytest
import requests

from appliance.host.provision.secret import make_secrets
from tests.container.stages.containers import IMAGE, ROOT, volume
from tests.ports import free_port

FRONTS = ("one-api", "new-api")
IS_REAL = os.environ.get("APPLIANCE_TEST_REAL_FRONTS") == "1"
# As root the secrets are given to somebody else: no service is root.
USER = os.getuid() or 1000
PROGRAM = """#!/bin/sh
test -n "$SQL_DSN" && test -n "$SESSION_SECRET" || exit 3
exec python3 /fake/one_api.py --host 0.0.0.0 --port 3000 --kind {kind} \\
  ${{INITIAL_ROOT_ACCESS_TOKEN:+--access-token "$INITIAL_ROOT_ACCESS_TOKEN"}}
"""
# For the health checks, as the images have them.
WGET = """#!/usr/bin/python3
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[-1], timeout=5).read().decode())
"""
DOCKERFILE = f"""FROM {IMAGE}
USER 0:0
COPY --chmod=0755 one-api new-api /
COPY --chmod=0755 wget mysqladmin pg_isready /usr/local/bin/
COPY --chmod=0644 one_api.py /fake/
ENTRYPOINT ["sleep", "infinity"]
CMD []
"""


@pytest.fixture(scope="module")
def fake_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    context, tag = tmp_path_factory.mktemp("fake"), f"appliance-test-front:{uuid.uuid4().hex[:8]}"
    for kind in FRONTS:
        (context / kind).write_text(PROGRAM.format(kind=kind))
    for name in ("mysqladmin", "pg_isready"):
        (context / name).write_text("#!/bin/sh\nexit 0\n")
    (context / "wget").write_text(WGET)
    (context / "Dockerfile").write_text(DOCKERFILE)
    shutil.copyfile(ROOT / "tests/fakes/one_api/__main__.py", context / "one_api.py")
    argv = ["docker", "buildx", "build", "--load", "--quiet", "--provenance=false", "--tag", tag, str(context)]
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
    yield tag
    subprocess.run(["docker", "image", "rm", tag], capture_output=True, check=False, timeout=60)


@dataclass(frozen=True)
class Front:
    name: str
    project: str
    variables: dict[str, str]

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.variables['ONE_API_HOST_PORT']}"

    def compose(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = ["docker", "compose", "--project-name", self.project, "-f", f"compose/{self.name}.yaml", *words]
        env = os.environ | self.variables
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)

    def remove_volumes(self) -> None:
        """Remove the volumes of the project only. `down --volumes` would also remove the appliance's volume, which the
        test owns."""
        client = docker.from_env()
        for made in client.volumes.list(filters={"label": f"com.docker.compose.project={self.project}"}):
            made.remove()
        client.close()

    def states(self) -> dict[str, str]:
        client = docker.from_env()
        label = f"com.docker.compose.project={self.project}"
        found = client.containers.list(all=True, ignore_removed=True, filters={"label": label})
        states = {each.labels["com.docker.compose.service"]: each.status for each in found}
        client.close()
        return states


@contextmanager
def front(name: str, fake_image: str, data: str, secrets: Path) -> Iterator[Front]:
    make_secrets(secrets)
    for path in (secrets, *secrets.iterdir()):
        os.chown(path, USER, -1)
    port = str(free_port())
    variables = {
        "APPLIANCE_IMAGE": IMAGE, "APPLIANCE_VOLUME": data, "APPLIANCE_USER": f"{USER}:0",
        "APPLIANCE_SECRETS": str(secrets), "ONE_API_HOST_PORT": port, "NEW_API_HOST_PORT": port,
        "APPLIANCE_TUNE": "off", "APPLIANCE_THREADS": "1",
    }  # fmt: skip
    if not IS_REAL:
        variables |= dict.fromkeys(("ONE_API_IMAGE", "NEW_API_IMAGE", "DATABASE_IMAGE"), fake_image)
    found = Front(name=name, project=f"appliance-test-{uuid.uuid4().hex[:8]}", variables=variables)
    try:
        yield found
    finally:
        found.compose("down", "--timeout", "0")
        found.remove_volumes()


@pytest.mark.parametrize("name", FRONTS)
def test_one_command_makes_a_channel_and_a_token_that_chats(name: str, fake_image: str, tmp_path: Path) -> None:
    with volume() as data, front(name, fake_image, data, tmp_path / "secrets") as found:
        up = found.compose("up", "--detach", "--wait", "--wait-timeout", "540")
        assert up.returncode == 0, f"{up.stderr}\n{found.compose('logs', '--tail', '20').stdout}"
        token = found.compose("exec", "-T", "provision", "cat", "/data/token").stdout.strip()
        chat = {"model": "SmolLM2-135M-Instruct.Q4_1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        asked = f"{found.base}/v1/chat/completions"
        reply = requests.post(asked, json=chat, headers={"Authorization": f"Bearer {token}"}, timeout=300)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"]
        assert requests.post(asked, json=chat, timeout=60).status_code == 401
        told = found.compose("logs", "--no-log-prefix", "provision").stdout
        assert "created: appliance, id 1" in told


def test_a_secret_that_others_may_read_ends_it_before_anything_starts(fake_image: str, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    with volume(model=False) as data, front("one-api", fake_image, data, secrets) as found:
        (secrets / "session_secret").chmod(0o644)
        assert found.compose("up", "--detach", "--wait").returncode != 0
        states = found.states()
        assert states.pop("check") == "exited"
        assert set(states.values()) == {"created"}
        log = found.compose("logs", "check").stdout
        assert "the secret file is open to every user of the machine: /run/secrets/session_secret" in log
