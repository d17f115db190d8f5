"""What is given back is ours; what could be somebody else's stays, also when the engine offers it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from images import docker
from images.build import bake, build, packages, prune
from images.docker import CacheRecord, Image

DOCKERFILE = """FROM debian AS base
# a comment \\
RUN --mount=type=secret,id=ca,target=/run/ca.crt \\
    if [ -s /run/ca.crt ]; then x; fi \\
 && install
COPY --from=base /a /b
"""


@dataclass
class Kept(docker.Engine):
    """An engine that holds what it is given; a cache record goes only after its children."""

    cache: list[CacheRecord] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    in_use: set[str] = field(default_factory=set)
    parents: dict[str, str] = field(default_factory=dict)  # child -> parent

    def images_untagged(self, label: str) -> list[Image]:
        return [image for image in self.images if label in image.labels]

    def images_labelled(self, labels: Mapping[str, str]) -> list[Image]:
        return [image for image in self.images if labels.items() <= image.labels.items()]

    def remove(self, image_id: str) -> bool:
        if image_id in self.in_use:
            return False
        self.images = [image for image in self.images if image.id != image_id]
        return True

    def build_cache(self) -> list[CacheRecord]:
        return list(self.cache)

    def prune_cache(self, record_id: str) -> int:
        held = {parent for child, parent in self.parents.items() if child in {each.id for each in self.cache}}
        gone = [each for each in self.cache if each.id == record_id and each.id not in held]
        self.cache = [each for each in self.cache if each not in gone]
        return sum(each.size_bytes for each in gone)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "images/rendered/x").mkdir(parents=True)
    (tmp_path / "images/rendered/x/Dockerfile").write_text(DOCKERFILE)
    for folder in (build.ARCHIVES, bake.ARCHIVES):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_a_temporary_lock_goes_with_its_image(root: Path) -> None:
    paths = [root / packages.path_for(letter * 32) for letter in "abc"]
    for path in paths:
        path.write_text("{}")
    for path in paths[:2]:
        os.utime(path, (0, 0))
    image = Image(id="i", tags=("t",), digests=(), config={"Labels": {build.BUILD_ID_LABEL: "a" * 32}})
    for is_dry in (True, False):
        found = prune.prune(root, Kept(images=[image]), with_cache=False, is_dry=is_dry)
        assert [(each.what, each.is_gone) for each in found] == [(packages.path_for("b" * 32).as_posix(), not is_dry)]
    assert [path.exists() for path in paths] == [True, False, True]  # of an image that is here; gone; just written


def test_instructions_read_as_the_cache_describes_them() -> None:
    assert prune.instructions(DOCKERFILE) == {
        "if [ -s /run/ca.crt ]; then x; fi && install",
        "COPY --from=base /a /b",
    }


@pytest.mark.parametrize(
    ("description", "is_ours"),
    [
        ("mount / from exec /bin/sh -c if [ -s /run/ca.crt ]; then x; fi  && install", True),
        ("[x 2/4] COPY --from=base /a /b", True),
        ("[runtime 3/10] COPY --from=engine /opt/llama /opt/llama", True),
        ("[runtime 3/10] COPY --from=engine /opt/vllm /opt/vllm", True),
        ("mount / from exec /bin/sh -c install", False),
        ("[x 2/4] COPY --from=base /a /c", False),
        ("mount / from exec /bin/sh -c ls /opt/llamafile /opt/appliances", False),
        ("local source for context", False),
        ("pulled from registry/debian", False),
        ("", False),
    ],
)
def test_a_record_is_ours_by_its_instruction(description: str, *, is_ours: bool) -> None:
    assert prune.is_ours(description, prune.instructions(DOCKERFILE)) is is_ours


def test_only_old_archives_of_ours_go(root: Path) -> None:
    folder = root / build.ARCHIVES
    for name in ("llama-cpu.oci.tar", "llama-cpu.sbom.tar", "llama-cpu.spdx.json", "holiday.tar", "young.oci.tar"):
        (folder / name).write_bytes(b"12345")
    baked = root / bake.ARCHIVES / "llama-cpu.oci.tar"
    baked.write_bytes(b"123")
    (folder / "linked.oci.tar").symlink_to(root / "images/rendered/x/Dockerfile")
    hours_ago = time.time() - 2 * prune.ARCHIVE_AGE_S
    for path in (baked, *folder.iterdir()):
        if path.name != "young.oci.tar" and not path.is_symlink():
            os.utime(path, (hours_ago, hours_ago))
    found = prune.prune(root, Kept(), with_cache=False, is_dry=True)
    assert [(each.what, each.size_bytes, each.is_gone) for each in found] == [
        (".make/bake/llama-cpu.oci.tar", 3, False),
        (".make/images/llama-cpu.oci.tar", 5, False),
        (".make/images/llama-cpu.sbom.tar", 5, False),
    ]
    assert (folder / "llama-cpu.oci.tar").exists()
    assert all(each.is_gone for each in prune.prune(root, Kept(), with_cache=False, is_dry=False))
    assert sorted(path.name for path in folder.iterdir()) == [
        "holiday.tar", "linked.oci.tar", "llama-cpu.spdx.json", "young.oci.tar",
    ]  # fmt: skip


def test_images_without_a_name_go_unless_a_container_uses_them(root: Path) -> None:
    engine = Kept(images=[_image("1"), _image("2"), _image("3", label="else")], in_use={"2"})
    found = prune.prune(root, engine, with_cache=False, is_dry=False)
    assert [(each.what, each.is_gone) for each in found] == [
        ("image 1 of llama-cpu", True), ("image 2 of llama-cpu", False),
    ]  # fmt: skip
    assert [image.id for image in engine.images] == ["2", "3"]


def test_the_cache_goes_only_when_asked_and_children_first(root: Path) -> None:
    records = [
        _record("parent", "[x 2/4] COPY --from=base /a /b"),
        _record("child", "mount / from exec /bin/sh -c use /opt/llama"),
        _record("foreign", "mount / from exec /bin/sh -c make"),
        _record("busy", "mount / from exec /bin/sh -c use /opt/llama", is_in_use=True),
    ]
    engine = Kept(cache=records, parents={"child": "parent"})
    assert prune.prune(root, engine, with_cache=False, is_dry=False) == []
    dry = prune.prune(root, engine, with_cache=True, is_dry=True)
    assert [each.is_gone for each in dry] == [False, False]
    assert engine.cache == records
    found = prune.prune(root, engine, with_cache=True, is_dry=False)
    assert [each.is_gone for each in found] == [True, True]
    assert [each.id for each in engine.cache] == ["foreign", "busy"]


def test_a_record_that_something_foreign_needs_is_said_to_stay(root: Path) -> None:
    records = [
        _record("ours", "[x 2/4] COPY --from=base /a /b"),
        _record("foreign", "mount / from exec /bin/sh -c make"),
    ]
    engine = Kept(cache=records, parents={"foreign": "ours"})
    found = prune.prune(root, engine, with_cache=True, is_dry=False)
    assert [each.is_gone for each in found] == [False]
    assert engine.cache == records


def _record(record_id: str, description: str, *, is_in_use: bool = False) -> CacheRecord:
    return CacheRecord(id=record_id, description=description, size_bytes=10, is_in_use=is_in_use)


def _image(image_id: str, label: str = prune.LABEL) -> Image:
    return Image(id=image_id, tags=(), digests=(), config={"Labels": {label: "llama-cpu"}}, size_bytes=7)
