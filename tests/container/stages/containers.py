"""Real containers of the built image, on volumes of their own, for tests. Everything made here is removed again."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import requests
from docker.models.containers import Container
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

# Its clean-up image cannot be pulled everywhere; what is made here is removed here.
testcontainers_config.ryuk_disabled = True

IMAGE = os.environ.get("APPLIANCE_TEST_IMAGE", "appliance:llama-cpu")
ROOT = Path(__file__).parents[3]
MODEL = ROOT / ".make/models/SmolLM2-135M-Instruct.Q4_1.gguf"
PORT = 11435
WAIT_S = 300.0  # for what takes seconds on a quiet machine
# A test of measuring says `first` or `idle`.
SETTINGS = {"APPLIANCE_BUDGET_S": "15", "APPLIANCE_TUNE": "off"}
STRANGER = "12345:0"
# What DESIGN.md section 5 promises to work with.
HARDENED: dict[str, Any] = {
    "user": STRANGER,
    "read_only": True,
    "tmpfs": {"/tmp": ""},
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
}


# On a busy machine Docker (26.1) was seen to lose all output of an exec that ended well, and once only its first line.
# So all that a command prints is written in one piece, with its end marked.
_END = "the end of the output"
_TO_ITS_END = f'all=$("$@" 2>&1; code=$?; printf "%s" "{_END}"; exit $code); code=$?; printf "%s" "$all"; exit $code'


def executed(container: Container, *argv: str, **variables: str) -> tuple[int, str]:
    """Run a command in the container; return its exit code and all that it printed.

    A command whose output was lost runs again: it has to be one that may run twice.
    """
    for _ in range(5):
        code, output = container.exec_run(["/bin/sh", "-c", _TO_ITS_END, "sh", *argv], environment=variables)
        assert code is not None
        assert isinstance(output, bytes)
        before, end, after = output.decode().rpartition(_END)
        if end:
            return code, before + after
    msg = f"Docker lost the output of {argv} five times"
    raise AssertionError(msg)


class Stage:
    """One container of the image; `kwargs` are docker-py's."""

    def __init__(self, container: DockerContainer, port: int | None = None) -> None:
        self._outer = container
        self.container: Container = container.get_wrapped_container()
        self.base = f"http://127.0.0.1:{port or container.get_exposed_port(PORT)}"

    def logs(self) -> str:
        return self.container.logs().decode(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Return the JSON lines of the log. The engine's last lines before its end are not JSON and are left out."""
        return [json.loads(line) for line in self.logs().splitlines() if line.startswith("{")]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events()]

    def run(self, *argv: str) -> str:
        code, output = executed(self.container, *argv)
        assert code == 0, f"{argv}: {code}: {output!r}"
        return output

    def key(self) -> str:
        return self.run("appliance", "key").strip()

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return requests.get(self.base + path, timeout=60, **kwargs)

    def authorized(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key()}"}

    def wait_ready(self, timeout_s: float = WAIT_S) -> None:
        def is_ready() -> bool:
            self.container.reload()
            assert self.container.status == "running", f"{self.container.status}\n{self.logs()}"
            try:
                return self.get("/health/ready").status_code == 200
            except (requests.ConnectionError, requests.Timeout):
                return False

        wait_for(is_ready, timeout_s, self.logs)

    def wait_exit(self, timeout_s: float = WAIT_S) -> int:
        return int(self.container.wait(timeout=timeout_s)["StatusCode"])


def wait_for(condition: Any, timeout_s: float, told: Any = lambda: "") -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{told()}"
        time.sleep(0.1)


@contextmanager
def volume(*, model: bool = True) -> Iterator[str]:
    """A new named volume, with the demo model on it."""
    client = docker.from_env()
    made = client.volumes.create(f"appliance-test-{uuid.uuid4().hex[:12]}")
    try:
        if model:
            assert MODEL.exists(), "run `make model` first"
            put_model(client, made.name, MODEL)
        yield made.name
    finally:
        made.remove(force=True)
        client.close()


def put_model(client: docker.DockerClient, name: str, path: Path) -> None:
    """Put a model on the volume with the image's own `appliance models add`, which reads standard input."""
    container = client.containers.create(
        IMAGE,
        ["models", "add", path.name],
        stdin_open=True,
        volumes={name: {"bind": "/data"}},
        network_mode="none",
        **HARDENED,
    )
    try:
        attached: Any = container.attach_socket(params={"stdin": 1, "stream": 1})
        container.start()
        attached._sock.sendall(path.read_bytes())
        attached._sock.close()
        attached.close()
        assert container.wait(timeout=WAIT_S)["StatusCode"] == 0, container.logs()
    finally:
        container.remove(force=True)


@contextmanager
def started(
    volume_name: str | None,
    *argv: str,
    env: dict[str, str] | None = None,
    read_only_volume: bool = False,
    image: str = IMAGE,
    host_port: int | None = None,
    **kwargs: Any,
) -> Iterator[Stage]:
    """Start a container with the hardened options; do not wait until it is ready. With `host_port` it listens there on
    the network of this machine, and reaches what a test serves on 127.0.0.1."""
    options = {**HARDENED, **kwargs}
    mounts = options.pop("tmpfs")
    if host_port is None:
        container = DockerContainer(image, **options).with_exposed_ports(PORT)
    else:
        container = DockerContainer(image, network_mode="host", **options)
        env = {"APPLIANCE_HOST": "127.0.0.1", "APPLIANCE_PORT": str(host_port), **(env or {})}
    for path in mounts:
        container = container.with_tmpfs_mount(path)
    for name, value in {**SETTINGS, **(env or {})}.items():
        container = container.with_env(name, value)
    if argv:
        container = container.with_command(list(argv))
    if volume_name:
        container = container.with_volume_mapping(volume_name, "/data", "ro" if read_only_volume else "rw")
    try:
        container.start()
        yield Stage(container, host_port)
    finally:
        container.stop()


def ended(
    volume_name: str | None, *argv: str, image: str = IMAGE, timeout_s: float = WAIT_S, **kwargs: Any
) -> tuple[int, str]:
    """Return exit code and output of a start that is expected to end by itself. No port is published, as it may end at
    once."""
    client = docker.from_env()
    env = {**SETTINGS, **kwargs.pop("env", {})}
    mode = kwargs.pop("mode", "rw")
    volumes = {volume_name: {"bind": "/data", "mode": mode}} if volume_name else None
    container = client.containers.create(
        image, list(argv) or None, environment=env, volumes=volumes, **{**HARDENED, **kwargs}
    )
    try:
        container.start()
        code = int(container.wait(timeout=timeout_s)["StatusCode"])
        return code, container.logs().decode(errors="replace")
    finally:
        container.remove(force=True, v=True)
        client.close()
