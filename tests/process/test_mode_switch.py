"""Modes that are switched while the appliance serves: no request is lost, whatever becomes of the other plan."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from appliance.console.progress import Phase
from appliance.errors import FatalError
from appliance.plan import Plan
from appliance.profile import Profile
from appliance.serve.background.mode_switch import ModeSwitch
from appliance.serve.model.served_model import ServedModel
from appliance.start.inputs import StartInputs
from tests.builders import measured, profile
from tests.process.stages.boot import Home, Serving, eventually, is_alive
from tests.process.stages.front import Front, front_of
from tests.process.stages.vllm_home import VllmHome

PATH = "/appliance/v1/mode"
# The other modes keep to this limit, so that their contexts are shorter than the one of mode context.
FEW = {"fill_minutes": "1"}
NO_ROOM = "memory holds no second engine"


def write_wide_model(path: Path) -> None:
    """A model of zeros whose KV cache is so large that a CPU reads a long context slowly: modes differ."""
    blocks, context = 8, 262144
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(context)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(8)
    writer.add_head_count_kv(4)
    writer.add_key_length(256)
    writer.add_value_length(256)
    writer.add_token_list([f"token{number}" for number in range(100)])
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((100, 64), dtype=np.float32))
    writer.add_tensor(f"blk.{blocks - 1}.attn_norm.weight", np.zeros(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home.make(tmp_path_factory.mktemp("wide") / "home")
    write_wide_model(home.data / "models/small.gguf")
    return home


@pytest.fixture
def home(made: Home, tmp_path: Path) -> Home:
    return made.copy(tmp_path / "home")


def switch(serving: Serving, body: Any) -> tuple[int, Any]:
    return serving.ask("POST", PATH, body, key=serving.home.key)


def modes(serving: Serving) -> dict[str, dict[str, Any]]:
    """Return the rows of the modes by name, once they are known."""
    rows = eventually(lambda: serving.document("status")["modes"], what=lambda: serving.text)
    return {row["mode"]: row for row in rows}


def wait_switched(serving: Serving) -> dict[str, Any]:
    """Return the status after the end of the switch."""

    def find() -> dict[str, Any] | None:
        status: dict[str, Any] = serving.document("status")
        return status if (status["mode_switch"] or {}).get("state") not in (None, "switching") else None

    status: dict[str, Any] = eventually(find, what=lambda: serving.text)
    return status


@contextmanager
def asking(serving: Serving, clients: int = 3) -> Iterator[list[tuple[int, Any]]]:
    """Clients that ask without a pause during the block. Yields their answers."""
    answers: list[tuple[int, Any]] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(serving.chat())

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


def test_another_mode_takes_over_while_requests_come_and_lasts_until_the_end(home: Home) -> None:
    with home.serving(**FEW) as serving:
        serving.wait_ready()
        rows = modes(serving)
        assert list(rows) == ["balanced", "speed", "context"]
        assert rows["context"]["context"] > rows["balanced"]["context"]
        assert (rows["balanced"]["is_serving"], rows["context"]["is_serving"]) == (True, False)
        assert rows["context"]["decode_tokens_per_s"] > 0 < rows["context"]["prefill_tokens_per_s"]
        assert serving.document("status")["mode_switch"] is None
        assert switch(serving, {"mode": "balanced"})[0] == 200, "it serves already"
        (pid,) = serving.engine_pids()
        with asking(serving) as answers:
            eventually(lambda: len(answers) > 6)
            status, answer = switch(serving, {"mode": "context"})
            assert (status, answer["state"]) == (202, "switching")
            assert answer["plan"] == rows["context"]["plan"]
            assert "the next start takes 'balanced' (default)" in answer["message"]
            after = wait_switched(serving)
            count = len(answers)
            eventually(lambda: len(answers) > count + 6)
        assert {status for status, _ in answers} == {200}
        assert (after["mode"], after["mode_switch"]["state"]) == ("context", "serving")
        assert after["context"] == rows["context"]["context"]
        assert not is_alive(pid)
        assert modes(serving)["context"]["is_serving"]
        assert switch(serving, {"mode": "context"})[:1] == (200,)
        serving.terminate()
    with home.serving(**FEW) as serving:
        serving.wait_ready()
        assert serving.document("status")["mode"] == "balanced", "the setting of the start counts"


HOSTILE: tuple[tuple[Any, str], ...] = (
    ({"mode": "fast"}, "mode_unknown"),
    ({"mode": "SPEED"}, "mode_unknown"),
    ({"mode": "x" * 5000}, "mode_unknown"),
    ({"mode": "\x1b[2J"}, "mode_unknown"),
    ({"mode": ["speed"]}, "mode_required"),
    ({"mode": None}, "mode_required"),
    ({}, "mode_required"),
    (["speed"], "mode_required"),
    ("speed", "mode_required"),
    (None, "mode_required"),
)


def test_what_names_no_mode_is_told_the_three(home: Home) -> None:
    with home.serving(**FEW) as serving:
        serving.wait_ready()
        for body, code in HOSTILE:
            status, answer = switch(serving, body)
            assert (status, answer["error"]["code"]) == (400, code), body
            assert "the modes are balanced, speed, context" in answer["error"]["message"]
            assert "\x1b" not in answer["error"]["message"]
            assert len(answer["error"]["message"]) < 300
        assert serving.ask("POST", PATH, {"mode": "context"})[0] == 401
        assert serving.document("status")["mode_switch"] is None


def test_it_is_refused_during_a_load_and_during_a_switch(home: Home) -> None:
    gate = home.folder / "gate"
    gate.touch()
    home.set_engine("--load-until", str(gate))
    gate.unlink()
    with home.serving(**FEW) as serving:
        serving.event("engine_start")
        loading = eventually(lambda: (found := switch(serving, {"mode": "context"}))[0] and found)
        assert (loading[0], loading[1]["error"]["code"]) == (409, "mode_switching")
        assert "the model is being loaded" in loading[1]["error"]["message"]
        gate.touch()
        serving.wait_ready()
        gate.unlink()
        assert switch(serving, {"mode": "context"})[0] == 202
        for mode in ("speed", "context", "balanced"):
            status, answer = switch(serving, {"mode": mode})
            assert (status, answer["error"]["code"]) == (409, "mode_switching")
            assert "mode 'context' is being switched to" in answer["error"]["message"]
        assert serving.chat()[0] == 200, "the earlier engine serves meanwhile"
        gate.touch()
        assert wait_switched(serving)["mode"] == "context"
        serving.terminate()


def test_it_is_refused_while_plans_are_measured(home: Home) -> None:
    home.set_engine("--load-seconds", "600", where="m.sock")  # of what is measured
    with home.serving(**FEW, tune="idle", idle_s="1", speculation="off") as serving:
        serving.wait_ready()
        serving.measure_now()
        serving.event("idle_measure")
        status, answer = switch(serving, {"mode": "context"})
        assert (status, answer["error"]["code"]) == (409, "mode_switching")
        assert "measured" in answer["error"]["message"]
        assert switch(serving, {"mode": "balanced"})[0] == 200
        serving.terminate()


def test_it_goes_before_measuring_that_waits(home: Home) -> None:
    with home.serving(**FEW, tune="idle", idle_s="600", speculation="off") as serving:
        serving.wait_ready()
        modes(serving)
        chat = serving.stream(max_tokens=5)  # so that measuring has to wait
        try:
            assert switch(serving, {"mode": "context"})[0] == 202
            assert serving.event("mode_changed")["mode"] == "context"
        finally:
            chat.close()
        assert wait_switched(serving)["tuning"] in ("waiting", "measuring")
        serving.terminate()


def test_an_engine_that_dies_as_it_loads_the_other_plan(home: Home) -> None:
    with home.serving(**FEW) as serving:
        serving.wait_ready()
        context = modes(serving)["context"]["context"]
        home.set_engine("--die-before-ready", "1", where=f"--ctx-size {context}")
        (pid,) = serving.engine_pids()
        with asking(serving, 2) as answers:
            assert switch(serving, {"mode": "context"})[0] == 202
            status = wait_switched(serving)
        assert {code for code, _ in answers} == {200}
        assert (status["mode"], status["mode_switch"]["mode"]) == ("balanced", "context")
        assert status["mode_switch"]["state"] == "failed"
        assert (
            "exited with code 1 before it was ready; the plan before it serves on" in status["mode_switch"]["message"]
        )
        assert serving.event("mode_failed")["mode"] == "context"
        assert serving.engine_pids() == [pid]
        home.set_engine()
        assert switch(serving, {"mode": "context"})[0] == 202, "it may be tried again"
        assert wait_switched(serving)["mode"] == "context"
        serving.terminate()


def test_the_command_shows_the_modes_and_waits_for_the_switch(home: Home) -> None:
    nobody = home.command("mode")
    assert (nobody.returncode, nobody.stderr.startswith("error: the appliance does not answer: ")) == (43, True)
    assert home.command("mode", "sped").returncode == 2
    with home.serving(**FEW) as serving:
        serving.wait_ready()
        context = modes(serving)["context"]["context"]
        shown = home.command("mode", beside=serving)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("* balanced ")
        assert f"  context   context {context:>9,}, decode " in shown.stdout
        done = home.command("mode", "context", "--json", beside=serving)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["mode"] == "context"
        home.set_engine("--die-before-ready", "1", where="--ctx-size")
        failed = home.command("mode", "speed", beside=serving)
        assert failed.returncode == 43
        assert "error: mode 'speed' cannot be served: its engine did not load: exited with code 1" in failed.stderr
        assert serving.chat()[0] == 200
        home.set_engine("--load-seconds", "600", where="--ctx-size")
        assert switch(serving, {"mode": "speed"})[0] == 202
        refused = home.command("mode", "balanced", beside=serving)
        assert (refused.returncode, "mode 'speed' is being switched to" in refused.stderr) == (43, True)
        serving.terminate()


# In place of the engine that serves


async def no_room(_start: StartInputs, _plan: Plan) -> str:
    return NO_ROOM


async def room(_start: StartInputs, _plan: Plan) -> str:
    return ""


async def alone(front: Front, mode: str) -> None:
    served = front.served
    assert served.upstream is not None
    await ModeSwitch(served, served.upstream, mode, no_room).run()


async def chat(front: Front) -> int:
    status, _ = await front.ask(messages=[{"role": "user", "content": "hi"}], model="any")
    return status


async def asked_while(front: Front, switching: asyncio.Task[None]) -> list[int]:
    """Return the statuses of clients that ask until the switch is over and a moment longer."""

    async def client() -> list[int]:
        found = []
        while not switching.done():
            found.append(await chat(front))
        return [*found, await chat(front)]

    found = await asyncio.gather(*(client() for _ in range(4)))
    return [status for statuses in found for status in statuses]


async def test_without_room_for_a_second_engine_requests_wait_and_none_is_lost(home: Home) -> None:
    home.set_engine("--load-seconds", "0.5", "--works-s", "0.1", "--sleeps")
    async with front_of(home, stall_timeout_s=60, patience_s=60, **FEW) as front:
        before = front.served.host.plan
        statuses = await asked_while(front, asyncio.create_task(alone(front, "context")))
        assert set(statuses) == {200}
        assert front.served.settings.mode == "context"
        assert front.served.host.plan != before
        assert front.served.host.supervisor is not None
        assert front.served.host.socket_path == front.served.socket_path, "the same place"


async def test_without_room_an_engine_that_dies_makes_place_for_the_one_before(home: Home) -> None:
    async with front_of(home, stall_timeout_s=60, patience_s=60, **FEW) as front:
        served = front.served
        wanted = served.start.in_mode("context").space().predicted
        home.set_engine("--die-before-ready", "1", where=f"--ctx-size {wanted.context}")
        before = served.host.plan
        statuses = await asked_while(front, asyncio.create_task(alone(front, "context")))
        assert set(statuses) == {200}
        assert (served.settings.mode, served.host.plan) == ("balanced", before)
        assert "exited with code 1 before it was ready; the plan before it serves again" in served.modes.failure
        assert served.modes.wanted is None


async def test_without_room_and_with_an_engine_that_never_comes_back(home: Home) -> None:
    async with front_of(home, stall_timeout_s=60, patience_s=60, **FEW) as front:
        home.set_engine("--die-before-ready", "1", where=" ")
        with pytest.raises(FatalError):
            await alone(front, "context")
        assert front.served.settings.mode == "balanced"
        assert await chat(front) == 503


async def test_a_program_that_cannot_be_started(home: Home) -> None:
    async with front_of(home, stall_timeout_s=60, patience_s=60, **FEW) as front:
        served, program = front.served, home.folder / "engine/llama-server"
        assert served.upstream is not None
        before = served.host.plan
        program.rename(home.folder / "away")
        await ModeSwitch(served, served.upstream, "context", room).run()
        assert str(program) in served.modes.failure
        assert (served.settings.mode, served.host.plan) == ("balanced", before)
        assert await chat(front) == 200
        with pytest.raises(FatalError):
            await alone(front, "context")  # the earlier plan needs the same program
        assert front.served.report.progress.phase is Phase.FAILED
        assert await chat(front) == 503


# vLLM reloads


def two_plans(served: ServedModel) -> Profile:
    """Return a profile with the plan that serves, and one that is much faster at a smaller context."""
    plan = served.host.plan
    assert plan is not None
    small = next(each for each in served.space.all() if each.key != plan.key)
    found = (measured(plan), measured(small, faster=3.0))
    return replace(profile(served.key), plan=plan, plans=(plan, small), measurements=found, native=plan.context)


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[VllmHome]:
    home = VllmHome.make(tmp_path / "home")
    yield home
    home.free_segments()


async def test_the_other_engine_reloads_too(vllm: VllmHome) -> None:
    async with front_of(vllm, stall_timeout_s=60, patience_s=60) as front:
        served = front.served
        before = served.host.plan
        served.profile = two_plans(served)
        switching = asyncio.create_task(alone(front, "speed"))
        assert set(await asked_while(front, switching)) == {200}
        assert served.host.plan is not None
        assert served.settings.mode == "speed"
        assert served.host.plan != before
        assert len(vllm.started) == 2
