"""Two models behind one gateway, each with a volume, a profile and an engine program of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import ollama
import openai
import pytest

from appliance.console.report import Report
from appliance.gateway.server import Gateway
from appliance.serve.engine.choose_plan import start_from_profile
from appliance.serve.gateway.listen import open_gateway
from appliance.serve.gateway.slot import ModelSlot, SlotState
from appliance.serve.gateway.stop import stoppable
from appliance.serve.life.bring_up import serve_model
from appliance.serve.model.served_model import ServedModel
from appliance.serve.open.open import open_slot
from appliance.settings import load_settings
from tests.ports import free_port
from tests.process.stages.boot import Home, short_folder
from tests.process.stages.engine import session_with
from tests.process.stages.supervisor import eventually

NAMES = ("left", "right")
MESSAGES: Any = [{"role": "user", "content": "one two three"}]
LIMIT_S = 300.0


class Front:
    """A client's view of the gateway, and the models behind it."""

    def __init__(self, homes: Sequence[Home], slots: Sequence[ModelSlot], gateway: Gateway) -> None:
        self.slots = slots
        self.gateway = gateway
        self.key = homes[0].key

    @property
    def left(self) -> ServedModel:
        return served_of(self.slots[0])

    @property
    def right(self) -> ServedModel:
        return served_of(self.slots[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.port}"

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, data=data, headers=headers) as reply,
        ):
            return reply.status, await reply.json()

    async def chat(self, name: str) -> tuple[int, Any]:
        return await self.ask("POST", "/v1/chat/completions", {"model": name, "messages": MESSAGES})

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=60)


def served_of(slot: ModelSlot) -> ServedModel:
    assert slot.served is not None
    return slot.served


async def engine_saw(served: ServedModel) -> list[dict[str, Any]]:
    """POSTs that the engine of this model was sent."""
    assert served.host.plan is not None
    command = served.command(served.host.plan, served.socket_path)
    async with session_with(command) as session, session.get("http://engine/fake/requests") as reply:
        seen: list[dict[str, Any]] = (await reply.json())["requests"]
    return [request for request in seen if request["method"] == "POST"]


def pid_of(served: ServedModel) -> int:
    assert served.host.supervisor is not None
    assert served.host.supervisor.pid is not None
    return served.host.supervisor.pid


@asynccontextmanager
async def one_gateway(homes: Sequence[Home]) -> AsyncIterator[Front]:
    """Serve both models behind one gateway, once both are ready. An error of either is raised at the end."""
    with short_folder() as runtime_dir:
        slots = list(_opened(homes, runtime_dir))
        report = Report("json", StringIO())
        async with (
            asyncio.timeout(LIMIT_S),
            stoppable(report, slots),
            open_gateway(slots[0].settings, report, slots) as gateway,
            _served(slots, gateway) as tasks,
        ):
            front = Front(homes, slots, gateway)
            await eventually(lambda: _is_ready(front, tasks), timeout_s=90)
            yield front


def _opened(homes: Sequence[Home], runtime_dir: Path) -> Iterator[ModelSlot]:
    port = str(free_port())
    for number, (home, name) in enumerate(zip(homes, NAMES, strict=True)):
        environment = home.environment(runtime_dir, alias=name, port=port, drain_s="0.2")
        settings, report = load_settings({}, environment), Report("json", StringIO())
        slot = open_slot(settings, environment, report, number=number)
        start_from_profile(served_of(slot))
        yield slot


@asynccontextmanager
async def _served(slots: Sequence[ModelSlot], gateway: Gateway) -> AsyncIterator[list[asyncio.Task[None]]]:
    pairs = zip(slots, gateway.backends, strict=True)
    tasks = [asyncio.create_task(serve_model(slot, backend)) for slot, backend in pairs]
    try:
        yield tasks
    finally:
        ended = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


async def _is_ready(front: Front, tasks: Sequence[asyncio.Task[None]]) -> bool:
    for task in tasks:
        if task.done():
            task.result()
    # The gateway is ready once the first one is.
    are_all = all(slot.state is SlotState.READY for slot in front.slots)
    return are_all and (await front.ask("GET", "/health/ready"))[0] == 200


@pytest.fixture
def homes(tuned: Home, tmp_path: Path) -> tuple[Home, Home]:
    """The left one has a profile, the right one has none."""
    return tuned.copy(tmp_path / "left"), Home.make(tmp_path / "right")


Homes = tuple[Home, Home]


