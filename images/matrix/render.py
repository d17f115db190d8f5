"""Step 2: Cell -> {path: text}. Pure: no network, no clock, nothing but the cell and its template.

The same cell gives the same bytes. Rendered files are committed; `drift.py` writes them and holds them to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType

import jinja2

from appliance.image_facts import ImageFacts, dump_facts
from images.errors import MatrixError
from images.matrix import compat, wheel_facts
from images.matrix.matrix import LOCKS, Cell, Toolkit, ToolkitForm

TEMPLATES = Path("images/templates")
LAUNCHER = Path("images/rootfs/appliance")
FIXED_ADDRESSES = Path("images/builder/fixed-addresses.c")  # for nvcc; the file tells why
WEB_LIBRARIES = Path("images/builder/web_libraries.py")
KERNEL_CHECKS = (Path("images/builder/kernel-check.cpp"), Path("images/builder/tile_config.py"))
PACKAGE = Path("appliance")
BUILD_ID_MARK = "@BUILD_ID@"
RENDER_COMMAND = "python -m images render"
TEMPLATE_FOLDER = Path(__file__).parent.parent / "templates"  # where `include` looks
# Where each form of toolkit keeps what the stages after nvcc look for. Debian puts its libraries among all others.
TOOLKIT_PLACES: Mapping[ToolkitForm, Mapping[str, str]] = {
    "wheels": {
        "cuda_home": "/opt/cuda",
        "cuda_libraries": "/opt/cuda/lib64",
        "toolkit_licenses": "wheels/*.dist-info/licenses/*",
    },
    "image": {
        "cuda_home": "/opt/cuda",
        "cuda_libraries": "/opt/cuda/lib64",
        "toolkit_licenses": "opt/cuda/NGC-DL-CONTAINER-LICENSE",
    },
    "debian": {
        "cuda_home": "/usr",
        "cuda_libraries": "/usr/lib/$(uname -m)-linux-gnu",
        "toolkit_licenses": " ".join(
            f"usr/share/doc/lib{name}12/copyright" for name in ("cudart", "cublas", "cublaslt")
        ),
    },
}
# The cost in the words of its CMake file: "performance for multiple CUDA GPUs will be suboptimal".
NCCL_OFF = "off: several GPUs exchange through llama.cpp's own code, which its authors call suboptimal"
NVRTC = "nvrtc, by which cuBLAS may compile kernels when it runs"
NVIDIA_LICENSE = "LicenseRef-NVIDIA-CUDA-EULA"
CPU_JIT = "TorchInductor"  # with g++; what torch.compile writes for a CPU is C++
OWN_LICENSE = "Apache-2.0"
GIVEN_WHEELS = "given-wheels"  # an empty stage that `build --wheels` replaces with a folder
TOOLKIT_SOURCE_LABEL = "io.appliance.cuda.toolkit"
NONE = "none"  # the label of a fact that this cell does not have; an absent label would read as "not known"


def render(cell: Cell, template: str) -> dict[Path, str]:
    """Returns the files of one cell by path. Raises MatrixError if the template asks for unknown values."""
    return {
        cell.folder / "Dockerfile": fill(cell, template),
        cell.folder / "Dockerfile.dockerignore": _dockerignore(cell),
        cell.folder / "image_facts.json": facts_text(cell),
    }


def load_template(root: Path, cell: Cell, kind: str = "Dockerfile") -> str:
    path = TEMPLATES / f"{cell.template}.{kind}.j2"
    try:
        return (root / path).read_text("utf-8")
    except OSError as error:
        message = f"cell {cell.id}: its template cannot be read: {path}: {error.strerror}"
        raise MatrixError(message) from error


def inputs(cell: Cell) -> tuple[Path, ...]:
    """Returns the paths that a build may copy from the project. Context, date and build id are made of them."""
    locks = ["appliance", *filter(None, (cell.engine.backend_lock,)), cell.engine.source.lock]
    patches = [*cell.engine.patches]
    if cell.toolkit and cell.toolkit.lock:
        locks.append(cell.toolkit.lock)
    if cell.toolkit and cell.toolkit.glibc_patch:
        patches.append(cell.toolkit.glibc_patch)
    is_nvcc_run = cell.toolkit is not None and cell.engine.is_compiled
    builder = ((FIXED_ADDRESSES,) if is_nvcc_run else ()) + (KERNEL_CHECKS if cell.engine.is_compiled else ())
    web = (WEB_LIBRARIES, LOCKS / "web.json")
    return (PACKAGE, LAUNCHER, *web, *builder, *map(Path, patches), *(LOCKS / f"{name}.txt" for name in locks))


def fill(cell: Cell, template: str, own: Mapping[str, str] = MappingProxyType({})) -> str:
    """Fills a template with the cell's values; `own` values are added or replace them."""
    try:
        return _compiled(template).render({**_values(cell), **own})
    except jinja2.TemplateError as error:
        message = f"cell {cell.id}: template {cell.template} cannot be filled: {error}"
        raise MatrixError(message, hint="the values are those of images/matrix/render.py") from error


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    """Compiles a template once: cells share it, and compiling takes longer than filling."""
    return _environment().from_string(template)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(  # noqa: S701 - a Dockerfile, not HTML
        loader=jinja2.FileSystemLoader(TEMPLATE_FOLDER),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _values(cell: Cell) -> dict[str, str | int]:
    engine = cell.engine
    return {
        **_engine_values(cell),
        "base_reference": cell.base.reference,
        "build_command": f"python -m images build --only {cell.id}",
        "build_id_mark": BUILD_ID_MARK,
        "caches": _cache_lines(engine.files.caches),
        "engine_binary": engine.files.binary,
        "engine_says": f" --kv-pairs '{';'.join(engine.fast_kv_pairs)}'"
        if cell.toolkit and engine.fast_kv_pairs
        else "",
        "facts_path": (cell.folder / "image_facts.json").as_posix(),
        "labels": _label_lines(static_labels(cell)),
        "python": compat.python_of(cell.base),
        "render_command": RENDER_COMMAND,
        "runtime_packages": engine.files.packages,
    }


def _engine_values(cell: Cell) -> dict[str, str | int]:
    if cell.engine.is_compiled:
        return _source_values(cell)
    return {**_wheel_values(cell), **(_cuda_wheel_values(cell) if cell.target.cuda else _cpu_wheel_values(cell))}


def _source_values(cell: Cell) -> dict[str, str | int]:
    """Returns the values of the stages that compile an engine."""
    engine = cell.engine
    variants = [";".join(engine.cpu_variants[platform].built) for platform in cell.platforms]
    own = {"backend_lock": engine.backend_lock, "engine_build": engine.build}
    return {
        **(_cuda_values(cell, cell.toolkit) if cell.toolkit else {}),
        **{name: value for name, value in own.items() if value is not None},
        "engine_title": engine.title,
        "compile_part": f"parts/{'compile-both' if len(variants) > 1 else 'compile'}.j2",
        "compile_stage": "compile",
        "compiled_stage": "compiled" if len(variants) > 1 else "compile",
        "cpu_variants": variants[0],
        "cpu_variants_arm64": variants[-1],
        "engine_commit_short": engine.commit_short,
        "patches": " ".join(engine.patches),
        "patch_names": " ".join(Path(patch).name for patch in engine.patches),
        "source_lock": engine.source.lock,
        "source_release": engine.source.release,
    }


def _wheel_values(cell: Cell) -> dict[str, str | int]:
    """Returns the values of the stages that install an engine."""
    engine = cell.engine
    return {
        "engine_lock": engine.source.lock,
        "engine_title": engine.title,
        "engine_version": engine.version,
        "given_wheels": GIVEN_WHEELS,
    }


def _cpu_wheel_values(cell: Cell) -> dict[str, str | int]:
    """Returns the files that PyPI lacks, in pip's form. They share an index, which is asked for nothing else."""
    files = cell.engine.index_files
    indexes = {file.index for file in files}
    if len(indexes) != 1:
        message = f"cell {cell.id} takes files of {len(indexes)} indexes, and its template asks one: {indexes}"
        raise MatrixError(message)
    return {
        "index_files": " ".join(file.file for file in files),
        "index_requirements": " ".join(f"'{file.requirement} --hash=sha256:{file.sha256}'" for file in files),
        "index_url": indexes.pop(),
    }


def _cuda_wheel_values(cell: Cell) -> dict[str, str | int]:
    engine = cell.engine
    if engine.cuda is None:
        message = f"cell {cell.id} is of an engine from CUDA wheels and has no CUDA"
        raise MatrixError(message)
    return {
        "engine_commit": engine.commit,
        "require_cuda": f"cuda>={engine.cuda.partition('.')[0]}.0",
        "require_driver": f"driver>={compat.required_driver(cell)}",
    }


def _cache_lines(caches: Mapping[str, str]) -> str:
    """Returns the body of one ENV instruction."""
    return " \\\n    ".join(f"{name}=/data/cache/${{APPLIANCE_BUILD_ID}}/{folder}" for name, folder in caches.items())


def _cuda_values(cell: Cell, toolkit: Toolkit) -> dict[str, str | int]:
    """Returns the values of a CUDA cell's stages, without those that its form of toolkit does not use."""
    floors = compat.cell_floors(cell)
    if floors is None or not cell.sm_forms:
        message = f"cell {cell.id} has a CUDA toolkit and no SM"
        raise MatrixError(message)
    release = compat.facts().releases[toolkit.cuda]
    own = {
        "glibc_patch": toolkit.glibc_patch,
        "glibc_patch_name": Path(toolkit.glibc_patch).name if toolkit.glibc_patch else None,
        "host_compiler": toolkit.host_compiler,
        "toolkit_lock": toolkit.lock,
        "toolkit_reference": toolkit.image.reference if toolkit.image else None,
    }
    return {
        **TOOLKIT_PLACES[toolkit.form],
        **{name: value for name, value in own.items() if value is not None},
        "cublas_jit": release.cublas_jit or "",
        "cuda": toolkit.cuda,
        "jit_libraries": " ".join(release.jit_libraries),
        "kv_pairs": ";".join(cell.engine.fast_kv_pairs),
        "cuda_architectures": ";".join(f"{form}-real" for form in cell.forms),  # `real`: machine code and no PTX
        # Any driver of the same CUDA major runs machine code; the exact floor is the other condition's.
        "require_cuda": f"cuda>={toolkit.cuda.partition('.')[0]}.0",
        "require_driver": f"driver>={compat.required_driver(cell)}",
        "toolkit_release": toolkit.release,
    }


def static_labels(cell: Cell) -> dict[str, str]:
    """Returns the labels of the matrix; `build` adds those of the moment and the base."""
    engine, floors = cell.engine, compat.cell_floors(cell)
    licenses = dict.fromkeys((OWN_LICENSE, engine.license, *((NVIDIA_LICENSE,) if floors else ())))
    return {
        "org.opencontainers.image.title": cell.tag,
        "org.opencontainers.image.description": f"{engine.title} {engine.version} for {_machine(cell)}",
        "org.opencontainers.image.licenses": " AND ".join(licenses),
        "org.opencontainers.image.base.name": cell.base.image,
        "org.opencontainers.image.base.digest": cell.base.digest or NONE,
        "io.appliance.cell": cell.id,
        "io.appliance.cuda": cell.target.cuda or NONE,
        "io.appliance.cuda.gencode": cell.gencode or NONE,
        TOOLKIT_SOURCE_LABEL: _toolkit_source(cell),
        "io.appliance.sm": ", ".join(cell.sms) or NONE,
        "io.appliance.driver.floor.ptx": floors.ptx if floors else NONE,
        "io.appliance.driver.floor.sass": floors.sass if floors else NONE,
        "io.appliance.engine": engine.name,
        "io.appliance.engine.commit": engine.commit or NONE,
        "io.appliance.engine.source-sha256": engine.source.sha256 or _wheel_hashes(cell),
        "io.appliance.engine.version": engine.version,
        **(_compiled_labels(cell) if engine.is_compiled else _wheel_labels(cell)),
    }


def _compiled_labels(cell: Cell) -> dict[str, str]:
    unproven = [
        name
        for platform in cell.platforms
        for name in cell.engine.cpu_variants[platform].built
        if name not in cell.engine.cpu_variants[platform].emulated
    ]
    return {
        # Only a CPU that has their instructions can execute them; `verify` says which of them its own machine did.
        "io.appliance.cpu-variants.unproven": ", ".join(unproven) or NONE,
        "io.appliance.jit": NVRTC if compat.jit_libraries(cell) else NONE,
        "io.appliance.nccl": NCCL_OFF if cell.target.cuda else NONE,
        "io.appliance.ptx-jit": "no",
    }


def _wheel_labels(cell: Cell) -> dict[str, str]:
    """Returns the labels of wheels. `partial`: some kernels lack machine code for a chip; `jit` fills in."""
    if not cell.sm_forms:
        return {
            "io.appliance.engine.publisher": f"third party: {cell.engine.publisher}",
            "io.appliance.jit": CPU_JIT,
            "io.appliance.nccl": NONE,
            "io.appliance.ptx-jit": "no",
        }
    waiting: dict[str, list[str]] = {}
    for form in cell.sm_forms:
        if form.ptx:
            waiting.setdefault(", ".join(form.ptx), []).append(form.sm)
    jits = "; ".join(f"SM {', '.join(sms)}: {libraries}" for libraries, sms in waiting.items())
    return {
        "io.appliance.jit": ", ".join(jit.name for jit in wheel_facts.facts(cell.engine.name).jits),
        "io.appliance.native": "partial",
        "io.appliance.nccl": "on",
        "io.appliance.ptx-jit": f"yes: {jits}" if jits else "no",
    }


def _toolkit_source(cell: Cell) -> str:
    if cell.engine.cuda:
        return f"CUDA {cell.engine.cuda} from wheels, {cell.engine.source.lock_file}"
    return cell.toolkit.source if cell.toolkit else NONE


def _wheel_hashes(cell: Cell) -> str:
    """Returns each platform's hash in one value, since the labels are the same on every platform."""
    return ", ".join(f"{platform} {cell.engine.source.wheels[platform]}" for platform in cell.platforms)


def _label_lines(labels: Mapping[str, str]) -> str:
    """Returns the body of one LABEL instruction; values come from the matrix and hold no quotes."""
    return " \\\n      ".join(f'{name}="{value}"' for name, value in labels.items())


def _machine(cell: Cell) -> str:
    return f"CUDA {cell.target.cuda}, SM {', '.join(cell.sms)}" if cell.target.cuda else "machines without a GPU"


def _dockerignore(cell: Cell) -> str:
    allowed = (*inputs(cell), cell.folder / "image_facts.json")
    lines = [
        f"# DO NOT EDIT. Made from build_matrix.yaml and images/matrix/render.py by: {RENDER_COMMAND}",
        "# The context is what the Dockerfile copies and nothing else.",
        "*",
        *(f"!{path.as_posix()}" for path in allowed),
        "**/__pycache__",
        "**/*.pyc",
    ]
    return "\n".join(lines) + "\n"


def facts_text(cell: Cell) -> str:
    """The image facts of a cell, with a mark for the build id, which a build knows."""
    return dump_facts(_facts(cell))


def _facts(cell: Cell) -> ImageFacts:
    engine, floors = cell.engine, compat.cell_floors(cell)
    return ImageFacts(
        build_id=BUILD_ID_MARK,
        cell=cell.id,
        engine=engine.name,
        engine_version=engine.version,
        engine_build=engine.build or 0,  # releases without such a number
        engine_commit=engine.commit,
        cuda=cell.target.cuda,
        sm=cell.forms,  # the forms: a 120a runs on no other chip
        driver_floor_sass=floors.sass if floors else None,
        driver_floor_ptx=floors.ptx if floors else None,
        cpu_variants=cell.cpu_variants,
    )
