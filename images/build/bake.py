"""docker-bake.json: the builds of `images build` for users of `docker buildx bake`. Pure.

Values of the moment are variables, so the file changes only with the matrix; `images bake --env` prints them. Lists of
strings stand for maps, which buildx 0.13 does not take.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from images.build.build import BASE_OVERRIDE_LABEL, BUILD_ID_LABEL, Job, moment_labels
from images.matrix import render
from images.matrix.matrix import Cell, Platform
from images.matrix.publisher import Publisher

BAKE_FILE = Path("docker-bake.json")
# Not where `build` has its archives: bake opens what it would write even for --print, which empties the file.
ARCHIVES = Path(".make/bake")
# Label -> the variable that carries it. The rest of what `build` adds belongs to a base that is not the pinned one.
LABEL_VARIABLES = {
    BUILD_ID_LABEL: "BUILD_ID",
    "org.opencontainers.image.created": "CREATED",
    "org.opencontainers.image.revision": "REVISION",
    "org.opencontainers.image.version": "VERSION",
}

NOBODY = Publisher()


def bake_file(cells: Iterable[Cell], publisher: Publisher = NOBODY) -> str:
    """Returns the text of docker-bake.json."""
    known = tuple(cells)
    targets = {cell.id: _target(cell, publisher) for cell in known}
    # An empty file is no certificate: the Dockerfiles look at its size.
    variables = {"CA_BUNDLE": {"default": "/dev/null"}}
    for cell_id in targets:
        for name in ("EPOCH", *LABEL_VARIABLES.values()):
            variables[variable(cell_id, name)] = {"default": ""}
    made = {"//": _header(), "group": _groups(known), "target": targets, "variable": variables}
    return json.dumps(made, indent=2) + "\n"


def _groups(cells: Iterable[Cell]) -> dict[str, dict[str, list[str]]]:
    """Returns a group for each kind of machine, since none can build for another. The default group is amd64."""
    ready = [cell for cell in cells if not cell.unresolved]
    platforms: tuple[Platform, ...] = get_args(Platform)
    kinds = {
        platform.partition("/")[2]: [cell.id for cell in ready if platform in cell.platforms] for platform in platforms
    }
    groups = {kind: {"targets": ids} for kind, ids in kinds.items() if ids}
    return {"default": {"targets": list(groups)[:1]}, **groups}


def variable(cell_id: str, name: str) -> str:
    """Returns the name of a bake variable, an identifier: `llama_cpu_EPOCH`."""
    return f"{cell_id.replace('-', '_').replace('.', '_')}_{name}"


def environment(job: Job) -> dict[str, str]:
    """Returns the variables of one target. An unknown revision is `none` here, since bake cannot leave it out."""
    labels = moment_labels(job)
    values = {name: labels.get(label, render.NONE) for label, name in LABEL_VARIABLES.items()}
    return {variable(job.cell.id, name): value for name, value in {"EPOCH": str(job.origin.epoch_s), **values}.items()}


def _header() -> str:
    return f"DO NOT EDIT. Made from build_matrix.yaml and images/build/bake.py by: {render.RENDER_COMMAND}"


def _target(cell: Cell, publisher: Publisher) -> dict[str, object]:
    archive = (ARCHIVES / f"{cell.id}.oci.tar").as_posix()
    labels = {label: _value(cell, name) for label, name in LABEL_VARIABLES.items()}
    return {
        "context": ".",
        "dockerfile": (cell.folder / "Dockerfile").as_posix(),
        "platforms": list(cell.platforms),
        "args": {"APPLIANCE_BUILD_ID": _value(cell, "BUILD_ID"), "SOURCE_DATE_EPOCH": _value(cell, "EPOCH")},
        "labels": {BASE_OVERRIDE_LABEL: render.NONE, **labels, **publisher.labels},
        "secret": ["id=ca,src=${CA_BUNDLE}"],
        # Attestations hold the moment of the build; with them no two indexes are the same.
        "attest": ["type=provenance,disabled=true", "type=sbom,disabled=true"],
        "output": [f"type=oci,name={cell.tag},dest={archive},rewrite-timestamp=true,oci-mediatypes=true"],
    }


def _value(cell: Cell, name: str) -> str:
    return f"${{{variable(cell.id, name)}}}"
