"""Probes of a fake engine that runs, on a described machine: what they find, and what keeps them from it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.llama.engine import ENGINE as LLAMA
from appliance.gateway.clients.traffic import Traffic
from appliance.plan import Kind, Plan, Speculation, with_launch
from appliance.probe import GpuProbe, Hardware, probe
from appliance.probe.load.load import LoadSample
from appliance.probe.load.watch import Watch
from appliance.profile import Profile, parse_profile
from appliance.profile.drift import OVERDUE_LEAST_S, PROBES_MAX, DriftState
from appliance.serve.background.drift_monitor import DriftMonitor
from appliance.tune.trials.engine import running
from tests.process.stages.boot import Home
from tests.process.stages.engine import session_with
from tests.process.stages.made_once import made_once
from tests.process.stages.supervisor import MakeCommand, eventually

LIMIT_S = 300.0
QUICK_TO_READ = ("--prefill-ms", "1")  # so that the middle depth is one whose reading is compared
# A step with guesses makes several tokens here: a probe that let the engine guess would find it faster than measured.
GUESSES = ("--guess", "ngram-mod:0.1,0.9", "--guess", "draft-mtp:0.1,0.9", "--guess", "draft-simple:0.1,0.9")
KINDS: Mapping[Kind | None, str] = {None: "none", "ngram": "ngram-mod", "mtp": "draft-mtp", "draft": "draft-simple"}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Return the profile that the verb `tune` made of the fake engine."""
    return parse_profile(made_once(tmp_path_factory, "drift", tuned_profile).read_text())


def tuned_profile(folder: Path) -> Path:
    home = Home.make(folder / "home")
    home.set_engine(*QUICK_TO_READ)
    few = {"kv_type": "f16", "load_mode": "mmap", "ubatch": "512", "speculation": "off"}
    done = home.command("tune", beside=None, budget_s="120", **few)  # at every depth, also on a busy machine
    assert done.returncode == 0, done.stderr
    home.calm()
    (path,) = home.profiles.glob("*.json")
    return path


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return replace(probe(Path("/tmp"), {}), gpus=GpuProbe())


