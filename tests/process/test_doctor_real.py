"""`python -m appliance doctor`, `probe --measure` and refused starts, on described machines and on this one."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import ImageFacts, dump_facts, parse_engine_facts, parse_image_facts
from tests.fakes.machines import build_library, describe
from tests.ports import free_port
from tests.process.stages.boot import ROOT, Home
from tests.process.stages.made_once import made_once

COMPILER = shutil.which("gcc")
HELP = ROOT / "tests/data/llama-server-help.txt"
CUDART = ROOT / "tests/fakes/cudart/cudart.c"


class Ward(Home):
    """A volume, an image and an engine, in a container that may have been given GPUs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.extra: dict[str, str] = {}
        self.asked = folder / "asked"

    def environment(self, runtime_dir: Path, **settings: str) -> dict[str, str]:
        return {**super().environment(runtime_dir, **settings), **self.extra}

    def set_image(self, **facts: Any) -> None:
        path = self.folder / "facts/image_facts.json"
        image: ImageFacts = parse_image_facts(path.read_text())
        path.write_text(dump_facts(replace(image, **facts)))

    def set_cuda_image(self, sm: str) -> None:
        self.set_image(cell=f"llama-cu130-sm{sm}", cuda="13.0", sm=(sm,), driver_floor_sass="580")

    def set_words(self, *, build: int = 1, devices: str = "  (none)", complaint: str = "") -> None:
        """Set what the engine's binary answers about itself. It still serves."""
        path = self.folder / "engine/llama-server"
        serving = path.with_name("serving")
        if not serving.exists():
            path.rename(serving)
        path.write_text(f"""#!/bin/sh
case "$1" in
--version) echo 'version: 1 (build {build}, commit abc)' ;;
--help) cat {shlex.quote(str(HELP))} ;;
--list-devices) echo asked >>{shlex.quote(str(self.asked))}; printf '%s\\n' {shlex.quote(complaint)} >&2
    printf 'Available devices:\\n%s\\n' {shlex.quote(devices)} ;;
*) exec {shlex.quote(str(serving))} "$@" ;;
esac
""")
        path.chmod(0o755)

    def need_library_path(self, folder: Path) -> None:
        """Make the engine see GPUs, and start, only if LD_LIBRARY_PATH is its own folder and then `folder`. It answers
        --version and --help only without one."""
        facts = self.folder / "facts/engine_facts.json"
        engine = parse_engine_facts(facts.read_text())
        flags = ("--device", "--gpu-layers", "--split-mode", "--tensor-split", "--main-gpu")
        facts.write_text(dump_facts(replace(engine, flags=(*engine.flags, *flags))))
        path = self.folder / "engine/llama-server"
        saying = path.rename(path.with_name("saying"))
        path.write_text(f"""#!/bin/sh
case "$1 $LD_LIBRARY_PATH" in
"--version "|"--help "|*" {path.parent}:{folder}") exec {shlex.quote(str(saying))} "$@" ;;
--list-devices*) echo 'Available devices:' ;;
*) echo 'error: the driver is not found' >&2; exit 1 ;;
esac
""")
        path.chmod(0o755)

    def give_gpus(self, library: Path, machine: str, **knobs: object) -> None:
        file = self.folder / "machine"
        file.write_text(describe(machine, **knobs), encoding="utf-8")
        self.extra = {
            "NVIDIA_VISIBLE_DEVICES": "all",
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_MACHINE": str(file),
        }

    def doctor(self, **settings: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit code and checks by name."""
        done = self.command("doctor", "--json", beside=None, **settings)
        document = json.loads(done.stdout)
        assert document["exit_code"] == done.returncode, done.stderr
        return done.returncode, {check["name"]: check for check in document["checks"]}


@pytest.fixture
def ward(tmp_path: Path) -> Ward:
    home = Ward.make(tmp_path / "ward")
    assert isinstance(home, Ward)
    home.set_words()
    return home


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler to build a libnvidia-ml with")
    return made_once(tmp_path_factory, "nvml", build_library)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_with_a_port_in_use_the_code_is_a_starts_as_well(ward: Ward, is_damaged: bool) -> None:
    """A start reads its model before it listens, so that a damaged model is reported first."""
    if is_damaged:
        (ward.data / "models/small.gguf").write_bytes(b"no model")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        code, checks = ward.doctor(port=port)
        started = ward.command("serve", port=port)
    assert checks["port"]["status"] == "fail"
    assert (code, checks["model"]["status"]) == ((30, "fail") if is_damaged else (10, "pass"))
    assert started.returncode == code, started.stderr


def test_a_machine_in_order_passes(ward: Ward) -> None:
    code, checks = ward.doctor()
    assert code == 0
    assert {name for name, check in checks.items() if check["status"] == "fail"} == set()
    for name in ("volume", "key", "port", "image", "cpu", "memory", "gpu", "speeds", "engine", "model", "model fits"):
        assert name in checks
    assert checks["gpu"]["value"] == "no GPU is requested"
    assert checks["engine"]["value"].startswith("llama 1, build 1")


def test_without_a_model_it_still_examines_the_rest(ward: Ward) -> None:
    shutil.rmtree(ward.data / "models")
    code, checks = ward.doctor()
    assert code == 0
    assert checks["model"]["status"] == "warn"
    assert "put a .gguf file into" in checks["model"]["remedy"]


@pytest.mark.parametrize(
    ("damage", "name", "code"),
    [
        ("volume", "volume", 50),
        ("model", "model", 30),
        ("facts", "image", 10),
        ("engine", "engine", 44),
        ("other engine", "engine", 44),
    ],
)
def test_each_ill_is_a_failed_check_with_the_code_of_a_start(ward: Ward, damage: str, name: str, code: int) -> None:
    if damage == "volume":
        shutil.rmtree(ward.data)
    if damage == "model":
        (ward.data / "models/small.gguf").write_bytes(b"GGUF, or so it says")
    if damage == "facts":
        (ward.folder / "facts/image_facts.json").write_text("{")
    if damage == "engine":
        (ward.folder / "engine/llama-server").unlink()
    if damage == "other engine":
        ward.set_words(build=2)
    exit_code, checks = ward.doctor()
    assert (exit_code, checks[name]["status"], checks[name]["exit_code"]) == (code, "fail", code)
    assert checks[name]["remedy"]
    assert checks["memory"]["status"] in ("pass", "warn")  # the examination went on


def test_an_image_whose_engine_is_not_served_yet_is_examined_all_the_same(ward: Ward) -> None:
    ward.set_image(engine="odd", engine_version="0.33.0", cell="odd-cu130")
    code, checks = ward.doctor()
    assert code == 10
    assert checks["image"]["status"] == "pass"
    assert checks["image"]["value"].startswith("odd-cu130, build ")
    assert "cannot be served yet: odd 0.33.0" in checks["engine"]["value"]
    assert {"memory", "cpu", "speeds", "gpu"} <= set(checks)


def test_for_people_it_is_lines_with_the_remedy_below(ward: Ward) -> None:
    done = ward.command("doctor", port=str(free_port()))
    assert done.returncode == 0, done.stderr
    assert "pass  engine" in done.stdout
    assert "-> its content is lost with the container: add -v" in done.stdout


def test_beside_a_serving_appliance_the_port_is_its_own(ward: Ward) -> None:
    with ward.serving(tune="off") as serving:
        serving.wait_ready()
        done = ward.command("doctor", "--json", beside=serving, port=str(serving.port))
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert checks["port"]["value"].startswith("the appliance listens on")
        assert checks["key"]["value"] == "there is one"
        assert done.returncode == 0
        assert serving.chat()[0] == 200


def test_a_driver_where_only_the_environment_says_so_reaches_the_engine(ward: Ward, nvml: Path, tmp_path: Path) -> None:
    """GKE does this: the driver's folder is named only by LD_LIBRARY_PATH, which the engine does not inherit."""
    folder = tmp_path / "nvidia/lib64"
    folder.mkdir(parents=True)
    shutil.copy(nvml, folder)
    (folder / "libcuda.so.1").touch()
    ward.set_cuda_image("90")
    ward.give_gpus(folder / nvml.name, "h200")
    ward.set_words(devices="  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)")
    ward.need_library_path(folder)
    code, checks = ward.doctor()
    assert code == 0
    assert checks["gpu"]["value"] == "the engine sees CUDA0"
    assert checks["driver library"]["value"].startswith(f"{folder}/libcuda.so.1 (named by LD_LIBRARY_PATH)")
    with ward.serving(tune="off") as serving:
        serving.wait_ready()
        assert serving.chat()[0] == 200


def test_a_driver_on_the_volume_is_not_used_and_that_is_said(ward: Ward, nvml: Path) -> None:
    folder = ward.data / "lib"
    folder.mkdir()
    (folder / "libcuda.so.1").touch()
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    ward.set_words(devices="  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)")
    ward.need_library_path(folder)
    ward.extra["LD_LIBRARY_PATH"] += f":{folder}"
    code, checks = ward.doctor()
    assert code == 23
    assert checks["driver library"]["status"] == "warn"
    assert f"{folder}, which holds libcuda.so.1 and is not used: it is on the volume" in checks["gpu readings"]["value"]


def test_a_bundle_tells_no_key_no_path_and_no_uuid(ward: Ward, nvml: Path) -> None:
    key = ward.command("key").stdout.strip()
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    ward.set_words(devices="  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)")
    report = ward.folder / "report.json"
    done = ward.command("doctor", "--bundle", str(report))
    text = report.read_text()
    uuid = json.loads(ward.command("probe", "--json").stdout)["gpus"]["gpus"][0]["uuid"]
    assert key.startswith("sk-")
    assert "read it before you send it" in done.stderr
    for secret in (key, uuid, str(ward.folder), ward.folder.parent.name):
        assert secret not in text
    document = json.loads(text)
    assert document["hardware"]["gpus"]["gpus"][0]["sm"] == "90"
    assert document["settings"]["data_dir"]["source"] == "variable APPLIANCE_DATA_DIR"
    assert ward.command("doctor", "--bundle", str(report)).returncode == 10


@pytest.mark.parametrize(
    ("machine", "sm", "code", "words"),
    [
        ("old-driver", "86", 21, "470.256.02, llama-cu130-sm86 needs 580 or newer"),
        ("2x2080ti-22g", "86", 20, "use the image llama-cu130-sm75"),
    ],
)
def test_a_gpu_that_this_image_cannot_run_on_ends_the_start(
    ward: Ward, nvml: Path, machine: str, sm: str, code: int, words: str
) -> None:
    ward.set_cuda_image(sm)
    ward.give_gpus(nvml, machine)
    with ward.serving() as serving:
        assert serving.wait_exit() == code
        assert words in serving.text
    assert ward.started == []
    assert ward.doctor()[0] == code


def test_a_driver_that_hangs_is_23_within_the_limit(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("86")
    ward.give_gpus(nvml, "2x4090", hang__nvmlDeviceGetCount_v2=1)
    began = time.monotonic()
    with ward.serving() as serving:
        assert serving.wait_exit() == 23
        assert "did not answer within 15 s" in serving.text
        assert "look for Xid" in serving.text
    assert time.monotonic() - began < 120


def test_a_driver_that_crashes_is_23(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("86")
    ward.give_gpus(nvml, "2x4090", crash__nvmlInitWithFlags=1)
    with ward.serving() as serving:
        assert serving.wait_exit() == 23
        assert "ended with -11" in serving.text


def test_a_runtime_that_gave_only_the_variable_is_23(ward: Ward) -> None:
    ward.set_cuda_image("86")
    ward.extra = {"NVIDIA_VISIBLE_DEVICES": "all"}
    with ward.serving() as serving:
        assert serving.wait_exit() == 23
        assert "libnvidia-ml.so.1 is not in this container" in serving.text
        assert "NVIDIA Container Toolkit" in serving.text


def test_an_engine_that_sees_no_gpu_is_23_and_does_not_serve_on_the_cpu(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    ward.set_words(complaint="ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected")
    with ward.serving() as serving:
        assert serving.wait_exit() == 23
        assert "no CUDA-capable device is detected" in serving.text
    assert ward.started == []
    assert ward.doctor()[0] == 23


def test_a_backend_that_does_not_load_is_23_with_the_loaders_words(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    backend = ward.folder / "engine/libggml-cuda.so"
    source = ward.folder / "backend.c"
    source.write_text("int x;")
    needed = ward.folder / "libcuda_that_is_not_there.so"
    subprocess.run(["gcc", "-shared", "-o", str(needed), str(source)], check=True)
    link = ["gcc", "-shared", "-Wl,--no-as-needed", "-o", str(backend), str(source), str(needed)]
    subprocess.run(link, check=True)
    needed.unlink()
    code, checks = ward.doctor()
    assert code == 23
    assert "libcuda_that_is_not_there.so: cannot open shared object file" in checks["gpu"]["value"]
    assert "start it with --gpus all" in checks["gpu"]["remedy"]


def test_an_engine_that_saw_its_gpus_is_not_asked_at_the_next_start(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    ward.set_words(devices="  CUDA0: NVIDIA H200 (143167 MiB, 142566 MiB free)")
    for _ in range(2):
        with ward.serving(tune="off") as serving:
            _ended_or_past_the_checks(serving)
    assert ward.asked.read_text().count("asked") == 1
    ward.doctor()
    assert ward.asked.read_text().count("asked") == 2  # it always asks


def _ended_or_past_the_checks(serving: Any) -> None:
    """Wait until the checks are passed or the appliance has ended otherwise. How the planner treats a fake engine is
    not tested here."""
    deadline = time.monotonic() + 90
    while serving.process.poll() is None and "engine_start" not in serving.names():
        assert time.monotonic() < deadline, serving.text
        time.sleep(0.02)
    assert serving.process.returncode not in (20, 21, 22, 23), serving.text


def test_a_card_without_kernels_is_left_out_with_its_reason(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("86")
    ward.give_gpus(nvml, "24+8")
    ward.set_words(devices="  CUDA0: NVIDIA GeForce RTX 3090 (24576 MiB, 24000 MiB free)")
    _, checks = ward.doctor()
    assert "is left out: llama-cu130-sm86 has kernels for SM 86" in ward.command("doctor", port=str(free_port())).stdout
    assert checks["driver"]["status"] == "pass"
    with ward.serving(tune="off") as serving:
        assert "is left out" in serving.event("hardware")["message"]


def test_measured_speeds_are_kept_and_loaded(ward: Ward, nvml: Path) -> None:
    ward.set_cuda_image("90")
    ward.give_gpus(nvml, "h200")
    library = ward.folder / "engine/libcudart.so.13"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(CUDART)], check=True)
    done = ward.command("probe", "--measure", "--json")
    assert done.returncode == 0, done.stderr
    assert "copying to, from and within GPU 0" in done.stderr
    measured = json.loads(done.stdout)
    assert measured["problems"] == []
    assert all(measured["speeds"]["gpus"][0].values())
    assert json.loads(ward.command("probe", "--json").stdout)["speeds"] == measured["speeds"]
    kept = next(ward.profiles.glob("*.speeds"))
    kept.write_text("{")
    assert json.loads(ward.command("probe", "--json").stdout)["speeds"] is None
    assert ward.doctor()[1]["speeds"]["status"] == "warn"
    assert ward.command("profiles", "--json").stdout.strip() == "[]"


def test_measuring_needs_a_volume(ward: Ward) -> None:
    shutil.rmtree(ward.data)
    done = ward.command("probe", "--measure")
    assert (done.returncode, done.stdout) == (50, "")


def test_options_belong_to_their_verbs(ward: Ward) -> None:
    assert ward.command("serve", "--measure").returncode == 2
    assert ward.command("probe", "--bundle", "x").returncode == 2
    assert "perhaps you meant '--measure'" in ward.command("probe", "--mesure").stderr
