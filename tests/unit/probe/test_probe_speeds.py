from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import VolumeError
from appliance.probe import GpuProbe, GpuSpeed, Speeds
from appliance.probe.bandwidth.measure import Measured, describe, find_cudart, parse_report
from appliance.probe.bandwidth.speeds import load_speeds, parse_speeds, save_speeds, speeds_path, why_unreadable
from tests.builders import card, machine

GPU = card(name="Test", uuid="GPU-1", sm="90")
HARDWARE = replace(machine(), gpus=GpuProbe(gpus=(GPU,), driver="580.82.07"), gpu_requested=True)
SPEED = GpuSpeed(
    uuid="GPU-1",
    pinned_gb_s=55.5,
    pageable_gb_s=9.25,
    memory_gb_s=4000.0,
    overlapped_pinned_gb_s=40.0,
    overlapped_dram_gb_s=None,
)
SPEEDS = Speeds(dram_gb_s=250.125, gpus=(SPEED,))


def test_what_is_saved_is_loaded_on_this_machine_and_on_no_other(tmp_path: Path) -> None:
    path = save_speeds(tmp_path, HARDWARE, SPEEDS)
    assert path == speeds_path(tmp_path, HARDWARE)
    assert load_speeds(tmp_path, HARDWARE) == SPEEDS
    assert why_unreadable(tmp_path, HARDWARE) is None
    other_card = replace(HARDWARE, gpus=replace(HARDWARE.gpus, gpus=(replace(GPU, uuid="GPU-2"),)))
    other_driver = replace(HARDWARE, gpus=replace(HARDWARE.gpus, driver="590.1"))
    fewer_cores = replace(HARDWARE, cpu=replace(HARDWARE.cpu, quota=2.0))
    for other in (other_card, other_driver, fewer_cores):
        assert load_speeds(tmp_path, other) is None
    busier = replace(HARDWARE, memory=replace(HARDWARE.memory, available_mib=5000))
    assert load_speeds(tmp_path, busier) == SPEEDS
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_the_store_of_profiles_does_not_take_it_for_a_profile(tmp_path: Path) -> None:
    assert save_speeds(tmp_path, HARDWARE, SPEEDS).suffix != ".json"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"schema": 1}', b"x" * (2**20 + 1)])
def test_a_torn_file_counts_as_none_and_is_set_aside_by_the_next_measuring(tmp_path: Path, data: bytes) -> None:
    path = speeds_path(tmp_path, HARDWARE)
    path.write_bytes(data)
    assert load_speeds(tmp_path, HARDWARE) is None
    assert why_unreadable(tmp_path, HARDWARE)
    assert path.read_bytes() == data
    save_speeds(tmp_path, HARDWARE, SPEEDS)
    assert path.with_suffix(".corrupt").read_bytes() == data
    assert load_speeds(tmp_path, HARDWARE) == SPEEDS


@pytest.mark.parametrize("value", [0, -1, True, "9", float("inf"), float("nan"), [], 10**400])
def test_what_is_no_bandwidth_is_not_believed(tmp_path: Path, value: object) -> None:
    document = json.loads(save_speeds(tmp_path, HARDWARE, SPEEDS).read_text())
    document["speeds"]["gpus"][0]["pinned_gb_s"] = value
    with pytest.raises(ValueError, match=r"Speeds.gpus\[0\] cannot be|at `\$.gpus\[0\].pinned_gb_s`"):
        parse_speeds(json.dumps(document), HARDWARE)


@given(st.data())
def test_no_damage_makes_it_raise_anything_else(data: st.DataObject) -> None:
    whole = json.dumps({"schema": 1, "key": {}, "speeds": {"dram_gb_s": 1.0, "gpus": []}})
    at = data.draw(st.integers(0, len(whole)))
    text = whole[:at] + data.draw(st.text(max_size=5)) + whole[at + data.draw(st.integers(0, 5)) :]
    with pytest.raises(ValueError, match=r".*"):
        parse_speeds(text, HARDWARE)


def test_a_folder_that_is_not_there_is_50(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="measured speeds cannot be kept") as caught:
        save_speeds(tmp_path / "missing", HARDWARE, SPEEDS)
    assert caught.value.exit_code == 50


def test_the_newest_cudart_beside_the_engine_is_found(tmp_path: Path) -> None:
    assert find_cudart(tmp_path) is None
    assert find_cudart(tmp_path / "missing") is None
    for name in ("libcudart.so.12", "libcudart.so.13", "libcudart.so", "libcudart.so.bak", "libcublas.so.14"):
        (tmp_path / name).touch()
    assert find_cudart(tmp_path) == tmp_path / "libcudart.so.13"


def test_a_report_becomes_figures_and_what_is_none_stays_unknown() -> None:
    text = json.dumps({"pinned_gb_s": 25, "memory_gb_s": -1, "pageable_gb_s": None, "problems": ["cudaMalloc: no"]})
    speed, problems = parse_report(text, "GPU-1")
    assert (speed.uuid, speed.pinned_gb_s, speed.memory_gb_s, speed.pageable_gb_s) == ("GPU-1", 25.0, None, None)
    assert problems == ["cudaMalloc: no"]


@given(st.one_of(st.text(), st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps)))
def test_any_other_text_is_a_problem(text: str) -> None:
    speed, problems = parse_report(text, "GPU-1")
    assert speed.pinned_gb_s is None
    assert len(problems) == 1


def test_words_name_the_unit_and_what_is_unknown() -> None:
    words = describe(Measured(speeds=SPEEDS, problems=("GPU 0: cudaMalloc: out of memory",)))
    assert "host memory, read by all cores: 250.1 GB/s" in words
    assert "read + written: 4,000.0 GB/s" in words
    assert "40.0 GB/s to the device, unknown read by the cores" in words
    assert "problem: GPU 0: cudaMalloc: out of memory" in words
