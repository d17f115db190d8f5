from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from images import __main__ as command
from images.choice import explain
from images.choice.proofs import Here, Record
from images.errors import UsageError
from images.matrix import compat, matrix
from images.matrix.matrix import Matrix, Platform

PLATFORMS: tuple[Platform, ...] = ("linux/amd64", "linux/arm64")


@pytest.fixture(scope="module")
def loaded() -> Matrix:
    return matrix.load(Path(__file__).parents[4])


@pytest.mark.parametrize("engine", ["llama", "vllm"])
def test_solver_and_matrix_agree_on_every_combination(loaded: Matrix, engine: str) -> None:
    """Each (toolkit, chip, platform) is built, impossible or left out on purpose: none is forgotten."""
    cells = [cell for cell in loaded.cells if cell.engine.name == engine]
    built = {
        (cell.target.cuda, form.sm, platform)
        for cell in cells
        for platform in cell.platforms
        for form in cell.sm_forms
        if form.is_for(platform) and len(cell.target.sms) < 2
    }
    yes = "exists" if loaded.engines[engine].is_compiled else "carried"
    seen = []
    for cuda, sm, platform in itertools.product(loaded.toolkits, compat.facts().sms, PLATFORMS):
        found = explain.explain(f"{engine}-cu{cuda.replace('.', '')}-sm{sm}", loaded, platform=platform)
        assert (found.verdict == yes) is ((cuda, sm, platform) in built), (cuda, sm, platform)
        assert found.verdict != "not listed", f"decide on CUDA {cuda}, SM {sm}, {platform}"
        assert all(reason.sources for reason in found.reasons)
        seen.append(found.verdict)
    assert {yes, "impossible", "out of scope"} == set(seen)


def test_without_a_platform_it_exists_when_any_has_it(loaded: Matrix) -> None:
    ids = {cell.id for cell in loaded.cells}
    for cuda, sm in itertools.product(loaded.toolkits, compat.facts().sms):
        cell_id = f"llama-cu{cuda.replace('.', '')}-sm{sm}"
        assert (explain.explain(cell_id, loaded).verdict == "exists") is (cell_id in ids)


def test_the_example_of_the_style_guide(loaded: Matrix) -> None:
    found = explain.explain("llama-cu124-sm120", loaded)
    assert found.message == "cell llama-cu124-sm120 cannot exist: CUDA 12.4 has no target sm_120 (first in 12.8)"
    hint = "use llama-cu128-sm120 with driver 570.26 or newer, or llama-cu130-sm120 with driver 580 or newer"
    assert found.hint == hint
    assert "nvcc --list-gpu-code" in found.reasons[0].sources[0]


def test_orin_is_refused_on_amd64_with_its_source(loaded: Matrix) -> None:
    found = explain.explain("llama-cu130-sm87", loaded, platform="linux/amd64")
    assert found.verdict == "impossible"
    assert "Orin (Jetson), which is built into linux/arm64 and not linux/amd64" in found.message
    assert any("jetson-containers" in source for source in found.reasons[0].sources)
    found = explain.explain("llama-cu130-sm87", loaded, platform="linux/arm64")
    assert found.verdict == "out of scope"
    assert "no code for SM 87" in found.message


def test_an_arm_cell_of_cuda_12_4_is_refused_with_its_source(loaded: Matrix) -> None:
    found = explain.explain("llama-cu124-sm90", loaded, platform="linux/arm64")
    assert found.verdict == "impossible"
    assert "front end reads the headers of glibc up to 2.37 on linux/arm64" in found.message
    assert any("aosc-os-abbs" in source for source in found.reasons[0].sources)


def test_what_a_wheel_carries_is_no_cell_of_its_own(loaded: Matrix) -> None:
    found = explain.explain("vllm-cu130-sm90", loaded)
    assert (found.verdict, found.hint) == ("carried", "use vllm-cu130 with driver 580.65.06 or newer")
    assert "a wheel is for all of them, so there is one cell for a CUDA release" in found.message
    assert explain.explain("vllm-cu130-sm110", loaded).hint == "use vllm-cu130 with driver 580 or newer"
    assert explain.explain("vllm-cu130-sm89", loaded, platform="linux/arm64").verdict == "out of scope"


def test_two_chips_are_asked_for_together(loaded: Matrix) -> None:
    assert explain.explain("llama-cu130-sm86-sm120", loaded).verdict == "exists"
    found = explain.explain("llama-cu130-sm75-sm86", loaded)
    assert (found.verdict, found.reasons[0].what) == (
        "not listed", "no fact speaks against it, and the matrix does not list it"
    )  # fmt: skip
    found = explain.explain("llama-cu124-sm86-sm120", loaded)
    assert "CUDA 12.4 has no target sm_120 (first in 12.8)" in found.message
    assert found.hint == "use llama-cu130-sm86-sm120 with driver 580 or newer"
    told = {each.name: each.value for each in explain.explain("llama-cu130-sm86-sm120", loaded).follows}
    assert told["code of SM 120"].startswith("arch=compute_120a,code=sm_120a: ")
    assert told["driver, machine code of SM 86"] == "580 or newer"


