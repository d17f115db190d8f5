"""compose/replicas.yaml for real: two appliances on the CPU behind the router, and one of them is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
from docker.models.containers import Container
from docker.types import Mount

from tests.container.stages.containers import IMAGE, ROOT, executed, started, volume, wait_for
from tests.ports import free_port

CLIENTS, CLIENTS_MAX = 16, 48
SLOTS = 2
WAIT_S = 600  # of a machine that does much else
ROUTER = f"appliance-router-test:{uuid.uuid4().hex[:8]}"
REPLICAS = ("appliance-1", "appliance-2")


@dataclass
class Replicas:
    """The project that runs, asked through the router."""

    project: str
    base: str
    client: docker.DockerClient
    key: str = ""

    def container(self, service: str) -> Container:
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        (found,) = self.client.containers.list(all=True, ignore_removed=True, filters={"label": labels})
        return found

    def logs(self) -> str:
        return "\n".join(self.container(name).logs(tail=20).decode(errors="replace") for name in (*REPLICAS, "router"))

    def chat(self, content: str, **kwargs: Any) -> requests.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **kwargs}
        headers = {"Authorization": f"Bearer {self.key}"}
        url = f"{self.base}/v1/chat/completions"
        return requests.post(url, json=body, headers=headers, stream=bool(kwargs.get("stream")), timeout=WAIT_S)

    def in_flight(self, service: str) -> int:
        """Return the requests in flight that the replica's own metrics report."""
        code = (
            "import sys, urllib.request as u;"
            "r = u.Request('http://127.0.0.1:11435/metrics', headers={'Authorization': 'Bearer ' + sys.argv[1]});"
            "print(u.urlopen(r, timeout=30).read().decode().split('\\nappliance_requests_in_flight ')[1].split()[0])"
        )
        return int(float(self.run(service, "python3", "-c", code, self.key)))

    def run(self, service: str, *argv: str) -> str:
        code, output = executed(self.container(service), *argv)
        assert code == 0, output
        return output

    def is_ready(self) -> bool:
        try:
            return self.chat("Hi", max_tokens=1).status_code == 200
        except requests.ConnectionError:
            return False


@dataclass
class Stream:
    """One client with a long answer. It reads on while nothing is killed; after that it is content with one event more
    and leaves, so that whoever still waits gets its place."""

    has_begun: bool = False  # the head of an answer came, which no router can take back
    is_served: bool = False  # by an event after the replica was killed
    told: str = ""

    def run(self, replicas: Replicas, number: int, killed: threading.Event) -> None:
        try:
            question = f"{number}: count to a hundred, and begin with {number}."
            with replicas.chat(question, stream=True, ignore_eos=True, max_tokens=1500) as reply:
                if reply.status_code != 200:
                    self.told = f"{reply.status_code}: {reply.text[:300]}"
                    return
                self.has_begun = True
                self._read(reply, killed)
        except requests.RequestException as error:
            self.told = type(error).__name__

    def _read(self, reply: requests.Response, killed: threading.Event) -> None:
        for line in reply.iter_lines():
            if b'"error"' in line:
                self.told = line.decode()
                return
            if line.startswith(b"data: ") and killed.is_set():
                self.is_served = True
                return


