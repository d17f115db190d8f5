"""A model pushed from one volume to Debian's registry, and pulled onto others: resumed, verified, served, refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import docker
import pytest
import requests
from docker.models.containers import Container

from tests.container.stages.containers import HARDENED, IMAGE, MODEL, WAIT_S, ended, executed, started, volume
from tests.container.stages.registry import FOLDER, manifest, registry_container
from tests.container.stages.relay import relay

HERE = "host"  # the network where the registry is on the loopback, which needs no TLS
REPOSITORY = "team/smollm2"
MIB = 2**20


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[str, Container]]:
    with registry_container() as found:
        yield found


@pytest.fixture(scope="module")
def pushed(place: tuple[str, Container]) -> str:
    """Push the demo's model, twice. Returns its reference."""
    name = f"oci://{place[0]}/{REPOSITORY}:q4"
    with volume() as first:
        for sent in (MODEL.stat().st_size, 0):
            code, said = ended(first, "models", "push", MODEL.name, name, "--json", network_mode=HERE)
            assert code == 0, said
            document = json.loads(said.splitlines()[-1])
            assert document["sent_bytes"] // MIB == sent // MIB
    return name


def test_the_registry_has_a_modelpack(place: tuple[str, Container], pushed: str) -> None:
    found = manifest(place[0], REPOSITORY, pushed.rpartition(":")[2]).json()
    (layer,) = found["layers"]
    assert found["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert layer["annotations"] == {"org.cncf.model.filepath": MODEL.name}
    assert layer["digest"] == f"sha256:{hashlib.sha256(MODEL.read_bytes()).hexdigest()}"
    config = requests.get(f"http://{place[0]}/v2/{REPOSITORY}/blobs/{found['config']['digest']}", timeout=60).json()
    assert config["config"] == {
        "format": "gguf", "architecture": "llama", "paramSize": "135M", "quantization": "Q4_1",
    }  # fmt: skip
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"]]}


def test_a_pull_that_is_killed_resumes_and_what_is_there_is_served_without_a_network(
    place: tuple[str, Container], pushed: str
) -> None:
    size = MODEL.stat().st_size
    client = docker.from_env()
    with volume(model=False) as other, relay(place[0], hold_after=size // 3) as between:
        name = pushed.replace(place[0], between.address)
        options = {**HARDENED, "network_mode": HERE, "volumes": {other: {"bind": "/data"}}}
        container = client.containers.create(IMAGE, ["models", "pull", name], **options)
        try:
            container.start()
            assert between.is_held.wait(WAIT_S), container.logs()
            container.kill()
            container.wait(timeout=WAIT_S)
        finally:
            container.remove(force=True)
        between.release()
        before = between.sent
        code, said = ended(other, "models", "pull", name, network_mode=HERE)
        assert code == 0, said
        assert between.sent - before < size * 0.9, "it began anew"
        assert f"{name}: fetched and checked" in said
        code, said = ended(other, "models", "verify", name, network_mode="none")
        assert (code, f"{name}: {MODEL.name}: sound" in said) == (0, True), said
        with started(other, env={"APPLIANCE_MODEL": name, "APPLIANCE_OFFLINE": "on"}) as stage:
            stage.wait_ready()
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            reply = requests.post(
                f"{stage.base}/v1/chat/completions", json=body, headers=stage.authorized(), timeout=WAIT_S
            )
            assert reply.status_code == 200, reply.text
            assert stage.get("/v1/models", headers=stage.authorized()).json()["data"][0]["aliases"] == [name]
        assert ended(other, "models", "rm", name, network_mode="none")[0] == 0


def test_what_the_registry_lost_or_changed_is_refused(place: tuple[str, Container], pushed: str) -> None:
    host, container = place
    code, said = ended(None, "models", "pull", f"oci://{host}/{REPOSITORY}:none", network_mode=HERE)
    assert code == 10
    assert f"no such model in the registry: oci://{host}/{REPOSITORY}:none" in said
    digest = manifest(host, REPOSITORY, "q4").json()["layers"][0]["digest"].removeprefix("sha256:")
    file = f"{FOLDER}/docker/registry/v2/blobs/sha256/{digest[:2]}/{digest}/data"
    script = f"printf tampered | dd of={file} bs=1 seek=1000000 conv=notrunc status=none"
    assert executed(container, "sh", "-c", script)[0] == 0
    with volume(model=False) as other:
        code, said = ended(other, "models", "pull", pushed, network_mode=HERE)
        assert code == 32, said
        assert f"file has another hash than announced: {MODEL.name}: expected sha256 {digest}" in said
        assert "no models" in ended(other, "models", network_mode="none")[1]
