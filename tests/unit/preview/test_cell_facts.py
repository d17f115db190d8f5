"""Plans where no image is: package data stands for the image of a cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from appliance.engines import cells
from appliance.engines.engine import load
from appliance.errors import ConfigError, DriverTooOldError, NoKernelError
from appliance.plan.head import memory_left
from appliance.preview.cell_facts import contents_of_cell, has_image
from appliance.preview.preview import preview
from appliance.probe import Hardware
from appliance.settings import Settings, resolve_settings
from tests.golden.machines import MACHINES
from tests.shapes import SMALL, write_gguf

ARM = ("asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve", "sve2")


def settings(folder: Path, **given: str) -> Settings:
    return resolve_settings({"data_dir": str(folder), **given}, {})


@pytest.mark.parametrize("cell", cells.built(), ids=lambda cell: cell.name)
def test_a_built_cell_says_what_was_recorded_of_it(cell: cells.Cell) -> None:
    said = cells.engine_facts(cell)
    assert (said.version, said.build) == (cell.image.engine_version, cell.image.engine_build)
    assert cells.facts_source(cell) is cell
    found = load(cell.image.engine).facts_in_cell(said, cell.image, kv_pairs=cell.kv_pairs, is_arm=False)
    assert found == said


def test_engines_of_both_kinds_were_built() -> None:
    assert {"llama-cpu", "vllm-cpu", "vllm-cu130"} <= {cell.name for cell in cells.built()}


def test_a_cell_that_was_not_built_has_the_facts_of_the_nearest_with_the_same_pin() -> None:
    known = cells.cells()
    assert cells.facts_source(known["llama-cu130-sm89"]).name == "llama-cpu"
    found = contents_of_cell(settings(Path("/nowhere"), model="phi-4"), MACHINES["2x4090"], "llama-cu130-sm89")
    contents, stand = found
    assert (stand.cell, stand.facts_of, stand.is_picked) == ("llama-cu130-sm89", "llama-cpu", True)
    assert "those of llama-cpu, which was built with the same release" in stand.describe()
    assert "libggml-cuda.so" in contents.facts.backends
    assert ("q8_0", "q4_0") in contents.facts.kv_pairs
    assert contents.facts.flags == cells.engine_facts(known["llama-cpu"]).flags


def test_a_pin_that_nothing_was_built_with_is_10() -> None:
    cell = cells.find_cell("llama-cu130-sm89")
    other = replace(cell, image=replace(cell.image, engine_build=1))
    with pytest.raises(ConfigError, match="no image with the engine of llama-cu130-sm89 was built: llama"):
        cells.facts_source(other)


def with_driver(hardware: Hardware, driver: str | None) -> Hardware:
    return replace(hardware, gpus=replace(hardware.gpus, driver=driver, cuda_driver=None))


@pytest.mark.parametrize(
    ("machine", "cell"),
    [
        ("cpu-16g", "llama-cpu"),
        ("t4", "sm75"),
        ("2x4090", "sm89"),
        ("h100", "sm90"),
        ("24+8", "llama-cu130-sm86-sm120"),
        ("gb10", "sm121"),
    ],
)
def test_the_cell_is_the_machines(tmp_path: Path, machine: str, cell: str) -> None:
    hardware = MACHINES[machine]
    if hardware.gpus.gpus:
        hardware = with_driver(hardware, "599.1")
    _, stand = contents_of_cell(settings(tmp_path, model="phi-4"), hardware, None)
    assert stand.cell.endswith(cell)
    assert not stand.is_picked


def test_a_machine_file_without_a_cpu_finds_the_cell_of_its_gpu_on_either_platform(tmp_path: Path) -> None:
    gb10 = with_driver(MACHINES["gb10"], None)
    unknown = replace(gb10, cpu=replace(gb10.cpu, isa=()))
    found = preview(settings(tmp_path, model="phi-4"), {}, unknown)
    assert str(found.plan.cpu_variant).startswith("armv8")
    old = replace(MACHINES["cpu-16g"], cpu=replace(MACHINES["cpu-16g"].cpu, isa=()))
    assert preview(settings(tmp_path, model="phi-4"), {}, old).plan.cpu_variant == "x64"


def test_memory_that_gpu_and_host_share_is_one_row_with_the_weights(tmp_path: Path) -> None:
    plan = preview(settings(tmp_path, model="phi-4"), {}, with_driver(MACHINES["gb10"], None)).plan
    (row,) = memory_left(plan).split("; ")
    weights = plan.placement.shares[0].memory.weights
    assert row.startswith("host and GPU ")
    assert int(row.split()[3].replace(",", "")) > weights > 0


def test_an_arm_machine_has_the_kernels_of_arm(tmp_path: Path) -> None:
    hardware = replace(MACHINES["cpu-16g"], cpu=replace(MACHINES["cpu-16g"].cpu, isa=ARM))
    found = preview(settings(tmp_path, model="phi-4"), {}, hardware, cell="llama-cpu")
    assert found.plan.cpu_variant == "armv8.6_2"


def test_a_machine_that_no_cell_is_for_says_why(tmp_path: Path) -> None:
    hardware, request = MACHINES["2x4090"], settings(tmp_path, model="phi-4")
    old = tuple(replace(gpu, sm="61") for gpu in hardware.gpus.gpus)
    with pytest.raises(NoKernelError):
        contents_of_cell(request, replace(hardware, gpus=replace(hardware.gpus, gpus=old)), None)
    with pytest.raises(DriverTooOldError):
        contents_of_cell(request, with_driver(hardware, "390.1"), None)


@pytest.mark.parametrize(
    ("called", "shape"),
    [
        ("qwen3-32b", "qwen3-32b@Q4_K_M"),
        ("Qwen/Qwen3-32B", "qwen3-32b@Q4_K_M"),
        ("qwen3:32b", "qwen3-32b@Q4_K_M"),
        ("Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b@Q4_K_M"),
        ("llama3.3:70b", "llama-3.3-70b@Q4_K_M"),
        ("DeepSeek-V3-0324:q2_k", "deepseek-v3@Q2_K"),
        ("openai/gpt-oss-20b", "gpt-oss-20b@MXFP4"),
        ("gemma-3-27b-it", "gemma-3-27b@Q4_K_M"),
    ],
)
def test_a_model_is_called_as_people_call_it(tmp_path: Path, called: str, shape: str) -> None:
    request = settings(tmp_path, model=called, allow_disk="on")
    found = preview(request, {}, with_driver(MACHINES["h100"], None), cell="llama-cu130-sm90")
    assert found.shape
    assert found.shape.name == shape


def test_a_recipes_model_is_planned_from_its_shape(tmp_path: Path) -> None:
    found = preview(
        settings(tmp_path, model="qwen:30b-a3b-2507-q4_k_m"), {}, MACHINES["2x4090"], cell="llama-cu130-sm89"
    )
    assert found.fetches
    assert found.fetches.candidate.name == "qwen:30b-a3b-2507-q4_k_m"
    assert found.plan.placement.shares


def test_a_file_comes_before_a_shape_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = write_gguf(tmp_path / "models/phi-4.gguf", SMALL["gqa"])
    found = preview(settings(tmp_path, model="phi-4.gguf"), {}, MACHINES["cpu-16g"], cell="llama-cpu")
    assert found.shape is None
    assert found.plan.model_path == str(path)


@pytest.mark.parametrize(
    ("model", "cell", "message", "hint"),
    [
        (
            "phi-4",
            "llama-cu13-sm89",
            "the build matrix has no cell of this name: llama-cu13-sm89",
            "perhaps you meant",
        ),
        ("qwen3-33b", "llama-cpu", "no model of that name can be planned here: qwen3-33b", "qwen3-32b"),
        ("phi-4", "vllm-cpu", "shapes describe GGUF files, and this image serves safetensors: phi-4", "--cell"),
    ],
)
def test_what_cannot_be_planned_is_10(tmp_path: Path, model: str, cell: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        preview(settings(tmp_path, model=model), {}, MACHINES["cpu-16g"], cell=cell)
    assert refused.value.hint
    assert hint in refused.value.hint


def test_without_a_model_and_a_volume_one_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        preview(settings(tmp_path / "none"), {}, MACHINES["cpu-16g"], cell="llama-cpu")


def test_a_folder_with_facts_is_an_image(tmp_path: Path) -> None:
    assert has_image(settings(tmp_path, facts_dir=str(tmp_path)))
