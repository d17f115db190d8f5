"""A member: how long its load takes, and an engine that is given up at the moment at which it is unloaded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.errors import EngineDiedError, FatalError
from appliance.serve.fleet import member as module
from appliance.serve.fleet.member import SlotMember


class Stage:
    """A slot without an engine: `fails` ends its serving, and `may_stop` the stop of its engine."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fails, self.may_stop = asyncio.Event(), asyncio.Event()
        self.stops = 0
        self.lost: list[str] = []
        slot = cast("Any", SimpleNamespace(name="a", fleet_name="a", served=None))
        self.member = SlotMember(slot, cast("Any", None), is_pinned=False, on_lost=self._lose)
        patch.setattr(module, "load", self._load)
        patch.setattr(module, "tasks_of", lambda *_: {})
        patch.setattr(module, "serve_until_failure", self._serve)
        patch.setattr(module, "put_to_sleep", self._stop)

    def _lose(self, name: str, _error: FatalError) -> None:
        self.lost.append(name)

    async def _load(self, _slot: object) -> object:
        return SimpleNamespace(host=SimpleNamespace(load_s=1.0))

    async def _serve(self, *_: object) -> None:
        await self.fails.wait()
        message = "it died"
        raise EngineDiedError(message)

    async def _stop(self, _slot: object) -> None:
        self.stops += 1
        await self.may_stop.wait()


async def test_an_engine_that_is_given_up_is_told() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(patch)
        stage.may_stop.set()
        await stage.member.load()
        stage.fails.set()
        await asyncio.sleep(0.01)
        assert stage.lost == ["a"]
        assert stage.member.serving is None


async def test_one_that_is_given_up_while_it_is_unloaded_is_not_told_of_the_next_one() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stage = Stage(patch)
        await stage.member.load()
        stage.fails.set()
        await asyncio.sleep(0.01)
        assert stage.stops == 1
        unloading = asyncio.create_task(stage.member.unload())
        await asyncio.sleep(0.01)
        stage.may_stop.set()
        await unloading
        stage.fails.clear()
        await stage.member.load()
        await asyncio.sleep(0.01)
        assert stage.lost == []
        await stage.member.end()


def test_the_load_of_a_model_that_was_never_opened_is_estimated_by_its_files() -> None:
    slot = cast("Any", SimpleNamespace(name="a", fleet_name="a", served=None, size_bytes=4000 * 2**20))
    member = SlotMember(
        slot,
        cast("Any", None),
        is_pinned=False,
        on_lost=lambda *_: None,
    )
    assert member.reload_s == module.START_S + 4.0
    slot.size_bytes = None
    assert member.reload_s == module.START_S


@pytest.mark.parametrize(("prompts", "seconds"), [(None, 20.0), ("a folder", 20.0 * module.SHARE_ON_DISK)])
def test_a_conversation_that_comes_back_from_disk_costs_little_to_send_away(
    prompts: str | None, seconds: float
) -> None:
    plan = SimpleNamespace(speed=SimpleNamespace(prefill_tokens_per_s=100.0))
    served = SimpleNamespace(prompts=prompts, host=None)
    slot = cast("Any", SimpleNamespace(name="a", fleet_name="a", served=None))
    member = SlotMember(slot, cast("Any", None), is_pinned=False, on_lost=lambda *_: None)
    slot.plan, slot.served = plan, served
    member.cached_tokens = 2000
    assert member.cache_s == seconds
