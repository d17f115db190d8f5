"""What the volume could not take, once it can again."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.console.report import Report
from appliance.errors import VolumeError
from appliance.profile import ProfileStore
from appliance.serve.model.unkept import Unkept
from tests.process.stages.supervisor import eventually


@pytest.mark.parametrize(("is_kept", "words"), [(True, "is on the volume now"), (False, "the one on the volume stays")])
async def test_it_is_told_what_is_on_the_volume(is_kept: bool, words: str) -> None:
    """The held profile is not kept if another container has meanwhile written a better or a pinned one."""
    log, profile = StringIO(), cast(Any, SimpleNamespace(key=SimpleNamespace(id="abc")))
    store = cast(ProfileStore, SimpleNamespace(save=lambda _: is_kept))
    unkept = Unkept(store, Report("json", log), try_every_s=0.01)
    unkept.hold(profile, VolumeError("full"))
    writing = asyncio.create_task(unkept.write())
    await eventually(lambda: "profile_kept" in log.getvalue())
    writing.cancel()
    (told,) = [event for event in map(json.loads, log.getvalue().splitlines()) if event["event"] == "profile_kept"]
    assert words in told["message"]
