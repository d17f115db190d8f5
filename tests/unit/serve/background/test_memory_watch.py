"""The watch of an engine's memory: what happens during a look, and what fails in it, ends nothing."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.errors import EngineDiedError, EngineGpuMemoryError, FatalError
from appliance.gateway.clients.traffic import Traffic
from appliance.plan import Plan
from appliance.probe import Gpu, GpuHolder, GpuProbe
from appliance.profile import ProfileStore
from appliance.profile.files import ProfileFiles
from appliance.serve.background import memory_watch
from appliance.serve.background.memory_watch import MemoryWatch
from appliance.serve.engine.load import doubt_peak
from appliance.serve.model.served_model import ReadyEngine
from tests.builders import key
from tests.golden.vllm_plans import hardware
from tests.process.stages.supervisor import eventually
from tests.unit.engines.vllm.planning.vllm_spaces import ADA, TURINGS, best

ONE, TWO = best(ADA), best(TURINGS, "qwen3.6-27b-awq")
SOCKET = Path("engine.sock")
SOON_S = 20.0
pytestmark = pytest.mark.filterwarnings("error")


class Stage:
    """A served model as the watch sees it, a driver, and a volume."""

    def __init__(self, folder: Path) -> None:
        self.warnings: list[str] = []
        self.infos: list[str] = []
        self.looks = 0
        self.held: dict[str, tuple[int, int]] = {}  # pid and MiB, by card
        self.on_look: Callable[[Callable[[], bool]], object] = lambda _: None
        self.tree: set[int] = set()
        self.store = ProfileStore(folder, pytest.fail)
        self.supervisor = SimpleNamespace(pid=0)
        self.gpus = (*hardware(ADA).gpus.gpus, *hardware(TURINGS).gpus.gpus)
        report = SimpleNamespace(
            warning=lambda name, words: self.warnings.append(f"{name}: {words}"),
            info=lambda _, words, **more: self.infos.append(words),
        )
        self.served: Any = SimpleNamespace(
            settings=SimpleNamespace(idle_s=1.0, nodes=1, data_dir=folder),
            environment={},
            hardware=SimpleNamespace(gpus=SimpleNamespace(gpus=self.gpus)),
            allocated=SimpleNamespace(kv_tokens=1000),
            space_of_profile=SimpleNamespace(kv_mib=lambda plan, _: (1000.0,) * len(plan.placement.shares)),
            start=SimpleNamespace(engine=SimpleNamespace(has_peaked=self.has_peaked)),
            host=SimpleNamespace(supervisor=self.supervisor),
            ready=None,
            ready_changed=asyncio.Event(),
            gpu_memory=None,
            store=self.store,
            key=key(),
            report=report,
        )
        self.watch = MemoryWatch(cast("Any", self.served))
        self.traffic = Traffic()

    async def has_peaked(self, plan: Plan, socket_path: Path) -> bool:
        return True

    def query_gpus(self, *_: object, is_wanted: Callable[[], bool]) -> GpuProbe:
        self.looks += 1
        self.on_look(is_wanted)
        return GpuProbe(gpus=tuple(self.now(gpu) for gpu in self.gpus))

    def now(self, gpu: Gpu) -> Gpu:
        pid, mib = self.held.get(gpu.uuid or "", (0, 0))
        return replace(gpu, holders=(GpuHolder(pid=pid, name=None, used_mib=mib),) if mib else ())

    def begin(self, plan: Plan, pid: int, mib: int) -> None:
        self.held = {share.gpu.id: (pid, mib) for share in plan.placement.shares}
        self.tree, self.supervisor.pid = {pid}, pid
        self.served.ready = ReadyEngine(plan=plan, pid=pid, socket_path=SOCKET)
        self.served.ready_changed.set()

    async def ask(self) -> None:
        with self.traffic.admitted():
            await asyncio.sleep(0.01)

    def peaks(self) -> dict[tuple[int, ...], bool]:
        """Return the kept peaks: MiB of each GPU, and True if the peak is whole."""
        found = self.store.peaks(key(), self.gpus)
        return {tuple(card.peak_mib for card in peak.cards): peak.is_whole for peak in found}

    @asynccontextmanager
    async def running(self) -> Any:
        running = asyncio.create_task(self.watch.run(self.traffic))
        try:
            yield running
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(memory_watch, "LOOK_EVERY_S", 0.01)
    stage = Stage(tmp_path)
    monkeypatch.setattr("appliance.probe.gpu.nvidia.query_gpus", stage.query_gpus)
    monkeypatch.setattr("appliance.probe.load.processes.query_tree", lambda _: stage.tree)
    return stage


def test_a_look_costs_a_child_so_that_a_short_idle_time_is_no_reason_for_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for idle_s in (1, 30, 300):
        stage = Stage(tmp_path)
        stage.served.settings.idle_s = idle_s
        found.append(MemoryWatch(cast("Any", stage.served)).every_s)
    assert found == [10, 30, 60]


@pytest.mark.parametrize(("first", "second"), [(ONE, TWO), (TWO, ONE), (ONE, ONE)])
async def test_an_engine_that_changes_during_a_look_has_nothing_of_the_other(
    first: Plan, second: Plan, stage: Stage
) -> None:
    is_looking, goes_on = threading.Event(), threading.Event()

    def look(_: object) -> None:
        is_looking.set()
        goes_on.wait(SOON_S)

    stage.on_look = look
    stage.begin(first, 40, 2000)
    async with stage.running():
        await eventually(is_looking.is_set)
        stage.begin(second, 41, 3000)
        goes_on.set()
        await eventually(lambda: stage.peaks() != {})
        stage.held = {card: (pid, 3500) for card, (pid, _) in stage.held.items()}
        await stage.ask()
        await eventually(lambda: (3500,) * len(second.placement.shares) in stage.peaks())
    assert list(stage.peaks()) == [(3500,) * len(second.placement.shares)]
    assert stage.warnings == []


async def test_an_engine_that_is_away_is_not_taken_for_the_next(stage: Stage) -> None:
    stage.begin(ONE, 40, 2000)
    stage.supervisor.pid = None
    async with stage.running():
        await eventually(lambda: stage.looks > 0)
        await asyncio.sleep(0)
    assert stage.peaks() == {}


async def test_the_next_engine_is_looked_at_at_once(stage: Stage) -> None:
    stage.watch.every_s = 3600.0
    stage.begin(ONE, 40, 2000)
    async with stage.running():
        await eventually(lambda: stage.peaks() != {})
        await stage.ask()
        await asyncio.sleep(0.05)
        stage.begin(TWO, 41, 3000)
        await eventually(lambda: len(stage.peaks()) == 2)


def fails(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), ValueError("odd"), RuntimeError("thread")]
)
@pytest.mark.parametrize("where", ["driver", "metrics"])
async def test_a_look_that_fails_is_said_once_and_is_the_last_of_this_engine(
    where: str, error: Exception, stage: Stage
) -> None:
    asked: list[int] = []

    async def has_peaked(*_: object) -> bool:
        asked.append(1)
        raise error

    if where == "driver":
        stage.on_look = fails(error)
    else:
        stage.served.start.engine.has_peaked = has_peaked
    stage.begin(ONE, 40, 2000)
    async with stage.running():
        await eventually(lambda: stage.warnings != [])
        for _ in range(5):
            await stage.ask()
        assert stage.looks + len(asked) == 1
        assert stage.served.gpu_memory is None
        stage.on_look = lambda _: None
        stage.served.start.engine.has_peaked = stage.has_peaked
        stage.begin(ONE, 41, 2000)
        await eventually(lambda: stage.peaks() != {})
    assert stage.warnings == [f"memory_not_seen: GPU memory in service is not looked at any more: {error}"]


async def test_what_could_not_be_kept_is_tried_again_and_said_once(stage: Stage, tmp_path: Path) -> None:
    async def look_again() -> None:
        looks = stage.looks
        while stage.looks < looks + 2:  # the first may have begun before
            await stage.ask()

    in_the_way = tmp_path / f"{key().id}.peak"
    in_the_way.mkdir()
    stage.begin(ONE, 40, 2000)
    async with stage.running():
        await eventually(lambda: stage.warnings != [])
        await look_again()
        with ProfileFiles(tmp_path).locked_at_once(key().id) as is_ours:
            assert is_ours
            in_the_way.rmdir()
            await look_again()
            assert stage.peaks() == {}
        await look_again()
        await eventually(lambda: stage.peaks() != {})
    assert len(stage.warnings) == 1
    assert stage.warnings[0].startswith(f"memory_not_kept: memory peak cannot be kept: {in_the_way}: ")
    assert len(stage.infos) == 1


async def test_a_stop_waits_for_no_look(stage: Stage) -> None:
    ended = threading.Event()

    def hang(is_wanted: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while is_wanted() and time.monotonic() < deadline:
            time.sleep(0.005)
        if not is_wanted():
            ended.set()

    stage.on_look = hang
    stage.begin(ONE, 40, 2000)
    async with stage.running():
        await eventually(lambda: stage.looks > 0)
    await eventually(ended.is_set)


def ran_out(kind: type[Any], *, was_memory: bool) -> FatalError:
    return cast(FatalError, kind("the engine died", was_memory=was_memory))


@pytest.mark.parametrize(
    ("error", "is_whole"),
    [
        (ran_out(EngineGpuMemoryError, was_memory=True), False),
        (ran_out(EngineDiedError, was_memory=True), False),
        (ran_out(EngineDiedError, was_memory=False), True),
        (FatalError("another"), True),
    ],
)
async def test_an_engine_that_ran_out_of_memory_has_no_whole_peak(
    error: FatalError, is_whole: bool, stage: Stage
) -> None:
    stage.begin(ONE, 40, 2000)
    async with stage.running():
        await eventually(lambda: stage.peaks() != {})
    await doubt_peak(stage.served, TWO, error)
    await doubt_peak(stage.served, None, error)
    assert stage.peaks() == {(2000,): True}
    await doubt_peak(stage.served, ONE, error)
    assert stage.peaks() == {(2000,): is_whole}
