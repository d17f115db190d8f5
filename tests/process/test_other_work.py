"""Words for an engine that is slow beside other programs, from a made-up machine and real traffic."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from appliance.console.report import Report
from appliance.gateway.clients.traffic import Traffic
from appliance.probe import GpuProbe, Hardware, probe
from appliance.probe.load.load import LoadSample
from appliance.probe.load.watch import Watch
from appliance.serve.background.other_work import OtherWork
from appliance.serve.model.served_model import ServedModel
from tests.builders import profile
from tests.process.stages.supervisor import eventually

EVERY_S = 0.7  # the kernel counts in hundredths of a second: shorter intervals are ignored


@dataclass
class Served:
    """The parts of a served model that are used here. `others` is the share of two CPUs that other programs take."""

    hardware: Hardware
    others: float = 0.0
    said: StringIO = field(default_factory=StringIO)

    slow_beside: str | None = None

    def __post_init__(self) -> None:
        self.report = Report("json", self.said)
        found = profile()  # 13.7 tok/s at its deepest, without the last
        shallow = tuple(replace(each, points=each.points[:2]) for each in found.measurements)
        self.profile = replace(found, measurements=shallow)
        self.host = SimpleNamespace(plan=self.profile.plan)
        self._busy_s, self._last_s = 0.0, time.monotonic()

    def watch(self, *, with_gpus: bool = True) -> Watch:
        assert not with_gpus
        return Watch(self.hardware, {}, gpus=(), sample=self._sample)

    def _sample(self) -> LoadSample:
        now_s = time.monotonic()
        self._busy_s += self.others * 2 * (now_s - self._last_s)
        self._last_s = now_s
        return LoadSample(time_s=now_s, cpus=2, busy_s=self._busy_s, steal_s=0.0, own_s=0.0)

    @property
    def warnings(self) -> list[str]:
        rows = [json.loads(line) for line in self.said.getvalue().splitlines()]
        return [row["message"] for row in rows if row["event"] == "slow_beside"]


@pytest.fixture
def served() -> Served:
    return Served(replace(probe(Path("/tmp"), {}), gpus=GpuProbe()))


async def stream(traffic: Traffic, tokens_per_s: float) -> None:
    with traffic.admitted():
        while True:
            traffic.rate.add(b"data: {}\n\n")
            await asyncio.sleep(1 / tokens_per_s)


async def test_it_is_said_once_while_it_is_so_and_not_any_more_when_the_others_are_gone(served: Served) -> None:
    served.others = 0.5
    traffic, watched = Traffic(), OtherWork(cast(ServedModel, served), every_s=EVERY_S)
    tasks = [asyncio.create_task(work) for work in (watched.run(traffic), stream(traffic, 2.0))]
    await eventually(lambda: served.slow_beside is not None)
    words = served.slow_beside
    assert words is not None
    assert words.endswith("by its profile: other programs took 50% of 2 CPUs (1.0 cores)")
    await asyncio.sleep(3 * EVERY_S)
    (said,) = served.warnings
    assert said.startswith("decodes ")
    assert said.endswith("give the engine CPUs of its own (docker run --cpuset-cpus)")
    served.others = 0.0
    await eventually(lambda: served.slow_beside is None)
    served.others = 0.5
    await eventually(lambda: len(served.warnings) == 2)
    tasks[1].cancel()  # nobody asks any more
    await eventually(lambda: served.slow_beside is None)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_fast_engine_beside_others_and_a_slow_one_alone_are_no_reason(served: Served) -> None:
    for others, tokens_per_s in ((0.5, 1000.0), (0.0, 2.0)):
        served.others = others
        traffic, watched = Traffic(), OtherWork(cast(ServedModel, served), every_s=EVERY_S)
        tasks = [asyncio.create_task(work) for work in (watched.run(traffic), stream(traffic, tokens_per_s))]
        await asyncio.sleep(3.5 * EVERY_S)
        assert (served.slow_beside, served.warnings) == (None, [])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
