"""CPU variants in real containers: damaged files, and an engine on a CPU that has less than /proc/cpuinfo says."""

from __future__ import annotations

import io
import json
import platform
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.types import Mount

from tests.container.stages.containers import IMAGE, ended, started, volume

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these variants are those of x86-64")
HERE = Path(__file__).parent
BASE = "debian:bookworm-slim"
OFF = {"APPLIANCE_TUNE": "off"}
EMULATED_S = 300  # a model of 135 M parameters is loaded in software


def build(*words: str) -> str:
    """A derived image's tag. Skips the test where the emulator's package cannot be fetched."""
    tag = f"appliance-test-{uuid.uuid4().hex[:12]}"
    argv = ["docker", "buildx", "build", "--provenance=false", "--load", "--tag", tag, "--build-arg", f"IMAGE={IMAGE}"]
    argv += ["--build-arg", f"BASE={BASE}", *words, str(HERE / "emulated_cpu")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        assert "apt-get" in done.stderr, done.stderr
        pytest.skip(f"qemu-user-static cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return tag


def removed(tag: str) -> Iterator[str]:
    yield tag
    client = docker.from_env()
    client.images.remove(tag, force=True)
    client.close()


@pytest.fixture(scope="module")
def nehalem() -> Iterator[str]:
    """Yield an image whose engine runs on an emulated CPU with SSE3 and nothing newer."""
    yield from removed(build())


@pytest.fixture(scope="module")
def nehalem_without_x64() -> Iterator[str]:
    yield from removed(build("--build-arg", "WITHOUT=x64"))


def told(logs: str) -> list[str]:
    """Return the CPU variants that were ruled out, in their order."""
    mark = "the engine's CPU variant "
    return [line.split(mark)[1].split()[0] for line in logs.splitlines() if mark in line]


def test_the_plainest_variant_serves_where_the_engine_refuses_the_rest(nehalem: str) -> None:
    with volume() as name, started(name, image=nehalem, env=OFF) as stage:
        stage.wait_ready(EMULATED_S)
        assert "x64" not in told(stage.logs())
        plan = stage.get("/appliance/v1/plan", headers=stage.authorized()).json()
        assert plan["cpu_variant"] == "x64"
        reason = next(choice["reason"] for choice in plan["choices"] if choice["name"] == "cpu_variant")
        ruled_out = told(stage.logs())  # none on a machine that is no better than the emulated one
        assert reason.count("is ruled out: the engine says that this CPU cannot run it") == len(ruled_out)


def test_every_variant_ruled_out_is_22_and_remembered(nehalem_without_x64: str) -> None:
    with volume() as name:
        code, logs = ended(name, image=nehalem_without_x64, timeout_s=EMULATED_S, env=OFF)
        assert code == 22, logs
        assert told(logs)[-1] == "x64"
        assert "x64: its file cannot be loaded: it is missing or damaged" in logs
        code, logs = ended(name, image=nehalem_without_x64, env=OFF)
        assert (code, told(logs)) == (22, [])
        assert "x64: its file cannot be loaded" in logs


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_damaged_file_is_passed_over_and_the_next_variant_serves(tmp_path: Path, size: int) -> None:
    """Empty, the loader refuses it; cut short, whoever loads it dies of SIGBUS."""
    with volume() as name:
        chosen = json.loads(ended(name, "plan", "--json")[1])["plan"]["cpu_variant"]
        if chosen == "x64":
            pytest.skip("this CPU runs the plainest variant alone")
        damaged = tmp_path / "damaged.so"
        damaged.write_bytes(library(chosen)[:size])
        damaged.chmod(0o755)
        mount = Mount(f"/opt/llama/libggml-cpu-{chosen}.so", str(damaged), type="bind", read_only=True)
        with started(name, env=OFF, mounts=[mount]) as stage:
            stage.wait_ready()
            assert told(stage.logs()) == [chosen]
            plan = stage.get("/appliance/v1/plan", headers=stage.authorized()).json()
            assert plan["cpu_variant"] != chosen


def library(variant: str) -> bytes:
    client = docker.from_env()
    container = client.containers.create(IMAGE)
    try:
        chunks, _ = container.get_archive(f"/opt/llama/libggml-cpu-{variant}.so")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            file = archive.extractfile(archive.getmembers()[0])
            assert file
            return file.read()
    finally:
        container.remove(force=True, v=True)
        client.close()


def test_a_variant_that_this_image_has_not_is_10_with_those_it_has() -> None:
    with volume() as name:
        code, logs = ended(name, "serve", "--cpu-variant", "x65")
        assert code == 10
        assert "this image has no such variant" in logs
        assert "this CPU runs x64" in logs