async def test_a_request_goes_to_the_model_that_it_names_byte_for_byte(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        for name, served, other in (("left", front.left, front.right), ("right", front.right, front.left)):
            before = await engine_saw(other)
            body = (
                b'{ "messages" : [{"role":"user","content":"one \\u0074wo"}],\n "stream":false,"model":"%b"}'
                % name.encode()
            )
            status, answer = await front.ask("POST", "/v1/chat/completions", body)
            assert (status, answer["model"]) == (200, name)
            assert (await engine_saw(served))[-1]["body"] == body.decode()
            assert await engine_saw(other) == before
        assert pid_of(front.left) != pid_of(front.right)
        assert front.left.socket_path != front.right.socket_path


async def test_a_stream_comes_from_the_model_that_it_names(homes: Homes) -> None:
    async with one_gateway(homes) as front, front.openai() as client:
        for name in NAMES:
            events = await client.chat.completions.create(model=name, messages=MESSAGES, stream=True)
            assert {event.model async for event in events} == {name}


async def test_each_has_its_own_volume_and_what_is_shown_is_told_apart(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        status, document = await front.ask("GET", "/appliance/v1/status")
        assert status == 200
        assert (document["model"], document["from_profile"]) == ("left", True)  # without a name: the first one
        status, document = await front.ask("GET", "/appliance/v1/status?model=right")
        assert (status, document["model"], document["from_profile"]) == (200, "right", False)
        assert [len(list(home.profiles.glob("*.json"))) for home in homes] == [1, 0]
        status, document = await front.ask("GET", "/appliance/v1/status?model=middle")
        assert (status, document["error"]["code"]) == (404, "model_not_found")
        status, document = await front.ask("POST", "/appliance/v1/tuning?model=right")
        assert (status, document["error"]["code"]) == (409, "tuning_off")


async def test_the_list_names_all_models(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        async with front.openai() as client:
            found = (await client.models.list()).data
        assert [(model.id, model.object) for model in found] == [("left", "model"), ("right", "model")]
        # Both are of a file `small.gguf`: that name means neither, and is not listed.
        _, document = await front.ask("GET", "/v1/models")
        names = [(model["id"], *model["aliases"]) for model in document["data"]]
        assert names == [("left",), ("right",)]
        for of_one in names:
            assert [(await front.chat(name))[0] for name in of_one] == [200] * len(of_one)


async def test_ollamas_client_reaches_each_by_its_name(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        headers = {"Authorization": f"Bearer {front.key}"}
        async with ollama.AsyncClient(host=front.url, headers=headers, timeout=60) as client:
            assert [model.model for model in (await client.list()).models] == ["left", "right"]
            assert [model.model for model in (await client.ps()).models] == ["left", "right"]
            for name, served in (("left", front.left), ("right:latest", front.right)):
                parts = [part async for part in await client.chat(name, MESSAGES, stream=True)]
                assert {part.model for part in parts} == {name}
                assert json.loads((await engine_saw(served))[-1]["body"])["model"] == name.removesuffix(":latest")
            with pytest.raises(ollama.ResponseError, match="model 'middle' not found") as caught:
                await client.generate("middle", "one two")
            assert caught.value.status_code == 404
        assert await front.ask("POST", "/api/generate", {"prompt": "one"}) == (400, {"error": "model is required"})


async def test_an_unknown_model_is_refused_in_openais_form(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        async with front.openai() as client:
            with pytest.raises(
                openai.NotFoundError, match="`middle` does not exist: here are `left`, `right`"
            ) as caught:
                await client.chat.completions.create(model="middle", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("body", [{"messages": []}, b"no JSON", b"[1]", {"model": 3}, b""])
async def test_a_request_that_names_no_model_is_refused(homes: Homes, body: Any) -> None:
    async with one_gateway(homes) as front:
        status, document = await front.ask("POST", "/v1/chat/completions", body)
        assert (status, document["error"]["code"]) == (400, "model_required")


async def is_restarting(front: Front) -> bool:
    status, document = await front.ask("GET", "/health/ready")
    return status == 503 and document["phase"] == "restarting"


async def test_when_one_engine_is_killed_the_other_goes_on(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        async with front.openai() as client:
            events = await client.chat.completions.create(model="right", messages=MESSAGES, stream=True)
            may_load = homes[0].folder / "may-load"
            homes[0].set_engine("--load-until", str(may_load))
            killed, kept = pid_of(front.left), pid_of(front.right)
            os.kill(killed, signal.SIGKILL)
            await eventually(lambda: is_restarting(front))
            assert (await front.chat("right"))[0] == 200
            assert "".join([event.choices[0].delta.content or "" async for event in events])
        status, document = await front.chat("left")
        assert (status, document["error"]["code"]) == (503, "model_loading")
        may_load.touch()

        async def is_back() -> bool:
            assert (await front.chat("right"))[0] == 200
            return (await front.chat("left"))[0] == 200

        await eventually(is_back)
        assert (front.left.host.restarts, front.right.host.restarts) == (1, 0)
        assert pid_of(front.right) == kept


async def test_a_request_whose_body_still_comes_is_told_that_everything_stops(homes: Homes) -> None:
    async with one_gateway(homes) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.gateway.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {front.key}\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        await eventually(lambda: front.gateway.running == 1)
        await front.gateway.drain(0.1)
        assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in await reader.read()
        writer.close()
