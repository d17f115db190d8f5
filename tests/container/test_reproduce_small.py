"""A small cell built twice through the path that whole cells take: apt, hash-locked wheels, one C and one CUDA file."""

from __future__ import annotations

from pathlib import Path

import pytest

from images import docker
from images.proof import reproduce
from images.proof.reproduce import Reproduction
from tests.container.small_cell import HERE, make_job, make_root

pytestmark = pytest.mark.build_half
CELL = "llama-cu130-sm90"
STAGES = ("small-compile", "small-wheels", "small-runtime")


def test_a_small_cell_has_the_same_digest_twice(tmp_path: Path) -> None:
    found = build_twice(tmp_path, "cell.Dockerfile")
    assert found.difference is None
    assert found.first == found.second
    assert found.first.startswith("sha256:")


def test_a_time_in_a_layer_is_caught_and_named(tmp_path: Path) -> None:
    found = build_twice(tmp_path, "stamped.Dockerfile")
    assert not found.is_same
    assert found.difference is not None
    assert (found.difference.path, found.difference.what) == ("opt/small/stamp", "content")
    assert found.difference.layer == 1
    assert found.difference.first != found.difference.second


def build_twice(folder: Path, dockerfile: str) -> Reproduction:
    """The toolchain's stages come from the cache: they are tested by what is compiled with them."""
    engine = docker.Engine()
    root, cell = make_root(folder, CELL, (HERE / dockerfile).read_text("utf-8"))
    found = reproduce.reproduce(root, make_job(root, cell, engine), engine, stages=STAGES)
    assert list((root / ".make/images").iterdir()) == []
    return found
