"""A model image: the cell, and which weights it serves, told by the file that is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker as docker_py
import pytest
import requests
from testcontainers.core.container import DockerContainer

from images import build, docker, matrix, model, recipe
from images.errors import BuildError
from images.model import ModelImage
from tests.container.stages.containers import HARDENED, IMAGE, MODEL, PORT, ROOT, Stage, put_model, volume

EPOCH_S = build.FALLBACK_EPOCH_S


@pytest.fixture(scope="module")
def made() -> Iterator[ModelImage]:
    """appliance/demo on the CPU cell; a name that was there before is there again afterwards."""
    engine = docker.Engine()
    before = engine.image("appliance/demo:llama-cpu")
    yield _build()
    if before:
        engine.tag(before.id, "appliance/demo:llama-cpu")
    else:
        engine.remove("appliance/demo:llama-cpu")


def test_it_serves_the_weights_of_its_recipe_and_no_others(made: ModelImage, tmp_path: Path) -> None:
    other = tmp_path / "a-model-that-nobody-named.gguf"
    other.symlink_to(MODEL)
    with volume() as name:
        client = docker_py.from_env()
        put_model(client, name, other)
        with _started(made.tag, name) as stage:
            stage.wait_ready()
            said = stage.get("/v1/models", headers=stage.authorized()).json()
            assert [each["id"] for each in said["data"]] == [MODEL.stem]
            body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
            url = f"{stage.base}/v1/chat/completions"
            answer = requests.post(url, json=body, headers=stage.authorized(), timeout=60)
            assert answer.json()["choices"][0]["message"]["content"]


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


def test_it_is_the_same_twice_and_not_taken_for_its_cell(made: ModelImage) -> None:
    assert _build().digest == made.digest
    engine = docker.Engine()
    cell, image = engine.image(IMAGE), engine.image(made.tag)
    assert cell
    assert image
    assert image.labels[build.BUILD_ID_LABEL] == cell.labels[build.BUILD_ID_LABEL]
    assert image.labels[build.RECIPE_LABEL] == "demo"
    assert build.RECIPE_LABEL not in cell.labels


def test_the_alias_is_the_model_image_of_the_chosen_cell(made: ModelImage) -> None:
    engine = docker.Engine()
    assert engine.image("appliance/demo") is None, "this machine uses the alias: docker image rm appliance/demo"
    try:
        assert model.set_alias("demo", "llama-cpu", engine) == "appliance/demo"
        alias = engine.image("appliance/demo")
        assert alias
        assert alias.id == made.digest
    finally:
        engine.remove("appliance/demo")
    with pytest.raises(BuildError, match="appliance/qwen:llama-cpu is not here") as caught:
        model.set_alias("qwen", "llama-cpu", engine)
    assert caught.value.hint == "python -m images build --only llama-cpu --model qwen"


def _build() -> ModelImage:
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    demo = recipe.as_recipe(recipe.load(ROOT, "demo"))
    return model.build(ROOT, cell, demo, docker.Engine(), image=IMAGE, epoch_s=EPOCH_S)


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
