from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from images.build import bake, build
from images.matrix import matrix
from images.matrix.matrix import Cell

# What the committed file says of this one cell, word for word.
GOLDEN: dict[str, Any] = {
    "context": ".",
    "dockerfile": "images/rendered/llama-cpu/Dockerfile",
    "platforms": ["linux/amd64", "linux/arm64"],
    "args": {"APPLIANCE_BUILD_ID": "${llama_cpu_BUILD_ID}", "SOURCE_DATE_EPOCH": "${llama_cpu_EPOCH}"},
    "labels": {
        "io.appliance.base-override": "none",
        "io.appliance.build-id": "${llama_cpu_BUILD_ID}",
        "org.opencontainers.image.created": "${llama_cpu_CREATED}",
        "org.opencontainers.image.revision": "${llama_cpu_REVISION}",
        "org.opencontainers.image.version": "${llama_cpu_VERSION}",
    },
    "secret": ["id=ca,src=${CA_BUNDLE}"],
    "attest": ["type=provenance,disabled=true", "type=sbom,disabled=true"],
    "output": [
        "type=oci,name=appliance:llama-cpu,dest=.make/bake/llama-cpu.oci.tar,rewrite-timestamp=true,oci-mediatypes=true"
    ],
}


def test_the_file_is_the_golden_one(cell: Cell) -> None:
    made = json.loads(bake.bake_file([cell]))
    assert made["target"] == {"llama-cpu": GOLDEN}
    mine = {"targets": ["llama-cpu"]}
    assert made["group"] == {"default": {"targets": ["amd64"]}, "amd64": mine, "arm64": mine}
    assert made["variable"]["CA_BUNDLE"] == {"default": "/dev/null"}
    assert "DO NOT EDIT" in made["//"]


def test_the_committed_file_is_what_the_matrix_gives(project: Path) -> None:
    assert (project / bake.BAKE_FILE).read_text("utf-8") == bake.bake_file(matrix.load(project).cells)


def test_lists_of_strings_are_all_that_an_old_bake_takes(project: Path) -> None:
    targets = json.loads((project / bake.BAKE_FILE).read_text("utf-8"))["target"].values()
    assert targets
    for target in targets:
        for key in ("attest", "output", "secret", "platforms"):
            assert all(isinstance(each, str) for each in target[key]), key


def test_every_variable_that_is_used_is_declared_and_given(cell: Cell, job: build.Job) -> None:
    text = bake.bake_file([cell])
    used = set(re.findall(r"\$\{(\w+)\}", text))
    assert used == set(json.loads(text)["variable"]) == {"CA_BUNDLE", *bake.environment(job)}


def test_a_bake_builds_what_build_builds(job: build.Job) -> None:
    """Arguments and labels with the variables filled in are those of the buildx command."""
    text = bake.bake_file([job.cell])
    for name, value in bake.environment(job).items():
        text = text.replace(f"${{{name}}}", value)
    target = json.loads(text)["target"]["llama-cpu"]
    argv = build.buildx_argv(job)
    assert _given(argv, "--build-arg") == target["args"]
    assert _given(argv, "--label") == target["labels"]
    output = argv[argv.index("--output") + 1]
    assert [output.replace(str(job.archive), ".make/bake/llama-cpu.oci.tar")] == target["output"]


def test_a_cell_without_a_base_is_there_and_not_built_by_default(cell: Cell) -> None:
    unresolved = replace(cell, base=replace(cell.base, digest=None, status="unresolved"))
    made = json.loads(bake.bake_file([unresolved]))
    assert list(made["target"]) == ["llama-cpu"]
    assert made["group"] == {"default": {"targets": []}}


def test_each_kind_of_machine_has_a_group_of_what_it_can_build(project: Path) -> None:
    cells = matrix.load(project).cells
    groups = json.loads(bake.bake_file(cells))["group"]
    assert groups.keys() == {"default", "amd64", "arm64"}
    for kind in ("amd64", "arm64"):
        assert groups[kind]["targets"] == [cell.id for cell in cells if f"linux/{kind}" in cell.platforms]
    assert "llama-cu130-sm120" not in groups["arm64"]["targets"]
    assert "llama-cu130-sm121" not in groups["amd64"]["targets"]


def test_an_unknown_revision_is_said(job: build.Job) -> None:
    nowhere = replace(job, origin=build.Origin(epoch_s=0, revision=None))
    assert bake.environment(nowhere)["llama_cpu_REVISION"] == "none"


def _given(argv: tuple[str, ...], flag: str) -> dict[str, str]:
    pairs = (value.partition("=") for word, value in itertools.pairwise(argv) if word == flag)
    return {name: value for name, _, value in pairs}
