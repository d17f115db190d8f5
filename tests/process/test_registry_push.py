"""`models push`: what a registry has afterwards, and what is said if it has not. A start from the registry."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.registry.running import RunningRegistry, put_artifact, running_registry
from tests.process.stages.boot import Home
from tests.process.stages.fetching import ended
from tests.unit.model.gguf_files import write_model
from tests.unit.weights.cache_files import put_cached, put_ollama

Push = Callable[..., tuple[int, str, str]]
ACCOUNT = "me:s3cret"


@pytest.fixture
def weights(tmp_path: Path) -> bytes:
    return write_model(tmp_path / "weights").read_bytes()


@pytest.fixture
def models(tmp_path: Path, weights: bytes) -> Path:
    """A volume with one model."""
    folder = tmp_path / "data/models"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(weights)
    return folder


@pytest.fixture
def push(models: Path, tmp_path: Path) -> Push:
    (tmp_path / "ollama").mkdir()

    def push(registry: RunningRegistry, *argv: str, **environment: str) -> tuple[int, str, str]:
        places = ("--facts-dir", str(tmp_path / "facts"), "--model-dirs", str(tmp_path / "ollama"))
        return ended(registry, models.parent, "push", *argv, *places, environment=environment)

    return push


def manifest(registry: RunningRegistry, tag: str = "q4") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((registry.folder / "team/tiny" / tag).read_bytes())
    return document


def blob(registry: RunningRegistry, descriptor: dict[str, Any]) -> bytes:
    data: bytes = (registry.folder / "blobs" / descriptor["digest"].removeprefix("sha256:")).read_bytes()
    assert descriptor["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert descriptor["size"] == len(data)
    return data


def test_a_model_becomes_a_modelpack(push: Push, tmp_path: Path, weights: bytes) -> None:
    with running_registry(tmp_path / "shelf") as registry:
        code, out, err = push(registry, "tiny.gguf", registry.name("team/tiny:q4"))
        assert code == 0, err
        found = manifest(registry)
        assert found["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
        assert found["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
        (layer,) = found["layers"]
        assert layer["mediaType"] == "application/vnd.cncf.model.weight.v1.raw"
        assert layer["annotations"] == {"org.cncf.model.filepath": "tiny.gguf"}
        assert blob(registry, layer) == weights
        config = json.loads(blob(registry, found["config"]))
    assert found["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"]]}
    assert config["config"]["format"] == "gguf"
    assert config["config"]["architecture"] == "llama"
    digest = hashlib.sha256((tmp_path / "shelf/team/tiny/q4").read_bytes()).hexdigest()
    assert f"tiny.gguf: pushed to {registry.name('team/tiny:q4')}" in out
    assert f"sha256:{digest}" in out


def test_what_the_registry_has_is_not_sent_again(push: Push, tmp_path: Path) -> None:
    with running_registry(tmp_path / "shelf") as registry:
        assert push(registry, "tiny.gguf", registry.name("team/tiny:q4"))[0] == 0
        registry.log.unlink()
        code, out, _ = push(registry, "tiny", registry.name("team/tiny:other"), "--json")
        assert code == 0
        assert json.loads(out)["sent_bytes"] == 0
        assert [row["method"] for row in registry.requests()] == ["HEAD", "HEAD", "PUT"]
        assert manifest(registry) == manifest(registry, "other")


def test_every_file_of_a_model_is_pushed_from_where_it_lies(
    push: Push, models: Path, tmp_path: Path, weights: bytes
) -> None:
    put_cached(models, "org/m", "m-Q4_K_M.gguf", weights + b"1")
    put_cached(models, "org/m", "mmproj-F16.gguf", b"GGUF")
    put_ollama(tmp_path / "ollama", "library/qwen3/4b", weights)
    with running_registry(tmp_path / "shelf") as registry:
        assert push(registry, "org/m", registry.name("team/tiny:q4"))[0] == 0
        paths = [layer["annotations"]["org.cncf.model.filepath"] for layer in manifest(registry)["layers"]]
        assert paths == ["m-Q4_K_M.gguf", "mmproj-F16.gguf"]
        assert push(registry, "qwen3:4b", registry.name("team/tiny:o"))[0] == 0
        (layer,) = manifest(registry, "o")["layers"]
        assert layer["annotations"]["org.cncf.model.filepath"] == "qwen3-4b.gguf"


@pytest.mark.parametrize("kind", ["bearer", "basic"])
def test_an_account_may_push_and_is_never_said(push: Push, tmp_path: Path, kind: str) -> None:
    """The token for looking up a file is not the one for sending it."""
    with running_registry(tmp_path / "shelf", "--auth", kind, "--account", ACCOUNT) as registry:
        auths = {registry.host: {"auth": base64.b64encode(ACCOUNT.encode()).decode()}}
        target = registry.name("team/tiny:q4")
        code, out, err = push(registry, "tiny.gguf", target, DOCKER_AUTH_CONFIG=json.dumps({"auths": auths}))
        assert code == 0, err
        code, more, worse = push(registry, "tiny.gguf", target, DOCKER_AUTH_CONFIG='{"auths": {}}')
        assert code == 32
        assert "answers 401" in worse
        assert "docker login" in worse
    for word in ("s3cret", auths[registry.host]["auth"]):
        assert word not in out + err + more + worse


def test_a_lost_upload_is_sent_again(push: Push, tmp_path: Path, weights: bytes) -> None:
    with running_registry(tmp_path / "shelf", "--lose-upload", "2") as registry:
        code, _, err = push(registry, "tiny.gguf", registry.name("team/tiny:q4"))
        assert code == 0, err
        assert blob(registry, manifest(registry)["layers"][0]) == weights
    assert re.search(r"waiting: the connection to 127.0.0.1 broke; asking again in", err)


@pytest.mark.parametrize(
    ("argv", "knobs", "code", "words"),
    [
        (("none", "{}team/tiny:q4"), (), 10, "no such model: none"),
        (("tiny.gguf",), (), 2, "models push needs a model and where to push it"),
        (("tiny.gguf", "org/repo"), (), 10, "not a tag in a container registry: org/repo"),
        (("tiny.gguf", f"{{}}team/tiny@sha256:{'0' * 64}"), (), 10, "not a tag in a container registry"),
        (("tiny.gguf", "{}team/tiny:q4", "--offline", "on"), (), 32, "offline mode is on, nothing is sent"),
        (("tiny.gguf", "oci://127.0.0.1:9/team/tiny:q4"), (), 32, "127.0.0.1 cannot be reached"),
        (("tiny.gguf", "{}team/tiny:q4"), ("--fail", "upload=403*9"), 32, "127.0.0.1 answers 403"),
        (("tiny.gguf", "{}team/tiny:q4"), ("--fail", "upload=404*9"), 32, "127.0.0.1 answers 404"),
        (
            ("tiny.gguf", "{}team/tiny:q4"),
            ("--fail", "tag=405*9"),
            32,
            "files that the registry has are not sent again",
        ),
        (("damaged.gguf", "{}team/tiny:q4"), (), 30, "damaged.gguf"),
    ],
)
def test_what_cannot_be_pushed_is_said(
    push: Push,
    models: Path,
    tmp_path: Path,
    weights: bytes,
    argv: tuple[str, ...],
    knobs: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    (models / "damaged.gguf").write_bytes(weights[:5000])
    with running_registry(tmp_path / "shelf", *knobs) as registry:
        found, out, err = push(registry, *(word.format(registry.name("")) for word in argv))
    assert found == code, err
    assert words in err
    assert not out


def test_a_file_that_changed_on_the_disk_is_not_pushed(
    push: Push, models: Path, tmp_path: Path, weights: bytes
) -> None:
    """The name of a blob is its hash, of which the disk knows nothing."""
    link = put_cached(models, "org/m", "m-Q4_K_M.gguf", weights + b"1")
    (models / link.resolve()).write_bytes(weights + b"2")
    with running_registry(tmp_path / "shelf") as registry:
        code, _, err = push(registry, "org/m", registry.name("team/tiny:q4"))
        assert code == 30
        assert "file is damaged, or changed meanwhile" in err
        assert not (registry.folder / "team").exists()


def test_a_model_of_a_registry_is_fetched_served_and_served_again_without_it(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    path = home.data / "models/small.gguf"
    put_artifact(tmp_path / "shelf", [("application/vnd.docker.ai.gguf.v3", "model.gguf", path.read_bytes())])
    path.unlink()
    with running_registry(tmp_path / "shelf", "--auth", "bearer") as registry:
        name = registry.name("team/tiny:q4")
        with home.serving(model=name) as serving:
            serving.wait_ready()
            assert serving.chat()[0] == 200
            assert "fetched" in serving.names()
            serving.terminate()
        registry.log.unlink()
        with home.serving(model=name) as serving:
            serving.wait_ready()
            assert serving.chat()[0] == 200
            serving.terminate()
        assert registry.requests() == []
