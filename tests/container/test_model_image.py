"""A model image: the cell, and which weights it serves, told by the file that is in it; or the weights themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import docker as docker_py
import pytest
import requests
from testcontainers.core.container import DockerContainer

from appliance.image_facts import Recipe
from images import docker
from images.build import build, model
from images.build.model import ModelImage, Weights
from images.errors import BuildError
from images.matrix import matrix
from images.recipes import recipe
from tests.container.stages.containers import HARDENED, IMAGE, MODEL, PORT, ROOT, Stage, put_model, volume

EPOCH_S = build.FALLBACK_EPOCH_S
PREFIX = f"appliance-test/model-{os.getpid()}/"
TAG = f"{PREFIX}demo:llama-cpu"


@pytest.fixture(scope="module")
def made() -> Iterator[ModelImage]:
    """The demo on the CPU cell, without weights, under a name that is no user's."""
    yield _build()
    docker.Engine().remove(TAG)


@pytest.fixture
def baked(tmp_path: Path) -> Iterator[ModelImage]:
    prefix = f"{PREFIX}baked/"
    demo = _demo().default_rung
    copy = tmp_path / MODEL.name  # whose mode and date are not those of the layer
    copy.write_bytes(MODEL.read_bytes())
    yield _build(prefix, Weights(rung=demo, files=(copy,)))
    docker.Engine().remove(model.tag_of("demo", "llama-cpu", prefix))


def test_it_serves_the_weights_of_its_recipe_and_others_if_named(made: ModelImage, tmp_path: Path) -> None:
    other = tmp_path / "a-model-that-nobody-named.gguf"
    other.symlink_to(MODEL)
    with volume() as name:
        client = docker_py.from_env()
        put_model(client, name, other)
        with _started(made.tag, name) as stage:
            stage.wait_ready()
            said = stage.get("/v1/models", headers=stage.authorized()).json()
            assert (said["data"][0]["id"], said["data"][0]["state"]) == (MODEL.stem, "ready")
            assert [(each["id"], each["state"]) for each in said["data"][1:]] in ([], [(other.stem, "asleep")])
            body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            url = f"{stage.base}/v1/chat/completions"
            answer = requests.post(url, json=body, headers=stage.authorized(), timeout=60)
            assert answer.json()["choices"][0]["message"]["content"]
            assert answer.json()["model"] == MODEL.stem


def test_without_its_weights_it_says_which_are_missing(made: ModelImage) -> None:
    client = docker_py.from_env()
    with volume(model=False) as name:
        container = client.containers.create(
            made.tag, volumes={name: {"bind": "/data"}}, network_mode="none", **HARDENED
        )
        try:
            container.start()
            assert container.wait(timeout=60)["StatusCode"] == 10
            assert f"the model of this image's recipe is not on the volume: /data/models/{MODEL.name}" in str(
                container.logs()
            )
        finally:
            container.remove(force=True)


def test_with_its_weights_it_serves_on_an_empty_volume_without_a_network(baked: ModelImage) -> None:
    with volume(model=False) as name, _started(baked.tag, name) as stage:
        stage.wait_ready()
        said = stage.get("/v1/models", headers=stage.authorized()).json()
        assert [each["id"] for each in said["data"]] == [MODEL.stem]
        assert stage.run("ls", "/data/models").split() == []
        assert stage.run("stat", "-c", "%U %a", f"/opt/models/{MODEL.name}").split() == ["root", "644"]
        labels = docker.Engine().image(baked.tag)
        assert labels
        assert labels.labels[model.WEIGHTS_LABEL] == "135m-q4_1"


def test_the_layer_with_the_weights_is_the_same_wherever_it_is_made(baked: ModelImage) -> None:
    engine = docker.Engine()
    engine.remove(baked.tag)
    again = _build(f"{PREFIX}baked/", Weights(rung=_demo().default_rung, files=(MODEL,)))
    assert (again.digest, again.is_reused) == (baked.digest, False)


def test_it_is_the_same_twice_and_not_taken_for_its_cell(made: ModelImage) -> None:
    assert _build() == replace(made, is_reused=True)
    engine = docker.Engine()
    engine.remove(made.tag)
    assert _build() == made
    cell, image = engine.image(IMAGE), engine.image(made.tag)
    assert cell
    assert image
    assert image.labels[build.BUILD_ID_LABEL] == cell.labels[build.BUILD_ID_LABEL]
    assert image.labels[build.RECIPE_LABEL] == "demo"
    assert build.RECIPE_LABEL not in cell.labels


def test_the_alias_is_the_model_image_of_the_chosen_cell(made: ModelImage) -> None:
    engine = docker.Engine()
    try:
        assert model.set_alias("demo", "llama-cpu", engine, PREFIX) == f"{PREFIX}demo"
        alias = engine.image(f"{PREFIX}demo")
        assert alias
        assert alias.id == made.digest
    finally:
        engine.remove(f"{PREFIX}demo")
    with pytest.raises(BuildError, match=f"{PREFIX}qwen:llama-cpu is not here") as caught:
        model.set_alias("qwen", "llama-cpu", engine, PREFIX)
    assert caught.value.hint == "python -m images build --only llama-cpu --model qwen"


def _demo() -> Recipe:
    return recipe.as_recipe(recipe.load(ROOT, "demo"))


def _build(prefix: str = PREFIX, weights: Weights | None = None) -> ModelImage:
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    engine = docker.Engine()
    return model.build(ROOT, cell, _demo(), engine, image=IMAGE, epoch_s=EPOCH_S, prefix=prefix, weights=weights)


@contextmanager
def _started(image: str, name: str) -> Iterator[Stage]:
    options = {key: value for key, value in HARDENED.items() if key != "tmpfs"}
    container = DockerContainer(image, **options).with_exposed_ports(PORT).with_tmpfs_mount("/tmp")
    container = container.with_volume_mapping(name, "/data", "rw").with_env("APPLIANCE_TUNE", "off")
    try:
        container.start()
        yield Stage(container)
    finally:
        container.stop()
