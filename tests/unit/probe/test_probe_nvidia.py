"""Parsing of NVML's answers, good and bad, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe import Gpu, GpuProbe
from appliance.probe.gpu.nvidia import is_gpu_requested, only_visible, parse_nvidia_report, query_gpus
from tests.unit.probe.machine import put

CARD = {"index": 0, "name": "NVIDIA A100", "uuid": "GPU-aaaa", "sm": "80"}
SLICES = [{**CARD, "uuid": f"MIG-{n}", "mig_profile": "1g.10gb", "mig_parent": "GPU-aaaa"} for n in "12"]


def as_json(report: object) -> str:
    return json.dumps(report)


def test_what_is_of_another_kind_is_unknown() -> None:
    odd = {name: {"what": [None]} for name in Gpu.__dataclass_fields__}
    gpu = parse_nvidia_report(as_json({"gpus": [odd]})).gpus[0]
    nothing = dict.fromkeys(("name", "uuid", "sm", "vram_total_mib", "vram_free_mib", "pci_bus_id"))
    assert gpu == Gpu(index=0, **nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", [-1, 0, 1e12, float("nan"), float("inf"), True, "100"])
def test_a_bandwidth_that_cannot_be_is_unknown(figure: Any) -> None:
    assert parse_nvidia_report(as_json({"gpus": [{"bandwidth_gb_s": figure}]})).gpus[0].bandwidth_gb_s is None


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        ("", []),
        ("0", ["GPU-bbbb"]),
        ("7", []),
        ("GPU-b", ["GPU-bbbb"]),
        ("MIG-2, GPU-bbbb", ["MIG-2", "GPU-bbbb"]),
        ("GPU-aaaa", ["MIG-1", "MIG-2"]),
        ("-1", []),
        ("²", []),
        ("9" * 5000, []),
        ("0,-1,MIG-1", ["GPU-bbbb"]),  # as CUDA does: the rest counts for nothing
    ],
)
def test_what_cuda_is_told_to_hide_is_not_planned_with(visible: str, left: list[str]) -> None:
    found = parse_nvidia_report(as_json({"gpus": [*SLICES, {"index": 0, "uuid": "GPU-bbbb"}]}))
    seen = only_visible(found, {"CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.uuid for gpu in seen.gpus] == left
    assert seen.warnings == (f"CUDA_VISIBLE_DEVICES={visible} leaves {len(left)} of 3 devices",)
    assert only_visible(found, {}) == found


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ("GPU-bbbb", ["GPU-bbbb"]),
        ("MIG-1,GPU-bbbb", ["MIG-1", "GPU-bbbb"]),
        ("GPU-aaaa,GPU-bbbb", ["MIG-1", "MIG-2", "GPU-bbbb"]),
        ("all", ["MIG-1", "MIG-2", "GPU-bbbb"]),
        ("0", ["MIG-1", "MIG-2", "GPU-bbbb"]),  # the host's number
    ],
)
def test_what_a_privileged_container_was_not_given_is_not_planned_with(given: str, left: list[str]) -> None:
    found = parse_nvidia_report(as_json({"gpus": [*SLICES, {"index": 0, "uuid": "GPU-bbbb"}]}))
    seen = only_visible(found, {"NVIDIA_VISIBLE_DEVICES": given})
    assert [gpu.uuid for gpu in seen.gpus] == left
    said = f"NVIDIA_VISIBLE_DEVICES={given} leaves {len(left)} of 3 devices"
    assert seen.warnings == ((said,) if len(left) < 3 else ())


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"gpus": 3}', '{"gpus": [3]}', "Segmentation fault"]
)
def test_garbage_is_a_problem(text: str) -> None:
    assert "the NVML child" in (parse_nvidia_report(text).problem or "")


@given(text=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["gpus", "index", "name", "sm", "driver"]), inner),
).map(as_json))  # fmt: skip
def test_any_json_is_a_probe(text: str) -> None:
    probe = parse_nvidia_report(text)
    assert all(card.index >= 0 for card in probe.gpus)


def test_without_the_library_no_child_is_started(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    child = (sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert query_gpus(tmp_path, {}, child=child) == GpuProbe()
    put(tmp_path, {"/dev/nvidiactl": ""})
    assert "libnvidia-ml.so.1 is missing" in (query_gpus(tmp_path, {}, child=child).problem or "")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, None, False),
        ("", None, False),
        ("void", None, False),
        ("none", None, False),
        ("all", None, True),
        ("0", None, True),
        (None, "/dev/nvidia0", True),
        ("void", "/dev/nvidiactl", True),
        ("void", "/dev/dxg", True),
        (None, "/dev/null", False),
    ],
)
def test_whether_a_gpu_was_asked_for(tmp_path: Path, visible: str | None, device: str | None, expected: bool) -> None:
    environment = {} if visible is None else {"NVIDIA_VISIBLE_DEVICES": visible}
    assert is_gpu_requested(put(tmp_path, {device: ""} if device else {}), environment) is expected
