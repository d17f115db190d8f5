"""An engine that the kernel's memory killer ends again and again: a smaller plan, also in the next process."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from appliance.command import Command
from appliance.console.report import Report
from appliance.engines.engine import Inputs, Install
from appliance.engines.llama.api.routes import ROUTES
from appliance.engines.llama.engine import Llama
from appliance.errors import EngineError
from appliance.gateway.engine.backend import Backend
from appliance.plan import Kernels, MemoryKill, Plan
from appliance.preview.preview import preview_of
from appliance.profile import Key, Profile, ProfileStore
from appliance.profile.kills import KEPT_MAX
from appliance.serve.engine.load import launch, wait_loaded
from appliance.serve.life.bring_up import tasks_of
from appliance.serve.life.supervise import serve_until_failure
from appliance.serve.model.memory_kills import MemoryKills
from appliance.serve.model.served_model import ServedModel
from appliance.settings import resolve_settings
from appliance.start.inputs import StartInputs
from tests.builders import facts, model, profile
from tests.golden.machines import MACHINES
from tests.mounts import fill_up, tmpfs
from tests.process.stages.supervisor import eventually, fake_command

KEY = Key(parts={"build": "b1", "model": "m1"})
IMAGE, ENGINE = facts(has_cuda=False)
MACHINE = MACHINES["cpu-limit-8g"]


class Killed(Llama):
    """llama.cpp's engine with a fake server. The kernel's count of kills grows with each question. A plan with more
    context than `most` is killed as it loads."""

    def __init__(self) -> None:
        self.most = 10**9
        self._kills = count()

    def command(self, plan: Plan, install: Install, socket_path: Path) -> Command:
        made = replace(fake_command(socket_path), oom_kills=lambda: next(self._kills))
        return made if plan.context <= self.most else replace(made, argv=("/bin/sh", "-c", "kill -9 $$"))


class Stage:
    """Starts of one model, one process after the other, on one volume."""

    def __init__(self, folder: Path, runtime_dir: Path) -> None:
        self.folder, self.runtime_dir = folder, runtime_dir
        self.engine = Killed()
        self.log = StringIO()
        self.number = 0

    def made(self, hardware: object = MACHINE, **flags: str) -> ServedModel:
        settings = resolve_settings(
            {"tune": "off", "runtime_dir": str(self.runtime_dir), "data_dir": str(self.folder), **flags}, {}
        )
        cpu = MACHINE.cpu
        inputs = Inputs(
            settings=settings,
            image=IMAGE,
            facts=ENGINE,
            hardware=hardware,  # type: ignore[arg-type]
            model=replace(model("qwen3-8b", "Q4_K_M"), native_context=16384),
            kernels=Kernels(variant=None, isa=cpu.isa),
        )
        install = Install(engine_dir=self.folder, facts=ENGINE, cache_dir=self.folder)
        start = StartInputs(engine=self.engine, install=install, inputs=inputs, key=KEY)
        self.number += 1
        store = ProfileStore(self.folder, pytest.fail)
        return ServedModel(start, {}, store, Report("json", self.log), number=self.number)

    @asynccontextmanager
    async def serving(self, **flags: str) -> AsyncIterator[tuple[ServedModel, asyncio.Task[None]]]:
        """Serve the model from readiness on. The task ends with the engine's error."""
        served = self.made(**flags)
        backend = Backend(
            name="any",
            socket_path=served.socket_path,
            routes=ROUTES,
            progress=lambda: served.report.progress,
            documents={},
        )
        try:
            launch(served, served.space.predicted)
            await wait_loaded(served)
            task = asyncio.create_task(serve_until_failure(served, tasks_of(served, backend)))
            yield served, task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        finally:
            await served.host.stop()

    async def kill(self, served: ServedModel) -> None:
        """Kill the engine with SIGKILL, as the kernel does. Returns when another engine is ready."""
        pid = served.host.supervisor.pid if served.host.supervisor else None
        assert pid
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: served.host.is_ready and served.host.supervisor.pid not in (None, pid))  # type: ignore[union-attr]

    def events(self, name: str) -> list[str]:
        rows = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [row["message"] for row in rows if row["event"] == name]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    runtime_dir = Path(tempfile.mkdtemp(prefix="mk", dir="/tmp"))  # a socket's path may have 107 bytes
    yield Stage(tmp_path, runtime_dir)
    shutil.rmtree(runtime_dir)


