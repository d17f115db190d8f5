"""An image with a recipe, a volume without a model, and a hub that has the recipe's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from appliance.image_facts import Recipe, RecipeFile, Rung, Tier, dump_facts, dump_recipe
from tests.builders import IMAGE
from tests.fakes.hub.repos import read_repo
from tests.fakes.hub.running import RunningHub, running_hub
from tests.process.stages.boot import Home
from tests.shapes import SMALL, Shape, write_gguf

REPO = "org/Tiny-GGUF"
SHAPE = SMALL["gqa"].changed(context_length=32768)
LARGER = SHAPE.changed(block_count=SHAPE.layers * 4)
# Quantizations of two models, as a recipe has them.
FILES: Sequence[tuple[str, Tier, str, Shape]] = (
    ("small-q8_0", "quality", "Q8_0", SHAPE),
    ("large-q4_0", "balanced", "Q4_0", LARGER),
    ("large-q8_0", "quality", "Q8_0", LARGER),
)
BEST = "Tiny-large-q4_0.gguf"  # on a CPU


def fill_hub(folder: Path) -> Path:
    """Write the hub's files, about 1 MB each, and return their folder."""
    (folder / REPO).mkdir(parents=True)
    for name, _, quantization, shape in FILES:
        write_gguf(folder / REPO / f"Tiny-{name}.gguf", shape, quantization=quantization, with_data=True)
    return folder


def rung(folder: Path, name: str, tier: Tier, quantization: str, shape: Shape) -> Rung:
    repo = read_repo(folder, REPO)
    assert repo
    data = (folder / REPO / f"Tiny-{name}.gguf").read_bytes()
    file = RecipeFile(path=f"Tiny-{name}.gguf", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    row = {
        "architecture": shape.architecture, "vocabulary": shape.vocabulary, "is_tied": shape.is_tied,
        "metadata": dict(shape.metadata), "quantization": quantization,
    }  # fmt: skip
    size = 8.0 if name.startswith("large") else 1.0
    return Rung(
        name=name, tier=tier, format="gguf", repo=REPO, revision=repo.commit, url=None, files=(file,),
        parameters_b=size, active_b=size, loss=None, loss_source=None, shape=row, source="a test",
    )  # fmt: skip


def recipe(folder: Path) -> Recipe:
    rungs = tuple(rung(folder, *row) for row in FILES)
    return Recipe(
        name="tiny", license="none", rungs=rungs, default="small-q8_0", chat={}, reasoning=None, tools=None,
        speculation=None, projector=None,
    )  # fmt: skip


@contextmanager
def empty_home(folder: Path, weights: Path, *knobs: str) -> Iterator[tuple[Home, RunningHub]]:
    """An image with the recipe, a volume without a model, and a hub."""
    home = Home.make(folder / "home")
    (home.data / "models/small.gguf").unlink()
    (home.folder / "facts/image_facts.json").write_text(dump_facts(replace(IMAGE, recipe="tiny")))
    (home.folder / "facts/recipe.json").write_text(dump_recipe(recipe(weights)))
    (weights.parent / f"{weights.name}.log").unlink(missing_ok=True)  # of the test before
    with running_hub(weights, *knobs) as hub:
        home.variables = hub.environment()
        yield home, hub


def cached(home: Home, suffix: str = "") -> list[Path]:
    return sorted((home.data / f"models/models--{REPO.replace('/', '--')}").glob(f"blobs/*{suffix}"))


def error_of(home: Home, **settings: str) -> tuple[int, str]:
    with home.serving(**settings) as serving:
        return serving.wait_exit(), serving.text


def put(home: Home, weights: Path, name: str) -> None:
    """Copy the file to the volume unchanged, as a user would by hand."""
    (home.data / "models" / name).write_bytes((weights / REPO / name).read_bytes())
