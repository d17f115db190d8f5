"""A cell in miniature: the toolchain of the CUDA cells, a few small sources, and what the tests make of them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from images import docker
from images.build import build
from images.matrix import matrix
from images.matrix.matrix import Cell

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Any fixed date before the test's own files: later times are clamped to it.
EPOCH_S = build.FALLBACK_EPOCH_S


def make_root(folder: Path, cell_id: str, text: str) -> tuple[Path, Cell]:
    """A project that holds one small cell: the toolchain of a real one, then `text`; and the context for both."""
    real = matrix.select(matrix.load(ROOT).cells, cell_id)[0]
    cell = replace(real, target=replace(real.target, name="small"))
    (folder / cell.folder).mkdir(parents=True)
    (folder / cell.folder / "Dockerfile").write_text(toolchain(real) + text, "utf-8")
    for part in ("images/locks", "images/patches"):
        shutil.copytree(ROOT / part, folder / part)
    (folder / "small").mkdir()
    for source in (*HERE.glob("*.c"), *HERE.glob("*.cu")):
        shutil.copyfile(source, folder / "small" / source.name)
    return folder, cell


def toolchain(cell: Cell) -> str:
    """Return the stages of the cell's Dockerfile up to nvcc. They are copied byte for byte to share the real cell's
    layers."""
    text = (ROOT / cell.folder / "Dockerfile").read_text("utf-8")
    return text[: text.index("\nFROM nvcc AS ") + 1]


def make_job(root: Path, cell: Cell, engine: docker.Engine) -> build.Job:
    """Return a job on the local base, whatever its digest."""
    return build.Job(
        cell=cell,
        base=build.choose_base(cell, cell.base.image, engine),
        origin=build.Origin(epoch_s=EPOCH_S, revision=None),
        build_id="0" * build.BUILD_ID_DIGITS,
        version="0",
        tag=f"appliance-test:{cell.id}",
        archive=root / build.ARCHIVES / f"{cell.id}.oci.tar",
        ca_bundle=ca_bundle(),
    )


def only_runtime(root: Path, job: build.Job, *, keeps_lists: bool = False) -> tuple[Path, build.Job]:
    """Cut the job down to one package on the base, which a test can fetch many times.

    The lists of the archive say which file a package is; a runtime stage removes them, a toolchain's does not.
    """
    path = root / job.dockerfile
    text = path.read_text("utf-8")
    base = text[: text.index("\nFROM base AS toolchain")]
    runtime = text[text.index("\nFROM base AS small-runtime") : text.index("\nCOPY --from=small-wheels")]
    if keeps_lists:
        runtime = runtime.replace(" /var/lib/apt/lists/*", "")
    path.write_text(f'{base}{runtime}\nLABEL io.appliance.cell="{job.cell.id}"\n', "utf-8")
    return root, job


def ca_bundle() -> Path | None:
    """Return the CA bundle that the Makefile would choose; None if no variable names one."""
    names = ("CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    return build.check_ca_bundle(next((Path(os.environ[name]) for name in names if os.environ.get(name)), None))
