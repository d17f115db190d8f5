"""The host command's own wheel, in a container with nothing but Python: it pulls by digest, starts and serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker
import pytest
import requests

from tests.container.small_cell import ca_bundle
from tests.container.stages.containers import ROOT, volume
from tests.container.stages.registry import registry

pytestmark = pytest.mark.build_half
DEMO = "appliance/demo:llama-cpu"
SOCKET = "/var/run/docker.sock"
BASE = "debian:bookworm-slim"
# Both files are installed by pip as a user would, dependencies and build backend from its index.
DOCKERFILE = f"""\
FROM {BASE}
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
COPY *.whl *.tar.gz /made/
RUN --mount=type=secret,id=ca,required=false [ -s /run/secrets/ca ] && export PIP_CERT=/run/secrets/ca; \\
    for kind in whl tar.gz; do \\
        python3 -m venv /$kind && /$kind/bin/pip install --no-cache-dir /made/*.$kind || exit 1; done
"""


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    with registry() as found:
        yield found


@pytest.fixture(scope="module")
def digest(host: str) -> Iterator[str]:
    """Push the demo's image under another name, and return the digest that the registry has."""
    client = docker.from_env()
    name = f"{host}/team/appliance/demo"
    client.images.get(DEMO).tag(name, "llama-cpu")
    try:
        events = list(client.api.push(name, tag="llama-cpu", stream=True, decode=True))
        assert not [event for event in events if "error" in event], events[-1]
    finally:
        client.images.remove(f"{name}:llama-cpu")
    reply = requests.head(f"http://{host}/v2/team/appliance/demo/manifests/llama-cpu", timeout=30, headers=ACCEPT)
    yield reply.headers["Docker-Content-Digest"]
    for image in client.images.list():
        for each in image.attrs["RepoDigests"]:
            if each.startswith(f"{host}/"):
                client.images.remove(each)


KINDS = ("oci.image.index.v1", "oci.image.manifest.v1", "docker.distribution.manifest.v2")
ACCEPT = {"Accept": ", ".join(f"application/vnd.{kind}+json" for kind in KINDS)}


def published(folder: Path, image: str, digest: str, recipe: str = "demo") -> Path:
    path = folder / "published.yaml"
    row = {"cell": "llama-cpu", "recipe": recipe, "image": image, "digest": digest, "compressed_bytes": 200_000_000}
    path.write_text(json.dumps({"images": [row]}))
    return path


def make(folder: Path, rows: Path) -> Path:
    """Make wheel and sdist in the folder. Return the wheel."""
    argv = [sys.executable, "-m", "images", "wheel", "--name", "owner-appliance", "--out", str(folder)]
    made = subprocess.run([*argv, "--published", str(rows)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return Path(made.stdout.splitlines()[0])


@pytest.fixture(scope="module")
def image(host: str, digest: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of Debian and Python in which the wheel and the sdist are installed, each for itself."""
    folder = tmp_path_factory.mktemp("wheel")
    make(folder, published(folder, f"{host}/team/appliance/demo:llama-cpu", digest))
    (folder / "Dockerfile").write_text(DOCKERFILE)
    tag = f"appliance-test/host-wheel:{uuid.uuid4().hex[:12]}"
    bundle = ca_bundle()
    secret = ["--secret", f"id=ca,src={bundle}"] if bundle else []
    argv = ["docker", "buildx", "build", "--quiet", "--provenance=false", "--load", "--tag", tag, *secret, str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    yield tag
    docker.from_env().images.remove(tag, force=True)


def with_rows(folder: Path, rows: Path) -> tuple[str, ...]:
    """Return Docker's options that put the inventory of a wheel of these rows in place of the installed one."""
    inventory = "appliance/host/docker/inventory.json"
    (folder / "inventory.json").write_bytes(zipfile.ZipFile(make(folder, rows)).read(inventory))
    place = f"/whl/lib/python3.11/site-packages/{inventory}"
    return (*WITH_DOCKER, "--volume", f"{folder}/inventory.json:{place}:ro")


def appliance(image: str, *words: str, options: tuple[str, ...] = (), kind: str = "whl") -> Done:
    # The network of the machine: what is started publishes its port there, on the loopback.
    argv = ["docker", "run", "--rm", "--network", "host", *options, image, f"/{kind}/bin/appliance", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=400)
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


WITH_DOCKER = ("--volume", f"{SOCKET}:{SOCKET}")


@contextmanager
def name() -> Iterator[str]:
    made = f"test-{uuid.uuid4().hex[:8]}"
    client = docker.from_env()
    try:
        yield made
    finally:
        for container in client.containers.list(all=True, ignore_removed=True, filters={"name": f"appliance-{made}"}):
            container.remove(force=True, v=True)


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_wheel_and_sdist_help_and_say_that_there_is_no_docker(image: str, kind: str) -> None:
    done = appliance(image, "--help", kind=kind)
    assert done.code == 0, done.err
    assert "start a model in a container on this machine" in done.out
    done = appliance(image, "run", "demo", kind=kind)
    assert (done.code, done.out) == (10, "")
    assert "error: Docker is missing: nothing answers at" in done.err
    done = appliance(image, "version", kind=kind)
    assert (done.code, done.out.splitlines()[0]) == (0, "appliance: 0.1.0")


def test_uvx_finds_a_program_of_the_distributions_name(image: str) -> None:
    argv = ["docker", "run", "--rm", image, "/whl/bin/owner-appliance", "version"]
    assert subprocess.run(argv, capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("verb", ["bench", "inject"])
def test_a_verb_whose_packages_are_an_extra_names_it(image: str, verb: str) -> None:
    done = appliance(image, verb)
    assert done.code == 10
    assert f"hint: pipx install --force 'owner-appliance[{verb}]', or uvx --from" in done.err


def test_run_pulls_by_digest_starts_hardened_and_answers(image: str, host: str, digest: str) -> None:
    pinned = f"{host}/team/appliance/demo@{digest}"
    with volume(model=False) as data, name() as called:
        words = ("run", "demo", "--cpu", "-d", "--name", called, "--volume", data, "--fast")
        done = appliance(image, *words, options=WITH_DOCKER)
        assert done.code == 0, done.err
        assert f"pulling {pinned} (200 MB)\n" in done.err
        assert "the model is being loaded" in done.err
        found = docker.from_env().containers.get(f"appliance-{called}").attrs
        assert found["Config"]["Image"] == pinned
        assert (found["HostConfig"]["ReadonlyRootfs"], found["HostConfig"]["CapDrop"]) == (True, ["ALL"])
        told = dict(re.findall(r"^(endpoint|key) +(\S+)$", done.out, re.MULTILINE))
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        headers = {"Authorization": f"Bearer {told['key']}"}
        reply = requests.post(f"{told['endpoint']}/chat/completions", json=body, headers=headers, timeout=120)
        assert reply.json()["choices"][0]["message"]["content"]
        done = appliance(image, "upgrade", called, options=WITH_DOCKER)
        assert (done.code, done.out) == (0, f"{called} is up to date: {pinned}\n"), done.err
        assert appliance(image, "stop", called, options=WITH_DOCKER).code == 0


def test_what_it_refuses(image: str) -> None:
    for words, said, hint in (
        (("run", "qwem"), "no recipe has a model of this name: qwem", "perhaps you meant qwen"),
        (("run", "gemma", "--cpu"), "no image of gemma is published: published are demo", "`make up` builds one"),
        (("run", "demo", "--build"), "--build needs a clone of the project", "in a clone: make venv"),
    ):
        done = appliance(image, *words, options=WITH_DOCKER)
        assert (done.code, done.out) == (10, ""), done.err
        assert said in done.err
        assert hint in done.err


def test_a_digest_that_the_registry_lacks_is_not_replaced_by_its_tag(
    image: str, host: str, digest: str, tmp_path: Path
) -> None:
    other = digest[:-8] + "0" * 8
    options = with_rows(tmp_path, published(tmp_path, f"{host}/team/appliance/demo:llama-cpu", other))
    with name() as called:
        done = appliance(image, "run", "demo", "--cpu", "--dry-run", options=options)
        assert done.out.endswith(f"/team/appliance/demo@{other}\n")
        done = appliance(image, "run", "demo", "--cpu", "-d", "--name", called, options=options)
    assert (done.code, done.out) == (10, ""), done.err
    assert f"error: the image cannot be pulled: {host}/team/appliance/demo@{other}" in done.err
    assert "hint: docker login, or the image of this machine: --image appliance/demo:llama-cpu" in done.err


def test_another_content_than_that_of_the_digest_is_refused(image: str, host: str, digest: str, tmp_path: Path) -> None:
    annotated = unknown_here(host, digest)
    with tampering(host) as there, name() as called:
        options = with_rows(tmp_path, published(tmp_path, f"{there}/team/appliance/demo:llama-cpu", annotated))
        done = appliance(image, "run", "demo", "--cpu", "-d", "--name", called, options=options)
    assert (done.code, done.out) == (61, ""), done.err
    assert f"error: the registry's image is not the published one: {there}/team" in done.err


def test_a_row_with_the_digest_of_something_else_is_refused(image: str, host: str, digest: str, tmp_path: Path) -> None:
    options = with_rows(tmp_path, published(tmp_path, f"{host}/team/appliance/demo:llama-cpu", digest, recipe="qwen"))
    with name() as called:
        done = appliance(image, "run", "qwen", "--cpu", "-d", "--name", called, options=options)
    assert (done.code, done.out) == (61, ""), done.err
    assert "it is demo on llama-cpu, not qwen on llama-cpu" in done.err


def test_without_a_published_image_it_says_so_in_one_sentence(image: str, tmp_path: Path) -> None:
    rows = tmp_path / "published.yaml"
    rows.write_text("images: []\n")
    done = appliance(image, "run", "gpt-oss", "--cpu", options=with_rows(tmp_path, rows))
    assert (done.code, done.out) == (10, ""), done.err
    said = "there is no image of gpt-oss for this machine: none is published yet, and building needs a clone"
    assert f"error: {said}\n\nhint: in a clone of the project `make up` builds one" in done.err


def unknown_here(host: str, digest: str) -> str:
    """Put the image into the registry with an annotation, and return the digest of what this machine does not have."""
    address = f"http://{host}/v2/team/appliance/demo/manifests"
    reply = requests.get(f"{address}/{digest}", headers=ACCEPT, timeout=30)
    body = json.dumps({**reply.json(), "annotations": {"test": uuid.uuid4().hex}})
    kind = {"Content-Type": reply.headers["Content-Type"]}
    made = requests.put(f"{address}/annotated", data=body, headers=kind, timeout=30)
    assert made.status_code == 201, made.text
    return made.headers["Docker-Content-Digest"]


@contextmanager
def tampering(host: str) -> Iterator[str]:
    """Yield HOST:PORT of a registry that passes on what `host` says, but each manifest with one byte more."""

    class Handler(BaseHTTPRequestHandler):
        default_request_version = "HTTP/1.1"  # else no status line answers Docker's attempt at TLS

        def do_HEAD(self) -> None:
            self._pass_on()

        def do_GET(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            headers = {"Accept": self.headers.get("Accept", "*/*")}
            reply = requests.request(self.command, f"http://{host}{self.path}", headers=headers, timeout=30)
            body = reply.content + (b"\n" if "/manifests/" in self.path and reply.content else b"")
            self.send_response(reply.status_code)
            for field in ("Content-Type", "Docker-Content-Digest"):
                if field in reply.headers:
                    self.send_header(field, reply.headers[field])
            size = int(reply.headers.get("Content-Length", 0)) + ("/manifests/" in self.path)
            self.send_header("Content-Length", str(len(body) if body else size))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
