"""`plan` and `doctor` on machines whose GPUs answer oddly: used, left out by name, or refused, and never in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from appliance.image_facts import dump_facts, parse_engine_facts, parse_image_facts
from tests.builders import facts
from tests.fakes.machines import describe
from tests.golden.vllm_plans import SMS, engine_facts
from tests.ports import free_port
from tests.process.stages.boot import ROOT, Home
from tests.process.stages.vllm_home import VllmHome
from tests.shapes import SMALL, write_gguf
from tests.shapes.folders import write_folder

REPORTS = ROOT / "tests/data/reports"
MEMORY_QUERIES = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
MakeHome = Callable[..., Home]


@pytest.fixture
def home_on(tmp_path: Path, nvml_library: Path) -> MakeHome:
    """`home_on(text, sms=("89",), devices=1)`: a llama image for these chips on a described machine."""

    def make(machine: str, *, sms: tuple[str, ...] = ("89",), devices: int = 1) -> Home:
        home = Home.make(tmp_path / "home")
        (home.data / "models/small.gguf").unlink()
        write_gguf(home.data / "models/gqa.gguf", SMALL["gqa"])
        image, engine = facts(has_cuda=True)
        image = replace(image, cuda="13.0", sm=sms, driver_floor_sass="570")
        (home.folder / "facts/image_facts.json").write_text(dump_facts(image))
        (home.folder / "facts/engine_facts.json").write_text(dump_facts(engine))
        file = home.folder / "nvml.machine"
        file.write_text(machine)
        home.variables = {
            "LD_LIBRARY_PATH": str(nvml_library.parent),
            "FAKE_NVML_MACHINE": str(file),
            "NVIDIA_VISIBLE_DEVICES": "all",
        }
        home.devices = "\n".join(f"  CUDA{at}: a card (1000 MiB, 1000 MiB free)" for at in range(devices))
        home.set_engine()
        return home

    return make


def reported(name: str) -> str:
    return (REPORTS / name / "nvml.machine").read_text()


def silent(index: int, code: int = 3) -> dict[str, object]:
    """Return knobs of a card that answers with this code to questions about its memory."""
    return {f"gpu__{index}__return__{name}": code for name in MEMORY_QUERIES}


def planned(home: Home) -> dict[str, Any]:
    done = home.command("plan", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def gpus_used(document: dict[str, Any]) -> list[int]:
    return [share["gpu"]["index"] for share in document["plan"]["placement"]["shares"]]


def gpu_checks(home: Home) -> dict[str, dict[str, Any]]:
    document = json.loads(home.command("doctor", "--json", port=str(free_port())).stdout)
    return {check["name"]: check for check in document["checks"] if check["name"].startswith("gpu")}


def test_a_new_chip_that_shares_the_host_s_memory_is_planned_with_it(home_on: MakeHome) -> None:
    home = home_on(reported("gpu-memory-not-reported-new-chip"), sms=("122",))
    document = planned(home)
    (share,) = document["plan"]["placement"]["shares"]
    assert (share["gpu"]["name"], share["gpu"]["is_unified"]) == ("NVIDIA GB20", True)
    assert "warnings" not in document
    assert "shares the host's memory" in gpu_checks(home)["gpu 0"]["value"]


def test_one_lost_card_of_two_is_named_and_the_other_serves(home_on: MakeHome) -> None:
    home = home_on(reported("gpu-one-of-two-lost"))
    document = planned(home)
    assert gpus_used(document) == [0]
    (words,) = document["warnings"]
    assert words.startswith("GPU 1 does not answer: NVML: GPU is lost (15); it is left out; look for Xid in `dmesg`")
    assert "nvidia-smi --gpu-reset -i 1" in words
    assert f"warning: {words}" in home.command("plan").stdout
    checks = gpu_checks(home)
    assert [checks[name]["status"] for name in ("gpu", "gpu 0", "gpu 1")] == ["pass", "pass", "warn"]
    assert words == f"{checks['gpu 1']['value']}; {checks['gpu 1']['remedy']}"


@pytest.mark.parametrize(("code", "words"), [(3, "Not Supported (3)"), (999, "Unknown Error (999)")])
def test_a_card_of_two_that_does_not_tell_its_memory_is_left_out_by_name(
    home_on: MakeHome, code: int, words: str
) -> None:
    home = home_on(describe("2x4090", **silent(1, code)), devices=2)
    document = planned(home)
    assert gpus_used(document) == [0]
    (warning,) = document["warnings"]
    name = "GPU 1 (NVIDIA GeForce RTX 4090)"
    assert warning.startswith(f"{name} does not report its memory: NVML: {words}; it is left out; compare with")
    assert gpu_checks(home)["gpu 1"]["status"] == "warn"


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("return.nvmlDeviceGetHandleByIndex_v2=15\n" + reported("gpu-one-of-two-lost"), "GPU 1 does not answer: NVML"),
        (describe("4090", **silent(0)), "GPU 0 (NVIDIA GeForce RTX 4090) does not report its memory"),
        (describe("4090", gpu__0__memory_total=0, gpu__0__memory_free=0), "does not report its memory: NVML says 0"),
    ],
)
def test_without_a_card_that_can_be_used_it_is_23(home_on: MakeHome, machine: str, words: str) -> None:
    home = home_on(machine)
    done = home.command("plan")
    assert done.returncode == 23
    assert words in done.stderr
    assert "dmesg" in done.stderr
    assert "--devices none" in done.stderr


def test_doctor_tells_of_every_lost_card(home_on: MakeHome) -> None:
    home = home_on("return.nvmlDeviceGetHandleByIndex_v2=15\n" + reported("gpu-one-of-two-lost"))
    checks = gpu_checks(home)
    assert {name: check["status"] for name, check in checks.items()} == {
        "gpu": "fail",
        "gpu 0": "warn",
        "gpu 1": "warn",
    }
    assert checks["gpu"]["exit_code"] == 23


def test_a_container_that_lost_its_devices_is_to_be_made_anew(home_on: MakeHome) -> None:
    done = home_on(reported("nvml-unknown-error-in-old-container")).command("plan")
    assert done.returncode == 23
    assert "NVML: Unknown Error (999)" in done.stderr
    for words in ("If it works there", "daemon-reload", "create it anew", "docker restart", "/dev/nvidiactl", "CDI"):
        assert words in done.stderr


def folder_on(home: VllmHome, library: Path, machine: str, report: str) -> VllmHome:
    """An image of vLLM for GPUs with the reported folder: its config.json, and holes for the weights."""
    shutil.rmtree(home.data / "models/small")
    folder = write_folder(home.data / "models/m", "qwen3-8b")
    shutil.copy(REPORTS / report / "config.json", folder / "config.json")
    path = home.folder / "facts/image_facts.json"
    image = replace(
        parse_image_facts(path.read_text()), cell="vllm-cu130", cuda="13.0", sm=SMS, driver_floor_sass="570"
    )
    path.write_text(dump_facts(image))
    path = home.folder / "facts/engine_facts.json"
    path.write_text(dump_facts(replace(parse_engine_facts(path.read_text()), flags=engine_facts("0.33").flags)))
    file = home.folder / "nvml.machine"
    file.write_text(describe(machine))
    home.variables = {"LD_LIBRARY_PATH": str(library.parent), "FAKE_NVML_MACHINE": str(file)}
    return home


@pytest.mark.parametrize(
    ("report", "machine", "code", "words"),
    [
        ("safetensors-w8a8-int8-on-sm120", "5090", 20, "W8A8 int8, which vLLM computes on SM 75 to below 100"),
        ("safetensors-without-any-tokenizer", "5090", 30, "no tokenizer.json, tokenizer.model, vocab.json"),
        ("safetensors-yarn-written-into-config", "h200", 10, "write max_position_embeddings 131072 into"),
    ],
)
def test_a_folder_that_the_engine_would_end_over_is_refused_before_a_start(
    tmp_path: Path, nvml_library: Path, report: str, machine: str, code: int, words: str
) -> None:
    home = folder_on(VllmHome.make(tmp_path / "home"), nvml_library, machine, report)
    context = ""
    if code == 30:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (home.data / "models/m" / name).unlink()
    elif code == 10:
        plan = home.plan()
        assert "YaRN of factor 4" in next(each["reason"] for each in plan["choices"] if each["name"] == "rope_scaling")
        context = "131072"
    done = home.command("plan", ctx_size=context) if context else home.command("plan")
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert home.started == []


def test_a_mounted_folder_with_a_part_of_a_model_names_what_is_missing(tmp_path: Path) -> None:
    home = Home.make(tmp_path / "home")
    (home.data / "models/small.gguf").unlink()
    mounted = tmp_path / "mounted"
    shutil.copytree(REPORTS / "gguf-second-part-missing-and-none-named", mounted)
    done = home.command("plan", model_dirs=str(mounted))
    assert done.returncode == 30
    assert "a part is missing: m-00002-of-00003.gguf" in done.stderr
    (mounted / "m-00001-of-00003.gguf").unlink()
    document = json.loads(home.command("doctor", "--json", model_dirs=str(mounted), port=str(free_port())).stdout)
    (check,) = [each for each in document["checks"] if each["name"] == "model"]
    assert (check["status"], check["exit_code"]) == ("fail", 30)
    assert "a part is missing: m-00001-of-00003.gguf" in check["value"]
