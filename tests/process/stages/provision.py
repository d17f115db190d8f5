"""A fake one-api, a real gateway with a fake engine, and the program that makes one a channel of the other."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.console.progress import Phase
from appliance.gateway.engine.backend import ListedModel
from appliance.host.provision.secret import make_secrets
from tests.ports import free_port
from tests.process.stages.gateway import KEY, Stage, on_stage

ROOT = Path(__file__).parents[3]
ENGINE = ("fake_engine.py", "--alias", "qwen3-8b", "--chunks", "3", "--chunk-interval", "0.001")
QWEN = ListedModel(id="qwen3-8b", phase=Phase.READY, aliases=("qwen:8b",), context=32768)


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def row(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        (row,) = self.rows
        return row


@dataclass(frozen=True, kw_only=True)
class Front:
    """The fake as its users see it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, *, key: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", "New-Api-User": "1"}
            connection.request(method, path, json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
            return response.status, json.loads(data) if data.startswith(b"{") else data.decode()
        finally:
            connection.close()

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.ask("GET", "/fake/state")[1]
        return state

    @property
    def channel(self) -> dict[str, Any]:
        (channel,) = self.state["channels"]
        found: dict[str, Any] = channel
        return found


@contextmanager
def one_api(*knobs: str) -> Iterator[Front]:
    told = () if "--port" in knobs else ("--port", str(free_port()))
    argv = [sys.executable, "-m", "tests.fakes.one_api", *told, *knobs]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as fake:
        try:
            assert fake.stdout
            port = int(fake.stdout.readline())
            front = Front(port=port)
            if "--up-after" not in knobs:
                _until_it_listens(front)
            yield front
        finally:
            fake.kill()


def _until_it_listens(front: Front) -> None:
    while True:
        try:
            front.ask("GET", "/fake/state")
        except ConnectionError:
            continue
        return


@dataclass(frozen=True, kw_only=True)
class Both:
    front: Front
    appliance: Stage
    folder: Path

    @property
    def access_token(self) -> str:
        return access_token(self.folder)

    @property
    def root_password(self) -> str:
        return (self.folder / "secrets/root_password").read_text().strip()

    @property
    def token(self) -> str:
        return (self.folder / "token").read_text().strip()

    def words(self, *words: str) -> list[str]:
        secrets = self.folder / "secrets"
        given = [
            "--one-api", self.front.url, "--appliance", self.appliance.url,
            "--key-file", str(self.folder / "api_key"),
            "--root-password-file", str(secrets / "root_password"),
            "--token-file", str(self.folder / "token"),
            "--wait-s", "120", "--model-wait-s", "120", "--json",
        ]  # fmt: skip
        if "--kind" not in words:
            given += ["--access-token-file", str(secrets / "access_token")]
        return [*given, *(word for word in words if word != "--kind")]

    def provision(self, *words: str) -> Ended:
        return provision(*self.words(*words))

    @contextmanager
    def following(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        with begin(*self.words("--follow", "--every-s", "0.1", *words)) as program:
            yield program


@contextmanager
def both(folder: Path, *knobs: str) -> Iterator[Both]:
    """Run the appliance and the fake one-api with these `knobs`. Its root has the access token of the folder."""
    with an_appliance(folder) as appliance, one_api("--access-token", access_token(folder), *knobs) as front:
        yield Both(front=front, appliance=appliance, folder=folder)


@contextmanager
def an_appliance(folder: Path) -> Iterator[Stage]:
    """Run an appliance whose key is in the folder, along with all secrets."""
    make_secrets(folder / "secrets")
    (folder / "api_key").write_text(f"{KEY}\n")
    with on_stage(*ENGINE) as appliance:
        appliance.listed = QWEN
        yield appliance


def access_token(folder: Path) -> str:
    return (folder / "secrets/access_token").read_text().strip()


@contextmanager
def begin(*words: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "appliance.host.provision", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


def provision(*words: str) -> Ended:
    with begin(*words) as program:
        out, err = program.communicate(timeout=180)
    assert "Traceback" not in err, err
    return Ended(code=program.returncode, out=out, err=err)