def held(served: ServedModel) -> float:
    assert served.host.plan is not None
    return served.host.plan.memory.total


async def test_after_the_second_kill_a_smaller_plan_serves_and_says_why(stage: Stage) -> None:
    async with stage.serving() as (served, task):
        before = held(served)
        await stage.kill(served)
        assert held(served) == before, "one kill may be anybody's doing"
        assert stage.events("stepped_down") == []
        await stage.kill(served)
        await eventually(lambda: held(served) < before)
        (words,) = stage.events("stepped_down")
        assert words.startswith("the kernel's memory killer ended the engine 2 times, last at ")
        assert f"with a plan of {before:,.0f} MiB of host memory: plans take at most {0.8 * before:,.0f} MiB" in words
        smaller = held(served)
        assert smaller <= 0.8 * before
        await stage.kill(served)
        await eventually(lambda: held(served) < smaller)
        assert not task.done()


async def test_a_second_kill_in_a_new_process_counts_and_so_does_its_end(stage: Stage) -> None:
    async with stage.serving() as (served, _):
        before = held(served)
        await stage.kill(served)
    async with stage.serving() as (served, _):
        assert held(served) == before
        await stage.kill(served)
        await eventually(lambda: held(served) < before)
        smaller = held(served)
    async with stage.serving() as (served, _):
        assert held(served) == smaller, "as the process before it"
        assert len(stage.events("memory_kills")) == 1
    assert ProfileStore(stage.folder, pytest.fail).forget(KEY.id).id == KEY.id
    async with stage.serving() as (served, _):
        assert held(served) == before


async def test_a_load_that_is_killed_again_and_again_ends_with_a_plan_that_loads(stage: Stage) -> None:
    """With `restart: always` the first kill ends the process, the second the plan."""
    whole = stage.made().space.predicted
    stage.engine.most = whole.context - 1
    with pytest.raises(EngineError, match="memory killer") as caught:
        async with stage.serving():
            pytest.fail("it was killed")
    assert caught.value.exit_code == 42
    async with stage.serving() as (served, _):
        assert served.host.plan is not None
        assert served.host.plan.context <= stage.engine.most
        assert stage.events("stepped_down")


async def test_where_no_smaller_plan_fits_the_end_says_so(stage: Stage) -> None:
    stage.engine.most = 0
    for _ in range(2):
        with pytest.raises(EngineError, match="memory killer") as caught:
            async with stage.serving():
                pytest.fail("it was killed")
    assert "no smaller plan fits either" in str(caught.value.hint)


def kills(*, ago_s: float) -> tuple[MemoryKill, ...]:
    """Return two kills `ago_s` seconds ago, of an engine that held more than any plan of these tests does."""
    usable_mib = float(MACHINE.memory.usable_mib)
    return (MemoryKill(at_s=time.time() - ago_s, held_mib=1e6, usable_mib=usable_mib),) * 2


def measured(*, ago_s: float) -> Profile:
    return profile(KEY, created=datetime.fromtimestamp(time.time() - ago_s, UTC).isoformat())


@pytest.mark.parametrize(
    ("killed_ago_s", "measured_ago_s", "is_stale"),
    [
        (25 * 3600, 24 * 3600, True),  # measured an hour after the kills, which count no more
        (25 * 3600, 26 * 3600, False),  # before them
        (60 * 3600, 24 * 3600, False),  # when they counted no more
        (1800, 900, False),  # they count still, and plans are as small as then
    ],
)
def test_what_was_measured_under_the_limit_does_not_outlast_it(
    stage: Stage, killed_ago_s: float, measured_ago_s: float, is_stale: bool
) -> None:
    store, found = ProfileStore(stage.folder, pytest.fail), measured(ago_s=measured_ago_s)
    store.save(found)
    store.keep_kills(KEY, kills(ago_s=killed_ago_s))
    served = stage.made()
    served.memory_kills.judge(served.start, found)
    why = store.why_stale(found)
    assert (why is not None) is is_stale
    if why:
        assert "held plans to 800,000 MiB of host memory, which holds no more" in why
        newer = measured(ago_s=0)
        store.save(newer)
        stage.made().memory_kills.judge(served.start, newer)
        assert store.why_stale(newer) is None, "it is not measured again and again"


