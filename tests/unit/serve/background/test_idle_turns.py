"""Turns of a check give way to requests, to other models and to other programs."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from appliance.gateway.clients.traffic import Traffic
from appliance.serve.background.checks.idle_turns import IdleTurns
from appliance.serve.model.courtesy import LOOKS
from appliance.serve.model.served_model import ServedModel
from appliance.serve.model.sharing import Sharing

IDLE_S = 0.02
CROWD = "other programs take 60% of the CPUs"


@dataclass
class Settings:
    idle_s: float = IDLE_S


@dataclass
class Host:
    is_ready: bool = True
    supervisor: None = None


@dataclass
class Served:
    """What turns ask of a model. Its machine is crowded for as many looks as `busy`, and from `crowd_at` on."""

    busy: int = 0
    crowd_at: float | None = None  # seconds after a turn began
    looks: int = 0
    settings: Settings = field(default_factory=Settings)
    host: Host = field(default_factory=Host)
    sharing: Sharing = field(default_factory=Sharing)

    async def what_crowds(self) -> str:
        self.looks += 1
        return CROWD if self.looks <= self.busy else ""

    async def until_crowded(self) -> str:
        if self.crowd_at is None:
            await asyncio.Event().wait()
        await asyncio.sleep(self.crowd_at or 0.0)
        return CROWD


def turns(served: Served) -> IdleTurns:
    return IdleTurns(cast(ServedModel, served), alone=asyncio.Lock(), after_s=IDLE_S, limit_s=60.0)


async def work(seconds: float = 0.0) -> str:
    await asyncio.sleep(seconds)
    return "done"


async def waited(check: IdleTurns, traffic: Traffic) -> float:
    began = time.monotonic()
    await asyncio.wait_for(check.until_idle(traffic), 30)
    return time.monotonic() - began


async def test_a_quiet_machine_is_looked_at_once_in_a_pause() -> None:
    served, traffic = Served(), Traffic()
    check = turns(served)
    for _ in range(3):
        await waited(check, traffic)
        assert await check.take(work(), traffic) == "done"
    assert served.looks == 1


async def test_beside_other_programs_none_begins_until_they_end() -> None:
    served = Served(busy=2)
    assert await waited(turns(served), Traffic()) >= IDLE_S * (1 + 2)
    assert served.looks == 3


async def test_a_machine_that_is_never_quiet_is_waited_for_a_bounded_time() -> None:
    served = Served(busy=10**6, crowd_at=0.0)
    check, traffic = turns(served), Traffic()
    await waited(check, traffic)
    assert served.looks == LOOKS
    assert await check.take(work(0.05), traffic) == "done", "nothing ends it then"


async def test_other_programs_end_a_turn_and_the_next_one_waits_and_looks_again() -> None:
    served = Served(crowd_at=0.01)
    check, traffic = turns(served), Traffic()
    await waited(check, traffic)
    assert await check.take(work(10), traffic) is None
    assert await waited(check, traffic) >= IDLE_S / 2
    assert served.looks == 2
    assert check.left_s < 60.0


async def test_an_error_of_the_work_is_not_taken_for_a_crowd() -> None:
    async def broken() -> Any:
        raise LookupError(CROWD)

    served, traffic = Served(), Traffic()
    with pytest.raises(LookupError, match=CROWD):
        await turns(served).take(broken(), traffic)
