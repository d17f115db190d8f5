"""Step 2: Cell -> {path: text}. Pure: no network, no clock, nothing but the cell and its template.

The same cell gives the same bytes. Rendered files are committed; `drift.py` writes them and holds them to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jinja2

from appliance.image_facts import ImageFacts, dump_facts
from images.errors import MatrixError
from images.matrix import LOCKS, Cell

TEMPLATES = Path("images/templates")
LAUNCHER = Path("images/rootfs/appliance")
PACKAGE = Path("appliance")
BUILD_ID_MARK = "@BUILD_ID@"
RENDER_COMMAND = "python -m images render"
NONE = "none"  # the label of a fact that this cell does not have; an absent label would read as "not known"


def render(cell: Cell, template: str) -> dict[Path, str]:
    """The files of one cell by their path below the project. MatrixError when the template asks for more."""
    return {
        cell.folder / "Dockerfile": _fill(cell, template),
        cell.folder / "Dockerfile.dockerignore": _dockerignore(cell),
        cell.folder / "image_facts.json": dump_facts(_facts(cell)),
    }


def load_template(root: Path, cell: Cell) -> str:
    path = TEMPLATES / f"{cell.template}.Dockerfile.j2"
    try:
        return (root / path).read_text("utf-8")
    except OSError as error:
        message = f"cell {cell.id}: its template cannot be read: {path}: {error.strerror}"
        raise MatrixError(message) from error


def inputs(cell: Cell) -> tuple[Path, ...]:
    """What the build may copy from the project: the context, the date and the build id are all made of these."""
    locks = ("appliance", cell.engine.backend_lock, cell.engine.source.lock)
    return (PACKAGE, LAUNCHER, *map(Path, cell.engine.patches), *(LOCKS / f"{name}.txt" for name in locks))


def _fill(cell: Cell, template: str) -> str:
    environment = jinja2.Environment(  # noqa: S701 - a Dockerfile, not HTML
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    try:
        return environment.from_string(template).render(_values(cell))
    except jinja2.TemplateError as error:
        message = f"cell {cell.id}: template {cell.template} cannot be filled: {error}"
        raise MatrixError(message, hint="the values are those of images/render.py") from error


def _values(cell: Cell) -> dict[str, str | int]:
    engine = cell.engine
    return {
        "base_reference": cell.base.reference,
        "backend_lock": engine.backend_lock,
        "build_command": f"python -m images build --only {cell.id}",
        "build_id_mark": BUILD_ID_MARK,
        "cpu_variants": ";".join(cell.cpu_variants),
        "engine_build": engine.build,
        "engine_commit_short": engine.commit_short,
        "facts_path": (cell.folder / "image_facts.json").as_posix(),
        "labels": _label_lines(static_labels(cell)),
        "patches": " ".join(engine.patches),
        "patch_names": " ".join(Path(patch).name for patch in engine.patches),
        "render_command": RENDER_COMMAND,
        "source_lock": engine.source.lock,
        "source_release": engine.source.release,
    }


def static_labels(cell: Cell) -> dict[str, str]:
    """The labels that the matrix alone decides; `build` adds those that depend on the moment and the base used."""
    engine = cell.engine
    return {
        "org.opencontainers.image.title": cell.tag,
        "org.opencontainers.image.description": f"{engine.title} {engine.version} for {_machine(cell)}",
        "org.opencontainers.image.licenses": f"Apache-2.0 AND {engine.license}",
        "org.opencontainers.image.base.name": cell.base.image,
        "org.opencontainers.image.base.digest": cell.base.digest or NONE,
        "io.appliance.cell": cell.id,
        "io.appliance.cuda": cell.target.cuda or NONE,
        "io.appliance.sm": cell.target.sm or NONE,
        "io.appliance.driver.floor.ptx": NONE,
        "io.appliance.driver.floor.sass": NONE,
        "io.appliance.engine": engine.name,
        "io.appliance.engine.commit": engine.commit,
        "io.appliance.engine.source-sha256": engine.source.sha256,
        "io.appliance.engine.version": engine.version,
        "io.appliance.ptx-jit": "no",
    }


def _label_lines(labels: Mapping[str, str]) -> str:
    """The body of one LABEL instruction; values come from the matrix and hold no quotes."""
    return " \\\n      ".join(f'{name}="{value}"' for name, value in labels.items())


def _machine(cell: Cell) -> str:
    return f"CUDA {cell.target.cuda}, SM {cell.target.sm}" if cell.target.cuda else "machines without a GPU"


def _dockerignore(cell: Cell) -> str:
    allowed = (*inputs(cell), cell.folder / "image_facts.json")
    lines = [
        f"# DO NOT EDIT. Made from build_matrix.yaml and images/render.py by: {RENDER_COMMAND}",
        "# The context is what the Dockerfile copies and nothing else.",
        "*",
        *(f"!{path.as_posix()}" for path in allowed),
        "**/__pycache__",
        "**/*.pyc",
    ]
    return "\n".join(lines) + "\n"


def _facts(cell: Cell) -> ImageFacts:
    engine = cell.engine
    return ImageFacts(
        build_id=BUILD_ID_MARK,
        cell=cell.id,
        engine=engine.name,
        engine_version=engine.version,
        engine_build=engine.build,
        engine_commit=engine.commit,
        cuda=cell.target.cuda,
        sm=(cell.target.sm,) if cell.target.sm else (),
        cpu_variants=cell.cpu_variants,
    )
