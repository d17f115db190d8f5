"""A side request must not cost the conversation: chat, side request, next turn, on the command line that a plan makes.

Small models of every kind of cache; what they answer is noise. Where something is lost all the same, the test says how
much: if an engine comes that loses less, it fails, and the words of the plan can go.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.engines.llama.planning.arguments.launch import launch_of
from tests.process.stages.slots import SYSTEM, Served, Turn, serving, words
from tests.shapes import SMALL, write_gguf

KINDS = ("gqa", "sliding", "delta-net", "mamba2")
CHAT = words(300)  # some 1,600 tokens: a token is a byte
TITLE = "Write a short title for a talk about history."
LONG_SYSTEM = words(200, begin=300)
KEPT = 0.95


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: write_gguf(folder / f"{kind}.gguf", SMALL[kind], with_data=True) for kind in KINDS}


async def chat_side_chat(
    server: Served, *, sides: int = 1, system: str = SYSTEM, side_system: str = "Name things.", text: str = CHAT
) -> tuple[Turn, Turn]:
    """Return the first turn and the one after the side requests. Each side request begins with other words."""
    talk = server.talk(system)
    first = await talk.say(text)
    assert first.prompt > 1500
    for number in range(sides):
        side = await server.talk(side_system).say(TITLE if number == 0 else words(30, begin=900 + 50 * number))
        assert side.read > 0
    return first, await talk.say("And then?")


def share(first: Turn, later: Turn) -> float:
    return later.cached / first.prompt


@pytest.mark.parametrize("parallel", ["1", "2", "4"])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_conversation_is_still_there(models: dict[str, Path], kind: str, parallel: str) -> None:
    async with serving(models[kind], parallel=parallel) as server:
        assert share(*await chat_side_chat(server)) >= KEPT


@pytest.mark.parametrize("kind", KINDS)
async def test_while_another_user_is_answered(models: dict[str, Path], kind: str) -> None:
    """The other user asks without a pause, so that he is still being answered at the end on any machine."""
    async with serving(models[kind], parallel="4") as server:
        talk = server.talk()
        first = await talk.say(CHAT)
        begun, enough = asyncio.Event(), asyncio.Event()

        async def ask_on() -> int:
            asked = 0
            while not enough.is_set():
                answer = asyncio.create_task(server.talk("Count.").say(words(60, begin=700 + asked), tokens=100))
                begun.set()
                await answer
                asked += 1
            return asked

        other = asyncio.create_task(ask_on())
        await begun.wait()
        await server.talk("Name things.").say(TITLE)
        later = await talk.say("And then?")
        enough.set()
        assert await other >= 1
    assert share(first, later) >= KEPT


@pytest.mark.parametrize("kind", ["gqa", "sliding", "delta-net"])
async def test_a_cache_that_is_too_small_for_the_conversation(models: dict[str, Path], kind: str) -> None:
    """The plan then keeps idle slots in the context; the engine's default loses all."""
    async with serving(models[kind], cache_ram_mib="2", parallel="4") as server:
        assert launch_of(server.plan).idle_slots_stay
        assert share(*await chat_side_chat(server, sides=3)) >= KEPT
    async with serving(models[kind], change={"idle_slots_stay": False}, cache_ram_mib="2", parallel="4") as server:
        assert share(*await chat_side_chat(server)) < 0.1


async def test_the_fourth_slot_and_the_only_one_are_needed_by_others(models: dict[str, Path]) -> None:
    """The plan's words say so: with a cache that is too small, one slot loses all at once, four at the fourth other."""
    async with serving(models["gqa"], cache_ram_mib="2", parallel="1") as server:
        assert "read anew after another request" in _said(server, "idle_slots")
        assert share(*await chat_side_chat(server)) < 0.1
    async with serving(models["gqa"], cache_ram_mib="2", parallel="4") as server:
        assert "the 4th other one needs its slot" in _said(server, "idle_slots")
        assert share(*await chat_side_chat(server, sides=4)) < 0.1


@pytest.mark.parametrize(("cache_mib", "parallel"), [("2", "2"), ("64", "1"), ("64", "2")])
async def test_a_side_request_with_the_same_short_system_prompt(
    models: dict[str, Path], cache_mib: str, parallel: str
) -> None:
    async with serving(models["gqa"], cache_ram_mib=cache_mib, parallel=parallel) as server:
        assert share(*await chat_side_chat(server, side_system=SYSTEM)) >= KEPT


@pytest.mark.parametrize("parallel", ["1", "4"])
async def test_a_side_request_with_the_same_long_system_prompt(models: dict[str, Path], parallel: str) -> None:
    """The shared prompt is more than half of the conversation. Its slot is taken unsaved, unless it is the only one."""
    async with serving(models["gqa"], cache_ram_mib="64", parallel=parallel) as server:
        sides = 2 if parallel == "1" else 1
        found = await chat_side_chat(server, system=LONG_SYSTEM, side_system=LONG_SYSTEM, text=words(160), sides=sides)
        if parallel == "1":
            assert share(*found) >= KEPT
        else:
            assert "a beginning that both share if that is more than half of it" in _said(server, "parallel")
            assert 0.5 < share(*found) < 0.6


@pytest.mark.parametrize("parallel", ["1", "2"])
async def test_two_conversations_that_do_not_fit_into_the_window_together(
    models: dict[str, Path], parallel: str
) -> None:
    """With one slot the prompt cache brings the first back. With more slots it finds no room, as the plan says."""
    async with serving(models["gqa"], cache_ram_mib="64", parallel=parallel, ctx_size="2560") as server:
        one, other = server.talk(), server.talk("Name things.")
        first = await one.say(CHAT)
        await other.say(words(300, begin=500))
        later = await one.say("And then?")
        if parallel == "1":
            assert share(first, later) >= KEPT
        else:
            assert "all of it if both do not fit into the context together" in _said(server, "parallel")
            assert later.cached == 0


def _said(server: Served, name: str) -> str:
    return next(f"{choice.reason}; {choice.detail}" for choice in server.plan.choices if choice.name == name)
