"""A slot from absent to ready, to sleep and back; and a load that is cancelled, which leaves no engine behind."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest

from appliance.console.progress import Phase
from appliance.console.report import Report
from appliance.errors import EngineError, FatalError, ModelUnreadableError
from appliance.serve.gateway.slot import ModelSlot, SlotState
from appliance.serve.gateway.stop import put_to_sleep
from appliance.serve.life.bring_up import bring_up
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.open import find_model, open_slot
from appliance.settings import load_settings
from tests.process.stages.boot import Home, short_folder
from tests.process.stages.recipe import empty_home, fill_hub
from tests.process.stages.supervisor import eventually

LIMIT_S = 120.0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.make(tmp_path / "home")


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with short_folder() as folder:
        yield folder


def absent(home: Home, runtime_dir: Path, **more: str) -> ModelSlot:
    environment = home.environment(runtime_dir, alias="one", **more)
    report = Report("json", StringIO())
    return open_slot(load_settings({}, environment), environment, report.for_slot(), is_absent=True)


@asynccontextmanager
async def closing(slot: ModelSlot) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
    finally:
        await put_to_sleep(slot)


def pid_of(served: ServedModel) -> int:
    assert served.host.supervisor is not None
    assert served.host.supervisor.pid is not None
    return served.host.supervisor.pid


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_an_absent_slot_has_a_name_and_documents_before_anything_is_looked_at(
    home: Home, runtime_dir: Path
) -> None:
    slot = absent(home, runtime_dir)
    assert (slot.state, slot.name, slot.served, slot.pending) == (SlotState.ABSENT, "one", None, None)
    assert slot.listed().id == "one"
    documents = {name: made() for name, made in slot.documents().items()}
    assert documents["status"]["model"] == "one"
    assert documents["plan"] == documents["hardware"] == {}


async def test_the_state_is_that_of_its_phase_once_the_model_is_here(home: Home, runtime_dir: Path) -> None:
    slot = absent(home, runtime_dir)
    slot.take(find_model(slot))
    found = {}
    for phase in Phase:
        slot.report.phase(phase)
        found[phase] = slot.state
    assert found.pop(Phase.STOPPING) is SlotState.STOPPING
    assert found.pop(Phase.ASLEEP) is SlotState.ASLEEP
    assert found.pop(Phase.READY) is found.pop(Phase.HELD) is SlotState.READY
    assert set(found.values()) == {SlotState.LOADING}


async def test_from_absent_to_ready_to_sleep_and_back(home: Home, runtime_dir: Path) -> None:
    slot = absent(home, runtime_dir)
    async with closing(slot):
        served = await bring_up(slot)
        assert (slot.state, slot.served) == (SlotState.READY, served)
        first = pid_of(served)
        await put_to_sleep(slot)
        assert (slot.state, lives(first)) == (SlotState.ASLEEP, False)
        assert slot.documents()["status"]()["phase"] == "asleep"
        before = served.hardware
        waking = asyncio.create_task(bring_up(slot))
        await asyncio.sleep(0)
        assert slot.state is SlotState.LOADING  # from planning on
        assert await waking is served
        assert (slot.state, served.host.is_ready) == (SlotState.READY, True)
        assert pid_of(served) != first
        assert served.hardware is not before  # the machine was looked at anew
    assert slot.state is SlotState.ASLEEP


async def test_a_load_that_is_cancelled_leaves_no_engine_and_can_be_begun_again(home: Home, runtime_dir: Path) -> None:
    may_load = home.folder / "may-load"
    home.set_engine("--load-until", str(may_load))
    slot = absent(home, runtime_dir)
    async with closing(slot):
        loading = asyncio.create_task(bring_up(slot))
        await eventually(lambda: slot.served is not None and slot.served.host.is_launched)
        assert slot.served is not None
        assert slot.state is SlotState.LOADING
        pid = pid_of(slot.served)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert (slot.state, lives(pid), slot.served.host.is_launched) == (SlotState.ASLEEP, False, False)
        may_load.touch()
        await bring_up(slot)
        assert slot.state is SlotState.READY


async def test_a_kernel_check_that_is_cancelled_is_run_again(home: Home, runtime_dir: Path) -> None:
    home.set_variants("x64", "zen4")
    home.set_kernel_check("--hang")
    slot = absent(home, runtime_dir, tune="off")
    async with closing(slot):
        loading = asyncio.create_task(bring_up(slot))
        await eventually(lambda: bool(home.checked))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        home.set_kernel_check()
        served = await bring_up(slot)
        assert (slot.state, served.inputs.kernels.variant) == (SlotState.READY, "zen4")
        assert len(home.checked) == 2
    (kept,) = (home.data / "cache/b1").glob("cpu-kernels-*.json")
    assert json.loads(kept.read_text())["checked"]["zen4"]["problem"] is None


async def test_a_fetch_that_is_cancelled_leaves_the_slot_absent_and_is_continued(
    tmp_path: Path, runtime_dir: Path
) -> None:
    hurry = tmp_path / "hurry"
    weights = fill_hub(tmp_path / "files")
    with empty_home(tmp_path, weights, "--bytes-per-s=200000", "--pace-until", str(hurry)) as (home, _):
        slot = absent(home, runtime_dir)
        async with closing(slot):
            fetching = asyncio.create_task(bring_up(slot))
            await eventually(lambda: slot.report.progress.facts.get("bytes_done", 0) > 0)
            assert slot.state is SlotState.FETCHING
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert (slot.state, slot.pending) == (SlotState.ABSENT, None)
            again = asyncio.create_task(bring_up(slot))
            await eventually(lambda: slot.pending is not None)
            assert slot.pending is not None
            before = slot.pending.machine.hardware
            hurry.touch()
            served = await again
            assert slot.state is SlotState.READY
            assert served.hardware is not before  # the machine was looked at anew after the fetch


async def test_an_engine_that_does_not_come_up_leaves_its_slot_asleep(home: Home, runtime_dir: Path) -> None:
    home.set_engine("--die-before-ready", "1")
    slot = absent(home, runtime_dir)
    async with closing(slot):
        with pytest.raises(EngineError):
            await bring_up(slot)
        assert slot.state is SlotState.ASLEEP
        home.set_engine()
        await bring_up(slot)
        assert slot.state is SlotState.READY


async def test_what_is_wrong_is_told_by_the_call_and_the_slot_stays_absent(home: Home, runtime_dir: Path) -> None:
    slot = absent(home, runtime_dir, model="missing")
    with pytest.raises(FatalError, match="missing"):
        await bring_up(slot)
    assert (slot.state, slot.name) == (SlotState.ABSENT, "one")
    (home.folder / "data/models/broken.gguf").write_bytes(b"GGUF")
    broken = absent(home, runtime_dir, model="broken.gguf")
    with pytest.raises(ModelUnreadableError):
        await bring_up(broken)
    assert broken.state is SlotState.ABSENT


def test_each_slot_has_a_phase_of_its_own_in_one_log() -> None:
    log = StringIO()
    report = Report("json", log)
    left, right = report.for_slot(), report.for_slot()
    left.phase(Phase.READY)
    assert (report.progress.phase, right.progress.phase) == (Phase.STARTING, Phase.STARTING)
    right.info("one", "of the right")
    assert '"event": "one"' in log.getvalue()