def test_it_says_what_was_proven_and_what_is_here(loaded: Matrix) -> None:
    def states(*here: str, platform: Platform | None = None) -> dict[str, str]:
        record = Record(here={tag: Here(digest="sha256:1", is_current=True) for tag in here}, own="linux/amd64")
        found = explain.explain("llama-cpu", loaded, record=record, platform=platform).follows
        return {each.name: each.value for each in found if each.name.startswith("state on ")}

    never = "rendered, never built"
    assert states() == {"state on linux/amd64": never, "state on linux/arm64": never}
    built = states("appliance:llama-cpu")
    assert built["state on linux/amd64"].startswith("built, and no record says that it was verified")
    assert built["state on linux/arm64"] == never
    assert states(platform="linux/arm64") == {"state on linux/arm64": never}


@pytest.mark.parametrize(
    ("cell_id", "verdict", "said", "hint"),
    [
        (
            "llama-cu124-sm87",
            "out of scope",
            "Jetson's CUDA 12 belongs to JetPack 6",
            "no image is for such a GPU; llama-cpu runs on the",
        ),
        ("llama-cu129-sm90", "out of scope", "12.9 is here for the chips that 12.8 lacks", "llama-cu128-sm90"),
        ("llama-cu132-sm90", "out of scope", "the matrix has no toolkit of that release", "llama-cu130-sm90"),
        ("llama-cu119-sm90", "impossible", "CUDA 11.9 is unknown, known are 12.4", "llama-cu124-sm90"),
        ("llama-cu130-sm95", "impossible", "SM 95 is unknown, known are 70", "llama-cu130-sm90"),
        ("llama-cu130-sm70", "impossible", "CUDA 13.0 has no target sm_70 (last in 12.9)", "nothing here runs on it"),
        ("lama-cu130-sm90", "impossible", "there is no engine lama (perhaps you meant llama)", "llama-cu130-sm90"),
        ("vllm-cu134-sm90", "impossible", "wheels of vLLM 0.33.0 are made with CUDA 13.0", "vllm-cu130 with"),
        ("llama-cu130", "impossible", "is compiled here, for the chips that the id names", "use llama-cu130-sm"),
        ("llama-cu133-sm90", "out of scope", "CUDA 13.3 could make it", "llama-cu134-sm90"),
        ("vllm-cu130-sm87", "out of scope", "kernels for Orin, but torch's", "no image is for such a GPU"),
    ],
)
def test_each_no_is_told_apart(loaded: Matrix, cell_id: str, verdict: str, said: str, hint: str) -> None:
    found = explain.explain(cell_id, loaded)
    assert found.verdict == verdict
    assert said in found.message
    assert hint in (found.hint or "")


def test_the_nearest_cells_are_there_and_run_on_the_chip(loaded: Matrix) -> None:
    cells = {cell.id: cell for cell in loaded.cells}
    for cuda, sm in itertools.product(compat.facts().releases, compat.facts().sms):
        found = explain.explain(f"llama-cu{cuda.replace('.', '')}-sm{sm}", loaded)
        for near in found.nearest:
            assert near.serves is any(compat.runs_on(form, sm) for form in cells[near.cell].forms)


def test_an_existing_cell_tells_all_that_it_follows_from(loaded: Matrix) -> None:
    for cell in loaded.cells:
        found = explain.explain(cell.id, loaded)
        assert found.verdict == "exists"
        assert all(each.value and each.sources for each in found.follows)
    told = {each.name: each.value for each in explain.explain("vllm-cu130", loaded).follows}
    assert told["attention of SM 75"].startswith("TRITON_ATTN: FLASH_ATTN begins at 8.0")
    assert told["driver, with PTX of SM 75"] == "580.65.06 or newer"
    assert told["compiled by the driver of SM 90"].startswith("_C_stable_libtorch")
    assert told["compiled by Triton"].endswith("gcc, Python's headers and its own ptxas")
    told = {each.name: each.value for each in explain.explain("llama-cu124-sm90", loaded).follows}
    assert told["driver, machine code"] == "525 or newer"
    assert told["driver, with PTX"] == "550.54.14 or newer"
    assert told["host compiler"] == "gcc 13, CUDA 12.4 takes up to 13"
    assert told["glibc"].endswith("with images/patches/cuda-12.4-glibc-2.41.patch")
    assert told["code"].startswith("arch=compute_90,code=sm_90: ")


@pytest.mark.parametrize(
    "cell_id", ["llama-cp", "llama-cu1-sm90", "", "llama", "LLAMA-cpu", "llama-cu130-sm9000", "llama-cu130-sm090"]
)
def test_something_else_is_no_id(loaded: Matrix, cell_id: str) -> None:
    with pytest.raises(UsageError, match="not a cell id"):
        explain.explain(cell_id, loaded)


def test_the_command_prints_data_and_exits_10(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["explain", "llama-cu124-sm120", "--json"]) == 10
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == "impossible"
    assert json.loads(err)["error"].startswith("cell llama-cu124-sm120 cannot exist")
    assert json.loads(err)["hint"].startswith("use llama-cu128-sm120")
    assert json.loads(err)["exit_code"] == 10


def test_the_command_is_content_with_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["explain", "llama-cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("llama-cpu: exists\nstate on linux/amd64: proven on 2026-")
    assert "\n    images/proven.yaml\n" in out
    assert "\ntag: appliance:llama-cpu\n    build_matrix.yaml\n" in out
