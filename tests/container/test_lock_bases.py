"""`lock --bases` asks a real registry, and writes nothing when none answers or it has not what the matrix needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from images import docker
from images.build import build
from images.errors import BuildError
from images.matrix import matrix
from images.matrix.matrix import Base
from images.pins import bases
from tests.container.small_cell import ROOT
from tests.container.stages.registry import manifest, registry

pytestmark = pytest.mark.build_half
TODAY = date(2026, 11, 21)
# A port on which nothing listens: the discard service's.
NOBODY = "127.0.0.1:9"


@pytest.fixture(scope="module")
def published() -> Iterator[tuple[str, str]]:
    """The name of an image that a registry has, and the digest that the registry itself says it has."""
    with registry() as host:
        name = f"{host}/base:1"
        dockerfile = f"FROM {matrix.load(ROOT).cells[0].base.image}\nLABEL which=base\n"
        output = f"type=image,name={name},push=true,oci-mediatypes=true"
        argv = ("docker", "buildx", "build", "--provenance=false", "--quiet", "--output", output, "-")
        done = docker.capture(("sh", "-c", 'printf %s "$0" | "$@"', dockerfile, *argv), cwd=ROOT)
        assert done.code == 0, done.lines
        try:
            yield name, manifest(host, "base", "1").headers["Docker-Content-Digest"]
        finally:
            docker.Engine().remove(name)  # a later registry may get this port, and tests ask what it left behind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "build_matrix.yaml").write_bytes((ROOT / "build_matrix.yaml").read_bytes())
    return tmp_path


@pytest.fixture
def base() -> Base:
    return replace(matrix.load(ROOT).cells[0].base, platforms=("linux/amd64",))


def test_the_registrys_digest_is_written(root: Path, base: Base, published: tuple[str, str]) -> None:
    name, digest = published
    found = bases.lock(root, [replace(base, image=name)], today=TODAY)
    assert [(each.digest, each.was) for each in found] == [(digest, base.digest)]
    written = (root / "build_matrix.yaml").read_text("utf-8")
    assert written == bases.rewrite((ROOT / "build_matrix.yaml").read_text("utf-8"), base.name, digest, TODAY)
    assert digest in written


def test_a_toolkit_image_that_is_not_here_is_exit_60() -> None:
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cu128-sm90")[0]
    with pytest.raises(BuildError, match="not among the engine's images: cuda:nobody-has-this") as caught:
        build.choose_toolkit(cell, "cuda:nobody-has-this", docker.Engine())
    assert caught.value.exit_code == 60
    here = build.choose_toolkit(cell, cell.base.image, docker.Engine())
    assert here
    assert (here.context, here.override) == (f"docker-image://{cell.base.image}", cell.base.image)


@pytest.mark.parametrize("missing", ["no such tag", "no registry", "no such platform"])
def test_nothing_is_written_when_one_cannot_be_had(
    root: Path, base: Base, published: tuple[str, str], missing: str
) -> None:
    name, _ = published
    others = {
        "no such tag": replace(base, image=f"{name}2"),
        "no registry": replace(base, image=f"{NOBODY}/base:1"),
        "no such platform": replace(base, image=name, platforms=("linux/amd64", "linux/arm64")),
    }
    with pytest.raises(BuildError, match=r"registry") as caught:
        bases.lock(root, [replace(base, image=name), others[missing]], today=TODAY)
    assert caught.value.exit_code == 60
    assert others[missing].image in caught.value.message
    assert (root / "build_matrix.yaml").read_bytes() == (ROOT / "build_matrix.yaml").read_bytes()