def compose(replicas: str, *words: str, **variables: str) -> None:
    argv = ["docker", "compose", "--project-name", replicas, "-f", "compose/replicas.yaml", *words]
    done = subprocess.run(argv, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def router_image() -> Iterator[str]:
    argv = [sys.executable, "-m", "images", "router", "--image", IMAGE, "--tag", ROUTER]
    bundle = os.environ.get("SSL_CERT_FILE")
    argv += ["--ca-bundle", bundle] if bundle else []
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ROUTER
    yield ROUTER
    subprocess.run(["docker", "image", "rm", ROUTER], capture_output=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def replicas(router_image: str) -> Iterator[Replicas]:
    project, port = f"appliance-test-{uuid.uuid4().hex[:8]}", free_port()
    with volume() as data:
        variables = {
            "APPLIANCE_IMAGE": IMAGE, "ROUTER_IMAGE": router_image, "APPLIANCE_VOLUME": data, "APPLIANCE_TUNE": "off",
            "APPLIANCE_HOST_PORT": str(port), "APPLIANCE_USER": "12345:0", "APPLIANCE_PARALLEL": str(SLOTS),
            "APPLIANCE_CTX_SIZE": "4096", "APPLIANCE_THREADS": "1",
        }  # fmt: skip
        found = Replicas(project=project, base=f"http://127.0.0.1:{port}", client=docker.from_env())
        try:
            compose(project, "up", "--detach", **variables)
            wait_for(lambda: found.container("appliance-1").exec_run(["appliance", "key"]).exit_code == 0, 300)
            found.key = found.run("appliance-1", "appliance", "key").strip()
            wait_for(found.is_ready, 300, found.logs)
            for name in REPLICAS:
                wait_for(partial(is_healthy, found, name), 300, found.logs)
            yield found
        finally:
            compose(project, "down", "--timeout", "0", **variables)
            found.client.close()


def test_the_router_lets_nobody_in_without_the_key(replicas: Replicas) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    assert requests.post(f"{replicas.base}/v1/chat/completions", json=chat, timeout=60).status_code == 401
    assert requests.get(f"{replicas.base}/readiness", timeout=60).status_code == 200


def test_a_killed_replica_loses_no_request_that_had_not_begun_and_comes_back(replicas: Replicas) -> None:
    killed = threading.Event()
    streams: list[Stream] = []
    threads: list[threading.Thread] = []

    def begin_one() -> None:
        streams.append(Stream())
        threads.append(threading.Thread(target=streams[-1].run, args=(replicas, len(streams), killed)))
        threads[-1].start()

    def are_full() -> bool:
        """The router may take one replica for a while: then more clients come."""
        if all(replicas.in_flight(name) > SLOTS for name in REPLICAS):
            return True
        if len(streams) < CLIENTS_MAX:
            begin_one()
        return False

    for _ in range(CLIENTS):
        begin_one()
    # More requests than slots: at each replica some have begun, and others wait.
    wait_for(are_full, 300, replicas.logs)
    wait_for(lambda: any(stream.has_begun for stream in streams), 300, replicas.logs)
    victim, other = REPLICAS
    replicas.container(victim).kill()
    killed.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), replicas.logs()
    lost = [stream.told for stream in streams if not stream.has_begun]
    assert not lost, f"{lost}\n{replicas.logs()}"
    told = [stream.told for stream in streams if not stream.is_served]
    assert all(told), "a stream was cut and its client was not told"
    assert len(told) <= SLOTS  # that were with the engine that was killed

    replicas.container(victim).start()
    wait_for(lambda: is_healthy(replicas, victim), 300, replicas.logs)
    replicas.container(other).kill()
    wait_for(replicas.is_ready, 300, replicas.logs)


def is_healthy(replicas: Replicas, service: str) -> bool:
    return replicas.container(service).exec_run(["appliance", "health"]).exit_code == 0


@pytest.mark.parametrize(("text", "code"), [("sk-of-a-secret-0123456789\n", None), ("", 50)])
def test_a_key_may_be_a_read_only_file_as_of_a_secret(text: str, code: int | None, tmp_path: Path) -> None:
    """The file is mounted as Kubernetes does it: readable by a supplementary group, in a folder that the runtime
    makes."""
    secret = tmp_path / "api_key"
    secret.write_text(text)
    secret.chmod(0o440)
    mount = Mount("/data/secrets/api_key", str(secret), type="bind", read_only=True)
    with volume() as data:
        remove_made_key(data)
        with started(data, mounts=[mount], group_add=[str(secret.stat().st_gid)]) as stage:
            if code is not None:
                assert stage.wait_exit(300) == code
                assert "/data/secrets/api_key" in stage.logs()
                return
            stage.wait_ready(300)
            headers = {"Authorization": f"Bearer {text.strip()}"}
            assert stage.get("/v1/models", headers=headers).status_code == 200


def remove_made_key(data: str) -> None:
    client = docker.from_env()
    run = client.containers.run
    run(IMAGE, ["-rf", "/data/secrets"], entrypoint="rm", user="0:0", remove=True, volumes=[f"{data}:/data"])
    client.close()
