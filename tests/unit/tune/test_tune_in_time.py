"""The end of a budget, told from a time limit of the work itself."""

from __future__ import annotations

import asyncio

import pytest

from appliance.tune.trials.engine import in_time


async def test_the_end_of_the_budget_is_none_and_what_ended_before_is_its_result() -> None:
    assert await in_time(0.01, asyncio.sleep(3600, "late")) is None
    assert await in_time(3600, asyncio.sleep(0, "soon")) == "soon"


async def test_a_time_limit_of_the_work_itself_is_no_end_of_the_budget() -> None:
    async def work() -> None:
        message = "the request took too long"
        raise TimeoutError(message)

    with pytest.raises(TimeoutError, match="the request took too long"):
        await in_time(3600, work())
