"""A library of the driver in a real image, and one of its own gone: built like any other, and caught by `verify`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker as docker_py
import pytest

from images import docker
from images.build import build
from images.matrix import matrix
from images.proof import verify
from tests.container.stages.containers import IMAGE, ROOT

pytestmark = pytest.mark.build_half
# What a linker leaves behind that was given the toolkit's stub, and what a careless COPY of a whole folder brings.
PLANT = "RUN cp /opt/llama/libllama.so /opt/llama/libcuda.so.1 && ln -s libcuda.so.1 /usr/lib/libcuda.so && echo {mark}"
# One that is gone, and one that is there, is not found, and does not find its neighbours.
LOSE = "RUN rm /opt/llama/libmtmd.so* && mkdir /opt/llama/sub && mv /opt/llama/libllama-common.so* /opt/llama/sub/"


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[build.Job]:
    cell = matrix.select(matrix.load(ROOT).cells, "llama-cpu")[0]
    mark = f"appliance-test-{uuid.uuid4().hex}"
    (tmp_path / cell.folder).mkdir(parents=True)
    lines = (f"FROM {cell.base.reference}", "USER 0", PLANT.format(mark=mark), LOSE, "USER appliance", "")
    (tmp_path / cell.folder / "Dockerfile").write_text("\n".join(lines))
    yield build.Job(
        cell=cell,
        base=build.BaseChoice(identity="sha256:x", context=f"docker-image://{IMAGE}", override=IMAGE),
        origin=build.Origin(epoch_s=build.FALLBACK_EPOCH_S, revision=None),
        build_id="b" * 32,
        version="0",
        tag=f"{mark}:test",
        archive=tmp_path / build.ARCHIVES / "o.oci.tar",
    )
    engine = docker.Engine()
    if engine.image(f"{mark}:test"):
        docker_py.from_env().images.remove(f"{mark}:test", force=True)
    for record in engine.build_cache():
        if mark in record.description:
            engine.prune_cache(record.id)


def test_a_library_too_many_and_one_too_few_are_caught_in_a_built_image(tmp_path: Path, planted: build.Job) -> None:
    engine = docker.Engine()
    build.build(tmp_path, planted, engine)
    # Without CPU variants: executing each in an emulator takes a minute, and `make verify` does that.
    cell = replace(planted.cell, engine=replace(planted.cell.engine, cpu_variants={}))
    snapshot = verify.gather(ROOT, cell, engine, image=planted.tag, ca_bundle=None, cuobjdump=None)
    driver, found = verify.check_no_driver(snapshot), verify.check_libraries(snapshot)
    assert not driver.ok
    assert driver.detail == "opt/llama/libcuda.so.1, usr/lib/libcuda.so"
    assert not found.ok
    assert {"libllama-common", "libmtmd"} < {fault.partition(".so")[0] for fault in found.detail.split("; ")}
