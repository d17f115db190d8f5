"""A model image without a container: the recipe beside its facts says what is served."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.image_facts import (
    Recipe,
    RecipeFile,
    Rung,
    dump_facts,
    dump_recipe,
    parse_image_facts,
)
from tests.process.stages.boot import Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Return a home whose image names a recipe, with two models on the volume."""
    made = Home.make(tmp_path / "home")
    path = made.folder / "facts/image_facts.json"
    path.write_text(dump_facts(replace(parse_image_facts(path.read_text()), recipe="tiny")))
    shutil.copy(made.data / "models/small.gguf", made.data / "models/other.gguf")
    return made


def test_the_model_of_the_recipe_is_served_where_there_are_others(home: Home) -> None:
    (home.folder / "facts/recipe.json").write_text(dump_recipe(_recipe(home.data / "models/small.gguf")))
    with home.serving() as serving:
        serving.wait_ready()
    assert home.started
    assert all(str(home.data / "models/small.gguf") in line for line in home.started)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "are not JSON"), ('{"schema": 1}', "missing required field")]
)
def test_an_image_whose_recipe_cannot_be_read_is_damaged(home: Home, text: str | None, said: str) -> None:
    path = home.folder / "facts/recipe.json"
    if text is not None:
        path.write_text(text)
    done = home.command("plan")
    assert done.returncode == 10
    assert f"recipe of this image cannot be read: {path}: " in done.stderr
    assert said in done.stderr
    assert "hint: the image is damaged; build or pull it again" in done.stderr


def _recipe(model: Path) -> Recipe:
    data = model.read_bytes()
    file = RecipeFile(path=model.name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    rung = Rung(
        name="tiny", tier="balanced", format="gguf", repo=None, revision=None, url=None, files=(file,),
        parameters_b=0.001, active_b=0.001, loss=None, loss_source=None, shape=None, source="made here",
    )  # fmt: skip
    return Recipe(
        name="tiny", license="MIT", rungs=(rung,), default="tiny", chat={}, reasoning=None, tools=None,
        speculation=None, projector=None,
    )  # fmt: skip
