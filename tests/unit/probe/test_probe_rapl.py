"""Energy of the CPUs from made-up trees of /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.probe.load.meter import EnergyUse
from appliance.probe.load.rapl import CpuEnergy


def zone(root: Path, name: str, words: str, energy: str, most: int = 1_000_000) -> Path:
    folder = root / "sys/class/powercap" / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{words}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text(f"{most}\n")
    return folder


def test_packages_and_their_memory_are_added_up_and_parts_of_a_package_are_not(tmp_path: Path) -> None:
    zones = [
        zone(tmp_path, "intel-rapl:0", "package-0", "100"),
        zone(tmp_path, "intel-rapl:1", "package-1", "100"),
        zone(tmp_path, "intel-rapl:0:1", "dram", "100"),
        zone(tmp_path, "intel-rapl:0:0", "core", "100"),
        zone(tmp_path, "intel-rapl:2", "psys", "100"),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", "100"),
    ]
    meter = CpuEnergy(tmp_path)
    assert meter.read() == 0.0
    for each in zones:
        (each / "energy_uj").write_text("200100")
    assert meter.read() == pytest.approx(0.6)


def test_a_counter_that_begins_anew_goes_on(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "900000")
    meter = CpuEnergy(tmp_path)
    meter.read()
    (package / "energy_uj").write_text("100000")
    assert meter.read() == pytest.approx(0.2)


def test_without_a_counter_it_is_unknown_and_says_why(tmp_path: Path) -> None:
    meter = CpuEnergy(tmp_path)
    assert (meter.read(), meter.why_unknown) == (None, "the kernel shows no energy counter of the CPUs (RAPL)")


@pytest.mark.parametrize("energy", ["", "many", "1e3"])
def test_a_counter_that_is_none_is_unknown(tmp_path: Path, energy: str) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", energy)
    meter = CpuEnergy(tmp_path)
    assert meter.read() is None
    assert "cannot be read" in meter.why_unknown


def test_a_counter_that_returns_counts_again(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", "100")
    meter = CpuEnergy(tmp_path)
    meter.read()
    (package / "energy_uj").unlink()
    assert meter.read() is None
    (package / "energy_uj").write_text("500100")
    assert (meter.read(), meter.why_unknown) == (0.5, "")


def test_energy_of_tokens_is_unknown_until_both_are_known() -> None:
    use = EnergyUse()
    use.add(None, 100)
    use.add(5.0, None)
    use.add(5.0, 0)
    assert use.wh_per_1000_tokens is None
    use.add(3600.0, 500)
    use.add(3600.0, 500)
    assert use.wh_per_1000_tokens == 2.0
