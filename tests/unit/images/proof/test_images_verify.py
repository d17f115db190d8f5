"""Every check passes on a sound image and fails on one planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import CpuVariant, EngineFacts, ImageFacts, dump_facts, dump_recipe, parse_image_facts
from images import docker
from images.build import build, model
from images.errors import BuildError, VerificationError
from images.layers import integrity
from images.layers.tree import Entry, Tree
from images.matrix import matrix, render
from images.matrix.matrix import Cell
from images.pins import debian
from images.pins.web_lock import WebFile, WebLibrary
from images.proof import configured, cpu_kernels, environment, gate, libraries, licenses, verify
from images.proof.verify import Check, ImageSnapshot
from images.recipes import recipe

PROJECT = Path(__file__).parents[4]
BUILD_ID = "b" * 32
APACHE = "usr/share/common-licenses/Apache-2.0"
CODE = b"\xa7\r\r\n\x01\x00\x00\x00" + b"h" * 8
TIMED_CODE = b"\xa7\r\r\n\x00\x00\x00\x00" + b"t" * 8
CERTIFICATE = b"MIIBcompany"
UPLOT = WebLibrary(
    name="uplot",
    version="1.6.32",
    license="MIT",
    url="https://registry.npmjs.org/uplot/-/uplot-1.6.32.tgz",
    integrity="sha512-x",
    license_file="LICENSE",
    files=(WebFile(path="dist/uPlot.min.css", name="uPlot.min.css", sha256="0" * 64),),
)
HEALTH = {
    "Test": ["CMD", "appliance", "health"],
    "Interval": 30 * 10**9,  # nanoseconds, as the engine tells them
    "Timeout": 5 * 10**9,
    "StartPeriod": 1800 * 10**9,
    "StartInterval": 5 * 10**9,
    "Retries": 3,
}


@pytest.fixture
def sound(cell: Cell) -> ImageSnapshot:
    """Return the snapshot of an image without any fault."""
    return ImageSnapshot(
        cell=cell,
        platform="linux/amd64",
        config=_config(cell),
        tree=_tree(cell),
        version=docker.Finished(code=0, lines=("appliance: 0.1.0",)),
        engine_version=docker.Finished(code=0, lines=("version: 0.5.0-dev (build 11312, commit 0c1e57098)",)),
        linked=libraries.Answers(asked=1),
        secrets=frozenset({CERTIFICATE, b"MIIBpublic"}),
        debian=LOCK,
        asked="tini",
        build_id=BUILD_ID,
        environment=_environment(cell),
        configured=configured.given(_dockerfile(cell)),
        cpu_kernels=_executed("ok"),
        web=(UPLOT,),
    )


def _dockerfile(cell: Cell) -> str:
    return render.render(cell, render.load_template(PROJECT, cell))[cell.folder / "Dockerfile"]


def _environment(cell: Cell) -> dict[str, str]:
    return environment.given(_dockerfile(cell), (), {"APPLIANCE_BUILD_ID": BUILD_ID})


def _executed(status: cpu_kernels.Status) -> cpu_kernels.Report:
    verdict = cpu_kernels.Verdict(
        variant="x64",
        status=status,
        cases=1,
        worst_nmse=0.0,
        limit=5e-4,
        at="MUL_MAT q8_0 n=1 CPU",
        signal="SIGILL" if status == "died" else None,
        is_compared=True,
    )
    return cpu_kernels.Report(built=("x64",), verdicts=(verdict,))


def test_a_sound_image_passes_every_check(sound: ImageSnapshot) -> None:
    assert [check for check in (check(sound) for check in verify.CHECKS) if not check.ok] == []


def test_a_model_image_of_this_tree_passes_every_check(sound: ImageSnapshot) -> None:
    snapshot = _model(sound)
    assert [check for check in (check(snapshot) for check in verify.CHECKS) if not check.ok] == []


def test_every_check_has_a_planted_fault() -> None:
    assert {check for check, *_ in FAULTS} == set(verify.CHECKS)


def test_links_of_a_sound_image_are_in_order(sound: ImageSnapshot) -> None:
    """The links are those of an engine's libraries and of the compiler that cuBLAS opens. Debian's links are not
    judged."""
    for name in ("libllama.so.0.5.0", "libnvrtc.so.13"):
        sound.tree.files[f"opt/llama/{name}"] = _entry(f"opt/llama/{name}")
    _file("opt/vllm/lib/nvidia/cu13/lib", kind="folder")(sound)
    for path, target in {
        "opt/llama/libllama.so": "libllama.so.0",
        "opt/llama/libllama.so.0": "libllama.so.0.5.0",
        "usr/lib/x86_64-linux-gnu/libnvrtc.so.13": "/opt/llama/libnvrtc.so.13",
        "opt/vllm/lib/nvidia/cu13/lib64": "lib",
        "usr/bin/python3": "python3.11",
    }.items():
        _link(path, target)(sound)
    assert verify.check_links(sound).ok


def test_every_dockerfile_says_what_is_expected_of_its_image() -> None:
    for cell in matrix.load(PROJECT).cells:
        found = configured.given(_dockerfile(cell))
        assert (found["User"], found["WorkingDir"], found["Volumes"]) == ("appliance", "/data", {"/data": {}})
        assert found["Healthcheck"] == HEALTH


def test_an_overridden_base_may_name_itself(sound: ImageSnapshot) -> None:
    labels = {**sound.labels, "io.appliance.base-override": "x", "org.opencontainers.image.base.digest": "sha256:1"}
    assert verify.check_labels(_config_with(sound, Labels=labels)).ok


def test_an_overridden_toolkit_is_named_and_not_the_pinned_one(sound: ImageSnapshot) -> None:
    labels = {**sound.labels, "io.appliance.toolkit-override": "x sha256:1"}
    assert "io.appliance.cuda.toolkit" in verify.check_labels(_config_with(sound, Labels=labels)).detail
    labels["io.appliance.cuda.toolkit"] = "x sha256:1"
    assert verify.check_labels(_config_with(sound, Labels=labels)).ok


def test_an_image_of_a_temporary_lock_is_held_to_that_and_says_so(sound: ImageSnapshot) -> None:
    check = verify.check_debian(_label("io.appliance.reproducible", "no")(sound))
    assert (check.ok, check.detail) == (
        True,
        "of a temporary lock, 2026-07-11T10:16:37Z, since the project's was not met: 2 installed, none moved",
    )


def test_a_cuda_image_passes_with_native_kernels(sound: ImageSnapshot) -> None:
    snapshot = _cuda(sound)
    assert verify.check_kernels(snapshot).ok
    assert "1 of 1 kernels run natively on SM 90" in verify.check_kernels(snapshot).detail
    assert verify.check_gpu_environment(snapshot).ok
    assert verify.check_tools(snapshot).ok
    assert verify.check_licenses(_file("opt/appliance/licenses/nvidia-cublas/License.txt")(snapshot)).ok


def test_the_compiler_of_cublas_is_there_and_compiles(sound: ImageSnapshot) -> None:
    assert verify.check_jit(sound).detail == "it opens no compiler"
    found = verify.check_jit(_compiling("SM 90")(sound))
    assert (found.ok, found.detail) == (True, "libnvrtc.so.13: SM 90")


def test_vllm_may_keep_what_it_compiles_with(sound: ImageSnapshot) -> None:
    assert verify.check_tools(_vllm(sound)).ok


def test_a_vllm_image_is_held_to_its_own_engine(sound: ImageSnapshot) -> None:
    snapshot = _vllm(sound)
    assert verify.check_engine_version(snapshot).ok
    assert verify.check_engine_facts(snapshot).ok
    assert verify.check_licenses(snapshot).ok
    silent = _file("opt/vllm/lib/loguru-0.7.3.dist-info/METADATA")(snapshot)
    assert verify.check_licenses(silent).detail == "engine and 4 wheels; none is to be had of loguru (MIT)"
    assert verify.check_byte_code(snapshot).ok
    variants = [path for path in snapshot.tree.files if verify.VARIANT.match(path)]
    for path in variants:
        snapshot = _without(path)(snapshot)
    assert verify.check_cpu_variants(snapshot).ok
    assert variants


def test_of_vllm_its_own_libraries_are_judged(project: Path) -> None:
    """What its lock brings beside it is listed in images/gaps, and 8 GB of it."""
    pattern = VLLM_CELL.engine.files.gpu_files
    assert pattern.match("opt/vllm/lib/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so")
    assert not pattern.match("opt/vllm/lib/torch/lib/libtorch_cuda.so")
    known = gate.load_known_gaps(project / "images/gaps/vllm-cu130-sm90.yaml", "linux/amd64")
    assert all(pattern.match(f"opt/vllm/lib/vllm/{count.library}") for count in known.counts)


def test_a_foreign_platform_is_refused_in_words(cell: Cell) -> None:
    own = verify.own_platform(cell, "x", engine_platform="linux/arm64", image_platform="linux/arm64")
    assert own == "linux/arm64"
    cell = replace(cell, platforms=("linux/amd64",))
    with pytest.raises(BuildError, match="the engine is linux/arm64") as caught:
        verify.own_platform(cell, "x", engine_platform="linux/arm64", image_platform="linux/arm64")
    assert caught.value.exit_code == 60
    assert caught.value.hint == "the cell is for linux/amd64"
    with pytest.raises(BuildError) as caught:
        verify.own_platform(cell, "x", engine_platform="linux/amd64", image_platform="linux/arm64")
    assert caught.value.hint == "the image x is for linux/arm64"


class Holding(docker.Engine):
    """An engine with the image of one cell, and without a program behind it."""

    def image(self, reference: str) -> docker.Image | None:
        here = reference == "appliance:llama-cpu"
        return docker.Image(id="sha256:1", tags=(reference,), digests=(), config={}) if here else None


def test_images_that_are_not_here_are_all_named_first(project: Path, cell: Cell) -> None:
    cells = matrix.select(matrix.load(project).cells, "llama-cu129-*")
    verify.refuse_absent([cell], Holding(), image=None)
    with pytest.raises(VerificationError, match="2 cells have no image here: llama-cu129-sm103, llama-cu129-sm121"):
        verify.refuse_absent([cell, *cells], Holding(), image=None)
    with pytest.raises(VerificationError, match="cell llama-cpu has no image here: x:1") as caught:
        verify.refuse_absent([cell], Holding(), image="x:1")
    assert caught.value.hint == "python -m images build --only llama-cpu"


Fault = Callable[[ImageSnapshot], ImageSnapshot]


def _config_with(snapshot: ImageSnapshot, **values: object) -> ImageSnapshot:
    return replace(snapshot, config={**snapshot.config, **values})


def _variable(snapshot: ImageSnapshot, name: str, value: str | None) -> ImageSnapshot:
    """The image with this variable as it says, or without it."""
    others = [line for line in snapshot.config["Env"] if line.partition("=")[0] != name]
    return _config_with(snapshot, Env=others if value is None else [*others, f"{name}={value}"])


def _label(name: str, value: str) -> Fault:
    return lambda snapshot: _config_with(snapshot, Labels={**snapshot.labels, name: value})


def _file(path: str, **values: Any) -> Fault:
    def plant(snapshot: ImageSnapshot) -> ImageSnapshot:
        snapshot.tree.files[path] = _entry(path, **values)
        return snapshot

    return plant


def _link(path: str, target: str) -> Fault:
    return _file(path, kind="link", target=target)


def _without(path: str) -> Fault:
    def plant(snapshot: ImageSnapshot) -> ImageSnapshot:
        del snapshot.tree.files[path]
        return snapshot

    return plant


def _leaked(snapshot: ImageSnapshot) -> ImageSnapshot:
    snapshot.tree.certificates["layer 2: etc/ca.pem"] = {CERTIFICATE}
    return snapshot


def _private_key(snapshot: ImageSnapshot) -> ImageSnapshot:
    snapshot.tree.private_keys.append("layer 1: root/id_rsa")
    return snapshot


def _secret(snapshot: ImageSnapshot, place: str) -> ImageSnapshot:
    snapshot.tree.secrets.append(place)
    return snapshot


def _history(snapshot: ImageSnapshot, command: str) -> ImageSnapshot:
    snapshot.tree.configuration = json.dumps({"history": [{"created_by": command}]}).encode()
    return snapshot


def _engine_says(line: str, code: int = 0) -> Fault:
    return lambda snapshot: replace(snapshot, engine_version=docker.Finished(code=code, lines=(line,)))


def _start_fails(snapshot: ImageSnapshot) -> ImageSnapshot:
    return replace(snapshot, version=docker.Finished(code=1, lines=("PermissionError: /data/cache",)))


def _cuda(snapshot: ImageSnapshot, *kernels: gate.Kernel, path: str = "opt/llama/libggml-cuda.so") -> ImageSnapshot:
    """The same image as a cell for SM 90, with one kernel that runs there unless others are given."""
    target = replace(snapshot.cell.target, name="cu130-sm90", cuda="13.0", sms=("90",))
    forms = (matrix.SmForm(sm="90", form="90", why="a test's"),)
    good = gate.Kernel(name="good", sass=("90",), ptx=())
    toolkit = gate.Library(path="opt/llama/libcublas.so.13", targets={"90": 1})
    report = gate.judge([gate.Library(path=path, kernels=kernels or (good,)), toolkit], 90)
    environment = ["PATH=/usr/bin", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"]
    cuda = replace(snapshot, cell=replace(snapshot.cell, target=target, sm_forms=forms), kernels=(report,))
    return _config_with(_file("opt/llama/libcublas.so.13", machine=62)(cuda), Env=environment)


def _kernel(*, sass: tuple[str, ...] = (), ptx: tuple[str, ...] = ()) -> Fault:
    return lambda snapshot: _cuda(snapshot, gate.Kernel(name="mul_mat", sass=sass, ptx=ptx))


def _compiling(*lines: str, code: int = 0, without: str = "") -> Fault:
    """Make a cell of CUDA 13.0 in which the compiler that cuBLAS opens printed `lines`; the file `without` is
    missing."""

    def plant(snapshot: ImageSnapshot) -> ImageSnapshot:
        cell = matrix.select(matrix.load(Path(__file__).parents[4]).cells, "llama-cu130-sm90")[0]
        for name in {"libnvrtc.so.13", "libnvrtc-builtins.so.13.0"} - {without}:
            snapshot = _file(f"opt/llama/{name}")(snapshot)
        return replace(snapshot, cell=cell, jit=docker.Finished(code=code, lines=lines))

    return plant


def _for_two(snapshot: ImageSnapshot) -> ImageSnapshot:
    """A cell of two chips, and a kernel that was compiled for the first alone."""
    library = gate.Library(
        path="opt/llama/libggml-cuda.so", kernels=(gate.Kernel(name="mul_mat", sass=("86",), ptx=()),)
    )
    cell = matrix.select(matrix.load(Path(__file__).parents[4]).cells, "llama-cu130-sm86-sm120")[0]
    reports = tuple(gate.judge([library], int(sm)) for sm in cell.sms)
    assert not reports[0].faults
    return replace(_cuda(snapshot), cell=cell, kernels=reports)


def _vllm(snapshot: ImageSnapshot) -> ImageSnapshot:
    for path in (
        "usr/bin/gcc",
        "usr/bin/x86_64-linux-gnu-ld",
        "usr/include/stdio.h",
        "usr/include/python3.11/Python.h",
    ):
        snapshot = _file(path)(snapshot)
    for path in ("triton/backends/nvidia/bin/ptxas", "nvidia/cu13/bin/nvcc", "nvidia/cu13/include/cuda.h", "bin/ninja"):
        snapshot = _file(f"opt/vllm/lib/{path}")(snapshot)
    for path in ("nvidia/cu13/lib/libcublas.so.13", "nvidia_cublas-13.1.1.3.dist-info/licenses/License.txt"):
        snapshot = _file(f"opt/vllm/lib/{path}")(snapshot)
    snapshot = _file("opt/appliance/licenses/vLLM/LICENSE")(snapshot)
    snapshot = _file(f"{VLLM}/engine.py")(snapshot)
    snapshot = _file(f"{VLLM}/__pycache__/engine.cpython-311.pyc", content=CODE)(snapshot)
    facts = EngineFacts(version="0.33.0", build=0, commit="4ba787ec9", flags=("--uds",), kv_types=("auto",))
    snapshot = _file(ENGINE_PATH, content=dump_facts(facts).encode())(snapshot)
    said = docker.Finished(code=0, lines=("WARNING: no GPU", "0.33.0"))
    return replace(snapshot, cell=VLLM_CELL, engine_version=said)


def _linked(answers: libraries.Answers | str) -> Fault:
    return lambda snapshot: replace(snapshot, linked=answers)


def _vllm_without(path: str) -> Fault:
    return lambda snapshot: _without(path)(_vllm(snapshot))


def _vllm_with(path: str) -> Fault:
    return lambda snapshot: _file(path)(_vllm(snapshot))


def _vllm_says(*lines: str) -> Fault:
    return lambda snapshot: replace(_vllm(snapshot), engine_version=docker.Finished(code=0, lines=lines))


def _wrong_floor(snapshot: ImageSnapshot) -> ImageSnapshot:
    return _label("io.appliance.driver.floor.sass", "580")(snapshot)


def _foreign_form(snapshot: ImageSnapshot) -> ImageSnapshot:
    facts = parse_image_facts(snapshot.tree.files[IMAGE_PATH].content.decode())
    return _file(IMAGE_PATH, content=dump_facts(replace(facts, sm=("120a",))).encode())(snapshot)


def _model(snapshot: ImageSnapshot, text: str | None = None) -> ImageSnapshot:
    """The image with the recipe of the demo."""
    row = recipe.load(PROJECT, "demo")
    carried = dump_recipe(recipe.carried(row, row.default_rung, is_baked=False)) if text is None else text
    facts = parse_image_facts(snapshot.tree.files[IMAGE_PATH].content.decode())
    named = _file(IMAGE_PATH, content=dump_facts(replace(facts, recipe="demo")).encode())(snapshot)
    labelled = _label(model.TITLE_LABEL, "appliance/demo:llama-cpu")(_label("io.appliance.recipe", "demo")(named))
    return replace(_file(RECIPE, content=carried.encode())(labelled), recipe=row)


RECIPE = "opt/appliance/recipe.json"
VARIANTS = ("x64", "haswell", "alderlake", "skylakex", "cascadelake", "icelake", "zen4", "sapphirerapids")
ENGINE_FACTS = EngineFacts(
    version="0.5.0-dev",
    build=11312,
    commit="0c1e57098",
    flags=("--help",),
    kv_types=("f16",),
    cpu_variants=tuple(CpuVariant(name=name, isa=()) for name in VARIANTS),
)
ENGINE_PATH = "opt/appliance/engine_facts.json"
IMAGE_PATH = "opt/appliance/image_facts.json"
PASSWD = b"root:x:0:0:root:/root:/bin/bash\nappliance:x:1000:0::/data:/usr/sbin/nologin\n"
STATUS = "Package: libc6\nVersion: 2\n"
LOCK = debian.Lock(
    image="debian:bookworm-slim",
    base=f"sha256:{'0' * 64}",
    platform="linux/amd64",
    archive_date="2026-07-11T10:16:37Z",
    snapshot="20260711T141637Z",
    suites=["bookworm"],
    parts={"tini": {"tini": debian.Locked(version="1", architecture="amd64", sha256="0" * 64)}},
)


def _status(tini: str) -> bytes:
    return f"{STATUS}\nPackage: tini\nVersion: {tini}\n".encode()


VLLM = "opt/vllm/lib/vllm"
VLLM_CELL = matrix.select(matrix.load(Path(__file__).parents[4]).cells, "vllm-cu130")[0]
LIBRARY = "opt/appliance/lib/appliance"
PYNVML = "opt/appliance/lib/pynvml.py"
WHEEL = "opt/appliance/lib/h11-0.16.0.dist-info"


def _unlisted(snapshot: ImageSnapshot) -> ImageSnapshot:
    """Plant a package that no lock names. It is judged only on the base for which the lock was made."""
    assert snapshot.debian
    content = _status("1") + b"\nPackage: curl\nVersion: 7\n"
    snapshot.tree.files[verify.STATUS] = _entry(verify.STATUS, content=content)
    base = snapshot.labels["org.opencontainers.image.base.digest"]
    return replace(snapshot, debian=snapshot.debian.model_copy(update={"base": base}))


def _unlocked(snapshot: ImageSnapshot) -> ImageSnapshot:
    return replace(_label("io.appliance.reproducible", "no")(snapshot), debian=None)


STUB = "opt/vllm/lib/nvidia_cutlass_dsl/cu13/lib/stubs/aarch64-unknown-linux-gnu/libcute_dsl_runtime.so"
FAULTS: list[tuple[Callable[[ImageSnapshot], Check], Fault, str]] = [
    (verify.check_start, _start_fails, "PermissionError: /data/cache"),
    (verify.check_engine_version, _engine_says("version: 0 (build 0, commit unknown)"), "build 0, commit unknown"),
    (verify.check_engine_version, _engine_says("error while loading shared libraries", 127), "no version line"),
    (verify.check_cpu_variants, _without("opt/llama/libggml-cpu-zen4.so"), "missing: zen4"),
    (verify.check_cpu_variants, _file("opt/llama/libggml-cpu-sse42.so"), "not listed: sse42"),
    (verify.check_cpu_kernels, lambda sound: replace(sound, cpu_kernels=_executed("died")), "x64: died of SIGILL"),
    (verify.check_cpu_kernels, lambda sound: replace(sound, cpu_kernels=None), "nothing was executed"),
    (verify.check_kernels, _kernel(sass=("80",)), "opt/llama/libggml-cuda.so: mul_mat has only sm_80"),
    (verify.check_kernels, _kernel(ptx=("90",)), "mul_mat has only PTX of compute_90"),
    (verify.check_kernels, lambda e: replace(_cuda(e), kernels=(gate.judge([], 90),)), "no kernel in any of 0 files"),
    (verify.check_kernels, lambda e: replace(_cuda(e), kernels=()), "no kernel was judged"),
    (verify.check_web, _without("opt/appliance/web/uPlot.min.css"), "missing: opt/appliance/web/uPlot.min.css"),
    (verify.check_web, _without("opt/appliance/licenses/uplot/LICENSE"), "missing: opt/appliance/licenses/uplot/LIC"),
    (verify.check_web, _file("opt/appliance/web/x.js"), "in no lock: opt/appliance/web/x.js"),
    (verify.check_web, _file("opt/appliance/web/uPlot.min.css", sha256="1" * 64), "changed: opt/appliance/web/uPlot"),
    (verify.check_web, lambda sound: replace(sound, web=()), "in no lock"),
    (verify.check_jit, _compiling("SM 90: failed to open libnvrtc-builtins", code=1), "failed to open libnvrtc-b"),
    (verify.check_jit, _compiling("SM 90", without="libnvrtc-builtins.so.13.0"), "missing: libnvrtc-builtins.so.13.0"),
    (verify.check_jit, lambda e: replace(_compiling()(e), jit=None), "it was not tried"),
    (verify.check_kernels, lambda e: _for_two(e), "SM 120: opt/llama/libggml-cuda.so: mul_mat has only sm_86"),
    (verify.check_kernels, _file("opt/llama/libggml-cuda.so"), "no GPU in this cell: opt/llama/libggml-cuda.so"),
    (verify.check_platform, _file("opt/llama/libllama.so", machine=183), "opt/llama/libllama.so (ELF machine 183)"),
    (verify.check_platform, _without("opt/llama/llama-server"), "0 ELF files"),
    (verify.check_platform, _file("opt/stubs/aarch64-linux-gnu/libx.so", machine=183), "(ELF machine 183)"),
    (verify.check_platform, _file(STUB.replace("aarch64", "x86_64"), machine=183), "(ELF machine 183)"),
    (
        verify.check_platform,
        lambda sound: _without("opt/llama/llama-server")(_file(STUB, machine=183)(sound)),
        "0 ELF files, 1 stubs",
    ),
    (verify.check_libraries, _linked("the image's loader cannot be asked: exit code 3"), "exit code 3"),
    (verify.check_libraries, _linked(libraries.Answers(asked=0)), "asked of 0 files, and the layers have 1"),
    (
        verify.check_libraries,
        _linked(libraries.Answers(asked=1, unresolved=(libraries.Unresolved(file="/opt/a", library="libgomp.so.1"),))),
        "libgomp.so.1, needed by /opt/a",
    ),
    (verify.check_no_driver, _file("opt/llama/libcuda.so.1"), "opt/llama/libcuda.so.1"),
    (verify.check_no_driver, _file("usr/lib/libcuda.so", kind="link"), "usr/lib/libcuda.so"),
    (verify.check_no_driver, _file("usr/lib/libnvidia-ml.so.580.65.06"), "libnvidia-ml"),
    (verify.check_tools, _file("usr/bin/x86_64-linux-gnu-gcc-12"), "x86_64-linux-gnu-gcc-12"),
    (verify.check_tools, _file("usr/bin/pip3"), "usr/bin/pip3"),
    (verify.check_tools, _file("usr/bin/g++", kind="link"), "usr/bin/g++"),
    (verify.check_tools, _file("usr/lib/python3/dist-packages/pip/__init__.py"), "dist-packages/pip"),
    (verify.check_tools, _file("opt/cuda/bin/nvcc"), "tools: opt/cuda/bin/nvcc"),
    (verify.check_tools, _file("opt/cuda/bin/ptxas"), "tools: opt/cuda/bin/ptxas"),
    (verify.check_tools, _file("opt/cuda/nvvm/bin/cicc"), "tools: opt/cuda/nvvm/bin/cicc"),
    (verify.check_tools, _file("opt/llama/libcudart_static.a"), "tools: opt/llama/libcudart_static.a"),
    (verify.check_tools, _file("opt/cuda/include/cuda_runtime.h"), "headers: opt/cuda/include/cuda_runtime.h"),
    (verify.check_tools, _vllm_without("usr/bin/gcc"), "missing: ^usr/bin/gcc$"),
    (verify.check_tools, _vllm_without("usr/include/python3.11/Python.h"), r"/Python\.h$"),
    (verify.check_tools, _vllm_with("usr/local/cuda/bin/nvcc"), "tools: usr/local/cuda/bin/nvcc"),
    (verify.check_tools, _vllm_with("usr/bin/cmake"), "tools: usr/bin/cmake"),
    (verify.check_tools, _vllm_with("usr/local/cuda/include/cuda.h"), "headers: usr/local/cuda/include/cuda.h"),
    (verify.check_engine_version, _vllm_says("0.33.1"), "0.33.1; expected 0.33.0"),
    (verify.check_engine_version, _vllm_says(), "no version line; expected 0.33.0"),
    (verify.check_cpu_variants, _vllm, "not listed: "),
    (verify.check_byte_code, _vllm_without(f"{VLLM}/__pycache__/engine.cpython-311.pyc"), f"{VLLM}/engine.py"),
    (
        verify.check_licenses,
        _vllm_without("opt/appliance/licenses/vLLM/LICENSE"),
        "missing: opt/appliance/licenses/vLLM",
    ),
    (verify.check_no_driver, _vllm_with("opt/vllm/lib/nvidia/cu13/lib/stubs/libcuda.so"), "stubs/libcuda.so"),
    (verify.check_licenses, _without("opt/appliance/licenses/llama.cpp/LICENSE"), "missing: opt/appliance/licenses/"),
    *(
        (verify.check_licenses, _without(path), f"missing: {path}")
        for name in ("appliance", "llama.cpp")
        for path in licenses.components()[name].paths
    ),
    (verify.check_licenses, _without(f"{WHEEL}/licenses/LICENSE"), "missing: h11-0.16.0.dist-info"),
    (verify.check_licenses, _without(PYNVML), "missing: nvidia_ml_py-13.615.71.dist-info"),
    (verify.check_licenses, _cuda, "missing: CUDA's libraries"),
    (verify.check_licenses, _vllm_with("opt/vllm/lib/new-1.0.dist-info/METADATA"), "missing: new-1.0.dist-info"),
    (
        verify.check_licenses,
        _vllm_with("opt/vllm/lib/loguru-0.7.3.dist-info/LICENSE"),
        "has a text by now, and is listed as without: loguru (MIT)",
    ),
    (verify.check_gpu_environment, lambda e: _config_with(_cuda(e), Env=[]), "NVIDIA_DRIVER_CAPABILITIES=None"),
    (verify.check_gpu_environment, lambda e: _config_with(e, Env=["NVIDIA_DRIVER_CAPABILITIES=all"]), "expected None"),
    (verify.check_gpu_environment, lambda e: _config_with(e, Env=["NVIDIA_VISIBLE_DEVICES=all"]), "DEVICES=all"),
    (
        verify.check_environment,
        lambda e: _variable(e, "PATH", "/data/bin:/usr/bin"),
        "PATH=/data/bin:/usr/bin, expected /",
    ),
    (
        verify.check_environment,
        lambda e: _variable(e, "PYTHONPATH", "/data/lib"),
        "PYTHONPATH=/data/lib, expected /opt",
    ),
    (verify.check_environment, lambda e: _variable(e, "GGML_BACKEND_PATH", "/data/x.so"), "x.so, expected None"),
    (verify.check_environment, lambda e: _variable(e, "PYTHONSAFEPATH", None), "gone: PYTHONSAFEPATH"),
    (verify.check_environment, lambda e: _config_with(e, Env=[*e.config["Env"], "PATH=/x"]), "PATH is there twice"),
    (verify.check_no_leftovers, _file("var/lib/apt/lists/deb_dists_InRelease"), "InRelease"),
    (verify.check_no_leftovers, _file("var/log/dpkg.log"), "dpkg.log"),
    (verify.check_no_leftovers, _file("var/cache/ldconfig/aux-cache"), "aux-cache"),
    (verify.check_setuid, _file("usr/bin/sudo", mode=0o4755), "usr/bin/sudo"),
    (verify.check_setuid, _file("usr/bin/wall", mode=0o2755), "usr/bin/wall"),
    (verify.check_no_secret_files, _leaked, "layer 2: etc/ca.pem (CA bundle)"),
    (verify.check_no_secret_files, _private_key, "root/id_rsa"),
    (verify.check_no_secret_config, lambda e: _config_with(e, Env=["HF_TOKEN=hf_x"]), "HF_TOKEN"),
    (verify.check_no_secret_config, lambda e: _config_with(e, Env=["X=http://me:pw@proxy/"]), "me:pw@"),
    (verify.check_no_secret_config, _label("note", "-----BEGIN PRIVATE KEY-----"), "PRIVATE KEY"),
    (verify.check_no_secret_config, _label("note", f"glpat-{'a1' * 10}"), "GitLab token"),
    (verify.check_no_secret_config, lambda e: _config_with(e, Env=[f"X=npm_{'a1' * 18}"]), "npm token"),
    (verify.check_no_secret_config, lambda e: _history(e, f"RUN X=hf_{'a1' * 17} pip install"), "Hugging Face token"),
    (verify.check_no_secret_files, lambda e: _secret(e, "layer 2: root/.netrc (password in .netrc)"), "root/.netrc"),
    (verify.check_labels, _label("io.appliance.engine.commit", "0" * 40), "io.appliance.engine.commit: 000"),
    (verify.check_labels, _label("io.appliance.build-id", ""), "io.appliance.build-id: missing"),
    (verify.check_labels, _label("org.opencontainers.image.created", "yesterday"), "created: yesterday"),
    (verify.check_labels, _label("org.opencontainers.image.base.digest", "sha256:1"), "base.digest: sha256:1"),
    (
        verify.check_revision,
        lambda e: replace(e, revision=build.Judged(is_false=True, words="abc, which is no commit of this repository")),
        "no commit of this repository",
    ),
    (verify.check_engine_facts, _without(ENGINE_PATH), "missing: /opt/appliance/engine_facts.json"),
    (verify.check_engine_facts, _file(ENGINE_PATH, content=b"{}"), "another schema"),
    (
        verify.check_engine_facts,
        _file(
            ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, cpu_variants=ENGINE_FACTS.cpu_variants[:7])).encode()
        ),
        "CPU variants: x64, haswell, alderlake, skylakex, cascadelake, icelake, zen4",
    ),
    (verify.check_engine_facts, _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, build=0)).encode()), "0"),
    (
        verify.check_engine_facts,
        _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, commit="")).encode()),
        "''",
    ),
    (
        verify.check_engine_facts,
        _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, flags=())).encode()),
        "0 fl",
    ),
    (
        verify.check_engine_facts,
        _file(ENGINE_PATH, content=dump_facts(replace(ENGINE_FACTS, kv_pairs=(("f16", "f16"),))).encode()),
        "1 pairs",
    ),
    (verify.check_image_facts, _label("io.appliance.build-id", "c" * 32), "build id is not the label's"),
    (verify.check_image_facts, _wrong_floor, "floor.sass: None, the label says 580"),
    (verify.check_image_facts, _label("io.appliance.sm", "90"), "io.appliance.sm: None, the label says 90"),
    (verify.check_image_facts, _foreign_form, "its machine code is not of this form: 120a"),
    (verify.check_labels, _wrong_floor, "io.appliance.driver.floor.sass: 580"),
    (verify.check_image_facts, _file(IMAGE_PATH, content=b"\xff"), ""),
    (verify.check_tree, lambda e: replace(e, build_id="c" * 32), f"build id {BUILD_ID}, this tree gives ccc"),
    (verify.check_tree, _label("io.appliance.build-id", "c" * 32), f"this tree gives {BUILD_ID}"),
    (
        verify.check_files,
        _file("opt/llama/libggml-cpu-zen4.so", sha256="1" * 64),
        "changed: opt/llama/libggml-cpu-zen4",
    ),
    (verify.check_files, _file("usr/bin/curl"), "added: usr/bin/curl"),
    (verify.check_files, _label("io.appliance.files-sha256", "1" * 64), "the manifest is not the one of the image's"),
    (verify.check_recipe, _file(RECIPE, content=b"{}"), f"of no recipe that a label names: {RECIPE}"),
    (verify.check_recipe, _file("opt/models/x.gguf"), "of no recipe that a label names: opt/models/x.gguf"),
    (verify.check_recipe, lambda e: _model(e, text="{}"), f"not a recipe of images/models/demo.yaml: {RECIPE}"),
    (verify.check_recipe, lambda e: replace(_model(e), recipe=None), "has no recipe of the label's name: demo"),
    (verify.check_recipe, lambda e: _without(RECIPE)(_model(e)), "missing: /opt/appliance/recipe.json"),
    (verify.check_recipe, lambda e: _file("opt/models/x.gguf")(_model(e)), "foreign weights: opt/models/x.gguf"),
    (verify.check_image_facts, _label("io.appliance.recipe", "demo"), "recipe is not the label's"),
    (verify.check_preload, lambda e: _config_with(e, Env=["PATH=/x", "LD_PRELOAD=/x.so"]), "LD_PRELOAD in the env"),
    (verify.check_preload, _file("etc/ld.so.preload"), "etc/ld.so.preload"),
    (verify.check_accounts, _file(integrity.ACCOUNTS, content=PASSWD + b"toor:x:0:0::/:/bin/sh\n"), "toor"),
    (verify.check_writable, _file("opt/llama", kind="folder", mode=0o777), "opt/llama (777, UID 0)"),
    (verify.check_volume, _file("data", kind="folder", mode=0o755), "0o755"),
    (verify.check_volume, _file("data", kind="folder", mode=0o775, uid=1000), "1000"),
    (verify.check_volume, _without("data"), "None"),
    (verify.check_volume, lambda e: _config_with(e, Volumes=None), "not a volume"),
    (verify.check_user, lambda e: _config_with(e, User=""), "root"),
    (verify.check_user, lambda e: _config_with(e, User="0:0"), "0:0"),
    (verify.check_user, lambda e: _config_with(e, User="00"), "'00', expected 'appliance'"),
    (verify.check_user, lambda e: _config_with(e, User="+0"), "'+0'"),
    (verify.check_user, lambda e: _config_with(e, User=" root"), "' root'"),
    (verify.check_user, lambda e: _config_with(e, User="appliance:shadow"), "'appliance:shadow'"),
    (verify.check_run_line, lambda e: _config_with(e, Volumes={"/data": {}, "/opt": {}}), "'/opt'"),
    (verify.check_run_line, lambda e: _config_with(e, OnBuild=["RUN x"]), "OnBuild: ['RUN x'], expected None"),
    (verify.check_run_line, lambda e: _config_with(e, Shell=["/bin/x"]), "Shell: ['/bin/x']"),
    (verify.check_run_line, lambda e: _config_with(e, WorkingDir="/opt"), "WorkingDir: '/opt', expected '/data'"),
    (verify.check_run_line, lambda e: _config_with(e, StopTimeout=1), "StopTimeout: 1, expected None"),
    (
        verify.check_run_line,
        lambda e: _config_with(e, Healthcheck={**e.config["Healthcheck"], "Interval": 10**12}),
        "'Interval': 1000000000000",
    ),
    (verify.check_links, _link("opt/llama/libllama.so.0", "libevil.so.0.5.0"), "libllama.so.0 -> libevil.so.0.5.0"),
    (verify.check_links, _link("opt/llama/libllama.so.0", "/tmp/libllama.so.0"), "libllama.so.0 -> /tmp/"),
    (verify.check_links, _link("opt/llama/libllama.so.0", "libllama.so.0.9"), "libllama.so.0 -> libllama.so.0.9"),
    (verify.check_links, _link("usr/lib/x/libnvrtc.so.13", "/opt/llama/llama-server"), "-> /opt/llama/llama-server"),
    (verify.check_run_line, lambda e: _config_with(e, Entrypoint=["appliance"]), "Entrypoint: ['appliance']"),
    (verify.check_run_line, lambda e: _config_with(e, Healthcheck=None), "Healthcheck: None"),
    (verify.check_run_line, lambda e: _config_with(e, StopSignal="SIGKILL"), "SIGKILL"),
    (verify.check_byte_code, _file(f"{LIBRARY}/new.py"), f"without byte code: {LIBRARY}/new.py"),
    (verify.check_byte_code, _file("usr/lib/python3.11/__pycache__/x.cpython-311.pyc", content=TIMED_CODE), "timed"),
    (verify.check_byte_code, lambda e: _without(f"{LIBRARY}/__init__.py")(_without(PYNVML)(e)), "0 of ours"),
    (verify.check_debian, _file(verify.STATUS, content=_status("2")), "tini moved: 2, the lock says 1"),
    (verify.check_debian, _file(verify.STATUS, content=STATUS.encode()), "tini moved: not installed"),
    (verify.check_debian, _file(verify.STATUS), "tini moved: not installed"),
    (verify.check_debian, lambda e: replace(e, debian=None), "has no Debian lock"),
    (verify.check_debian, _unlocked, "temporary lock that it was built of is not here: .make/images/"),
    (verify.check_debian, lambda e: replace(e, asked="curl"), "no part for: curl"),
    (verify.check_debian, _unlisted, "curl 7 is not in the lock"),
    (verify.check_size, _file("opt/llama/big", size_bytes=2**40), "of 330 MiB"),
]


@pytest.mark.parametrize(("check", "plant", "said"), FAULTS, ids=[f"{n}-{f[0].__name__}" for n, f in enumerate(FAULTS)])
def test_a_planted_fault_is_caught(
    sound: ImageSnapshot, check: Callable[[ImageSnapshot], Check], plant: Fault, said: str
) -> None:
    found = check(plant(sound))
    assert not found.ok
    assert said in found.detail


@pytest.mark.parametrize(
    "path", ["usr/bin/ldd", "usr/bin/python3.11", "usr/sbin/ldconfig", "usr/bin/arch", "usr/bin/make-x"]
)
def test_ordinary_programs_are_no_tools(sound: ImageSnapshot, path: str) -> None:
    assert verify.check_tools(_file(path)(sound)).ok


@pytest.mark.parametrize("path", ["opt/llama/libcudart.so.13", "opt/llama/libggml-cuda.so", "opt/x/libtorch_cuda.so"])
def test_cuda_is_not_the_driver(sound: ImageSnapshot, path: str) -> None:
    assert verify.check_no_driver(_file(path)(sound)).ok


def _entry(path: str, **values: Any) -> Entry:
    plain = {"kind": "file", "mode": 0o644, "uid": 0, "gid": 0, "size_bytes": 10, "layer": 1, "sha256": "0" * 64}
    return Entry(path=path, **{**plain, **values})


def _tree(cell: Cell) -> Tree:
    image_facts = ImageFacts(
        build_id=BUILD_ID,
        cell=cell.id,
        engine="llama",
        engine_version="0.5.0-dev",
        engine_build=11312,
        engine_commit=cell.engine.commit,
    )
    base = {
        "usr/bin/passwd": _entry("usr/bin/passwd", mode=0o4755, layer=0),
        verify.STATUS: _entry(verify.STATUS, content=STATUS.encode(), layer=0),
        APACHE: _entry(APACHE, layer=0),
    }
    ours = [
        _entry("data", kind="folder", mode=0o775),
        _entry(integrity.ACCOUNTS, content=PASSWD),
        _entry(verify.STATUS, content=_status("1")),
        _entry(ENGINE_PATH, content=dump_facts(ENGINE_FACTS).encode()),
        _entry(IMAGE_PATH, content=dump_facts(image_facts).encode()),
        _entry(f"{LIBRARY}/__init__.py"),
        _entry(f"{LIBRARY}/__pycache__/__init__.cpython-311.pyc", content=CODE),
        _entry("opt/llama/llama-server", machine=62, mode=0o755),
        *(_entry(path) for path in licenses.components()["llama.cpp"].paths),
        _entry("opt/appliance/web/uPlot.min.css"),
        _entry(f"{licenses.FOLDER}uplot/LICENSE"),
        _entry(f"{WHEEL}/METADATA"),
        _entry(f"{WHEEL}/licenses/LICENSE"),
        _entry("opt/appliance/lib/nvidia_ml_py-13.615.71.dist-info/METADATA"),
        _entry(PYNVML),
        _entry("opt/appliance/lib/__pycache__/pynvml.cpython-311.pyc", content=CODE),
        *(_entry(f"opt/llama/libggml-cpu-{name}.so") for name in cell.engine.cpu_variants["linux/amd64"].built),
    ]
    files = {**base, **{entry.path: entry for entry in ours}}
    return Tree(
        files={**files, integrity.MANIFEST: _entry(integrity.MANIFEST, content=_manifest(files.values()))},
        base=base,
        certificates={"layer 1: etc/ssl/certs.pem": {b"MIIBpublic"}},
        base_certificates={b"MIIBpublic"},
    )


def _manifest(entries: Iterable[Entry]) -> bytes:
    return "".join(f"{each.sha256}  /{each.path}\n" for each in entries if each.kind == "file").encode()


def _config(cell: Cell) -> dict[str, Any]:
    moment = {
        "io.appliance.build-id": BUILD_ID,
        "io.appliance.base-override": "none",
        "io.appliance.files-sha256": "0" * 64,
        "org.opencontainers.image.created": "2026-11-21T05:10:13Z",
    }
    return {
        "Labels": {**render.static_labels(cell), **moment},
        "Env": [f"{name}={value}" for name, value in _environment(cell).items()],
        "User": "appliance",
        "Volumes": {"/data": {}},
        "Entrypoint": ["/usr/bin/tini", "--", "appliance"],
        "Cmd": ["serve"],
        "StopSignal": "SIGTERM",
        "ExposedPorts": {"11435/tcp": {}},
        "WorkingDir": "/data",
        "ArgsEscaped": True,
        "Healthcheck": HEALTH,
    }
