"""Bandwidths of this machine, measured while what else is at work on it is made up."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from appliance.console.report import Report
from appliance.gateway.clients.traffic import Traffic
from appliance.probe import SPEEDS_FOLDER, GpuProbe, Hardware, probe
from appliance.probe.bandwidth.speeds import load_speeds
from appliance.probe.load.load import LoadSample
from appliance.probe.load.watch import Watch
from appliance.serve.background.bandwidths import Bandwidths
from appliance.serve.model.served_model import ServedModel
from appliance.settings import resolve_settings

LIMIT_S = 120.0
CALM, BUSY = 0.0, 0.5  # of four CPUs
INTERVAL_S = 2.0


def samples(share: float) -> Iterator[LoadSample]:
    """Return a sample before a block and one after it. Others took `share` of the CPUs in between."""
    for at in (0, 1):
        yield LoadSample(time_s=at * INTERVAL_S, cpus=4, busy_s=at * INTERVAL_S * 4 * share, steal_s=0.0, own_s=0.0)


@dataclass
class Served:
    """The parts of a served model that measuring uses. `others` has one share of the CPUs for each watch, in turn."""

    hardware: Hardware
    folder: Path
    others: list[float]
    idle_s: str = "1"
    said: StringIO = field(default_factory=StringIO)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        self.settings = resolve_settings({"data_dir": str(self.folder), "idle_s": self.idle_s}, {})
        self.report = Report("json", self.said)
        self.host = SimpleNamespace(is_ready=True)
        self.crowded = asyncio.Event()
        self.start = SimpleNamespace(install=SimpleNamespace(engine_dir=self.folder))

    def watch(self, *, with_gpus: bool = True) -> Watch:
        given = samples(self.others.pop(0))
        return Watch(self.hardware, self.environment, gpus=None if with_gpus else (), sample=lambda: next(given))

    async def what_else_works(self) -> str:
        async with self.watch() as watching:
            pass
        return watching.conditions.disturbance or ""

    async def until_crowded(self) -> str:
        await self.crowded.wait()
        return "other programs took 50% of 4 CPUs (2.0 cores)"

    @property
    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.said.getvalue().splitlines()]

    @property
    def kept(self) -> bool:
        return load_speeds(self.folder / SPEEDS_FOLDER, self.hardware) is not None


@pytest.fixture
def hardware() -> Hardware:
    return replace(probe(Path("/tmp"), {}), gpus=GpuProbe())


def served_on(hardware: Hardware, folder: Path, *others: float) -> Served:
    (folder / SPEEDS_FOLDER).mkdir()
    return Served(hardware=hardware, folder=folder, others=list(others))


async def test_on_a_calm_machine_they_are_kept_at_once(hardware: Hardware, tmp_path: Path) -> None:
    served = served_on(hardware, tmp_path, CALM, CALM)
    found = Bandwidths(cast(ServedModel, served))
    async with asyncio.timeout(LIMIT_S):
        await found.measure(Traffic())
    assert (found.is_known, served.kept) == (True, True)
    assert served.events == ["bandwidth_measure", "bandwidth_measured"]


@pytest.mark.parametrize("others", [(BUSY,), (CALM, BUSY)], ids=["before", "meanwhile"])
async def test_what_others_disturbed_is_not_kept_and_measured_again_later(
    hardware: Hardware, tmp_path: Path, others: tuple[float, ...]
) -> None:
    served = served_on(hardware, tmp_path, *others, CALM, CALM)
    found, traffic = Bandwidths(cast(ServedModel, served)), Traffic()
    async with asyncio.timeout(LIMIT_S):
        await found.measure(traffic)
        assert (found.is_known, served.kept) == (False, False)
        assert served.events == ["bandwidth_measure", "bandwidth_disturbed"]
        assert "other programs took 50% of 4 CPUs" in served.said.getvalue()
        await found.until_known(traffic)
    assert (found.is_known, served.kept, served.others) == (True, True, [])
    assert served.events[-2:] == ["bandwidth_measure", "bandwidth_measured"]


async def test_others_that_begin_to_work_end_it_at_once(hardware: Hardware, tmp_path: Path) -> None:
    served = served_on(hardware, tmp_path, CALM, CALM)
    served.crowded.set()
    found = Bandwidths(cast(ServedModel, served))
    async with asyncio.timeout(LIMIT_S):
        await found.measure(Traffic())
    assert (found.is_known, served.kept) == (False, False)
    assert served.events == ["bandwidth_measure", "bandwidth_disturbed"]


async def test_too_soon_after_a_disturbed_measuring_it_is_not_tried(hardware: Hardware, tmp_path: Path) -> None:
    served = replace(served_on(hardware, tmp_path, BUSY), idle_s="60")
    found = Bandwidths(cast(ServedModel, served))
    async with asyncio.timeout(LIMIT_S):
        await found.measure(Traffic())
        await found.measure(Traffic())
    assert served.events.count("bandwidth_measure") == 1
