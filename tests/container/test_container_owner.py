"""The owner's line: a model image on an empty volume, killed in mid-download, started again, and asked.

`docker run -p … -v appliance:/data appliance/qwen`, with a hub on this machine in place of the public one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker as docker_py
import pytest
import requests
from docker.models.containers import Container

from appliance.image_facts import Recipe, Rung
from images import docker
from images.build import model
from images.build.build import FALLBACK_EPOCH_S
from images.build.model import ModelImage
from images.matrix import matrix
from images.recipes import recipe
from tests.container.stages.containers import HARDENED, IMAGE, MODEL, ROOT, executed, volume, wait_for
from tests.fakes.hub.repos import read_repo
from tests.fakes.hub.running import REPO, RunningHub, running_hub
from tests.ports import free_port

PREFIX = f"appliance-test/owner-{os.getpid()}"
LARGE = "30b-a3b-2507-q4_k_m"  # which the hub here has not, and the limit of memory rules out
PACE = 1_000_000  # bytes a second, of the first start: a minute and a half for the whole


def two_rungs(folder: Path) -> Recipe:
    """Return Qwen's recipe with two rungs: one of its large ones, and the demo's weights at the hub as the small
    one."""
    qwen, demo = (recipe.as_recipe(recipe.load(ROOT, name)) for name in ("qwen", "demo"))
    repo = read_repo(folder, REPO)
    assert repo
    small: Rung = replace(demo.default_rung, name="0.1b-q4_1", repo=REPO, revision=repo.commit)
    large = next(rung for rung in qwen.rungs if rung.name == LARGE)
    return replace(qwen, rungs=(small, large), default=small.name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "files"
    (folder / REPO).mkdir(parents=True)
    shutil.copy(MODEL, folder / REPO / MODEL.name)
    return folder


@pytest.fixture(scope="module")
def image(weights: Path) -> Iterator[ModelImage]:
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    made = model.build(
        ROOT, cell, two_rungs(weights), docker.Engine(), image=IMAGE, epoch_s=FALLBACK_EPOCH_S, prefix=PREFIX
    )
    yield made
    docker.Engine().remove(made.tag)


class Owner:
    """A container with the network of this machine, where the hub is."""

    def __init__(self, container: Container, port: int) -> None:
        self.container = container
        self.base = f"http://127.0.0.1:{port}"
        self.began = time.monotonic()

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Return status and document of /health/ready; the status is 0 before the container listens."""
        try:
            reply = requests.get(f"{self.base}/health/ready", timeout=60)
        except requests.ConnectionError:
            self.container.reload()
            assert self.container.status == "running", self.container.logs()
            return 0, {}
        return reply.status_code, reply.json()

    def wait_ready(self) -> float:
        """Wait until the container is ready; return the seconds since its start."""
        wait_for(lambda: self.ready()[0] == 200, 300, self.container.logs)
        return time.monotonic() - self.began

    def key(self) -> str:
        code, output = executed(self.container, "appliance", "key")
        assert code == 0, output
        return output.strip()

    def ask(self, path: str, **body: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key()}"}
        if body:
            return requests.post(self.base + path, json=body, headers=headers, timeout=60)
        return requests.get(self.base + path, headers=headers, timeout=60)


@contextmanager
def owner(tag: str, name: str, hub: RunningHub) -> Iterator[Owner]:
    port = free_port()
    client = docker_py.from_env()
    around = {**hub.environment(), "APPLIANCE_PORT": str(port), "APPLIANCE_HOST": "127.0.0.1", "APPLIANCE_TUNE": "off"}
    limits: dict[str, Any] = {"network_mode": "host", "mem_limit": "6g"}
    place: dict[str, Any] = {"environment": around, "volumes": {name: {"bind": "/data"}}}
    container = client.containers.create(tag, **limits, **place, **HARDENED)
    container.start()
    try:
        yield Owner(container, port)
    finally:
        container.remove(force=True)
        client.close()


def test_from_an_empty_volume_to_an_answer_with_a_kill_in_between(
    image: ModelImage, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size, hurry = MODEL.stat().st_size, weights.parent / "hurry"
    pace = (f"--bytes-per-s={PACE}", f"--pace-until={hurry}")
    with volume(model=False) as name, running_hub(weights, *pace) as hub:
        with owner(image.tag, name, hub) as first:
            wait_for(lambda: first.ready()[1].get("bytes_done", 0) > size // 16, 300, first.container.logs)
            _, seen = first.ready()
            assert seen["phase"] == "fetching"
            assert seen["bytes_total"] == size
            assert seen["seconds_left"] > 0
            assert requests.get(f"{first.base}/health/live", timeout=60).status_code == 200
            refused = first.ask("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert [each["state"] for each in first.ask("/v1/models").json()["data"]] == ["fetching"]
            begun_s = time.monotonic() - first.began
            first.container.kill("SIGKILL")
            first.container.wait(timeout=90)
        hurry.touch()
        before = hub.bytes_sent
        with owner(image.tag, name, hub) as second:
            ready_s = second.wait_ready()
            answer = second.ask("/v1/chat/completions", max_tokens=8, messages=[{"role": "user", "content": "Say hi."}])
            assert answer.json()["choices"][0]["message"]["content"]
        again = hub.bytes_sent - before
        assert again < size - size // 20  # what the killed run had is not fetched twice
        with owner(image.tag, name, hub) as third:
            third_s = third.wait_ready()
        assert hub.bytes_sent - before == again
    with capsys.disabled():
        print(
            f"\nempty volume, killed after {begun_s:.1f} s; second start ready in {ready_s:.1f} s with "
            f"{again / size:.0%} of {size:,} bytes fetched; third start {third_s:.1f} s"
        )
