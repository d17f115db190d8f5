"""images/published.yaml: which rows are taken, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from images.errors import MatrixError
from images.host import published
from images.rows import PROJECT

GOOD: dict[str, Any] = {
    "cell": "llama-cpu",
    "recipe": "qwen",
    "image": "ghcr.io/owner/appliance/qwen:llama-cpu",
    "digest": f"sha256:{'0' * 64}",
    "compressed_bytes": 99_000_000,
}


def read(folder: Path, *rows: dict[str, Any]) -> tuple[published.Published, ...]:
    path = folder / "published.yaml"
    path.write_text(json.dumps({"images": rows}))
    return published.load(path, cells=["llama-cpu", "llama-cu130-sm90"], recipes=["qwen"])


def test_the_committed_file_is_read() -> None:
    assert published.load(published.FILE, cells=[], recipes=[]) == ()
    assert (PROJECT / published.FILE).is_file()


@pytest.mark.parametrize("image", [GOOD["image"], "localhost:5000/team/appliance:llama-cpu"])
def test_a_row_names_a_registry_and_a_digest(tmp_path: Path, image: str) -> None:
    [row] = read(tmp_path, {**GOOD, "image": image})
    assert (row.image, row.digest) == (image, GOOD["digest"])
    [row] = read(tmp_path, {name: value for name, value in GOOD.items() if name != "recipe"})
    assert row.recipe is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cell": "llama-cpx"}, "no such cell: llama-cpx"),
        ({"recipe": "qwem"}, "no such recipe: qwem"),
        ({"image": "appliance/qwen:llama-cpu"}, "images.0.image"),  # of nobody on a public registry
        ({"image": "ghcr.io/owner/appliance"}, "images.0.image"),
        ({"digest": "sha256:12"}, "images.0.digest"),
        ({"compressed_bytes": 0}, "images.0.compressed_bytes"),
        ({"size": 1}, "unknown key: images.0.size"),
    ],
)
def test_a_wrong_row_is_refused_with_its_place(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(MatrixError) as caught:
        read(tmp_path, {**GOOD, **change})
    assert caught.value.exit_code == 10
    assert said in caught.value.message


def test_two_rows_of_one_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MatrixError, match="image is there twice: llama-cpu of qwen"):
        read(tmp_path, GOOD, {**GOOD, "image": "ghcr.io/other/appliance/qwen:llama-cpu"})


def test_new_rows_replace_those_of_their_kind_and_comments_stay(tmp_path: Path) -> None:
    old = read(tmp_path, GOOD, {**GOOD, "recipe": None})
    newer = published.Published(**{**GOOD, "digest": f"sha256:{'1' * 64}"})
    other = published.Published(**{**GOOD, "cell": "llama-cu130-sm90"})
    text = published.text("# What this is.\nimages: []\n", published.merged(old, [other, newer]))
    assert text.startswith("# What this is.\nimages:\n")
    (tmp_path / "published.yaml").write_text(text)
    found = published.load(tmp_path / "published.yaml", cells=["llama-cpu", "llama-cu130-sm90"], recipes=["qwen"])
    assert [(row.cell, row.recipe) for row in found] == [
        ("llama-cpu", None), ("llama-cpu", "qwen"), ("llama-cu130-sm90", "qwen")
    ]  # fmt: skip
    assert found[1].digest == newer.digest


def test_without_rows_the_file_is_as_it_was() -> None:
    before = (PROJECT / published.FILE).read_text("utf-8")
    assert published.text(before, ()) == before
