"""What becomes of NVML's answers, good and bad, without a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import put

from appliance.probe import Gpu, GpuProbe
from appliance.probe.nvidia import has_library, is_gpu_requested, parse_nvidia_report, query_gpus
from appliance.probe.nvml import collect

LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


class FakeNvml:
    """Two cards; the facts named in `silent` are refused."""

    def __init__(self, *silent: str, name: Any = "NVIDIA H200") -> None:
        self._silent = silent
        self._name = name

    def _answer(self, what: str, value: Any) -> Any:
        if what in self._silent:
            raise NOT_SUPPORTED
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return self._answer("driver", "580.82.07")

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:  # noqa: N802
        return self._answer("cuda", 13010)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self._answer("count", 2)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return self._answer(f"handle {index}", index)

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return self._answer("name", self._name)

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return self._answer("uuid", f"GPU-{handle}")

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return self._answer("capability", (12, 0))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return self._answer("memory", SimpleNamespace(total=8 << 30, free=7 << 30))

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:  # noqa: N802
        return self._answer("pci", SimpleNamespace(busId=b"00000000:01:00.0"))


def as_json(report: dict[str, Any]) -> str:
    return json.dumps(report)


def test_all_facts() -> None:
    probe = parse_nvidia_report(as_json(collect(FakeNvml())))
    assert (probe.driver, probe.cuda_driver, probe.problem) == ("580.82.07", "13.1", None)
    assert probe.gpus[1] == Gpu(
        index=1,
        name="NVIDIA H200",
        uuid="GPU-1",
        sm="120",
        vram_total_mib=8192,
        vram_free_mib=7168,
        pci_bus_id="00000000:01:00.0",
    )


def test_what_nvml_does_not_tell_is_unknown() -> None:
    silent = ("driver", "cuda", "handle 0", "name", "uuid", "capability", "memory", "pci")
    probe = parse_nvidia_report(as_json(collect(FakeNvml(*silent))))
    nothing = dict.fromkeys(("name", "uuid", "sm", "vram_total_mib", "vram_free_mib", "pci_bus_id"))
    assert probe == GpuProbe(gpus=(Gpu(index=0, **nothing), Gpu(index=1, **nothing)))


def test_a_name_that_is_not_utf_8_is_unknown() -> None:
    report = collect(FakeNvml(name=UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")))
    assert parse_nvidia_report(as_json(report)).gpus[0].name is None


def test_without_a_count_there_is_no_report() -> None:
    with pytest.raises(pynvml.NVMLError):
        collect(FakeNvml("count"))


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"gpus": 3}', '{"gpus": [3]}', "Segmentation fault"]
)
def test_garbage_is_a_problem(text: str) -> None:
    assert "the NVML child printed" in (parse_nvidia_report(text).problem or "")


@given(text=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["gpus", "index", "name", "sm", "driver"]), inner),
).map(as_json))  # fmt: skip
def test_any_json_is_a_probe(text: str) -> None:
    probe = parse_nvidia_report(text)
    assert all(card.index >= 0 for card in probe.gpus)


def test_the_library_is_looked_for_where_the_loader_looks(tmp_path: Path) -> None:
    assert not has_library(tmp_path, {})
    assert has_library(put(tmp_path / "debian", {LIBRARY: ""}), {})
    assert has_library(put(tmp_path / "cached", {"/etc/ld.so.cache": "\0libnvidia-ml.so.1\0/opt/x\0"}), {})
    put(tmp_path, {"own/libnvidia-ml.so.1": ""})
    assert has_library(tmp_path, {"LD_LIBRARY_PATH": f":/nowhere:{tmp_path}/own"})


def test_without_the_library_no_child_is_started(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    child = (sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    assert query_gpus(tmp_path, {}, child=child) == GpuProbe()
    put(tmp_path, {"/dev/nvidiactl": ""})
    assert "libnvidia-ml.so.1 is not" in (query_gpus(tmp_path, {}, child=child).problem or "")
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
        (None, "/dev/null", False),
    ],
)
def test_whether_a_gpu_was_asked_for(tmp_path: Path, visible: str | None, device: str | None, expected: bool) -> None:
    environment = {} if visible is None else {"NVIDIA_VISIBLE_DEVICES": visible}
    assert is_gpu_requested(put(tmp_path, {device: ""} if device else {}), environment) is expected
