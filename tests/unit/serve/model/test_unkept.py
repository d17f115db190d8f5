"""What the volume could not take, once it can again."""

from __future__ import annotations

import asyncio
import json
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.console.report import Report
from appliance.errors import VolumeError
from appliance.profile import Key, Profile, ProfileStore
from appliance.serve.model.unkept import Unkept
from appliance.tune.checkpoint import Partial
from tests.process.stages.supervisor import eventually


@pytest.mark.parametrize(("is_kept", "words"), [(True, "is on the volume now"), (False, "the one on the volume stays")])
async def test_it_is_told_what_is_on_the_volume(is_kept: bool, words: str) -> None:
    """The held profile is not kept if another container has meanwhile written a better or a pinned one."""
    log, profile = StringIO(), cast(Any, SimpleNamespace(key=SimpleNamespace(id="abc"), goes_on_from=None))
    store = cast(ProfileStore, SimpleNamespace(save=lambda _: is_kept))
    unkept = Unkept(store, Report("json", log), try_every_s=0.01)
    unkept.hold(profile, VolumeError("full"))
    writing = asyncio.create_task(unkept.write())
    await eventually(lambda: "profile_kept" in log.getvalue())
    writing.cancel()
    (told,) = [event for event in map(json.loads, log.getvalue().splitlines()) if event["event"] == "profile_kept"]
    assert words in told["message"]


async def test_a_held_profile_is_written_with_its_newest_checks() -> None:
    store = Slow()
    first, second = (cast(Any, SimpleNamespace(key=SimpleNamespace(id="abc"), goes_on_from=None)) for _ in range(2))
    unkept = Unkept(cast(ProfileStore, store), Report("json", StringIO()), try_every_s=0.01)
    unkept.exchange(first, second)
    assert not unkept.holds(second), "nothing is held yet"
    unkept.hold(first, VolumeError("full"))
    unkept.exchange(first, second)
    assert (unkept.holds(first), unkept.holds(second)) == (False, True)
    writing = asyncio.create_task(unkept.write())
    await eventually(lambda: bool(store.written))
    writing.cancel()
    assert store.written == [second]


class Slow:
    """A store whose writes wait until they are let go on."""

    folder = Path("/data/profiles")

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.written: list[Any] = []

    def keep(self, key: Key, partial: Partial) -> None:
        assert self.goes_on.wait(60)
        self.written.append((key, partial))

    def save(self, profile: Profile) -> bool:
        self.written.append(profile)
        return True


def results(name: str) -> tuple[Key, Partial]:
    return cast(Key, "key"), cast(Partial, name)


@pytest.mark.parametrize("goes_on_from", [None, "2026-11-29"])
async def test_results_do_not_follow_the_profile_that_replaces_them(goes_on_from: str | None) -> None:
    """The next tuning would go on from them and measure nothing."""
    store, profile = Slow(), cast(Any, SimpleNamespace(key="key", goes_on_from=goes_on_from))
    unkept = Unkept(cast(ProfileStore, store), Report("json", StringIO()))
    for name in ("first", "second", "third"):
        unkept.keep(*results(name))
    assert unkept.results(results("")[0]) == "third"
    saving = asyncio.create_task(unkept.save(profile))
    await asyncio.sleep(0)
    store.goes_on.set()
    assert await saving
    unkept.close(60)
    assert store.written[-1] is profile
    if goes_on_from:
        assert results("third") in store.written, "the next tuning goes on from them"


def test_a_stop_writes_the_newest_results() -> None:
    store = Slow()
    unkept = Unkept(cast(ProfileStore, store), Report("json", StringIO()))
    for name in ("first", "second", "third"):
        unkept.keep(*results(name))
    store.goes_on.set()
    unkept.close(60)
    assert store.written[-1] == results("third")