def test_the_plan_says_why_it_is_smaller(stage: Stage) -> None:
    whole = stage.made()
    held_mib = whole.space.predicted.memory.total
    folder = whole.settings.profiles_dir
    folder.mkdir()
    store = ProfileStore(folder, pytest.fail)
    assert preview_of(whole.start).warnings == ()
    store.keep_kills(KEY, tuple(replace(kill, held_mib=held_mib) for kill in kills(ago_s=60)))
    (words,) = preview_of(whole.start).warnings
    assert words.startswith("the kernel's memory killer ended the engine 2 times, last at ")
    assert f"plans take at most {0.8 * held_mib:,.0f} MiB" in words
    assert preview_of(whole.start).plan.memory.total <= 0.8 * held_mib


async def test_a_sigkill_that_is_not_the_kernel_s_changes_nothing(stage: Stage) -> None:
    stage.engine._kills = iter(lambda: 0, 1)  # type: ignore[assignment]
    async with stage.serving() as (served, _):
        before = held(served)
        for _ in range(2):
            await stage.kill(served)
        assert held(served) == before
    assert stage.made().memory_kills.seen == ()


async def test_a_full_volume_forgets_in_the_next_process_and_not_in_this_one(tmp_path: Path, stage: Stage) -> None:
    with tmpfs(tmp_path / "small", "size=64k"):
        stage.folder = tmp_path / "small"
        (stage.folder / f"{KEY.id}.lock").touch()
        fill_up(stage.folder / "fill", 64 * 1024)
        async with stage.serving() as (served, _):
            before = held(served)
            for _ in range(2):
                await stage.kill(served)
            await eventually(lambda: held(served) < before)
            assert len(stage.events("memory_kill_not_kept")) == 1
        assert list(stage.folder.glob("*.tmp")) + list(stage.folder.glob("*.kills")) == []
        (stage.folder / "fill").unlink()


class Threadless(ProfileStore):
    """A store whose writes get no thread, which happens if the control group may have no more of them."""

    def keep_kills(self, *_: Any, **__: Any) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)


async def test_without_a_thread_to_write_with_this_process_remembers_and_serves_on(stage: Stage) -> None:
    async with stage.serving() as (served, task):
        served.memory_kills = MemoryKills(served.start, Threadless(stage.folder, pytest.fail), served.report)
        before = held(served)
        for _ in range(2):
            await stage.kill(served)
        await eventually(lambda: task.done() or held(served) < before)
        assert not task.done()
        assert len(stage.events("memory_kill_not_kept")) == 1


async def test_more_memory_than_before_the_kills_forgets_them(stage: Stage) -> None:
    served = stage.made()
    usable = float(MACHINE.memory.usable_mib)
    whole = served.space.predicted.memory.total
    kills = tuple(MemoryKill(at_s=time.time() - ago, held_mib=whole, usable_mib=usable) for ago in (7200, 3600))
    ProfileStore(stage.folder, pytest.fail).keep_kills(KEY, kills)
    assert stage.made().space.predicted.memory.total < whole
    memory = replace(MACHINE.memory, limit_mib=int(1.2 * usable) + (MACHINE.memory.limit_used_mib or 0))
    assert stage.made(replace(MACHINE, memory=memory)).space.predicted.memory.total >= whole


def test_a_damaged_file_counts_as_none_and_is_replaced(stage: Stage) -> None:
    said: list[str] = []
    store = ProfileStore(stage.folder, said.append)
    path = stage.folder / f"{KEY.id}.kills"
    for damaged in ("{", "[]", '{"kills": 1}', '{"kills": [{"at_s": -1, "held_mib": 5, "usable_mib": 5}]}', "\ud800"):
        path.write_bytes(damaged.encode("utf-8", "surrogatepass"))
        assert store.kills(KEY) == ()
        assert "memory kills of earlier starts cannot be read, not used" in said.pop()
    kill = MemoryKill(at_s=1.0, held_mib=5.0, usable_mib=5.0)
    store.keep_kills(KEY, (kill,) * 20)
    assert store.kills(KEY) == (kill,) * KEPT_MAX
