"""Energy of the CPUs: RAPL's counters in /sys/class/powercap, which most systems let only root read."""

from __future__ import annotations

import re
from pathlib import Path

_ZONES = Path("sys/class/powercap")
# "intel-rapl:0" is a package, on AMD's chips as well. What lies below is a part of it, but for the memory of servers.
_PACKAGE, _PART = re.compile(r"intel-rapl:\d+"), re.compile(r"intel-rapl:\d+:\d+")


class CpuEnergy:
    """Joules of all CPU packages and of their memory since this object was made. Counters begin anew when they are
    full."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._zones = {zone: _most(zone) for zone in _zones(root / _ZONES)}
        self._last: dict[Path, int] = {}
        self._microjoules = 0
        self.why_unknown = "" if self._zones else "the kernel shows no energy counter of the CPUs (RAPL)"

    def read(self) -> float | None:
        """Return the joules so far, 0.0 at the first call. None if a counter cannot be read: `why_unknown` has the
        reason."""
        if not self._zones:
            return None
        try:
            now = {zone: int((zone / "energy_uj").read_text("ascii")) for zone in self._zones}
        except PermissionError as error:
            self.why_unknown = f"{error.filename} can be read by root only"
            return None
        except (OSError, ValueError) as error:
            self.why_unknown = f"the energy counter of the CPUs cannot be read: {error}"
            return None
        for zone, value in now.items():
            self._microjoules += self._risen(zone, value)
        self._last = now
        self.why_unknown = ""
        return self._microjoules / 1e6

    def _risen(self, zone: Path, value: int) -> int:
        before, most = self._last.get(zone), self._zones[zone]
        if before is None:
            return 0
        if value >= before:
            return value - before
        return value + most - before if most >= before else 0


def _zones(folder: Path) -> list[Path]:
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    packages = [zone for zone in found if _PACKAGE.fullmatch(zone.name) and _name(zone).startswith("package")]
    memory = [zone for zone in found if _PART.fullmatch(zone.name) and _name(zone) == "dram"]
    return [*packages, *memory] if packages else []


def _name(zone: Path) -> str:
    try:
        return (zone / "name").read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _most(zone: Path) -> int:
    """Return the value at which the counter begins anew; 0 if unknown."""
    try:
        return int((zone / "max_energy_range_uj").read_text("ascii"))
    except (OSError, ValueError):
        return 0