class Machine:
    """One CPU on which we work, and others may."""

    def __init__(self) -> None:
        self.others = 0  # hundredths of a second, with each of ours
        self._ours_s = self._others_s = 0.0

        self.looks = 0

    def pass_on(self) -> None:
        self._ours_s += 0.01
        self._others_s += 0.01 * self.others

    def sample(self) -> LoadSample:
        self.looks += 1
        busy_s = self._ours_s + self._others_s
        return LoadSample(time_s=time.monotonic(), cpus=1, busy_s=busy_s, steal_s=0.0, own_s=self._ours_s)

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        async def run() -> None:
            while True:
                self.pass_on()
                await asyncio.sleep(0.01)

        task = asyncio.create_task(run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Stage:
    def __init__(self, folder: Path, make_command: MakeCommand, hardware: Hardware, profile: Profile) -> None:
        self.machine = Machine()
        self.profile = profile
        self.traffic = Traffic()
        self.log = StringIO()
        self._slowdown = folder / "slowdown"
        self._make_command = make_command
        self._hardware = hardware

    def slow_down(self, times: float) -> None:
        self._slowdown.write_text(f"{times}")

    def plan(self, kind: Kind | None) -> Plan:
        return replace(self.profile.plan, speculation=Speculation(kind=kind, tokens=8) if kind else None)

    def command(self, kind: Kind | None, *knobs: str) -> Command:
        told = ("--spec-type", KINDS[kind], "--spec-draft-n-max", "8", "--spec-ngram-mod-n-max", "8")
        return self._make_command(*QUICK_TO_READ, *GUESSES, *told, "--slowdown", str(self._slowdown), *knobs)

    def monitor(
        self,
        command: Command,
        kind: Kind | None = None,
        *,
        plan: Plan | None = None,
        watch: Callable[[], Watch] | None = None,
        overdue_least_s: float = OVERDUE_LEAST_S,
        watched_s: float = 0.6,
    ) -> DriftMonitor:
        return DriftMonitor(
            self.profile,
            plan or self.plan(kind),
            LLAMA,
            command,
            traffic=self.traffic,
            report=Report("json", self.log),
            watch=watch or partial(Watch, self._hardware, {}, sample=self.machine.sample),
            after_s=0.01,
            overdue_least_s=overdue_least_s,
            watched_s=watched_s,
        )

    @asynccontextmanager
    async def monitoring(
        self, *knobs: str, kind: Kind | None = None, overdue_least_s: float = OVERDUE_LEAST_S
    ) -> AsyncIterator[DriftMonitor]:
        command = self.command(kind, *knobs)
        async with asyncio.timeout(LIMIT_S), running(LLAMA, command), self.machine.passing():
            monitor = self.monitor(command, kind, overdue_least_s=overdue_least_s)
            assert monitor.state is DriftState.UNDECIDED
            yield monitor

    @property
    def said(self) -> list[str]:
        rows = [json.loads(line) for line in self.log.getvalue().splitlines()]
        assert {row["event"] for row in rows} <= {"profile_probed"}
        return [row["message"] for row in rows]


@pytest.fixture
def stage(tmp_path: Path, make_command: MakeCommand, hardware: Hardware, profile: Profile) -> Stage:
    return Stage(tmp_path, make_command, hardware, profile)


@pytest.mark.parametrize("kind", KINDS)
async def test_half_the_speed_is_found_by_the_second_probe(stage: Stage, kind: Kind | None) -> None:
    stage.slow_down(2)
    async with stage.monitoring(kind=kind) as monitor:
        drift = await monitor.run()
    assert (drift.state, len(stage.said)) == (DriftState.STALE, 2)
    assert re.fullmatch(r"decoded [\d.]+ tok/s at \d+ tokens, [\d.]+ measured: 5[0-2] % slower, twice", drift.words)
    assert [one.did for one in drift.last if one.is_slow] == ["decoded", "read"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_as_it_was_measured_is_so_after_two_probes(stage: Stage, kind: Kind | None) -> None:
    async with stage.monitoring(kind=kind) as monitor:
        drift = await monitor.run()
    assert (drift.state, drift.note, len(stage.said)) == (DriftState.VALID, "", 2)
    assert all(one.is_good for one in drift.last)
    assert {one.did for one in drift.last} == {"decoded", "read"}


async def test_on_a_busy_machine_no_probe_is_begun_and_on_a_quiet_one_the_same_speed_is_found(stage: Stage) -> None:
    stage.slow_down(2)
    stage.machine.others = 100
    async with stage.monitoring() as monitor, session_with(stage.command(None)) as session:
        run = asyncio.create_task(monitor.run())
        await eventually(lambda: len(stage.said) == 1)
        await eventually(lambda: stage.machine.looks >= 6)  # three of them, each with a begin and an end
        assert await asked(session) == {}
        assert monitor.state is DriftState.UNDECIDED
        stage.machine.others = 0
        drift = await run
    busy, *probes = stage.said
    assert re.search(
        r": not begun; it counts for nothing: other programs took \d+% of the CPU \(\d\.\d cores\); tried", busy
    )
    assert busy.endswith("; tried again ever less often, at least every 60 min")
    assert (drift.state, len(probes)) == (DriftState.STALE, 2)


async def test_a_probe_is_given_up_when_others_begin_to_work(stage: Stage) -> None:
    async with stage.monitoring("--hang-on-completion") as monitor, session_with(stage.command(None)) as session:
        run = asyncio.create_task(monitor.run())
        await eventually(lambda: is_asked(session))
        stage.machine.others = 100
        await eventually(lambda: len(stage.said) == 1)
        await eventually(lambda: _gave_up(partial(seen_by, session)))
        assert not run.done()
        run.cancel()
    assert ": given up; it counts for nothing: other programs took" in stage.said[0]


async def test_a_probe_that_takes_several_times_what_the_profile_says_is_slow(stage: Stage) -> None:
    async with stage.monitoring("--hang-on-completion", overdue_least_s=0.5) as monitor:
        drift = await monitor.run()
    assert (drift.state, len(stage.said)) == (DriftState.STALE, 2)
    assert re.search(r"^read and decoded [\d.]+ tok/s at \d+ tokens, [\d.]+ measured: \d+ % slower, twice", drift.words)


async def seen_by(session: Any) -> dict[str, Any]:
    async with session.get("http://engine/fake/requests") as reply:
        return dict(await reply.json())


async def asked(session: Any) -> dict[str, int]:
    counts = (await seen_by(session))["counts"]
    return {path: count for path, count in counts.items() if path.startswith("POST")}


async def is_asked(session: Any) -> bool:
    return "POST /completion" in await asked(session)


async def test_a_request_ends_a_probe_at_once_and_the_next_comes_when_nobody_asks(stage: Stage) -> None:
    async with stage.monitoring("--hang-on-completion") as monitor, session_with(stage.command(None)) as session:

        async def seen() -> dict[str, Any]:
            async with session.get("http://engine/fake/requests") as reply:
                return dict(await reply.json())

        async def is_at_work(probes: int) -> bool:
            return bool((await seen())["counts"].get("POST /completion") == probes)

        run = asyncio.create_task(monitor.run())
        await eventually(lambda: is_at_work(1))
        with stage.traffic.admitted():
            await eventually(lambda: len(stage.said) == 1)
            await eventually(lambda: _gave_up(seen))
            async with session.post("http://engine/v1/chat/completions", json={"messages": []}) as reply:
                assert (await reply.json())["object"] == "chat.completion"
            await asyncio.sleep(0.1)
            assert await is_at_work(1)
        await eventually(lambda: is_at_work(2))
        assert not run.done()
        run.cancel()
    assert stage.said == [f"probe of profile {stage.profile.key.id}: given up, since a request came"]
    assert monitor.state is DriftState.UNDECIDED


async def _gave_up(seen: Any) -> bool:
    return bool((await seen())["disconnects"] == 1)


async def test_an_engine_that_does_not_answer_is_not_probed_for_ever(stage: Stage) -> None:
    monitor = stage.monitor(stage.command(None), watched_s=0.01)
    drift = await monitor.run()
    assert drift.state is DriftState.UNDECIDED
    *probes, last = stage.said
    assert len(probes) == PROBES_MAX
    assert all("no figure: engine broke off /tokenize" in words for words in probes)
    assert f"{PROBES_MAX} probes decided nothing" in last


async def test_a_plan_that_was_not_measured_is_not_probed(stage: Stage) -> None:
    monitor = stage.monitor(stage.command(None), plan=with_launch(stage.profile.plan, threads=63))
    assert (await monitor.run()).state is DriftState.UNDECIDED
    assert (monitor.state, stage.said) == (None, [])


async def test_a_probe_that_cannot_be_made_is_said_and_ends_nothing(stage: Stage) -> None:
    def no_watch() -> Watch:
        message = "can't start new thread"
        raise RuntimeError(message)

    command = stage.command(None)
    async with asyncio.timeout(LIMIT_S), running(LLAMA, command), stage.machine.passing():
        drift = await stage.monitor(command, watch=no_watch, watched_s=0.01).run()
    assert drift.state is DriftState.UNDECIDED
    rows = [json.loads(line) for line in stage.log.getvalue().splitlines()]
    said = [row["message"] for row in rows if row["event"] == "profile_not_probed"]
    assert len(said) == PROBES_MAX
    assert said[0].endswith("RuntimeError: can't start new thread")
    assert rows[-1]["message"].endswith(f"{PROBES_MAX} probes decided nothing; there are no more before the next start")
