"""`nvidia-smi -q -x` output of real machines, and invalid output."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.probe import GpuProbe
from appliance.probe.gpu.smi import SmiGpu, SmiReport, disagreements, parse_smi
from tests.builders import card
from tests.fakes.machines import CARDS

LOGS = Path(__file__).parents[2] / "data/nvidia-smi"
T4_LOG = (LOGS / "tesla-t4.xml").read_text("utf-8")
T4 = card(
    name="Tesla T4", sm="75", vram_total_mib=15360, vram_free_mib=13939, pci_bus_id="00000000:00:1E.0",
    pcie_generation_max=3,
)  # fmt: skip
FOUND = GpuProbe(gpus=(T4,), driver="515.105.01", cuda_driver="11.7")
BOMB = (
    '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">'
    "]><nvidia_smi_log><driver_version>&b;</driver_version></nvidia_smi_log>"
)
# What XML may hold; numbers with odd units, signs and digits among it.
NOISE = st.text(
    st.characters(min_codepoint=32, exclude_categories=("Cs", "Cc"), max_codepoint=0xFFFD)
) | st.sampled_from(["N/A", "", "-5 MiB", "٣ MiB", "9" * 40 + " MiB", "16x", "12 MiB", "1e3 MiB", "ERR!"])


def test_a_real_log_that_agrees() -> None:
    assert parse_smi(T4_LOG) == SmiReport(
        driver="515.105.01",
        cuda_driver="11.7",
        gpus=(
            SmiGpu(
                pci_bus_id="00000000:00:1E.0",
                name="Tesla T4",
                vram_total_mib=15360,
                pcie_generation_max=3,
                pcie_width_max=16,
            ),
        ),
    )
    assert disagreements(FOUND, parse_smi(T4_LOG)) == ()


@pytest.mark.parametrize(
    ("log", "name", "total_mib", "link"),
    [
        ("a10g", "NVIDIA A10G", 23028, (4, 16)),
        ("rtx-3060-v12", "NVIDIA GeForce RTX 3060", 12288, (4, 16)),
        ("gtx-1070-ti", "GeForce GTX 1070 Ti", 4096, (None, None)),
    ],
)
def test_other_real_logs(log: str, name: str, total_mib: int, link: tuple[int | None, int | None]) -> None:
    gpu = parse_smi((LOGS / f"{log}.xml").read_text("utf-8")).gpus[0]
    assert (gpu.name, gpu.vram_total_mib, (gpu.pcie_generation_max, gpu.pcie_width_max)) == (name, total_mib, link)


@pytest.mark.parametrize(
    "card", [card for card in CARDS.values() if card["source"].endswith(".xml")], ids=lambda card: card["source"]
)
def test_cards_that_name_a_log_are_what_it_says(card: Mapping[str, Any]) -> None:
    root = ElementTree.fromstring((LOGS / card["source"]).read_text("utf-8"))
    gpu = parse_smi(ElementTree.tostring(root, "unicode")).gpus[0]
    assert (gpu.name, gpu.vram_total_mib) == (card["name"], card["memory_total"])
    assert root.findtext("gpu/max_clocks/mem_clock") == f"{card['memory_clock']} MHz"
    assert [gpu.pcie_generation_max, gpu.pcie_width_max] == card["pcie"]
    limits = [element.text for element in root.iter("default_power_limit")]
    assert f"{card['power_limit']:.2f} W" in limits


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ({"vram_total_mib": 22528}, "GPU 0 has 22528 MiB by NVML and 15360 MiB by nvidia-smi"),
        ({"name": "Tesla T40"}, "GPU 0 is Tesla T40 by NVML and Tesla T4 by nvidia-smi"),
        ({"pcie_width_max": 8}, "GPU 0's PCIe width is at most 8 by NVML and 16 by nvidia-smi"),
        ({"pcie_generation_max": 4}, "GPU 0's PCIe generation is at most 4 by NVML and 3 by nvidia-smi"),
    ],
)
def test_a_disagreement_names_both_values(gpu: dict[str, object], words: str) -> None:
    found = replace(FOUND, gpus=(replace(T4, **gpu),))  # type: ignore[arg-type]
    assert disagreements(found, parse_smi(T4_LOG)) == (words,)


def test_another_driver() -> None:
    found = replace(FOUND, driver="580.95.05", cuda_driver="13.0")
    assert disagreements(found, parse_smi(T4_LOG)) == (
        "the driver is 580.95.05 by NVML and 515.105.01 by nvidia-smi",
        "the driver's CUDA is 13.0 by NVML and 11.7 by nvidia-smi",
    )


def test_what_one_does_not_tell_is_not_compared() -> None:
    dumb = replace(T4, name=None, vram_total_mib=None, pcie_generation_max=None, pcie_width_max=None)
    assert disagreements(GpuProbe(gpus=(dumb,)), parse_smi(T4_LOG)) == ()
    rounded = replace(T4, vram_total_mib=15359)
    assert disagreements(replace(FOUND, gpus=(rounded,)), parse_smi(T4_LOG)) == ()


def test_a_slice_is_not_compared_with_the_whole() -> None:
    cut = replace(T4, mig_profile="1g.5gb", vram_total_mib=4864, name="Tesla T4 MIG 1g.5gb")
    assert disagreements(replace(FOUND, gpus=(cut,)), parse_smi(T4_LOG)) == ()


def test_a_gpu_that_only_one_shows() -> None:
    report = parse_smi(T4_LOG)
    assert disagreements(replace(FOUND, gpus=()), report) == (
        "nvidia-smi shows a GPU at 00000000:00:1E.0 (Tesla T4) that NVML does not show",
    )
    assert disagreements(replace(FOUND, gpus=()), report, is_filtered=True) == ()
    assert disagreements(replace(FOUND, gpus=(replace(T4, pci_bus_id=None),)), report) == ()
    assert disagreements(FOUND, replace(report, gpus=())) == (
        "NVML shows a GPU at 00000000:00:1E.0 (Tesla T4) that nvidia-smi does not",
    )


def test_addresses_are_the_same_in_every_spelling() -> None:
    assert disagreements(replace(FOUND, gpus=(replace(T4, pci_bus_id="0000:00:1e.0"),)), parse_smi(T4_LOG)) == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is not XML"),
        ("NVIDIA-SMI has failed", "it is not XML"),
        (T4_LOG[:5000], "it is not XML"),
        ("<a/>", "it is another document: <a>"),
        (BOMB, "it declares entities"),
        ('<!DOCTYPE x SYSTEM "file:///etc/passwd"><x>&y;</x>', "it is not XML"),
        ("<?xml version='1.0' encoding='klingon'?><x/>", "it is another document"),
        ("<a>" * 1_000_000 + "x" * 2_000_000, "it is longer than"),
    ],
)
def test_what_is_no_report_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_smi(text)


@given(tag=st.sampled_from(["total", "max_link_gen", "max_link_width", "driver_version", "product_name"]), noise=NOISE)
def test_any_value_is_a_reading_or_unknown(tag: str, noise: str) -> None:
    root = ElementTree.fromstring(T4_LOG)
    for element in root.iter(tag):
        element.text = noise
    gpu = parse_smi(ElementTree.tostring(root, "unicode")).gpus[0]
    readings = (gpu.vram_total_mib, gpu.pcie_generation_max, gpu.pcie_width_max)
    assert all(reading is None or 0 <= reading < 10**9 for reading in readings)


@given(text=st.text() | st.binary().map(lambda data: f"<nvidia_smi_log>{data!r}</nvidia_smi_log>"))
def test_any_text_is_a_report_or_a_refusal(text: str) -> None:
    report = None
    with suppress(ValueError):
        report = parse_smi(text)
    assert report in (None, SmiReport(driver=None, cuda_driver=None, gpus=()))
