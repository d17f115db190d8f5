"""A substitute for a toolkit's image that cannot be had: `build --toolkit-image substitute`.

It is Debian's nvcc 12.4 in NVIDIA's layout, with the libraries of CUDA 12.8.1 from wheels. A build with it shows that
every line of the Dockerfile runs. It is another compiler's code, which its label and its proof say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from images import docker
from images.build import build
from images.build.build import BUILD_ID_LABEL, Options
from images.errors import BuildError, UsageError
from images.matrix import compat
from images.matrix.matrix import LOCKS, Cell, Matrix

WORD = "substitute"
CUDA, COMPILER = "12.8", "12.4"
TAG = f"appliance-toolkit:{CUDA}-{WORD}"
STAGES = Path("images/toolkits/substitute.Dockerfile")
LOCK = LOCKS / f"cuda-{CUDA}-libraries.txt"
NEXT_STAGE = "\nFROM nvcc AS "


def refuse(cell: Cell) -> None:
    """Raises UsageError for a cell that this toolkit cannot serve."""
    if cell.target.cuda != CUDA or not cell.engine.is_compiled:
        message = f"--toolkit-image {WORD} stands for CUDA {CUDA} alone: {cell.id}"
        raise UsageError(message, hint="12.4, 13.0 and 13.4 need no image; for 12.9 nothing is to be had")
    known = compat.facts().releases[COMPILER].forms
    unknown = [form for form in cell.forms if form not in known]
    if unknown:
        message = f"--toolkit-image {WORD} is CUDA {COMPILER}'s nvcc, which has no target sm_{unknown[0]}: {cell.id}"
        raise UsageError(message, hint="choose one of SM 75 to 90, or llama-cu130-sm100 and later with driver 580")
    if cell.platforms and "linux/amd64" not in cell.platforms:
        message = f"--toolkit-image {WORD} is for linux/amd64: {cell.id}"
        raise UsageError(message)


def find(cells: Iterable[Cell], engine: docker.Engine) -> str:
    """Returns the name of the image that was made earlier. Raises UsageError, or BuildError without one."""
    for cell in cells:
        refuse(cell)
    if engine.image(TAG) is None:
        message = f"the toolkit that --toolkit-image {WORD} stands for was not made here yet: {TAG}"
        raise BuildError(message, hint="the same command without --dry-run makes it first")
    return TAG


def dockerfile(root: Path, loaded: Matrix) -> tuple[Cell, str]:
    """Returns the nvcc stages of a cell with Debian's toolkit, byte for byte, and the stages that lay it out."""
    cell = next(each for each in loaded.cells if each.target.cuda == COMPILER)
    text = (root / cell.folder / "Dockerfile").read_text("utf-8")
    return cell, text[: text.index(NEXT_STAGE) + 1] + (root / STAGES).read_text("utf-8")


def make(root: Path, loaded: Matrix, cells: Iterable[Cell], options: Options, engine: docker.Engine) -> str:
    """Returns the name of the image, and builds it unless it is here. Raises UsageError, BuildError."""
    for cell in cells:
        refuse(cell)
    cell, text = dockerfile(root, loaded)
    folder = root / build.ARCHIVES
    folder.mkdir(parents=True, exist_ok=True)
    variant = folder / "toolkit.Dockerfile"
    base = build.choose_base(cell, "auto", engine)
    files = {"Dockerfile": text.encode(), LOCK.name: (root / LOCK).read_bytes()}
    wanted = build.build_id(files, base.identity)
    here = engine.image(TAG)
    if here and here.labels.get(BUILD_ID_LABEL) == wanted:
        return TAG
    variant.write_text(text, "utf-8")
    Path(f"{variant}.dockerignore").write_text(f"*\n!{LOCK.parent}\n!images/patches\n", "utf-8")
    try:
        own = replace(options, tag=TAG, toolkit_image=None, no_cache=False)
        plan = build.plan_job(root, cell, own, base)
        build.build(root, replace(plan, build_id=wanted, variant=variant, archive=folder / "toolkit.oci.tar"), engine)
    finally:
        variant.unlink()
        Path(f"{variant}.dockerignore").unlink()
    return TAG
